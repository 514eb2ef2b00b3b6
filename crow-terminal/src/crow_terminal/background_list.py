"""The background: what runs there, as it is shown, and the command /background. Pure."""

from collections.abc import Sequence
from typing import Any

from crow_terminal.blocks import Note
from crow_terminal.effects import CallBackground, Effect, Show
from crow_terminal.printable_text import escape_line
from crow_terminal.state import State

LINE_COLUMNS = 200
"""Characters of a line about one thing that runs."""


def show_background(state: State, works: Sequence[dict[str, Any]]) -> list[Effect]:
    """Show what is in the background, with the last line of each."""
    if not works:
        return state.remark("Nothing is in the background.")
    return [Show(Note(describe_work(work))) for work in works]


def describe_work(work: dict[str, Any]) -> str:
    """Describe one thing in the background: its name, its title, how it is, and its last line."""
    name, title, end, line = (str(work.get(key, "")) for key in ("name", "title", "end", "lastLine"))
    about = ": ".join(filter(None, (name, title)))
    return escape_line(f"{about} ({end or 'running'}){f': {line}' if line else ''}")[:LINE_COLUMNS]


def call_background(state: State, words: str) -> list[Effect]:
    """Run the command /background, as far as it needs no turn."""
    first, _, rest = words.strip().partition(" ")
    rest = rest.strip()
    if first == "stop" and rest:
        return [CallBackground("stop", rest)]
    return [CallBackground("tell", first, rest) if rest else CallBackground("list")]
