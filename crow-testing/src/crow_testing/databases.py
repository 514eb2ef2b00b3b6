"""Fixtures of empty databases of each kind."""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from crow_persistence.database import Database
from sqlalchemy import create_engine, make_url, text

from crow_testing.skipping import unable

POSTGRES = os.environ.get("CROW_TEST_POSTGRES", "")
"""A server on which databases may be created: postgresql+psycopg://postgres@127.0.0.1:PORT/postgres"""


@pytest.fixture
def postgres() -> Iterator[str]:
    """Yield the URL of a new, empty PostgreSQL database."""
    if not POSTGRES:
        unable("No PostgreSQL to test with; CROW_TEST_POSTGRES=postgresql+psycopg://USER@HOST:PORT/postgres names one.")
    server = create_engine(POSTGRES, isolation_level="AUTOCOMMIT")
    name = f"crow_{uuid4().hex}"
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield make_url(POSTGRES).set(database=name).render_as_string(hide_password=False)
    with server.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    server.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Yield an empty database of each kind; its folder is `tmp_path`."""
    kind: str = request.param
    url = f"sqlite:///{tmp_path / 'crow.db'}" if kind == "sqlite" else request.getfixturevalue("postgres")
    database = Database(url, tmp_path)
    yield database
    database.close()
