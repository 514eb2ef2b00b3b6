"""Lists from which the user chooses a mode, an option, a session, or a prompt to go back to."""

from collections.abc import Sequence
from datetime import datetime

from crow_core.acp.schema import BooleanConfigOption, SelectConfigOption, SessionInfo
from crow_system.shortening import format_count

from crow_terminal.dialogs import ListDialog, Row
from crow_terminal.effects import Edit, Effect, ListTurns, Open, SetOption, TakeBack
from crow_terminal.printable_text import clip, escape_line
from crow_terminal.session_options import make_option_rows
from crow_terminal.state import State
from crow_terminal.told_outputs import split_outputs

PROMPT_COLUMNS = 40
"""Columns of a prompt in a question about it."""


def pick_mode(state: State, words: str = "") -> list[Effect]:
    """Set the mode that is named, or let the user choose one."""
    if not state.options.modes:
        return pick_option(state, "mode", words)
    return pick_named(state, "Mode", list_choices(state, "mode"), "", words)


def pick_option(state: State, category: str, words: str = "") -> list[Effect]:
    """Set the value of an option that is named, or let the user choose one."""
    option = state.options.find(category)
    if option is None:
        return state.remark(f"This agent offers no choice of {category.replace('_', ' ')}.")
    return pick_named(state, option.name, make_option_rows(option), option.id, words)


def pick_value(state: State, option: SelectConfigOption) -> list[Effect]:
    return pick_named(state, option.name, make_option_rows(option), option.id, "")


def pick_named(state: State, title: str, rows: Sequence[Row], id: str, words: str) -> list[Effect]:
    """Set an option to the row that is named, or let the user choose a row."""
    wanted = words.strip().lower()
    exact = [row for row in rows if wanted and wanted in (row.label.lower(), str(row.value).lower())]
    if exact:
        return [SetOption(id, exact[0].value)]
    effects = state.pick(title, rows, lambda row, _: [SetOption(id, row.value)])
    if wanted and isinstance(state.dialog, ListDialog) and any(wanted in row.label.lower() for row in rows):
        state.dialog.search, state.dialog.selected = wanted, 0
    return effects


def list_choices(state: State, category: str) -> list[Row]:
    """Return the values of an option of this category, also of modes that are not an option."""
    if category == "mode" and (modes := state.options.modes):
        return [
            Row(one.name, one.description or "", one.id, current=one.id == modes.current_mode_id)
            for one in modes.available_modes
        ]
    option = state.options.find(category)
    return make_option_rows(option) if option else []


def pick_any_option(state: State) -> list[Effect]:
    """Let the user choose an option, then its value."""

    def choose(row: Row, now: float) -> list[Effect]:
        option = row.value
        if isinstance(option, BooleanConfigOption):
            return [SetOption(option.id, not option.current_value)]
        return pick_value(state, option)

    rows = [
        Row(one.name, f"{one.current_value}", one)
        for one in state.options.config
        if isinstance(one, SelectConfigOption | BooleanConfigOption)
    ]
    return state.pick("Settings of this session", rows, choose) if rows else state.remark("There are no settings.")


def pick_session(state: State, sessions: Sequence[SessionInfo], now: datetime) -> list[Effect]:
    """Let the user choose one of the stored sessions."""
    rows = [
        Row(str(one.title or one.session_id), describe_age(str(one.updated_at or ""), now), one.session_id)
        for one in sessions
    ]
    if not rows:
        return state.remark("There are no other sessions in this folder.")
    return state.pick("Sessions", rows, lambda row, _: [Open(row.value)])


def describe_age(time: str, now: datetime) -> str:
    """Describe when something was: `2 hours ago`, `yesterday 14:05`. `time` is ISO 8601, `now` has a zone.

    >>> describe_age("2026-03-04T10:00:00Z", datetime.fromisoformat("2026-03-04T12:01:00+00:00"))
    '2 hours ago'
    """
    try:
        then = datetime.fromisoformat(time).astimezone(now.tzinfo)
    except ValueError:
        return time
    minutes = int((now - then).total_seconds() // 60)
    days = (now.date() - then.date()).days
    if minutes < 1:
        return "just now"
    if minutes < 60:
        return f"{format_count(minutes, 'minute')} ago"
    if days == 0:
        return f"{format_count(minutes // 60, 'hour')} ago"
    if days == 1:
        return f"yesterday {then:%H:%M}"
    return f"{then:%A %H:%M}" if days < 7 else f"{then:%Y-%m-%d}"


def pick_prompt(state: State, prompts: Sequence[str]) -> list[Effect]:
    """Let the user choose one of the earlier prompts, the last first, to edit it."""
    if not prompts:
        return state.remark("There are no earlier prompts.")
    rows = [Row(escape_line(text)[:200], "", text) for text in dict.fromkeys(reversed(prompts))]
    return state.pick("Earlier prompts", rows, lambda row, _: [Edit(row.value)])


def pick_turn(state: State, *, last: bool = False) -> list[Effect]:
    """Let the user choose the prompt to go back to, or take the last one."""
    if not state.abilities.undoes:
        return state.remark("This agent cannot go back to an earlier message.")
    return [ListTurns(last)] if state.phase == "ready" else state.remark("Stop the turn first: Esc.")


def offer_turns(state: State, prompts: Sequence[str]) -> list[Effect]:
    """Let the user choose one of these prompts, the newest first."""
    if not prompts:
        return state.remark("There is no earlier message.")
    state.turns = [split_outputs(text)[1] for text in prompts]
    rows = [Row(escape_line(text)[:200], f"{n} back", n) for n, text in enumerate(state.turns, 1)]
    return state.pick("Go back to before which message?", rows, lambda row, _: [TakeBack(row.value)])


def undo_turn(state: State, prompts: Sequence[str]) -> list[Effect]:
    """Take back the turn of the first of these prompts, after a question."""
    if not prompts:
        return state.remark("There is no turn to take back.")
    state.turns = [split_outputs(text)[1] for text in prompts]
    return [TakeBack(1)]


def confirm_taking_back(state: State, turns: int, about: Sequence[str], *, keep: bool = False) -> list[Effect]:
    """Ask whether to take back the turns, after the agent has said what that changes; `keep` is that of `TakeBack`."""

    def choose(row: Row, now: float) -> list[Effect]:
        return [TakeBack(turns, confirmed=True, keep=keep)] if row.value else []

    prompt = clip(escape_line(state.turns[turns - 1]), PROMPT_COLUMNS) if turns <= len(state.turns) else "…"
    what = f"“{prompt}”" if turns == 1 else f"{turns} messages, from “{prompt}”"
    rows = [Row("Take back the rest" if keep else "Yes", "", True, letter="y"), Row("No", "", False, letter="n")]
    return state.pick(f"Take back {what}?", rows, choose, about)
