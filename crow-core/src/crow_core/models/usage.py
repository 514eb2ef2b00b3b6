"""Count the tokens of model calls, and their price."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from crow_core.models.chat import Call, ChatModel, encode

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
