"""What a session may spend before the person is asked whether it may spend as much again."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Annotated

from msgspec import Meta

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.errors import EndTurn
from crow_core.messages import Message, drop_rewound, marker_kind
from crow_core.models.chat import ModelCall, Request
from crow_core.models.usage import count_tokens, find_price
from crow_core.session import Session


@dataclass
class Budget:
    """What a session and its sub-agents have spent."""

    limits: dict[str, float]
    spent: dict[str, float] = field(default_factory=dict[str, float])
    since: float = 0.0
    """When the turn's time was last counted, in seconds of the monotonic clock; 0 between turns."""
    stopped: bool = False
    """The person said no in this turn."""
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def spend(self, what: str, amount: float) -> None:
        self.spent[what] = self.spent.get(what, 0) + amount

    def count_time(self, *, on: bool = True) -> None:
        now = monotonic()
        self.spend("minutes", (now - self.since) / 60 if self.since else 0)
        self.since = now if on else 0

    def over(self) -> list[str]:
        """The limits that are reached."""
        return [what for what, limit in self.limits.items() if self.spent.get(what, 0) >= limit]


AboveZero = Annotated[float, Meta(gt=0)]


def budgets(
    crow: Crow,
    *,
    turns: AboveZero | None = None,
    tokens: AboveZero | None = None,
    money: AboveZero | None = None,
    minutes: AboveZero | None = None,
) -> None:
    """Pause before the next model request when a session has used up a limit: model requests, tokens in and out, what
    they cost in the currency of `prices`, minutes of its turns. Whoever goes on grants as much again."""
    given = {"turns": turns, "tokens": tokens, "money": money, "minutes": minutes}
    limits = {what: limit for what, limit in given.items() if limit is not None}

    def budget_of(session: Session) -> Budget:
        while parent := session.parent:
            session = parent
        if "budget" not in session.state:
            session.state["budget"] = Budget(dict(limits), spent_in(session.log))
        return session.state["budget"]

    @crow.before_prompt
    def begin(message: Message, session: Session) -> None:
        if not session.parent:
            budget_of(session).stopped = False
            budget_of(session).count_time()

    @crow.model_call
    def spend(session: Session, model_call: ModelCall) -> None:
        if model_call.ended:
            budget, counted, paid = budget_of(session), count_tokens(model_call), find_price(model_call)
            budget.spend("turns", 1)
            budget.spend("tokens", counted["prompt"] + counted["completion"])
            budget.spend("money", paid[0] if paid else 0)

    @crow.before_model
    async def pause(request: Request, session: Session) -> None:
        budget = budget_of(session)
        async with budget.asking:
            budget.count_time()
            if not (over := budget.over()):
                return
            spent = ", ".join(f"{budget.spent[what]:,.6g} of {budget.limits[what]:,.6g} {what}" for what in over)
            spent = f"The budget is used up: {spent}."
            if budget.stopped or not await session.user.confirm(f"{spent} Go on, with as much again?"):
                budget.stopped = True
                raise EndTurn("max_turn_requests", f"{spent} [extensions.budgets] sets it.")
            for what in over:
                budget.limits[what] = budget.spent[what] + limits[what]
            budget.since = monotonic()  # thinking about it is free

    @crow.turn_end
    def end(session: Session, outcome: StopReason | Exception) -> None:
        if session.parent:
            return
        budget = budget_of(session)
        budget.count_time(on=False)
        spent = {what: budget.spent[what] for what in limits if what in budget.spent}
        if spent != spent_in(drop_rewound(session.log)):
            session.log.append({"crow": {"kind": "budget", "spent": spent}})


def spent_in(log: Sequence[Message]) -> dict[str, float]:
    """What had been spent when it was last written down."""
    for entry in reversed(log):
        if marker_kind(entry) == "budget":
            return dict(entry.get("crow", {})["spent"])
    return {}
