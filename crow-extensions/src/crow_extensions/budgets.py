"""Limits of what a session may use before the user is asked whether it may use as much again."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Annotated

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.errors import EndTurn
from crow_core.messages.message import Message, marker_kind
from crow_core.models.chat import ModelCall, ModelRequest
from crow_core.models.usage import count_tokens, find_price
from crow_core.session.session import Session
from msgspec import Meta


@dataclass
class SessionBudget:
    """The limits of a session and its sub-agents, and what they have used."""

    limits: dict[str, float]
    """By name: "requests", "tokens", "money", "minutes"."""
    spent: dict[str, float] = field(default_factory=dict[str, float])
    since: float = 0.0
    """The time up to which the turn's time is counted, in seconds of the monotonic clock; 0 between turns."""
    stopped: bool = False
    """Whether the user said no in this turn."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the user is asked: once, whatever the number of sub-agents."""

    def spend(self, what: str, amount: float) -> None:
        """Add to what was used of the limit of this name."""
        self.spent[what] = self.spent.get(what, 0) + amount

    def count_time(self, *, on: bool = True) -> None:
        """Add the time since the last call. With `on` false, time stops to count until the next call."""
        now = monotonic()
        self.spend("minutes", (now - self.since) / 60 if self.since else 0)
        self.since = now if on else 0

    def find_reached(self) -> list[str]:
        """List the names of the limits that are reached."""
        return [what for what, limit in self.limits.items() if self.spent.get(what, 0) >= limit]


AboveZero = Annotated[float, Meta(gt=0)]


def budgets(
    crow: Crow,
    *,
    requests: AboveZero | None = None,
    tokens: AboveZero | None = None,
    money: AboveZero | None = None,
    minutes: AboveZero | None = None,
) -> None:
    """Ask the user before the next model call of a session that has reached a limit; a yes grants as much again.

    The limits, which sub-agents share: `requests` to the model; `tokens`, input and output together; `money`, in the
    currency of the model's `prices`; `minutes` of the session's turns.
    """
    given = {"requests": requests, "tokens": tokens, "money": money, "minutes": minutes}
    limits = {what: limit for what, limit in given.items() if limit is not None}

    def budget_of(session: Session) -> SessionBudget:
        while parent := session.parent:
            session = parent
        if "budget" not in session.state:
            session.state["budget"] = SessionBudget(dict(limits), find_spent(session.log))
        return session.state["budget"]

    @crow.before_prompt
    def begin(message: Message, session: Session) -> None:
        if not session.parent and not message.get("crow", {}).get("steer"):
            budget_of(session).stopped = False
            budget_of(session).count_time()

    @crow.turn_resume
    def resume(session: Session, entries: Sequence[Message]) -> None:
        begin(entries[0], session)

    @crow.model_call
    def spend(session: Session, model_call: ModelCall) -> None:
        if model_call.ended:
            budget, counted, paid = budget_of(session), count_tokens(model_call), find_price(model_call)
            budget.spend("requests", 1)
            budget.spend("tokens", counted["prompt"] + counted["completion"])
            budget.spend("money", paid[0] if paid else 0)

    @crow.before_model
    async def pause(request: ModelRequest, session: Session) -> None:
        budget = budget_of(session)
        async with budget.lock:
            budget.count_time()
            if not (over := budget.find_reached()):
                return
            spent = ", ".join(f"{budget.spent[what]:,.6g} of {budget.limits[what]:,.6g} {what}" for what in over)
            spent = f"The budget is used up: {spent}."
            if budget.stopped or not await session.user.confirm(f"{spent} Go on, with as much again?"):
                budget.stopped = True
                raise EndTurn("max_turn_requests", f"{spent} [extensions.budgets] sets it.", stopped_by="budget")
            for what in over:
                budget.limits[what] = budget.spent[what] + limits[what]
            budget.since = monotonic()  # the time of the question does not count

    @crow.turn_end
    def end(session: Session, outcome: StopReason | Exception) -> None:
        if session.parent:
            return
        budget = budget_of(session)
        budget.count_time(on=False)
        spent = {what: budget.spent[what] for what in limits if what in budget.spent}
        before = find_spent(session.view.entries())
        if spent != {what: before[what] for what in limits if what in before}:
            session.log.append({"crow": {"kind": "budget", "spent": spent}})


def find_spent(log: Sequence[Message]) -> dict[str, float]:
    """Find the last budget marker of a log; return what had been used by then, and by later replies that say so."""
    later = Counter[str]()
    for entry in reversed(log):
        notes = entry.get("crow", {})
        if marker_kind(entry) == "budget":
            later.update(notes["spent"])
            break
        if spent := notes.get("spent"):
            later.update(requests=1, tokens=spent["prompt"] + spent["completion"], money=spent["money"])
    return dict(later)
