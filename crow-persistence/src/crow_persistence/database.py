"""The database: opened on first use, updated to the current tables, read and written in transactions."""

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

LATEST_REVISION = "0002"
"""The newest revision in `migrations`. A test compares the two."""
URL_DEFAULTS: dict[str, dict[str, str]] = {
    "sqlite": {"timeout": "30"},
    "postgresql+psycopg": {"connect_timeout": "10", "tcp_user_timeout": "30000", "options": "-c lock_timeout=30s"},
}
"""Default URL parameters by driver. They limit every wait for a lock or a connection to half a minute."""
SLOW_FAILURE = 1.0
"""Seconds after which a failed transaction counts as having waited for a lock."""
FAIL_FAST_PERIOD = 5.0
"""Seconds after such a failure in which writes do not wait for locks, so that a turn with much to write ends soon."""
SCHEMA_LOCK = 0x63726F77_6462
"""PostgreSQL advisory lock, held while tables are created or changed."""
SQLITE_FAULTS = {
    "BUSY": "is held by another program. Close that one, then try again",
    "FULL": "cannot grow, as its disk is full. Make room, then try again",
    "READONLY": "cannot be written. Make the file, its folder and its disk writable, then try again",
    "CANTOPEN": "cannot be opened. It must be a file that you may read and write, in a folder where you may write",
    "NOTADB": "is no SQLite database, or its beginning is damaged. Move it away, or name another in [database] url",
    "CORRUPT": "is damaged; `crow db check` says where. Move it and its -wal away, and put a copy in its place if any",
    "IOERR": "could not be read or written. Look whether its disk is full or failing, then try again",
}
"""SQLite error codes, and the rest of a sentence that begins with the file's name."""


