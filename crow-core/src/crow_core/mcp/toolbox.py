"""The tools of a session: those of all its MCP servers, under the names that the model sees."""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import msgspec

from crow_core.errors import ConfigError
from crow_core.hooks import call_function
from crow_core.mcp.result import ToolResult
from crow_core.mcp.running_calls import Host, RunningCall
from crow_core.mcp.server import Server
from crow_core.mcp.tool import Tool, ToolCall, name_raw_call, parse_tool_call
from crow_core.messages.message import RawToolCall, make_unique
from crow_core.messages.tool_names import to_legal_name
from crow_core.text import decode_json

NAMES_LIMIT = 100
"""The number of tool names to list when the model calls an unknown tool."""
CHANGES_WAIT = 5.0
"""Seconds a turn waits for the new tool lists of servers that have announced a change."""


@dataclass(frozen=True)
class ToolChanges:
    """The news of one server since the toolbox was last updated: it joined, failed, or has other tools."""

    server: Server
    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    redefined: Sequence[str] = ()
    """Names of tools that are described differently now."""

    def __str__(self) -> str:
        """The changes in words; empty for a server that joined or failed."""
        changes = {"new": self.added, "gone": self.removed, "different": self.redefined}
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in changes.items() if names)


CANCELLED = "The user cancelled this call. The turn goes on without its result."
"""The result of a call that `Toolbox.cancel` has ended."""


