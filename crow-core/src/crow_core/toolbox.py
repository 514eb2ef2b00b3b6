"""Every tool is an MCP tool, and this is where a session's tools hang.

A server is connected through FastMCP's client: a command, a URL, or an object in this process. FastMCP is large, so
it is imported when the first server has to be connected, in a thread, while the model thinks.
"""

import asyncio
import hashlib
import importlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from crow_core.acp.schema import McpServer, ToolKind
from crow_core.content import ToolResult, clean
from crow_core.messages import ToolUse, arguments_of

if TYPE_CHECKING:
    from fastmcp import Client

T = TypeVar("T")

WARM_AFTER = 0.2
"""Seconds after a turn's start until the built-in tools are loaded: by then the request is on its way."""
START_TIMEOUT = 30.0
"""Seconds a server may take to start and list its tools."""
CALL_TIMEOUT = 600.0
"""Seconds a call to a server of the user's may take."""


@dataclass(eq=False)
class Tool:
    """One tool under the name the model knows it by."""

    name: str
    server: "Server"
    definition: dict[str, Any]
    """As its server's tools/list gave it."""

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool in the shape of chat completions."""
        function: dict[str, Any] = {
            "name": self.name,
            "description": clean_text(self.definition.get("description") or ""),
            "parameters": self.definition.get("inputSchema") or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}

    def kind(self, arguments: dict[str, Any]) -> ToolKind:
        """What a call with these arguments does; only a trusted server's own word is taken for it."""
        told: dict[str, Any] = self.definition.get("_meta") or {} if self.server.trusted else {}
        match told.get("crow/kind", "other"):
            case str(kind):
                return kind  # pyright: ignore[reportReturnType] - our own tools' word
            case kinds:
                return kinds.get(arguments.get("command"), "other")


