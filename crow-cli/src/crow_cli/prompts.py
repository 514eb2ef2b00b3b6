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
def diff(first: str, second: str) -> None:
    """Show the differences between two versions of prompts.

    Example: crow prompts diff system@1 system@3
    """
    from crow_persistence.prompts import diff_versions

    with connect() as connection:
        changed = diff_versions(connection, first, second)
    print_diff(changed)
    if not changed:
        print_note("The two versions are the same.")


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
