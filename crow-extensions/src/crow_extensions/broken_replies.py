"""Ask a model to continue a reply whose connection broke; the text that the user has seen stays."""

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.messages.message import Message
from crow_core.models.model_call import ModelCall
from crow_core.session.session import Session
from crow_core.session_state import StateKey

REQUEST = (
    "The connection broke in the middle of your last reply; the user has seen what you said until then. "
    "Go on exactly where it stopped, without repeating anything. "
    "Calls that you had begun were not run: make them again."
)

BROKEN = StateKey("broken_replies", int)
"""The number of replies in a row that broke off."""
INTERRUPTION = StateKey("interruption", str)


def broken_replies(crow: Crow, *, times: int = 2) -> None:
    """Ask the model to continue a reply that broke off, at most `times` times in a row."""

    @crow.after_model
    def count(session: Session, model_call: ModelCall) -> None:
        session.state[BROKEN] = session.state[BROKEN] + 1 if model_call.interruption else 0
        session.state[INTERRUPTION] = str(model_call.interruption or "")

    @crow.before_end
    async def go_on(session: Session, stop_reason: StopReason) -> Message | None:
        if not 0 < session.state[BROKEN] <= times:
            return None
        await session.notice(f"{session.state[INTERRUPTION]} Asking the model to go on.", "warning")
        return {"role": "user", "content": REQUEST, "crow": {"hidden": True}}

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        session.state.pop(BROKEN)
        session.state.pop(INTERRUPTION)
