"""No tool may flood the context: what is too long is cut in the middle, what is too large is left out, and the whole is
kept in a file."""

import asyncio
import base64
import binascii
import mimetypes
import os
import tempfile
from pathlib import Path
from typing import Any

from crow_core.app import Crow
from crow_core.content import to_text
from crow_core.mcp.tool import ToolCall, ToolResult
from crow_core.session import Session
from crow_core.text import to_line

FILE_LIMIT = 64 * 1024 * 1024
"""Bytes, or characters of a text, that a file keeps."""


def truncate(crow: Crow, *, limit: int = 50_000, data_limit: int = 5_000_000) -> None:
    """Cut the text of a tool's result to `limit` characters, head and tail; leave out images, sounds and embedded files
    that have more than `data_limit` bytes together."""

    @crow.after_tool
    async def cut(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        content: list[dict[str, Any]] = []
        size = 0
        for block in result.content:
            data, kind = data_of(block)
            size += len(data) * 3 // 4
            if data and size > data_limit:
                path = await asyncio.to_thread(keep, decoded(data), session.folders.scratch(), kind)
                words = f"[{to_line(kind)}, {len(data) * 3 // 4:,} bytes: too large to be shown; it is in {path}]"
                content.append({"type": "text", "text": words})
            else:
                content.append(block)
        texts = [None if data_of(block)[0] else to_text(block) for block in content]
        text = "\n\n".join(words for words in texts if words is not None)
        if len(text) > limit:
            whole = text[:FILE_LIMIT].encode(errors="replace")
            path = await asyncio.to_thread(keep, whole, session.folders.scratch(), "text/plain")
            middle = f"\n\n[{len(text) - limit:,} of {len(text):,} characters left out; the whole is in {path}]\n\n"
            short = {"type": "text", "text": text[: limit // 2] + middle + text[len(text) - limit // 2 :]}
            content = [short, *(block for block, words in zip(content, texts, strict=True) if words is None)]
        return None if content == result.content else ToolResult(content, result.is_error, result.meta)


def data_of(block: dict[str, Any]) -> tuple[str, str]:
    """What a content block holds besides text, in base64, and its MIME type; empty for text."""
    match block:
        case {"type": "image" | "audio", "data": str(data)}:
            return data, str(block.get("mimeType", ""))
        case {"type": "resource", "resource": {"blob": str(data), **resource}}:
            return data, str(resource.get("mimeType", ""))
        case _:
            return "", ""


def decoded(data: str) -> bytes:
    """The bytes that base64 stands for; what is none stays as it is."""
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except binascii.Error:
        return data.encode()


def keep(data: bytes, folder: Path, kind: str) -> str:
    """Write to a new file; a call's id comes from the model's server, so no name is made of it."""
    suffix = mimetypes.guess_extension(kind) or ".bin"
    opened, path = tempfile.mkstemp(suffix, "output-", folder)
    with os.fdopen(opened, "wb") as file:
        file.write(data[:FILE_LIMIT])
    return path
