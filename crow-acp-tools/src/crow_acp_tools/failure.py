"""The message of a command that cannot do what it was asked to."""

from typing import NoReturn

import click
from crow_core.text import escape_controls


def fail(sentence: str) -> NoReturn:
    """Print a sentence about wrong usage after the program's name, and exit with code 2."""
    program = click.get_current_context().find_root().info_name
    click.secho(f"{program}: {escape_controls(sentence)}", fg="red", err=True)
    raise SystemExit(2)
