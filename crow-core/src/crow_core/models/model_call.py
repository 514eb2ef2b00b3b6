"""A call of a language model: its request, the reply as it streams, its times and its cost."""

from asyncio import CancelledError, sleep
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from crow_core.errors import ModelError
from crow_core.messages.message import Delta, Message
from crow_core.models.reply import ReplyBuilder

ModelRequest = dict[str, Any]
"""The body of a chat-completions request. `messages` is the last key, so that the unchanging part comes first."""

ANSWER_KEYS = frozenset({"content", "reasoning_content", "tool_calls"})
"""The keys of a delta that are parts of an answer."""

MAX_REPLY_LENGTH = 8_000_000
"""The most characters of one reply, its reasoning and tool calls included. The delta that reaches it is the last."""

MAX_TOOL_CALLS = 1_000
"""The most tool calls of one reply."""

REPETITION = "repetition"
"""The finish reason of a reply that crow cut off because it only repeated itself."""

MAX_BUSY = 0.005
"""Seconds after which a flood of deltas lets other tasks run, such as the one that cancels it."""


class Model(Protocol):
    """A language model, as far as the loop needs it; another provider is one more class."""

    name: str
    """The model's name at the endpoint."""
    window: int | None
    """Tokens that fit into one request and its reply; None if unknown."""

    def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        """Yield the reply in deltas, which `ReplyBuilder` joins to a message. Raises ModelError."""
        ...


class Prices(msgspec.Struct, frozen=True):
    """The prices of a model's tokens, each for a million tokens."""

    input: float
    """The price of input tokens."""
    output: float
    """The price of output tokens."""
    cached: float | None = None
    """The price of input tokens that the server had in its cache; by default the price of `input`."""
    currency: str = "USD"
    """The currency of the prices."""


@dataclass
class ModelCall:
    """A request to a model and its answer; `after_model` receives it."""

    model: Model
    request: ModelRequest
    purpose: str = "turn"
    """The purpose of the call: `turn` for one of the loop, else a name such as `title`."""
    id: str = field(default_factory=lambda: uuid4().hex)
    """The id of the reply, also for the client (ACP messageId)."""
    sent: ModelRequest = field(default_factory=dict[str, Any])
    """The body that was sent last; empty if the model does not report it."""
    reply: Message = field(default_factory=lambda: Message(role="assistant"))
    """The reply when the call has ended."""
    arriving: ReplyBuilder = field(default_factory=ReplyBuilder, repr=False)
    """The reply while it streams."""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    """The token counts of the provider; empty if it sent none."""
    cost: "tuple[float, str] | None" = None
    """The cost and its currency, where the other side tells them; None means that they follow from the prices."""
    started: float = 0.0
    """The start of the call, in seconds of the monotonic clock, like `first_delta` and `ended`."""
    first_delta: float = 0.0
    """The time of the first delta with a part of the answer; 0 if none came."""
    ended: float = 0.0
    paused: float = 0.0
    """Seconds spent in `on_delta`, in which nothing was read."""
    error: str = ""
    """The text of the error that ended the call; empty if none did."""
    interruption: ModelError | None = None
    """The error that cut off a begun answer that may be continued; None if there was none."""

    async def run(self, on_delta: Callable[[Delta], Awaitable[None]] | None = None) -> None:
        """Send the request and read the answer into `reply`; pass each delta to `on_delta`. Raises ModelError.

        After an error or a cancel, `reply` holds everything that `on_delta` received. A reply that reaches the limit of
        MAX_REPLY_LENGTH or MAX_TOOL_CALLS ends there, with a notice and the finish reason `length`.
        """
        self.started = rested = monotonic()
        deltas = self.model.stream(self.request)
        try:
            async for delta in deltas:
                if (body := delta.get("sent")) is not None:
                    self.sent = body
                elif ANSWER_KEYS & delta.keys():
                    self.first_delta = self.first_delta or monotonic()
                self.arriving.add(delta)
                self.finish_reason = delta.get("finish_reason", self.finish_reason)
                self.usage = delta.get("usage", self.usage)
                if "cached" in delta and self.usage:
                    self.usage = {"cached_tokens": delta["cached"], **self.usage}
                since = now = monotonic()
                if on_delta is not None:
                    await on_delta(delta)
                    now = monotonic()
                    self.paused += now - since
                if limit := self.find_limit():
                    self.finish_reason = "length"
                    if on_delta is not None:
                        await on_delta({"notice": f"The reply was cut off at crow's limit of {limit}."})
                    break
                if now - rested > MAX_BUSY:
                    await sleep(0)
                    rested = monotonic()
        except BaseException as error:
            self.error = str(error) or ("cancelled" if isinstance(error, CancelledError) else type(error).__name__)
            raise
        finally:
            self.ended, self.reply = monotonic(), self.arriving.build()
            if isinstance(deltas, AsyncGenerator):
                await deltas.aclose()  # closes the connection at once if the answer was not read to its end

    def find_limit(self) -> str:
        """Return the limit that the reply has reached, in words; empty if none."""
        if self.arriving.length >= MAX_REPLY_LENGTH:
            return f"{MAX_REPLY_LENGTH:,} characters"
        return f"{MAX_TOOL_CALLS:,} tool calls" if len(self.arriving.calls) > MAX_TOOL_CALLS else ""
