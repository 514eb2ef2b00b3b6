"""`crow perms`: list and revoke kept answers, explain a decision, and test the permission rules."""

import asyncio
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import msgspec
from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_core.errors import ConfigError
from crow_core.text import escape_controls
from crow_permissions.kept_answers import KeptAnswer, KeptAnswers
from crow_permissions.rules import Verdict
from crow_system.repository import find_main_folder

from crow_cli.console import AS_JSON, format_time, print_json, print_note, print_table
from crow_cli.process import fail
from crow_cli.sandbox_commands import find_standing

if TYPE_CHECKING:
    from crow_cli.explanation import Context

VERDICTS: tuple[Verdict, ...] = ("allow", "ask", "deny")
FOLDER = click.option(
    "--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".", help="The session's folder."
)
MODE = click.option(
    "--mode", type=click.Choice(["ask", "accept-edits", "plan", "yolo"]), help="The mode; else the configured one."
)


@click.group()
def perms() -> None:
    """List and revoke kept answers; explain and test what permission rules decide."""


@perms.command("list")
@AS_JSON
def list_answers(as_json: bool) -> None:
    """List the answers that are kept for a folder or for all folders."""
    answers = read_answers(KeptAnswers(Home.find(os.environ).data))
    if as_json:
        print_json([to_row(number, each) for number, each in enumerate(answers, 1)])
        return
    if not answers:
        print_note("No answers are kept.")
        return
    print_table(
        ["", "ID", "ANSWER", "RULE", "FOLDER", "SINCE"],
        [
            [
                str(number),
                each.id,
                "allow" if each.allows else "reject",
                each.rule.describe(),
                each.folder or "all",
                format_time(int(each.since * 1000)),
            ]
            for number, each in enumerate(answers, 1)
        ],
    )


@perms.command()
@click.argument("answers", nargs=-1, metavar="[NUMBER|ID]...")
@click.option("--folder", type=click.Path(path_type=Path), help="Revoke all answers for this folder.")
@click.option("--all", "everything", is_flag=True, help="Revoke all answers.")
def revoke(answers: Sequence[str], folder: Path | None, everything: bool) -> None:
    """Revoke kept answers, by the numbers or ids that `crow perms list` shows.

    Running sessions ask again from their next tool call on.
    """
    store = KeptAnswers(Home.find(os.environ).data)
    kept = read_answers(store)
    if not answers and folder is None and not everything:
        fail("name the answers to revoke, or use --folder or --all. `crow perms list` shows them.")
    named_folder = find_main_folder(os.path.realpath(folder)) if folder else None
    chosen = {each.id for each in kept if everything or each.folder == named_folder}
    for named in answers:
        by_number = kept[int(named) - 1].id if named.isdecimal() and 0 < int(named) <= len(kept) else None
        by_id = named if any(each.id == named for each in kept) else None
        if (id := by_id or by_number) is None:
            fail(f"no answer is called {named!r}. Nothing was revoked.")
        chosen.add(id)
    try:
        store.remove([*chosen])
    except (ConfigError, OSError) as error:
        fail(f"{error} Nothing was revoked.")
    for each in kept:
        if each.id in chosen:
            click.echo(escape_controls(f"Revoked: {each}"))
    if not chosen:
        print_note("No such answer is kept.")


@perms.command("explain")
@click.argument("call", metavar="COMMAND|TOOL:SUBJECT")
@MODE
@FOLDER
@AS_JSON
def explain_call(call: str, mode: str | None, folder: Path, as_json: bool) -> None:
    """Say what would happen to a command or to another tool call, and which rule decides.

    It also says whether a session is asked that has read private data and untrusted content. Questions of hooks, and
    other events of a session (changed files, another folder), do not count here.
    """
    from crow_cli.explanation import load_context  # imported here, as it loads all that decides in a session

    try:
        context = load_context(folder, mode)
        found = context.explain(call, command=True)
    except ConfigError as error:
        fail(str(error))
    except ValueError as error:
        fail(f"{error}.")
    if as_json:
        print_json({**msgspec.to_builtins(found), "mode": context.permissions.mode, "notes": context.notes})
        return
    click.echo(escape_controls(f"{found.verdict}: {found.reason}"))
    if found.source:
        click.echo(escape_controls(f"from: {found.source}"))
    if found.sandbox:
        click.echo(escape_controls(f"sandbox: {asyncio.run(describe_sandbox(context))}"))
    for command in found.commands:
        click.echo(escape_controls(f"runs: {command}"))
    if not found.is_clear:
        click.echo("runs: more, which is not known before the shell runs it")
    if found.taint:
        verb = "say so" if context.permissions.mode == "yolo" else "ask"
        after = f"{verb}, once a session has read private data and untrusted content"
        click.echo(escape_controls(f"then: {after}, as this may send data away: {found.taint}"))
    for note in context.notes:
        print_note(note)


