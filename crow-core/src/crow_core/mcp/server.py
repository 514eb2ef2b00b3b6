"""One MCP server: connect with FastMCP's client, call tools, answer the server's requests, disconnect, reconnect.

Importing FastMCP takes about a second, so it is imported in a thread when the first server is connected.
"""

import asyncio
import atexit
import importlib
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast
from uuid import uuid4
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec
from msgspec import UNSET

from crow_core import __version__
from crow_core.acp.schema import McpServer
from crow_core.masking import find_secrets, find_secrets_in_text, mask
from crow_core.mcp.result import ToolResult, limit_blocks
from crow_core.mcp.schemas import is_checkable
from crow_core.mcp.watchdog import MARK, ProcessWatchdog
from crow_core.messages.notes import ResultMeta
from crow_core.text import to_line
from crow_core.trace import TRACE_KEYS

if TYPE_CHECKING:
    from mcp.client.session import ClientRequestContext
    from mcp_types import (
        CallToolResult,
        CreateMessageRequestParams,
        CreateMessageResult,
        ElicitRequestParams,
        ElicitResult,
        LoggingMessageNotificationParams,
        SamplingMessage,
        ServerNotification,
    )

    from crow_core.mcp.sdk import CheckedClient

T = TypeVar("T")
Handler = Callable[[Any, Any], ToolResult | Awaitable[ToolResult]]
"""A function, plain or async, that runs a tool in this process: it is called with the `Session` and the `ToolCall`."""

logger = logging.getLogger("crow")

PRELOAD_DELAY = 0.2
"""Seconds from the start of a turn until the built-in tools are loaded. The delay starts again if this process used the
processor for half of it or more: loading would hold up what it is doing."""
START_TIMEOUT = 30.0
"""Seconds a server may take to list its tools once its process or connection is started."""
CALL_TIMEOUT = 600.0
"""Seconds a server that is not built in may be silent in a tool call; each progress notification starts them anew."""
CALL_LIMIT = 7200.0
"""Seconds a tool call may take in all, without those in which a question waits for the user."""
LIST_FIELDS = {
    "tools/list": "tools",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
}
"""The field of the answer that holds the items, for each request that lists something."""
BLOCK_FIELDS = {"tools/call": "content", "resources/read": "contents", "prompts/get": "messages"}
"""The field of the answer that holds content, of which there may be too much, for each request."""
METHOD_NOT_FOUND = -32601
"""The JSON-RPC error code for an unknown method."""
URL_ELICITATION_REQUIRED = -32042
"""The MCP error code of a tool call that requires the user to visit a page first."""
REASON_LIMIT = 4000
"""Characters of a server's error message that are used."""
EXIT_LIMIT = 5.0
"""Seconds that the end of the process waits at most for a thread that imports a module."""
STOP_GRACE = 1.0
"""Seconds a server may take to end; then all its processes are killed."""


class ConnectionLost(ConnectionError):
    """The connection to a server broke during a tool call."""


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

    async def elicit(
        self, server: "Server", params: "ElicitRequestParams", running: "RunningCall | None"
    ) -> "ElicitResult":
        """Ask the user."""
        ...

    async def sample(
        self, server: "Server", params: "CreateMessageRequestParams", running: "RunningCall | None"
    ) -> "CreateMessageResult":
        """Ask the model. Raises PermissionError, ValueError or ModelError with a sentence for the server."""
        ...

    async def complete(self, server: "Server", id: str) -> None:
        """Report that the user has finished on the page of this elicitation id."""
        ...

    async def log(self, server: "Server", params: "LoggingMessageNotificationParams") -> None:
        """Show or log a server's log message."""
        ...

    async def progress(
        self, server: "Server", done: float, total: float | None, message: str, running: "RunningCall"
    ) -> None:
        """Show the progress of a tool call."""
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
    may_repeat: bool = False
    """Whether to send the call again if the connection breaks: the tool only reads, or is idempotent."""
    last_activity: float = field(default_factory=monotonic)
    """The time at which the server last reported progress or got an answer, in seconds of the monotonic clock."""
    deadline: float = field(default_factory=lambda: monotonic() + CALL_LIMIT)
    """The time at which the call fails in any case, in seconds of the monotonic clock."""
    open_questions: int = 0
    """Requests of the server to its host that are not answered yet."""
    progress: str = ""
    """Progress that has not been shown yet."""
    tasks: "dict[str, asyncio.Task[Any]]" = field(default_factory=dict[str, "asyncio.Task[Any]"])
    """Tasks that are cancelled when the call ends."""
    context: Context = field(default_factory=copy_context)
    """The context of the turn that the call is a part of."""

    def seconds_left(self, silence: float) -> float:
        """Return the seconds until the call times out; while a question is open, `silence`."""
        if self.open_questions:
            return silence
        return min(self.last_activity + silence, self.deadline) - monotonic()


