"""Count the tokens of model calls, and their price."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType

from crow_core.acp.schema import Usage
from crow_core.models.chat_model import encode_json
from crow_core.models.model_call import ModelCall, Prices
from crow_core.session_state import StateKey

ASSUMED_WINDOW = 32_768
"""Tokens assumed to fit where neither the configuration nor the server tells. With too many, servers cut silently."""


@dataclass
class TokenTotals:
    """The tokens and the cost of several model calls."""

    calls: int = 0
    """The number of model calls."""
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    """The part of `prompt` that the server had in its cache."""
    thought: int = 0
    """The part of `completion` that was reasoning, as far as servers report it."""
    used: int = 0
    """Tokens of the context after the last model call."""
    estimated: bool = False
    """True if `used` is an estimate, because the server did not count."""
    cost: float = 0.0
    currency: str = ""
    """The currency of `cost`; empty if no prices are configured."""


SESSION_TOTALS = StateKey("usage", TokenTotals)
"""The totals of a session. A store adds those of a session that it loads."""

TURN_TOTALS: ContextVar[TokenTotals | None] = ContextVar("turn", default=None)
"""The totals of the running turn; the caller of the prompt sets them."""


def to_usage(spent: TokenTotals) -> Usage | UnsetType:
    """Convert the tokens of a turn to ACP's usage; UNSET if the model was not asked, or no tokens were counted."""
    if not spent.calls:
        return UNSET
    return Usage(
        input_tokens=spent.prompt,
        output_tokens=spent.completion,
        total_tokens=spent.prompt + spent.completion,
        cached_read_tokens=spent.cached or UNSET,
        thought_tokens=spent.thought or UNSET,
    )


def count_tokens(model_call: ModelCall) -> dict[str, int]:
    """Return a model call's tokens, counted by the provider, else estimated at four characters a token."""
    usage: dict[str, Any] = model_call.usage
    if not usage:
        prompt, reply = (len(encode_json(dict(part))) // 4 for part in (model_call.request, model_call.reply))
        return {"prompt": prompt, "completion": reply, "cached": 0, "thought": 0}
    prompt, completion = to_count(usage.get("prompt_tokens")), to_count(usage.get("completion_tokens"))
    details: Any = usage.get("completion_tokens_details")
    thought = to_count(details.get("reasoning_tokens")) if hasattr(details, "get") else 0
    cached = min(count_cached_tokens(usage), prompt)
    return {"prompt": prompt, "completion": completion, "cached": cached, "thought": min(thought, completion)}


def find_price(model_call: ModelCall) -> tuple[float, str] | None:
    """Return a model call's cost and its currency; None if it is unknown, as no prices are configured."""
    if model_call.cost:
        return model_call.cost
    prices: Prices | None = getattr(model_call.model, "prices", None)
    if prices is None:
        return None
    counted = count_tokens(model_call)
    fresh = (counted["prompt"] - counted["cached"]) * prices.input
    cached = counted["cached"] * (prices.input if prices.cached is None else prices.cached)
    return (fresh + cached + counted["completion"] * prices.output) / 1e6, prices.currency


def count_cached_tokens(usage: dict[str, Any]) -> int:
    """Return the prompt tokens that the server had in its cache, under any provider's name for them."""
    details: Any = usage.get("prompt_tokens_details")
    places: tuple[Any, ...] = (
        details.get("cached_tokens") if hasattr(details, "get") else None,  # OpenAI and most
        usage.get("prompt_cache_hit_tokens"),  # DeepSeek
        usage.get("cached_tokens"),  # Moonshot, and llama.cpp through `ModelCall.run`
        usage.get("cache_read_input_tokens"),  # gateways to Anthropic
    )
    return next((count for place in places if place and (count := to_count(place))), 0)


def count_prompt_tokens(usage: dict[str, Any]) -> int:
    """Return the prompt tokens with those from the cache, which some gateways leave out; 0 if they are unknown."""
    counted, cached = to_count(usage.get("prompt_tokens")), count_cached_tokens(usage)
    return counted + cached if cached > counted else counted


def to_count(value: Any) -> int:
    """Return a value as a count of tokens; 0 if it is none."""
    return int(value) if isinstance(value, int | float) and 0 <= value < 1e15 else 0
