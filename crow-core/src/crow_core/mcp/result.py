"""The result of a tool call."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from crow_core.masking import mask


@dataclass
class ToolResult:
    """The result of a tool call, from the tool or from a hook that answered in its place."""

    content: list[dict[str, Any]]
    """MCP content blocks."""
    is_error: bool = False
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    """Facts that only built-in tools may report: `crow/changes` [{path, old, new}], `crow/locations` [{path, line}],
    `crow/plan` [{content, priority, status}], `crow/terminal` (the id of the client's terminal with the output),
     `crow/title` (the call's title for the client), `crow/exit` {exitCode, signal} of a command that failed."""

    @classmethod
    def text(cls, text: str, *, is_error: bool = False) -> "ToolResult":
        return cls([{"type": "text", "text": text}], is_error)

    @classmethod
    def error(cls, text: str) -> "ToolResult":
        """Make an error result that the model can act on."""
        return cls.text(text, is_error=True)

    def mask(self, secrets: Collection[str]) -> "ToolResult":
        """Make a copy with the mask in place of every secret."""
        return ToolResult(mask(self.content, secrets), self.is_error, mask(self.meta, secrets))