RUNNING_CALL: ContextVar[RunningCall | None] = ContextVar("running_call", default=None)
"""The tool call that the current task works for."""
SERVER_LOG = logging.getLogger("fastmcp.server.server")
"""Gets an error with its traceback from FastMCP for each tool that fails, in a server in this process."""


@dataclass(eq=False)
class Server:
    """One MCP server. It is connected when it is first needed, and again after its connection broke."""

    name: str
    source: Callable[[], Any] | None = None
    """Returns the transport, URL or server object for FastMCP's `Client`. None if there is nothing to connect: then
    `handlers` run the tools, and `definitions` holds them."""
    definitions: list[dict[str, Any]] | None = None
    """The tools, if they are known without connecting."""
    handlers: dict[str, Handler] = field(default_factory=dict[str, Handler], repr=False)
    """The functions that run the tools in this process, by the tools' names. An exception of one ends the turn."""
    built_in: bool = False
    """Whether it is part of the agent: its tools keep their bare names, and the metadata of its results is used."""
    shared: bool = False
    """Whether it serves several sessions and is not closed with any of them."""
    trust: bool = False
    """Whether the user's configuration trusts it: its read-only tools run without a permission."""
    allow: Sequence[str] = ("*",)
    """Shell patterns of the names of the tools that are offered."""
    deny: Sequence[str] = ()
    """Shell patterns of the names of tools that are not offered; they take precedence over `allow`."""
    timeout: float | None = None
    """Seconds it may be silent in a tool call; None means CALL_TIMEOUT, or no limit for a built-in server."""
    start_timeout: float | None = None
    """Seconds it may take to list its tools once it is started; None means START_TIMEOUT."""
    mode: Literal["auto", "legacy"] = "auto"
    """`auto` negotiates the version of MCP. `legacy` uses the handshake of versions before 2026, for servers that do
    not answer unknown requests."""
    mark: str = ""
    """The value of the environment variable MARK in its processes, if it is a command."""
    secrets: Collection[str] = field(default=(), repr=False)
    """Secret values that it was given: variables, headers, parts of its URL, tokens."""
    error: str = ""
    """The reason why it did not start, as a sentence."""
    warning: str = ""
    """The tools that were left out of its list, and why, as a sentence."""
    hosts: set[Host] = field(default_factory=set[Host], repr=False)
    """The hosts of the sessions that use it."""
    definition: Hashable = None
    """The definition under which sessions share it; None if they do not."""
    asks: bool = False
    """Whether it has asked its user or the model something without saying for which call, while several sessions used
    it. Then the calls of different sessions take turns, and no further session joins."""
    closed: bool = False
    """Whether its last session has left it: no further session joins. It would still be connected when needed."""
    changes: Counter[str] = field(default_factory=Counter[str], repr=False)
    """The number of times that its list of `tools`, `prompts` or `resources` may have changed."""
    listeners: list[Callable[[str], None]] = field(default_factory=list[Callable[[str], None]], repr=False)
    """Called with the name of a list that may have changed."""
    started: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set when its process or connection is being started, or cannot be. The import of FastMCP comes before."""
    start_time: float = 0.0
    """The time of that event, in seconds of the event loop's clock."""
    _connection: "asyncio.Task[CheckedClient] | None" = field(default=None, repr=False)
    _ending: "asyncio.Task[None] | None" = field(default=None, repr=False)
    """Ends the previous connection."""
    _watchdog: ProcessWatchdog | None = field(default=None, repr=False)
    _preloading: asyncio.TimerHandle | None = field(default=None, repr=False)
    _running: set[RunningCall] = field(default_factory=set[RunningCall], repr=False)
    _unclear: int = 0
    """The questions of the server that more than one session could be meant with."""
    _news: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set when a call has ended, or such a question has come; a new event replaces it then."""
    _tasks: "set[asyncio.Task[Any]]" = field(default_factory=set["asyncio.Task[Any]"], repr=False)
    """Background tasks: abandoned calls, notifications, subscriptions."""
    _listed: "tuple[int, list[dict[str, Any]]] | None" = field(default=None, repr=False)
    """The cached tool list, with the change counter it was fetched at."""
    _checkable: set[str] = field(default_factory=set[str], repr=False)
    """The tools whose results can be checked against their output schemas."""

    def preload(self) -> None:
        """Connect in the background once this process has little else to do."""
        if self._preloading is None and self._connection is None and self.source:
            loop = asyncio.get_running_loop()
            self._preloading = loop.call_later(PRELOAD_DELAY, self._preload_if_idle, process_time())

    def _preload_if_idle(self, before: float) -> None:
        self._preloading = None
        if process_time() - before < PRELOAD_DELAY / 2:
            self.connect()
        else:
            self.preload()

    async def client(self) -> "CheckedClient":
        """Return the connected client; connect first if necessary. Raises ConnectionError."""
        return await wait_for_client(self.connect())

    def connect(self) -> "asyncio.Task[CheckedClient]":
        """Return the task that connects the client; start a new one if there is none or its connection is dead.

        The task fails with a ConnectionError whose message is for the user.
        """
        if self._connection is not None and is_dead(self._connection):
            self.disconnect_soon(self._connection)
        if self._connection is None:
            self._watchdog = ProcessWatchdog(self.mark) if self.mark else None
            context = copy_context()
            context.run(RUNNING_CALL.set, None)  # a connection outlives the call that it was made for
            connecting = self._connect(self._ending)
            self.started.clear()
            self._connection = asyncio.get_running_loop().create_task(connecting, context=context)
            self._connection.add_done_callback(lambda _: self._mark_started())
        return self._connection

    def _mark_started(self) -> None:
        if not self.started.is_set():
            self.start_time = asyncio.get_running_loop().time()
            self.started.set()

    async def _connect(self, before: "asyncio.Task[None] | None") -> "CheckedClient":
        """Connect when the task that ends the previous connection is done."""
        if before is not None:
            await asyncio.wait([before])
        assert self.source is not None
        await run_in_thread(import_sdk)
        from mcp_types import Implementation

        from crow_core.mcp.sdk import CheckedClient

        client = CheckedClient(
            await run_in_thread(self.source),
            can_check=lambda tool: tool in self._checkable,
            filter_answer=self._filter_answer,
            name=self.name,
            init_timeout=self.effective_start_timeout,
            mode=self.mode,
            client_info=Implementation(name="crow", version=__version__),
            roots=self._roots,
            elicitation_handler=self._elicit,
            sampling_handler=self._sample,
            log_handler=self._log,
            message_handler=self._handle_notification,
        )
        self._mark_started()
        try:
            await client.__aenter__()
        except Exception as error:
            raise ConnectionError(f"{describe_error(error)}{stderr_tail(client, self.secrets)}") from error
        for what in ("tools", "prompts", "resources") if before is not None else ():
            self.mark_changed(what)  # it may be another program now
        self.keep_task(asyncio.ensure_future(follow_changes(client)))
        return client

    def _filter_answer(self, method: str, answer: dict[str, Any], version: str) -> dict[str, Any]:
        """Return the answer to a request without what the SDK takes long to validate, or would reject."""
        if (name := BLOCK_FIELDS.get(method)) and isinstance(blocks := answer.get(name), list):
            return {**answer, name: limit_blocks(cast("list[Any]", blocks))}
        return self._drop_invalid_items(method, answer, version)

    def _drop_invalid_items(self, method: str, answer: dict[str, Any], version: str) -> dict[str, Any]:
        """Return the answer to a request for a list without its invalid items: the SDK would reject the whole list."""
        from mcp_types.methods import validate_server_result  # imported with FastMCP

        if (what := LIST_FIELDS.get(method)) is None or not isinstance(items := answer.get(what), list):
            return answer

        def fault(items: Any) -> str:
            try:
                validate_server_result(method, version, {**answer, what: items})
            except ValueError as error:
                return describe_error(error)
            return ""

        if not fault(items) or fault([]):
            return answer
        faults = [(item, fault([item])) for item in cast("list[Any]", items)]
        reasons = mask("; ".join(f"{find_name(item)!r}: {why}" for item, why in faults if why), self.secrets)
        warning = f"MCP server {to_line(self.name)!r} has {what} that were left out: {reasons[:1000]}."
        if what == "tools":
            self.warning = warning
        else:
            logger.warning("%s", warning)
        return {**answer, what: [item for item, why in faults if not why]}

    @property
    def effective_start_timeout(self) -> float:
        """Seconds it may take to list its tools once it is started."""
        return START_TIMEOUT if self.start_timeout is None else self.start_timeout

    @property
    def connected(self) -> bool:
        """Whether it is connected, as far as is known."""
        return self._connection is not None and self._connection.done() and not is_dead(self._connection)

    async def list(self) -> list[dict[str, Any]]:
        """Return its tools in the form of tools/list. If that fails, set `error` and return an empty list."""
        if self.definitions is not None:
            return self.definitions
        if self._listed and self._listed[0] == self.changes["tools"]:
            return self._listed[1]
        connection, seconds, self.error, self.warning = self.connect(), self.effective_start_timeout, "", ""
        failed = "did not start" if self._listed is None else "did not list its new tools"
        try:
            await self.started.wait()
            async with asyncio.timeout(seconds):
                client = await wait_for_client(connection)
                changes = self.changes["tools"]
                tools = await list_or_empty(client.list_tools())
        except TimeoutError:
            self.error = f"MCP server {to_line(self.name)!r} did not answer within {seconds:.0f} s."
        except Exception as error:
            reason = mask(describe_error(error), self.secrets)
            self.error = f"MCP server {to_line(self.name)!r} {failed}: {reason[:1000]}."
        else:
            dumps = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools]
            offered = mask([dump for dump in dumps if self.offers(dump["name"])], self.secrets)
            self._listed = changes, offered
            self._checkable = {tool["name"] for tool in offered if is_checkable(tool.get("outputSchema") or {})}
            return offered
        if self._listed is None or is_dead(connection):  # else its earlier tools still work
            self.disconnect_soon(connection)
        return []

    def offers(self, tool: str) -> bool:
        """Whether `allow` and `deny` let a tool of this name through."""
        return any(fnmatchcase(tool, each) for each in self.allow) and not any(
            fnmatchcase(tool, each) for each in self.deny
        )

    async def call(
        self, tool: str, arguments: dict[str, Any], meta: dict[str, Any], running: RunningCall | None = None
    ) -> ToolResult:
        """Call a tool. Every failure is a result that the model can read."""
        if self.source is None:
            return ToolResult.error(f"Nothing answers calls of {tool!r}.")
        # Only built-in tools get the session's id and folder; other servers get the trace context alone.
        sent_meta = meta if self.built_in else {key: meta[key] for key in TRACE_KEYS if key in meta} or None
        running = running or RunningCall()
        while self.asks and any(other.host is not running.host for other in self._running):
            await self._news.wait()
        self._running.add(running)
        try:
            try:
                result = await self._attempt(tool, arguments, sent_meta, running)
            except ConnectionLost:
                if not running.may_repeat:
                    raise
                result = await self._attempt(tool, arguments, sent_meta, running)
            dump = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        except Exception as error:
            if pages := find_pages(error):
                return await self._send_to_pages(pages, running)
            return ToolResult.error(f"The tool failed: {mask(describe_error(error), self.secrets)}.")
        finally:
            self._running.discard(running)
            self._announce_news()
            for task in running.tasks.values():
                task.cancel()
        content: list[dict[str, Any]] = dump.get("content") or []
        if not content and (structured := dump.get("structuredContent")) is not None:
            content = [{"type": "text", "text": msgspec.json.encode(structured).decode()}]
        facts = cast(ResultMeta, dump.get("_meta") or {} if self.built_in else {})
        return ToolResult(content, bool(dump.get("isError")), facts)

    async def _attempt(
        self, tool: str, arguments: dict[str, Any], meta: dict[str, Any] | None, running: RunningCall
    ) -> "CallToolResult":
        """Send a tool call once. Raises ConnectionLost, TimeoutError, or the error that the server answered."""
        connection = self.connect()
        client = await wait_for_client(connection)

        async def handle_progress(progress: float, total: float | None, message: str | None) -> None:
            running.last_activity = monotonic()
            if running.host is not None and running in self._running:
                await running.host.progress(self, progress, total, message or "", running)

        silence = self.timeout or (None if self.built_in else CALL_TIMEOUT)
        running.last_activity = monotonic()
        context = running.context.copy()
        context.run(RUNNING_CALL.set, running)
        call = asyncio.get_running_loop().create_task(
            client.call_tool_mcp(tool, arguments, progress_handler=handle_progress, meta=meta), context=context
        )
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # a cancel may come when it has ended
        try:
            while not call.done():
                if silence is not None and running.seconds_left(silence) <= 0:
                    at_limit = running.deadline <= monotonic()
                    why = f"no call may take {CALL_LIMIT:g} s" if at_limit else f"nothing was heard for {silence:g} s"
                    raise TimeoutError(f"it timed out: {why}")
                await asyncio.wait([call], timeout=silence and running.seconds_left(silence))
            if call.cancelled():  # by the end of the connection
                raise ConnectionError
            return call.result()
        except Exception as error:
            if not is_broken(connection, error):
                raise
            self.disconnect_soon(connection)
            raise ConnectionLost(
                "the connection to its server broke, and it may have run all the same. Look before you call it again"
            ) from error
        finally:
            if not call.done():  # FastMCP sends the server a cancellation, which may take seconds
                call.cancel()
                self.keep_task(call)

    def announce_roots(self) -> None:
        """Tell a connected server that the roots have changed. A server of 2026 gets them with each call instead."""
        from mcp_types import RootsListChangedNotification
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

        if (connection := self._connection) is None or not connection.done() or is_dead(connection):
            return
        client = connection.result()
        if client.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS:
            self.keep_task(asyncio.ensure_future(client.session.send_notification(RootsListChangedNotification())))

    def keep_task(self, task: "asyncio.Task[Any]") -> None:
        """Keep a reference to a background task until it is done, and ignore its exception."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _send_to_pages(self, pages: "Sequence[ElicitRequestParams]", running: RunningCall) -> ToolResult:
        """Ask the user to visit the pages that a tool call requires. Returns the result of the call for the model."""
        for page in pages:
            answer = await running.host.elicit(self, page, running) if running.host else None
            if answer is None or answer.action != "accept":
                return ToolResult.error("The tool needs the user to visit a web page first, and they did not want to.")
        return ToolResult.error(
            "The tool needs the user to visit a web page first; they are on the way. "
            "Call it again once they say that it is done."
        )

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

    async def _ask_host(self, question: Callable[[Host, RunningCall | None], Coroutine[Any, Any, T]]) -> T:
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

    def _roots(self, context: Any) -> "list[str]":
        host, _ = self.find_host()
        known = {tuple(each.roots()) for each in ({host} if host else self.hosts)}
        return [*known.pop()] if len(known) == 1 else []

    async def _elicit(
        self, message: str, type: Any, params: "ElicitRequestParams", context: "ClientRequestContext"
    ) -> "ElicitResult":
        return await self._ask_host(lambda host, running: host.elicit(self, params, running))

    async def _sample(
        self, messages: "list[SamplingMessage]", params: "CreateMessageRequestParams", context: "ClientRequestContext"
    ) -> "CreateMessageResult":
        return await self._ask_host(lambda host, running: host.sample(self, params, running))

    async def _log(self, params: "LoggingMessageNotificationParams") -> None:
        if (host := self.find_host()[0]) is not None:
            await host.log(self, params)
        elif params.level not in ("debug", "info", "notice"):
            text = params.data if isinstance(params.data, str) else repr(params.data)
            logger.warning("MCP server %s: %s", to_line(self.name), to_line(mask(text, self.secrets))[:REASON_LIMIT])

    async def _handle_notification(self, message: "ServerNotification | Exception") -> None:
        """Record that a list has changed; tell the hosts that a page has been completed."""
        from mcp_types import (  # imported with FastMCP
            ElicitCompleteNotification,
            PromptListChangedNotification,
            ResourceListChangedNotification,
            ToolListChangedNotification,
        )

        match message:
            case ToolListChangedNotification():
                self.mark_changed("tools")
            case PromptListChangedNotification():
                self.mark_changed("prompts")
            case ResourceListChangedNotification():
                self.mark_changed("resources")
            case ElicitCompleteNotification(params=params):
                for host in [*self.hosts]:
                    await host.complete(self, params.elicitation_id)
            case _:
                pass

    def mark_changed(self, what: str) -> None:
        """Record that its list of `what` may have changed, and call the listeners."""
        self.changes[what] += 1
        for listener in self.listeners:
            listener(what)

    def disconnect_soon(self, connection: "asyncio.Task[CheckedClient] | None") -> None:
        """Start to end a connection if it still is this server's. The next call makes a new one."""
        if connection is not None and connection is self._connection:
            self._connection = None
            self._ending = asyncio.ensure_future(end_connection(connection, self._watchdog, self._ending))

    def leave(self, host: Host | None) -> None:
        """Note that a session no longer uses it. The last one leaves it closed, unless it is `shared`."""
        if host:
            self.hosts.discard(host)
        self.closed = not (self.shared or self.hosts)

    @property
    def names_calls(self) -> bool:
        """Whether its requests are known to come with the call that they belong to, as they do in MCP since 2026."""
        if self._connection is None or not self.connected:
            return False
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS  # imported already

        return self._connection.result().protocol_version in MODERN_PROTOCOL_VERSIONS

    async def close(self) -> None:
        """Disconnect. All processes of a command are ended."""
        if self._preloading is not None:
            self._preloading.cancel()
            self._preloading = None
        self.disconnect_soon(self._connection)
        if (ending := self._ending) is not None:
            await asyncio.shield(ending)
            self._ending = None if self._ending is ending else self._ending


SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[Hashable, Server]] = WeakKeyDictionary()
"""The servers that sessions of an event loop may share, by their definitions."""
ASKING: WeakKeyDictionary[asyncio.AbstractEventLoop, set[Hashable]] = WeakKeyDictionary()
"""The definitions of servers of which one has asked without saying for which call: they are not shared any more."""


def share_server(definition: Hashable, make: Callable[[], Server], *, must_name_calls: bool = False) -> Server:
    """Return the server with this definition that other sessions of the event loop use, or make it.

    `must_name_calls` refuses one of which it is not known that its questions reach the session that they are for.
    """
    loop = asyncio.get_running_loop()
    if definition in ASKING.get(loop, ()):
        return make()
    servers = SHARED.setdefault(loop, WeakValueDictionary())
    server = servers.get(definition)
    if server is None or server.closed or (must_name_calls and not server.names_calls):
        servers[definition] = server = make()
        server.definition = definition
    return server


async def end_connection(
    connection: "asyncio.Task[CheckedClient]", watchdog: ProcessWatchdog | None, before: "asyncio.Task[None] | None"
) -> None:
    """End a connection in any state, kill the processes it leaves, and wait for `before`, the end of an earlier one."""
    ending = asyncio.ensure_future(disconnect(connection))
    await asyncio.wait([ending], timeout=STOP_GRACE)
    if watchdog is not None:
        await asyncio.to_thread(watchdog.kill_marked)
    await asyncio.wait([ending] if before is None else [ending, before])


