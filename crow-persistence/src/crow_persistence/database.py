"""One database: opened at first need, brought up to date, and read and written in whole transactions."""

import os
import sqlite3
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from errno import EACCES
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, NoReturn

from crow_core.errors import StoreError
from sqlalchemy import (
    URL,
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    column,
    create_engine,
    event,
    insert,
    inspect,
    select,
    table,
    text,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from crow_persistence import search
from crow_persistence.tables import metadata

HEAD = "0001"
"""The newest revision in `migrations`; a test keeps it so."""
SETTINGS: dict[str, dict[str, str]] = {
    "sqlite": {"timeout": "30"},
    "postgresql+psycopg": {"connect_timeout": "10", "tcp_user_timeout": "30000", "options": "-c lock_timeout=30s"},
}
"""What a URL asks for where it does not say otherwise: nobody waits for more than half a minute."""
LONG, SOON = 1.0, 5.0
"""Seconds. Who has waited longer than the first, and failed, has waited for all that is written within the second: a
turn that has much to write ends as soon as the first of it has failed."""
LOCK = 0x63726F77_6462
"""Of PostgreSQL's advisory locks, the one that is held while tables are made or changed."""
FAULTS = {
    "BUSY": "is held by another program. Close that one, then try again",
    "FULL": "cannot grow, as its disk is full. Make room, then try again",
    "READONLY": "cannot be written. Make the file, its folder and its disk writable, then try again",
    "CANTOPEN": "cannot be opened. It must be a file that you may read and write, in a folder where you may write",
    "NOTADB": "is no SQLite database, or its beginning is damaged. Move it away, or name another in [database] url",
    "CORRUPT": "is damaged; `crow db check` says where. Move it and its -wal away, and put a copy in its place if any",
    "IOERR": "could not be read or written. Look whether its disk is full or failing, then try again",
}
"""What SQLite's error codes mean for a person: the end of a sentence that begins with the file."""


class Database:
    """Where everything is kept. Its methods block: on an event loop, call them in a thread; any number may at once.

    All that a database can do wrong is a StoreError, and none is for good: when its cause is gone, the next call works.
    """

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.url = complete(url)
        self.file = Path(self.url.database or "") if self.url.drivername == "sqlite" else None
        """None for PostgreSQL."""
        self.folder = folder or (self.file or Path("unknown")).parent
        """crow's data folder: copies made before an update, and the head of the decisions' chain."""
        self._lock = Lock()
        self._engine: Engine | None = None
        self._hurried = 0.0
        """Until when nobody waits for a database that others hold."""
        self._opened: tuple[int, int] | None = None
        self._journal: tuple[int, int] | None = None
        """What the open file was, and the journal beside it."""

    @property
    def name(self) -> str:
        """What a person knows it by: the file, or the address without what may be secret in it."""
        return str(self.file or self.url.set(query={}))

    @contextmanager
    def reading(self) -> Generator[Connection]:
        """A connection that sees one state of the database and changes nothing. Raises StoreError."""
        options: dict[str, Any] = (
            {} if self.file else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        )
        with self._transaction(**options) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Generator[Connection]:
        """A transaction, committed at the end of the block; on SQLite no one else writes meanwhile. Raises StoreError.

        What was learned of rows is void when `connection.engine` is another than it was: the file was replaced.
        """
        with self._transaction(begin="BEGIN IMMEDIATE", hurried=monotonic() < self._hurried) as connection:
            yield connection

    def close(self) -> None:
        """Give back what is open; the next use opens it again."""
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    @contextmanager
    def _transaction(self, *, hurried: bool = False, **options: Any) -> Generator[Connection]:
        since = monotonic()
        try:
            with self._ready().connect().execution_options(hurried=hurried, **options) as connection:
                try:
                    with connection.begin():
                        yield connection
                except DBAPIError:
                    connection.invalidate()  # whatever is wrong with it: the next one is opened afresh
                    raise
                if hurried:
                    connection.invalidate()  # the next one is patient again
                    self._hurried = 0.0
        except DBAPIError as error:
            if monotonic() - since > LONG:
                self._hurried = monotonic() + SOON
            raise StoreError(self._explained(error)) from error

    def _ready(self) -> Engine:
        """The engine of a database that is there and up to date. Raises StoreError, DBAPIError."""
        with self._lock:
            if self._engine is not None and self.file and identity(self.file) != self._opened:
                self._let_go(self.file)
            if self._engine is None:
                self._engine = self._open()
                if self.file:
                    self._opened, self._journal = identity(self.file), identity(journal(self.file))
            return self._engine

    def _let_go(self, file: Path) -> NoReturn:
        """What was open is there no more: never write into it, nor open another file with its journal."""
        wal = journal(file)
        if file.exists() and self._journal and identity(wal) == self._journal:
            raise StoreError(
                f"{file} was replaced while it was open, and {wal.name} beside it belongs to the file before. "
                f"Remove that and {file.name}-shm, then try again."
            )
        self.close()
        raise StoreError(
            f"{file} was moved, deleted or replaced while it was open. Nothing was written now; try again, "
            "and crow goes on with the file that is there then, or begins a new one."
        )

    def _open(self) -> Engine:
        if self.file:
            self._make(self.file)
        try:
            engine = create_engine(self.url, pool_pre_ping=not self.file, hide_parameters=True)
        except ImportError as error:
            raise StoreError(
                f"{self.name} needs a driver ({error}). Install it: pip install 'crow-persistence[postgres]'"
            ) from error
        if self.file:
            event.listen(engine, "connect", prepare)
        event.listen(engine, "begin", begin)
        try:
            with engine.begin() as connection:
                stale = self._is_stale(connection)
            if stale:
                self._update(engine)
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _make(self, file: Path) -> None:
        """A new database can be read by its owner alone, from its first moment on. Raises StoreError."""
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            file.parent.mkdir(0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # it is not opened then: to close it would end SQLite's locks on it
                os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
            if not os.access(file, os.R_OK | os.W_OK, effective_ids=True):  # SQLite would make a journal like it
                raise PermissionError(EACCES, "it is closed to you")
            if file.stat().st_mode & 0o077:
                file.chmod(file.stat().st_mode & 0o700)
        except OSError as error:
            raise StoreError(f"{file} {FAULTS['CANTOPEN']} ({error.strerror}).") from error

    def _is_stale(self, connection: Connection) -> bool:
        """Whether its tables must be made or changed first. Raises StoreError when they are not ours to change."""
        found = revision(connection)
        others = sorted(set(inspect(connection).get_table_names()) - {"alembic_version"}) if found is None else []
        if others:  # which another crow may just have made
            found = revision(connection)
        if (others and found is None) or (found and not found.isdecimal()):
            raise StoreError(
                f"{self.name} belongs to another program ({', '.join(others[:3]) or found}). "
                "Name a database of crow's own in [database] url."
            )
        if found is not None and found > HEAD:
            raise StoreError(
                f"{self.name} was written by a newer crow (its revision is {found}, this one knows {HEAD}). "
                "Update crow, or name another database in [database] url."
            )
        return found != HEAD

    def _update(self, engine: Engine) -> None:
        """Bring the tables up to date, once, however many processes start together."""
        with engine.connect().execution_options(begin="BEGIN IMMEDIATE") as connection, connection.begin():
            if not self.file:
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
            if revision(connection) is None:
                create(connection)
            elif self._is_stale(connection):
                from crow_persistence.migrations import upgrade  # Alembic is slow to import, and rarely needed

                if self.file:
                    copy(self.file, self.folder / f"{self.file.name}.before-{HEAD}")
                upgrade(connection)

    def _explained(self, error: DBAPIError) -> str:
        """A driver's error as a sentence; it quotes nothing of what was written."""
        if self.file:
            _, _, name = str(getattr(error.orig, "sqlite_errorname", "")).partition("_")
            reason = FAULTS.get(name.partition("_")[0])
            return f"{self.name} {reason} ({error.orig})." if reason else f"{self.name}: {error.orig}."
        diagnosis = getattr(error.orig, "diag", None)
        if diagnosis is not None and diagnosis.message_primary:
            return f"PostgreSQL refused ({self.name}): {diagnosis.message_primary}. Mend that, then try again."
        reason = " ".join(str(error.orig).split())
        return f"PostgreSQL cannot be reached ({self.name}): {reason}. Check [database] url, and that the server runs."


def complete(url: str) -> URL:
    """A database's URL with all that it leaves unsaid. Raises StoreError."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        parsed = URL.create("unknown")
    match parsed.drivername:
        case "sqlite" | "sqlite+pysqlite" if parsed.database not in (None, "", ":memory:") and not parsed.host:
            parsed = parsed.set(drivername="sqlite", database=str(Path(parsed.database).expanduser().absolute()))
        case "postgres" | "postgresql" | "postgresql+psycopg":
            parsed = parsed.set(drivername="postgresql+psycopg")
        case _:
            raise StoreError(
                f"[database] url {parsed.render_as_string()} is of no use. "
                "Give sqlite:////folder/file.db or postgresql+psycopg://user@host/database."
            )
    return parsed.set(query={**SETTINGS[parsed.drivername], **parsed.query})


def prepare(driver: Any, _: Any) -> None:
    """Set up a new connection to SQLite."""
    driver.isolation_level = None  # transactions begin where we say so
    driver.text_factory = readable
    try:
        driver.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError:
        # SQLite does not wait here when another process does the same to a new file: so wait until that is done.
        driver.execute("BEGIN IMMEDIATE")
        driver.execute("ROLLBACK")
        driver.execute("PRAGMA journal_mode = WAL")
    driver.execute("PRAGMA synchronous = NORMAL")
    driver.execute("PRAGMA foreign_keys = ON")


def readable(data: bytes) -> str:
    """A text of SQLite's. Where it is damaged it can still be read, but for what is no UTF-8 in it."""
    return data.decode("utf-8", "surrogateescape")


def begin(connection: Connection) -> None:
    options, is_sqlite = connection.get_execution_options(), connection.dialect.name == "sqlite"
    if options.get("hurried"):
        connection.exec_driver_sql("PRAGMA busy_timeout = 0" if is_sqlite else "SET LOCAL lock_timeout = 1")
    if is_sqlite:  # PostgreSQL's driver begins by itself
        connection.exec_driver_sql(options.get("begin", "BEGIN"))


def revision(connection: Connection) -> str | None:
    """Which of the revisions in `migrations` the tables are of; None when there are none."""
    version = table("alembic_version", column("version_num"))
    if not connection.dialect.has_table(connection, version.name):
        return None
    return connection.scalar(select(version.c.version_num))


def create(connection: Connection) -> None:
    """Make the tables as they are now; what the migrations make is the same, and a test says so."""
    metadata.create_all(connection)
    search.create(connection)
    version = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
    version.create(connection)
    connection.execute(insert(version).values(version_num=HEAD))


def copy(file: Path, to: Path) -> None:
    """Copy a SQLite database as it was last committed; only its owner can read the copy. Raises StoreError."""
    try:
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=to.name) as folder:
            new = Path(folder, to.name)
            new.touch(0o600)
            with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(new)) as target:
                source.backup(target)
            new.replace(to)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"{file} must be updated and cannot be copied to {to} before ({error}). Make room, then try again."
        ) from error


def journal(file: Path) -> Path:
    """Where SQLite keeps what was committed of late."""
    return file.with_name(f"{file.name}-wal")


def identity(file: Path) -> tuple[int, int] | None:
    """Device and inode, the same for as long as it is the same file; None when there is none."""
    with suppress(OSError):
        found = file.stat()
        return found.st_dev, found.st_ino
    return None
