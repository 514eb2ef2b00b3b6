"""An agent for code that is not async: its event loop runs in a thread."""

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any, Generic, TypeVar, overload

from crow_core.acp.schema import SessionUpdate

from crow_agent.agent import Agent
from crow_agent.content import PromptContent
from crow_agent.errors import AgentClosed, AgentError
from crow_agent.notebook import LiveDisplay, find_display
from crow_agent.prompt_stream import PromptStream
from crow_agent.result import Result
from crow_agent.session import CANCEL_TIMEOUT, AgentSession

T = TypeVar("T")


def sync(agent: Agent) -> "BlockingAgent":
    """Make an agent usable without `await`: `with sync(Agent()) as agent: print(agent.prompt("…").text)`.

    It also works where an event loop runs, as in a notebook. The agent must not have been started elsewhere; its tools
    and functions run in the event loop of the thread.
    """
    return BlockingAgent(agent)


class BlockingPrompts:
    """Prompts of an agent or of a session, without `await`."""

    def __init__(self, source: Agent | AgentSession, owner: "BlockingAgent") -> None:
        self._source = source
        self._owner = owner

    @overload
    def prompt(self, prompt: PromptContent, *, timeout: float | None = None) -> Result[str]: ...

    @overload
    def prompt(
        self, prompt: PromptContent, *, output: type[T], retries: int = 2, timeout: float | None = None
    ) -> Result[T]: ...

    @overload
    def prompt(
        self, prompt: PromptContent, *, output: Any, retries: int = 2, timeout: float | None = None
    ) -> Result[Any]: ...

    def prompt(
        self, prompt: PromptContent, *, output: Any = None, retries: int = 2, timeout: float | None = None
    ) -> Result[Any]:
        """Send a prompt and wait for the end of its turn; an agent sends it to a new session."""
        return self._owner.wait(self._source.prompt(prompt, output=output, retries=retries, timeout=timeout))

    @overload
    def stream(self, prompt: PromptContent, *, timeout: float | None = None) -> "BlockingStream[str]": ...

    @overload
    def stream(
        self, prompt: PromptContent, *, output: type[T], retries: int = 2, timeout: float | None = None
    ) -> "BlockingStream[T]": ...

    @overload
    def stream(
        self, prompt: PromptContent, *, output: Any, retries: int = 2, timeout: float | None = None
    ) -> "BlockingStream[Any]": ...

    def stream(
        self, prompt: PromptContent, *, output: Any = None, retries: int = 2, timeout: float | None = None
    ) -> "BlockingStream[Any]":
        """Send a prompt; iterate over the result to get the updates of its turn, or over `.text()` for its text."""
        stream = self._source.stream(prompt, output=output, retries=retries, timeout=timeout)
        return BlockingStream[Any](self._owner, stream)


class BlockingAgent(BlockingPrompts):
    """An agent whose methods wait for their results. KeyboardInterrupt cancels what they wait for."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent, self)
        self.agent = agent
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="crow-agent", daemon=True)

    @overload
    def map(
        self, prompts: Iterable[PromptContent], *, at_once: int = 10, timeout: float | None = None
    ) -> list[Result[str]]: ...

    @overload
    def map(
        self,
        prompts: Iterable[PromptContent],
        *,
        at_once: int = 10,
        output: type[T],
        retries: int = 2,
        timeout: float | None = None,
    ) -> list[Result[T]]: ...

    @overload
    def map(
        self,
        prompts: Iterable[PromptContent],
        *,
        at_once: int = 10,
        output: Any,
        retries: int = 2,
        timeout: float | None = None,
    ) -> list[Result[Any]]: ...

    def map(
        self,
        prompts: Iterable[PromptContent],
        *,
        at_once: int = 10,
        output: Any = None,
        retries: int = 2,
        timeout: float | None = None,
    ) -> list[Result[Any]]:
        """Send each prompt to a session of its own, as `Agent.map` does."""
        return self.wait(self.agent.map(prompts, at_once=at_once, output=output, retries=retries, timeout=timeout))

    def session(self, id: str = "", *, cwd: str | Path = "") -> "BlockingSession":
        """Open a new session, or the stored one with this id. Raises SessionNotFound."""
        return BlockingSession(self, self.wait(self.agent.session(id, cwd=cwd)))

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run any coroutine of the agent and wait for its result. Raises AgentError where it would wait for itself."""
        try:
            if self._loop.is_closed():
                raise AgentClosed("This agent is closed. Make another one.")
            if current_thread() is self._thread:
                raise AgentError(
                    "A function of the agent waits for the agent. Make it async, and use the agent itself."
                )
        except AgentError:
            coroutine.close()
            raise
        if not self._thread.ident:
            self._thread.start()
        tasks: list[asyncio.Task[T]] = []
        done = Event()

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: done.set())

        self._loop.call_soon_threadsafe(start)
        try:
            done.wait()
        except BaseException:  # KeyboardInterrupt, or what another signal handler raises
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            done.wait(CANCEL_TIMEOUT)
            raise
        return tasks[0].result()

    def close(self) -> None:
        """Close the agent and end the thread. It may be called again."""
        if self._loop.is_closed():
            return
        try:
            self.wait(self.agent.close())
        finally:
            self._stop()

    def _stop(self) -> None:
        """End the thread."""
        try:
            self.wait(self._loop.shutdown_asyncgens())
            self.wait(self._loop.shutdown_default_executor())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> "BlockingAgent":
        try:
            self.wait(self.agent.open())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BlockingSession(BlockingPrompts):
    """One conversation with an agent, without `await`."""

    def __init__(self, owner: BlockingAgent, session: AgentSession) -> None:
        super().__init__(session, owner)
        self.session = session
        self.id = session.id

    def fork(self) -> "BlockingSession":
        """Open a new session that continues this one from here."""
        return BlockingSession(self._owner, self._owner.wait(self.session.fork()))

    def close(self) -> None:
        """Close the session; a stored one can be opened again by its id."""
        self._owner.wait(self.session.close())

    def __enter__(self) -> "BlockingSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BlockingStream(Generic[T]):
    """The updates of a turn, for an ordinary `for`. Leaving the loop early cancels the turn."""

    def __init__(self, owner: BlockingAgent, stream: PromptStream[T]) -> None:
        self._owner = owner
        self._stream = stream

    @property
    def result(self) -> Result[T] | None:
        """The result of the turn, once all updates were received."""
        return self._stream.result

    def _ipython_display_(self) -> None:
        """Run the turn, and show it in a notebook meanwhile."""
        display = find_display()
        if display is None:
            print(repr(self._stream))  # noqa: T201, as IPython does
        else:
            self._owner.wait(self._stream.read(LiveDisplay(display)))

    def __iter__(self) -> Iterator[SessionUpdate]:
        return self._read(aiter(self._stream))

    def text(self) -> Iterator[str]:
        """Iterate over the pieces of the agent's text, as `PromptStream.text` does."""
        return self._read(self._stream.text())

    def _read(self, pieces: Any) -> Iterator[Any]:
        """Iterate over an async generator."""

        async def get_next() -> Any:
            return await anext(pieces, None)

        try:
            while (piece := self._owner.wait(get_next())) is not None:
                yield piece
        finally:
            self._owner.wait(pieces.aclose())