async def wait_for_client(connection: "asyncio.Task[CheckedClient]") -> "CheckedClient":
    """Return the client of a connection. Cancelling the connection task does not cancel its waiters.

    Raises ConnectionError, also when the connection task is cancelled.
    """
    await asyncio.wait([connection])
    if connection.cancelled():
        raise ConnectionError("it was given up")
    return connection.result()


async def disconnect(connection: "asyncio.Task[CheckedClient]") -> None:
    """Disconnect a client that may still be connecting."""
    connection.cancel()
    await asyncio.wait([connection])
    if not connection.cancelled() and not connection.exception():
        client = connection.result()
        with suppress(Exception):  # the connection ends either way
            await client.close()


def stderr_tail(client: "CheckedClient", secrets: Collection[str]) -> str:
    """Return the last line that a command wrote, to standard error or between its messages, as the end of a sentence.

    Returns an empty string if there is none.
    """
    lines = getattr(client.transport, "recent_output", b"").decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f". It said: {mask(to_line(last.strip()), secrets)[:300]}" if last else ""


def is_dead(connection: "asyncio.Task[CheckedClient]") -> bool:
    """Whether a connection has failed or ended; False while it is being made."""
    if not connection.done():
        return False
    return bool(connection.cancelled() or connection.exception() or connection.result().has_ended)


