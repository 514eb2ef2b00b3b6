"""One MCP server: connected through FastMCP's client, called, ended with all it started, and connected anew.

FastMCP is large, so it is imported when the first server has to be connected, in a thread, while the model thinks.
"""

import asyncio
import importlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import msgspec
from msgspec import UNSET

from crow_core.acp.schema import McpServer
from crow_core.content import ToolResult, clean
from crow_core.secrets import masked, secrets_of
from crow_core.trace import KEYS
from crow_core.watchdog import MARK, Watchdog

if TYPE_CHECKING:
    from fastmcp import Client

T = TypeVar("T")

WARM_AFTER = 0.2
"""Seconds after a turn's start until the built-in tools are loaded: by then the request is on its way."""
START_TIMEOUT = 30.0
"""Seconds a server may take to start and list its tools."""
CALL_TIMEOUT = 600.0
"""Seconds a call to a server of the user's may take."""
STOP_GRACE = 1.0
"""Seconds a server may take to end; then all its processes are killed."""
IMPORT = threading.Lock()
"""FastMCP is imported under changed environment variables, which two threads must not restore to each other's."""


@dataclass(eq=False)
class Server:
    """One MCP server. It is connected at the first need, and again after it died."""

    name: str
    source: Callable[[], Any] | None
    """Gives what FastMCP's `Client` takes: a transport, a URL, a server object. None where there is nothing to connect:
    an extension answers the calls, in `before_tool`, and `definitions` are all there is."""
    definitions: list[dict[str, Any]] | None = None
    """Its tools, where they are known beforehand; then it need not be connected to offer them."""
    trusted: bool = False
    """Its tools keep their bare names, and its word on what it did is taken."""
    shared: bool = False
    """It serves many sessions and outlives each of them."""
    mark: str = ""
    """The value of MARK for its processes, if it is a command."""
    secrets: Collection[str] = field(default=(), repr=False)
    """What it was given that nobody else may see: variables, headers, what is secret in its address."""
    allow: Sequence[str] = ()
    """Patterns of the names of its tools that are offered (fnmatch); empty for all."""
    deny: Sequence[str] = ()
    """Patterns of those that are not."""
    trust: bool = False
    """Its annotations may loosen what is asked."""
    timeout: float | None = None
    start_timeout: float | None = None
    heard: "list[Callable[[str], None]]" = field(default_factory=list["Callable[[str], None]"], repr=False)
    """Told the method of every notification that a list of the server's has changed."""
    error: str = ""
    """Why it did not start, as a sentence."""
    _connection: "asyncio.Task[Client[Any]] | None" = field(default=None, repr=False)
    _ending: "asyncio.Task[None] | None" = field(default=None, repr=False)
    """The end of the connection before."""
    _watchdog: Watchdog | None = field(default=None, repr=False)
    _warming: asyncio.TimerHandle | None = field(default=None, repr=False)

    def warm(self) -> None:
        """Connect before anyone calls, but not before the model has been asked: loading FastMCP takes a second."""
        if self._warming is None and self.source:
            self._warming = asyncio.get_running_loop().call_later(WARM_AFTER, self.connect)

    def connect(self) -> "asyncio.Task[Client[Any]]":
        """What gives the connected client, begun if need be. It fails with a ConnectionError for a person to read."""
        if self._connection is None:
            self._watchdog = Watchdog(self.mark) if self.mark else None
            self._connection = asyncio.ensure_future(self._connect(self._ending))
        return self._connection

    @property
    def patience(self) -> float:
        return START_TIMEOUT if self.start_timeout is None else self.start_timeout

    @property
    def connected(self) -> bool:
        """Whether it is up, as far as anyone has noticed."""
        connection = self._connection
        return (
            connection is not None and connection.done() and not connection.cancelled() and not connection.exception()
        )

    async def client(self) -> "Client[Any]":
        """The connected client, for what is neither a list of tools nor a call. Raises ConnectionError."""
        return await client_of(self.connect())

    async def _hear(self, message: Any) -> None:
        for listener in self.heard:
            listener(getattr(message, "method", ""))

    async def _connect(self, before: "asyncio.Task[None] | None") -> "Client[Any]":
        if before is not None:
            await asyncio.wait([before])
        assert self.source is not None
        client_class = await aside(fastmcp_client)
        client = client_class(
            await aside(self.source), name=self.name, init_timeout=self.patience, message_handler=self._hear
        )
        if self.mark:  # else a command's standard error would be ours
            client.transport.log_file = tempfile.TemporaryFile("w+")  # noqa: SIM115, see close_log
        try:
            return await client.__aenter__()
        except Exception as error:
            raise ConnectionError(f"{reason(error)}{last_words(client, self.secrets)}") from error
        finally:
            if not client.is_connected():
                close_log(client)

    async def list(self) -> list[dict[str, Any]]:
        """Its tools as tools/list gives them; none when it does not start, and `error` says why."""
        if self.definitions is not None:
            return self.definitions
        connection, self.error = self.connect(), ""
        try:
            async with asyncio.timeout(self.patience):
                tools = await (await client_of(connection)).list_tools()
        except TimeoutError:
            self.error = f"MCP server {clean(self.name)!r} did not answer within {self.patience:.0f} s."
        except Exception as error:
            said = masked(reason(error), self.secrets)
            self.error = f"MCP server {clean(self.name)!r} did not start: {said}."
        else:
            dumps = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools]
            self.definitions = definitions = masked(dumps, self.secrets)
            return definitions
        self.let_go(connection)
        return []

    async def call(self, tool: str, arguments: dict[str, Any], meta: dict[str, Any]) -> ToolResult:
        """Call a tool; every failure is a result that the model can read."""
        if self.source is None:
            return ToolResult.error(f"Nothing answers calls of {tool!r}.")
        connection = self.connect()
        timeout = None if self.trusted else CALL_TIMEOUT
        # Only our own tools are told where the session lives; to others it would be a leak.
        ours = meta if self.trusted else {key: meta[key] for key in KEYS if key in meta} or None
        try:
            client = await client_of(connection)
            result = await client.call_tool_mcp(tool, arguments, timeout=timeout, meta=ours)
        except Exception as error:
            if is_broken(connection, error):
                self.let_go(connection)
            return ToolResult.error(f"The tool failed: {reason(error)}.")
        dump = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        content: list[dict[str, Any]] = dump.get("content") or []
        if not content and (structured := dump.get("structuredContent")) is not None:
            content = [{"type": "text", "text": msgspec.json.encode(structured).decode()}]
        meta = dump.get("_meta") or {} if self.trusted else {}
        return ToolResult(content, bool(dump.get("isError")), meta)

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
        close_log(client)


