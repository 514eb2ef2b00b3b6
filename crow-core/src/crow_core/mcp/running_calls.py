"""The tool calls that a server has not answered yet, and the session that each request of the server is for."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from crow_core.mcp.result import ToolResult

if TYPE_CHECKING:
    from mcp.client.session import ClientRequestContext
    from mcp_types import (
        CreateMessageRequestParams,
        CreateMessageResult,
        ElicitRequestParams,
        ElicitResult,
        LoggingMessageNotificationParams,
    )

T = TypeVar("T")

CALL_LIMIT = 7200.0
"""Seconds a tool call may take in all, without those in which a question waits for the user."""
TASK_LIMIT = 86_400.0
"""Seconds a tool call may take that its server runs as a task, without those in which a question waits."""


class AskingServer(Protocol):
    """A server that makes a request, as its host knows it."""

    name: str


class Host(Protocol):
    """Answers the requests of MCP servers (MCP calls this side the host). A session's `Bridge` is one.

    `running` is the tool call that a request belongs to, or None where that is unknown.
    """

    def roots(self) -> Sequence[str]:
        """Return the folders to work in, as `file:` URIs."""
        ...

    def folder(self) -> Path:
        """Return the folder for answers that are too long."""
        ...

    def shows_apps(self) -> bool:
        """Return whether the client shows MCP Apps."""
        ...

    async def elicit(
        self, server: AskingServer, params: "ElicitRequestParams", running: "RunningCall | None"
    ) -> "ElicitResult": ...

    async def sample(
        self, server: AskingServer, params: "CreateMessageRequestParams", running: "RunningCall | None"
    ) -> "CreateMessageResult":
        """Ask the model. Raises PermissionError, ValueError or ModelError with a sentence for the server."""
        ...

    async def complete(self, server: AskingServer, id: str) -> None:
        """Report that the user has finished on the page of this elicitation id."""
        ...

    async def log(self, server: AskingServer, params: "LoggingMessageNotificationParams") -> None:
        """Show or log a server's log message."""
        ...

    async def progress(
        self, server: AskingServer, done: float, total: float | None, message: str, running: "RunningCall"
    ) -> None: ...

    def find_task(self, server: AskingServer, running: "RunningCall") -> str:
        """Return the id of the task as which the server runs the call since an earlier process; "" if there is none."""
        ...

    async def keep_task(self, server: AskingServer, running: "RunningCall") -> None:
        """Store the id of the task as which the server runs a call."""
        ...

    def leaves_task(self) -> bool:
        """Return True if the task of a call that is cancelled now goes on: a later turn gets its result."""
        ...


@dataclass(eq=False)
class RunningCall:
    """A tool call that has been sent to a server and is not answered yet."""

    host: Host | None = None
    """Answers the requests that the server makes during the call."""
    id: str = ""
    """The id of the tool call."""
    title: str = ""
    """The title that the client shows."""
    silence: float | None = None
    """Seconds for which the server may be silent; None for no limit."""
    may_repeat: bool = False
    """True if to send the call again if the connection breaks: the tool only reads, or is idempotent."""
    last_activity: float = field(default_factory=monotonic)
    """The time at which the server last reported progress or got an answer, in seconds of the monotonic clock."""
    deadline: float = field(default_factory=lambda: monotonic() + CALL_LIMIT)
    """The time at which the call fails in any case, in seconds of the monotonic clock."""
    open_questions: int = 0
    """Requests of the server to its host that are not answered yet."""
    progress: str = ""
    """Progress that has not been shown yet."""
    task: str = ""
    """The id of the task as which the server runs the call (the extension of MCP); empty if it does not."""
    tasks: "dict[str, asyncio.Task[Any]]" = field(default_factory=dict[str, "asyncio.Task[Any]"])
    """Tasks of this process that are cancelled when the call ends."""
    context: Context = field(default_factory=copy_context)
    """The context of the turn that the call is a part of."""

    def note_activity(self) -> None:
        """Start to count the silence of the server anew."""
        self.last_activity = monotonic()

    def seconds_left(self) -> float | None:
        """Return the seconds until the call times out; while a question is open, `silence`. None for no limit."""
        if self.open_questions or self.silence is None:
            return self.silence
        return min(self.last_activity + self.silence, self.deadline) - monotonic()

    async def wait_for(self, task: "asyncio.Future[Any]") -> None:
        """Wait until a task is done. Raises TimeoutError if the call times out before."""
        while not task.done():
            if (seconds := self.seconds_left()) is not None and seconds <= 0:
                raise TimeoutError(f"it timed out: {self.explain_timeout()}")
            await asyncio.wait([task], timeout=seconds)

    def explain_timeout(self) -> str:
        """Return why the call times out now, as the end of a sentence."""
        at_limit = self.deadline <= monotonic()
        limit = TASK_LIMIT if self.task else CALL_LIMIT
        return f"no call may take {limit:g} s" if at_limit else f"nothing was heard for {self.silence:g} s"

    async def send_to_pages(self, server: AskingServer, pages: "Sequence[ElicitRequestParams]") -> ToolResult:
        """Ask the user to visit the pages that the call requires. Returns the result of the call for the model."""
        for page in pages:
            answer = await self.host.elicit(server, page, self) if self.host else None
            if answer is None or answer.action != "accept":
                return ToolResult.error("The tool needs the user to visit a web page first, and they did not want to.")
        return ToolResult.error(
            "The tool needs the user to visit a web page first; they are on the way. "
            "Call it again once they say that it is done."
        )


