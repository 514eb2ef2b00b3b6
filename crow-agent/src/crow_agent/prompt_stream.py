"""The updates of a turn while it runs: for a loop, for `await`, and for a notebook."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from crow_core.acp.record import TurnRecord
from crow_core.acp.schema import AgentMessageChunk, SessionUpdate, TextBlock

from crow_agent.errors import AgentError
from crow_agent.notebook import LiveDisplay, find_display
from crow_agent.result import Result
from crow_agent.time_limit import TimeLimit

T = TypeVar("T")


class PromptStream(Generic[T]):
    """The updates of a turn, which starts when they are asked for. Leaving the loop early cancels the turn.

    `async for text in stream.text()` gets the agent's text, `async for update in stream` each update of ACP, `await
    stream` the result. In a notebook, a stream at the end of a cell shows the turn while it runs.
    """

    def __init__(
        self,
        send: Callable[[TimeLimit, Callable[[SessionUpdate], None]], Awaitable[Result[T]]],
        timeout: float | None,
    ) -> None:
        """`send` sends the prompt, and calls a function with each update of its turn."""
        self.result: Result[T] | None = None
        """The result of the turn, once all updates were received."""
        self._send = send
        self._timeout = timeout
        self._started = False
        self._reading: asyncio.Task[Result[T]] | None = None
        """Reads all updates, where nobody iterates over them."""

    def __repr__(self) -> str:
        state = "ended" if self.result is not None else "running" if self._started else "not started"
        return f"<PromptStream, {state}>"

    async def __aiter__(self) -> AsyncGenerator[SessionUpdate]:
        if self._started:
            raise AgentError("This stream was read already. Its result is in `result`; send the prompt again.")
        self._started = True
        updates: asyncio.Queue[SessionUpdate | None] = asyncio.Queue()
        turn = asyncio.ensure_future(self._send(TimeLimit(self._timeout), updates.put_nowait))
        turn.add_done_callback(lambda _: updates.put_nowait(None))
        try:
            while (update := await updates.get()) is not None:
                yield update
            self.result = turn.result()
        finally:
            turn.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody reads on
            if not turn.done():
                turn.cancel()
                await asyncio.wait([turn])

    async def text(self) -> AsyncGenerator[str]:
        """Iterate over the pieces of the agent's text; afterwards, `result` is the result of the turn.

        A message that follows another begins with an empty line. The agent's reasoning is left out. Raises as
        `AgentSession.prompt` does.
        """
        record = TurnRecord()
        async with aclosing(aiter(self)) as updates:
            async for update in updates:
                before = len(record.messages)
                record.add(update)
                match update:
                    case AgentMessageChunk(content=TextBlock(text=text)) if text:
                        yield f"\n\n{text}" if before and len(record.messages) > before else text
                    case _:
                        pass

    def __await__(self) -> Generator[Any, None, Result[T]]:
        return self.read().__await__()

    async def read(self, display: LiveDisplay | None = None) -> Result[T]:
        """Wait for the end of the turn and return its result. `display` shows the turn while it runs.

        Raises as `AgentSession.prompt` does.
        """
        if self.result is not None:
            return self.result
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read(display))
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())  # `await` raises it
        try:
            return await asyncio.shield(self._reading)
        except asyncio.CancelledError:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            raise

    async def _read(self, display: LiveDisplay | None) -> Result[T]:
        try:
            async with aclosing(aiter(self)) as updates:
                async for update in updates:
                    if display is not None:
                        display.add(update)
        except BaseException as error:
            if display is not None:
                display.finish(f"**{str(error) or type(error).__name__}**")
            raise
        assert self.result is not None
        if display is not None:
            display.finish(self.result.to_markdown())
        return self.result

    def _ipython_display_(self) -> None:
        """Show the turn in a notebook, and run it if it has not started."""
        display = find_display()
        if display is None or (self._started and self.result is None):
            print(repr(self))  # noqa: T201, as IPython does
        elif self.result is not None:
            display(self.result)
        else:
            self._reading = asyncio.ensure_future(self._read(LiveDisplay(display)))
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
