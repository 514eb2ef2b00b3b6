"""Any value in any column: readable rows are read, others raise StoreError, and nothing else happens."""

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from crow_core.errors import StoreError
from crow_persistence import loader, requests, search
from crow_persistence.checks import check
from crow_persistence.database import Database
from crow_persistence.tables import calls, metadata, sessions
from sqlalchemy import select

HARM: tuple[Any, ...] = (b"\xff\xfe", "", "no", "[1]", '{"crow": 1}', "9" * 30, -1, 0, 2**62, 0.5)
QUICK = HARM[:2]
"""The values that are tried in every column without --slow, too."""


@pytest.fixture
def used(tmp_path: Path, earlier: Callable[[str], None], database: Database) -> Database:
    """Return a database with rows in every table."""
    earlier("0002")
    return database


def read_all(database: Database) -> None:
    """Read everything in a database. Raises StoreError."""
    with database.begin_read() as connection:
        for row in connection.execute(select(sessions)):
            with suppress(StoreError):
                loader.load_session(connection, row)
        for id in connection.scalars(select(calls.c.id)):
            with suppress(StoreError):
                requests.rebuild_request(connection, id)
        loader.list_sessions(connection, "", "", 100)
        requests.list_model_calls(connection)
        search.search(connection, "the")
    check(database)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)  # PostgreSQL enforces column types
@pytest.mark.parametrize(
    "harms", [QUICK, pytest.param(HARM[len(QUICK) :], marks=pytest.mark.slow)], ids=["quick", "rest"]
)
@pytest.mark.parametrize("table", sorted(metadata.tables))
def test_any_value_in_any_column_raises_nothing_but_store_error(used: Database, table: str, harms: tuple[Any, ...]):
    read_all(used)
    file = used.file
    assert file
    columns = [column.name for column in metadata.tables[table].columns]
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        rows = [row for (row,) in connection.execute(f"SELECT rowid FROM {table} ORDER BY rowid DESC LIMIT 1")]
        for column in columns:
            for row in rows:
                before = connection.execute(f'SELECT "{column}" FROM {table} WHERE rowid = ?', (row,)).fetchone()
                for harm in harms:
                    with suppress(sqlite3.IntegrityError):
                        connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE rowid = ?', (harm, row))
                        try:
                            read_all(used)
                        except StoreError:
                            pass
                        except Exception as error:
                            raise AssertionError(f"{harm!r} in {table}.{column}") from error
                        key = harm if column == "number" and table in ("sessions", "decisions") else row
                        key = harm if column == "id" and table in ("messages", "prompts") else key
                        key = harm if column in ("session", "message") and table in ("drafts", "renders") else key
                        connection.execute(f'UPDATE {table} SET "{column}" = ? WHERE rowid = ?', (*before, key))
