"""A model that makes the same call again and again, and learns nothing from it, is told; then the person decides."""

from collections import Counter
from hashlib import sha256

import msgspec

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.errors import EndTurn
from crow_core.mcp.tool import ToolCall, ToolResult
from crow_core.models.chat import ModelCall
from crow_core.session import Session

TOLD = "[You made this very call {} times, and it gave the same each time. Try something else, or say what is missing.]"


def loop_guard(crow: Crow, *, tell: int = 3, ask: int = 5) -> None:
    """Tell the model after `tell` equal calls with equal results, ask the person after `ask`.

    A call or a result that is new to the turn is progress: the count begins again. To be used before what writes into
    results where they are kept.
    """

    @crow.after_tool
    def count(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult | None:
        seen = counted(session)
        did = msgspec.json.encode([tool_call.arguments, result.content], order="sorted")
        made = tool_call.name, sha256(did).digest()
        if made not in seen:
            for known in seen:
                seen[known] = 1
        seen[made] += 1
        if seen[made] < tell:
            return None
        told = {"type": "text", "text": TOLD.format(seen[made])}
        return ToolResult([*result.content, told], result.is_error, result.meta)

    @crow.after_model
    async def pause(session: Session, model_call: ModelCall) -> None:
        for (name, _), times in counted(session).most_common(1):
            if times < ask:
                return
            said = f"The model called {name} {times} times and it gave the same each time."
            if not await session.user.confirm(f"{said} Go on?"):
                raise EndTurn("end_turn", f"{said} You stopped it.")
            counted(session).clear()

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        counted(session).clear()


def counted(session: Session) -> "Counter[tuple[str, bytes]]":
    """How often each call was made, and gave what it gave, since something was new."""
    return session.state.setdefault("loop_guard", Counter())
