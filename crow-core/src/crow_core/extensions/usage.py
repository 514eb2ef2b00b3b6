"""How full the context is and what it cost: told to the client after each reply, and by /usage."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from crow_core.acp.schema import Cost, UsageUpdate
from crow_core.app import Crow
from crow_core.extensions.prefix import describe_prefix
from crow_core.extensions.subagents import parent_of
from crow_core.models.chat import Call, ChatModel, encode, room
from crow_core.session import Command, Session

UNKNOWN_WINDOW = 32_768
"""Tokens assumed to fit where neither the configuration nor the server tells: better too few than silently cut."""


@dataclass
class Totals:
    """What a session has used."""

    calls: int = 0
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    """Of `prompt`, what the server had read before."""
    thought: int = 0
    """Of `completion`, what was reasoning, as far as servers tell."""
    used: int = 0
    """Tokens of the context now."""
    estimated: bool = False
    """Whether `used` is a guess, because the server did not count."""
    cost: float = 0.0
    currency: str = ""
    """Empty where no prices are configured."""


TURN: ContextVar[Totals | None] = ContextVar("turn", default=None)
"""What is to count the tokens of a turn by itself, set by whoever prompts."""


def usage(crow: Crow) -> None:
    """Report the tokens of each model call; bring /usage and `_crow/usage`."""

    @crow.model_call
    def count_aside(session: Session, call: Call) -> None:
        if call.ended and not call.error and call.purpose != "turn":
            count(session, call)

    @crow.after_model
    async def report(session: Session, call: Call) -> None:
        totals, counted = count(session, call), counts(call)
        totals.used, totals.estimated = counted["prompt"] + counted["completion"], not call.usage
        cost = Cost(amount=totals.cost, currency=totals.currency) if totals.currency else UNSET
        await session.update(UsageUpdate(used=totals.used, size=room(session.model) or UNKNOWN_WINDOW, cost=cost))

    crow.methods["_crow/usage"] = tell

    @crow.commands
    def command(session: Session) -> list[Command]:
        return [Command("usage", "Tokens used so far", show)]


def count(session: Session, call: Call) -> Totals:
    """Add a call to what the session, whom it works for, and the turn have used; gives the session's."""
    parent = parent_of(session)
    totals, above = totals_of(session), parent and totals_of(parent)
    counted = counts(call)
    for sum in filter(None, (totals, above, TURN.get())):
        sum.calls += 1
        sum.prompt += counted["prompt"]
        sum.completion += counted["completion"]
        sum.cached += counted["cached"]
        sum.thought += counted["thought"]
    if paid := price(call):
        for sum in filter(None, (totals, above)):
            sum.cost += paid[0]
            sum.currency = paid[1]
    return totals


def totals_of(session: Session) -> Totals:
    return session.state.setdefault("usage", Totals())


def counts(call: Call) -> dict[str, int]:
    """Tokens of a call, as the provider counted them, else estimated at four characters a token."""
    told: dict[str, Any] = call.usage
    if not told:
        prompt, reply = (len(encode(dict(part))) // 4 for part in (call.request, call.reply))
        return {"prompt": prompt, "completion": reply, "cached": 0, "thought": 0}
    prompt, completion = number(told.get("prompt_tokens")), number(told.get("completion_tokens"))
    details: Any = told.get("completion_tokens_details")
    thought = number(details.get("reasoning_tokens")) if hasattr(details, "get") else 0
    cached = min(cached_tokens(told), prompt)
    return {"prompt": prompt, "completion": completion, "cached": cached, "thought": min(thought, completion)}


def price(call: Call) -> tuple[float, str] | None:
    """What a call cost and in which currency; None where no prices are configured."""
    prices = call.model.prices if isinstance(call.model, ChatModel) else None
    if prices is None:
        return None
    counted = counts(call)
    fresh = (counted["prompt"] - counted["cached"]) * prices.input
    cached = counted["cached"] * (prices.input if prices.cached is None else prices.cached)
    return (fresh + cached + counted["completion"] * prices.output) / 1e6, prices.currency


def cached_tokens(told: dict[str, Any]) -> int:
    """Prompt tokens that the server had read before, under the names that providers have for them."""
    details: Any = told.get("prompt_tokens_details")
    places: tuple[Any, ...] = (
        details.get("cached_tokens") if hasattr(details, "get") else None,  # OpenAI and most
        told.get("prompt_cache_hit_tokens"),  # DeepSeek
        told.get("cached_tokens"),  # Moonshot, and llama.cpp by way of our reader
        told.get("cache_read_input_tokens"),  # gateways to Anthropic
    )
    return next((number(place) for place in places if number(place)), 0)


def number(value: Any) -> int:
    """A count of tokens; 0 for whatever else a server sends."""
    return int(value) if isinstance(value, int | float) and 0 <= value < 1e15 else 0


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
        "size": room(session.model),
    }
    return {**told, "cost": {"amount": totals.cost, "currency": totals.currency}} if totals.currency else told


async def show(session: Session, words: str) -> str:
    totals: Totals | None = session.state.get("usage")
    if not totals:
        return "The model has not been asked since this session was opened."
    size = room(session.model) or UNKNOWN_WINDOW
    about = "about " if totals.estimated else ""
    share = f", {totals.cached / totals.prompt:.0%}" if totals.prompt else ""
    lines = [
        f"Context: {about}{totals.used:,} of {size:,} tokens{'' if room(session.model) else ' (assumed)'}.",
        f"{totals.calls} model calls: {totals.prompt:,} tokens in ({totals.cached:,} from the server's cache{share}), "
        f"{totals.completion:,} out.",
        describe_prefix(session),
        f"Cost: {totals.cost:.4f} {totals.currency}." if totals.currency else "",
    ]
    return "\n\n".join(line for line in lines if line)
