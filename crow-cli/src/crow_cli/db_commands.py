"""`crow db`: show, check, prune, back up, restore and repair the database."""

import os
import sys
from datetime import datetime, timedelta
from pathlib import Path

import click
from crow_agent.settings.config import get_database_url, load_config
from crow_agent.settings.home import Home
from crow_core.errors import ConfigError, StoreError
from crow_core.text import escape_controls

from crow_cli.console import AS_JSON, format_time, print_json, print_note, print_table, shorten_path
from crow_cli.process import fail
from crow_cli.storage import open_database


@click.group()
def db() -> None:
    """Inspect, prune, back up, restore and repair the database of sessions."""


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
    copies = [str(copy) for copy in (*database.list_copies(), *database.list_replaced())]
    if as_json:
        print_json({**about, "rows": rows, "copies": copies})
        return
    lines = {**about, "bytes": f"{about['bytes']:,}", **{name: f"{count:,}" for name, count in rows.items()}}
    for name, value in lines.items():
        click.echo(f"{name:<10} {escape_controls(str(value))}")
    for copy in copies:
        click.echo(f"{'copy':<10} {escape_controls(copy)}")


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


@db.command()
@click.option(
    "--older-than", metavar="DAYS", type=click.IntRange(0, 100_000), help="Sessions not used for so many days."
)
@click.option("--folder", type=click.Path(path_type=Path), help="Sessions of this folder, or of one below it.")
@click.option("--max-size", metavar="MB", type=click.IntRange(0), help="Only as many as have to go for this size.")
@click.option("-y", "--yes", is_flag=True, help="Delete them.")
def prune(older_than: int | None, folder: Path | None, max_size: int | None, yes: bool) -> None:
    """List the sessions that would be deleted; with --yes, delete them and free their space.

    The options narrow each other; the least recently used sessions go first. The decisions about permissions stay, and
    so do entries that forks of other sessions use. Sessions that are open stay. The copies that updates of crow have
    made of the database are deleted, too, as they hold all sessions.
    """
    from crow_persistence.pruning import choose_sessions, delete_sessions, measure_sessions

    if older_than is None and folder is None and max_size is None:
        fail("say which sessions: --older-than DAYS, --folder FOLDER or --max-size MB.")
    before = None if older_than is None else datetime.now() - timedelta(days=older_than)
    try:
        database = open_database(os.environ)
        with database.begin_read() as connection:
            chosen = choose_sessions(
                connection,
                before=before and int(before.timestamp() * 1000),
                folder=folder and folder.expanduser().absolute(),
                max_bytes=None if max_size is None else max_size * 1_000_000,
            )
            size = 0 if max_size is None else measure_sessions(connection)
        copies = database.list_copies()
        if not chosen and max_size is not None and size <= max_size * 1_000_000:
            print_note(f"All sessions take about {size:,} bytes, no more than {max_size:,} MB: none has to go.")
        elif not chosen:
            where = f" in {folder} or below it" if folder else ""
            old = f"No session{where} was last used more than {older_than} days ago."
            print_note(f"There is no session{where}." if older_than is None else old)
        for copy in copies if yes else ():
            copy.unlink()
        for copy in copies:
            what = "Deleted the copy of the database that an update has made"
            print_note(f"{what if yes else 'With --yes, a copy of the database goes, too'}: {copy}.")
        if not chosen:
            return
        if not yes:
            heads = ("ID", "USED", "BYTES", "FOLDER", "TITLE")
            print_table(
                heads,
                [
                    (
                        one.id[:8],
                        format_time(one.updated),
                        f"{size:,}",
                        shorten_path(one.cwd, 24),
                        one.title or "(no title)",
                    )
                    for one, size in chosen
                ],
            )
            freed = sum(size for _, size in chosen)
            print_note(f"{len(chosen)} sessions, about {freed:,} bytes. Nothing was deleted; --yes deletes them.")
            return
        results = list(delete_sessions(database, [one.id for one, _ in chosen]))
        for reason in filter(None, (reason for _, reason in results)):
            print_note(reason)
        print_note(f"Deleted {sum(not reason for _, reason in results)} sessions.")
        database.vacuum()
    except (StoreError, OSError) as error:
        fail(escape_controls(str(error)))


@db.command()
@click.argument("file", type=click.Path(path_type=Path))
def backup(file: Path) -> None:
    """Copy the database to a new FILE, as last committed. Sessions may go on meanwhile."""
    try:
        open_database(os.environ).back_up(file.expanduser().absolute())
    except StoreError as error:
        fail(str(error))
    click.echo(escape_controls(f"Copied to {file}. `crow db restore {file}` puts it in the place of the database."))


@db.command()
@click.argument("file", type=click.Path(path_type=Path))
def restore(file: Path) -> None:
    """Put a copy of FILE, a backup, in the place of the database, while no crow runs.

    FILE is checked before, and stays. The present database and its write-ahead log are moved aside, and named.
    """
    from crow_persistence.database import Database
    from crow_persistence.restore import restore

    home = Home.find(os.environ)
    try:
        database = Database(get_database_url(load_config(home, os.environ), home), home.data)
        moved = restore(database, file.expanduser().absolute())
    except (ConfigError, StoreError) as error:
        fail(escape_controls(str(error)))
    click.echo(escape_controls(f"Restored {database.name} from {file}."))
    for old in moved:
        click.echo(escape_controls(f"The file that was there is now {old}."))


@db.command()
@click.argument("new", metavar="NEW", type=click.Path(path_type=Path))
def repair(new: Path) -> None:
    """Save what can be read of a damaged SQLite database into the file NEW, and say what was lost.

    The damaged file is not changed.
    """
    from crow_persistence.repair import repair

    try:
        database = open_database(os.environ)
        if not database.file:
            fail("crow repairs SQLite files. Restore a PostgreSQL database from a copy that pg_dump made.")
        said = repair(database.file, new.expanduser().absolute())
    except StoreError as error:
        fail(str(error))
    click.echo(escape_controls("\n".join([*said, f"`crow db restore {new}` puts it in the place of the database."])))
