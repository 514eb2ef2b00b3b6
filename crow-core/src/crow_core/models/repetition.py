"""Find the replies of small models that only repeat themselves, so that they do not go on to the limit of tokens."""

from crow_core.messages.message import Delta

MAX_REPEATED = 2_000
"""Characters of text that may repeat the same piece."""
MAX_PERIOD = 200
"""Characters of the longest piece whose repetitions are recognised."""
MAX_BLANK = 500
"""Characters of white space that a text may end in."""


def is_endless(text: str) -> bool:
    """Return whether the end of a text only repeats itself."""
    if len(text) >= MAX_BLANK and text[-MAX_BLANK:].isspace():
        return True
    tail = text[-MAX_REPEATED:]
    return len(tail) == MAX_REPEATED and any(tail[n:] == tail[:-n] for n in range(1, MAX_PERIOD + 1))


class RepetitionGuard:
    """Reads the deltas of a reply, and knows the end of its text."""

    def __init__(self) -> None:
        self._tail = ""
        self._new = 0
        """Characters since `is_endless` was asked."""

    def feed(self, delta: Delta) -> bool:
        """Read the next delta; return whether the text, or the reasoning, only repeats itself by now."""
        text = delta.get("reasoning_content", "") + delta.get("content", "")
        self._tail = (self._tail + text)[-MAX_REPEATED:]
        self._new += len(text)
        if self._new < MAX_BLANK // 2:
            return False
        self._new = 0
        return is_endless(self._tail)
