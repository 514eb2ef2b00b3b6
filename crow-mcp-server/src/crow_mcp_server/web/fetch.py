"""The tool `fetch`: read a page on the web as text."""

from base64 import b64encode
from functools import cache
from typing import TYPE_CHECKING, Annotated

import anyio
from fastmcp import FastMCP
from fastmcp.tools.base import ToolResult
from mcp_types import ImageContent, TextContent, ToolAnnotations
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.tool_options import ToolOptions
from crow_mcp_server.web.page_text import SOURCE_KINDS, UnreadablePage, detect_kind, needs_javascript

if TYPE_CHECKING:
    from crow_mcp_server.web.network import WebReply
    from crow_mcp_server.web.page_fetcher import FetchedPage, PageFetcher

DESCRIPTION = """\
Read a page on the web: HTML as Markdown, PDF and feeds as text, images as they are. A long page comes in parts."""
READ_TIMEOUT = 10.0  # seconds for converting a fetched page to text
PART_CHARACTERS = 20_000  # of one answer
MAX_IMAGE_BYTES = 4 * 1024 * 1024
NEEDS_JAVASCRIPT = (
    "[probably a page that shows its text by JavaScript, which does not run here. Look for an API, a feed or another "
    "source; raw=true shows the source, which may name them]"
)
MAX_ERROR_CHARACTERS = 2_000  # of the page that comes with an HTTP error


class FetchResult(TypedDict):
    url: str
    """The URL after redirects."""
    type: str
    """The media type."""
    text: str
    start: int
    total: int
    """The number of characters of the whole page."""


def register(server: FastMCP, options: ToolOptions) -> None:
    """Add the tool to a server, and the prompt with which the user fetches a page."""

    @cache
    def get_fetcher() -> "PageFetcher":
        # not at the top: HTTP takes longer to import than all other tools
        from crow_mcp_server.web.network import PublicNetwork
        from crow_mcp_server.web.page_fetcher import PageFetcher

        network = PublicNetwork(options.allow_hosts)
        return PageFetcher(network, obey_robots=not options.ignore_robots, stay_on_host=options.stay_on_host)

    @server.tool(
        description=DESCRIPTION,
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=True
        ),
        meta={"crow/kind": "fetch"},
        output_schema=TypeAdapter(FetchResult).json_schema(),
    )
    async def fetch(
        url: str,
        start: Annotated[int, Field(ge=0, description="first character to read")] = 0,
        raw: Annotated[bool, Field(description="the source, not Markdown")] = False,
    ) -> ToolResult:
        return await to_tool_result(await get_fetcher().fetch(url, use_cache=start > 0), start=start, raw=raw)

    @server.prompt(name="fetch", description="Read a page on the web and give it to the model")
    async def fetch_for_user(url: str) -> str:
        page = await get_fetcher().fetch(url, autonomous=False)
        result = await to_tool_result(page, start=0, raw=False)
        return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


async def to_tool_result(page: "FetchedPage", *, start: int, raw: bool) -> ToolResult:
    """Convert the part of a page from character `start` to a tool result. Raises ToolRefusal."""
    reply = page.reply
    kind = detect_kind(reply.body, reply.media_type)
    about = f"{reply.url} is {reply.media_type or 'of an unknown type'}, {len(reply.body):,} bytes"
    if reply.status >= 300:
        text = "" if kind in ("image", "binary", "pdf") else await _read_error_text(page)
        quote = f" It says:\n\n{text[:MAX_ERROR_CHARACTERS]}" if text else ""
        raise ToolRefusal(f"{reply.url} answers {reply.status} {reply.reason}.{_describe_wait(reply)}{quote}")
    if kind == "image" and len(reply.body) <= MAX_IMAGE_BYTES:
        image = ImageContent(type="image", data=b64encode(reply.body).decode(), mime_type=reply.media_type)
        part = FetchResult(url=reply.url, type=reply.media_type, text="", start=0, total=0)
        return ToolResult([TextContent(type="text", text=about), image], structured_content=part)
    if kind in ("image", "binary"):
        raise ToolRefusal(f"{about}: nothing to read. If it is needed, download it in the terminal (curl -o FILE URL).")
    try:
        with anyio.fail_after(READ_TIMEOUT):
            text = await page.read_text(raw=raw)
    except (UnreadablePage, TimeoutError) as error:
        reason = str(error) or "reading it took too much time"
        advice = (
            "Call again with raw=true, or use another source."
            if kind in SOURCE_KINDS and not raw
            else "Download it in the terminal (curl -o FILE URL) and read it there in parts, or use another source."
        )
        raise ToolRefusal(f"{about}, and {reason}. {advice}") from None
    if start and start >= len(text):
        raise ToolRefusal(f"{reply.url} has {len(text):,} characters, so there is nothing from {start:,} on.")
    part = FetchResult(
        url=reply.url, type=reply.media_type, text=text[start : start + PART_CHARACTERS], start=start, total=len(text)
    )
    end = start + len(part["text"])
    lines = [reply.url, "", part["text"] or "[the page has no text]"]
    if kind == "html" and not raw and needs_javascript(reply.body, text):
        lines += ["", NEEDS_JAVASCRIPT]
    if start or end < len(text):
        more = f"; the rest: call again with start={end}" if end < len(text) else ""
        lines += ["", f"[characters {start:,} to {end:,} of {len(text):,}{more}]"]
    return ToolResult("\n".join(lines), structured_content=part)


async def _read_error_text(page: "FetchedPage") -> str:
    try:
        with anyio.fail_after(READ_TIMEOUT):
            return (await page.read_text(raw=False)).strip()
    except (UnreadablePage, TimeoutError):
        return ""


def _describe_wait(reply: "WebReply") -> str:
    wait = reply.headers.get("retry-after", "")
    return f" It asks to wait {wait} seconds." if wait.isdecimal() else ""
