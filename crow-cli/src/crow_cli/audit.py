"""`crow audit`: who allowed what, and whether anybody has changed what was written down about it."""

import json
import os
import sys
from contextlib import suppress

import click
from crow_core.errors import StoreError

from crow_cli.ending import wrong
from crow_cli.history import AS_JSON, limited, open_database, print_json, print_table, reading, say, when
from crow_cli.screen import spelled_out


@click.group()
def audit() -> None:
    """Who allowed what. The records are a chain that shows when one was tampered with."""


@audit.command()
def verify() -> None:
    """Find what was changed, removed, put in or moved. Exit codes: 0 nothing was, 1 something was."""
    from crow_persistence.audit import read_head, verify

    try:
        database = open_database(os.environ)
        complaints = verify(database)
        with database.begin_read() as connection:
            count = read_head(connection).count
    except StoreError as error:
        wrong(spelled_out(str(error)))
    for complaint in complaints:
        click.echo(spelled_out(complaint))
    if not complaints:
        click.echo(f"All {count:,} records are as they were written." if count else "Nothing has been decided yet.")
    sys.exit(1 if complaints else 0)


@audit.command("list")
@click.option("--session", metavar="ID", default="", help="Only of this session; the beginning of its id will do.")
@limited(50)
@AS_JSON
def list_(session: str, limit: int, as_json: bool) -> None:
    """Who allowed what, and what came of it, the latest first."""
    from crow_persistence.audit import list_decisions

    with reading() as connection:
        rows = list_decisions(connection, session, limit)
    if as_json:
        for row in rows:
            with suppress(ValueError):  # damaged by hand
                row["files"] = json.loads(row["files"])
        print_json(rows)
        return
    if not rows:
        say("Nothing has been decided yet.")
        return
    heads = ("#", "WHEN", "SESSION", "WHAT", "TOOL", "BY")
    cells = [(str(row["number"]), when(row["at"]), row["session"][:8], row["verdict"], row["tool"]) for row in rows]
    who = [f"{row['by']} ({row['scope']})" if row["kind"] == "decision" else "" for row in rows]
    print_table(heads, [(*start, by) for start, by in zip(cells, who, strict=True)])