def is_broken(connection: "asyncio.Task[CheckedClient]", error: Exception) -> bool:
    """Whether a tool call failed with `error` because its connection ended."""
    from mcp_types import CONNECTION_CLOSED  # imported with FastMCP

    return is_dead(connection) or getattr(error, "code", None) == CONNECTION_CLOSED


async def follow_changes(client: "CheckedClient") -> None:
    """Subscribe to the list changes of a server of 2026, until the connection ends. Older servers always send them."""
    from mcp.client import subscriptions  # imported with FastMCP
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    can = client.server_capabilities
    if can is None or client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return
    tools, prompts, resources = (bool(part and part.list_changed) for part in (can.tools, can.prompts, can.resources))
    if tools or prompts or resources:
        async with subscriptions.listen(
            client.session,
            tools_list_changed=tools,
            prompts_list_changed=prompts,
            resources_list_changed=resources,
        ) as changes:
            async for _ in changes:
                pass  # `_handle_notification` gets each of them, too


async def list_or_empty(listing: Coroutine[Any, Any, list[T]]) -> list[T]:
    """Return what a server lists, or an empty list if it does not know the request."""
    try:
        return await listing
    except Exception as error:  # the SDK's own has a code; its class is not imported here
        if getattr(error, "code", None) == METHOD_NOT_FOUND:
            return []
        raise


