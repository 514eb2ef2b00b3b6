"""Limits of what a session may use before the user is asked whether it may use as much again."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.errors import EndTurn
from crow_core.messages.message import Message, marker_kind
from crow_core.models.model_call import ModelRequest
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from msgspec import Meta

from crow_extensions.spending import Spending, count_calls, reserve_call


@dataclass
class SessionBudget:
    """The limits of a session and its sub-agents, and what they have used."""

    spending: Spending
    stopped: bool = False
    """True if the user said no in this turn."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the user is asked: once, whatever the number of sub-agents."""


BUDGET = StateKey[SessionBudget]("budget")
SETTING = "`money` of [extensions.budgets]"
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

    The limits, which sub-agents share. `requests` counts requests to the model, `tokens` input and output together,
    `minutes` the session's turns. `money` is in the currency of the model's `prices`, which it needs.
    """
    limits = Spending(requests, tokens, money, minutes).limits

    def budget_of(session: Session) -> SessionBudget:
        while parent := session.parent:
            session = parent
        if BUDGET not in session.state:
            spending = Spending(requests, tokens, money, minutes, find_spent(session.log), SETTING)
            session.state[BUDGET] = SessionBudget(spending)
        return session.state[BUDGET]

    @crow.before_prompt
    def begin(message: Message, session: Session) -> None:
        if not session.parent and not message.get("crow", {}).get("steer"):
            budget_of(session).stopped = False
            budget_of(session).spending.start()

    @crow.turn_resume
    def resume(session: Session, entries: Sequence[Message]) -> None:
        begin(entries[0], session)

    count_calls(crow, lambda session: budget_of(session).spending)

    @crow.before_model
    async def pause(request: ModelRequest, session: Session) -> None:
        budget = budget_of(session)
        while await reserve_call(budget.spending, session):
            async with budget.lock:
                if spent := budget.spending.describe_reached():  # nobody was asked while this call waited
                    await ask(budget, session, spent)

    async def ask(budget: SessionBudget, session: Session, spent: str) -> None:
        over = budget.spending.find_reached()
        budget.spending.pause()  # the time of the question does not count
        if budget.stopped or not await session.user.confirm(f"{spent} Go on, with as much again?"):
            budget.stopped = True
            raise EndTurn("max_turn_requests", f"{spent} [extensions.budgets] sets it.", stopped_by="budget")
        for what in over:
            budget.spending.grant(what, limits[what])
        budget.spending.start()

    @crow.turn_end
    def end(session: Session, outcome: StopReason | Exception) -> None:
        if session.parent:
            return
        spending = budget_of(session).spending
        spending.pause()
        spent = {what: spending.spent[what] for what in limits if what in spending.spent}
        before = find_spent(session.view.entries())
        if spent != {what: before[what] for what in limits if what in before}:
            session.log.append({"crow": {"kind": "budget", "spent": spent}})


def find_spent(log: Sequence[Message]) -> dict[str, float]:
    """Find the last budget marker of a log; return what had been used by then, and by later replies that say so."""
    later = defaultdict[str, float](float)
    for entry in reversed(log):
        is_marker, spent = marker_kind(entry) == "budget", entry.get("crow", {}).get("spent", {})
        if spent and not is_marker:
            tokens = spent["prompt"] + spent["completion"]
            spent = {"requests": 1, "tokens": tokens, "money": spent["money"]}
        for what, amount in spent.items():
            later[what] += amount
        if is_marker:
            break
    return dict(later)
