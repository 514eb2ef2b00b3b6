"""Is the prefix kept? Local servers reuse what they have read as long as a request begins like the one before."""

from typing import Any

from crow_core.app import Crow
from crow_core.model import Call
from crow_core.session import Session


def prefix(crow: Crow) -> None:
    """Meter, for `session.state["prefix"]`, the first message at which a request departs from the one before."""

    @crow.after_model
    def measure(session: Session, call: Call) -> None:
        if call.purpose != "turn":
            return
        messages: list[dict[str, Any]] = call.request["messages"]
        before: list[dict[str, Any]] = session.state.get("last_request", [])
        session.state["last_request"] = messages
        if before:
            same = next((n for n, (old, new) in enumerate(zip(before, messages, strict=False)) if old != new), None)
            kept = min(len(before), len(messages)) if same is None else same
            session.state["prefix"] = {"kept": kept, "of": len(before)}


def describe_prefix(session: Session) -> str:
    """A sentence for /usage; empty before the second request."""
    meter = session.state.get("prefix")
    if not meter:
        return ""
    if meter["kept"] >= meter["of"] - 1:  # the last one may grow: two user messages in a row are joined
        return "The last request began like the one before it: the server could reuse all it had read."
    return f"The last request departed from the one before it at message {meter['kept'] + 1} of {meter['of']}."
