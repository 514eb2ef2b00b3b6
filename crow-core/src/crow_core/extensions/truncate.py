"""No tool may flood the context: what is too long is cut in the middle, and the whole is kept in a file."""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

from crow_core.app import Crow
from crow_core.content import ToolResult
from crow_core.messages import ToolUse
from crow_core.session import Session


def truncate(crow: Crow, *, limit: int = 50_000) -> None:
    """Cut the text of a tool's result to `limit` characters, head and tail."""

    @crow.after_tool
    async def cut(result: ToolResult, session: Session, call: ToolUse) -> ToolResult | None:
        texts = [words_of(block) for block in result.content]
        text = "\n\n".join(words for words in texts if words is not None)
        if len(text) <= limit:
            return None
        path = await asyncio.to_thread(keep, text, session.scratch())
        middle = f"\n\n[{len(text) - limit:,} of {len(text):,} characters left out; the whole is in {path}]\n\n"
        short = {"type": "text", "text": text[: limit // 2] + middle + text[-(limit // 2) :]}
        others = [block for block, words in zip(result.content, texts, strict=True) if words is None]
        return ToolResult([short, *others], result.is_error, result.meta)


def words_of(block: dict[str, Any]) -> str | None:
    """The text of a content block; None for what is no text."""
    match block:
        case {"type": "text", "text": str(text)} | {"type": "resource", "resource": {"text": str(text)}}:
            return text
        case _:
            return None


def keep(text: str, folder: Path) -> str:
    """Write a text to a new file; a call's id comes from the model's server, so no name is made of it."""
    opened, path = tempfile.mkstemp(".txt", "output-", folder)
    with os.fdopen(opened, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    return path
