"""The apps of MCP servers in a chat: how one is shown, and its requests."""

from typing import Any

import msgspec
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.shared_methods import APP_METHOD, APP_REQUEST_METHOD

from crow_web.app_frames import AppFrames, list_domains
from crow_web.log import BlockRenderer
from crow_web.shared_agent import SharedAgent


async def render_app(
    agent: SharedAgent, frames: AppFrames | None, renderer: BlockRenderer, session: str, call: str
) -> tuple[str, str]:
    """Return the server and the HTML of the app of a tool call, or of why it cannot be shown; "" if it has none."""
    client = agent.client
    if client is None or not has_apps(client.initialized.agent_capabilities.meta):
        return "", ""
    try:
        app: dict[str, Any] = await client.request(APP_METHOD, {"sessionId": session, "toolCallId": call})
    except (RpcError, ConnectionClosed):
        return "", ""
    if not app:
        return "", ""
    if "problem" in app or frames is None:
        return "", renderer.render("no_app", app["server"], app.get("problem", ""))
    csp: dict[str, Any] = app["csp"]
    reached = [*list_domains(csp, "connectDomains"), *list_domains(csp, "resourceDomains")]
    values = to_json(app["given"]), to_json(app["result"])
    place = frames.add(app["html"], csp)
    return app["server"], renderer.render("app", app["server"], app["tool"], place, reached, call, *values)


async def ask_for_app(agent: SharedAgent, session: str, request: dict[str, Any]) -> dict[str, Any]:
    """Pass on a request of an app; return its `result`, or an `error` as a sentence."""
    if (client := agent.client) is None:
        return {"error": "The session is closed."}
    params = {
        "sessionId": session,
        "toolCallId": request.get("call"),
        **{k: request.get(k) for k in ("method", "params")},
    }
    try:
        return {"result": await client.request(APP_REQUEST_METHOD, params)}
    except RpcError as error:
        return {"error": client.describe_error(error)}
    except ConnectionClosed:
        return {"error": "The connection to crow has ended. The tool may have run."}


def has_apps(meta: Any) -> bool:
    """Return whether an agent passes on the apps of its servers."""
    match meta:
        case {"crow": {"methods": [*methods]}}:
            return APP_METHOD in methods
        case _:
            return False


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