def find_name(item: Any) -> str:
    """Return the name in an invalid item of a list, or a question mark."""
    match item:
        case {"name": str(name)}:
            return name
        case _:
            return "?"


def find_pages(error: Exception) -> "Sequence[ElicitRequestParams]":
    """Return the pages that the user has to visit before a tool call, if `error` says so."""
    if getattr(error, "code", None) != URL_ELICITATION_REQUIRED:
        return []
    from mcp.shared.exceptions import MCPError, UrlElicitationRequiredError  # imported with FastMCP

    with suppress(ValueError):
        return UrlElicitationRequiredError.from_error(error.error).elicitations if isinstance(error, MCPError) else []
    return []


@dataclass(eq=False)
class ServerSource:
    """The `source` of a server that a client or the configuration names: makes its transport."""

    config: McpServer
    cwd: str
    """The working directory of a command."""
    auth: Callable[[], Any] | None
    """Returns the object that logs in to a URL; None sends only the configured headers."""
    server: Server = field(init=False)
    """Set by `from_acp`."""

    def __call__(self) -> Any:
        from crow_core.mcp.oauth import NoLogin  # these import FastMCP
        from crow_core.mcp.remote import EVENT_LIMIT, HttpClientFactory, UrlTransport
        from crow_core.mcp.sdk import SSETransport
        from crow_core.mcp.stdio import CommandTransport

        config = self.config
        if config.url is UNSET:
            env = {} if config.env is UNSET else {variable.name: variable.value for variable in config.env or ()}
            env[MARK] = f"{os.environ.get(MARK, '')}:{self.server.mark}"
            args = () if config.args is UNSET else config.args or ()
            return CommandTransport(str(config.command), args, env, self.cwd, self.server.find_folder)
        headers = {} if config.headers is UNSET else {header.name: header.value for header in config.headers or ()}
        http, auth = (
            HttpClientFactory(self.server.find_folder, self._add_secret),
            self.auth() if self.auth else NoLogin(),
        )
        if config.type != "sse":
            return UrlTransport(str(config.url), headers, auth, http)
        http.limit = EVENT_LIMIT
        return SSETransport(str(config.url), headers, auth, httpx_client_factory=http)

    def _add_secret(self, authorization: str) -> None:
        """Mask the value of an `Authorization` header from now on."""
        self.server.secrets = {*self.server.secrets, *find_secrets_in_text(authorization, "authorization")}


