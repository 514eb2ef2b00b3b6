"""Ask a model again that replied with neither text nor tool calls."""

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.messages.message import Message
from crow_core.models.model_call import ModelCall
from crow_core.session.session import Session
from crow_core.session_state import StateKey

REQUEST = "Your last reply was empty. Go on with the task, or say that you are done."

EMPTY = StateKey("empty_replies", int)
"""How many replies in a row were empty."""


def empty_replies(crow: Crow) -> None:
    """Ask the model to go on after an empty reply, once. A second one in a row raises ModelError."""

    @crow.after_model
    def count(session: Session, model_call: ModelCall) -> None:
        empty = not (model_call.reply.get("content") or model_call.reply.get("tool_calls") or model_call.interruption)
        session.state[EMPTY] = session.state[EMPTY] + 1 if empty else 0

    @crow.before_end
    def go_on(session: Session, stop_reason: StopReason) -> Message | None:
        if stop_reason != "end_turn" or not session.state[EMPTY]:
            return None
        if session.state[EMPTY] > 1:
            name = session.model.name
            raise ModelError(
                f"The model {name!r} answered nothing, twice. Ask again, or choose another: /model, or -m."
            )
        return {"role": "user", "content": REQUEST, "crow": {"hidden": True}}

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        session.state.pop(EMPTY)
