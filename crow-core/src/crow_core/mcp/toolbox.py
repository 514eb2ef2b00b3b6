"""Every tool is an MCP tool, and this is where a session's tools hang."""

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from crow_core.acp.schema import ToolKind
from crow_core.content import to_announcement
from crow_core.mcp.server import Host, RunningCall, Server
from crow_core.mcp.tool import Tool, ToolResult
from crow_core.messages import ToolUse, make_unique, parse_arguments

NAMES = 100
"""Tools that are named to a model that called none of them."""
CHANGES_WAIT = 5.0
"""Seconds a turn waits for the list of a server that has said it is another one now."""
CHANGES_LIMIT = 300
"""Characters in which it is told what has changed of a server's tools."""


@dataclass(eq=False)
class Toolbox:
    """A session's servers, and the tools they brought."""

    host: Host | None = None
    """Whom the servers may ask back."""
    servers: list[Server] = field(default_factory=list[Server])
    tools: dict[str, Tool] = field(default_factory=dict[str, Tool])
    """By the name the model knows; changes only between turns."""
    _labels: dict[Server, str] = field(default_factory=dict[Server, str])
    """What the names of a server's tools begin with."""
    _starting: dict[Server, "asyncio.Task[list[dict[str, Any]]]"] = field(
        default_factory=dict[Server, "asyncio.Task[list[dict[str, Any]]]"]
    )
    _seen: dict[Server, int] = field(default_factory=dict[Server, int])
    """Which of the changes of its tools has been looked at."""
    _gone: set[str] = field(default_factory=set[str])
    """Names of tools that their servers took back."""
    _roots: list[str] | None = None
    """What the servers were told to work in."""

    def add(self, servers: Sequence[Server]) -> None:
        """Hang up servers; those that must be asked for their tools are started at once, side by side."""
        self.servers += servers
        for server in servers:
            if self.host:
                server.hosts.add(self.host)
            self._labels[server] = (
                "" if server.built_in else make_unique(to_legal_name(server.name)[:40], {*self._labels.values()})
            )
            self._start(server)

    def _start(self, server: Server) -> None:
        """Begin to ask a server for its tools."""
        self._seen[server] = server.changes["tools"]
        self._starting[server] = asyncio.ensure_future(server.list())

    def recall(self, schemas: Sequence[dict[str, Any]]) -> None:
        """Begin with the tool list of earlier days; a tool whose server does not come up answers that."""
        for schema in schemas:
            function: dict[str, Any] = schema["function"]
            definition = {"description": function.get("description"), "inputSchema": function.get("parameters")}
            self.tools[function["name"]] = Tool(function["name"], None, definition)

    async def gather(self, wait: float) -> list[tuple[Server, str]]:
        """Take in the tools of the servers that are up, waiting at most `wait` seconds for those that have not been up
        before; gives the servers that joined or failed since the last time, and those whose tools are others now, with
        what has changed in words."""
        self._announce_roots()
        changed = [
            server
            for server in self.servers
            if server.definitions is None
            and server not in self._starting
            and server.changes["tools"] != self._seen[server]
        ]
        for server in changed:
            self._start(server)
        if not self._starting:
            return []
        waiting = self._starting if wait else changed or self._starting
        timeout = wait or (CHANGES_WAIT if changed else 0)
        await asyncio.wait([self._starting[server] for server in waiting], timeout=timeout)
        joined = [server for server, task in self._starting.items() if task.done()]
        news: list[tuple[Server, str]] = []
        for server in sorted(joined, key=lambda server: (not server.built_in, self._labels[server])):
            before = {name: tool for name, tool in self.tools.items() if tool.server is server}
            found = self._starting.pop(server).result()
            changes = "" if server.error else self._take_in(server, found, before)
            if server.error or not before:
                news.append((server, ""))
            elif changes:
                news.append((server, changes[:CHANGES_LIMIT]))
        return news

    def _take_in(self, server: Server, definitions: Sequence[dict[str, Any]], before: dict[str, Tool]) -> str:
        """Replace a server's tools by these; gives in words what that changes."""
        now = self._named(server, definitions)
        gone = before.keys() - now.keys()
        self.tools = {name: tool for name, tool in self.tools.items() if name not in gone}
        self.tools |= now
        self._gone = (self._gone | gone) - now.keys()
        changes = {
            "new": now.keys() - before.keys(),
            "gone": gone,
            "different": {name for name in now.keys() & before.keys() if now[name].digest != before[name].digest},
        }
        return "; ".join(f"{what}: {', '.join(sorted(names))}" for what, names in changes.items() if names)

    def _named(self, server: Server, definitions: Sequence[dict[str, Any]]) -> dict[str, Tool]:
        """A server's tools by the names the model sees: bare for the built-in tools, `{server}_{tool}` for all others,
        always; legal for every provider (letters, digits, `_`, `-`, at most 64) and unique.

        They depend on which servers there are, not on which is up first.
        """
        label = self._labels[server]
        others = [f"{other}_" for other in self._labels.values() if len(other) > len(label)]
        fixed = {d["name"] for other in self.servers if other.built_in for d in other.definitions or ()}
        taken = {name for name, tool in self.tools.items() if tool.server not in (None, server)}
        named: dict[str, Tool] = {}
        for definition in sorted(definitions, key=lambda one: (to_legal_name(one["name"]) != one["name"], one["name"])):
            tool = definition["name"]
            name = to_legal_name(tool) if server.built_in else f"{label}_{to_legal_name(tool)}"
            strange = not server.built_in and (name in fixed or any(map(name.startswith, others)))
            if strange or len(name) > 64 or name in named or name in taken:
                digest = hashlib.sha256(f"{server.name}\n{tool}".encode(errors="replace")).hexdigest()[:8]
                name = f"{name[:50]}_{digest}"
            name = make_unique(name, taken | named.keys())
            named[name] = Tool(name, server, definition)
        return dict(sorted(named.items()))

    def _announce_roots(self) -> None:
        """Let the servers know when the folders to work in are others than before."""
        roots = [*self.host.roots()] if self.host else []
        if self._roots not in (None, roots):
            for server in self.servers:
                server.announce_roots()
        self._roots = roots

    @property
    def secrets(self) -> set[str]:
        """What its servers were given that nobody else may see; a login may have brought more since they began."""
        return {secret for server in self.servers for secret in server.secrets}

    def warm(self) -> None:
        """Have ready what a call will need."""
        for server in self.servers:
            if server.definitions is not None:
                server.preload()

    def schemas(self) -> list[dict[str, Any]]:
        """All tools in the shape of chat completions, in an order that never changes."""
        return [tool.schema for tool in self.tools.values()]

    def kind(self, call: ToolUse) -> ToolKind:
        """What a call does, as far as its tool's word can be taken."""
        tool = self.tools.get(call["function"]["name"])
        return tool.kind(parse_arguments(call) or {}) if tool else "other"

    def title(self, call: ToolUse) -> str:
        """What a call's tool is called before people, if that is more than its name."""
        tool = self.tools.get(call["function"]["name"])
        return tool.title if tool else ""

    def destroys(self, call: ToolUse) -> bool:
        """Whether its server says that it may destroy something."""
        tool = self.tools.get(call["function"]["name"])
        return tool is not None and tool.destroys

    def digest(self, call: ToolUse) -> str:
        """Of the definition of a call's tool."""
        tool = self.tools.get(call["function"]["name"])
        return tool.digest if tool else ""

    def is_of(self, call: ToolUse, server: Server) -> bool:
        """Whether it is a call of one of this server's tools."""
        tool = self.tools.get(call["function"]["name"])
        return tool is not None and tool.server is server

    def reject(self, call: ToolUse) -> ToolResult | None:
        """The answer to a call that cannot be run: no such tool, or arguments that are no JSON object."""
        name = call["function"]["name"]
        tool = self.tools.get(name)
        if tool is None:
            what = (
                f"The tool {name!r} is gone: its server took it back"
                if name in self._gone
                else f"There is no tool {name!r}"
            )
            names = [*islice(self.tools, NAMES), *(["…"] if len(self.tools) > NAMES else [])]
            return ToolResult.error(f"{what}. The tools are: {', '.join(names) or 'none'}.")
        if tool.server is None:
            return ToolResult.error(f"The tool {name!r} is not connected: its server is no part of this session now.")
        if parse_arguments(call) is None:
            schema = msgspec.json.encode(tool.schema["function"]["parameters"]).decode()
            return ToolResult.error(
                f"The call was not run: its arguments are not a JSON object ({find_json_error(call)}). "
                f"The schema is: {schema}"
            )
        return None

    async def call(self, call: ToolUse, meta: dict[str, Any]) -> ToolResult:
        """Run a call that `reject` let pass."""
        tool = self.tools[call["function"]["name"]]
        arguments = decode_strings(parse_arguments(call) or {}, tool.schema["function"]["parameters"])
        assert tool.server is not None
        title = to_announcement(call, "other", "", tool.title).title
        use = RunningCall(self.host, call["id"], title, may_repeat=tool.may_repeat(arguments))
        return await tool.server.call(tool.definition["name"], arguments, meta, use)

    async def close(self) -> None:
        """Stop what this session started."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        for server in self.servers:
            if self.host:
                server.hosts.discard(self.host)
        await asyncio.gather(*(server.close() for server in self.servers if not (server.shared or server.hosts)))


def to_legal_name(name: str) -> str:
    """A name in characters that every provider takes."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)