def from_acp(config: McpServer, cwd: str, auth: Callable[[], Any] | None = None) -> Server:
    """Convert a server of ACP to a `Server`. `auth` returns the object that logs in to its URL."""
    source = ServerSource(config, cwd, auth)
    mark = uuid4().hex if config.url is UNSET else ""
    source.server = Server(config.name, source, mark=mark, secrets=find_secrets(config))
    return source.server


class ImportThread(threading.Thread):
    """A daemon thread that imports modules.

    Python ends a daemon thread in a way that aborts the process if the thread is in a function written in C++ or Rust.
    The process therefore stops the thread's imports at exit, and waits for the thread.
    """

    def start(self) -> None:
        atexit.register(self._end)
        super().start()

    def run(self) -> None:
        super().run()
        atexit.unregister(self._end)

    def _end(self) -> None:
        sys.meta_path.insert(0, cast("Any", self))
        self.join(EXIT_LIMIT)

    def find_spec(self, *_: object) -> None:
        """Raise SystemExit if this thread looks for another module: a method of the finders in `sys.meta_path`."""
        if threading.current_thread() is self:
            raise SystemExit


async def run_in_thread(function: Callable[[], T]) -> T:
    """Run a slow import in a thread, so that the process can exit while it runs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(value)  # pyright: ignore[reportArgumentType]

    def work() -> None:
        try:
            outcome = function(), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, *outcome)

    ImportThread(target=work, daemon=True, name="crow-import").start()
    return await future


def import_sdk() -> None:
    """Import the module `sdk`, and FastMCP with it. Blocks for about a second the first time."""
    importlib.import_module("crow_core.mcp.sdk")
    SERVER_LOG.addFilter(demote)


def demote(record: logging.LogRecord) -> bool:
    """Let a log line about a failed call of crow's have the level DEBUG, as the model reads the error."""
    if RUNNING_CALL.get() is None or record.levelno <= logging.INFO:
        return True
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return SERVER_LOG.isEnabledFor(logging.DEBUG)


def describe_error(error: BaseException) -> str:
    """Return an exception that a server caused as the end of a sentence."""
    match error:
        case BaseExceptionGroup(exceptions=[first, *_]):
            return describe_error(first)
        case FileNotFoundError(filename=str(command)):
            return f"the command {to_line(command)!r} was not found; check its name, or give its full path"
        case Exception(__cause__=(FileNotFoundError() | ConnectionError()) as cause):  # FastMCP wraps it
            return describe_error(cause)
        case ValueError() if hasattr(error, "errors"):  # pydantic's
            faults: Any = error
            fault: dict[str, Any] = faults.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            return to_line(f"what it sent does not keep to MCP ({place}: {fault['msg']})")[:REASON_LIMIT]
        case _:
            return to_line(str(error)[:REASON_LIMIT] or type(error).__name__).strip().rstrip(".")
