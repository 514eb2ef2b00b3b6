"""Counts of the model calls of each session, and the limits of a task."""

from dataclasses import dataclass, field
from functools import partial

from crow_core.app import Crow
from crow_core.errors import EndTurn
from crow_core.models.chat import ModelCall, ModelRequest
from crow_core.models.usage import count_tokens, find_price
from crow_core.session.session import Session

from crow_eval.tasks import Limits


@dataclass
class SessionCounts:
    """The requests, tokens, cost and time of a session, with those of its sub-agents."""

    limits: Limits = field(default_factory=Limits)
    requests: int = 0
    input: int = 0
    output: int = 0
    cached: int = 0
    cost: float | None = None
    currency: str | None = None
    first: float | None = None
    """Milliseconds until the first delta of the first model call."""
    reached: str = ""
    """A sentence about the limit that was reached; empty if none was."""

    def add(self, model_call: ModelCall) -> None:
        """Count a model call that has ended."""
        counted, price = count_tokens(model_call), find_price(model_call)
        self.requests += 1
        self.input += counted["prompt"]
        self.output += counted["completion"]
        self.cached += counted["cached"]
        if price is not None:
            self.cost, self.currency = (self.cost or 0.0) + price[0], price[1]
        if self.first is None and model_call.first_delta:
            self.first = (model_call.first_delta - model_call.started) * 1000

    def find_reached(self) -> str:
        """Return a sentence about a limit that is reached; empty if none is."""
        used = {"requests": self.requests, "tokens": self.input + self.output, "cost": self.cost or 0.0}
        for name, amount in used.items():
            limit = getattr(self.limits, name)
            if limit is not None and amount >= limit:
                return f"The limit of {limit:,.6g} {name} is reached."
        return ""


class Meter:
    """Counts what the sessions of agents take, by their ids."""

    def __init__(self) -> None:
        self.counts: dict[str, SessionCounts] = {}

    def find(self, session: Session) -> SessionCounts:
        """Return the counts of a session, or of the one that it works for."""
        while session.parent is not None:
            session = session.parent
        return self.counts.setdefault(session.id, SessionCounts())


def measure(crow: Crow, *, meter: Meter) -> None:
    """Count what each session takes, and end its turn before a model call that is beyond a limit of its task."""
    crow.model_call(partial(count, meter))
    crow.before_model(partial(stop, meter))


def count(meter: Meter, session: Session, model_call: ModelCall) -> None:
    """Count a model call that has ended."""
    if model_call.ended:
        meter.find(session).add(model_call)


def stop(meter: Meter, request: ModelRequest, session: Session) -> None:
    """End the turn if a limit is reached. Raises EndTurn."""
    counts = meter.find(session)
    if sentence := counts.find_reached():
        counts.reached = sentence
        raise EndTurn("max_turn_requests", sentence)
