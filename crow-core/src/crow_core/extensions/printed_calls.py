"""Warn when a model prints its tool calls as text, because its server was not started with a parser for them."""

import re

from crow_core.app import Crow
from crow_core.models.chat import TOOL_ADVICE, ModelCall
from crow_core.session import Session

PRINTED = re.compile(
    r"^\s*(?:```\w*\s*)?"
    r"(?:\[TOOL_CALLS\]|<tool_call>|<\|tool_call|<function=\w|<function_calls?>|<｜tool▁calls?▁begin｜>|<\|python_tag\|>)",
    re.M,
)
"""Matches, at the start of a line, the mark of a tool call: Mistral's, Qwen's and Hermes', Granite's, Llama's,
Qwen-Coder's or DeepSeek's."""


def printed_calls(crow: Crow) -> None:
    """Tell the user, once a session, which option the server needs when a reply is a tool call printed as text."""

    @crow.after_model
    async def warn(session: Session, model_call: ModelCall) -> None:
        if is_printed_call(model_call) and not session.state.get("printed_calls"):
            session.state["printed_calls"] = True
            await session.notice(
                f"The model called a tool, but its server printed the call as text, so it was not run. {TOOL_ADVICE}",
                "error",
            )


def is_printed_call(model_call: ModelCall) -> bool:
    """Whether a reply has the mark of a tool call in its text, and no tool calls, although tools were offered."""
    text = model_call.reply.get("content")
    tools = model_call.request.get("tools")
    return bool(tools and isinstance(text, str) and not model_call.reply.get("tool_calls") and PRINTED.search(text))
