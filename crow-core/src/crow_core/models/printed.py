"""Tool calls that a reply has as text, because the server has no parser for them."""

import re

from crow_core.models.model_call import ModelCall

PRINTED = re.compile(
    r"^\s*(?:```\w*\s*)?"
    r"(?:\[TOOL_CALLS\]|<tool_call>|<\|tool_call|<function=\w|<function_calls?>|<｜tool▁calls?▁begin｜>|<\|python_tag\|>)",
    re.M,
)
"""Matches, at the start of a line, the mark of a tool call: Mistral's, Qwen's and Hermes', Granite's, Llama's,
Qwen-Coder's or DeepSeek's."""


def is_printed_call(model_call: ModelCall) -> bool:
    """Test whether a reply has the mark of a tool call in its text, and no tool calls, although tools were offered."""
    text = model_call.reply.get("content")
    tools = model_call.request.get("tools")
    return bool(tools and isinstance(text, str) and not model_call.reply.get("tool_calls") and PRINTED.search(text))
