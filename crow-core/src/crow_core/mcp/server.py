"""One MCP server: connected through FastMCP's client, called, heard, ended with all it started, and connected anew.

FastMCP is large, so it is imported when the first server has to be connected, in a thread, while the model thinks.
"""

import asyncio
import importlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast
from uuid import uuid4

import msgspec
from msgspec import UNSET

from crow_core import __version__
from crow_core.acp.schema import McpServer
from crow_core.masking import find_secrets, find_secrets_in_text, mask
from crow_core.mcp.result import ToolResult
from crow_core.mcp.schemas import is_tame
from crow_core.mcp.watchdog import MARK, Watchdog
from crow_core.text import to_line
from crow_core.trace import KEYS

if TYPE_CHECKING:
    from fastmcp import Client
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

T = TypeVar("T")

logger = logging.getLogger("crow")

WARM_AFTER = 0.2
"""Seconds after a turn's start until the built-in tools are loaded, and again so many if this process was busy for half
of them: by then the request is on its way, and nobody who streams is kept waiting by what loads."""
START_TIMEOUT = 30.0
"""Seconds a server may take to start and list its tools."""
CALL_TIMEOUT = 600.0
"""Seconds a server of the user's may be silent in a call; each word on its progress counts."""
LONGEST_CALL = 7200.0
"""Seconds a call may take, whatever is said of its progress; those in which a person is asked do not count."""
LISTS = {
    "tools/list": "tools",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
}
"""Where the items stand in the answer to each request for a list."""
METHOD_NOT_FOUND = -32601
"""The error with which a server answers what it does not know (JSON-RPC)."""
PAGES_FIRST = -32042
"""The error with which a server answers a call that a person has to visit a page for (MCP, URLElicitationRequired)."""
LONGEST_REASON = 4000
"""Characters of what a server says went wrong."""
STOP_GRACE = 1.0
"""Seconds a server may take to end; then all its processes are killed."""
IMPORT = threading.Lock()
"""FastMCP is imported under changed environment variables, which two threads must not restore to each other's."""


class Host(Protocol):
    """Whom a server works for, and may ask back (MCP: the host): a session, by way of the bridge.

    `use` is the call that something is for; None where nobody can tell.
    """

    def roots(self) -> Sequence[str]:
        """The folders to work in, as `file:` URIs."""
        ...

    async def elicit(self, server: "Server", asked: "ElicitRequestParams", use: "RunningCall | None") -> "ElicitResult":
        """Ask the person."""
        ...

    async def sample(
        self, server: "Server", asked: "CreateMessageRequestParams", use: "RunningCall | None"
    ) -> "CreateMessageResult":
        """Ask the model. Raises PermissionError, ValueError, ModelError with a sentence for the server."""
        ...

    async def complete(self, server: "Server", id: str) -> None:
        """What a page was visited for is done."""
        ...

    async def log(self, server: "Server", said: "LoggingMessageNotificationParams") -> None:
        """Tell the person, or write down, what a server says of itself."""
        ...

    async def progress(
        self, server: "Server", done: float, total: float | None, message: str, use: "RunningCall"
    ) -> None:
        """Show how far a call has come."""
        ...


@dataclass(eq=False)
class RunningCall:
    """A call in flight: whom it is for, and how long it may still take."""

    host: Host | None = None
    id: str = ""
    """The tool call's."""
    title: str = ""
    """What the person sees it called."""
    again: bool = False
    """It may run a second time where the first broke off: it only reads, or changes nothing by being repeated."""
    heard: float = field(default_factory=monotonic)
    """When the server gave its last sign of life, in seconds of the monotonic clock."""
    end: float = field(default_factory=lambda: monotonic() + LONGEST_CALL)
    asking: int = 0
    """Questions of the server's that wait for an answer."""
    progress: str = ""
    """How far it has come, as far as that has not been shown."""
    beside: "dict[str, asyncio.Task[Any]]" = field(default_factory=dict[str, "asyncio.Task[Any]"])
    """What goes on for its sake, and ends with it."""
    context: Context = field(default_factory=copy_context)
    """Of the turn that it is a part of."""

    def left(self, silence: float) -> float:
        """Seconds until it has taken too long, or until one should look again."""
        if self.asking:
            return silence
        return min(self.heard + silence, self.end) - monotonic()


