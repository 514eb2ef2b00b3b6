"""Let the model search for tools where there are very many, so that the list it is sent stays short and constant."""

import re
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec
from crow_core.acp.decoding import convert_leniently
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Handler, Server
from crow_core.mcp.tool import PROXY_TOOL, Tool, ToolCall
from crow_core.session.session import Session
from msgspec import Struct, ValidationError

NAME = "tool_search"
RESULTS_LIMIT = 20
"""Tools that one search returns at most."""

DEFINITIONS: list[dict[str, Any]] = [
    {
        "name": NAME,
        "description": "Find tools. Many are not listed here, of MCP servers that are connected: search for what you "
        f"want to do, then call what was found through {PROXY_TOOL}.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "words of what the tool should do, or of its name"},
                "limit": {"type": "integer", "default": 5, "minimum": 1, "maximum": RESULTS_LIMIT},
            },
            "required": ["query"],
        },
        "_meta": {"crow/kind": "search"},
    },
    {
        "name": PROXY_TOOL,
        "description": f"Call a tool that {NAME} found.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {"type": "object", "description": "as the tool's schema wants them"},
            },
            "required": ["name", "arguments"],
        },
    },
]


class ToolQuery(Struct):
    """The arguments of a call of `tool_search`."""

    query: str
    limit: int = 5


def tool_search(crow: Crow, *, above: int = 60, share: float = 0.1) -> None:
    """Leave tools out of the list when MCP servers have many; the model finds them by a search, and uses `call_tool`.

    Tools are left out when there are more than `above` of them, or when their schemas take more than `share` of the
    model's window (0.1 is a tenth).
    """

    handlers: dict[str, Handler] = {NAME: search, PROXY_TOOL: refuse_proxy_call}
    server = Server(NAME, definitions=DEFINITIONS, handlers=handlers, built_in=True, shared=True)

    @crow.mcp_servers
    def offer(session: Session) -> Sequence[Server]:
        return [server]

    @crow.tools
    def defer(schemas: list[dict[str, Any]], session: Session) -> list[dict[str, Any]]:
        tools = session.toolbox.tools
        sent = {schema["function"]["name"] for schema in session.toolbox.sent or ()}
        by_name = {schema["function"]["name"]: schema for schema in schemas}
        ours = {name: by_name.pop(name) for name in [*by_name] if tools[name].server is server}
        searched = {name: schema for name, schema in by_name.items() if is_foreign(tools[name])}
        if NAME not in sent and len(searched) <= above and not is_large([*searched.values()], session, share):
            return [*by_name.values()]
        kept = [schema for name, schema in by_name.items() if name in sent or name not in searched]
        return [*kept, *ours.values()]


def search(session: Session, tool_call: ToolCall) -> ToolResult:
    """Answer a call with the tools that fit its words."""
    try:
        query = convert_leniently(tool_call.arguments, ToolQuery)
    except ValidationError as error:
        return ToolResult.error(f"Nothing was searched: {error}.")
    tools = [tool for tool in session.toolbox.tools.values() if is_foreign(tool)]
    found = rank_tools(tools, query.query)[: min(max(query.limit, 1), RESULTS_LIMIT)]
    if not found:
        servers = sorted({tool.server.name for tool in tools if tool.server})
        return ToolResult.text(f"No tool has these words. Try others; the servers are: {', '.join(servers)}.")
    return ToolResult.text("\n\n".join(describe_tool(tool) for tool in found))


def refuse_proxy_call(session: Session, tool_call: ToolCall) -> ToolResult:
    """Refuse a call of `call_tool` that does not name a tool; any other is parsed as the call that it asks for."""
    return ToolResult.error('Nothing was called. The arguments are {"name": …, "arguments": {…}}.')


def is_foreign(tool: Tool) -> bool:
    """True if a tool is one of an MCP server that is not built in."""
    return tool.server is not None and not tool.server.built_in


def is_large(schemas: Sequence[dict[str, Any]], session: Session, share: float) -> bool:
    """True if schemas take more than this share of the model's window, at four characters a token."""
    window = session.model.window
    return bool(window) and len(msgspec.json.encode(schemas)) / 4 > share * (window or 0)


def describe_tool(tool: Tool) -> str:
    """Describe a tool for the model: its name, its description and the schema of its arguments."""
    function = tool.schema["function"]
    return f"{tool.name}\n{function['description']}\n{msgspec.json.encode(function['parameters']).decode()}"


def rank_tools(tools: Sequence[Tool], query: str) -> list[Tool]:
    """List the tools that have a word of the query, the best first (BM25; a name weighs more than a description)."""
    import sqlite3  # imported here: few sessions search

    words = split_words(query)
    with closing(sqlite3.connect(":memory:")) as base:
        base.execute("CREATE VIRTUAL TABLE tool USING fts5(name, description, parameters, tokenize='porter')")
        base.executemany(
            "INSERT INTO tool (rowid, name, description, parameters) VALUES (?, ?, ?, ?)", make_rows(tools)
        )
        asked = " OR ".join(f'"{word}"' for word in words)
        matches = "SELECT rowid FROM tool WHERE tool MATCH ? ORDER BY bm25(tool, 4.0, 2.0, 1.0), rowid"
        found = base.execute(matches, (asked,)).fetchall() if words else []
    return [tools[row] for (row,) in found]


def make_rows(tools: Sequence[Tool]) -> list[tuple[int, str, str, str]]:
    """Make a row for each tool: its index, and the words of its name, its description and its parameters."""
    rows: list[tuple[int, str, str, str]] = []
    for at, tool in enumerate(tools):
        function = tool.schema["function"]
        properties: Any = function["parameters"].get("properties")
        parameters = msgspec.json.encode(properties if isinstance(properties, dict) else {}).decode()
        name, about = " ".join(split_words(tool.name)), " ".join(split_words(function["description"]))
        rows.append((at, name, about, " ".join(split_words(parameters))))
    return rows


def split_words(text: str) -> list[str]:
    """Split a text into words, also `camelCase` and `snake_case`."""
    return re.findall(r"[^\W_]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text))
