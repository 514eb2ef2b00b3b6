"""Stop a model that repeats a tool call without progress: tell the model first, then ask the user."""

from collections import Counter
from hashlib import sha256

import msgspec

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.errors import EndTurn
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.models.chat import ModelCall
from crow_core.session import Session

REMARK = (
    "[You made this very call {} times, and it gave the same each time. Try something else, or say what is missing.]"
)


def loop_guard(crow: Crow, *, tell: int = 3, ask: int = 5) -> None:
    """Tell the model after `tell` equal calls with equal results, and ask the user after `ask` of them.

    A call or a result that is new in the turn is progress: the count starts again. Use this before extensions that
    write the name of a new file into results, since no two of these results are equal.
    """

    @crow.after_tool
    def count(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        counts = get_counts(session)
        content = msgspec.json.encode([tool_call.arguments, result.content], order="sorted")
        key = tool_call.name, sha256(content).digest()
        if key not in counts:
            for other in counts:
                counts[other] = 1
        counts[key] += 1
        if counts[key] < tell:
            return None
        remark = {"type": "text", "text": REMARK.format(counts[key])}
        return ToolResult([*result.content, remark], result.is_error, result.meta)

    @crow.after_model
    async def pause(session: Session, model_call: ModelCall) -> None:
        for (name, _), times in get_counts(session).most_common(1):
            if times < ask:
                return
            said = f"The model called {name} {times} times and it gave the same each time."
            if not await session.user.confirm(f"{said} Go on?"):
                raise EndTurn("end_turn", f"{said} You stopped it.")
            get_counts(session).clear()

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        get_counts(session).clear()


def get_counts(session: Session) -> "Counter[tuple[str, bytes]]":
    """Return how often each call gave the same result: (tool, digest of arguments and result) to a number."""
    return session.state.setdefault("loop_guard", Counter())
