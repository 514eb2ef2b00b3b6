"""The apps of MCP servers in the log of a chat."""

from typing import Any

import msgspec
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.shared_methods import APP_METHOD

from crow_web.app_frames import AppFrames, list_domains
from crow_web.log import BlockRenderer, Log
from crow_web.shared_agent import SharedAgent


async def show_app(
    agent: SharedAgent,
    frames: AppFrames | None,
    renderer: BlockRenderer,
    log: Log,
    session: str,
    call: str,
) -> None:
    """Show the app of a tool call that has ended, or say why it cannot be shown; nothing if it has none."""
    client = agent.client
    if client is None or not has_apps(client.initialized.agent_capabilities.meta):
        return
    block = log.take_id()
    try:
        app: dict[str, Any] = await client.request(APP_METHOD, {"sessionId": session, "toolCallId": call})
    except (RpcError, ConnectionClosed):
        return
    if not app:
        return
    if "problem" in app or frames is None:
        why = app.get("problem") or "Apps are shown only without --tls and --share."
        log.put(block, renderer.render("no_app", app["server"], why))
        return
    try:
        arguments = msgspec.json.decode(app["arguments"] or "{}")
    except ValueError:
        arguments = {}
    csp: dict[str, Any] = app["csp"]
    reached = [*list_domains(csp, "connectDomains"), *list_domains(csp, "resourceDomains")]
    values = to_json(arguments), to_json({"content": app["content"]})
    log.put(block, renderer.render("app", app["server"], app["tool"], frames.add(app["html"], csp), reached, *values))


def has_apps(meta: Any) -> bool:
    """Return whether an agent passes on the apps of its servers."""
    match meta:
        case {"crow": {"methods": [*methods]}}:
            return APP_METHOD in methods
        case _:
            return False


def to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
