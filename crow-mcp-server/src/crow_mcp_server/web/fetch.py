"""The tool `fetch`: a page on the web, as a model reads it."""

from base64 import b64encode
from functools import cache
from typing import TYPE_CHECKING, Annotated

import anyio
from fastmcp import FastMCP
from fastmcp.tools.base import ToolResult
from mcp_types import ImageContent, TextContent, ToolAnnotations
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from crow_mcp_server.refusal import Refusal
from crow_mcp_server.tool_options import Host
from crow_mcp_server.web.page_text import Unreadable, kind_of

if TYPE_CHECKING:
    from crow_mcp_server.web.network import Reply
    from crow_mcp_server.web.page_fetcher import Page, Web

DESCRIPTION = """\
Read a page on the web: HTML as Markdown, PDF and feeds as text, images as they are. A long page comes in parts."""
READING = 10.0  # seconds for reading what was fetched
PART = 20_000  # characters
MAX_IMAGE = 4 * 1024 * 1024  # bytes
MAX_ERROR = 2_000  # characters of what a server says with an error


class Part(TypedDict):
    url: str
    """After redirects."""
    type: str
    """The media type."""
    text: str
    start: int
    total: int
    """Characters of the whole page."""


def add(server: FastMCP, host: Host) -> None:
    """Add the tool, and the prompt by which a person fetches, to a server."""

    @cache
    def web() -> "Web":
        from crow_mcp_server.web.network import (
            Guard,  # not at the top: HTTP takes longer to import than all other tools
        )
        from crow_mcp_server.web.page_fetcher import Web

        return Web(Guard(host.allow_hosts), robots=not host.ignore_robots, stays=host.stays)

    @server.tool(
        description=DESCRIPTION,
        annotations=ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=True
        ),
        meta={"crow/kind": "fetch"},
        output_schema=TypeAdapter(Part).json_schema(),
    )
    async def fetch(
        url: str,
        start: Annotated[int, Field(ge=0, description="character to go on from")] = 0,
        raw: Annotated[bool, Field(description="the source, not Markdown")] = False,
    ) -> ToolResult:
        return await show(await web().page(url, again=start > 0), start=start, raw=raw)

    @server.prompt(name="fetch", description="Read a page on the web and put it before the model")
    async def fetch_for_me(url: str) -> str:
        page = await web().page(url, robot=False)
        result = await show(page, start=0, raw=False)
        return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


async def show(page: "Page", *, start: int, raw: bool) -> ToolResult:
    """A part of a page as a tool's result. Raises Refusal."""
    reply = page.reply
    kind = kind_of(reply.body, reply.type)
    about = f"{reply.url} is {reply.type or 'of an unknown type'}, {len(reply.body):,} bytes"
    if reply.status >= 300:
        text = "" if kind in ("image", "binary", "pdf") else await _said(page)
        said = f" It says:\n\n{text[:MAX_ERROR]}" if text else ""
        raise Refusal(f"{reply.url} answers {reply.status} {reply.reason}.{_wait(reply)}{said}")
    if kind == "image" and len(reply.body) <= MAX_IMAGE:
        image = ImageContent(type="image", data=b64encode(reply.body).decode(), mime_type=reply.type)
        part = Part(url=reply.url, type=reply.type, text="", start=0, total=0)
        return ToolResult([TextContent(type="text", text=about), image], structured_content=part)
    if kind in ("image", "binary"):
        raise Refusal(f"{about}: nothing to read. If it is needed, download it in the terminal (curl -o FILE URL).")
    try:
        with anyio.fail_after(READING):
            text = await page.text(raw=raw)
    except (Unreadable, TimeoutError) as error:
        why = str(error) or "reading it took too much time"
        raise Refusal(f"{about}, and {why}. Call again with raw=true, or use another source.") from None
    if start and start >= len(text):
        raise Refusal(f"{reply.url} has {len(text):,} characters, so nothing is left from {start:,} on.")
    part = Part(url=reply.url, type=reply.type, text=text[start : start + PART], start=start, total=len(text))
    end = start + len(part["text"])
    shown = [reply.url, "", part["text"] or "[the page has no text]"]
    if start or end < len(text):
        more = f"; the rest: call again with start={end}" if end < len(text) else ""
        shown += ["", f"[characters {start:,} to {end:,} of {len(text):,}{more}]"]
    return ToolResult("\n".join(shown), structured_content=part)


async def _said(page: "Page") -> str:
    try:
        with anyio.fail_after(READING):
            return (await page.text(raw=False)).strip()
    except (Unreadable, TimeoutError):
        return ""


def _wait(reply: "Reply") -> str:
    wait = reply.headers.get("retry-after", "")
    return f" It asks to wait {wait} seconds." if wait.isdecimal() else ""
