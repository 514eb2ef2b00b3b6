"""One database: opened at first need, brought up to date, and read and written in whole transactions."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from crow_core.store import StoreError
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from crow_persistence.tables import metadata

BUSY = 30.0
"""Seconds to wait for another process that writes."""


class Database:
    """Where everything is kept. Its methods block: on an event loop, call them in a thread."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.url = make_url(url)
        self.folder = folder or Path(self.url.database or "").parent
        """crow's data folder: backups, and the head of the decisions' chain."""

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