USE: ContextVar[RunningCall | None] = ContextVar("use", default=None)
"""The call in flight, for what the client does on behalf of it."""


@dataclass(eq=False)
class Server:
    """One MCP server. It is connected at the first need, and again after it died."""

    name: str
    source: Callable[[], Any] | None
    """Gives what FastMCP's `Client` takes: a transport, a URL, a server object. None where there is nothing to connect:
    an extension answers the calls, in `before_tool`, and `definitions` are all there is."""
    definitions: list[dict[str, Any]] | None = None
    """Its tools, where they are known beforehand; then it need not be connected to offer them."""
    built_in: bool = False
    """It is part of the agent: its tools keep their bare names, and its word on what it did is taken."""
    shared: bool = False
    """It serves many sessions and outlives each of them."""
    trust: bool = False
    """The user's configuration trusts it: a tool that it calls read-only runs without a question."""
    allow: Sequence[str] = ("*",)
    """Patterns, as in a shell, of the names of the tools that are offered."""
    deny: Sequence[str] = ()
    """Patterns of those that are not, whatever `allow` says."""
    timeout: float | None = None
    """Seconds it may be silent in a call; None means CALL_TIMEOUT, and no limit for what is built in."""
    start_timeout: float | None = None
    """Seconds it may take to start and list its tools; None means START_TIMEOUT."""
    mode: Literal["auto", "legacy"] = "auto"
    """Whether to ask which revision of MCP it speaks, or to begin as before 2026: for servers that do not answer what
    they do not know."""
    mark: str = ""
    """The value of MARK for its processes, if it is a command."""
    secrets: Collection[str] = field(default=(), repr=False)
    """What it was given that nobody else may see: variables, headers, what is secret in its address, its tokens."""
    folder: Callable[[], Path | None] = lambda: None
    """Gives where an answer is kept that is too long to hand over; None keeps none."""
    error: str = ""
    """Why it did not start, as a sentence."""
    warning: str = ""
    """Which of its tools were left out, and why, as a sentence."""
    hosts: set[Host] = field(default_factory=set[Host], repr=False)
    """Whom it works for: one session, or several if it is shared."""
    changes: Counter[str] = field(default_factory=Counter[str], repr=False)
    """How often its list of `tools`, `prompts` or `resources` may have become another."""
    listeners: list[Callable[[str], None]] = field(default_factory=list[Callable[[str], None]], repr=False)
    """Told which of its lists may have become another."""
    _connection: "asyncio.Task[Client[Any]] | None" = field(default=None, repr=False)
    _ending: "asyncio.Task[None] | None" = field(default=None, repr=False)
    """The end of the connection before."""
    _watchdog: Watchdog | None = field(default=None, repr=False)
    _warming: asyncio.TimerHandle | None = field(default=None, repr=False)
    _uses: set[RunningCall] = field(default_factory=set[RunningCall], repr=False)
    _aside: "set[asyncio.Task[Any]]" = field(default_factory=set["asyncio.Task[Any]"], repr=False)
    """Calls that nobody waits for any more, and what listens for changes."""
    _listed: "tuple[int, list[dict[str, Any]]] | None" = field(default=None, repr=False)
    """Its tools, and which of their changes they are of."""
    _tame: set[str] = field(default_factory=set[str], repr=False)
    """The tools whose answers can be checked."""

    def warm(self) -> None:
        """Connect before anyone calls, but not before there is little else to do: loading FastMCP takes a second."""
        if self._warming is None and self._connection is None and self.source:
            self._warming = asyncio.get_running_loop().call_later(WARM_AFTER, self._warm, process_time())

    def _warm(self, before: float) -> None:
        self._warming = None
        if process_time() - before < WARM_AFTER / 2:
            self.connect()
        else:
            self.warm()

    async def client(self) -> "Client[Any]":
        """The connected client; connected anew where the connection has died. Raises ConnectionError."""
        return await client_of(self.connect())

    def connect(self) -> "asyncio.Task[Client[Any]]":
        """What gives the connected client, begun if need be, anew where it has died. It fails with a ConnectionError
        for a person to read."""
        if self._connection is not None and is_dead(self._connection):
            self.let_go(self._connection)
        if self._connection is None:
            self._watchdog = Watchdog(self.mark) if self.mark else None
            context = copy_context()
            context.run(USE.set, None)  # a connection outlives the call that it was made for
            connecting = self._connect(self._ending)
            self._connection = asyncio.get_running_loop().create_task(connecting, context=context)
        return self._connection

    async def _connect(self, before: "asyncio.Task[None] | None") -> "Client[Any]":
        if before is not None:
            await asyncio.wait([before])
        assert self.source is not None
        client_class = await aside(fastmcp_client)
        from mcp_types import Implementation  # loaded with FastMCP

        client = client_class(
            await aside(self.source),
            name=self.name,
            init_timeout=self.patience,
            mode=self.mode,
            client_info=Implementation(name="crow", version=__version__),
            roots=self._roots,
            elicitation_handler=self._elicit,
            sampling_handler=self._sample,
            log_handler=self._log,
            message_handler=self._hear,
        )
        try:
            await client.__aenter__()
        except Exception as error:
            raise ConnectionError(f"{describe_error(error)}{last_words(client, self.secrets)}") from error
        for what in ("tools", "prompts", "resources") if before is not None else ():
            self.note(what)  # it may have become another program
        self._guard(client)
        self._sift(client)
        self.put_aside(asyncio.ensure_future(listen(client)))
        return client

    def _guard(self, client: "Client[Any]") -> None:
        """Check answers only against schemas with which that comes to an end: it would stop everything else. One that
        was too long to be read has nothing left to check."""
        check = client.session.validate_tool_result

        async def validate(name: str, result: "CallToolResult") -> None:
            if name in self._tame and result.structured_content is not None:
                await check(name, result)

        client.session.validate_tool_result = validate

    def _sift(self, client: "Client[Any]") -> None:
        """Leave out of lists what does not belong there: the SDK refuses the whole list for it."""
        from mcp_types.methods import validate_server_result  # loaded with FastMCP

        dispatcher: Any = vars(client.session)["_dispatcher"]  # nothing public sees a list before the SDK does
        ask = dispatcher.send_raw_request

        def fault(method: str, answer: dict[str, Any], items: Any) -> str:
            try:
                validate_server_result(method, client.protocol_version or "", {**answer, LISTS[method]: items})
            except ValueError as error:
                return describe_error(error)
            return ""

        async def send(method: str, params: Any, options: Any = None) -> dict[str, Any]:
            answer: dict[str, Any] = await ask(method, params, options)
            if (what := LISTS.get(method)) is None or not isinstance(items := answer.get(what), list):
                return answer
            if not fault(method, answer, items) or fault(method, answer, []):
                return answer
            faults = [(item, fault(method, answer, [item])) for item in cast("list[Any]", items)]
            said = mask("; ".join(f"{name_in(item)!r}: {why}" for item, why in faults if why), self.secrets)
            warning = f"MCP server {to_line(self.name)!r} has {what} that were left out: {said[:1000]}."
            if what == "tools":
                self.warning = warning
            else:
                logger.warning("%s", warning)
            return {**answer, what: [item for item, why in faults if not why]}

        dispatcher.send_raw_request = send

    @property
    def patience(self) -> float:
        """Seconds it may take to start."""
        return START_TIMEOUT if self.start_timeout is None else self.start_timeout

    @property
    def connected(self) -> bool:
        """Whether it is up, as far as anyone has noticed."""
        return self._connection is not None and self._connection.done() and not is_dead(self._connection)

    async def list(self) -> list[dict[str, Any]]:
        """Its tools as tools/list gives them; none when it does not start, and `error` says why."""
        if self.definitions is not None:
            return self.definitions
        if self._listed and self._listed[0] == self.changes["tools"]:
            return self._listed[1]
        connection, self.error, self.warning = self.connect(), "", ""
        failed = "did not start" if self._listed is None else "did not list its new tools"
        try:
            async with asyncio.timeout(self.patience):
                client = await client_of(connection)
                now = self.changes["tools"]
                tools = await list_or_empty(client.list_tools())
        except TimeoutError:
            self.error = f"MCP server {to_line(self.name)!r} did not answer within {self.patience:.0f} s."
        except Exception as error:
            said = mask(describe_error(error), self.secrets)
            self.error = f"MCP server {to_line(self.name)!r} {failed}: {said[:1000]}."
        else:
            dumps = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools]
            found = mask([dump for dump in dumps if self.offers(dump["name"])], self.secrets)
            self._listed = now, found
            self._tame = {tool["name"] for tool in found if is_tame(tool.get("outputSchema") or {})}
            return found
        if self._listed is None or is_dead(connection):  # else what it had is still there
            self.let_go(connection)
        return []

    def offers(self, tool: str) -> bool:
        """Whether its tool of that name is let through."""
        return any(fnmatchcase(tool, each) for each in self.allow) and not any(
            fnmatchcase(tool, each) for each in self.deny
        )

    async def call(
        self, tool: str, arguments: dict[str, Any], meta: dict[str, Any], use: RunningCall | None = None
    ) -> ToolResult:
        """Call a tool; every failure is a result that the model can read."""
        if self.source is None:
            return ToolResult.error(f"Nothing answers calls of {tool!r}.")
        # Only our own tools are told where the session lives; to others it would be a leak.
        ours = meta if self.built_in else {key: meta[key] for key in KEYS if key in meta} or None
        use = use or RunningCall()
        self._uses.add(use)
        try:
            try:
                result = await self._attempt(tool, arguments, ours, use)
            except BrokenPipeError:
                if not use.again:
                    raise
                result = await self._attempt(tool, arguments, ours, use)
        except Exception as error:
            if pages := pages_in(error):
                return await self._send_to(pages, use)
            return ToolResult.error(f"The tool failed: {mask(describe_error(error), self.secrets)}.")
        finally:
            self._uses.discard(use)
            for task in use.beside.values():
                task.cancel()
        dump = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        content: list[dict[str, Any]] = dump.get("content") or []
        if not content and (structured := dump.get("structuredContent")) is not None:
            content = [{"type": "text", "text": msgspec.json.encode(structured).decode()}]
        meta = dump.get("_meta") or {} if self.built_in else {}
        return ToolResult(content, bool(dump.get("isError")), meta)

    async def _attempt(
        self, tool: str, arguments: dict[str, Any], meta: dict[str, Any] | None, use: RunningCall
    ) -> "CallToolResult":
        """Call once. Raises BrokenPipeError when the connection broke, and what the server answered as an error."""
        connection = self.connect()
        client = await client_of(connection)

        async def heard(progress: float, total: float | None, message: str | None) -> None:
            use.heard = monotonic()
            if use.host is not None and use in self._uses:
                await use.host.progress(self, progress, total, message or "", use)

        silence = self.timeout or (None if self.built_in else CALL_TIMEOUT)
        use.heard = monotonic()
        context = use.context.copy()
        context.run(USE.set, use)
        call = asyncio.get_running_loop().create_task(
            client.call_tool_mcp(tool, arguments, progress_handler=heard, meta=meta), context=context
        )
        try:
            while not call.done():
                if silence is not None and use.left(silence) <= 0:
                    whole = use.end <= monotonic()
                    why = f"no call may take {LONGEST_CALL:g} s" if whole else f"nothing was heard for {silence:g} s"
                    raise TimeoutError(f"it timed out: {why}")
                await asyncio.wait([call], timeout=silence and use.left(silence))
            if call.cancelled():  # by the end of the connection
                raise ConnectionError
            return call.result()
        except Exception as error:
            if not is_broken(connection, error):
                raise
            self.let_go(connection)
            said = "the connection to its server broke, and it may have run all the same. Look before you call it again"
            raise BrokenPipeError(said) from error
        finally:
            if not call.done():  # FastMCP tells the server, which may take a while; nobody waits for it
                call.cancel()
                self.put_aside(call)

    def announce_roots(self) -> None:
        """Have a server that remembers its roots ask for them anew; one of 2026 asks with each call."""
        from mcp_types import RootsListChangedNotification
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

        if (connection := self._connection) is None or not connection.done() or is_dead(connection):
            return
        client = connection.result()
        if client.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS:
            self.put_aside(asyncio.ensure_future(client.session.send_notification(RootsListChangedNotification())))

    def put_aside(self, task: "asyncio.Task[Any]") -> None:
        """Let something come to its end by itself."""
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _send_to(self, pages: "Sequence[ElicitRequestParams]", use: RunningCall) -> ToolResult:
        """Send the person to the pages that a call needs them to have visited."""
        for page in pages:
            answer = await use.host.elicit(self, page, use) if use.host else None
            if answer is None or answer.action != "accept":
                return ToolResult.error("The tool needs the user to visit a web page first, and they did not want to.")
        return ToolResult.error(
            "The tool needs the user to visit a web page first; they are on the way. "
            "Call it again once they say that it is done."
        )

    def whom(self) -> tuple[Host | None, RunningCall | None]:
        """Whom a question of the server's is for, and for which call, as far as one can tell: where nothing links it to
        a call, the only one in flight must be meant."""
        if (use := USE.get()) is not None:
            return use.host, use if use in self._uses else None
        hosts = {use.host for use in self._uses if use.host} or self.hosts
        use = next(iter(self._uses)) if len(self._uses) == 1 else None
        return (next(iter(hosts)), use) if len(hosts) == 1 else (None, None)

    async def _ask(self, question: Callable[[Host, RunningCall | None], Coroutine[Any, Any, T]]) -> T:
        """Put a question of the server's to whom it works for; meanwhile its silence counts for nothing."""
        host, use = self.whom()
        if host is None:
            raise LookupError("There is nobody to ask, or more than one that could be meant.")
        task = asyncio.get_running_loop().create_task(
            question(host, use), context=use.context.copy() if use else copy_context()
        )
        since, key = monotonic(), uuid4().hex
        if use is not None:
            use.beside[key] = task
            use.asking += 1
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            if use is not None:
                del use.beside[key]
                use.asking -= 1
                use.heard = monotonic()
                use.end += use.heard - since
        if task.cancelled():  # not this task: a cancellation raised here would end the connection
            raise TimeoutError("The call that it was asked for has ended.")
        return task.result()

    def _roots(self, context: Any) -> "list[str]":
        host, _ = self.whom()
        return [*host.roots()] if host else []

    async def _elicit(
        self, message: str, type: Any, asked: "ElicitRequestParams", context: "ClientRequestContext"
    ) -> "ElicitResult":
        return await self._ask(lambda host, use: host.elicit(self, asked, use))

    async def _sample(
        self, messages: "list[SamplingMessage]", asked: "CreateMessageRequestParams", context: "ClientRequestContext"
    ) -> "CreateMessageResult":
        return await self._ask(lambda host, use: host.sample(self, asked, use))

    async def _log(self, said: "LoggingMessageNotificationParams") -> None:
        if (host := self.whom()[0]) is not None:
            await host.log(self, said)

    async def _hear(self, message: "ServerNotification | Exception") -> None:
        """Note what has changed; tell who waits that a page has done its work."""
        from mcp_types import (  # loaded with FastMCP
            ElicitCompleteNotification,
            PromptListChangedNotification,
            ResourceListChangedNotification,
            ToolListChangedNotification,
        )

        match message:
            case ToolListChangedNotification():
                self.note("tools")
            case PromptListChangedNotification():
                self.note("prompts")
            case ResourceListChangedNotification():
                self.note("resources")
            case ElicitCompleteNotification(params=params):
                for host in [*self.hosts]:
                    await host.complete(self, params.elicitation_id)
            case _:
                pass

    def note(self, what: str) -> None:
        """Take down that one of its lists may have become another."""
        self.changes[what] += 1
        for listener in self.listeners:
            listener(what)

    def let_go(self, connection: "asyncio.Task[Client[Any]] | None") -> None:
        """Begin to end a connection, if it still is this server's; the next call makes a new one."""
        if connection is not None and connection is self._connection:
            self._connection = None
            self._ending = asyncio.ensure_future(end(connection, self._watchdog, self._ending))

    async def close(self) -> None:
        """Disconnect; a command's processes end, all of them."""
        if self._warming is not None:
            self._warming.cancel()
            self._warming = None
        self.let_go(self._connection)
        if (ending := self._ending) is not None:
            await asyncio.shield(ending)
            self._ending = None if self._ending is ending else self._ending


