"""A reply without words or calls is no answer: ask once more, then say so."""

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.messages import Message
from crow_core.models.chat import ModelCall
from crow_core.session import Session

NUDGE = "Your last reply was empty. Go on with the task, or say that you are done."


def nudge(crow: Crow) -> None:
    """Nudge a model that answered nothing, once; a second empty reply is an error that the user sees."""

    @crow.after_model
    def look(session: Session, model_call: ModelCall) -> None:
        silent = not (model_call.reply.get("content") or model_call.reply.get("tool_calls") or model_call.broken)
        session.state["silent"] = silent * (session.state.get("silent", 0) + 1)

    @crow.before_end
    def go_on(session: Session, stop_reason: StopReason) -> Message | None:
        if stop_reason != "end_turn" or not session.state.get("silent"):
            return None
        if session.state["silent"] > 1:
            raise ModelError(f"The model {session.model.name!r} answered nothing, twice.")
        return {"role": "user", "content": NUDGE, "crow": {"hidden": True}}

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        session.state.pop("silent", None)
