"""Save what can be saved from a damaged SQLite file into a new one. The damaged file is never changed."""

import os
import shutil
import sqlite3
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import crow_system as system
from crow_core.errors import StoreError
from sqlalchemy import Column, Connection, Table, and_, delete, exists, func, insert, select, update

from crow_persistence import search
from crow_persistence.database import Database
from crow_persistence.queue import QueueStuck, wait_in_queue
from crow_persistence.sqlite_files import decode_text, lock_file, wal_file
from crow_persistence.tables import messages, metadata, sessions

MAX_FAILURES = 5_000
"""Number of failed reads after which the rest of a table is given up."""
HEADER_SIZE = 100
"""Bytes at the beginning of a SQLite file: https://sqlite.org/fileformat.html"""
MAX_FILE_SIZE = 2**40
"""Bytes that a header is believed to name."""
Range = tuple[int, int]
"""The first and the last row id of a part of a table."""


def repair(damaged: Path, new: Path) -> list[str]:
    """Save the rows of a damaged database into a new file. Return one sentence for each table, about the rows saved and
    lost. Raises StoreError if nothing can be saved."""
    if new.exists():
        raise StoreError(f"{new} is there already. Name a file that is not.")
    try:
        with tempfile.TemporaryDirectory(dir=new.parent, prefix=new.name) as folder:
            copy, built = Path(folder, "damaged.db"), Path(folder, new.name)
            copy_files(damaged, copy)
            with closing(Database(f"sqlite:///{built}")) as database:
                said = save_rows(copy, database)
            system.replace_file(built, new)
    except OSError as error:
        why = f"{damaged} cannot be copied to {new} ({error.strerror})"
        raise StoreError(f"{why}. Name another file, or make room.") from error
    return said


def copy_files(damaged: Path, copy: Path) -> None:
    """Copy a file and its write-ahead log while no other process of crow writes them. Raises OSError."""
    with ExitStack() as stack:
        with suppress(OSError, QueueStuck):  # nobody writes on a read-only disk
            stack.enter_context(wait_in_queue(lock_file(damaged), timeout=10))
        shutil.copyfile(damaged, copy)
        with suppress(FileNotFoundError):
            shutil.copyfile(wal_file(damaged), wal_file(copy))
    fill_up(copy)


