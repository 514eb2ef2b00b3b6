"""Tell the keys that answer a question from those that were meant for the prompt. Pure: times are arguments."""

from msgspec import Struct

PAUSE = 0.5
"""Seconds without a key, since a question appeared and since the key before, after which a key may answer it."""
ALONE = 0.35
"""Seconds without another key after which a letter answers: more than there are between the letters of a word."""


class TypingPause(Struct):
    """The user's keys, and the time at which a question appeared.

    A letter answers a question if it is typed alone: after a pause, and with no other key right after it. Every letter
    goes to the prompt first, so that none is lost; one that has answered is taken out again. The letter of the second
    step needs no pause after the one that opened it.
    """

    shown: float = 0.0
    """The time at which the question, or its second step, appeared."""
    last: float = -PAUSE
    """The time of the last key."""
    before: float = -PAUSE
    """The time of the key before it."""
    letters: str = ""
    """The letters that answer unless another key follows: that of the last key, or those of the last two."""
    followed: str = ""
    """The letters that the last key followed before they could answer."""

    def begin(self, now: float) -> None:
        """A question, or its second step, has appeared."""
        self.shown, self.letters, self.followed = now, "", ""

    def note_key(self, now: float) -> None:
        """A key was pressed; what it does comes after."""
        self.before, self.last = self.last, now
        self.followed, self.letters = self.letters, ""

    def forget_key(self) -> None:
        """The last key has moved within the question: after a pause, that is not typing."""
        if self.came_before():
            self.last = self.before

    def came_before(self) -> bool:
        """True if there was a pause before the last key."""
        return self.last - max(self.before, self.shown) >= PAUSE

    def is_typing(self) -> bool:
        """True if a key came since the question, or its second step, appeared."""
        return self.last > self.shown

    def is_first(self) -> bool:
        """True if no key came between the question, or its second step, and the last key."""
        return self.before <= self.shown

    def get_rest(self, now: float) -> float:
        """Return how many seconds are missing to a pause that lasts until now; 0 if there is one."""
        return max(0.0, max(self.last, self.shown) + PAUSE - now)

    def take_letters(self, now: float) -> str:
        """Take the letters that were typed alone; empty if there are none."""
        if not self.letters or now - self.last < ALONE - 0.001:
            return ""
        letters, self.letters = self.letters, ""
        return letters
