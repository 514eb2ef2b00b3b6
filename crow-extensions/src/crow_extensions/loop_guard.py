"""Stop a model that repeats a tool call without progress: tell the model first, then ask the user."""

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

import msgspec
from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.content import to_content
from crow_core.errors import EndTurn
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message, to_parts
from crow_core.models.model_call import ModelCall
from crow_core.session.session import Session
from crow_core.session_state import StateKey

REMARK = (
    "[You made this very call {} times, and it gave the same each time. Try something else, or say what is missing.]"
)


STOPPED_BY = "repeated_calls"
"""Says to programs that the loop guard has ended the turn."""
ADVICE = (
    "If the tool polls, declare it: @tool(repeats=True), crow/repeats in its _meta, [extensions.loop_guard] repeats."
)
COUNTS = StateKey("loop_guard", Counter[tuple[str, bytes]])
"""How often each call gave the same result: (tool, digest of arguments and result) to a number."""


def loop_guard(crow: Crow, *, tell: int = 3, ask: int = 5, repeats: Sequence[str] = ()) -> None:
    """Tell the model after `tell` equal calls with equal results, and ask the user after `ask` of them.

    The turn ends unless the user says to go on: its stop reason is `max_turn_requests`, and the answer to the prompt
    has the reason. A call or a result that is new in the turn is progress: the count starts again. Calls of tools that
    poll do not count: tools whose definition says so (`Tool.repeats`), and those whose name matches a pattern in
    `repeats`. Use this before extensions that write the name of a new file into results, since no two of these results
    are equal.
    """

    def counts(tool_call: ToolCall) -> bool:
        """Tell whether equal calls of the tool are a loop."""
        polls = tool_call.tool is not None and tool_call.tool.repeats
        return not polls and not any(fnmatchcase(tool_call.name, pattern) for pattern in repeats)

    @crow.turn_resume
    def count_again(session: Session, entries: Sequence[Message]) -> None:
        session.state[COUNTS].clear()
        uses = {use["id"]: use for entry in entries for use in entry.get("tool_calls", ())}
        for entry in entries:
            use = uses.get(entry.get("tool_call_id", ""))
            if use and counts(tool_call := session.toolbox.parse(use)):
                add_call(session, tool_call, drop_remark(entry.get("content")))

    @crow.after_tool
    def count(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        if not counts(tool_call) or (times := add_call(session, tool_call, to_content(result))) < tell:
            return None
        remark = {"type": "text", "text": REMARK.format(times)}
        return ToolResult([*result.content, remark], result.is_error, result.meta)

    @crow.after_model
    async def pause(session: Session, model_call: ModelCall) -> None:
        for (name, _), times in session.state[COUNTS].most_common(1):
            if times < ask:
                return
            said = f"The model called {name} {times} times and it gave the same each time."
            if not await session.user.confirm(f"{said} Go on?"):
                sentence = f"crow ended the turn, as nobody said to go on. {said} {ADVICE}"
                raise EndTurn("max_turn_requests", sentence, stopped_by=STOPPED_BY)
            session.state[COUNTS].clear()

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        session.state[COUNTS].clear()


def add_call(session: Session, tool_call: ToolCall, content: Any) -> int:
    """Count a call by its tool, its arguments and the content of its answer; return how often it was made."""
    counts = session.state[COUNTS]
    digest = sha256(msgspec.json.encode([tool_call.arguments, content], order="sorted")).digest()
    key = tool_call.name, digest
    if key not in counts:
        for other in counts:
            counts[other] = 1
    counts[key] += 1
    return counts[key]


def drop_remark(content: Any) -> Any:
    """Return the content of an answer without the remark that was added to it."""
    start = REMARK.partition("{")[0]
    if isinstance(content, str):
        return content.partition(start)[0].removesuffix("\n\n") or "(no output)"
    return [part for part in to_parts(content) if not str(part.get("text", "")).startswith(start)]
