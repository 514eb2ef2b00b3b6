"""`crow db`: where everything is kept, how much of it there is, and whether it is whole."""

import os
import sys

import click
from crow_core.errors import ConfigError, StoreError
from crow_core.settings.config import Home, get_database_url, load_config

from crow_cli.ending import wrong
from crow_cli.history import AS_JSON, open_database, print_json
from crow_cli.screen import spelled_out


@click.group()
def db() -> None:
    """The database that everything is kept in."""


@db.command()
def path() -> None:
    """Print where it is, or will be."""
    from crow_persistence.database import Database  # as in history

    home = Home.find(os.environ)
    try:
        database = Database(get_database_url(load_config(home, os.environ), home), home.data)
    except (ConfigError, StoreError) as error:
        wrong(spelled_out(str(error)))
    click.echo(spelled_out(database.name))


@db.command()
@AS_JSON
def info(as_json: bool) -> None:
    """Print where it is, its revision and its size, and how much is in it."""
    from crow_persistence.checks import count_rows, measure_size
    from crow_persistence.database import read_revision

    try:
        database = open_database(os.environ)
        with database.begin_read() as connection:
            rows = count_rows(connection)
            about = {
                "path": database.name,
                "revision": read_revision(connection),
                "bytes": measure_size(connection, database),
            }
    except StoreError as error:
        wrong(spelled_out(str(error)))
    if as_json:
        print_json({**about, "rows": rows})
        return
    lines = {**about, "bytes": f"{about['bytes']:,}", **{name: f"{count:,}" for name, count in rows.items()}}
    for name, value in lines.items():
        click.echo(f"{name:<10} {spelled_out(str(value))}")


@db.command()
def check() -> None:
    """Look whether all is as it was written. Exit codes: 0 it is, 1 something is not."""
    from crow_persistence.checks import check, count_rows

    try:
        database = open_database(os.environ)
        if complaints := check(database):
            click.echo("\n".join(map(spelled_out, complaints)))
            sys.exit(1)
        with database.begin_read() as connection:
            held = ", ".join(f"{count:,} {name}" for name, count in count_rows(connection).items() if count)
    except StoreError as error:
        wrong(spelled_out(str(error)))
    click.echo(f"{spelled_out(database.name)} is well: {held or 'there is nothing in it yet'}.")
