"""The connection of a server: a task whose result is the connected client."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from crow_core.masking import mask
from crow_core.mcp.watchdog import ProcessWatchdog
from crow_core.text import to_line

if TYPE_CHECKING:
    from crow_core.mcp.sdk import CheckedClient

STOP_GRACE = 1.0
"""Seconds a server may take to end; then all its processes are killed."""


async def end_connection(
    connection: "asyncio.Task[CheckedClient]", watchdog: ProcessWatchdog | None, before: "asyncio.Task[None] | None"
) -> None:
    """End a connection in any state, kill the processes it leaves, and wait for `before`, the end of an earlier one."""
    ending = asyncio.ensure_future(disconnect(connection))
    await asyncio.wait([ending], timeout=STOP_GRACE)
    if watchdog is not None:
        await asyncio.to_thread(watchdog.kill_marked)
    await asyncio.wait([ending] if before is None else [ending, before])


async def wait_for_client(connection: "asyncio.Task[CheckedClient]") -> "CheckedClient":
    """Return the client of a connection. Cancelling the connection task does not cancel its waiters.

    Raises ConnectionError, also when the connection task is cancelled.
    """
    await asyncio.wait([connection])
    if connection.cancelled():
        raise ConnectionError("it was given up")
    return connection.result()


async def disconnect(connection: "asyncio.Task[CheckedClient]") -> None:
    """Disconnect a client that may still be connecting."""
    connection.cancel()
    await asyncio.wait([connection])
    if not connection.cancelled() and not connection.exception():
        client = connection.result()
        with suppress(Exception):  # the connection ends either way
            await client.close()


def stderr_tail(client: "CheckedClient", secrets: Collection[str]) -> str:
    """Return the last line that a command wrote, to standard error or between its messages, as the end of a sentence.

    Returns an empty string if there is none.
    """
    lines = getattr(client.transport, "recent_output", b"").decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f". It said: {mask(to_line(last.strip()), secrets)[:300]}" if last else ""


def is_dead(connection: "asyncio.Task[CheckedClient]") -> bool:
    """True if a connection has failed or ended; False while it is being made."""
    if not connection.done():
        return False
    return bool(connection.cancelled() or connection.exception() or connection.result().has_ended)


def is_broken(connection: "asyncio.Task[CheckedClient]", error: Exception) -> bool:
    """True if a tool call failed with `error` because its connection ended."""
    from mcp_types import CONNECTION_CLOSED  # imported with FastMCP

    return is_dead(connection) or getattr(error, "code", None) == CONNECTION_CLOSED


async def follow_changes(client: "CheckedClient") -> None:
    """Subscribe to changed lists of a server of 2026, until the connection ends. Older servers always send them."""
    from mcp.client import subscriptions  # imported with FastMCP
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    can = client.server_capabilities
    if can is None or client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return
    tools, prompts, resources = (bool(part and part.list_changed) for part in (can.tools, can.prompts, can.resources))
    if tools or prompts or resources:
        async with subscriptions.listen(
            client.session,
            tools_list_changed=tools,
            prompts_list_changed=prompts,
            resources_list_changed=resources,
        ) as changes:
            async for _ in changes:
                pass  # `_handle_notification` gets each of them, too


async def follow_resources(client: "CheckedClient", uris: Sequence[str], before: "asyncio.Task[None] | None") -> None:
    """Subscribe to resources until the connection ends. Then cancel the task that did so before."""
    from mcp.client import subscriptions  # imported with FastMCP
    from mcp_types import EmptyResult, SubscribeRequest, SubscribeRequestParams
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    resources = client.server_capabilities and client.server_capabilities.resources
    if not (resources and resources.subscribe):
        return
    if client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        for uri in uris:
            await client.session.send_request(SubscribeRequest(params=SubscribeRequestParams(uri=uri)), EmptyResult)
        return
    async with subscriptions.listen(client.session, resource_subscriptions=uris) as changes:
        if before is not None:
            before.cancel()
        async for _ in changes:
            pass  # as above
