"""Join the deltas of a streamed reply to a message."""

import re
from collections.abc import Sequence
from io import StringIO
from typing import Any

import msgspec

from crow_core.messages.message import Delta, Function, Message, RawToolCall, parse_arguments

BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
STRING_MARK = re.compile(r'["\\]')
"""Matches what ends a JSON string, or escapes a character of it."""


class ReplyBuilder:
    """Joins the deltas of a reply to a message, at a cost that grows with their length only."""

    def __init__(self) -> None:
        self.length = 0
        """The number of characters of text, reasoning and arguments so far."""
        self.calls: list[PartialCall] = []
        self._reasoning, self._content = StringIO(), StringIO()
        self._thought_ended = False
        self._printed = ""
        self._taken = [0, 0]
        """The lengths of reasoning and content that `take_part` has returned."""
        self._parts = 0

    def add(self, delta: Delta) -> None:
        """Add the next delta."""
        if delta.get("thought_ends"):
            self._reasoning.write(self._content.getvalue())
            self._content = StringIO()
            self._thought_ended, self._taken, self._parts = True, [0, 0], 0
        if text := delta.get("reasoning_content"):
            self.length += self._reasoning.write(text)
        if text := delta.get("content"):
            self.length += self._content.write(text)
        self._printed = delta.get("printed", self._printed)
        for fragment in delta.get("tool_calls") or ():
            at = find_call(self.calls, fragment)
            if at is None:
                at = len(self.calls)
                self.calls.append(PartialCall(fragment.get("index")))
            self.length += self.calls[at].add(fragment)

    def build(self) -> Message:
        """Return the message so far. `crow.indexes` holds the index of each tool call until `settle`."""
        reply = Message(role="assistant")
        if (reasoning := self._reasoning.getvalue()) or self._thought_ended:
            reply["reasoning_content"] = reasoning
        if content := self._content.getvalue():
            reply["content"] = content
        if self.calls:
            reply["tool_calls"] = [call.build() for call in self.calls]
            reply["crow"] = {"indexes": [call.index for call in self.calls]}
        if self._printed:
            reply["crow"] = {**reply.get("crow", {}), "printed": self._printed}
        return reply

    def take_part(self) -> Message:
        """Return the text that was added since the last call.

        `crow.part` numbers the parts of a reply: part 0 replaces all earlier ones, each other one continues the last.
        """
        part = Message(role="assistant", crow={"part": self._parts})
        reasoning, content = (
            read_from(*pair) for pair in zip((self._reasoning, self._content), self._taken, strict=True)
        )
        if reasoning:
            part["reasoning_content"] = reasoning
        if content:
            part["content"] = content
        self._taken = [self._taken[0] + len(reasoning), self._taken[1] + len(content)]
        self._parts += 1
        return part


def read_from(text: StringIO, start: int) -> str:
    """Return the text from a character on; later writes follow its end."""
    text.seek(start)
    return text.read()


class PartialCall:
    """A tool call whose fragments are arriving."""

    def __init__(self, index: Any) -> None:
        self.index = index
        """The index that its first fragment had; None if it had none."""
        self.id = ""
        self.length = 0
        """The number of characters of the arguments so far."""
        self._name, self._arguments = StringIO(), StringIO()
        self._end = ObjectEnd()
        self._scanned = 0
        self._is_valid: bool | None = None
        """True if the complete arguments are valid; None as long as that was not tested."""

    def add(self, fragment: dict[str, Any]) -> int:
        """Add a fragment; return the number of characters that it added."""
        function: dict[str, Any] = fragment.get("function") or {}
        added = 0
        self.id = self.id or str(fragment.get("id") or "")
        if name := function.get("name"):
            size = self._name.tell()
            if name != (self._name.getvalue() if isinstance(name, str) and len(name) == size else ""):
                added += self._name.write(str(name))
        if (arguments := function.get("arguments")) is not None:
            text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
            self.length += self._arguments.write(text)
            added += len(text)
        return added

    @property
    def has_name(self) -> bool:
        return self._name.tell() > 0

    def is_complete(self) -> bool:
        """Test whether the name and all arguments have arrived. The arguments are parsed once, at their end."""
        new, self._scanned = read_from(self._arguments, self._scanned), self.length
        self._end.feed(new)
        if self._is_valid is None and self._end.is_reached:
            self._is_valid = parse_arguments(self.build()) is not None
        return self.has_name and bool(self._is_valid) and not self._end.is_passed

    def build(self) -> RawToolCall:
        """Return the call so far."""
        function = Function(name=self._name.getvalue(), arguments=self._arguments.getvalue())
        return {"id": self.id, "type": "function", "function": function}


class ObjectEnd:
    """Finds the end of a JSON object in text that arrives in pieces, without parsing it again for each piece."""

    def __init__(self) -> None:
        self.is_reached = False
        """True if every bracket and every string is closed; the text may still be invalid JSON."""
        self.is_passed = False
        """True if anything but white space follows the end."""
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> None:
        """Read the next piece."""
        at = 0
        while at < len(text) and not self.is_passed:
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            if self.is_reached:
                self.is_passed = bool(text[at:].strip())
                return
            found = (STRING_MARK if self._in_string else BRACKET_OR_QUOTE).search(text, at)
            if found is None:
                return
            at = found.end()
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._is_escaped = True
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    self.is_reached = self._depth <= 0


def find_call(calls: Sequence[PartialCall], fragment: dict[str, Any]) -> int | None:
    """Find the tool call that a fragment continues; None if it starts a new one.

    A known id decides; else a new id starts a call; else the index decides; else the fragment continues the last call.
    But a name after complete arguments starts a new call: some servers send parallel calls with one id, with one index,
    with both, or with none.
    """
    id, index = str(fragment.get("id") or ""), fragment.get("index")
    function: dict[str, Any] = fragment.get("function") or {}
    name = function.get("name")
    latest_first = range(len(calls))[::-1]
    repeats = False
    if id:
        at = next((at for at in latest_first if calls[at].id == id), None)
        if at is None:  # a new call, or the id of a call that had none so far
            without = (at for at in latest_first if not calls[at].id and calls[at].index == index)
            return next((at for at in without if not (name and calls[at].has_name)), None)
        repeats = index is None or index == calls[at].index
    elif index is not None:
        at = next((at for at in latest_first if calls[at].index == index), None)
    else:
        at = len(calls) - 1 if calls else None
    begins = not repeats or str(function.get("arguments") or "{").lstrip()[:1] in ("", "{")
    return None if at is not None and name and begins and calls[at].is_complete() else at