def fill_up(file: Path) -> None:
    """Fill a file that was cut off with zeros, to the size that its header names: SQLite does not read it otherwise.

    A page that was cut off becomes zeros as a whole: of half a page, SQLite would read rows that were not written.
    """
    with file.open("r+b") as opened:
        header, there = opened.read(HEADER_SIZE), os.fstat(opened.fileno()).st_size
        page, pages = int.from_bytes(header[16:18]), int.from_bytes(header[28:32])
        if header.startswith(b"SQLite format 3\0") and page and there < page * pages < MAX_FILE_SIZE:
            opened.truncate(there // page * page)
            opened.truncate(page * pages)


def save_rows(damaged: Path, database: Database) -> list[str]:
    """Save the rows of a copy of the damaged file into an empty database. Raises StoreError."""
    with closing(sqlite3.connect(damaged)) as source:
        source.text_factory = decode_text
        try:
            tables = {name for (name,) in source.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        except sqlite3.DatabaseError as error:
            raise StoreError(f"Nothing can be saved: the list of tables is damaged, too ({error}).") from error
        if tables.isdisjoint(metadata.tables):
            raise StoreError("Nothing can be saved: the file has no tables of crow.")
        with database.begin_write() as connection:
            connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
            target = connection.connection.driver_connection
            assert isinstance(target, sqlite3.Connection)
            said = [save_table(source, target, table) for table in metadata.sorted_tables if table.name in tables]
            mended = mend_references(connection)
            index_messages(connection)
    return [*said, f"{mended} rows referred to lost ones: they were linked to others, or left out."] if mended else said


def save_table(source: sqlite3.Connection, target: sqlite3.Connection, table: Table) -> str:
    """Save the rows of a table. Return a sentence about them."""
    there = {row[1] for row in source.execute(f"PRAGMA table_info({table.name})")}
    columns = [column for column in table.columns if column.name in there]
    required = [at for at, column in enumerate(columns) if not column.nullable]
    names, places = ", ".join(f'"{column.name}"' for column in columns), ", ".join("?" * len(columns))
    add = f'INSERT OR IGNORE INTO "{table.name}" ({names}) VALUES ({places})'
    saved, refused, lost = 0, 0, list[Range]()
    for row in read_rows(source, table.name, names, lost):
        if any(row[at] is None for at in required):
            refused += 1
        else:
            saved += target.execute(add, [to_valid_text(value) for value in row]).rowcount
    parts = [f"row {first}" if first == last else f"rows {first} to {last}" for first, last in sorted(lost)]
    faults = [f"{', '.join(parts)} cannot be read"] if parts else []
    faults += [f"{refused} rows lack a value"] if refused else []
    return f"{table.name}: {'; '.join([f'{saved:,} rows saved', *faults])}."


def to_valid_text(value: Any) -> Any:
    """Replace what is not UTF-8 in a text."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if isinstance(value, str) else value


def read_rows(source: sqlite3.Connection, table: str, columns: str, lost: list[Range]) -> Iterator[list[Any]]:
    """Yield the rows of a table that can be read. Add the ranges of row ids that cannot to `lost`.

    A damaged page is approached from both sides; the rows between are divided and tried again.
    """
    failures = 0
    ranges: deque[Range] = deque([(1, find_last_row(source, table))])
    while ranges:
        first, last = ranges.popleft()
        for order in ("ASC", "DESC"):
            wanted = f'SELECT rowid, {columns} FROM "{table}" WHERE rowid BETWEEN ? AND ? ORDER BY rowid {order}'
            try:
                for row, *values in source.execute(wanted, (first, last)):
                    yield values
                    first, last = (row + 1, last) if order == "ASC" else (first, row - 1)
                break
            except sqlite3.DatabaseError:
                failures += 1
        else:
            middle = (first + last) // 2
            if first >= last or failures > MAX_FAILURES:
                lost.append((first, max(first, last)))
            else:
                ranges += [(first, middle), (middle + 1, last)]


def find_last_row(source: sqlite3.Connection, table: str) -> int:
    """Return the last row id of a table, or a number that is not smaller."""
    for wanted in (
        f'SELECT max(rowid) FROM "{table}"',
        f"SELECT seq FROM sqlite_sequence WHERE name = '{table}'",
    ):
        with suppress(sqlite3.DatabaseError):
            if found := source.execute(wanted).fetchone():
                return found[0] or 0
    return 1_000_000


def mend_references(connection: Connection) -> int:
    """Link rows that refer to lost rows to others, or leave them out. Return the number of these rows."""
    mended = 0
    older, parent = messages.alias(), messages.alias()
    before = select(func.max(older.c.id)).where(older.c.session == messages.c.session, older.c.id < messages.c.id)
    orphaned = and_(messages.c.parent.is_not(None), ~exists().where(parent.c.id == messages.c.parent))
    latest = select(func.max(messages.c.id)).where(messages.c.session == sessions.c.number)
    headless = and_(sessions.c.head.is_not(None), ~exists().where(messages.c.id == sessions.c.head))
    nameless = ~exists().where(sessions.c.number == messages.c.session)
    for number in connection.scalars(select(messages.c.session).where(nameless).distinct()).all():
        connection.execute(insert(sessions).values(to_nameless_session(connection, number)))
        mended += 1
    mended += connection.execute(update(messages).where(orphaned).values(parent=before.scalar_subquery())).rowcount
    mended += connection.execute(update(sessions).where(headless).values(head=latest.scalar_subquery())).rowcount
    for table in metadata.sorted_tables:
        for key in table.foreign_keys:
            column: Column[Any] = key.parent
            other = key.column.table.alias()
            lost = and_(column.is_not(None), ~exists().where(other.c[key.column.name] == column))
            change = update(table).values({column: None}) if column.nullable else delete(table)
            mended += connection.execute(change.where(lost)).rowcount
    return mended


def to_nameless_session(connection: Connection, number: int) -> dict[str, Any]:
    """Return the row of a session that has only messages left."""
    of = messages.c.session == number
    head, begun, ended = connection.execute(
        select(func.max(messages.c.id), func.min(messages.c.at), func.max(messages.c.at)).where(of)
    ).one()
    names = {"id": f"repaired-{number}", "cwd": "", "roots": "[]", "options": "{}", "title": "(repaired)"}
    return {**names, "number": number, "head": head, "created": begun, "updated": ended}


def index_messages(connection: Connection) -> None:
    """Index all messages for the full-text search."""
    every = connection.execute(select(sessions.c.number, sessions.c.cwd)).all()
    for number, cwd in every:
        rows = connection.execute(select(messages).where(messages.c.session == number)).all()
        search.index_entries(connection, number, cwd, [(row.id, search.read_entry(row.body)) for row in rows])