class Database:
    """A database. Its methods block, so call them in a thread from an event loop; any number of threads may use it.

    Every fault is raised as StoreError, and none is permanent: once the cause is removed, the next call works.
    """

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.url = complete_url(url)
        self.file = Path(self.url.database or "") if self.url.drivername == "sqlite" else None
        """The SQLite file; None for PostgreSQL."""
        self.folder = folder or (self.file or Path("unknown")).parent
        """crow's data folder, for backups made before an update and for the audit chain's head."""
        self._lock = Lock()
        self._engine: Engine | None = None
        self._fail_fast_until = 0.0
        """Time (`monotonic`) until which writes do not wait for locks."""
        self._file_identity: tuple[int, int] | None = None
        self._wal_identity: tuple[int, int] | None = None
        """Identities of the open file and of its write-ahead log."""

    @property
    def name(self) -> str:
        """The file, or the address without the parameters that may be secret."""
        return str(self.file or self.url.set(query={}))

    @contextmanager
    def begin_read(self) -> Generator[Connection]:
        """Begin a read-only transaction on one snapshot of the database. Raises StoreError."""
        options: dict[str, Any] = (
            {} if self.file else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        )
        with self._transaction(**options) as connection:
            yield connection

    @contextmanager
    def begin_write(self) -> Generator[Connection]:
        """Begin a transaction that is committed at the end of the block; on SQLite it excludes other writers. Raises
        StoreError.

        If `connection.engine` is not the engine of the last transaction, the file was replaced, and known row ids are
        invalid.
        """
        with self._transaction(begin="BEGIN IMMEDIATE", fail_fast=monotonic() < self._fail_fast_until) as connection:
            yield connection

    def close(self) -> None:
        """Close the connections. The next use opens them again."""
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    @contextmanager
    def _transaction(self, *, fail_fast: bool = False, **options: Any) -> Generator[Connection]:
        since = monotonic()
        try:
            with self._get_engine().connect().execution_options(fail_fast=fail_fast, **options) as connection:
                try:
                    with connection.begin():
                        yield connection
                except DBAPIError:
                    connection.invalidate()  # the next transaction gets a new connection
                    raise
                if fail_fast:
                    connection.invalidate()  # a new connection waits for locks again
                    self._fail_fast_until = 0.0
        except DBAPIError as error:
            if monotonic() - since > SLOW_FAILURE:
                self._fail_fast_until = monotonic() + FAIL_FAST_PERIOD
            raise StoreError(self.explain(error)) from error

    def _get_engine(self) -> Engine:
        """Return the engine of the open, updated database. Raises StoreError, DBAPIError."""
        with self._lock:
            if self._engine is not None and self.file and file_identity(self.file) != self._file_identity:
                self._refuse_replaced_file(self.file)
            if self._engine is None:
                self._engine = self._open()
                if self.file:
                    self._file_identity, self._wal_identity = (
                        file_identity(self.file),
                        file_identity(wal_file(self.file)),
                    )
            return self._engine

    def _refuse_replaced_file(self, file: Path) -> NoReturn:
        """Raise StoreError because the open file is gone: never write to it, nor open another file with its write-ahead
        log."""
        wal = wal_file(file)
        if file.exists() and self._wal_identity and file_identity(wal) == self._wal_identity:
            raise StoreError(
                f"{file} was replaced while it was open, and {wal.name} beside it belongs to the earlier file. "
                f"Remove that and {file.name}-shm, then try again."
            )
        self.close()
        raise StoreError(
            f"{file} was moved, deleted or replaced while it was open. Nothing was written; try again, "
            "and crow uses the file that is there then, or creates a new one."
        )

    def _open(self) -> Engine:
        if self.file:
            self._create_file(self.file)
        try:
            engine = create_engine(self.url, pool_pre_ping=not self.file, hide_parameters=True)
        except ImportError as error:
            raise StoreError(
                f"{self.name} needs a driver ({error}). Install 'psycopg[binary]' where crow is installed: "
                "uv tool install CLONE --with 'psycopg[binary]', or pip install 'psycopg[binary]'."
            ) from error
        if self.file:
            event.listen(engine, "connect", prepare_connection)
        event.listen(engine, "begin", begin_transaction)
        try:
            with engine.begin() as connection:
                stale = self._needs_update(connection)
            if stale:
                self._update(engine)
        except BaseException:
            engine.dispose()
            raise
        return engine

    def _create_file(self, file: Path) -> None:
        """Create the file, readable by its owner alone from the beginning. Raises StoreError."""
        try:
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
            file.parent.mkdir(0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # not opened here: closing it would drop SQLite's locks
                os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
            if not os.access(
                file, os.R_OK | os.W_OK, effective_ids=True
            ):  # SQLite would give its journal the same mode
                raise PermissionError(EACCES, "it is closed to you")
            if file.stat().st_mode & 0o077:
                file.chmod(file.stat().st_mode & 0o700)
        except OSError as error:
            raise StoreError(f"{file} {SQLITE_FAULTS['CANTOPEN']} ({error.strerror}).") from error

    def _needs_update(self, connection: Connection) -> bool:
        """Test whether tables must be created or changed. Raises StoreError when the database is another program's or
        newer."""
        found = read_revision(connection)
        others = sorted(set(inspect(connection).get_table_names()) - {"alembic_version"}) if found is None else []
        if others:  # another process may just have created them
            found = read_revision(connection)
        if (others and found is None) or (found and not found.isdecimal()):
            raise StoreError(
                f"{self.name} belongs to another program ({', '.join(others[:3]) or found}). "
                "Name a database of crow's own in [database] url."
            )
        if found is not None and found > LATEST_REVISION:
            raise StoreError(
                f"{self.name} was written by a newer crow (its revision is {found}, this one knows {LATEST_REVISION}). "
                "Update crow, or name another database in [database] url."
            )
        return found != LATEST_REVISION

    def _update(self, engine: Engine) -> None:
        """Create or update the tables, once, even when several processes start together."""
        with engine.connect().execution_options(begin="BEGIN IMMEDIATE") as connection, connection.begin():
            if not self.file:
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": SCHEMA_LOCK})
            if read_revision(connection) is None:
                create_tables(connection)
            elif self._needs_update(connection):
                from crow_persistence.migrations import upgrade  # Alembic is slow to import and rarely needed

                if self.file:
                    back_up(self.file, self.folder / f"{self.file.name}.before-{LATEST_REVISION}")
                upgrade(connection)

    def explain(self, error: DBAPIError) -> str:
        """Convert a driver's error to a sentence that contains no stored data."""
        if self.file:
            _, _, name = str(getattr(error.orig, "sqlite_errorname", "")).partition("_")
            reason = SQLITE_FAULTS.get(name.partition("_")[0])
            return f"{self.name} {reason} ({error.orig})." if reason else f"{self.name}: {error.orig}."
        diagnosis = getattr(error.orig, "diag", None)
        if diagnosis is not None and diagnosis.message_primary:
            return f"PostgreSQL refused ({self.name}): {diagnosis.message_primary}. Mend that, then try again."
        reason = " ".join(str(error.orig).split())
        return f"PostgreSQL cannot be reached ({self.name}): {reason}. Check [database] url, and that the server runs."


def complete_url(url: str) -> URL:
    """Parse a database URL and add the defaults. Raises StoreError."""
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
                f"[database] url {parsed.render_as_string()} cannot be used. "
                "Give sqlite:////folder/file.db or postgresql+psycopg://user@host/database."
            )
    return parsed.set(query={**URL_DEFAULTS[parsed.drivername], **parsed.query})


