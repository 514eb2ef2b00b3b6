"""One MCP server: connect with FastMCP's client, list tools, call them, answer requests, disconnect, reconnect."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from time import process_time
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from crow_core.masking import mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.running_calls import RUNNING_CALL, Host, RunningCall, RunningCalls
from crow_core.mcp.schemas import is_checkable
from crow_core.mcp.sdk_import import import_sdk, run_in_thread
from crow_core.mcp.server_answers import (
    LIST_FIELDS,
    REASON_LIMIT,
    describe_error,
    filter_answer,
    find_pages,
    list_or_empty,
)
from crow_core.mcp.server_connection import (
    end_connection,
    follow_changes,
    follow_resources,
    is_broken,
    is_dead,
    stderr_tail,
    wait_for_client,
)
from crow_core.mcp.watchdog import ProcessWatchdog
from crow_core.messages.tool_metadata import ResultMeta
from crow_core.text import to_line
from crow_core.trace import TRACE_KEYS
from crow_core.version import __version__

if TYPE_CHECKING:
    from mcp.client.session import ClientRequestContext, ClientSession
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
RECONNECTS = 5
"""Attempts to send a call, or to ask for its task, while the connection breaks each time."""


class ConnectionLost(ConnectionError):
    """The connection to a server broke during a tool call."""


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
    """True if it is part of the agent: its tools keep their bare names, and the metadata of its results is used."""
    shared: bool = False
    """True if it serves several sessions and is not closed with any of them."""
    trust: bool = False
    """True if the user's configuration trusts it: its read-only tools run without a permission."""
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
    advice: str = ""
    """A sentence that ends `error`: what the user can do if it does not start."""
    warning: str = ""
    """The tools that were left out of its list, and why, as a sentence."""
    calls: RunningCalls = field(default_factory=RunningCalls, repr=False)
    """Its calls in progress, and the hosts of the sessions that use it."""
    closed: bool = False
    """True if its last session has left it: no further session joins. It would still be connected when needed."""
    changes: Counter[str] = field(default_factory=Counter[str], repr=False)
    """The number of times that its list of `tools`, `prompts` or `resources` may have changed, or the resource of a
    URI."""
    listeners: list[Callable[[str], None]] = field(default_factory=list[Callable[[str], None]], repr=False)
    """Called with the name of a list that may have changed, or the URI of a resource."""
    followed: set[str] = field(default_factory=set[str], repr=False)
    """The URIs of the resources whose changes are subscribed to."""
    skill_files: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    """The digests of the files of its skills, by URI, as it has listed them (see `served_skills`)."""
    started: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set when its process or connection is being started, or cannot be. The import of FastMCP comes before."""
    start_time: float = 0.0
    """The time of that event, in seconds of the event loop's clock."""
    _connection: "asyncio.Task[CheckedClient] | None" = field(default=None, repr=False)
    _ending: "asyncio.Task[None] | None" = field(default=None, repr=False)
    """Ends the previous connection."""
    _watchdog: ProcessWatchdog | None = field(default=None, repr=False)
    _preloading: asyncio.TimerHandle | None = field(default=None, repr=False)
    _following: "asyncio.Task[None] | None" = field(default=None, repr=False)
    """Follows the resources in `followed`."""
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
            follow_task=self._follow_task,
            name=self.name,
            init_timeout=self.effective_start_timeout,
            mode=self.mode,
            client_info=Implementation(name="crow", version=__version__),
            shows_apps=any(host.shows_apps() for host in self.calls.hosts),
            roots=self.calls.find_roots,
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
        for what in ("tools", "prompts", "resources", *self.followed) if before is not None else ():
            self.mark_changed(what)  # it may be another program now
        self.keep_task(asyncio.ensure_future(follow_changes(client)))
        self._follow(client)
        return client

    def _filter_answer(self, method: str, answer: dict[str, Any], version: str) -> dict[str, Any]:
        """Return the usable part of the answer to a request, and warn of left-out items."""
        answer, faults = filter_answer(method, answer, version)
        if faults:
            what, reasons = LIST_FIELDS[method], mask(faults, self.secrets)[:1000]
            warning = f"MCP server {to_line(self.name)!r} has {what} that were left out: {reasons}."
            if what == "tools":
                self.warning = warning
            else:
                logger.warning("%s", warning)
        return answer

    @property
    def effective_start_timeout(self) -> float:
        """Seconds it may take to list its tools once it is started."""
        return START_TIMEOUT if self.start_timeout is None else self.start_timeout

    @property
    def connected(self) -> bool:
        """True if it is connected, as far as is known."""
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
            self.error = f"MCP server {to_line(self.name)!r} did not answer within {seconds:.0f} s.{self.advice}"
        except Exception as error:
            reason = mask(describe_error(error), self.secrets)
            self.error = f"MCP server {to_line(self.name)!r} {failed}: {reason[:1000]}.{self.advice}"
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
        """True if `allow` and `deny` let a tool of this name through."""
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
        await self.calls.begin(running)
        try:
            running.task = running.host.find_task(self, running) if running.host else ""
            result = await self._send_call(tool, arguments, sent_meta, running)
            dump = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        except Exception as error:
            if pages := find_pages(error):
                return await running.send_to_pages(self, pages)
            return ToolResult.error(f"The tool failed: {mask(describe_error(error), self.secrets)}.")
        finally:
            self.calls.end(running)
        content: list[dict[str, Any]] = dump.get("content") or []
        if not content and (structured := dump.get("structuredContent")) is not None:
            content = [{"type": "text", "text": msgspec.json.encode(structured).decode()}]
        facts = cast(ResultMeta, dump.get("_meta") or {} if self.built_in else {})
        for_apps = {} if self.built_in else {key: dump[key] for key in ("structuredContent", "_meta") if key in dump}
        return ToolResult(content, bool(dump.get("isError")), facts, for_apps)

    async def _send_call(
        self, tool: str, arguments: dict[str, Any], meta: dict[str, Any] | None, running: RunningCall
    ) -> "CallToolResult":
        """Send a tool call; send it again after its connection broke if it may be repeated. A task is only followed.

        Raises ConnectionError, TimeoutError, or the error that the server answered.
        """
        running.silence = self.timeout or (None if self.built_in else CALL_TIMEOUT)
        attempt, lost = 0, None
        while True:
            attempt += 1
            try:
                if attempt > 1:  # the server is silent while it cannot be reached again
                    await running.wait_for(self.connect())
                return await self._attempt(tool, arguments, meta, running)
            except ConnectionError as error:
                lost = error if isinstance(error, ConnectionLost) else lost
                final = lost or error
                if attempt == RECONNECTS or not (running.task or (running.may_repeat and attempt == 1 and lost)):
                    raise final from final.__cause__
                await asyncio.sleep(attempt - 1)  # the server may be starting again

    async def _attempt(
        self, tool: str, arguments: dict[str, Any], meta: dict[str, Any] | None, running: RunningCall
    ) -> "CallToolResult":
        """Send a tool call once. Raises ConnectionLost, TimeoutError, or the error that the server answered."""
        connection = self.connect()
        client = await wait_for_client(connection)

        async def handle_progress(progress: float, total: float | None, message: str | None) -> None:
            running.note_activity()
            if running.host is not None and running in self.calls:
                await running.host.progress(self, progress, total, message or "", running)

        running.note_activity()
        context = running.context.copy()
        context.run(RUNNING_CALL.set, running)
        sent = (
            self._follow_task(running.task, client.session)
            if running.task
            else client.call_tool_mcp(tool, arguments, progress_handler=handle_progress, meta=meta)
        )
        call = asyncio.get_running_loop().create_task(sent, context=context)
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # a cancel may come when it has ended
        try:
            await running.wait_for(call)
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
                if running.task and not (running.host and running.host.leaves_task()):
                    from crow_core.mcp.call_tasks import cancel_task  # imported already

                    self.keep_task(asyncio.ensure_future(cancel_task(client.session, running.task)))

    async def _follow_task(self, task: str, session: "ClientSession") -> "CallToolResult":
        """Return the result of the current call, which the server runs as a task. Store the task first if it is new."""
        from crow_core.mcp.call_tasks import follow_task  # imports the SDK

        running = RUNNING_CALL.get()
        assert running is not None
        if running.task != task:
            running.task = task
            if running.host is not None:
                await running.host.keep_task(self, running)
        return await follow_task(self, session, running)

    async def follow_resource(self, uri: str) -> None:
        """Subscribe to a resource; `changes` counts its updates. Raises ConnectionError."""
        client = await self.client()
        if uri not in self.followed:
            self.followed.add(uri)
            self._follow(client)

    def _follow(self, client: "CheckedClient") -> None:
        """Subscribe to the resources in `followed`."""
        if self.followed:
            following = follow_resources(client, sorted(self.followed), self._following)
            self._following = asyncio.ensure_future(following)
            self.keep_task(self._following)

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

    async def _elicit(
        self, message: str, type: Any, params: "ElicitRequestParams", context: "ClientRequestContext"
    ) -> "ElicitResult":
        return await self.calls.ask_host(lambda host, running: host.elicit(self, params, running))

    async def _sample(
        self, messages: "list[SamplingMessage]", params: "CreateMessageRequestParams", context: "ClientRequestContext"
    ) -> "CreateMessageResult":
        return await self.calls.ask_host(lambda host, running: host.sample(self, params, running))

    async def _log(self, params: "LoggingMessageNotificationParams") -> None:
        if (host := self.calls.find_host()[0]) is not None:
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
            ResourceUpdatedNotification,
            ToolListChangedNotification,
        )

        match message:
            case ToolListChangedNotification():
                self.mark_changed("tools")
            case PromptListChangedNotification():
                self.mark_changed("prompts")
            case ResourceListChangedNotification():
                self.mark_changed("resources")
            case ResourceUpdatedNotification(params=params):
                self._mark_resource(str(params.uri))
            case ElicitCompleteNotification(params=params):
                for host in [*self.calls.hosts]:
                    await host.complete(self, params.elicitation_id)
            case _:
                pass

    def mark_changed(self, what: str) -> None:
        """Record that its list or resource `what` may have changed, and call the listeners."""
        self.changes[what] += 1
        for listener in self.listeners:
            listener(what)

    def _mark_resource(self, uri: str) -> None:
        """Record that a resource has changed, if it is followed or a part of one that is."""
        for each in self.followed:
            if uri == each or uri.startswith(f"{each.rstrip('/')}/"):
                self.mark_changed(each)

    def disconnect_soon(self, connection: "asyncio.Task[CheckedClient] | None") -> None:
        """Start to end a connection if it still is this server's. The next call makes a new one."""
        if connection is not None and connection is self._connection:
            self._connection = None
            self._ending = asyncio.ensure_future(end_connection(connection, self._watchdog, self._ending))

    def leave(self, host: Host | None) -> None:
        """Note that a session no longer uses it. The last one leaves it closed, unless it is `shared`."""
        if host:
            self.calls.hosts.discard(host)
        self.closed = not (self.shared or self.calls.hosts)

    @property
    def names_calls(self) -> bool:
        """True if its requests are known to come with the call that they belong to, as they do in MCP since 2026."""
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
