"""What is stored, for the commands that look into it: the database, and how rows are shown to people and programs."""

import json
import os
import re
import shutil
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any
from unicodedata import combining, east_asian_width

import click
from crow_core.errors import ConfigError, StoreError
from crow_core.settings.config import Home, get_database_url, load_config

from crow_cli.ending import wrong
from crow_cli.screen import spelled_out

if TYPE_CHECKING:
    from crow_persistence.database import Database
    from sqlalchemy import Connection

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def limited(default: int) -> Any:
    return click.option(
        "--limit", type=click.IntRange(min=1), default=default, show_default=True, help="At most so many."
    )


def open_database(env: Mapping[str, str]) -> "Database":
    """The database that the user's settings name. Raises StoreError, also when there is none yet."""
    from crow_persistence.database import Database  # it brings SQLAlchemy, which takes a while

    home = Home.find(env)
    try:
        database = Database(get_database_url(load_config(home, env), home), home.data)
    except ConfigError as error:
        raise StoreError(str(error)) from error
    if database.file and not database.file.exists():
        raise StoreError(f"Nothing has been stored yet: {database.file} is made with the first session.")
    return database


def whole_id(env: Mapping[str, str], prefix: str) -> str:
    """The id of the session that begins so. Raises StoreError."""
    from crow_persistence.loader import find_session

    with open_database(env).begin_read() as connection:
        return find_session(connection, prefix).id


def reading() -> "AbstractContextManager[Connection]":
    """A connection to read with; what goes wrong is said, and the command ends."""
    return connected(writes=False)


def writing() -> "AbstractContextManager[Connection]":
    """A transaction to write in; the same."""
    return connected(writes=True)


@contextmanager
def connected(*, writes: bool) -> "Generator[Connection]":
    try:
        database = open_database(os.environ)
        with database.begin_write() if writes else database.begin_read() as connection:
            yield connection
    except StoreError as error:
        wrong(spelled_out(str(error)))


def print_json(value: Any) -> None:
    """For programs; ASCII alone, so that no terminal obeys it either."""
    click.echo(json.dumps(value, indent=2, default=str))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows in columns; a line that is wider than the terminal is cut."""
    lines = [list(heads), *([one_line(cell) for cell in row] for row in rows)]
    columns = [padded(column) for column in zip(*lines, strict=True)]
    room = shutil.get_terminal_size().columns
    for at, line in enumerate(zip(*columns, strict=True)):
        click.secho(cut("  ".join(line).rstrip(), room), dim=at == 0)


def padded(column: Sequence[str]) -> list[str]:
    """Cells of one width: numbers to the right, words to the left."""
    are_numbers = all(re.fullmatch(r"[\d.,]+|-", cell) for cell in column[1:])
    widest = max(map(width, column))
    gaps = (" " * (widest - width(cell)) for cell in column)
    return [gap + cell if are_numbers else cell + gap for cell, gap in zip(column, gaps, strict=True)]


def one_line(text: str) -> str:
    """Text of others in a line of ours."""
    return " ".join(spelled_out(text).split())


def width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    return sum(0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def cut(text: str, columns: int) -> str:
    """A text, or its beginning and `…`, in so many columns."""
    if width(text) <= columns:
        return text
    text = text[:columns]
    while width(text) >= columns:
        text = text[:-1]
    return f"{text.rstrip()}…"


def tail(path: str, columns: int) -> str:
    """A path, or `…` and its end."""
    user = os.path.expanduser("~")
    path = f"~{path[len(user) :]}" if path == user or path.startswith(f"{user}/") else path
    return path if len(path) <= columns else f"…{path[1 - columns :]}"


def print_diff(diff: str) -> None:
    for line in diff.splitlines():
        colour = {"+": "green", "-": "red"}.get(line[:1])
        click.secho(indented(line), fg=colour, dim=colour is None)


def indented(text: str) -> str:
    """Text of others, which cannot steer the terminal nor pass for ours."""
    return "\n".join(f"  {line}".rstrip() for line in spelled_out(text).splitlines())


def when(at: int | None) -> str:
    """Milliseconds since 1970 as a person here reads them."""
    return "never" if at is None else f"{datetime.fromtimestamp(at / 1000):%Y-%m-%d %H:%M}"


def say(text: str) -> None:
    """A sentence beside what is printed."""
    click.secho(text, err=True, dim=True)


def prints_to_terminal() -> bool:
    return sys.stdout.isatty()
