"""MCP Apps (SEP-1865): a client that shows HTML gets the `ui://` resource of a tool call."""

import base64
from typing import Any

from crow_core.acp.connection import RpcError
from crow_core.acp.schema import INVALID_PARAMS
from crow_core.acp.shared_methods import APP_METHOD
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.mcp.server_answers import describe_error
from crow_core.mcp.tool import Tool
from crow_core.messages.message import Message
from crow_core.session.session import Session

MIME_TYPE = "text/html;profile=mcp-app"
MAX_APP = 2_000_000
"""Characters of the HTML of an app that is passed on."""


def mcp_apps(crow: Crow) -> None:
    """Add the method `_crow/app`, by which a client reads the app of a tool call, if its tool has one."""
    crow.methods[APP_METHOD] = read_app


async def read_app(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """Answer the method `_crow/app`: the HTML, what it may load, and the call; `{}` for a tool without an app."""
    id = params.get("toolCallId")
    call = next((call for entry in session.log for call in entry.get("tool_calls", ()) if call["id"] == id), None)
    if call is None:
        raise RpcError(INVALID_PARAMS, "Invalid params", details=f"There is no tool call {str(id)[:80]!r}.")
    tool = session.toolbox.tools.get(call["function"]["name"])
    if tool is None or tool.server is None or not (uri := find_app(tool)):
        return {}
    try:
        html, csp = await read_html(tool.server, uri)
    except (ConnectionError, ValueError) as error:
        return {"server": tool.server.name, "problem": str(error)}
    answer = next((entry for entry in session.log if entry.get("tool_call_id") == id), None)
    return {
        "server": tool.server.name,
        "tool": tool.definition["name"],
        "html": html,
        "csp": csp,
        "arguments": call["function"]["arguments"],
        "content": [{"type": "text", "text": find_text(answer)}] if answer else [],
    }


def find_app(tool: Tool) -> str:
    """Return the URI of a tool's app; empty if it has none."""
    match tool.definition.get("_meta"):
        case {"ui": {"resourceUri": str(uri)}} | {"ui/resourceUri": str(uri)} if uri.startswith("ui://"):
            return uri
        case _:
            return ""


async def read_html(server: Server, uri: str) -> tuple[str, dict[str, Any]]:
    """Read an app and its `_meta.ui.csp`. Raises ConnectionError, and ValueError if it cannot be shown."""
    try:
        client = await server.client()
        contents = await client.read_resource(uri)
    except Exception as error:  # a server may answer with anything, and the SDK may raise anything for it
        raise ConnectionError(f"It did not answer: {describe_error(error)}") from error
    for each in contents:
        match each.model_dump(mode="json", by_alias=True, exclude_none=True):
            case {"mimeType": str(kind), **others} if kind.replace(" ", "") == MIME_TYPE:
                text = others.get("text")
                html = text if isinstance(text, str) else base64.b64decode(str(others.get("blob", ""))).decode()
                if len(html) > MAX_APP:
                    raise ValueError(f"It has more than {MAX_APP:,} characters.")
                return html, read_csp(others.get("_meta"))
            case _:
                pass
    raise ValueError(f"The resource {uri[:200]} is not of the type {MIME_TYPE}.")


def read_csp(meta: Any) -> dict[str, Any]:
    """Return the domains that an app declares."""
    match meta:
        case {"ui": {"csp": {**csp}}}:
            return csp
        case _:
            return {}


def find_text(answer: Message) -> str:
    content = answer.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content or () if part.get("type") == "text")
