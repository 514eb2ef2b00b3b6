"""Ask a model again that replied with nothing, repeated itself without an end, or only repeated the prompt."""

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.messages.message import Message
from crow_core.models.model_call import REPETITION, ModelCall
from crow_core.session.session import Session
from crow_core.session_state import StateKey

REQUESTS = {
    "answered nothing": "Your last reply was empty. Go on with the task, or say that you are done.",
    "repeated itself": "Your last reply repeated itself and was cut off. Answer in a few sentences.",
    "repeated the prompt": "Your last reply only repeated the prompt. Do the task, or answer.",
}
"""Sentences to the model, by its fault."""
MIN_ECHO = 30
"""Characters of a prompt from which on a reply that equals it is an echo."""

FAULT = StateKey("empty_replies", str)
"""The fault of the last reply; "" if there was none."""
TIMES = StateKey("empty_replies_in_a_row", int)


def empty_replies(crow: Crow) -> None:
    """Ask the model to go on after an empty reply, an endless one or an echo. A second one in a row raises ModelError.

    crow cuts off a reply of a small model that only repeats itself, or white space.
    """

    @crow.after_model
    def examine(session: Session, model_call: ModelCall) -> None:
        session.state[FAULT] = fault = find_fault(model_call)
        session.state[TIMES] = session.state[TIMES] + 1 if fault else 0

    @crow.before_end
    def go_on(session: Session, stop_reason: StopReason) -> Message | None:
        fault = session.state[FAULT]
        if stop_reason != "end_turn" or not fault:
            return None
        if session.state[TIMES] > 1:
            name = session.model.name
            raise ModelError(f"The model {name!r} {fault}, twice. Ask again, or choose another: /model, or -m.")
        return {"role": "user", "content": REQUESTS[fault], "crow": {"hidden": True}}

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        session.state.pop(FAULT)
        session.state.pop(TIMES)


def find_fault(model_call: ModelCall) -> str:
    """Return what is wrong with a reply, a key of REQUESTS; "" if nothing is."""
    reply = model_call.reply
    if model_call.finish_reason == REPETITION:
        return "repeated itself"
    if model_call.interruption or reply.get("tool_calls"):
        return ""
    text = str(reply.get("content") or "")
    if not text.strip():
        return "answered nothing"
    prompts = [m["content"] for m in model_call.request["messages"] if m.get("role") == "user"]
    last = [prompt for prompt in prompts[-2:] if isinstance(prompt, str) and len(prompt) >= MIN_ECHO]
    is_echo = any(prompt.split() == text.split() for prompt in last)
    return "repeated the prompt" if is_echo else ""
