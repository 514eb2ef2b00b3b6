"""Was the prompt cut? A local server may drop the front of a prompt that is too long, and answer as if nothing were."""

import re
from dataclasses import dataclass, field
from typing import Any

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.messages import to_parts
from crow_core.models.chat import ChatModel, ModelCall, effective_window
from crow_core.models.usage import count_cached_tokens, to_count
from crow_core.session import Session

ENOUGH = 8_000
"""Characters below which a comparison says nothing."""

WORD = re.compile(r"[^\W\d_]+")


@dataclass
class Measure:
    """What is known of a session's last request that raised no alarm."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tokens: int = 0
    """How many it must have at least."""


def alarm(crow: Crow) -> None:
    """Warn, once a turn, when the server counts clearly fewer prompt tokens than there must be.

    What there must be at least is known without a tokenizer: a token is hardly ever more than a word, and a request
    that goes on from the one before is no shorter than it.
    """

    @crow.after_model
    async def compare(session: Session, model_call: ModelCall) -> None:
        counted = to_count(model_call.usage.get("prompt_tokens"))
        cached = count_cached_tokens(model_call.usage)
        counted += cached if cached > counted else 0  # some gateways count only what they had not read before
        if not counted or model_call.purpose != "turn":
            return
        before = session.state.setdefault("measure", Measure())
        messages: list[dict[str, Any]] = model_call.request["messages"]
        if goes_on(messages, before) and not echoes(model_call):
            expected = before.tokens + least(messages[len(before.messages) :])  # not all anew at every request
        else:
            expected = least(messages)
        if counted >= 0.8 * expected or size(messages) <= ENOUGH:
            session.state["measure"] = Measure(messages, counted if echoes(model_call) else max(counted, expected))
        elif not session.state.get("alarmed"):
            session.state["alarmed"] = True
            await session.notice(sentence(session, counted, expected), "error")

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        session.state.pop("alarmed", None)


def sentence(session: Session, counted: int, expected: int) -> str:
    window = effective_window(session.model)
    size = f" Its window seems to be about {counted:,} tokens." if not window or counted < window else ""
    return (
        f"The server read only {counted:,} of at least {expected:,} prompt tokens: it cut the beginning, with the "
        f"instructions.{size} Give it a larger context (Ollama: num_ctx, llama.cpp: -c), or start anew."
    )


def goes_on(messages: list[dict[str, Any]], before: Measure) -> bool:
    """Whether a request begins with all that the one before held."""
    return bool(before.messages) and messages[: len(before.messages)] == before.messages


def echoes(model_call: ModelCall) -> bool:
    """Whether earlier reasoning is sent along: chat templates leave it out again once the user has spoken."""
    return isinstance(model_call.model, ChatModel) and model_call.model.quirks.echo != "never"


def least(messages: list[dict[str, Any]]) -> int:
    """How many tokens these are at the very least, whatever the language and the tokenizer.

    Counts words, as no usual tokenizer joins two: long ones, and those of scripts without spaces, as several. Without
    tools and images, whose tokens depend on the server.
    """
    texts = texts_of(messages)
    words = sum(1 + len(word) // (16 if word.isascii() else 6) for text in texts for word in WORD.findall(text))
    characters = sum(len(re.sub(r"(\W)\1{3,}", r"\1", text)) for text in texts)
    return max(words, characters // 10)


def size(messages: list[dict[str, Any]]) -> int:
    """Characters of text."""
    return sum(map(len, texts_of(messages)))


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    """All that is said in messages."""
    texts = [part.get("text") or "" for message in messages for part in to_parts(message.get("content"))]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return texts + [call["function"]["arguments"] for call in calls]