@dataclass(eq=False)
class Toolbox:
    """The MCP servers of a session, and their tools."""

    host: Host | None = None
    """Answers the requests of servers; None refuses them."""
    servers: list[Server] = field(default_factory=list[Server])
    client_servers: Sequence[Server] = ()
    """Those among `servers` that the client named."""
    tools: dict[str, Tool] = field(default_factory=dict[str, Tool])
    """By the name the model knows; changes only between turns."""
    sent: list[dict[str, Any]] | None = None
    """The tool list of the session's requests. It changes only with a marker, between turns or when the view of the log
    changes anyway; None before the first."""
    own_secrets: Collection[str] = ()
    """Secrets of the session in addition to those of its servers: of the configuration and its models."""
    allowed: Sequence[str] = ()
    """Patterns of the names of the tools that may be called; empty for all."""
    _labels: dict[Server, str] = field(default_factory=dict[Server, str])
    """The prefix of the names of each server's tools."""
    _starting: dict[Server, "asyncio.Task[list[dict[str, Any]]]"] = field(
        default_factory=dict[Server, "asyncio.Task[list[dict[str, Any]]]"]
    )
    """The requests for tool lists that have not been taken in yet."""
    _seen: dict[Server, int] = field(default_factory=dict[Server, int])
    """The change counter of each server's tools at the last listing."""
    _removed: set[str] = field(default_factory=set[str])
    """Names of tools that their servers have withdrawn."""
    _roots: list[str] | None = None
    """The roots that the servers were last told."""
    _running: "dict[str, asyncio.Task[Any]]" = field(default_factory=dict[str, "asyncio.Task[Any]"])
    """The tasks of the tool calls that run, by id of the call."""
    _cancelled: set[str] = field(default_factory=set[str])
    """The ids of the tool calls that `cancel` has ended."""

    def add(self, servers: Sequence[Server]) -> None:
        """Add servers, and start those that must be asked for their tools, all at once.

        Raises ConfigError if two built-in servers have a tool of the same name, which neither of them can give up.
        """
        check_built_in_names([*self.servers, *servers])
        self.servers += servers
        for server in servers:
            if self.host:
                server.calls.hosts.add(self.host)
            label = make_unique(to_legal_name(server.name)[:40], {*self._labels.values()})
            self._labels[server] = "" if server.built_in else label
            self._start(server)
        for server in servers:
            if server.definitions is not None:  # so that the kinds of unanswered calls are known at once
                self.tools |= self._name_tools(server, server.definitions)

    def _start(self, server: Server) -> None:
        self._seen[server] = server.changes["tools"]
        self._starting[server] = asyncio.ensure_future(server.list())

    def restore(self, schemas: Sequence[dict[str, Any]] | None) -> None:
        """Start with the tool list of a stored session.

        A call of a tool whose server does not connect is answered with that fact.
        """
        self.sent = None if schemas is None else [*schemas]
        for schema in schemas or ():
            function: dict[str, Any] = schema["function"]
            definition = {"description": function.get("description"), "inputSchema": function.get("parameters")}
            self.tools[function["name"]] = Tool(function["name"], None, definition)

    async def wait(self, seconds: float) -> dict[Server, "asyncio.Task[list[dict[str, Any]]]"]:
        """Wait for servers that are starting, each at most `seconds` from the start of its process or connection.

        Returns those of the client's own that have not listed their tools by then, each with the task that does.
        """
        await asyncio.gather(*(wait_for_tools(server, task, seconds) for server, task in self._starting.items()))
        joined = {tool.server for tool in self.tools.values()}
        return {
            server: self._starting[server]
            for server in self.client_servers
            if server not in joined and server in self._starting and not self._starting[server].done()
        }

    async def failures(self) -> AsyncGenerator[Server]:
        """Yield each of the servers that are starting when it fails."""
        servers = {task: server for server, task in self._starting.items()}
        while servers:
            done, _ = await asyncio.wait(servers, return_when=asyncio.FIRST_COMPLETED)
            for server in map(servers.pop, done):
                if server.error:
                    yield server
                    self._starting.pop(server, None)  # not before: the caller may be cancelled

    async def update(self) -> list[ToolChanges]:
        """Take in the tools of the servers that have connected since the last time, or whose tools have changed.

        Waits at most CHANGES_WAIT for the new tools of servers that have announced a change.
        """
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
        if changed:
            await asyncio.wait([self._starting[server] for server in changed], timeout=CHANGES_WAIT)
        listed = [server for server, task in self._starting.items() if task.done()]
        news: list[ToolChanges] = []
        for server in sorted(listed, key=lambda server: (not server.built_in, self._labels[server])):
            before = {name: tool for name, tool in self.tools.items() if tool.server is server}
            definitions = self._starting.pop(server).result()
            changes = ToolChanges(server) if server.error else self._replace_tools(server, definitions, before)
            if server.error or not before:
                news.append(ToolChanges(server))
            elif str(changes):
                news.append(changes)
        return news

    def _replace_tools(
        self, server: Server, definitions: Sequence[dict[str, Any]], before: dict[str, Tool]
    ) -> ToolChanges:
        """Replace the tools of a server, which were `before`."""
        now = self._name_tools(server, definitions)
        removed = before.keys() - now.keys()
        self.tools = {name: tool for name, tool in self.tools.items() if name not in removed}
        self.tools |= now
        self._removed = (self._removed | removed) - now.keys()
        return ToolChanges(
            server,
            added=sorted(now.keys() - before.keys()),
            removed=sorted(removed),
            redefined=sorted(name for name in now.keys() & before.keys() if now[name].digest != before[name].digest),
        )

    def _name_tools(self, server: Server, definitions: Sequence[dict[str, Any]]) -> dict[str, Tool]:
        """Give the tools of a server the names that the model sees.

        A built-in tool keeps its name; every other is `{server}_{tool}`. A name has only characters that every provider
        accepts (letters, digits, `_`, `-`; at most 64) and is unique. It depends on which servers there are, not on the
        order in which they connect.
        """
        label = self._labels[server]
        longer = [f"{other}_" for other in self._labels.values() if len(other) > len(label)]
        built_in = {d["name"] for other in self.servers if other.built_in for d in other.definitions or ()}
        taken = {name for name, tool in self.tools.items() if tool.server not in (None, server)}
        named: dict[str, Tool] = {}
        for definition in sorted(definitions, key=lambda one: (to_legal_name(one["name"]) != one["name"], one["name"])):
            if not is_for_model(definition):
                continue
            tool = definition["name"]
            name = to_legal_name(tool) if server.built_in else f"{label}_{to_legal_name(tool)}"
            digest = hashlib.sha256(f"{server.name}\n{tool}".encode(errors="replace")).hexdigest()[:8]
            if not server.built_in and any(map(name.startswith, longer)):  # rules for the other server do not cover it
                name = f"{label}_{digest}_{to_legal_name(tool)}"[:64]
            elif (not server.built_in and name in built_in) or len(name) > 64 or name in named or name in taken:
                name = f"{name[:50]}_{digest}"
            name = make_unique(name, taken | named.keys())
            named[name] = Tool(name, server, definition)
        return dict(sorted(named.items()))

    def _announce_roots(self) -> None:
        """Tell the servers when the session's roots have changed."""
        roots = [*self.host.roots()] if self.host else []
        if self._roots not in (None, roots):
            for server in self.servers:
                server.announce_roots()
        self._roots = roots

    @property
    def secrets(self) -> set[str]:
        """All secrets of the session, which must be shown and stored nowhere; a login may add to them at any time."""
        return {*self.own_secrets, *(secret for server in self.servers for secret in server.secrets)}

    def external_servers(self) -> list[Server]:
        """List the servers that are not crow's own."""
        return [server for server in self.servers if server.source and not server.built_in]

    def make_tool(self, server: Server, definition: dict[str, Any]) -> Tool:
        """Make a tool that a server does not list, under the name that it would have among the server's tools."""
        return Tool(f"{self._labels[server]}_{definition['name']}", server, definition)

    def preload(self) -> None:
        """Load what a tool call will need, a little later."""
        for server in self.servers:
            if server.definitions is not None:
                server.preload()

    def schemas(self) -> list[dict[str, Any]]:
        """All tools in the shape of chat completions, in an order that never changes."""
        return [tool.schema for tool in self.tools.values()]

    def parse(self, use: RawToolCall) -> ToolCall:
        """Parse a tool call of a reply, and look up its tool."""
        return parse_tool_call(use, self.tools)

    def find_called(self, uses: Sequence[RawToolCall]) -> dict[str, str]:
        """Find the tools of those calls that name their tool in another way: call id to the tool's name."""
        named = [(use, name_raw_call(use, self.tools)) for use in uses]
        return {use["id"]: renamed["function"]["name"] for use, renamed in named if renamed is not use}

    def is_allowed(self, name: str) -> bool:
        """True if the tool of this name may be called."""
        return not self.allowed or any(fnmatchcase(name, pattern) for pattern in self.allowed)

    def reject(self, tool_call: ToolCall) -> ToolResult | None:
        """Answer a call that cannot run: of a tool that is not allowed or does not exist, or without a JSON object."""
        name, tool = tool_call.name, tool_call.tool
        if not self.is_allowed(name):
            return ToolResult.error(f"You were not given the tool {name!r}. Do without it.")
        if tool is None:
            what = (
                f"The tool {name!r} is gone: its server took it back"
                if name in self._removed
                else f"There is no tool {name[:200]!r}"
            )
            names = [*islice(self.tools, NAMES_LIMIT), *(["…"] if len(self.tools) > NAMES_LIMIT else [])]
            ours = next((tool for tool in self.tools.values() if tool.replaces(name)), None)
            instead = f" Use {ours.name}, whose arguments are: {', '.join(ours.properties)}." if ours else ""
            return ToolResult.error(f"{what}.{instead} The tools are: {', '.join(names) or 'none'}.")
        if tool.server is None:
            return ToolResult.error(f"The tool {name!r} is not connected: its server is no part of this session now.")
        if not tool_call.is_valid:
            schema = msgspec.json.encode(tool.schema["function"]["parameters"]).decode()
            fault = find_json_error(tool_call.use["function"]["arguments"])
            return ToolResult.error(
                f"The call was not run: its arguments are not a JSON object ({fault}). The schema is: {schema}"
            )
        if tool_call.fault:
            return ToolResult.error(f"{name} was not run. {tool_call.fault} Correct the arguments and call again.")
        return None

    async def connect(self, tool_call: ToolCall) -> None:
        """Connect the server of a call's tool if it is not connected. A failure is reported by the call itself."""
        server = tool_call.tool and tool_call.tool.server
        if server is not None and server.source is not None and not server.connected:
            with suppress(Exception):
                await server.client()

    async def call(self, tool_call: ToolCall, meta: dict[str, Any], session: Any = None) -> ToolResult:
        """Run a call that `reject` did not answer: by a handler, or by a server, which is sent `meta` as `_meta`.

        A handler is called only with the `session` whose call it is: without one, the tool answers with an error.
        `cancel` ends a call of a session: then its result says that the user did.
        """
        if session is None:
            return await self._call(tool_call, meta, None)
        task = asyncio.current_task()
        assert task is not None
        self._running[tool_call.id] = task
        try:
            return await self._call(tool_call, meta, session)
        except asyncio.CancelledError:
            if tool_call.id not in self._cancelled or task.uncancel() > 0:
                raise
            return ToolResult.error(CANCELLED)
        finally:
            del self._running[tool_call.id]

    async def _call(self, tool_call: ToolCall, meta: dict[str, Any], session: Any) -> ToolResult:
        """Run a call by a handler or a server."""
        tool = tool_call.tool
        assert tool is not None
        assert tool.server is not None
        if session is not None and (handler := tool.server.handlers.get(tool.definition["name"])):
            return await call_function(handler, session, tool_call)
        arguments = tool_call.arguments
        running = RunningCall(self.host, tool_call.id, tool_call.title, may_repeat=tool.may_repeat(arguments))
        return await tool.server.call(tool.definition["name"], arguments, meta, running)

    def cancel(self, id: str) -> bool:
        """Cancel a tool call that runs; the others go on. Return False if no such call runs."""
        if (task := self._running.get(id)) is None or id in self._cancelled:
            return False
        self._cancelled.add(id)
        return task.cancel()

    def is_running(self, id: str) -> bool:
        """True if a tool call runs."""
        return id in self._running

    def is_cancelled(self, id: str) -> bool:
        """True if `cancel` has ended a tool call."""
        return id in self._cancelled

    async def close(self) -> None:
        """Disconnect the servers that belong to this session alone."""
        for task in self._starting.values():
            task.cancel()
        await asyncio.gather(*self._starting.values(), return_exceptions=True)
        for server in self.servers:
            server.leave(self.host)
        await asyncio.gather(*(server.close() for server in self.servers if server.closed))


