"""Is the prefix kept? Local servers reuse what they have read as long as a request begins like the one before."""

from dataclasses import dataclass
from typing import Any

from crow_core.app import Crow
from crow_core.messages import SELECTING_MARKERS, Message, marker_kind
from crow_core.models.chat import ModelCall
from crow_core.session import Session


@dataclass
class Meter:
    """A session's last request, held against the one before it."""

    messages: list[dict[str, Any]]
    tools: Any
    kept: int = 0
    """How many messages of the earlier request it began with; -1 when its tools were others already."""
    of: int = 0
    """How many messages the earlier request had; 0 when there was none."""

    def __str__(self) -> str:
        """A sentence for /usage; empty before the second request."""
        if not self.of:
            return ""
        if self.kept >= self.of - 1:  # the last one may grow: two user messages in a row are joined
            return "The last request began like the one before it: the server could reuse all it had read."
        where = f"message {self.kept + 1} of {self.of}" if self.kept >= 0 else "its tools"
        return f"The last request departed from the one before it at {where}."


def prefix(crow: Crow) -> None:
    """Meter, as `session.state["prefix"]`, the first message at which a request departs from the one before. Where a
    marker has changed what is sent, there is none to compare it with."""

    @crow.message
    def start_anew(session: Session, entry: Message) -> None:
        if marker_kind(entry) in SELECTING_MARKERS:
            session.state.pop("prefix", None)

    @crow.after_model
    def measure(session: Session, model_call: ModelCall) -> None:
        if model_call.purpose != "turn":
            return
        messages, tools = model_call.request["messages"], model_call.request.get("tools")
        before: Meter | None = session.state.get("prefix")
        session.state["prefix"] = meter = Meter(messages, tools)
        if before:
            pairs = enumerate(zip(before.messages, messages, strict=False))
            same = next((n for n, (old, new) in pairs if old != new), min(len(before.messages), len(messages)))
            meter.kept, meter.of = same if before.tools == tools else -1, len(before.messages)
