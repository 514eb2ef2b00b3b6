"""Counts of the model calls of each session, and the limits of a task."""

from dataclasses import dataclass, field

from crow_core.app import Crow
from crow_core.models.model_call import ModelCall
from crow_core.models.token_usage import count_tokens, find_price
from crow_core.session.session import Session
from crow_extensions.spending import Spending, limit_calls

from crow_eval.tasks import Limits


@dataclass
class SessionCounts:
    """The requests, tokens, cost and time of a session, with those of its sub-agents."""

    spending: Spending = field(default_factory=Spending)
    input: int = 0
    output: int = 0
    cached: int = 0
    currency: str | None = None
    first: float | None = None
    """Milliseconds until the first delta of the first model call."""

    @property
    def requests(self) -> int:
        """The model calls."""
        return int(self.spending.spent.get("requests", 0))

    @property
    def cost(self) -> float | None:
        """The cost, in `currency`; None if it is unknown."""
        return None if self.currency is None else self.spending.spent.get("money", 0.0)

    @property
    def reached(self) -> str:
        """A sentence about the limit that ended the turn; empty if none did."""
        if not self.spending.stopped:
            return ""
        what = self.spending.find_reached()[0]
        return f"The limit of {self.spending.limits[what]:,.6g} {'cost' if what == 'money' else what} is reached."

    def add(self, model_call: ModelCall) -> None:
        """Count the tokens of a model call that has ended, by their kind."""
        counted, price = count_tokens(model_call), find_price(model_call)
        self.input += counted["prompt"]
        self.output += counted["completion"]
        self.cached += counted["cached"]
        self.currency = price[1] if price else self.currency
        if self.first is None and model_call.first_delta:
            self.first = (model_call.first_delta - model_call.started) * 1000


def to_spending(limits: Limits, task: str) -> Spending:
    """Convert the limits of the task with this id."""
    setting = f"`cost` in the limits of the task {task}"
    return Spending(limits.requests, limits.tokens, limits.cost, setting=setting)


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
    limit_calls(crow, lambda session: meter.find(session).spending)

    @crow.model_call
    def count(session: Session, model_call: ModelCall) -> None:
        if model_call.ended:
            meter.find(session).add(model_call)