async def end(
    connection: "asyncio.Task[Client[Any]]", watchdog: Watchdog | None, before: "asyncio.Task[None] | None"
) -> None:
    """End a connection, whatever became of it; `before` is the end of another that may not be over."""
    ending = asyncio.ensure_future(hang_up(connection))
    await asyncio.wait([ending], timeout=STOP_GRACE)
    if watchdog is not None:
        await asyncio.to_thread(watchdog.bite)
    await asyncio.wait([ending] if before is None else [ending, before])


async def client_of(connection: "asyncio.Task[Client[Any]]") -> "Client[Any]":
    """The client, once connected. Who lets go of a connection that others wait for cancels the connection, not them.

    Raises ConnectionError.
    """
    await asyncio.wait([connection])
    if connection.cancelled():
        raise ConnectionError("it was given up")
    return connection.result()


async def hang_up(connection: "asyncio.Task[Client[Any]]") -> None:
    """Disconnect a client that may still be connecting."""
    connection.cancel()
    await asyncio.wait([connection])
    if not connection.cancelled() and not connection.exception():
        client = connection.result()
        with suppress(Exception):  # it is going away; what it says now helps nobody
            await client.close()


def last_words(client: "Client[Any]", secrets: Collection[str]) -> str:
    """What a command that did not start said last, as the end of a sentence."""
    lines = getattr(client.transport, "said", b"").decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f". It said: {mask(to_line(last.strip()), secrets)[:300]}" if last else ""