def last_words(client: "Client[Any]", secrets: Collection[str]) -> str:
    """What a command that did not start wrote last to its standard error, as the end of a sentence."""
    log = getattr(client.transport, "log_file", None)
    if log is None:
        return ""
    written = os.pread(log.fileno(), 4096, max(os.fstat(log.fileno()).st_size - 4096, 0))
    lines = written.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f". It said: {masked(clean(last.strip()), secrets)[:300]}" if last else ""


def close_log(client: "Client[Any]") -> None:
    """Let go of the file that holds a command's standard error."""
    if (log := getattr(client.transport, "log_file", None)) is not None:
        log.close()


def is_broken(connection: "asyncio.Task[Client[Any]]", error: Exception) -> bool:
    """Whether a connection is of no more use after an error; one that the server answered leaves it be."""
    from mcp_types import CONNECTION_CLOSED  # loaded with FastMCP

    if connection.cancelled() or connection.exception() or not connection.result().is_connected():
        return True
    return getattr(error, "code", None) == CONNECTION_CLOSED


def from_acp(config: McpServer, cwd: str, auth: Callable[[], Any] | None = None) -> Server:
    """A server as the client or the configuration names it; `auth` gives what logs in to it, for its URL."""
    mark = uuid4().hex if config.url is UNSET else ""

    def source() -> Any:
        from fastmcp.client import transports  # loaded by `connected` already

        pairs = {} if config.headers is UNSET else {header.name: header.value for header in config.headers or ()}
        if config.url is not UNSET:
            over = transports.SSETransport if config.type == "sse" else transports.StreamableHttpTransport
            return over(str(config.url), headers=pairs, auth=auth and auth())
        env = {} if config.env is UNSET else {variable.name: variable.value for variable in config.env or ()}
        env[MARK] = f"{os.environ.get(MARK, '')}:{mark}"
        return transports.StdioTransport(
            str(config.command),
            [] if config.args is UNSET else list(config.args or ()),
            env=env,
            cwd=cwd,
            keep_alive=False,
        )

    return Server(config.name, source, mark=mark, secrets=secrets_of(config))


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
    logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)  # it logs every line that is no message
    return client


def reason(error: BaseException) -> str:
    """An exception of a server's as the end of a sentence."""
    match error:
        case BaseExceptionGroup(exceptions=[first, *_]):
            return reason(first)
        case FileNotFoundError(filename=str(command)):
            return f"the command {clean(command)!r} was not found; check its name, or give its full path"
        case Exception(__cause__=FileNotFoundError() as cause):  # FastMCP wraps it
            return reason(cause)
        case _:
            return clean(str(error) or type(error).__name__).strip().rstrip(".")
