"""MCP Apps (SEP-1865): a client that shows HTML gets the `ui://` resource of a tool call, and passes on its requests.

The log names the calls with an app, so that the app is shown when the session is opened again. A request of an app is
judged, shown and logged as a call of the model; it reaches its own server alone.
"""

import base64
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import INTERNAL_ERROR, INVALID_PARAMS
from crow_core.acp.shared_methods import APP_METHOD, APP_REQUEST_METHOD
from crow_core.app import Crow
from crow_core.masking import mask
from crow_core.mcp.resources import NAME, read_contents, to_block, to_read_call
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.server_answers import APP_TYPE
from crow_core.mcp.tool import Tool, ToolCall, parse_tool_call
from crow_core.messages.message import RawToolCall, marker_kind
from crow_core.messages.notes import Notes
from crow_core.session.log import new_id
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line
from msgspec import Struct

from crow_extensions.inner_calls import use_tool

MAX_APP = 2_000_000
"""Characters of the HTML of an app, or of an answer to it, that are passed on."""
MAX_KEPT = 50_000
"""Characters of a result that the log keeps for the app."""
MAX_REQUESTS = 200
"""Requests of the app of one tool call, until the session is closed: each stands in the log."""
REQUESTS = StateKey("app_requests", Counter[str])
"""The number of requests by the id of the app's tool call."""


class AppNotes(Notes, total=False):
    """The tool call `call` of `tool`, as the server names it, has an app."""

    server: str
    """The name of the server."""
    uri: str
    """The resource with the HTML."""
    given: dict[str, Any]
    """The arguments of the call."""
    result: dict[str, Any]
    """The result of the call as the server gave it (MCP); missing if it is too long."""


class App(Struct):
    """The app of a tool call, as the log has it."""

    call: str
    server: str
    tool: str
    uri: str
    given: dict[str, Any] = {}
    result: dict[str, Any] = {}


