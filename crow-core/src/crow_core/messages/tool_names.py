"""The names of tools in messages: as providers accept them, and as the tools that a reply calls have them."""

import hashlib
import re

from crow_core.messages.message import Message, RawToolCall

LEGAL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Matches a tool's name that every provider accepts."""


def to_legal_name(name: str) -> str:
    """Replace the characters of a tool's name that a provider may refuse."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)


def make_legal_name(name: str) -> str:
    """Return a name that every provider accepts: `name` itself if it is one, else one that no other name has."""
    if LEGAL_NAME.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
    return f"{to_legal_name(name[:50])}_{digest}"


def name_raw_calls(reply: Message) -> list[RawToolCall]:
    """Return the tool calls of a reply under the names of the tools that they call."""
    called = reply.get("crow", {}).get("called", {})
    return [rename(call, called.get(call["id"], call["function"]["name"])) for call in reply.get("tool_calls", [])]


def rename(call: RawToolCall, name: str) -> RawToolCall:
    """Return a tool call under another name."""
    return call if call["function"]["name"] == name else {**call, "function": {**call["function"], "name": name}}
