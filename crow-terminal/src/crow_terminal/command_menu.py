"""The commands in the menu after `/`: in groups, the best matches of the typed text first. Pure."""

import re
from collections.abc import Sequence

from msgspec import Struct

from crow_terminal.dialogs import Row
from crow_terminal.local_commands import find_agent_commands, find_local_commands
from crow_terminal.pickers import list_choices
from crow_terminal.state import State

RECENT = 3
"""Commands that were used last, which come first while nothing is typed."""
GROUP_END = " · "
"""Stands between the group of a command and its description, and is left out with the group where there is no room."""
CHOICES = {"model": "model", "thinking": "thought_level", "mode": "mode"}
"""The category of the option whose values a command takes."""


class OfferedCommand(Struct, frozen=True):
    """A command of the terminal or of the agent."""

    name: str
    description: str
    hint: str = ""
    group: str = ""
    words: str = ""
    """Other words by which a person may look for it."""


def list_commands(state: State) -> list[OfferedCommand]:
    """Return all commands, those of the terminal first, in the order of their groups."""
    ours = [
        OfferedCommand(one.name, capitalize(one.description), one.hint, one.group, one.words)
        for one in find_local_commands(state)
    ]
    name = state.abilities.name or state.agent
    theirs = [
        OfferedCommand(one.name, one.description, one.input.hint if one.input else "", name)
        for one in find_agent_commands(state)
    ]
    return [*ours, *sorted(theirs, key=lambda one: one.name)]


def capitalize(text: str) -> str:
    """Return a text with a capital at its beginning, as the descriptions of the agent have."""
    return text[:1].upper() + text[1:]


def rank_commands(state: State, typed: str, past: Sequence[str]) -> list[OfferedCommand]:
    """Return the commands that match the typed text: by name, then by description; each those used last first.

    If nothing is typed, the commands stay in their groups, after the RECENT ones.
    """
    used = {text[1:].split(" ")[0]: at for at, text in enumerate(past) if text.startswith("/")}
    commands = list_commands(state)
    if not typed:
        recent = sorted((one for one in commands if one.name in used), key=lambda one: -used[one.name])[:RECENT]
        return [*recent, *(one for one in commands if one not in recent)]
    ranked: list[tuple[int, int, str, OfferedCommand]] = []
    for one in commands:
        rank = rank_name(one, typed.lower())
        if rank is not None:
            ranked.append((rank, -used.get(one.name, -1), one.name, one))
    return [one for *_, one in sorted(ranked, key=lambda each: each[:3])]


def rank_name(command: OfferedCommand, typed: str) -> int | None:
    """Return the rank of a command for the typed text: 0 for best, None if it does not match."""
    about = f"{command.words} {command.description}".lower()
    if command.name.startswith(typed):
        return 0
    if typed in command.name:
        return 1
    return 2 if len(typed) > 1 and re.search(rf"\b{re.escape(typed)}", about) else None


def list_values(state: State, command: OfferedCommand) -> list[Row]:
    """Return the values that a command takes: those of an option, or the words of a hint such as `on|off`."""
    if category := CHOICES.get(command.name):
        return list_choices(state, category)
    if re.fullmatch(r"\[?[\w-]+(\|[\w-]+)+\]?", command.hint):
        return [Row(word, "", word) for word in command.hint.strip("[]").split("|")]
    return []
