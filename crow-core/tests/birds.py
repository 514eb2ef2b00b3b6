"""An MCP server whose tools ask the client, report progress and change the list of tools, in every version of MCP."""

import asyncio
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import mcp_types as mcp
from fastmcp import Context, FastMCP
from fastmcp.tools import ToolResult

server = FastMCP("birds")
REQUESTS: dict[str, Any] = {
    "elicitation/create": (mcp.ElicitRequest, mcp.ElicitResult),
    "sampling/createMessage": (mcp.CreateMessageRequest, mcp.CreateMessageResult),
    "roots/list": (mcp.ListRootsRequest, mcp.ListRootsResult),
}


@server.tool
async def ask(method: str, params: dict[str, Any], context: Context, times: int = 1) -> Any:
    """Ask the client, and return its answer as JSON."""
    kind, result = REQUESTS[method]
    request = kind.model_validate({"method": method, "params": params})
    assert context.request_context
    if context.request_context.protocol_version >= "2026":
        if not context.input_responses:
            return mcp.InputRequiredResult(input_requests={str(n): request for n in range(times)})
        answers = list(context.input_responses.values())
    else:
        answers = [await context.session.send_request(request, result) for _ in range(times)]
    return "\n".join(answer.model_dump_json(by_alias=True, exclude_none=True) for answer in answers)


@server.tool
async def count(words: list[str], context: Context, gate: str = "", total: float | None = 4) -> str:
    """Report these words one by one, then wait until a pipe is written to."""
    for done, word in enumerate(words, 1):
        await context.report_progress(done, total, word)
    if gate:
        await asyncio.to_thread(Path(gate).read_bytes)
    return "counted"


@server.tool
async def tick(times: int, every: float, context: Context) -> str:
    """Report progress at intervals."""
    for done in range(times):
        await context.report_progress(done)
        await asyncio.sleep(every)
    return "ticked"


@server.tool
async def wait(started: str = "", ended: str = "") -> str:
    """Wait to be cancelled, and write to pipes at the start and at the end."""
    try:
        if started:
            await asyncio.to_thread(Path(started).write_text, "started")
        await asyncio.Event().wait()
    finally:
        if ended:
            Path(ended).write_text("cancelled")  # noqa: ASYNC240 - who is cancelled cannot wait
    return "never"


@server.tool
async def say(level: mcp.LoggingLevel, data: Any, context: Context, times: int = 1) -> str:
    """Send log messages."""
    for _ in range(times):
        await context.session.send_notification(
            mcp.LoggingMessageNotification(params=mcp.LoggingMessageNotificationParams(level=level, data=data)),
            related_request_id=context.request_id,
        )
    return "said"


@server.tool
async def babble(context: Context) -> str:
    """Send unknown and invalid notifications."""
    session: Any = context.session
    for method, params in [
        ("notifications/message", {"level": "loud", "data": 1}),
        ("notifications/progress", {"progressToken": "?", "progress": "half"}),
        ("notifications/elicitation/complete", {}),
        ("notifications/caw", {"caw": True}),
    ]:
        await session._request_outbound.notify(method, params)
    return "babbled"


@server.tool
async def change(add: list[str], remove: list[str], context: Context, describe: str = "A bird.") -> str:
    """Add tools, or replace their descriptions, and remove others."""
    for name in [*add, *remove]:
        if any(tool.name == name for tool in await server.list_tools()):
            server.local_provider.remove_tool(name)
    for name in add:
        server.tool(lambda: "caw", name=name, description=describe)
    await context.send_notification(mcp.ToolListChangedNotification())
    return "changed"


@server.tool
async def page_done(id: str, context: Context) -> str:
    """Report that a page has been completed."""
    await context.session.send_elicit_complete(id)
    return "done"


@server.tool
async def meta(context: Context) -> str:
    """Return the metadata of the call."""
    assert context.request_context
    return json.dumps(dict(context.request_context.meta or {}), default=str)


@server.tool
def everything(structured: bool = False, fail: bool = False) -> ToolResult:
    """Return content of every kind."""
    if structured:
        return ToolResult([], structured_content={"birds": 3}, is_error=fail)
    data, pixels = b64encode(b"pixels").decode(), b64encode(b"\x89PNG\r\n\x1a\npixels").decode()
    text = mcp.TextResourceContents(uri="memory://page", text="a page", mime_type="text/plain")
    blob = mcp.BlobResourceContents(uri="memory://egg.bin", blob=data, mime_type="application/zip")
    picture = mcp.BlobResourceContents(uri="memory://egg.png", blob=pixels, mime_type="image/png")
    link = mcp.ResourceLink(type="resource_link", uri="https://example.org/", name="site", description="All of them")
    resources = [mcp.EmbeddedResource(type="resource", resource=each) for each in (text, blob, picture)]
    image = mcp.ImageContent(type="image", data=pixels, mime_type="image/png")
    sound = mcp.AudioContent(type="audio", data=data, mime_type="audio/wav")
    words = mcp.TextContent(type="text", text="words")
    return ToolResult([words, image, sound, *resources, link], is_error=fail)


def main() -> None:
    server.run(show_banner=False)


if __name__ == "__main__":
    main()
