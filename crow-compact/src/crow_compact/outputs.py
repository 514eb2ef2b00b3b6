"""The tool `read_output`: what an old output was before it was shortened."""

from typing import Any

from crow_core.content import to_result
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages import Message, drop_rewound, to_parts
from crow_core.session import Session

TOOL = "read_output"
PAGE = 8_000
"""Characters that are given back at once."""

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
    "_meta": {"crow/kind": "read"},
}


def server() -> Server:
    """What offers the tool; `read` answers its calls."""
    return Server("outputs", None, definitions=[DEFINITION], built_in=True, shared=True)


def read(session: Session, tool_call: ToolCall) -> ToolResult:
    """A page of an output, as it stands in the log."""
    match tool_call.arguments:
        case {"call": str(id), **more} if type(offset := more.get("offset", 0)) is int and offset >= 0:
            found = next((entry for entry in drop_rewound(session.log) if entry.get("tool_call_id") == id), None)
        case _:
            return ToolResult.error("call is the id of an earlier call, as text; offset is a whole number, 0 or more.")
    if found is None:
        return ToolResult.error(f"There is no output of a call {id!r}. Take the id from the shortened output.")
    text = text_of(found)
    page = text[offset : offset + PAGE]
    end = offset + len(page)
    more = f"; offset {end} goes on" if end < len(text) else ""
    said = {"type": "text", "text": f"{page}\n\n[characters {offset:,} to {end:,} of {len(text):,}{more}]"}
    others = [block for block in to_result(found).content if block.get("type") != "text"] if not offset else []
    return ToolResult([said, *others])


def text_of(answer: Message) -> str:
    return "\n\n".join(part.get("text", "[image]") for part in to_parts(answer.get("content")))
