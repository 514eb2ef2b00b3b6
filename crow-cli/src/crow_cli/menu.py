"""Ask the user to choose, on a terminal: by arrow keys and numbers, or by a line of text where keys cannot be read."""

import os
import sys
from collections.abc import Sequence
from typing import TypeVar

import click

from crow_cli.console import escape_line, print_note

T = TypeVar("T")

MAX_MENU = 20
"""The most entries of a menu; for more, the user types, with completion."""


def has_terminal() -> bool:
    """Test whether the user can be asked: standard input and standard output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def confirm(question: str, *, err: bool = False) -> bool:
    """Ask a yes-or-no question. Print what to do if the input has no answer, as nobody sits there."""
    try:
        return click.confirm(question, err=err)
    except click.Abort:
        if sys.stdin.isatty():
            raise
    click.echo(err=True)
    print_note("Nobody answered, and nothing was changed. To do this without a question: --yes")
    return False


def can_draw() -> bool:
    """Test whether the terminal can move its cursor, by its type in TERM."""
    return os.environ.get("TERM", "dumb") not in ("", "dumb")


def choose(question: str, options: Sequence[tuple[T, str]]) -> T:
    """Let the user choose one of these values by their labels, the first by default. Raises KeyboardInterrupt."""
    labels = [escape_line(label) for _, label in options]
    if can_draw():
        from prompt_toolkit.shortcuts import choice  # imported here because no other command needs it

        picked = choice(f"{question} (arrows or numbers, then Enter)", options=[*enumerate(labels)], default=0)
        return options[picked][0]
    for number, label in enumerate(labels, 1):
        click.echo(f"{number:>3}. {label}")
    return options[click.prompt(question, type=click.IntRange(1, len(options)), default=1) - 1][0]


def choose_text(question: str, known: Sequence[str]) -> str:
    """Let the user choose one of these texts, or type another one. Raises KeyboardInterrupt."""
    known = [escape_line(each) for each in known]
    if not known:
        return ask_text(question)
    if len(known) <= MAX_MENU:
        other = "another one …"
        picked = choose(question, [*((each, each) for each in known), ("", other)])
        return picked or ask_text(question)
    click.echo(f"{len(known)} models, such as {', '.join(known[:5])}.")
    if not can_draw():
        return ask_text(question)
    from prompt_toolkit import PromptSession  # see `choose`
    from prompt_toolkit.completion import FuzzyWordCompleter, WordCompleter

    completer = FuzzyWordCompleter([*known]) if len(known) <= 2000 else WordCompleter([*known], sentence=True)
    session: PromptSession[str] = PromptSession(completer=completer, complete_while_typing=True)
    while not (typed := session.prompt(f"{question} (type a part of its name): ").strip()):
        pass
    return typed


def ask_text(question: str) -> str:
    """Let the user type a line that is not empty. Raises click.Abort."""
    while not (typed := str(click.prompt(question, default="", show_default=False)).strip()):
        click.echo("Nothing was typed. Type an answer, or Ctrl-C leaves.")
    return typed
