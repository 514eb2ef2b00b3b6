"""Print text, tables and JSON on a terminal that texts of models, tools and files cannot control."""

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from unicodedata import combining, east_asian_width

import click
from crow_core.text import CONTROL_CHARACTERS, escape_controls

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

NUMBER = re.compile(r"[-–]|[\d.,/]+(-[\d.,]+)?( (%|m?s|min))?")
"""A number in a table, a fraction or an interval, perhaps with its unit."""
MAX_OUTPUT_LINES = 12
"""Lines of a tool's output that are printed."""

CONTROL = {code: None for code in CONTROL_CHARACTERS if chr(code) not in "\n\t"}
"""A table for `str.translate` that removes characters that control a terminal or change the direction of text."""


def limit_option(default: int) -> Any:
    """Return the option `--limit`."""
    return click.option(
        "--limit", type=click.IntRange(min=1), default=default, show_default=True, help="The most entries to show."
    )


def print_json(value: Any) -> None:
    """Print a value as JSON, in ASCII only, so that it cannot control a terminal."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows in columns; cut lines that are wider than the terminal, if there is one."""
    lines = [list(heads), *([escape_line(cell) for cell in row] for row in rows)]
    columns = [pad_column(column) for column in zip(*lines, strict=True)]
    width = shutil.get_terminal_size().columns if is_terminal() or "COLUMNS" in os.environ else sys.maxsize
    for at, line in enumerate(zip(*columns, strict=True)):
        click.secho(shorten("  ".join(line).rstrip(), width), dim=at == 0)


def pad_column(column: Sequence[str]) -> list[str]:
    """Pad cells to one width: align columns of numbers right, other columns left."""
    are_numbers = all(NUMBER.fullmatch(cell) for cell in column[1:])
    widest = max(map(display_width, column))
    gaps = (" " * (widest - display_width(cell)) for cell in column)
    return [gap + cell if are_numbers else cell + gap for cell, gap in zip(column, gaps, strict=True)]


def escape_line(text: str) -> str:
    """Escape control characters and join all lines to one."""
    return " ".join(escape_controls(text).split())


def display_width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def shorten(text: str, columns: int) -> str:
    """Cut a text to at most `columns` columns, ending it with `…`."""
    if display_width(text) <= columns:
        return text
    text = text[:columns]
    while display_width(text) >= columns:
        text = text[:-1]
    return f"{text.rstrip()}…"


def shorten_path(path: str, columns: int) -> str:
    """Write a path with `~` for the home folder; if it is longer than `columns`, keep its end after `…`."""
    user = os.path.expanduser("~")
    path = f"~{path[len(user) :]}" if path == user or path.startswith(f"{user}/") else path
    return path if len(path) <= columns else f"…{path[1 - columns :]}"


def print_diff(diff: str) -> None:
    for line in diff.splitlines():
        colour = {"+": "green", "-": "red"}.get(line[:1])
        click.secho(indent(line), fg=colour, dim=colour is None)


def indent(text: str) -> str:
    """Indent text of others and escape its control characters, so that it cannot be mistaken for crow's own output."""
    return "\n".join(f"  {line}".rstrip() for line in escape_controls(text).splitlines())


def format_time(at: int | None) -> str:
    """Format milliseconds since 1970 as local time; None is `never`."""
    return "never" if at is None else f"{datetime.fromtimestamp(at / 1000):%Y-%m-%d %H:%M}"


def print_note(text: str) -> None:
    """Print a sentence on standard error, dimmed, with its control characters escaped."""
    click.secho(escape_controls(text), err=True, dim=True)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def brings_prompts() -> bool:
    """Return whether standard input is a pipe or a file with prompts, or a terminal whose answers go elsewhere."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # there is none
        return False
    return stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind) or sys.stdin.isatty()


def remove_controls(text: str) -> str:
    """Remove the characters that control a terminal."""
    return text.translate(CONTROL)
