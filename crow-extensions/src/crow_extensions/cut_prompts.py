"""Warn about prompts that the server cut: some local servers drop the beginning of a long prompt without an error."""

from dataclasses import dataclass, field
from typing import Any

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.models.chat_model import ChatModel, get_window
from crow_core.models.estimate import count_min_tokens, count_text_characters
from crow_core.models.model_call import ModelCall
from crow_core.models.token_usage import count_prompt_tokens
from crow_core.session.session import Session
from crow_core.session_state import StateKey

COMPARE_ABOVE = 8_000
"""Characters of text up to which a prompt is not compared."""


@dataclass
class PromptSize:
    """The size of a session's last request."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    least: int = 0
    """The tokens that its texts have at least."""
    tokens: int = 0
    """The number of prompt tokens that the request has at least, with its tools."""


LAST_SIZE = StateKey("cut_prompts", PromptSize)
WARNED = StateKey("cut_prompts_warned", bool)


def cut_prompts(crow: Crow) -> None:
    """Warn the user, once a turn, when the server counts fewer than 80 % of the prompt tokens that there are at least.

    The lower bound needs no tokenizer. A token is hardly ever longer than a word, and a request has at least as many
    tokens as the one that it continues.
    """

    @crow.after_model
    async def compare(session: Session, model_call: ModelCall) -> None:
        counted = count_prompt_tokens(model_call.usage)
        if not counted or model_call.purpose != "turn":
            return
        before = session.state[LAST_SIZE]
        messages: list[dict[str, Any]] = model_call.request["messages"]
        old, thinks = len(before.messages), sends_reasoning(model_call)
        if messages[:old] != before.messages:
            before, old = PromptSize(), 0
        added = count_min_tokens(messages[old:])  # not of all messages, which takes long
        least = before.least + added
        expected = least if thinks else before.tokens + added
        is_whole = counted >= 0.8 * expected or count_text_characters(messages) <= COMPARE_ABOVE
        tokens = max(counted, expected) if is_whole and not thinks else expected
        session.state[LAST_SIZE] = PromptSize(messages, least, tokens)
        if not is_whole and not session.state[WARNED]:
            session.state[WARNED] = True
            await session.notice(describe_cut(session, counted, expected), "error")

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        session.state[WARNED] = False


def describe_cut(session: Session, counted: int, expected: int) -> str:
    """Make the sentence that tells the user what was cut, and what to do."""
    window = get_window(session.model)
    size = f" Its window seems to be about {counted:,} tokens." if not window or counted < window else ""
    return (
        f"The server read only {counted:,} of at least {expected:,} prompt tokens: it cut the beginning, with the "
        f"instructions.{size} Give it a larger context (Ollama: num_ctx, llama.cpp: -c), or start anew."
    )


def sends_reasoning(model_call: ModelCall) -> bool:
    """True if earlier reasoning is sent: chat templates drop it after the next user message, so a prompt may shrink."""
    return isinstance(model_call.model, ChatModel) and model_call.model.quirks.echo != "never"
