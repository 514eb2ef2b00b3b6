"""Fixtures of the tests: empty databases, and dumps of earlier revisions."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from crow_persistence.database import Database
from crow_testing.databases import database as database
from crow_testing.databases import postgres as postgres
from crow_testing.fixtures import anyio_backend as anyio_backend
from sqlalchemy import create_engine

DATABASES = Path(__file__).parent / "databases"


@pytest.fixture
def earlier(database: Database) -> Callable[[str], None]:
    """Return a function that loads the dump of an earlier revision into the empty database."""

    def load(revision: str) -> None:
        kind = "sqlite" if database.file else "postgresql"
        dump = (DATABASES / f"{revision}.{kind}.sql").read_text()
        if database.file:
            with closing(sqlite3.connect(database.file)) as connection:
                connection.executescript(dump)
        else:
            engine = create_engine(database.url)
            with engine.begin() as connection:
                connection.connection.cursor().execute(dump)
            engine.dispose()

    return load
