"""One database: opened at first need, brought up to date, and read and written in whole transactions."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.engine import make_url

from crow_persistence.tables import metadata

BUSY = 30.0
"""Seconds to wait for another process that writes."""


class Database:
    """Where everything is kept. Its methods block: on an event loop, call them in a thread."""

    def __init__(self, url: str) -> None:
        self.url = make_url(url)

    @cached_property
    def engine(self) -> Engine:
        engine = create_engine(self.url)
        metadata.create_all(engine)
        return engine

    @contextmanager
    def reading(self) -> Generator[Connection]:
        """A connection that sees one state of the database. Raises StoreError."""
        with self.engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Generator[Connection]:
        """A transaction, committed at the end of the block; nothing else writes meanwhile (SQLite). Raises StoreError."""
        with self.engine.begin() as connection:
            yield connection

    def close(self) -> None:
        self.engine.dispose()
