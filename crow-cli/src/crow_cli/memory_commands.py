"""`crow memory`: list, edit and forget the notes on a repository."""

import os
from typing import TYPE_CHECKING

import click
from crow_agent.settings.config import load_config, load_environment
from crow_agent.settings.home import Home
from crow_core.errors import ConfigError
from crow_core.masking import find_secrets
from crow_core.text import escape_controls

from crow_cli.console import AS_JSON, escape_line, print_json, print_note
from crow_cli.process import fail

if TYPE_CHECKING:
    from crow_extensions.repository_memory import RepositoryMemory, RepositoryNote


@click.group()
def memory() -> None:
    """List, edit and forget the notes on this repository.

    Sessions add them with /remember and the tool `remember`, and begin with them, if the extension is on:

    \b
    crow config set extensions.memory true
    """


def open_memory() -> "RepositoryMemory":
    """Return the memory of the working folder's repository."""
    from crow_extensions.repository_memory import RepositoryMemory  # imported here because only these commands need it

    return RepositoryMemory(Home.find(os.environ).data / "memory", os.getcwd())


def read_notes(kept: "RepositoryMemory") -> "list[RepositoryNote]":
    """Read the notes, or print why they cannot be read and exit."""
    from crow_extensions.repository_memory import NoteRefused

    try:
        return kept.read()
    except NoteRefused as error:
        fail(escape_controls(str(error)))


@memory.command("list")
@AS_JSON
def list_(as_json: bool) -> None:
    """List the notes on this repository, with their numbers and the sessions that they came from."""
    kept = open_memory()
    notes = read_notes(kept)
    if as_json:
        print_json([{"text": note.text, "source": note.source, "day": note.day} for note in notes])
    elif not notes:
        print_note(escape_line(f"There are no notes on {kept.repository}. crow memory edit writes some."))
    for number, note in enumerate([] if as_json else notes, 1):
        click.echo(escape_line(f"{number} {note.text} ({note.source}, {note.day})"))
    try:
        if not load_config(Home.find(os.environ), os.environ).extensions.get("memory"):
            print_note("No session reads them: the extension is off. To use it: crow config set extensions.memory true")
    except ConfigError as error:
        print_note(escape_line(str(error)))


@memory.command()
def edit() -> None:
    """Edit the notes in your editor ($VISUAL or $EDITOR). Each line is a note.

    Notes that sessions add meanwhile stay.
    """
    from crow_extensions.repository_memory import NoteRefused, parse_notes

    from crow_cli.menu import confirm

    kept, home = open_memory(), Home.find(os.environ)
    before = read_notes(kept)
    try:
        secrets = find_secrets(load_config(home, os.environ), load_environment(home, os.environ))
    except ConfigError as error:
        fail(str(error))
    text = kept.to_text(before)
    while True:
        try:
            edited = click.edit(text, extension=".md")
        except click.ClickException as error:
            fail(f"The notes are as they were: {error.message}. Set $EDITOR to your editor.")
        if edited is None:
            print_note("The notes are as they were.")
            return
        try:
            kept.merge(before, parse_notes(edited), secrets)
            return
        except NoteRefused as error:
            click.secho(f"crow: {escape_controls(str(error))}", fg="red", err=True)
            text = edited
            if not confirm("Edit again?"):
                fail("The notes are as they were.")


@memory.command()
@click.argument("numbers", nargs=-1, required=True, type=click.IntRange(min=1), metavar="NUMBER...")
def forget(numbers: tuple[int, ...]) -> None:
    """Remove notes by the numbers that `crow memory list` shows."""
    from crow_extensions.repository_memory import NoteRefused

    kept = open_memory()
    notes = read_notes(kept)
    if missing := [number for number in numbers if number > len(notes)]:
        fail(f"There is no note {missing[0]}: there are {len(notes)}. crow memory list shows them.")
    unwanted = [notes[number - 1] for number in dict.fromkeys(numbers)]
    try:
        kept.forget(unwanted)
    except NoteRefused as error:
        fail(escape_controls(str(error)))
    for note in unwanted:
        click.echo(escape_line(f"Forgotten: {note.text}"))
