"""Warn when a model prints its tool calls as text, because its server was not started with a parser for them."""

from crow_core.app import Crow
from crow_core.models.chat_model import TOOL_ADVICE
from crow_core.models.model_call import ModelCall
from crow_core.models.printed import is_printed_call
from crow_core.session.session import Session
from crow_core.session_state import StateKey

WARNED = StateKey("printed_calls", bool)


def printed_calls(crow: Crow) -> None:
    """Tell the user, once a session, which option the server needs when a reply is a tool call printed as text."""

    @crow.after_model
    async def warn(session: Session, model_call: ModelCall) -> None:
        if is_printed_call(model_call) and not session.state[WARNED]:
            session.state[WARNED] = True
            await session.notice(
                f"The model called a tool, but its server printed the call as text, so it was not run. {TOOL_ADVICE}",
                "error",
            )
