"""Estimate the tokens of a request from its characters, at the rate that the server's usage reports show."""

from dataclasses import dataclass, field
from typing import Any

from crow_core.models.chat_model import encode_json
from crow_core.models.estimate import count_text_characters
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.models.token_usage import count_prompt_tokens

DEFAULT_RATE = 0.3
"""Tokens per character before the first usage report."""
MIN_RATE, MAX_RATE = 1 / 6, 1.5
"""Limits of a believable rate: outside of them a server cuts prompts, or counts something else."""
MESSAGE_CHARACTERS = 20
"""Characters added per message for what the chat template puts around it."""
IMAGE_CHARACTERS = 4_000
"""Characters that an image counts as, whatever its size."""


@dataclass
class TokenEstimator:
    """Estimates the tokens of one session's requests to one model, and remembers which were too long."""

    rate: float = 0.0
    """Tokens per character; 0 before the first reply."""
    with_tools: bool = True
    """True if the tools count. They do not where the chat template of a local model leaves them out of the prompt."""
    tried: int = 0
    """Tokens of the request after the last compaction, or before the last one that failed; 0 for none."""
    refused: int = 0
    """Tokens of the shortest request that was refused as too long; 0 for none."""
    full: int = 0
    """Tokens of the current request when it was last refused as too long; 0 if it was not."""
    failures: int = 0
    """Unusable summaries in a row."""
    cut_short: str = ""
    """The last summary that was cut short since the last usable one."""
    counted: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The messages of the longest request so far."""
    characters: int = 0
    """The characters of these messages."""

    def learn(self, model_call: ModelCall) -> int:
        """Update the rate from the usage of a model call, if it has one; return the tokens of its request."""
        counted = count_prompt_tokens(model_call.usage)
        if counted and not self.rate:
            with_tools, without = (self.count(model_call.request, with_tools=each) for each in (True, False))
            self.with_tools = not MIN_RATE * without <= counted < MIN_RATE * with_tools
        characters = self.count(model_call.request, with_tools=self.with_tools)
        if counted:
            self.rate = min(max(counted / characters, MIN_RATE), MAX_RATE)
        self.rate = self.rate or DEFAULT_RATE
        tokens = round(self.rate * characters)
        if tokens > self.refused:
            self.refused = 0
        return tokens

    def get_rate(self) -> float:
        """Return the tokens per character, or DEFAULT_RATE before the first reply."""
        return self.rate or DEFAULT_RATE

    def estimate(self, request: ModelRequest) -> int:
        """Return the estimated tokens of a request."""
        return round(self.get_rate() * self.count(request, with_tools=self.with_tools))

    def count(self, request: ModelRequest, *, with_tools: bool) -> int:
        """Return the characters of a request's messages, and of its tools if wanted.

        Of a request that continues the longest one so far, only the new messages are counted.
        """
        messages: list[dict[str, Any]] = request["messages"]
        tools = len(encode_json(request["tools"])) if with_tools and "tools" in request else 0
        old = len(self.counted)
        if len(messages) < old:
            return count_characters(messages) + tools
        if messages[:old] != self.counted:
            old = self.characters = 0
        self.characters += count_characters(messages[old:])
        self.counted = [*messages]
        return self.characters + tools


def count_characters(messages: list[dict[str, Any]]) -> int:
    """Return the characters of messages, with the allowances for templates and images."""
    parts: list[dict[str, Any]] = []
    for message in messages:
        parts += message["content"] if isinstance(message.get("content"), list) else ()
    images = sum(part.get("type") != "text" for part in parts)
    return count_text_characters(messages) + MESSAGE_CHARACTERS * len(messages) + IMAGE_CHARACTERS * images
