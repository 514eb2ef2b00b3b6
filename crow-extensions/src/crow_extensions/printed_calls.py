"""Say why a tool call that the server printed as text was not run: to the model if it can correct it."""

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.messages.message import Message
from crow_core.models.chat_model import TOOL_ADVICE, ChatModel
from crow_core.models.model_call import ModelCall
from crow_core.models.printed import find_calls_of
from crow_core.session.session import Session
from crow_core.session_state import StateKey

MAX_CORRECTIONS = 2
"""The most times in one turn that a model is told that its call was not run."""

WARNED = StateKey("printed_calls", bool)
FAULT = StateKey("printed_call_fault", str)
"""Why the call in the last reply was not run; "" if it was, or if there was none."""
CORRECTIONS = StateKey("printed_call_corrections", int)


def printed_calls(crow: Crow) -> None:
    """Tell the model what is wrong with a call that it printed, where calls in texts are run (quirk `printed_calls`).

    Elsewhere the user is told, once a session, which option the server needs.
    """

    @crow.after_model
    async def examine(session: Session, model_call: ModelCall) -> None:
        found = find_calls_of(model_call)
        session.state[FAULT] = ""
        if found and isinstance(model_call.model, ChatModel) and model_call.model.quirks.printed_calls:
            session.state[FAULT] = found.fault
        elif found and not session.state[WARNED]:
            session.state[WARNED] = True
            await session.notice(
                f"The model called a tool, but its server printed the call as text, so it was not run. {TOOL_ADVICE} "
                "Or set the quirk printed_calls = true, and crow runs such calls.",
                "error",
            )

    @crow.before_end
    async def ask_again(session: Session, stop_reason: StopReason) -> Message | None:
        fault = session.state[FAULT]
        if stop_reason != "end_turn" or not fault:
            return None
        await session.notice(f"The model printed a call that cannot be run. {fault}", "warning")
        if session.state[CORRECTIONS] >= MAX_CORRECTIONS:
            return None
        session.state[CORRECTIONS] += 1
        return {"role": "user", "content": fault, "crow": {"hidden": True}}

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        session.state.pop(FAULT)
        session.state.pop(CORRECTIONS)
