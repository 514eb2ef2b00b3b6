"""`crow audit`: list the decisions about permissions, verify that nobody has changed them, and repair their chain."""

import json
import os
import sys
from contextlib import suppress
from typing import Any

import click
from crow_core.errors import StoreError
from crow_core.text import escape_controls

from crow_cli.console import AS_JSON, format_time, limit_option, print_json, print_note, print_table, shorten
from crow_cli.menu import confirm
from crow_cli.process import fail
from crow_cli.storage import connect, open_database

MAX_ABOUT = 60
"""Characters of a command, path or host in the list; `--json` has it whole."""


@click.group()
def audit() -> None:
    """List, verify and repair the decisions about permissions. Each record is chained to the one before it."""


@audit.command()
def verify() -> None:
    """Find records that were changed, removed, inserted, moved or forged.

    Each machine signs its records with a key of its own: the file audit.key in crow's data folder.

    Exit codes: 0 no such record was found, 1 some were, or the key is missing, replaced or open to others.
    """
    from crow_persistence.audit import examine, list_repairs, read_head

    try:
        database = open_database(os.environ)
        found = examine(database)
        with database.begin_read() as connection:
            count, repairs = read_head(connection).count, list_repairs(connection)
    except StoreError as error:
        fail(escape_controls(str(error)))
    for number, at, faults in repairs:
        click.echo(escape_controls(f"Record {number} is a repair of {format_time(at)}. Before it: {faults}"))
    for fault in found.faults:
        click.echo(escape_controls(fault))
    for key, number in sorted(found.elsewhere.items()):
        there = "`crow audit verify` where that key is checks their signatures"
        click.echo(escape_controls(f"Cannot be checked here (key {key}): {number:,} records; {there}."))
    if found.faults:
        sys.exit(1)
    since, others = ", or sealed by a repair" if repairs else "", sum(found.elsewhere.values())
    every = f"All {count - others:,} other records" if others else f"All {count:,} records"
    click.echo(f"{every} are as they were written{since}." if count else "Nothing has been decided yet.")
    if found.signed:
        click.echo(f"{found.signed:,} are signed with the key {found.key} of this machine.")
    if found.unsigned:
        click.echo(f"{found.unsigned:,} are unsigned: they are older than the key.")


@audit.command()
@click.option("-y", "--yes", is_flag=True, help="Repair without asking.")
def repair(yes: bool) -> None:
    """Go on after a break of the chain: add a record that says where and why it was broken.

    Nothing is hidden: `crow audit verify` accepts the chain again, and prints what the record says.
    """
    from crow_persistence.audit import repair, verify

    try:
        database = open_database(os.environ)
        if not (faults := verify(database)):
            print_note("The chain is not broken.")
            return
        click.echo(escape_controls("\n".join(faults)))
        if not yes and not confirm("Add a record that says so, and go on from here?", err=True):
            sys.exit(1)
        repair(database)
    except StoreError as error:
        fail(escape_controls(str(error)))
    print_note("A record that says so was added.")


@audit.command("list")
@click.option(
    "--session",
    metavar="ID",
    default="",
    help="List the records of this session only; the beginning of its id is enough.",
)
@limit_option(50)
@AS_JSON
def list_(session: str, limit: int, as_json: bool) -> None:
    """List decisions and the results of the tool calls, the latest first, with the command, path or host of each."""
    from crow_persistence.audit import list_decisions
    from crow_persistence.audited_calls import describe_calls

    with connect(lists=True, as_json=as_json) as connection:
        rows = list_decisions(connection, session, limit)
        for row, about in zip(rows, describe_calls(connection, rows), strict=True):
            row["about"] = about
    if as_json:
        for row in rows:
            with suppress(ValueError):  # the row may be damaged
                row["files"] = json.loads(row["files"])
        print_json(rows)
        return
    if not rows:
        print_note("Nothing has been decided yet.")
        return
    heads = ("#", "WHEN", "SESSION", "WHAT", "TOOL", "ABOUT", "BY")
    print_table(heads, [to_row(row) for row in rows])


def to_row(row: dict[str, Any]) -> tuple[str, ...]:
    """Convert a record to a row of the table."""
    by = {"decision": f"{row['by']} ({row['scope']})", "repair": row["by"]}.get(row["kind"], "")
    about = shorten(row["about"], MAX_ABOUT)
    return (str(row["number"]), format_time(row["at"]), row["session"][:8], row["verdict"], row["tool"], about, by)
