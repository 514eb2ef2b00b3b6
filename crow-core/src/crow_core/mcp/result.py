"""The result of a tool call."""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from crow_core.masking import mask
from crow_core.messages.tool_metadata import ResultMeta

BLOCKS_LIMIT = 1_000
"""Content blocks of a tool result."""
LEFT_TO_SERVER = "Its server went on with it as a task. The next prompt of this session gets the result."
"""The display of a call that has no answer because the process of crow ended while a server ran the call as a task."""


def limit_blocks(content: list[Any]) -> list[Any]:
    """Return at most BLOCKS_LIMIT of the content blocks that a server sent, valid or not.

    If there are more, texts that follow each other are joined first, and the last block counts those that are left out.
    """
    if len(content) <= BLOCKS_LIMIT:
        return content
    joined: list[Any] = []
    for is_text, blocks in groupby(content, is_text_block):
        if not is_text:
            joined += blocks
        elif text := "\n\n".join(block["text"] for block in blocks if block["text"]):
            joined.append({"type": "text", "text": text})
    if len(joined) > BLOCKS_LIMIT:
        left = f"[{len(joined) - BLOCKS_LIMIT + 1:,} more blocks of content were left out]"
        joined[BLOCKS_LIMIT - 1 :] = [{"type": "text", "text": left}]
    return joined


def is_text_block(block: Any) -> bool:
    """True if a content block, valid or not, is a text."""
    match block:
        case {"type": "text", "text": str()}:
            return True
        case _:
            return False


@dataclass
class ToolResult:
    """The result of a tool call, from the tool or from a hook that answered in its place."""

    content: list[dict[str, Any]]
    """MCP content blocks."""
    is_error: bool = False
    meta: ResultMeta = field(default_factory=ResultMeta)
    """Facts that only built-in tools and hooks may report."""
    for_apps: dict[str, Any] = field(default_factory=dict[str, Any])
    """`structuredContent` and `_meta` of a server's answer: for the server's own app, not for the model."""

    @classmethod
    def text(cls, text: str, *, is_error: bool = False) -> "ToolResult":
        return cls([{"type": "text", "text": text}], is_error)

    @classmethod
    def error(cls, text: str) -> "ToolResult":
        """Make an error result that the model can act on."""
        return cls.text(text, is_error=True)

    def mask(self, secrets: Collection[str]) -> "ToolResult":
        """Make a copy with the mask in place of every secret."""
        return ToolResult(
            mask(self.content, secrets), self.is_error, mask(self.meta, secrets), mask(self.for_apps, secrets)
        )
