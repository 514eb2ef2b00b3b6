"""A model that prints its tool calls as text: the server that runs it was not told how to read them."""

import re

from crow_core.app import Crow
from crow_core.models.chat import TOOL_FLAGS, ModelCall
from crow_core.session import Session

PRINTED = re.compile(
    r"^\s*(?:```\w*\s*)?"
    r"(?:\[TOOL_CALLS\]|<tool_call>|<\|tool_call|<function=\w|<function_calls?>|<｜tool▁calls?▁begin｜>|<\|python_tag\|>)",
    re.M,
)
"""How Mistral, Qwen and Hermes, Granite, Llama, Qwen-Coder and DeepSeek mark a call, at the beginning of a line."""


def printed_calls(crow: Crow) -> None:
    """Say, once a session, which option the server lacks when a reply is a tool call printed as text."""

    @crow.after_model
    async def look(session: Session, model_call: ModelCall) -> None:
        told = session.state.get("printed_calls", False)
        if not told and is_printed_call(model_call):
            session.state["printed_calls"] = True
            await session.notice(
                f"The model called a tool, but its server printed the call as text, so it was not run. {TOOL_FLAGS}",
                "error",
            )


def is_printed_call(model_call: ModelCall) -> bool:
    """Whether a reply without calls holds the mark of one, outside of what a user may have asked to be shown."""
    text = model_call.reply.get("content")
    tools = model_call.request.get("tools")
    return bool(tools and isinstance(text, str) and not model_call.reply.get("tool_calls") and PRINTED.search(text))
