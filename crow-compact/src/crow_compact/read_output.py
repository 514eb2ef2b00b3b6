"""The tool `read_output`, which reads back a tool output that was shortened."""

from typing import Any

from crow_core.content import to_result
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message, to_parts
from crow_core.session.session import Session

TOOL = "read_output"
PAGE_CHARACTERS = 8_000
"""Characters that one call returns."""

DEFINITION: dict[str, Any] = {
    "name": TOOL,
    "description": "Read an earlier tool output again, of which the conversation shows only the beginning and the end.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "call": {"type": "string", "description": "the call's id, as the shortened output names it"},
            "offset": {"type": "integer", "description": "from which character on", "default": 0, "minimum": 0},
        },
        "required": ["call"],
    },
    "_meta": {
        "crow/kind": "read",
        "crow/arguments": {"synonyms": {"call": ["call_id", "tool_call_id", "id"], "offset": ["start", "from"]}},
    },
}


def make_server() -> Server:
    return Server("outputs", definitions=[DEFINITION], handlers={TOOL: read_output}, built_in=True, shared=True)


def read_output(session: Session, tool_call: ToolCall) -> ToolResult:
    """Return a page of an output as it is in the log, with its images on the first page."""
    match tool_call.arguments:
        case {"call": str(id), **rest} if type(offset := rest.get("offset", 0)) is int and offset >= 0:
            entry = next((entry for entry in session.view.entries() if entry.get("tool_call_id") == id), None)
        case _:
            return ToolResult.error("call must be the id of an earlier tool call; offset a whole number, 0 or more.")
    if entry is None:
        return ToolResult.error(f"There is no output of a call {id!r}. Take the id from the shortened output.")
    text = to_text(entry)
    page = text[offset : offset + PAGE_CHARACTERS]
    end = offset + len(page)
    more = f"; offset {end} goes on" if end < len(text) else ""
    first_block = {"type": "text", "text": f"{page}\n\n[characters {offset:,} to {end:,} of {len(text):,}{more}]"}
    others = [block for block in to_result(entry).content if block.get("type") != "text"] if not offset else []
    return ToolResult([first_block, *others])


def to_text(message: Message) -> str:
    """Return the text of a tool's message, with `[image]` in the place of each image."""
    return "\n\n".join(part.get("text", "[image]") for part in to_parts(message.get("content")))
