"""`crow sessions`: list, show, search, export, fork and delete stored sessions."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from crow_core.errors import StoreError
from crow_core.text import escape_controls
from crow_system.shortening import format_count

from crow_cli.console import (
    AS_JSON,
    MAX_OUTPUT_LINES,
    escape_line,
    format_time,
    indent,
    limit_option,
    print_diff,
    print_json,
    print_note,
    print_table,
    shorten,
    shorten_path,
)
from crow_cli.groups import SessionsGroup
from crow_cli.menu import confirm
from crow_cli.process import fail
from crow_cli.storage import connect, open_database

if TYPE_CHECKING:
    from crow_core.messages.message import Message
    from crow_persistence.export.transcript import Transcript, TranscriptPart, TranscriptToolCall

FORMATS = ("markdown", "jsonl", "html", "atif")
TABLE_HEADS = ("ID", "UPDATED", "TITLE")
UNTITLED = "(no title)"
SESSION = click.argument("session", metavar="ID")


@click.group(cls=SessionsGroup)
def sessions() -> None:
    """List, show, search, export, fork and delete sessions. The beginning of an ID is enough."""


@sessions.command("list")
@click.option("--all", "everywhere", is_flag=True, help="List the sessions of all folders.")
@click.option("--agents", is_flag=True, help="Also list those of sub-agents and `crow reask`.")
@limit_option(20)
@AS_JSON
def list_(everywhere: bool, agents: bool, limit: int, as_json: bool) -> None:
    """List the sessions of this folder, the latest first."""
    from crow_persistence.loader import list_sessions

    with connect(lists=True, as_json=as_json) as connection:
        page = list_sessions(connection, "" if everywhere else os.getcwd(), "", limit, agents=agents)
    if as_json:
        print_json([{name: getattr(one, name) for name in one.__dataclass_fields__} for one in page.sessions])
        return
    if not page.sessions:
        print_note(
            "There are no sessions yet." if everywhere else "There are no sessions of this folder; --all shows others."
        )
        return
    rows = [
        (
            one.id[:8],
            format_time(one.updated),
            *([shorten_path(one.cwd, 24)] if everywhere else []),
            (one.title or UNTITLED) + (" (archived)" if one.archived else ""),
        )
        for one in page.sessions
    ]
    print_table((*TABLE_HEADS[:2], *(["FOLDER"] if everywhere else []), TABLE_HEADS[2]), rows)
    if page.cursor:
        print_note(f"There are more; --limit {limit * 5} shows them.")


@sessions.command()
@SESSION
@click.option("--view", is_flag=True, help="Show the messages that the model would read next.")
@click.option("--web", "in_browser", is_flag=True, help="Show the session in a browser, as `crow web ID` does.")
@AS_JSON
@click.pass_context
def show(context: click.Context, session: str, view: bool, in_browser: bool, as_json: bool) -> None:
    """Show the messages and tool calls of a session. Secrets are not masked."""
    if in_browser:
        group = context.find_root().command
        if isinstance(group, click.Group) and (web := group.get_command(context, "web")):
            context.invoke(web, session=session)
        return
    from crow_core.messages.passes import view as view_of
    from crow_persistence.export.jsonl import to_records
    from crow_persistence.export.transcript import Transcript
    from crow_persistence.loader import find_session

    with connect() as connection:
        story = Transcript.load(connection, find_session(connection, session))
    if story.record.damage:
        print_note(escape_line(story.record.damage))
    if view:
        system = story.record.system
        first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        seen, said = view_of(story.record.log), [entry for entry in story.record.log if "role" in entry]
        if len(seen) < len(said):
            print_note(f"The model reads {len(seen)} messages, made from {len(said)}. Without --view, all are shown.")
        request = [*first, *seen]
        if as_json:
            print_json(request)
        else:
            for message in request:
                print_message(message)
    elif as_json:
        print_json(to_records(story))
    else:
        print_story(story)


def print_message(message: "Message") -> None:
    """Print a message of a request to the model."""
    from crow_core.messages.message import to_parts
    from crow_persistence.export.transcript import describe_media, find_url

    answers = f" {message['tool_call_id']}" if "tool_call_id" in message else ""
    click.secho(escape_line(f"{message.get('role')}{answers}"), bold=True)
    for part in to_parts(message.get("content")):
        click.echo(indent(f"[{describe_media(url)}]" if (url := find_url(part)) else str(part.get("text", ""))))
    for call in message.get("tool_calls", []):
        function = call["function"]
        click.secho(escape_line(f"● {call['id']} {function['name']} {function['arguments']}"), fg="cyan")
    click.echo()


def print_story(story: "Transcript") -> None:
    click.secho(escape_line(story.summary.title or UNTITLED), bold=True)
    for name, value in story.facts():
        click.secho(f"{name:8} {escape_line(value)}", dim=True)
    for part in story.parts():
        click.echo()
        print_part(part)


def print_part(part: "TranscriptPart") -> None:

    from crow_persistence.export.transcript import describe_media

    if part.who == "note":
        click.secho(escape_line(part.title), dim=True)
        return
    facts = [format_time(part.at)] if part.at else []
    who = click.style("You" if part.who == "user" else "crow", bold=True, fg="green" if part.who == "user" else "blue")
    click.echo(f"{who} {click.style(escape_line(' '.join([*facts, part.id])), dim=True)}")
    if part.thought:
        click.secho(indent(part.thought), dim=True)
    if part.text:
        click.echo(indent(part.text))
    for url in part.media:
        click.secho(indent(f"[{describe_media(url)}]"), dim=True)
    if part.cut:
        click.secho(escape_line(f"! {part.cut}"), fg="red")
    for use in part.tool_calls:
        print_use(use)


def print_use(use: "TranscriptToolCall") -> None:
    """Print a tool call with its changes to files, or with the last lines of its output."""
    click.secho(escape_line(f"● {use.title}"), fg="red" if use.failed else "cyan")
    if use.decision:
        click.secho(indent(use.decision), dim=True)
    if use.diffs:
        for diff in use.diffs:
            print_diff(diff)
        return
    lines = use.answer.strip().splitlines()
    if len(lines) > MAX_OUTPUT_LINES:
        lines = [f"… {len(lines) - MAX_OUTPUT_LINES} lines before", *lines[-MAX_OUTPUT_LINES:]]
    for line in lines:
        click.secho(indent(line), fg="red" if use.failed else None, dim=not use.failed)


@sessions.command()
@click.argument("words", nargs=-1, required=True)
@click.option("--everywhere", is_flag=True, help="Search the sessions of all folders.")
@limit_option(20)
@AS_JSON
def search(words: tuple[str, ...], everywhere: bool, limit: int, as_json: bool) -> None:
    """Search for messages that contain all of these WORDS.

    "Words in quotes" have to follow each other; word* finds words that begin with word. Exit codes: 0 something was
    found, 1 nothing was.
    """
    from crow_persistence.search import MATCH_END, MATCH_START, search

    with connect() as connection:
        hits = search(connection, " ".join(words), cwd="" if everywhere else os.getcwd(), limit=limit)
    if as_json:
        print_json([{name: getattr(hit, name) for name in hit.__dataclass_fields__} for hit in hits])
    for hit in () if as_json else hits:
        who = hit.tool or {"user": "you", "assistant": "crow"}.get(hit.kind, hit.kind)
        folder = f"  {shorten_path(hit.cwd, 24)}" if everywhere else ""
        head = f"{hit.session[:8]}  {format_time(hit.at)}{folder}  {who}  {hit.title}"
        click.secho(shorten(escape_line(head), 80), dim=True)
        before, *matches = escape_controls(hit.snippet).split(MATCH_START)
        marked = [
            click.style(found, bold=True) + rest for found, _, rest in (match.partition(MATCH_END) for match in matches)
        ]
        click.echo(f"  {before}{''.join(marked)}")
    if not hits:
        print_note(
            "Nothing was found." if everywhere else "Nothing was found in this folder's sessions; try --everywhere."
        )
        sys.exit(1)


@sessions.command()
@SESSION
@click.option(
    "--format",
    "format_name",
    type=click.Choice(FORMATS),
    default="markdown",
    show_default=True,
    help="The format of the export.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@click.option("--no-redact", is_flag=True, help="Do not mask secrets.")
def export(session: str, format_name: Any, output: Path | None, no_redact: bool) -> None:
    """Export a session to share it. Likely secrets are masked."""
    from crow_core.redaction import MASK
    from crow_persistence.export import export
    from crow_persistence.export.transcript import Transcript
    from crow_persistence.loader import find_session

    with connect() as connection:
        story = Transcript.load(connection, find_session(connection, session))
    exported = export(story if no_redact else story.redact(), format_name)
    if output is None:
        click.echo(escape_controls(exported.text), nl=False)
        if exported.files:
            print_note(f"It refers to {len(exported.files)} images; with -o FILE they are written beside it.")
    else:
        try:
            exported.write(output)
        except OSError as error:
            fail(f"{output} cannot be written ({error.strerror}). Name another file after -o.")
    if masked := 0 if no_redact else exported.text.count(MASK):
        print_note(f"Secrets masked: {masked}. Read the export before you share it.")
    if story.record.damage:
        print_note(escape_line(story.record.damage))


@sessions.command()
@SESSION
@click.option("--at", metavar="ENTRY", default="", help="Fork after this entry, not at the end; `show` prints the ids.")
def fork(session: str, at: str) -> None:
    """Make a new session that continues another one, and print its id."""
    from crow_core.session.log import new_id
    from crow_persistence import forks
    from crow_persistence.loader import find_session, load_session

    with connect(write=True) as connection:
        row = find_session(connection, session)
        entry = find_entry_id(load_session(connection, row).log, at) if at else ""
        id = new_id()
        forks.fork(connection, row.id, id, entry)
    click.echo(id)
    print_note(f"Continue it: crow run -r {id[:8]}")


def find_entry_id(log: "list[Message]", prefix: str) -> str:
    """Return the id of the one entry whose id begins with `prefix`. Raises StoreError."""
    found = [id for entry in log if (id := str(entry.get("crow", {}).get("id", ""))).startswith(prefix)]
    if len(found) == 1 or prefix in found:
        return prefix if prefix in found else found[0]
    many = "More than one entry begins" if found else "There is no entry that begins"
    raise StoreError(f"--at: {many} with {prefix!r}. `crow sessions show` prints the ids.")


@sessions.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Delete without asking.")
def delete(ids: tuple[str, ...], yes: bool) -> None:
    """Delete sessions for good. Entries that their forks use, and the decisions about permissions, stay."""
    from crow_persistence import forks
    from crow_persistence.loader import find_session

    with connect() as connection:
        rows = list({row.id: row for row in (find_session(connection, id) for id in ids)}.values())
    if not yes:
        print_table(TABLE_HEADS, [(row.id[:8], format_time(row.updated), row.title or UNTITLED) for row in rows])
        if not confirm("Delete for good?", err=True):
            sys.exit(1)
    for row in rows:
        with connect(write=True) as connection:
            forks.delete(connection, row.id)
    print_note(f"Deleted {format_count(len(rows), 'session')}.")
    try:
        database = open_database(os.environ)
        database.erase_deleted()
    except StoreError as error:
        fail(escape_controls(str(error)))
    for copy in (*database.list_copies(), *database.list_replaced()):
        print_note(f"An earlier copy of the database still has them: {copy}.")
    if database.list_copies():
        print_note("`crow db prune` deletes the copies that updates have made.")