def prepare_connection(driver: Any, _: Any) -> None:
    """Set up a new SQLite connection."""
    driver.isolation_level = None  # `begin_transaction` begins transactions
    driver.text_factory = decode_text
    try:
        driver.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError:
        # SQLite does not wait here while another process does the same to a new file; a write transaction does.
        driver.execute("BEGIN IMMEDIATE")
        driver.execute("ROLLBACK")
        driver.execute("PRAGMA journal_mode = WAL")
    driver.execute("PRAGMA synchronous = NORMAL")
    driver.execute("PRAGMA foreign_keys = ON")


def decode_text(data: bytes) -> str:
    """Decode text from SQLite. Damaged bytes become surrogate escapes, so that the rest stays readable."""
    return data.decode("utf-8", "surrogateescape")


def begin_transaction(connection: Connection) -> None:
    """Begin a transaction with the lock timeout and the mode that the connection's options ask for."""
    options, is_sqlite = connection.get_execution_options(), connection.dialect.name == "sqlite"
    if options.get("fail_fast"):
        connection.exec_driver_sql("PRAGMA busy_timeout = 0" if is_sqlite else "SET LOCAL lock_timeout = 1")
    if is_sqlite:  # PostgreSQL's driver begins transactions itself
        connection.exec_driver_sql(options.get("begin", "BEGIN"))


def read_revision(connection: Connection) -> str | None:
    """Return the revision of the tables; None when there are no tables."""
    version = table("alembic_version", column("version_num"))
    if not connection.dialect.has_table(connection, version.name):
        return None
    return connection.scalar(select(version.c.version_num))


def create_tables(connection: Connection) -> None:
    """Create the current tables. A test checks that the migrations create the same ones."""
    metadata.create_all(connection)
    search.create(connection)
    version = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
    version.create(connection)
    connection.execute(insert(version).values(version_num=LATEST_REVISION))


def back_up(file: Path, to: Path) -> None:
    """Copy a SQLite database, as last committed, to a file that only its owner can read. Raises StoreError."""
    try:
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=to.name) as folder:
            new = Path(folder, to.name)
            new.touch(0o600)
            with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(new)) as target:
                source.backup(target)
            new.replace(to)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"{file} must be updated and cannot be backed up to {to} first ({error}). Make room, then try again."
        ) from error


def wal_file(file: Path) -> Path:
    """Return the path of SQLite's write-ahead log for a file."""
    return file.with_name(f"{file.name}-wal")


def file_identity(file: Path) -> tuple[int, int] | None:
    """Return a file's device and inode; None when there is no file."""
    with suppress(OSError):
        found = file.stat()
        return found.st_dev, found.st_ino
    return None
