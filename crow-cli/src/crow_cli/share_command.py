"""`crow sessions share`: write one file of a session that can be given away."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from crow_core.text import escape_controls

from crow_cli.console import print_note
from crow_cli.menu import confirm
from crow_cli.process import fail
from crow_cli.storage import connect

if TYPE_CHECKING:
    from crow_persistence.export.transcript import Transcript

COMMENT_LIMIT = 65_536
"""The most characters that GitHub takes as a comment."""
RESULT_LIMITS = (2_000, 300, 0)
"""Characters of each tool's result in a Markdown that would be too long for a comment; tried in this order."""


@click.command()
@click.argument("session", metavar="ID")
@click.option("--markdown", is_flag=True, help="Write Markdown, short enough for a pull request, instead of HTML.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@click.option("-y", "--yes", is_flag=True, help="Write without asking.")
def share(session: str, markdown: bool, output: Path | None, yes: bool) -> None:
    """Write a session to one file to give away, after a list of the replacements in it.

    Replaced are secrets, results with private data, absolute paths, e-mail addresses, and the names of you and this
    machine. Undone turns, the system prompt and the list of tools are left out.
    """
    from crow_persistence.export.html import to_html
    from crow_persistence.export.transcript import Transcript
    from crow_persistence.loader import find_session

    from crow_cli.shared_session import describe_replaced, find_known_secrets, has_words, prepare

    with connect() as connection:
        row = find_session(connection, session)
        story = prepare(Transcript.load(connection, row), find_known_secrets(os.environ))
    if not has_words(story):
        fail(f"Session {row.id[:8]} has no text besides secrets and private data, so there is nothing to share.")
    text = fit_comment(story) if markdown else to_html(story)
    file = output or Path(f"crow-{row.id[:8]}.{'md' if markdown else 'html'}")
    click.echo("Replaced:" if (lines := describe_replaced(text)) else "Nothing had to be replaced.")
    for line in lines:
        click.echo(line)
    if not markdown and (images := sum(len(part.media) for part in story.parts())):
        click.echo(f"{images:5}  images are kept as they are: look at them")
    if not yes and not confirm(escape_controls(f"{'Replace' if file.exists() else 'Write'} {file}?"), err=True):
        sys.exit(1)
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        fail(f"{file} cannot be written ({error.strerror}). Name another file after -o.")
    click.echo(escape_controls(str(file)))
    print_note("Read it before you share it: crow recognises secrets by their form and by their names.")
    if markdown and len(text) > COMMENT_LIMIT:
        print_note(f"It has {len(text):,} characters. A comment on GitHub has at most {COMMENT_LIMIT:,}.")


def fit_comment(story: "Transcript") -> str:
    """Return a session as Markdown, with shortened results if it is too long for a comment."""
    from crow_persistence.export.markdown_export import to_markdown

    from crow_cli.shared_session import shorten_results

    text = to_markdown(story)
    for limit in RESULT_LIMITS:
        if len(text) <= COMMENT_LIMIT:
            break
        text = to_markdown(shorten_results(story, limit))
    return text