async def describe_sandbox(context: "Context") -> str:
    """Say whether a command that no rule allows or forbids runs in the sandbox, and what becomes of its changes."""
    home = Home.find(os.environ)
    config = load_config(home, os.environ)
    level, says = await find_standing(config, home)
    if level != "review":
        return says
    ends = {
        "plan": "what it changes is thrown away",
        "accept-edits": "what it changes is applied; you are asked about files that run later",
    }
    end = ends.get(context.permissions.mode, "you are asked about what it changes")
    hosts = describe_hosts(context, config.sandbox.hosts)
    return f"it runs there at once, and {end}, also in a session of the terminal; {hosts}"


def describe_hosts(context: "Context", hosts: Sequence[str]) -> str:
    """Say which hosts a command in the sandbox may reach, by the settings and by kept answers."""
    from crow_permissions.command_hosts import list_hosts  # imported here, as above

    hosts = list_hosts(context.permissions, find_main_folder(os.path.realpath(context.folder)), hosts)
    named = ", ".join(hosts)
    if context.permissions.mode == "plan":
        return f"it may reach {named or 'no host'}"
    return f"you are asked before it reaches {f'another host than {named}' if named else 'a host'}"


@perms.command("test")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@MODE
@FOLDER
def check_rules(file: Path, mode: str | None, folder: Path) -> None:
    """Test the permission rules against a FILE of expectations.

    A line is `allow TOOL:SUBJECT`, `ask …` or `deny …`; `#` begins a comment. A file whose name ends with .toml has
    the lists `allow`, `ask` and `deny` instead. Kept answers do not count.

    Exit codes: 0 all are met, 1 some are not, or a rule can never match, 2 the file or the rules cannot be used.
    """
    try:
        expected = [*read_expectations(file)]
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be used: {error}.")
    from crow_cli.explanation import list_useless_rules, load_context  # imported here, as above

    try:
        context = load_context(folder, mode)
    except ConfigError as error:
        fail(str(error))
    context.permissions.kept = None
    failures = [*list_useless_rules(context)]
    for place, verdict, call in expected:
        try:
            found = context.explain(call)
        except ValueError as error:
            fail(f"{file}, {place}: {error}.")
        if found.verdict != verdict:
            failures.append(f"{file}, {place}: {call} is not {verdict}, but {found.verdict}: {found.reason}")
    for failure in failures:
        click.echo(escape_controls(failure))
    for note in context.notes:
        print_note(note)
    if failures:
        sys.exit(1)
    click.echo(f"All {len(expected):,} expectations are met." if expected else "The file expects nothing.")


def read_expectations(file: Path) -> Iterator[tuple[str, Verdict, str]]:
    """Yield the place of each expectation in a file, its verdict and its call. Raises OSError, ValueError."""
    text = file.read_text("utf-8-sig")
    if file.suffix == ".toml":
        content = tomllib.loads(text)
        for name, calls in content.items():
            verdict = to_verdict(name)
            if verdict is None or not isinstance(calls, list):
                raise ValueError(f"{name!r} is none of the lists allow, ask and deny")
            for number, call in enumerate(cast("list[Any]", calls), 1):
                yield f"{name} {number}", verdict, str(call)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, call = line.strip().partition(" ")
        verdict = to_verdict(name.rstrip(":"))
        if verdict is None or not call.strip():
            raise ValueError(f"line {number} is not `allow|ask|deny TOOL:SUBJECT`")
        yield f"line {number}", verdict, call.strip()


def to_verdict(name: str) -> Verdict | None:
    return name if name in VERDICTS else None


def read_answers(store: KeptAnswers) -> list[KeptAnswer]:
    """Read the kept answers; print a sentence and exit if they cannot be read."""
    try:
        return store.read()
    except ConfigError as error:
        fail(str(error))


def to_row(number: int, answer: KeptAnswer) -> dict[str, Any]:
    """Convert an answer to its JSON."""
    return {
        "number": number,
        "id": answer.id,
        "allows": answer.allows,
        "scope": answer.scope,
        "folder": answer.folder or None,
        "rule": msgspec.to_builtins(answer.rule),
        "text": str(answer.rule),
        "since": answer.since,
    }
