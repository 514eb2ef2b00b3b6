"""`crow import`: read the histories of other agents into the database."""

import os
from pathlib import Path

import click
from crow_agent.settings.config import get_database_url, load_config
from crow_agent.settings.home import Home
from crow_cli.console import AS_JSON, print_json
from crow_cli.process import fail
from crow_core.errors import ConfigError, StoreError
from crow_core.text import escape_controls

AGENTS = ("claude-code", "codex", "opencode", "pi", "llm", "vibe", "kimi-code", "goose", "zed")


@click.command("import")
@click.argument("agent", type=click.Choice(AGENTS))
@click.argument("path", type=click.Path(path_type=Path), required=False)
@AS_JSON
def import_(agent: str, path: Path | None, as_json: bool) -> None:
    """Read the history of another agent: a file, or a folder with its files. By default where that agent keeps them.

    The sessions can be listed, searched, shown, exported, continued and asked again. Nothing in them is executed, and
    they decide no permissions. System prompts, tool lists, tokens and costs are not imported. Sessions that were
    imported before get what is new since; those that were continued in crow are left as they are, and a fork gets it.
    """
    from crow_persistence.sql_store import BlockingStore

    from crow_eval.histories.importing import READERS, import_history

    place = path or Path(os.environ.get("HOME") or Path.home()) / READERS[agent][1]
    if not place.exists():
        fail(f"there is no {escape_controls(str(place))}. Give the file or the folder of the history of {agent}.")
    home = Home.find(os.environ)
    try:
        store = BlockingStore(get_database_url(load_config(home, os.environ), home), home.data)
        try:
            found = import_history(store, agent, place)
        finally:
            store.database.close()
    except (ConfigError, StoreError) as error:
        fail(escape_controls(str(error)))
    except OSError as error:
        fail(escape_controls(f"{place} cannot be read: {error}."))
    if as_json:
        new = {"sessions": found.sessions, "grown": found.grown, "forks": found.forks}
        counts = {**new, "known": found.known, "messages": found.messages}
        print_json({**counts, "left_out": dict(found.left_out)})
        return
    number = len(found.sessions) + len(found.grown) + len(found.forks)
    click.echo(f"Imported {found.messages:,} messages of {number:,} sessions.")
    if found.grown:
        click.echo(f"{len(found.grown):,} had been imported before, and got what is new.")
    if found.forks:
        ids = ", ".join(id[:8] for id in found.forks)
        click.echo(f"{len(found.forks):,} had been continued in crow, and forks got what is new: {ids}.")
    if found.known:
        click.echo(f"{found.known:,} had been imported before, and have nothing new.")
    for what, count in found.left_out.most_common():
        click.echo(escape_controls(f"Left out: {count:,} {what}."))
