"""`crow prompts`: list the versions of prompts, compare and choose them, and show the texts rendered from them."""

import os
from pathlib import Path
from typing import Any

import click
import crow_system as system
import msgspec
from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_agent.settings.structs import Config
from crow_core.errors import ConfigError
from crow_core.text import escape_controls

from crow_cli.console import (
    AS_JSON,
    escape_line,
    format_time,
    indent,
    limit_option,
    print_diff,
    print_json,
    print_note,
    print_table,
)
from crow_cli.groups import PromptsGroup
from crow_cli.process import fail
from crow_cli.storage import connect

PROMPT = click.argument("prompt", metavar="NAME[@N]")
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(cls=PromptsGroup)
def prompts() -> None:
    """List, show, compare and choose the versions of prompts. NAME means its newest version, NAME@2 its second."""


@prompts.command("list")
@AS_JSON
def list_(as_json: bool) -> None:
    """List all versions of all prompts that were used."""
    from crow_persistence.prompt_versions import list_versions

    with connect(lists=True, as_json=as_json) as connection:
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
    from crow_persistence.prompt_versions import find_version

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
    from crow_persistence.prompt_versions import diff_rendered, diff_versions

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
    """Sum the sessions, model calls, tokens, cost, ratings and passed evaluations of each version.

    Ratings are those of /good and /bad; the last one of an answer counts. Rates have 95 % intervals (Wilson).
    """
    from crow_persistence.intervals import wilson
    from crow_persistence.prompt_versions import find_version, list_stats

    with connect(lists=not name, as_json=as_json) as connection:
        if name:
            find_version(connection, name)  # refuses an unknown name
        found = list_stats(connection, name)
    for one in found:
        for what, yes, no in (("pass_rate", "passed", "not_passed"), ("good_rate", "good", "bad")):
            if count := one[yes] + one[no]:
                interval = wilson(one[yes], count)
                one[what] = {"rate": one[yes] / count, "low": interval.low, "high": interval.high}
    if as_json:
        print_json(found)
    elif found:
        heads = ("PROMPT", "SESSIONS", "CALLS", "FAILED", "IN", "CACHED", "OUT", "GOOD", "BAD", "PASSED", "COST")
        print_table(heads, map(to_stats_row, found))
    else:
        print_note("No prompt has been used yet.")


def to_stats_row(stats: dict[str, Any]) -> tuple[str, ...]:
    """Convert the sums of a version to a row of the table."""
    names = ("sessions", "calls", "failed", "input", "cached", "output", "good", "bad")
    cost = ", ".join(f"{amount:.4f} {currency}" for currency, amount in stats["cost"].items())
    passed = "-"
    if rate := stats.get("pass_rate"):
        of = stats["passed"] + stats["not_passed"]
        passed = f"{stats['passed']}/{of} {rate['low']:.0%}-{rate['high']:.0%}"
    return (f"{stats['name']}@{stats['number']}", *(f"{stats[name]:,}" for name in names), passed, cost or "-")


@prompts.command()
@PROMPT
@limit_option(20)
@click.option("--text", "with_text", is_flag=True, help="Also show each rendered text.")
@AS_JSON
def history(prompt: str, limit: int, with_text: bool, as_json: bool) -> None:
    """List when and where a prompt was rendered, the latest first."""
    from crow_persistence.prompt_versions import list_renders, load_text

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


@prompts.command()
@PROMPT
@click.option("--folder", type=FOLDER, default=".", help="The project's folder.")
def pin(prompt: str, folder: Path) -> None:
    """Use a version of a prompt in the sessions of a project: write it to .crow/prompts.

    Example: crow prompts pin system@3
    """
    place_version(prompt, folder.absolute() / ".crow" / "prompts")
    print_note("It is used in new sessions of this folder once the folder is trusted: run crow trust there.")


@prompts.command()
@PROMPT
def promote(prompt: str) -> None:
    """Use a version of a prompt in all projects that have no own: write it to the user's prompts.

    Example: crow prompts promote system@3
    """
    home = Home.find(os.environ)
    if prompt.partition("@")[0] == "system" and load_own_config(home).prompts.system:
        fail(
            f"{home.config / 'config.toml'} names another file in [prompts] system, which counts. Remove that setting."
        )
    place_version(prompt, home.config / "prompts")
    print_note("It is used in new sessions.")


@prompts.command()
@click.argument("name")
@click.option("--folder", type=FOLDER, default=".", help="The project's folder.")
@click.option("--user", is_flag=True, help="The user's prompts, as `promote` writes them.")
def unpin(name: str, folder: Path, user: bool) -> None:
    """Remove a version that `pin` or, with --user, `promote` has written. It stays in the database."""
    from crow_persistence.prompt_versions import find_number

    place = Home.find(os.environ).config / "prompts" if user else folder.absolute() / ".crow" / "prompts"
    file = place / f"{name}.md.j2"
    template = read_template(file)
    if template is None:
        fail(f"{file} does not exist.")
    with connect() as connection:
        number = find_number(connection, name, template)
    if not number:
        fail(f"{file} is no stored version of {name}, and would be lost. Move it away yourself.")
    file.unlink()
    print_note(f"Removed {file}, which was {name}@{number}.")


def place_version(prompt: str, folder: Path) -> None:
    """Write a version of a prompt to a folder of prompts; print a message and exit if that would lose a template, or
    if the version cannot be rendered."""
    if prompt.partition("@")[0].endswith(".md") or prompt.startswith("skill:"):
        fail(f"{prompt} is a version of a file. Write it there: crow prompts show {prompt} > FILE")
    from crow_core.errors import PromptError
    from crow_persistence.prompt_versions import find_number, find_version, render_again

    try:
        with connect() as connection:
            version = find_version(connection, prompt)
            render_again(connection, version)
            file = folder / f"{version.name}.md.j2"
            before = read_template(file)
            number = 0 if before is None else find_number(connection, version.name, before)
    except PromptError as error:
        fail(f"{prompt} cannot be used: {error}")
    if before is not None and not number:
        fail(f"{file} is no stored version of {version.name}, and would be lost. Move it away, then try again.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.new")
        new.write_text(version.template, "utf-8")
        system.replace_file(new, file)
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}.")
    instead = f", in place of {version.name}@{number}" if number and number != version.number else ""
    click.echo(escape_controls(f"{file} is {version.name}@{version.number}{instead}."))


def read_template(file: Path) -> str | None:
    """Read a template; None if there is no such file. Prints a message and exits if it cannot be read."""
    try:
        return file.read_text("utf-8") if file.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file} cannot be read: {error}.")


def load_own_config(home: Home) -> Config:
    """Read the user's configuration; print a message and exit if it cannot be used."""
    try:
        return load_config(home, os.environ)
    except ConfigError as error:
        fail(str(error))


def to_json(version: Any) -> dict[str, Any]:
    """Convert a version to JSON, for programs, without its template."""
    names = ("name", "number", "hash", "first_seen", "renders", "last")
    values = {name: getattr(version, name) for name in names}
    return {**values, "variables": msgspec.json.decode(version.variables)}