RUNNING_CALL: ContextVar[RunningCall | None] = ContextVar("running_call", default=None)
"""The tool call that the current task works for."""
ASKING: WeakKeyDictionary[asyncio.AbstractEventLoop, set[Hashable]] = WeakKeyDictionary()
"""The definitions of servers that have asked without naming the call: they are not shared any more."""


@dataclass(eq=False)
class RunningCalls:
    """The tool calls in progress on one server, of all sessions that use it."""

    hosts: set[Host] = field(default_factory=set[Host])
    """The hosts of the sessions that use the server."""
    definition: Hashable = None
    """The definition under which sessions share the server; None if they do not."""
    asks: bool = False
    """True if the server has asked its user or the model something without saying for which call, while several
    sessions used it. Then the calls of different sessions take turns, and no further session joins."""
    _running: set[RunningCall] = field(default_factory=set[RunningCall])
    _unclear: int = 0
    """The questions of the server that more than one session could be meant with."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a call has ended, or such a question has come; a new event replaces it then."""

    def __contains__(self, running: RunningCall) -> bool:
        return running in self._running

    async def begin(self, running: RunningCall) -> None:
        """Add a call; wait for its turn before."""
        while self.asks and any(other.host is not running.host for other in self._running):
            await self._news.wait()
        self._running.add(running)

    def end(self, running: RunningCall) -> None:
        """Remove a call, and cancel its tasks."""
        self._running.discard(running)
        self._announce_news()
        for task in running.tasks.values():
            task.cancel()

    def find_host(self) -> tuple[Host | None, RunningCall | None]:
        """Return the host that a request of the server is for, and the tool call, where they are known.

        A request that comes without the context of a call belongs to the only call in progress, if there is one.
        """
        if (running := RUNNING_CALL.get()) is not None:
            return running.host, running if running in self._running else None
        hosts = {running.host for running in self._running if running.host} or self.hosts
        running = next(iter(self._running)) if len(self._running) == 1 else None
        return (next(iter(hosts)), running) if len(hosts) == 1 else (None, None)

    def find_folder(self) -> Path | None:
        """Return the folder of the only session that an answer can be for, or None."""
        host, _ = self.find_host()
        return host.folder() if host else None

    def find_roots(self, context: "ClientRequestContext | None" = None) -> list[str]:
        """Return the roots for a request of the server; none if it could be for sessions with different ones."""
        host, _ = self.find_host()
        known = {tuple(each.roots()) for each in ({host} if host else self.hosts)}
        return [*known.pop()] if len(known) == 1 else []

    def _announce_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _wait_until_clear(self) -> None:
        """Wait, where calls of several sessions are in progress, until those of one are left: the one that has asked
        is waiting. Returns early if each of the calls waits for an answer, so that none can end."""
        if RUNNING_CALL.get() is not None or len(self.hosts) < 2:
            return
        self.asks = True
        ASKING.setdefault(asyncio.get_running_loop(), set()).add(self.definition)
        self._unclear += 1
        self._announce_news()
        try:
            while len({running.host for running in self._running}) > 1:
                if self._unclear + sum(running.open_questions for running in self._running) >= len(self._running):
                    return
                await self._news.wait()
        finally:
            self._unclear -= 1

    async def ask_host(self, question: Callable[[Host, RunningCall | None], Coroutine[Any, Any, T]]) -> T:
        """Pass a request of the server to its host and return the answer. The clock of the tool call stops meanwhile.

        Raises LookupError if the host is unknown, and TimeoutError if the call ends before the answer.
        """
        await self._wait_until_clear()
        host, running = self.find_host()
        if host is None:
            raise LookupError("There is nobody to ask, or more than one that could be meant: call again.")
        task = asyncio.get_running_loop().create_task(
            question(host, running), context=running.context.copy() if running else copy_context()
        )
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        since, key = monotonic(), uuid4().hex
        if running is not None:
            running.tasks[key] = task
            running.open_questions += 1
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            if running is not None:
                del running.tasks[key]
                running.open_questions -= 1
                running.last_activity = monotonic()
                running.deadline += running.last_activity - since
        if task.cancelled():  # raising CancelledError here would end the connection
            raise TimeoutError("The call that it was asked for has ended.")
        return task.result()
