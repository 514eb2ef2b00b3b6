"""`crow prompts`: which versions of which prompts there were, what changed between them, and what each became."""

from typing import Any

import click
import msgspec

from crow_cli.history import (
    AS_JSON,
    indented,
    limited,
    one_line,
    print_diff,
    print_json,
    print_table,
    reading,
    say,
    when,
)
from crow_cli.screen import spelled_out

PROMPT = click.argument("prompt", metavar="NAME[@N]")


@click.group()
def prompts() -> None:
    """Every version of every prompt. NAME is the newest version of one, NAME@2 its second."""


@prompts.command("list")
@AS_JSON
def list_(as_json: bool) -> None:
    """The prompts that were ever used, with their versions."""
    from crow_persistence.prompts import list_versions

    with reading() as connection:
        found = list_versions(connection)
    if as_json:
        print_json([told(version) for version in found])
    elif found:
        rows = [(f"{one.name}@{one.number}", when(one.first_seen), when(one.last), str(one.renders)) for one in found]
        print_table(("PROMPT", "FIRST SEEN", "LAST USED", "RENDERS"), rows)
    else:
        say("No prompt has been used yet.")


@prompts.command()
@PROMPT
@AS_JSON
def show(prompt: str, as_json: bool) -> None:
    """The template of a prompt."""
    from crow_persistence.prompts import find_version

    with reading() as connection:
        version = find_version(connection, prompt)
    if as_json:
        print_json({**told(version), "template": version.template})
        return
    asks = ", ".join(msgspec.json.decode(version.variables)) or "nothing"
    say(one_line(f"{version.name}@{version.number}, first seen {when(version.first_seen)}, asks for {asks}"))
    click.echo(spelled_out(version.template))


@prompts.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
def diff(first: str, second: str) -> None:
    """What changed from one version to another: crow prompts diff system@1 system@3"""
    from crow_persistence.prompts import diff_versions

    with reading() as connection:
        changed = diff_versions(connection, first, second)
    print_diff(changed)
    if not changed:
        say("They are the same.")


@prompts.command()
@PROMPT
@limited(20)
@click.option("--text", "with_text", is_flag=True, help="Show what it became each time, too.")
@AS_JSON
def history(prompt: str, limit: int, with_text: bool, as_json: bool) -> None:
    """When, where and for what a prompt was rendered, the latest first."""
    from crow_persistence.prompts import list_renders, load_text

    with reading() as connection:
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
        say("It has not been rendered yet.")
        return
    heads = ("AT", "SESSION", "PROMPT", "PURPOSE")
    rows = [(when(one.at), one.session[:8], f"{one.name}@{one.number}", one.purpose) for one in found]
    if not with_text:
        print_table(heads, rows)
        return
    for row, text_ in zip(rows, texts, strict=True):
        click.secho(one_line("  ".join(row)), bold=True)
        click.echo(indented(text_))


def told(version: Any) -> dict[str, Any]:
    """A version for programs, without its template."""
    names = ("name", "number", "hash", "first_seen", "renders", "last")
    said = {name: getattr(version, name) for name in names}
    return {**said, "variables": msgspec.json.decode(version.variables)}
