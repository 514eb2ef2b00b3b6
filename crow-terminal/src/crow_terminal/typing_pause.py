"""Tell the keys that answer a question from those that were meant for the prompt. Pure: times are arguments."""

from msgspec import Struct

PAUSE = 0.5
"""Seconds without a key, since a question appeared and since the key before, after which a key may answer it."""
ALONE = 0.35
"""Seconds without another key after which a letter answers: more than there are between the letters of a word."""


class TypingPause(Struct):
    """The keys of the user beside the time at which a question appeared.

    A letter answers a question if it is typed alone: after a pause, and with no other key right after it. Every letter
    goes to the prompt first, so that none is lost; one that has answered is taken out again.
    """

    shown: float = 0.0
    """The time at which the question, or its second step, appeared."""
    last: float = -PAUSE
    """The time of the last key."""
    before: float = -PAUSE
    """The time of the key before it."""
    letter: str = ""
    """The letter of the last key, if it answers unless another key follows."""
    followed: str = ""
    """The letter of the key before, if the last one came before it could answer."""

    def begin(self, now: float) -> None:
        """A question, or its second step, has appeared."""
        self.shown, self.letter, self.followed = now, "", ""

    def note_key(self, now: float) -> None:
        """A key was pressed; what it does comes after."""
        self.before, self.last = self.last, now
        self.followed, self.letter = self.letter, ""

    def forget_key(self) -> None:
        """The last key has moved within the question: after a pause, that is not typing."""
        if self.came_before():
            self.last = self.before

    def came_before(self) -> bool:
        """True if there was a pause before the last key."""
        return self.last - max(self.before, self.shown) >= PAUSE

    def get_rest(self, now: float) -> float:
        """Return how many seconds are missing to a pause that lasts until now; 0 if there is one."""
        return max(0.0, max(self.last, self.shown) + PAUSE - now)

    def take_letter(self, now: float) -> str:
        """Take the letter that was typed alone; empty if there is none."""
        if not self.letter or now - self.last < ALONE - 0.001:
            return ""
        letter, self.letter = self.letter, ""
        return letter
