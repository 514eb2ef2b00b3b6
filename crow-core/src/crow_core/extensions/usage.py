"""How full the context is and what it cost: told to the client after each reply, and by /usage."""

from typing import Any

from msgspec import UNSET

from crow_core.acp.schema import Cost, UsageUpdate
from crow_core.app import Crow
from crow_core.models.chat import ModelCall, effective_window
from crow_core.models.usage import ASSUMED_WINDOW, TURN_TOTALS, Totals, count_tokens, find_price
from crow_core.session import Command, Session


def usage(crow: Crow) -> None:
    """Report the tokens of each model call; bring /usage and `_crow/usage`."""

    @crow.model_call
    def count_aside(session: Session, model_call: ModelCall) -> None:
        if model_call.ended and not model_call.error and model_call.purpose != "turn":
            count(session, model_call)

    @crow.after_model
    async def report(session: Session, model_call: ModelCall) -> None:
        totals, counted = count(session, model_call), count_tokens(model_call)
        totals.used, totals.estimated = counted["prompt"] + counted["completion"], not model_call.usage
        cost = Cost(amount=totals.cost, currency=totals.currency) if totals.currency else UNSET
        await session.update(
            UsageUpdate(used=totals.used, size=effective_window(session.model) or ASSUMED_WINDOW, cost=cost)
        )

    crow.methods["_crow/usage"] = tell

    @crow.commands
    def command(session: Session) -> list[Command]:
        return [Command("usage", "Tokens used so far", show)]


def count(session: Session, model_call: ModelCall) -> Totals:
    """Add a call to what the session, whom it works for, and the turn have used; gives the session's."""
    parent = session.parent
    totals, above = totals_of(session), parent and totals_of(parent)
    counted = count_tokens(model_call)
    for sum in filter(None, (totals, above, TURN_TOTALS.get())):
        sum.calls += 1
        sum.prompt += counted["prompt"]
        sum.completion += counted["completion"]
        sum.cached += counted["cached"]
        sum.thought += counted["thought"]
    if paid := find_price(model_call):
        for sum in filter(None, (totals, above)):
            sum.cost += paid[0]
            sum.currency = paid[1]
    return totals


def totals_of(session: Session) -> Totals:
    return session.state.setdefault("usage", Totals())


def tell(session: Session, params: dict[str, Any]) -> dict[str, Any]:
    """The totals, for a program."""
    totals: Totals = session.state.get("usage") or Totals()
    told: dict[str, Any] = {
        "calls": totals.calls,
        "inputTokens": totals.prompt,
        "outputTokens": totals.completion,
        "cachedReadTokens": totals.cached,
        "thoughtTokens": totals.thought,
        "used": totals.used,
        "size": effective_window(session.model),
    }
    return {**told, "cost": {"amount": totals.cost, "currency": totals.currency}} if totals.currency else told


async def show(session: Session, words: str) -> str:
    totals: Totals | None = session.state.get("usage")
    if not totals:
        return "The model has not been asked since this session was opened."
    size = effective_window(session.model) or ASSUMED_WINDOW
    about = "about " if totals.estimated else ""
    share = f", {totals.cached / totals.prompt:.0%}" if totals.prompt else ""
    lines = [
        f"Context: {about}{totals.used:,} of {size:,} tokens{'' if effective_window(session.model) else ' (assumed)'}.",
        f"{totals.calls} model calls: {totals.prompt:,} tokens in ({totals.cached:,} from the server's cache{share}), "
        f"{totals.completion:,} out.",
        str(session.state.get("prefix", "")),
        f"Cost: {totals.cost:.4f} {totals.currency}." if totals.currency else "",
    ]
    return "\n\n".join(line for line in lines if line)