@dataclass(eq=False)
class Server:
    """One MCP server. Its client is connected at the first need, and again after it died."""

    name: str
    source: Callable[[], Any]
    """Gives what FastMCP's `Client` takes: a transport, a URL, a server object."""
    definitions: list[dict[str, Any]] | None = None
    """Its tools, where they are known beforehand; then it need not be connected to offer them."""
    trusted: bool = False
    """Its tools keep their bare names, and its word on what it did is taken."""
    shared: bool = False
    """It serves many sessions and outlives each of them."""
    error: str = ""
    """Why it did not start, as a sentence."""
    _client: "Client[Any] | None" = field(default=None, repr=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    _warming: "asyncio.Task[None] | None" = field(default=None, repr=False)

    async def connected(self) -> "Client[Any]":
        """The client, connected. Raises what FastMCP raises."""
        async with self._lock:
            if self._client is not None and self._client.is_connected():
                return self._client
            client_class = await aside(fastmcp_client)
            self._client = client_class(await aside(self.source), name=self.name, init_timeout=START_TIMEOUT)
            await self._client.__aenter__()
            return self._client

    def warm(self) -> None:
        """Connect before anyone calls, but not before the model has been asked: loading FastMCP takes a second."""
        if self._client is None and self._warming is None:
            self._warming = asyncio.ensure_future(self._warm())

    async def _warm(self) -> None:
        await asyncio.sleep(WARM_AFTER)
        with suppress(Exception):  # whoever calls a tool will meet the same error, and can tell it
            await self.connected()

    async def list(self) -> list[dict[str, Any]]:
        """Its tools as tools/list gives them; none when it does not start, and `error` says why."""
        if self.definitions is None:
            try:
                async with asyncio.timeout(START_TIMEOUT):
                    tools = await (await self.connected()).list_tools()
                self.definitions = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools]
            except TimeoutError:
                self.error = f"MCP server {self.name!r} did not answer within {START_TIMEOUT:.0f} s."
                await self.close()
            except Exception as error:
                self.error = f"MCP server {self.name!r} did not start: {reason(error)}."
                await self.close()
        return self.definitions or []

    async def call(self, tool: str, arguments: dict[str, Any], meta: dict[str, Any]) -> ToolResult:
        """Call a tool; every failure is a result that the model can read."""
        try:
            client = await self.connected()
            timeout = None if self.trusted else CALL_TIMEOUT
            # Only our own tools are told where the session lives; to others it would be a leak.
            ours = meta if self.trusted else None
            result = await client.call_tool_mcp(tool, arguments, timeout=timeout, meta=ours)
        except Exception as error:
            return ToolResult.error(f"The tool failed: {reason(error)}.")
        dump = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        content: list[dict[str, Any]] = dump.get("content") or []
        if not content and (structured := dump.get("structuredContent")) is not None:
            content = [{"type": "text", "text": msgspec.json.encode(structured).decode()}]
        meta = dump.get("_meta") or {} if self.trusted else {}
        return ToolResult(content, bool(dump.get("isError")), meta)

    async def close(self) -> None:
        """Disconnect; a command's process ends."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait([self._warming])
            self._warming = None
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # it is going away; what it says now helps nobody
                await client.close()


@dataclass(eq=False)
class Toolbox:
    """A session's servers, and the tools they brought."""

    servers: list[Server] = field(default_factory=list[Server])
    tools: dict[str, Tool] = field(default_factory=dict[str, Tool])
    """By the name the model knows; changes only between turns."""
    _starting: dict[Server, "asyncio.Task[list[dict[str, Any]]]"] = field(
        default_factory=dict[Server, "asyncio.Task[list[dict[str, Any]]]"]
    )

    def add(self, servers: Sequence[Server]) -> None:
        """Hang up servers; those that must be asked for their tools are started at once, side by side."""
        self.servers += servers
        for server in servers:
            self._starting[server] = asyncio.ensure_future(server.list())

    async def gather(self, wait: float) -> list[Server]:
        """Take in the tools of the servers that are up, waiting at most `wait` seconds; gives the servers that joined
        or failed since the last time."""
        if not self._starting:
            return []
        await asyncio.wait(self._starting.values(), timeout=wait or None if wait else 0)
        joined = [server for server, task in self._starting.items() if task.done()]
        for server in sorted(joined, key=lambda server: (not server.trusted, server.name)):
            for definition in sorted(self._starting.pop(server).result(), key=lambda tool: tool["name"]):
                name = tool_name(server, definition["name"], self.tools)
                self.tools[name] = Tool(name, server, definition)
        return joined

    def warm(self) -> None:
        """Have ready what a call will need."""
        for server in self.servers:
            if server.definitions is not None:
                server.warm()

    def schemas(self) -> list[dict[str, Any]]:
        """All tools in the shape of chat completions, in an order that never changes."""
        return [tool.schema for tool in self.tools.values()]

    def kind(self, call: ToolUse) -> ToolKind:
        """What a call does, as far as its tool's word can be taken."""
        tool = self.tools.get(call["function"]["name"])
        return tool.kind(arguments_of(call) or {}) if tool else "other"

    def reject(self, call: ToolUse) -> ToolResult | None:
        """The answer to a call that cannot be run: no such tool, or arguments that are no JSON object."""
        name = call["function"]["name"]
        tool = self.tools.get(name)
        if tool is None:
            return ToolResult.error(f"There is no tool {name!r}. The tools are: {', '.join(self.tools) or 'none'}.")
        if arguments_of(call) is None:
            schema = msgspec.json.encode(tool.schema["function"]["parameters"]).decode()
            return ToolResult.error(
                f"The call was not run: its arguments are not a JSON object ({fault(call)}). The schema is: {schema}"
            )
        return None

    async def call(self, call: ToolUse, meta: dict[str, Any]) -> ToolResult:
        """Run a call that `reject` let pass."""
        tool = self.tools[call["function"]["name"]]
        arguments = unquoted(arguments_of(call) or {}, tool.definition.get("inputSchema") or {})
        return await tool.server.call(tool.definition["name"], arguments, meta)

    async def close(self) -> None:
        """Stop what this session started."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self.servers if not server.shared))


def from_acp(config: McpServer, cwd: str) -> Server:
    """A server as the client or the configuration names it."""

    def source() -> Any:
        from fastmcp.client import transports  # loaded by `connected` already

        pairs = {} if config.headers is UNSET else {header.name: header.value for header in config.headers or ()}
        if config.type == "sse":
            return transports.SSETransport(str(config.url), headers=pairs)
        if config.url is not UNSET:
            return transports.StreamableHttpTransport(str(config.url), headers=pairs)
        env = {} if config.env is UNSET else {variable.name: variable.value for variable in config.env or ()}
        return transports.StdioTransport(
            str(config.command),
            [] if config.args is UNSET else list(config.args or ()),
            env=env,
            cwd=cwd,
            keep_alive=False,
            log_file=tempfile.TemporaryFile("w+"),
        )

    return Server(config.name, source)


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
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)
    try:
        return importlib.import_module("fastmcp").Client
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def tool_name(server: Server, name: str, taken: dict[str, Tool]) -> str:
    """The name the model sees: bare for the built-in tools, `{server}_{tool}` for all others, always; legal for every
    provider (letters, digits, `_`, `-`, at most 64) and unique."""
    full = name if server.trusted else f"{server.name}_{name}"
    legal = re.sub(r"[^a-zA-Z0-9_-]", "_", full)
    if len(legal) <= 64 and legal not in taken:
        return legal
    digest = hashlib.sha256(f"{server.name}\n{name}".encode()).hexdigest()[:8]
    return f"{legal[:55]}_{digest}"


def clean_text(text: str) -> str:
    """Text of many lines without other control characters."""
    return "\n".join(clean(line) for line in text.splitlines())


def unquoted(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Decode what the model sent as a string where the schema wants only an object or an array."""
    properties: dict[str, Any] = schema.get("properties") or {}
    wanted = {key for key, value in properties.items() if type_of(value) in ("object", "array")}
    decoded = dict(arguments)
    for key, value in arguments.items():
        if key in wanted and isinstance(value, str):
            with suppress(msgspec.DecodeError):
                decoded[key] = msgspec.json.decode(value)
    return decoded


def type_of(schema: Any) -> Any:
    """What a property's schema says of its type; true and false are schemas too."""
    match schema:
        case {"type": kind}:
            return kind
        case _:
            return None


def fault(call: ToolUse) -> str:
    """Where the arguments stop being JSON."""
    text = call["function"]["arguments"]
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        return str(error)
    return "empty"


def reason(error: BaseException) -> str:
    """An exception of a server's as the end of a sentence."""
    match error:
        case BaseExceptionGroup(exceptions=[first, *_]):
            return reason(first)
        case _:
            pass
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"the command {error.filename!r} was not found; check its name, or give its full path"
    return (str(error) or type(error).__name__).rstrip(".")