def is_dead(connection: "asyncio.Task[Client[Any]]") -> bool:
    """Whether a connection has failed, or ended without our doing."""
    if not connection.done():
        return False
    if connection.cancelled() or connection.exception() or not connection.result().is_connected():
        return True
    # Nothing public tells that a process has ended; FastMCP's own transport looks here, too.
    return bool(getattr(getattr(connection.result().session, "_dispatcher", None), "_closed", False))


def is_broken(connection: "asyncio.Task[Client[Any]]", error: Exception) -> bool:
    """Whether a connection is of no more use after an error; one that the server answered leaves it be."""
    from mcp_types import CONNECTION_CLOSED  # loaded with FastMCP

    return is_dead(connection) or getattr(error, "code", None) == CONNECTION_CLOSED


async def listen(client: "Client[Any]") -> None:
    """Have a server of 2026 say what changes, as older ones do by themselves, until the connection ends."""
    from mcp.client import subscriptions  # loaded with FastMCP
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
                pass  # whoever hears messages has heard it


async def list_or_empty(asking: Coroutine[Any, Any, list[T]]) -> list[T]:
    """What a server lists; one that has nothing of a kind may not even know the question."""
    try:
        return await asking
    except Exception as error:  # the SDK's own has a code; its class is loaded with FastMCP, and not here
        if getattr(error, "code", None) == METHOD_NOT_FOUND:
            return []
        raise


