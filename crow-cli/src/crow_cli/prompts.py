"""`crow prompts`: list the versions of prompts, compare them, and show the texts rendered from them."""

from typing import Any

import click
import msgspec

from crow_cli.console import (
    AS_JSON,
    escape_controls,
    escape_line,
    format_time,
    indent,
    limit_option,
    print_diff,
    print_json,
    print_note,
    print_table,
)
from crow_cli.process import fail
from crow_cli.storage import connect

PROMPT = click.argument("prompt", metavar="NAME[@N]")


@click.group()
def prompts() -> None:
    """List, show and compare the versions of prompts. NAME means its newest version, NAME@2 its second."""


@prompts.command("list")
@AS_JSON
def list_(as_json: bool) -> None:
    """List all versions of all prompts that were used."""
    from crow_persistence.prompts import list_versions

    with connect() as connection:
        found = list_versions(connection)
    if as_json:
        print_json([to_json(version) for version in found])
    elif found:
        rows = [
            (f"{one.name}@{one.number}", format_time(one.first_seen), format_time(one.last), str(one.renders))
            for one in found
        ]
        print_table(("PROMPT", "FIRST SEEN", "LAST USED", "RENDERS"), rows)
    else:
        print_note("No prompt has been used yet.")


@prompts.command()
@PROMPT
@AS_JSON
def show(prompt: str, as_json: bool) -> None:
    """Show the template of a prompt."""
    from crow_persistence.prompts import find_version

    with connect() as connection:
        version = find_version(connection, prompt)
    if as_json:
        print_json({**to_json(version), "template": version.template})
        return
    asks = ", ".join(msgspec.json.decode(version.variables)) or "nothing"
    print_note(
        escape_line(f"{version.name}@{version.number}, first seen {format_time(version.first_seen)}, asks for {asks}")
    )
    click.echo(escape_controls(version.template))


@prompts.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--rendered", is_flag=True, help="Compare their texts, rendered with the same stored variables.")
def diff(first: str, second: str, rendered: bool) -> None:
    """Show the differences between two versions of prompts.

    Example: crow prompts diff system@1 system@3
    """
    from crow_core.errors import PromptError
    from crow_persistence.prompts import diff_rendered, diff_versions

    try:
        with connect() as connection:
            changed = (diff_rendered if rendered else diff_versions)(connection, first, second)
    except PromptError as error:
        fail(str(error))
    print_diff(changed)
    if not changed:
        print_note("The two versions are the same.")


@prompts.command()
@click.argument("name", required=False, default="")
@AS_JSON
def stats(name: str, as_json: bool) -> None:
    """Sum the sessions, model calls, tokens, cost and ratings of each version.

    Ratings are those of /good and /bad; the last one of an answer counts.
    """
    from crow_persistence.prompts import find_version, list_stats

    with connect() as connection:
        if name:
            find_version(connection, name)  # refuses an unknown name
        found = list_stats(connection, name)
    if as_json:
        print_json(found)
    elif found:
        heads = ("PROMPT", "SESSIONS", "CALLS", "FAILED", "IN", "CACHED", "OUT", "GOOD", "BAD", "COST")
        print_table(heads, map(to_stats_row, found))
    else:
        print_note("No prompt has been used yet.")


def to_stats_row(stats: dict[str, Any]) -> tuple[str, ...]:
    """Convert the sums of a version to a row of the table."""
    names = ("sessions", "calls", "failed", "input", "cached", "output", "good", "bad")
    cost = ", ".join(f"{amount:.4f} {currency}" for currency, amount in stats["cost"].items())
    return (f"{stats['name']}@{stats['number']}", *(f"{stats[name]:,}" for name in names), cost or "-")


@prompts.command()
@PROMPT
@limit_option(20)
@click.option("--text", "with_text", is_flag=True, help="Also show each rendered text.")
@AS_JSON
def history(prompt: str, limit: int, with_text: bool, as_json: bool) -> None:
    """List when and where a prompt was rendered, the latest first."""
    from crow_persistence.prompts import list_renders, load_text

    with connect() as connection:
        found = list_renders(connection, prompt, limit)
        texts = [load_text(connection, one.message) if with_text else "" for one in found]
    if as_json:
        names = ("at", "session", "purpose", "name", "number")
        rows = [{name: getattr(one, name) for name in names} for one in found]
        variables = [{"variables": msgspec.json.decode(one.variables)} for one in found]
        more = [{"text": text} if with_text else {} for text in texts]
        print_json([{**row, **given, **extra} for row, given, extra in zip(rows, variables, more, strict=True)])
        return
    if not found:
        print_note(f"The prompt {prompt} has not been rendered yet.")
        return
    heads = ("AT", "SESSION", "PROMPT", "PURPOSE")
    rows = [(format_time(one.at), one.session[:8], f"{one.name}@{one.number}", one.purpose) for one in found]
    if not with_text:
        print_table(heads, rows)
        return
    for row, text_ in zip(rows, texts, strict=True):
        click.secho(escape_line("  ".join(row)), bold=True)
        click.echo(indent(text_))


def to_json(version: Any) -> dict[str, Any]:
    """Convert a version to JSON, for programs, without its template."""
    names = ("name", "number", "hash", "first_seen", "renders", "last")
    values = {name: getattr(version, name) for name in names}
    return {**values, "variables": msgspec.json.decode(version.variables)}
