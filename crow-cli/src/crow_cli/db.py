"""`crow db`: print the path, the size and the contents of the database, and check it for damage."""

import os
import sys

import click
from crow_core.errors import ConfigError, StoreError
from crow_core.settings.config import Home, get_database_url, load_config

from crow_cli.console import AS_JSON, escape_controls, print_json
from crow_cli.process import fail
from crow_cli.storage import open_database


@click.group()
def db() -> None:
    """Inspect the database of sessions."""


@db.command()
def path() -> None:
    """Print the path or URL of the database, also before it exists."""
    from crow_persistence.database import Database  # imports SQLAlchemy, which is slow to load

    home = Home.find(os.environ)
    try:
        database = Database(get_database_url(load_config(home, os.environ), home), home.data)
    except (ConfigError, StoreError) as error:
        fail(escape_controls(str(error)))
    click.echo(escape_controls(database.name))


@db.command()
@AS_JSON
def info(as_json: bool) -> None:
    """Print the path, revision, size and row counts of the database."""
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
        fail(escape_controls(str(error)))
    if as_json:
        print_json({**about, "rows": rows})
        return
    lines = {**about, "bytes": f"{about['bytes']:,}", **{name: f"{count:,}" for name, count in rows.items()}}
    for name, value in lines.items():
        click.echo(f"{name:<10} {escape_controls(str(value))}")


@db.command()
def check() -> None:
    """Check the database for damage. Exit codes: 0 none was found, 1 some was."""
    from crow_persistence.checks import check, count_rows

    try:
        database = open_database(os.environ)
        if complaints := check(database):
            click.echo("\n".join(map(escape_controls, complaints)))
            sys.exit(1)
        with database.begin_read() as connection:
            contents = ", ".join(f"{count:,} {name}" for name, count in count_rows(connection).items() if count)
    except StoreError as error:
        fail(escape_controls(str(error)))
    click.echo(f"{escape_controls(database.name)} is well: {contents or 'there is nothing in it yet'}.")