def name_in(item: Any) -> str:
    """What is meant to be the name of a tool or the like."""
    match item:
        case {"name": str(name)}:
            return name
        case _:
            return "?"


def pages_in(error: Exception) -> "Sequence[ElicitRequestParams]":
    """The pages that a server wants a person to visit before a call."""
    if getattr(error, "code", None) != PAGES_FIRST:
        return []
    from mcp.shared.exceptions import MCPError, UrlElicitationRequiredError  # loaded with FastMCP

    with suppress(ValueError):
        return UrlElicitationRequiredError.from_error(error.error).elicitations if isinstance(error, MCPError) else []
    return []


def from_acp(config: McpServer, cwd: str, auth: Callable[[], Any] | None = None) -> Server:
    """A server as the client or the configuration names it; `auth` gives what logs in to it, for its URL."""
    mark = uuid4().hex if config.url is UNSET else ""

    def source() -> Any:
        from fastmcp.client.transports import SSETransport  # loaded by `_connect` already

        from crow_core.mcp.oauth import Stranger
        from crow_core.mcp.remote import EVENT_LIMIT, Http, Remote
        from crow_core.mcp.stdio import Stdio

        pairs = {} if config.headers is UNSET else {header.name: header.value for header in config.headers or ()}
        if config.url is not UNSET:
            http, way_in = Http(lambda: server.folder(), learn), auth() if auth else Stranger()
            if config.type != "sse":
                return Remote(str(config.url), pairs, way_in, http)
            http.limit = EVENT_LIMIT
            return SSETransport(str(config.url), pairs, way_in, httpx_client_factory=http)
        env = {} if config.env is UNSET else {variable.name: variable.value for variable in config.env or ()}
        env[MARK] = f"{os.environ.get(MARK, '')}:{mark}"
        args = () if config.args is UNSET else config.args or ()
        return Stdio(str(config.command), args, env, cwd, lambda: server.folder())

    def learn(told: str) -> None:
        server.secrets = {*server.secrets, *find_secrets_in_text(told, "authorization")}

    server = Server(config.name, source, mark=mark, secrets=find_secrets(config))
    return server


