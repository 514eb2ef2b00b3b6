"""The model that `crow doctor` examines, whose answers are kept as they came over the network."""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from crow_core.messages.message import Delta, Message, parse_arguments, settle
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.models.stream import parse_object

MAX_REPLY_TOKENS = 1500
"""Tokens that a reply may take: enough for a model that reasons first."""


@dataclass(kw_only=True)
class ExaminedModel(ChatModel):
    """A model whose received bytes are kept until its next request."""

    received: bytearray = field(default_factory=bytearray)
    """The bytes of the last answer, as they came over the network."""
    notices: list[str] = field(default_factory=list[str])
    """The notices of the model calls during a probe."""
    printed: str = ""
    """The tool call that the server sent as text in the probe of tool calls; "" if it sent none."""
    long_call: ModelCall | None = None
    """The model call with the long prompt, which is repeated to test the cache."""

    @asynccontextmanager
    async def post(self, body: ModelRequest) -> AsyncGenerator[AsyncIterator[bytes]]:
        self.received.clear()
        async with super().post(body) as chunks:
            yield self.record_chunks(chunks)

    async def record_chunks(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        async for chunk in chunks:
            self.received += chunk
            yield chunk

    async def complete(self, prompt: "str | list[Message]", **more: Any) -> ModelCall:
        """Send a prompt and wait for the complete answer. Raises ModelError."""
        messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        model_call = ModelCall(
            self, {"temperature": 0, "max_tokens": MAX_REPLY_TOKENS, **more, "messages": messages}, "doctor"
        )

        async def tell(delta: Delta) -> None:
            if "notice" in delta:
                self.notices.append(re.sub(r" Asking again (now|in \d+ s)\.$", "", delta["notice"]))

        await model_call.run(tell)
        model_call.reply = settle(model_call.reply, used=set())
        return model_call

    def events(self) -> list[dict[str, Any]]:
        """Parse the received bytes as server-sent events."""
        lines = (line[5:].strip() for line in bytes(self.received).splitlines() if line.startswith(b"data:"))
        return [chunk for line in lines if (chunk := parse_object(line))]


def reply_text(model_call: ModelCall) -> str:
    """Return the text of a reply."""
    return str(model_call.reply.get("content") or "")


def parse_all_arguments(model_call: ModelCall) -> list[dict[str, Any] | None]:
    """Return the arguments of each tool call; None for arguments that are not a JSON object."""
    return [parse_arguments(use) for use in model_call.reply.get("tool_calls", [])]
