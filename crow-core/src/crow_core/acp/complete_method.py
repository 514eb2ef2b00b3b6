"""The method `_crow/complete`: the texts that may follow what a user is typing, as far as only the agent knows them.

A client sends `sessionId` and `text`, the text before the cursor; the answer is `{"completions": […]}`.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, ValidationError

from crow_core.acp.decoding import convert_leniently

COMPLETE_METHOD = "_crow/complete"


class Completion(Struct, frozen=True):
    """A text to insert in place of the last characters before the cursor."""

    text: str
    replaces: int = 0
    """The number of characters before the cursor that the text replaces."""
    label: str = ""
    """The text to show; empty for `text`."""
    detail: str = ""
    """A few words on the completion."""


class CompletionAnswer(Struct):
    """The answer to `_crow/complete`."""

    completions: list[Completion]


def can_complete(own: Mapping[str, Any]) -> bool:
    """Find out from `agentCapabilities._meta.crow` whether an agent completes texts."""
    methods = own.get("methods")
    return isinstance(methods, list) and COMPLETE_METHOD in methods


def read_completions(answer: Any, text: str) -> list[Completion]:
    """Return the completions in an answer to `_crow/complete` for `text`, without those that cannot be inserted."""
    try:
        found = convert_leniently(answer, CompletionAnswer).completions
    except ValidationError:
        return []
    return [one for one in found if one.text.isprintable() and 0 <= one.replaces <= len(text)]