async def aside(function: Callable[[], T]) -> T:
    """Run a slow import in a thread that nobody has to wait for: a process that is done may leave while it runs."""
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

    threading.Thread(target=work, daemon=True, name="crow-import").start()
    return await future


def fastmcp_client() -> "type[Client[Any]]":
    """FastMCP's client class, imported so that no `.env` of the working directory can switch its settings."""
    quiet = {
        "FASTMCP_ENV_FILE": os.devnull,
        "FASTMCP_CHECK_FOR_UPDATES": "off",
        "FASTMCP_LOG_ENABLED": "false",
        "PY_KEY_VALUE_DISABLE_BEARTYPE": "true",
    }
    with IMPORT:
        before = {name: os.environ.get(name) for name in quiet}
        os.environ.update(quiet)
        try:
            client: type[Client[Any]] = importlib.import_module("fastmcp").Client
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
    for name in ("client", "mcp"):  # they log what servers send, with tracebacks, and what they raise
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return client


def describe_error(error: BaseException) -> str:
    """An exception of a server's as the end of a sentence."""
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
            return to_line(f"what it sent does not keep to MCP ({place}: {fault['msg']})")[:LONGEST_REASON]
        case _:
            return to_line(str(error)[:LONGEST_REASON] or type(error).__name__).strip().rstrip(".")