def check_built_in_names(servers: Sequence[Server]) -> None:
    """Raises ConfigError if two tools of built-in servers have the same name for the model."""
    owners: dict[str, Server] = {}
    for server in dict.fromkeys(servers):
        for definition in server.definitions or () if server.built_in else ():
            name = to_legal_name(definition["name"])
            if name in owners:
                both = " and ".join(dict.fromkeys([owners[name].name, server.name]))
                raise ConfigError(f"Two tools have the name {name!r} (of {both}). Give one of them another name.")
            owners[name] = server


async def wait_for_tools(server: Server, listing: "asyncio.Task[list[dict[str, Any]]]", seconds: float) -> None:
    """Wait until a server has listed its tools, at most `seconds` from the start of its process or connection."""
    starting = asyncio.ensure_future(server.started.wait())
    try:
        await asyncio.wait([listing, starting], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([listing], timeout=server.start_time + seconds - asyncio.get_running_loop().time())
    finally:
        starting.cancel()


def find_json_error(text: str) -> str:
    """Say where the arguments of a call stop being a JSON object."""
    try:
        json.loads(text)  # its messages name line and column
        decode_json(text)
        msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        return str(error)
    return "empty"


def is_for_model(definition: dict[str, Any]) -> bool:
    """Return whether the model may know a tool: MCP Apps (SEP-1865) have tools for their own pages alone."""
    match definition.get("_meta"):
        case {"ui": {"visibility": [*visibility]}}:
            return "model" in visibility
        case _:
            return True