def decode_strings(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Decode what the model sent as a string where the schema wants only an object or an array."""
    properties: dict[str, Any] = schema.get("properties") or {}
    definitions: dict[str, Any] = schema.get("$defs") or {}
    decoded = dict(arguments)
    for key, value in arguments.items():
        if isinstance(value, str) and find_types(properties.get(key), definitions) - {"null"} <= {"object", "array"}:
            with suppress(msgspec.DecodeError, RecursionError):
                inner = msgspec.json.decode(value)
                decoded[key] = inner if isinstance(inner, dict | list) else value
    return decoded


def find_types(schema: Any, definitions: dict[str, Any]) -> set[str]:
    """The types a property's schema allows; "any" where it does not say."""
    match schema:
        case {"type": str(kind)}:
            return {kind}
        case {"type": [*kinds]}:
            return set(map(str, kinds))
        case {"anyOf": [*choices]} | {"oneOf": [*choices]}:
            return {kind for choice in choices for kind in find_types(choice, definitions)}
        case {"$ref": str(name)} if (target := definitions.get(name.removeprefix("#/$defs/"))) is not None:
            return find_types(target, {})  # one step: what refers to itself never ends
        case _:
            return {"any"}


def find_json_error(call: ToolUse) -> str:
    """Where the arguments stop being a JSON object."""
    text = call["function"]["arguments"]
    try:
        json.loads(text)  # its complaints name line and column
        msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        return str(error)
    return "empty"
