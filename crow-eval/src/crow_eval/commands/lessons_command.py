"""`crow lessons`: what went wrong in stored sessions, and lines of instructions that could prevent it."""

import asyncio
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from crow_cli.console import (
    AS_JSON,
    escape_line,
    indent,
    limit_option,
    print_diff,
    print_json,
    print_note,
    print_table,
    shorten_path,
)
from crow_cli.process import fail
from crow_core.text import escape_controls
from crow_system.shortening import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crow_eval.lessons.call_signals import Signal
    from crow_eval.lessons.lessons import Lesson
    from crow_eval.lessons.session_signals import SaidMessage

AGE = re.compile(r"(\d{1,4})([hdw])")
HOURS = {"h": 1, "d": 24, "w": 24 * 7}
NAMES = {
    "correction": "you corrected it",
    "rejection": "you rejected a call",
    "undone": "you undid a turn",
    "failure": "the same failure",
    "detour": "a detour",
    "loop": "a loop",
    "refused": "refused arguments",
    "cut": "output read twice",
}
"""The words for each kind of lesson in lists and reports."""


@click.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option(
    "--since", metavar="AGE", default="30d", show_default=True, help="Read sessions used since: 12h, 30d, 8w."
)
@click.option("--all", "everywhere", is_flag=True, help="Read the sessions of all folders.")
@click.option("-m", "--model", default="", help="Also let a model read what you said.")
@click.option("--apply", is_flag=True, help="Show each line as a diff of its file, and ask whether to add it.")
@limit_option(20)
@AS_JSON
def lessons(ids: tuple[str, ...], everywhere: bool, apply: bool, as_json: bool, **options: Any) -> None:
    """List what went wrong in the sessions of this folder, and lines for AGENTS.md that could prevent it.

    It finds your corrections, rejected calls with a reason, undone turns, failures that repeat, detours, loops,
    refused arguments, and cut output that was read twice. Give the beginnings of IDs to see the evidence.
    Imported sessions count, too. With --model, a model reads the last 200 messages that followed an answer, finds
    further corrections, and proposes lines; its quotes are checked.
    """
    cwd = "" if everywhere else os.getcwd()
    found, count = read_lessons(cwd, as_json=as_json, **options)
    found = select(found, ids)
    if as_json:
        print_json([asdict(lesson) for lesson in found])
    elif not found:
        where = "" if everywhere else " of this folder; --all reads others"
        print_note(f"No lessons in {count:,} sessions{where}.")
    elif apply:
        apply_lessons(found)
    elif ids:
        for lesson in found:
            print_lesson(lesson)
    else:
        rows = [
            (one.id, str(one.times), str(one.sessions), NAMES[one.kind], one.line or f"“{one.evidence[0].quote}”")
            for one in found
        ]
        print_table(("ID", "TIMES", "SESSIONS", "WHAT", "LINE"), rows)
        print_note("crow lessons ID shows the evidence, crow lessons ID --apply adds the line after a question.")


def to_time(age: str) -> int:
    """Convert an age such as 30d to milliseconds since 1970."""
    if (match := AGE.fullmatch(age)) is None:
        fail(f"--since: {age!r} is no age. Give a number with h, d or w, such as 30d.")
    return int((time.time() - int(match[1]) * HOURS[match[2]] * 3600) * 1000)


def read_lessons(cwd: str, *, since: str, model: str, limit: int, as_json: bool) -> "tuple[list[Lesson], int]":
    """Read the lessons from the database, and perhaps by a model; on an error, print it and exit."""
    from crow_agent.settings.home import Home
    from crow_cli.shared_session import find_known_secrets
    from crow_cli.storage import connect

    from crow_eval.lessons.lessons import add_model_signals, make_lessons, read_sessions

    secrets = find_known_secrets(os.environ)
    with connect(lists=True, as_json=as_json) as connection:
        reading = read_sessions(connection, to_time(since), cwd, secrets, for_model=bool(model))
    signals = reading.signals
    if model and reading.said:
        signals = add_model_signals(signals, ask_model(model, reading.said))
    with connect() as connection:
        return make_lessons(connection, signals, Home.find(os.environ).config, secrets, limit), reading.sessions


def ask_model(model: str, said: "Sequence[SaidMessage]") -> "list[Signal]":
    """Return the corrections that a model finds; none, with a note, if its answers cannot be used."""
    from crow_agent.errors import AgentError

    from crow_eval.lessons.model_reading import read_with_model

    try:
        reading = asyncio.run(read_with_model(model, said))
    except KeyboardInterrupt:
        sys.exit(130)
    except AgentError as error:
        fail(escape_controls(str(error)))
    for error in reading.errors[:1]:
        print_note(f"{len(reading.errors)} of the model's answers cannot be used: {error}")
    if reading.invented:
        print_note(f"Left out: {reading.invented} answers of the model whose quote is in no message.")
    if not reading.is_usable:
        print_note(
            f"The model took {reading.agreed} of {reading.controls} first prompts for corrections, which none can be. "
            "It is no better than chance, so its answers are left out."
        )
        return []
    return reading.signals


def select(found: "Sequence[Lesson]", ids: tuple[str, ...]) -> "list[Lesson]":
    """Return the lessons whose ids begin with these; all if there are none."""
    for id in ids:
        if not any(lesson.id.startswith(id) for lesson in found):
            fail(f"There is no lesson {id!r}. `crow lessons` lists them; --all, --since and --limit show more.")
    return [lesson for lesson in found if not ids or lesson.id.startswith(ids)]


def print_lesson(lesson: "Lesson") -> None:
    """Print a lesson with its evidence."""
    times = f"{lesson.times:,} times in {format_count(lesson.sessions, 'session')}"
    click.secho(escape_line(f"{lesson.id}  {NAMES[lesson.kind]}, {times}"), bold=True)
    for one in lesson.evidence:
        click.secho(indent(f"session {one.session[:8]}, message {one.entry[:8]}"), dim=True)
        click.echo(indent(f"“{one.quote}”"))
    if lesson.line:
        click.echo(escape_line(f"Line for {shorten_path(lesson.file, 60)}: {lesson.line}"))
    else:
        click.echo("No line follows from it.")


def apply_lessons(found: "Sequence[Lesson]") -> None:
    """Show the line of each lesson as a diff of its file, and add those to which the user says yes."""
    from crow_eval.lessons.instruction_files import add_line, make_diff, read_instructions

    if not sys.stdin.isatty():
        fail("--apply asks about each line, so it needs a terminal.")
    for lesson in found:
        file = Path(lesson.file)
        if not lesson.line:
            continue
        if not file.parent.is_dir():
            print_note(f"{lesson.id}: the folder {file.parent} does not exist here.")
            continue
        try:
            before = read_instructions(file)
            after = add_line(before, lesson.line)
            print_lesson(lesson)
            print_diff(make_diff(file, before, after))
            if click.confirm(escape_controls(f"Add the line to {file}?")):
                file.write_bytes(after.encode())
        except (OSError, UnicodeDecodeError) as error:
            fail(f"{file} cannot be changed: {error}.")
