"""How many tokens a request is, without a tokenizer: its characters, at the rate that the server's counts show."""

from dataclasses import dataclass
from typing import Any

from crow_core.messages import to_parts
from crow_core.models.chat import ModelCall, Request, encode
from crow_core.models.estimate import count_characters
from crow_core.models.usage import count_cached_tokens, to_count

RATE = 0.3
"""Tokens a character, until a server has counted."""
LEAST, MOST = 1 / 6, 1.5
"""What a rate can be: a server that counts otherwise cuts prompts, or counts something else."""
MESSAGE = 20
"""Characters for what a template puts around a message."""
IMAGE = 4_000
"""Characters that an image counts for, whatever its bytes."""


@dataclass
class Gauge:
    """What is known of one session with one model."""

    rate: float = 0.0
    """Tokens a character; 0 until there was an answer."""
    tried: int = 0
    """Tokens of the request after it was last made shorter, or could not be."""
    refused: int = 0
    """Tokens of the shortest request that was refused as too long; 0 for none."""
    full: bool = False
    """The last request was refused as too long, and then made shorter."""

    def learn(self, model_call: ModelCall) -> int:
        """Take the rate from what the server counted, where it did; gives the tokens of the request."""
        characters = weight(model_call.request)
        counted, cached = to_count(model_call.usage.get("prompt_tokens")), count_cached_tokens(model_call.usage)
        counted += cached if cached > counted else 0  # some gateways count only what they had not read before
        if counted:
            self.rate = min(max(counted / characters, LEAST), MOST)
        self.rate = self.rate or RATE
        tokens = round(self.rate * characters)
        if tokens > self.refused:
            self.refused = 0
        return tokens

    def tokens(self, request: Request) -> int:
        return round((self.rate or RATE) * weight(request))


def weight(request: Request) -> int:
    """Characters, and what counts as such."""
    messages: list[dict[str, Any]] = request["messages"]
    images = sum(part.get("type") != "text" for message in messages for part in to_parts(message.get("content")))
    tools = len(encode(request["tools"])) if "tools" in request else 0
    return count_characters(messages) + MESSAGE * len(messages) + IMAGE * images + tools
