"""Shorten large tool results: cut long text in the middle, leave out large data, and write the whole to a file."""

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
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session
from crow_core.text import to_line
from crow_system.shortening import leave_out

FILE_LIMIT = 64 * 1024 * 1024
"""Bytes of data, or characters of text, that are written to a file."""


def truncate(crow: Crow, *, limit: int = 50_000, data_limit: int = 5_000_000) -> None:
    """Shorten the results of tools.

    Text is cut to its first and last `limit` / 2 characters. Images, audio and embedded files are left out as soon as
    those of one result have more than `data_limit` bytes together.
    """

    @crow.after_tool
    async def cut(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        content: list[dict[str, Any]] = []
        size = 0
        for block in result.content:
            data, kind = get_data(block)
            size += len(data) * 3 // 4
            if data and size > data_limit:
                path = await asyncio.to_thread(write_file, decode_data(data), session.folders.scratch(), kind)
                words = f"[{to_line(kind)}, {len(data) * 3 // 4:,} bytes: too large to be shown; it is in {path}]"
                content.append({"type": "text", "text": words})
            else:
                content.append(block)
        texts = [None if get_data(block)[0] else to_text(block) for block in content]
        text = "\n\n".join(words for words in texts if words is not None)
        if len(text) > limit:
            whole = text[:FILE_LIMIT].encode(errors="replace")
            path = await asyncio.to_thread(write_file, whole, session.folders.scratch(), "text/plain")
            short = {"type": "text", "text": leave_out(text, limit, f"the whole is in {path}", tail=limit // 2)}
            content = [short, *(block for block, words in zip(content, texts, strict=True) if words is None)]
        return None if content == result.content else ToolResult(content, result.is_error, result.meta)


def get_data(block: dict[str, Any]) -> tuple[str, str]:
    """Return the data of a content block, in base64, and its MIME type; two empty strings for a block of text."""
    match block:
        case {"type": "image" | "audio", "data": str(data)}:
            return data, str(block.get("mimeType", ""))
        case {"type": "resource", "resource": {"blob": str(data), **resource}}:
            return data, str(resource.get("mimeType", ""))
        case _:
            return "", ""


def decode_data(data: str) -> bytes:
    """Decode base64; encode any other text as UTF-8."""
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except binascii.Error:
        return data.encode()


def write_file(data: bytes, folder: Path, kind: str) -> str:
    """Write data of a MIME type to a new file, and return its path.

    The name is random: the id of the tool call comes from the model's server, which must not choose a file name.
    """
    suffix = mimetypes.guess_extension(kind) or ".bin"
    opened, path = tempfile.mkstemp(suffix, "output-", folder)
    with os.fdopen(opened, "wb") as file:
        file.write(data[:FILE_LIMIT])
    return path
