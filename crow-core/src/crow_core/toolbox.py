"""Every tool is an MCP tool, and this is where a session's tools hang."""

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from crow_core.acp.schema import ToolKind
from crow_core.content import ToolResult, clean
from crow_core.messages import ToolUse, arguments_of, unique
from crow_core.servers import Server

DESCRIPTION_LIMIT = 8_000
"""Characters of a tool's description that the model is shown."""


@dataclass(eq=False)
class Tool:
    """One tool under the name the model knows it by."""

    name: str
    server: Server | None
    """None for a tool of earlier days whose server is not connected."""
    definition: dict[str, Any]
    """As its server's tools/list gave it."""

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool in the shape of chat completions."""
        function: dict[str, Any] = {
            "name": self.name,
            "description": clean_text(self.definition.get("description") or "")[:DESCRIPTION_LIMIT],
            "parameters": self.definition.get("inputSchema") or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}

    def kind(self, arguments: dict[str, Any]) -> ToolKind:
        """What a call with these arguments does; only a trusted server's own word is taken for it."""
        trusted = self.server is not None and self.server.trusted
        told: dict[str, Any] = self.definition.get("_meta") or {} if trusted else {}
        match told.get("crow/kind", "other"):
            case str(kind):
                return kind  # pyright: ignore[reportReturnType] - our own tools' word
            case kinds:
                return kinds.get(str(arguments.get("command")), "other")


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

    def recall(self, schemas: Sequence[dict[str, Any]]) -> None:
        """Begin with the tool list of earlier days; a tool whose server does not come up answers that."""
        for schema in schemas:
            function: dict[str, Any] = schema["function"]
            definition = {"description": function.get("description"), "inputSchema": function.get("parameters")}
            self.tools[function["name"]] = Tool(function["name"], None, definition)

    async def gather(self, wait: float) -> list[Server]:
        """Take in the tools of the servers that are up, waiting at most `wait` seconds; gives the servers that joined
        or failed since the last time."""
        if not self._starting:
            return []
        await asyncio.wait(self._starting.values(), timeout=wait or None if wait else 0)
        joined = [server for server, task in self._starting.items() if task.done()]
        for server in sorted(joined, key=lambda server: (not server.trusted, server.name)):
            for definition in sorted(self._starting.pop(server).result(), key=lambda tool: tool["name"]):
                taken = {name for name, tool in self.tools.items() if tool.server}
                name = tool_name(server, definition["name"], taken)
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

    def is_of(self, call: ToolUse, server: Server) -> bool:
        """Whether it is a call of one of this server's tools."""
        tool = self.tools.get(call["function"]["name"])
        return tool is not None and tool.server is server

    def reject(self, call: ToolUse) -> ToolResult | None:
        """The answer to a call that cannot be run: no such tool, or arguments that are no JSON object."""
        name = call["function"]["name"]
        tool = self.tools.get(name)
        if tool is None:
            return ToolResult.error(f"There is no tool {name!r}. The tools are: {', '.join(self.tools) or 'none'}.")
        if tool.server is None:
            return ToolResult.error(f"The tool {name!r} is not connected: its server is no part of this session now.")
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
        assert tool.server is not None
        return await tool.server.call(tool.definition["name"], arguments, meta)

    async def close(self) -> None:
        """Stop what this session started."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self.servers if not server.shared))


def tool_name(server: Server, name: str, taken: set[str]) -> str:
    """The name the model sees: bare for the built-in tools, `{server}_{tool}` for all others, always; legal for every
    provider (letters, digits, `_`, `-`, at most 64) and unique."""
    full = name if server.trusted else f"{server.name}_{name}"
    legal = re.sub(r"[^a-zA-Z0-9_-]", "_", full)
    if len(legal) > 64 or legal in taken:
        digest = hashlib.sha256(f"{server.name}\n{name}".encode(errors="replace")).hexdigest()[:8]
        legal = f"{legal[:50]}_{digest}"
    return unique(legal, taken)


def clean_text(text: str) -> str:
    """Text of many lines without other control characters."""
    return "\n".join(clean(line) for line in text.splitlines())


def unquoted(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Decode what the model sent as a string where the schema wants only an object or an array."""
    properties: dict[str, Any] = schema.get("properties") or {}
    definitions: dict[str, Any] = schema.get("$defs") or {}
    decoded = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, str) and types_of(properties.get(key), definitions) - {"null"} <= {"object", "array"}:
            with suppress(msgspec.DecodeError, RecursionError):
                inner = msgspec.json.decode(value)
                decoded[key] = inner if isinstance(inner, dict | list) else value
    return decoded


def types_of(schema: Any, definitions: dict[str, Any]) -> set[str]:
    """The types a property's schema allows; "any" where it does not say."""
    match schema:
        case {"type": str(kind)}:
            return {kind}
        case {"type": [*kinds]}:
            return set(map(str, kinds))
        case {"anyOf": [*choices]} | {"oneOf": [*choices]}:
            return {kind for choice in choices for kind in types_of(choice, definitions)}
        case {"$ref": str(name)} if (target := definitions.get(name.removeprefix("#/$defs/"))) is not None:
            return types_of(target, {})  # one step: what refers to itself never ends
        case _:
            return {"any"}


def fault(call: ToolUse) -> str:
    """Where the arguments stop being a JSON object."""
    text = call["function"]["arguments"]
    try:
        json.loads(text)  # its complaints name line and column
        msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        return str(error)
    return "empty"
