"""A limit of what an agent may use in all its prompts."""

from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from crow_agent.errors import BudgetSpent

if TYPE_CHECKING:
    from crow_core.app import Crow
    from crow_core.models.chat import ModelCall, ModelRequest
    from crow_core.session.session import Session


@dataclass
class Budget:
    """The most that an agent, its sub-agents included, may use in all its prompts; None means no limit.

    A turn that reaches a limit ends before its next model call; BudgetSpent is raised then, and for every later prompt.
    Of another agent than crow's own, tokens are known when its turns end, requests never.
    """

    requests: int | None = None
    """Model calls."""
    tokens: int | None = None
    """Input and output together."""
    money: float | None = None
    """In the currency of the model's prices."""
    minutes: float | None = None
    """From the first prompt on."""
    spent: dict[str, float] = field(default_factory=dict[str, float])
    """The amounts used so far, by the names of the limits."""
    _since: float = 0.0
    """The time of the first prompt, in seconds of the monotonic clock; 0 before."""

    def __post_init__(self) -> None:
        for what, limit in self.limits.items():
            if limit < 0:
                raise ValueError(f"The limit of {what} is {limit:g}. Give a number from 0 on, or None for no limit.")

    def start(self) -> None:
        """Let the minutes count from now on, unless they do already."""
        self._since = self._since or monotonic()

    def spend(self, what: str, amount: float) -> None:
        """Add to what was used."""
        self.spent[what] = self.spent.get(what, 0) + amount

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        given = {"requests": self.requests, "tokens": self.tokens, "money": self.money, "minutes": self.minutes}
        return {what: limit for what, limit in given.items() if limit is not None}

    def describe_reached(self) -> str:
        """Make a sentence about the limits that are reached; empty if none is."""
        if self._since:
            self.spent["minutes"] = (monotonic() - self._since) / 60
        limits = self.limits
        reached = [what for what, limit in limits.items() if self.spent.get(what, 0) >= limit]
        parts = ", ".join(f"{self.spent.get(what, 0):,.6g} of {limits[what]:,.6g} {what}" for what in reached)
        return f"The budget is used up: {parts}." if reached else ""

    def check(self) -> None:
        """Raises BudgetSpent if a limit is reached."""
        if sentence := self.describe_reached():
            raise BudgetSpent(sentence, spent=dict(self.spent), limits=self.limits)


def limit_spending(crow: "Crow", budget: Budget) -> None:
    """Count what all sessions of an app use, and end each turn before a model call that the budget does not cover."""
    from crow_core.errors import EndTurn
    from crow_core.models.usage import count_tokens, find_price

    @crow.model_call
    def count(session: "Session", model_call: "ModelCall") -> None:
        if model_call.ended:
            counted, paid = count_tokens(model_call), find_price(model_call)
            budget.spend("requests", 1)
            budget.spend("tokens", counted["prompt"] + counted["completion"])
            budget.spend("money", paid[0] if paid else 0)

    @crow.before_model
    def stop(request: "ModelRequest", session: "Session") -> None:
        if sentence := budget.describe_reached():
            raise EndTurn("max_turn_requests", sentence)