def mcp_apps(crow: Crow) -> None:
    """Note which tool calls have an app, and add the methods by which a client shows it."""
    crow.methods[APP_METHOD] = read_app
    crow.methods[APP_REQUEST_METHOD] = answer_app

    @crow.after_tool
    def note(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        if (tool := tool_call.tool) is None or tool.server is None or result.is_error or not (uri := find_app(tool)):
            return
        name, given = str(tool.definition["name"]), tool_call.arguments
        notes: AppNotes = {"kind": "app", "call": tool_call.id, "server": tool.server.name, "tool": name, "uri": uri}
        for_app = {"content": result.content, **result.for_apps}
        if len(msgspec.json.encode([given, for_app])) <= MAX_KEPT:
            notes |= cast("AppNotes", mask({"given": given, "result": for_app}, session.secrets))
        session.log.append({"crow": notes})


async def read_app(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """Answer the method `_crow/app`: the HTML, what it may load, and the call; `{}` for a call without an app."""
    if not (app := find_shown(session, params.get("toolCallId"))):
        return {}
    try:
        html, csp = await read_html(find_server(session, app), app.uri)
    except (ConnectionError, ValueError) as error:
        return {"server": app.server, "problem": str(error)}
    shown = {"server": app.server, "tool": app.tool, "given": app.given, "result": app.result or {"content": []}}
    return {**shown, "html": html, "csp": csp}


async def answer_app(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """Answer the method `_crow/app_request`: a request of an app, to its own server. Raises RpcError."""
    id, wanted = str(params.get("toolCallId")), params.get("params")
    if not (app := find_shown(session, id)) or not isinstance(wanted, dict):
        raise RpcError(INVALID_PARAMS, "Invalid params", details="There is no such app.")
    session.state[REQUESTS][id] += 1
    if session.state[REQUESTS][id] > MAX_REQUESTS:
        raise RpcError(INTERNAL_ERROR, f"This app has sent {MAX_REQUESTS} requests; crow answers no more.")
    try:
        server = find_server(session, app)
        match params.get("method"), cast("dict[str, Any]", wanted):
            case "tools/call", {"name": str(name), **others}:
                answer = await call_tool(session, id, server, name, others.get("arguments") or {})
            case "resources/read", {"uri": str(uri)}:
                answer = {"contents": await read_resource(session, id, server, uri)}
            case _:
                raise ValueError("Apps may send tools/call and resources/read.")
    except (ConnectionError, ValueError) as error:
        raise RpcError(INTERNAL_ERROR, str(error)) from error
    if len(msgspec.json.encode(answer)) > MAX_APP:
        raise RpcError(INTERNAL_ERROR, f"The answer has more than {MAX_APP:,} characters.")
    return mask(answer, session.secrets)


def find_shown(session: Session, call: Any) -> App | None:
    """Return the app of a tool call; None if it has none."""
    markers = (entry.get("crow", {}) for entry in reversed(session.log) if marker_kind(entry) == "app")
    notes = next((each for each in markers if each.get("call") == call), None)
    return msgspec.convert(notes, App) if notes else None


def find_server(session: Session, app: App) -> Server:
    """Return the server of an app. Raises ValueError if the session does not have it."""
    servers = session.toolbox.external_servers()
    if found := next((each for each in servers if each.name == app.server), None):
        return found
    raise ValueError(f"The MCP server {to_line(app.server)!r} is not part of this session now.")


def find_app(tool: Tool) -> str:
    """Return the URI of a tool's app; empty if it has none."""
    match tool.definition.get("_meta"):
        case {"ui": {"resourceUri": str(uri)}} | {"ui/resourceUri": str(uri)} if uri.startswith("ui://"):
            return uri
        case _:
            return ""


async def call_tool(session: Session, id: str, server: Server, name: str, arguments: Any) -> dict[str, Any]:
    """Call a tool for an app, and return the result as the server gave it. Raises ValueError if the app may not."""
    definition = next((each for each in await server.list() if each["name"] == name), None)
    if definition is None or not is_for_apps(definition):
        raise ValueError(f"The MCP server of this app has no tool {name[:80]!r} for apps.")
    tools = session.toolbox.tools
    listed = (each for each in tools.values() if each.server is server and each.definition["name"] == name)
    tool = next(listed, None) or session.toolbox.make_tool(server, definition)
    if tools.get(tool.name, tool).server is not server:
        raise ValueError(f"Another MCP server has a tool {tool.name!r}, whose rules would apply.")
    use = make_use(id, tool.name, arguments)
    title = f"The page of {to_line(server.name)}"
    tool_call = replace(parse_tool_call(use, {tool.name: tool}), tool_title=title)
    raw: ToolResult | None = None

    async def run(decided: ToolCall) -> ToolResult:
        nonlocal raw
        raw = await session.toolbox.call(decided, session.meta(decided), session)
        return raw

    result = await use_tool(session, id, tool_call, run)
    answered = raw or result
    return {"content": answered.content, "isError": answered.is_error, **answered.for_apps}


async def read_resource(session: Session, id: str, server: Server, uri: str) -> list[dict[str, Any]]:
    """Read a resource for an app. Its own pages are read without a question. Raises ConnectionError, ValueError."""
    if uri.startswith("ui://"):
        return await read_contents(server, uri)
    if not server.offers(NAME):
        raise ValueError("The settings of this MCP server leave its resources out.")
    contents: list[dict[str, Any]] = []

    async def run(decided: ToolCall) -> ToolResult:
        try:
            contents.extend(await read_contents(server, uri))
        except ConnectionError as error:
            return ToolResult.error(f"{uri!r} was not read: {error}.")
        return ToolResult([*map(to_block, contents)])

    asked = ToolCall(make_use(id, NAME, {}), {})
    result = await use_tool(session, id, to_read_call(session.toolbox, asked, server, uri), run)
    if result.is_error:
        raise ValueError("\n".join(str(block.get("text", "")) for block in result.content))
    return contents


def make_use(id: str, name: str, arguments: Any) -> RawToolCall:
    text = msgspec.json.encode(arguments).decode()
    return {"id": f"{id}/{new_id()}", "type": "function", "function": {"name": name, "arguments": text}}


def is_for_apps(definition: Mapping[str, Any]) -> bool:
    """Return whether an app may call a tool of its server."""
    match definition.get("_meta"):
        case {"ui": {"visibility": [*visibility]}}:
            return "app" in visibility
        case _:
            return True


async def read_html(server: Server, uri: str) -> tuple[str, dict[str, Any]]:
    """Read an app and its `_meta.ui.csp`. Raises ConnectionError, and ValueError if it cannot be shown."""
    try:
        contents = await read_contents(server, uri)
    except ConnectionError as error:
        raise ConnectionError(f"It did not answer: {error}") from error
    for each in contents:
        match each:
            case {"mimeType": str(kind), **others} if kind.replace(" ", "") == APP_TYPE:
                text = others.get("text")
                html = text if isinstance(text, str) else base64.b64decode(str(others.get("blob", ""))).decode()
                if len(html) > MAX_APP:
                    raise ValueError(f"It has more than {MAX_APP:,} characters.")
                return html, read_csp(others.get("_meta"))
            case _:
                pass
    raise ValueError(f"The resource {uri[:200]} is not of the type {APP_TYPE}.")


def read_csp(meta: Any) -> dict[str, Any]:
    """Return the domains that an app declares."""
    match meta:
        case {"ui": {"csp": {**csp}}}:
            return csp
        case _:
            return {}
