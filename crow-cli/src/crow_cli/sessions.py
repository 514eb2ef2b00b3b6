"""`crow sessions`: what was said in earlier sessions, found, shown, given away, forked and deleted."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from crow_core.errors import StoreError

from crow_cli.ending import wrong
from crow_cli.history import (
    AS_JSON,
    cut,
    indented,
    limited,
    one_line,
    print_diff,
    print_json,
    print_table,
    prints_to_terminal,
    reading,
    say,
    tail,
    when,
    writing,
)
from crow_cli.screen import LINES, spelled_out

if TYPE_CHECKING:
    from crow_core.messages import Message
    from crow_persistence.export.transcript import Transcript, TranscriptPart, TranscriptToolCall

FORMATS = ("markdown", "jsonl", "html", "atif")
HEADS = ("ID", "UPDATED", "TITLE")
UNTITLED = "(no title)"
SESSION = click.argument("session", metavar="ID")


@click.group()
def sessions() -> None:
    """Earlier sessions. An ID may be given by its beginning."""


@sessions.command("list")
@click.option("--all", "everywhere", is_flag=True, help="Of all folders, not only this one.")
@click.option("--agents", is_flag=True, help="Those of sub-agents, too.")
@limited(20)
@AS_JSON
def list_(everywhere: bool, agents: bool, limit: int, as_json: bool) -> None:
    """The sessions of this folder, the latest first."""
    from crow_persistence.loader import list_sessions

    with reading() as connection:
        page = list_sessions(connection, "" if everywhere else os.getcwd(), "", limit, agents=agents)
    if as_json:
        print_json([{name: getattr(one, name) for name in one.__dataclass_fields__} for one in page.sessions])
        return
    if not page.sessions:
        say("There are no sessions yet." if everywhere else "There are no sessions of this folder; --all shows others.")
        return
    rows = [
        (one.id[:8], when(one.updated), *([tail(one.cwd, 24)] if everywhere else []), one.title or UNTITLED)
        for one in page.sessions
    ]
    print_table((*HEADS[:2], *(["FOLDER"] if everywhere else []), HEADS[2]), rows)
    if page.cursor:
        say(f"There are more; --limit {limit * 5} shows them.")


@sessions.command()
@SESSION
@click.option("--view", is_flag=True, help="What the model would read, not what happened.")
@AS_JSON
def show(session: str, view: bool, as_json: bool) -> None:
    """What was said and done in a session. Nothing is masked."""
    from crow_core.messages import drop_markers
    from crow_core.messages import view as view_of
    from crow_persistence.export.jsonl import to_records
    from crow_persistence.export.transcript import Transcript
    from crow_persistence.loader import find_session

    with reading() as connection:
        story = Transcript.load(connection, find_session(connection, session))
    if story.record.damage:
        say(one_line(story.record.damage))
    if view:
        system = story.record.system
        first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        seen, said = view_of(story.record.log), drop_markers(story.record.log)
        if len(seen) < len(said):
            say(f"The model reads {len(seen)} messages, made of {len(said)}; without --view all of them are shown.")
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
    """A message as it goes to the model."""
    from crow_core.messages import to_parts
    from crow_persistence.export.transcript import describe_media, find_url

    answers = f" {message['tool_call_id']}" if "tool_call_id" in message else ""
    click.secho(one_line(f"{message.get('role')}{answers}"), bold=True)
    for part in to_parts(message.get("content")):
        click.echo(indented(f"[{describe_media(url)}]" if (url := find_url(part)) else str(part.get("text", ""))))
    for call in message.get("tool_calls", []):
        function = call["function"]
        click.secho(one_line(f"● {call['id']} {function['name']} {function['arguments']}"), fg="cyan")
    click.echo()


def print_story(story: "Transcript") -> None:
    click.secho(one_line(story.summary.title or UNTITLED), bold=True)
    for name, value in story.facts():
        click.secho(f"{name:8} {one_line(value)}", dim=True)
    for part in story.parts():
        click.echo()
        print_part(part)


def print_part(part: "TranscriptPart") -> None:
    from crow_persistence.export.transcript import describe_media

    if part.who == "note":
        click.secho(one_line(part.title), dim=True)
        return
    facts = [when(part.at)] if part.at else []
    who = click.style("You" if part.who == "user" else "crow", bold=True, fg="green" if part.who == "user" else "blue")
    click.echo(f"{who} {click.style(one_line(' '.join([*facts, part.id])), dim=True)}")
    if part.thought:
        click.secho(indented(part.thought), dim=True)
    if part.text:
        click.echo(indented(part.text))
    for url in part.media:
        click.secho(indented(f"[{describe_media(url)}]"), dim=True)
    if part.cut:
        click.secho(one_line(f"! {part.cut}"), fg="red")
    for use in part.tool_calls:
        print_use(use)


def print_use(use: "TranscriptToolCall") -> None:
    """A tool call: the end of what it answered, or what it changed."""
    click.secho(one_line(f"● {use.title}"), fg="red" if use.failed else "cyan")
    if use.decision:
        click.secho(indented(use.decision), dim=True)
    if use.diffs:
        for diff in use.diffs:
            print_diff(diff)
        return
    answered = use.answer.strip().splitlines()
    if len(answered) > LINES:
        answered = [f"… {len(answered) - LINES} lines before", *answered[-LINES:]]
    for line in answered:
        click.secho(indented(line), fg="red" if use.failed else None, dim=not use.failed)


@sessions.command()
@click.argument("words", nargs=-1, required=True)
@click.option("--everywhere", is_flag=True, help="In the sessions of all folders.")
@limited(20)
@AS_JSON
def search(words: tuple[str, ...], everywhere: bool, limit: int, as_json: bool) -> None:
    """Messages that hold all of these WORDS; "words in quotes" follow each other, word* is how one begins.

    Exit codes: 0 something was found, 1 nothing was.
    """
    from crow_persistence.search import MATCH_END, MATCH_START, search

    with reading() as connection:
        hits = search(connection, " ".join(words), cwd="" if everywhere else os.getcwd(), limit=limit)
    if as_json:
        print_json([{name: getattr(hit, name) for name in hit.__dataclass_fields__} for hit in hits])
    for hit in () if as_json else hits:
        who = hit.tool or {"user": "you", "assistant": "crow"}.get(hit.kind, hit.kind)
        folder = f"  {tail(hit.cwd, 24)}" if everywhere else ""
        head = f"{hit.session[:8]}  {when(hit.at)}{folder}  {who}  {hit.title}"
        click.secho(cut(one_line(head), 80), dim=True)
        before, *matches = spelled_out(hit.snippet).split(MATCH_START)
        marked = [
            click.style(found, bold=True) + rest for found, _, rest in (match.partition(MATCH_END) for match in matches)
        ]
        click.echo(f"  {before}{''.join(marked)}")
    if not hits:
        say("Nothing was found." if everywhere else "Nothing was found in this folder's sessions; try --everywhere.")
        sys.exit(1)


@sessions.command()
@SESSION
@click.option(
    "--format", type=click.Choice(["markdown", "jsonl", "html", "atif"]), default="markdown", show_default=True
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to a file.")
@click.option("--no-redact", is_flag=True, help="Give away what looks like a secret, too.")
def export(session: str, format: Any, output: Path | None, no_redact: bool) -> None:
    """Write a session down, to be given away. What looks like a secret is masked."""
    from crow_persistence.export import export
    from crow_persistence.export.redaction import MASK
    from crow_persistence.export.transcript import Transcript
    from crow_persistence.loader import find_session

    with reading() as connection:
        story = Transcript.load(connection, find_session(connection, session))
    made = export(story if no_redact else story.redact(), format)
    if output is None:
        click.echo(spelled_out(made.text) if prints_to_terminal() else made.text, nl=False)
        if made.files:
            say(f"It refers to {len(made.files)} images; with -o FILE they are written beside it.")
    else:
        try:
            made.write(output)
        except OSError as error:
            wrong(f"{output} cannot be written ({error.strerror}). Name another file after -o.")
    if masked := 0 if no_redact else made.text.count(MASK):
        say(f"Masked {masked} times what looks like a secret. Read it before you give it away.")
    if story.record.damage:
        say(one_line(story.record.damage))


@sessions.command()
@SESSION
@click.option("--at", metavar="ENTRY", default="", help="Go on from this entry, not from the end; `show` tells its id.")
def fork(session: str, at: str) -> None:
    """Begin a new session where another one stands; prints its id."""
    from crow_core.log import new_id
    from crow_persistence import forks
    from crow_persistence.loader import find_session, load_session

    with writing() as connection:
        row = find_session(connection, session)
        entry = entry_of(load_session(connection, row).log, at) if at else ""
        id = new_id()
        forks.fork(connection, row.id, id, entry)
    click.echo(id)
    say(f"crow run -r {id[:8]} goes on with it.")


def entry_of(log: "list[Message]", prefix: str) -> str:
    """The id of the entry that begins so. Raises StoreError."""
    found = [id for entry in log if (id := str(entry.get("crow", {}).get("id", ""))).startswith(prefix)]
    if len(found) == 1 or prefix in found:
        return prefix if prefix in found else found[0]
    many = "More than one entry begins" if found else "There is no entry that begins"
    raise StoreError(f"--at: {many} with {prefix!r}. `crow sessions show` tells the ids.")


@sessions.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def delete(ids: tuple[str, ...], yes: bool) -> None:
    """Forget sessions for good, but for what their forks use and for the decisions, which stay."""
    from crow_persistence import forks
    from crow_persistence.loader import find_session

    with reading() as connection:
        rows = list({row.id: row for row in (find_session(connection, id) for id in ids)}.values())
    if not yes:
        print_table(HEADS, [(row.id[:8], when(row.updated), row.title or UNTITLED) for row in rows])
        click.confirm("Delete for good?", abort=True, err=True)
    for row in rows:
        with writing() as connection:
            forks.delete(connection, row.id)
    say(f"Deleted {len(rows)} session{'s' if len(rows) > 1 else ''}.")
