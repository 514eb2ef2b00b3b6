"""One tool: its definition, a call of it, and what the call returned."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from crow_core.acp.schema import ToolKind
from crow_core.mcp.schemas import is_small
from crow_core.text import clean_lines, to_line

if TYPE_CHECKING:
    from crow_core.mcp.server import Server


@dataclass
class ToolResult:
    """What a tool returned, or what was answered in its place."""

    content: list[dict[str, Any]]
    """MCP content blocks."""
    is_error: bool = False
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    """The built-in tools' word on what they did: `crow/changes` [{path, old, new}], `crow/locations` [{path, line}],
    `crow/plan` [{content, priority, status}], `crow/terminal` (the client's terminal that holds the output)."""

    @classmethod
    def text(cls, text: str, *, is_error: bool = False) -> "ToolResult":
        return cls([{"type": "text", "text": text}], is_error)

    @classmethod
    def error(cls, text: str) -> "ToolResult":
        """An error the model can act on."""
        return cls.text(text, is_error=True)


DESCRIPTION_LIMIT = 8_000
"""Characters of a tool's description that the model is shown."""


TITLE_LIMIT = 80
"""Characters of a tool's title."""


NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
"""The schema of a tool of which no more is known."""


UNSHOWN = "(What it takes cannot be shown: its schema is too large, or none. Its answers to wrong arguments may tell.)"


@dataclass(eq=False)
class Tool:
    """One tool under the name the model knows it by."""

    name: str
    server: "Server | None"
    """None for a tool of earlier days whose server is not connected."""
    definition: dict[str, Any]
    """As its server's tools/list gave it."""

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool in the shape of chat completions."""
        description = clean_lines(self.definition.get("description") or "")[:DESCRIPTION_LIMIT]
        parameters: dict[str, Any] = self.definition.get("inputSchema") or NOTHING
        tables = [parameters.get("properties", {}), parameters.get("$defs", {})]
        if not is_small(parameters) or not all(isinstance(table, dict) for table in tables):
            description, parameters = f"{description}\n\n{UNSHOWN}".strip(), NOTHING
        function: dict[str, Any] = {"name": self.name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def title(self) -> str:
        """What its server calls it before people; empty if that says nothing more than its name."""
        title = self.definition.get("title") or self.hints.get("title")
        if not isinstance(title, str) or title == self.definition.get("name") or (self.server and self.server.built_in):
            return ""
        return to_line(title).strip()[:TITLE_LIMIT]

    @cached_property
    def digest(self) -> str:
        """Of all that its server says of it: a tool that is described otherwise is another one."""
        return hashlib.sha256(msgspec.json.encode(self.definition, order="sorted")).hexdigest()

    @property
    def hints(self) -> dict[str, Any]:
        """What its server says of it (MCP, annotations): a claim, no proof."""
        return self.definition.get("annotations") or {}

    @property
    def destroys(self) -> bool:
        """Whether a server of others says that it may destroy something."""
        return self.hints.get("destructiveHint") is True and not (self.server and self.server.built_in)

    def kind(self, arguments: dict[str, Any]) -> ToolKind:
        """What a call with these arguments does; only the word of a server is taken that is ours, or that the user's
        configuration trusts."""
        if self.server is None:
            return "other"
        if not self.server.built_in:
            reads = self.server.trust and self.hints.get("readOnlyHint") is True and not self.destroys
            return "read" if reads else "other"
        told: dict[str, Any] = self.definition.get("_meta") or {}
        match told.get("crow/kind", "other"):
            case str(kind):
                return kind  # pyright: ignore[reportReturnType] - our own tools' word
            case kinds:
                return kinds.get(str(arguments.get("command")), "other")

    def may_repeat(self, arguments: dict[str, Any]) -> bool:
        """Whether a call does no harm by running twice: whoever says so wrongly harms only what is its own."""
        says = self.hints.get("readOnlyHint") is True or self.hints.get("idempotentHint") is True
        return says or self.kind(arguments) in ("read", "search", "think")
