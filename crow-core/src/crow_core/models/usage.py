"""Count the tokens of model calls, and their price."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from crow_core.models.chat import ChatModel, ModelCall, encode

ASSUMED_WINDOW = 32_768
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


TURN_TOTALS: ContextVar[Totals | None] = ContextVar("turn", default=None)
"""What is to count the tokens of a turn by itself, set by whoever prompts."""


def count_tokens(model_call: ModelCall) -> dict[str, int]:
    """Tokens of a call, as the provider counted them, else estimated at four characters a token."""
    told: dict[str, Any] = model_call.usage
    if not told:
        prompt, reply = (len(encode(dict(part))) // 4 for part in (model_call.request, model_call.reply))
        return {"prompt": prompt, "completion": reply, "cached": 0, "thought": 0}
    prompt, completion = to_count(told.get("prompt_tokens")), to_count(told.get("completion_tokens"))
    details: Any = told.get("completion_tokens_details")
    thought = to_count(details.get("reasoning_tokens")) if hasattr(details, "get") else 0
    cached = min(count_cached_tokens(told), prompt)
    return {"prompt": prompt, "completion": completion, "cached": cached, "thought": min(thought, completion)}


def find_price(model_call: ModelCall) -> tuple[float, str] | None:
    """What a call cost and in which currency; None where no prices are configured."""
    prices = model_call.model.prices if isinstance(model_call.model, ChatModel) else None
    if prices is None:
        return None
    counted = count_tokens(model_call)
    fresh = (counted["prompt"] - counted["cached"]) * prices.input
    cached = counted["cached"] * (prices.input if prices.cached is None else prices.cached)
    return (fresh + cached + counted["completion"] * prices.output) / 1e6, prices.currency


def count_cached_tokens(told: dict[str, Any]) -> int:
    """Prompt tokens that the server had read before, under the names that providers have for them."""
    details: Any = told.get("prompt_tokens_details")
    places: tuple[Any, ...] = (
        details.get("cached_tokens") if hasattr(details, "get") else None,  # OpenAI and most
        told.get("prompt_cache_hit_tokens"),  # DeepSeek
        told.get("cached_tokens"),  # Moonshot, and llama.cpp by way of our reader
        told.get("cache_read_input_tokens"),  # gateways to Anthropic
    )
    return next((to_count(place) for place in places if to_count(place)), 0)


def to_count(value: Any) -> int:
    """A count of tokens; 0 for whatever else a server sends."""
    return int(value) if isinstance(value, int | float) and 0 <= value < 1e15 else 0
