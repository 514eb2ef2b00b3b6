"""Questions to the user: a list to choose from, or a line to write. Pure."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

Effects: TypeAlias = list[Any]


def ignore(now: float) -> Effects:
    """Do nothing."""
    return []


class Row(Struct, frozen=True):
    """A row to choose."""

    label: str
    detail: str = ""
    value: Any = None
    current: bool = False
    """True if it is the value that holds now."""
    letter: str = ""
    """The letter, or digit, that chooses it in a question."""


class ListDialog(Struct):
    """A list with one row to choose, by arrows or its number."""

    title: str
    rows: Sequence[Row]
    choose: Callable[[Row, float], Effects]
    """Called with the row and the time."""
    dismiss: Callable[[float], Effects]
    about: Sequence[str] = ()
    """Lines to read before the choice."""
    searchable: bool = False
    """True if typed letters choose among the rows."""
    search: str = ""
    selected: int = 0
    marked: set[int] | None = None
    """The numbers of the chosen rows, if several can be chosen; None for one choice."""

    @property
    def found(self) -> list[Row]:
        """The rows that fit the search."""
        words = self.search.lower().split()
        return [row for row in self.rows if all(word in f"{row.label} {row.detail}".lower() for word in words)]

    def move(self, delta: int) -> None:
        """Mark another row."""
        if count := len(self.found):
            self.selected = (self.selected + delta) % count

    def find_letter(self, letter: str) -> int:
        """Return the number of the row with this letter, counted from 1; 0 if there is none."""
        return next((n for n, row in enumerate(self.rows, 1) if row.letter == letter.lower()), 0)

    def find(self, number: int | None) -> Row | None:
        """Return the row with this number, counted from 1, or the marked one; None if there is none."""
        rows, at = self.found, self.selected if number is None else number - 1
        return rows[at] if 0 <= at < len(rows) else None


class TextDialog(Struct):
    """A line that the user writes in the editor."""

    label: str
    text: str
    submit: Callable[[str, float], Effects]
    """Called with the text and the time."""
    back: Struct | None = None
    """The question to return to."""
    dismiss: Callable[[float], Effects] = ignore
    about: Sequence[str] = ()


Dialog: TypeAlias = ListDialog | TextDialog
