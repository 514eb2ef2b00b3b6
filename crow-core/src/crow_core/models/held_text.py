"""Hold back the text of a reply while it may be a tool call, so that the user is not shown it as an answer."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from crow_core.messages.message import Delta
from crow_core.models.printed import (
    FENCE,
    MAX_BEFORE,
    MAX_TEXT,
    OPEN_START,
    OTHER_FENCE,
    find_printed_calls,
    find_start,
    get_tools,
    is_explanation,
)


class PrintedCallReader:
    """Converts the deltas of a reply in which calls are text: text that may be a call is held back up to the end."""

    HEAD = 400
    """Characters of held text in which an offered tool must be named."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._tools = get_tools(request)
        self._text = ""
        """All text so far."""
        self._shown = 0
        """The number of its characters that were passed on."""
        self._is_answer = not self._tools
        """True if the reply has no call, whatever follows: text is passed on at once."""
        self._cut = False

    def feed(self, delta: Delta) -> Iterator[Delta]:
        """Yield what is known to be text of a delta, and all its other parts."""
        if self._is_answer:
            yield delta
            return
        self._cut = self._cut or delta.get("finish_reason") in ("length", "content_filter")
        if delta.get("tool_calls") or delta.get("thought_ends"):
            yield from self.release()
            self._text, self._shown = "", 0
            self._is_answer = bool(delta.get("tool_calls"))
            yield delta
            return
        rest = delta.copy()
        self._text += rest.pop("content", "")
        if text := self.take_text():
            rest["content"] = text
        if rest:
            yield rest

    def take_text(self) -> str:
        """Return the new text outside of a call."""
        line = self._text.rfind("\n", 0, self._shown) + 1
        start = find_start(self._text, line)
        if start is None:
            found = OPEN_START.search(self._text, line)
            end = found.start() if found else len(self._text)
            self._is_answer = len(self._text) > 2 * MAX_BEFORE
        elif self.may_be_call(start):
            end = start
        else:
            self._is_answer, end = True, len(self._text)
        text, self._shown = self._text[self._shown : end], max(self._shown, end)
        return text

    def may_be_call(self, start: int) -> bool:
        """Return whether the text from `start` on may be a call."""
        held = self._text[start : start + self.HEAD]
        if is_explanation(self._text[:start]) or ("\n" in held and OTHER_FENCE.match(held) and not FENCE.match(held)):
            return False
        is_named = len(held) < self.HEAD or any(name in held for name in self._tools)
        return is_named and len(self._text) <= MAX_TEXT

    def release(self) -> Iterator[Delta]:
        """Yield the held text."""
        if text := self._text[self._shown :]:
            yield {"content": text}
        self._shown = len(self._text)

    def finish(self) -> Iterator[Delta]:
        """Yield the calls that the reply is, or the text that was held."""
        found = None if self._is_answer or self._cut else find_printed_calls(self._text, self._tools)
        if found is None or found.fault:
            yield from self.release()
            return
        calls = [
            {"index": at, "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
            for at, (name, arguments) in enumerate(found.calls)
        ]
        yield {"tool_calls": calls, "printed": self._text}
