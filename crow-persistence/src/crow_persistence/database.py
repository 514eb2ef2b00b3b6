"""The database: opened on first use, updated to the current tables, read and written in transactions."""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from errno import EACCES
from functools import partial
from glob import escape
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from crow_core.errors import StoreError
from crow_core.models.retries import attempt_again
from crow_system.files import make_private_folder
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    Pool,
    QueuePool,
    String,
    Table,
    create_engine,
    event,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError, OperationalError

from crow_persistence import search
from crow_persistence.database_urls import parse_url
from crow_persistence.queue import QueueStuck, wait_in_queue
from crow_persistence.sqlite_files import (
    back_up,
    connect_to_read,
    decode_text,
    file_identity,
    has_content,
    lock_file,
    may,
    shm_file,
    wal_file,
)
from crow_persistence.tables import metadata

LATEST_REVISION = "0005"
"""The newest revision in `migrations`. A test compares the two."""
OLDEST_READER = "0004"
"""The oldest revision whose crow may read and write tables of LATEST_REVISION: it may leave out the additions since."""
NO_IDLE_LIMIT = "SET LOCAL idle_in_transaction_session_timeout = 0"
SHORT_TIMEOUT = 2.0
"""Seconds that a transaction waits for a lock if it may as well be left out."""
RECONNECT_TIMEOUT = 10.0
"""Seconds for which a connection to PostgreSQL is tried again after it was lost: so long a restart may take."""
SCHEMA_LOCK = 0x63726F77_6462
"""PostgreSQL advisory lock, held while tables are created or changed."""
SQLITE_FAULTS = {
    "BUSY": "is held by another program, which is not crow. Close that one, then try again",
    "FULL": "cannot grow, as its disk is full. Make room, then try again",
    "READONLY": "cannot be written. Make the file, its folder and its disk writable, then try again",
    "CANTOPEN": "cannot be opened. It must be a file that you may read and write, in a folder where you may write",
    "NOTADB": "is no SQLite database, or its beginning is damaged. `crow db restore FILE` puts a backup in its place",
    "CORRUPT": "is damaged; `crow db check` says where. `crow db restore FILE` puts a backup in its place, and "
    "`crow db repair NEW` saves what can be read",
    "IOERR": "could not be read or written. Look whether its disk is full or failing, then try again",
}
"""SQLite error codes, and the rest of a sentence that begins with the file's name."""

VERSION = Table(
    "alembic_version",  # one row
    MetaData(),
    Column("version_num", String(32), primary_key=True),
    Column("oldest_reader", String(32)),
)


class DatabaseLost(StoreError):
    """The connection to PostgreSQL was lost in a transaction, which may succeed when it is tried again."""


class Database:
    """A database. Its methods block, so call them in a thread from an event loop; any number of threads may use it.

    Every fault is raised as StoreError, and none is permanent: once the cause is removed, the next call works.
    """

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.url, self.is_durable = parse_url(url)
        self.file = Path(self.url.database or "") if self.url.drivername == "sqlite" else None
        """The SQLite file; None for PostgreSQL."""
        self.address = self.url.render_as_string(hide_password=True)
        """The URL without its password, which names the database in the audit chain's files."""
        self.folder = folder or (self.file or Path("unknown")).parent
        """crow's data folder, for backups made before an update and for the audit chain's key and head."""
        self._lock_timeout = float(str(self.url.query["timeout"])) if self.file else 0.0
        self._lock = Lock()
        self._engine: Engine | None = None
        self._is_read_only = False
        """True if the open file cannot be written."""
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        """The folder of a copy that is open in place of a file that cannot be written."""
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
    def begin_write(self, *, briefly: bool = False) -> Generator[Connection]:
        """Begin a transaction that is committed at the end of the block; on SQLite it excludes other writers. Raises
        StoreError, after SHORT_TIMEOUT if it is to wait for locks only `briefly`.

        If `connection.engine` is not the engine of the last transaction, the file was replaced, and known row ids are
        invalid.
        """
        with self._explained():
            self._get_engine(writes=True)
        with (
            self._wait_in_queue(SHORT_TIMEOUT if briefly else self._lock_timeout),
            self._transaction(begin="BEGIN IMMEDIATE", briefly=briefly) as connection,
        ):
            yield connection

    def erase_deleted(self) -> None:
        """Remove the words of deleted messages from a SQLite database's index, and deleted rows from its write-ahead
        log. PostgreSQL's autovacuum does this by itself. Raises StoreError."""
        is_merged = not self.file
        while not is_merged:  # in several transactions, so that other writers do not wait long
            with self.begin_write() as connection:
                is_merged = not search.merge(connection)
        self._run_alone("PRAGMA wal_checkpoint(TRUNCATE)")

    def vacuum(self) -> None:
        """Return the space of deleted rows to the file system. PostgreSQL keeps it for new rows. Raises StoreError."""
        self.erase_deleted()
        self._run_alone("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)")

    def _run_alone(self, *statements: str) -> None:
        """Run statements on a SQLite database outside of a transaction."""
        if self.file:
            with self._explained():
                self._get_engine(writes=True)
            with self._wait_in_queue(self._lock_timeout), self._transaction(begin="") as connection:
                for statement in statements:
                    connection.exec_driver_sql(statement)

    def list_copies(self) -> list[Path]:
        """List the copies of the file that updates have made before they changed it."""
        name = self.file.name if self.file else ""
        return sorted(self.folder.glob(f"{escape(name)}.before-[0-9]*")) if name else []

    def list_replaced(self) -> list[Path]:
        """List the files that `crow db restore` has moved aside."""
        return sorted(self.file.parent.glob(f"{escape(self.file.name)}.replaced-*")) if self.file else []

    def close(self) -> None:
        """Close the connections, those in use when their transactions end. The next use opens them again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None

    @contextmanager
    def _wait_in_queue(self, timeout: float) -> Generator[None]:
        """Wait until the processes that want to write a SQLite file, and came before, have done so. Raises
        StoreError."""
        if not self.file:
            yield
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(wait_in_queue(lock_file(self.file), timeout))
            except QueueStuck as stuck:
                raise StoreError(
                    f"{self.name} is held by crow ({stuck}). Wait for it or end it, then try again."
                ) from None
            except OSError as error:
                raise StoreError(f"{self.name} {SQLITE_FAULTS['READONLY']} ({error.strerror}).") from error
            yield

    @contextmanager
    def _transaction(self, **options: Any) -> Generator[Connection]:
        writes = "begin" in options
        with self._explained(), ExitStack() as stack:
            engine = self._get_engine(writes=writes, is_queued=writes)
            stack.callback(self._close_returned, engine, engine.pool)
            limit = SHORT_TIMEOUT if options.get("briefly") else RECONNECT_TIMEOUT
            connection = stack.enter_context(reconnect(engine, limit).execution_options(**options))
            try:
                with connection.begin():
                    yield connection
            except DBAPIError:
                connection.invalidate()  # the next transaction gets a new connection
                raise
            if options.get("briefly") and self.file:
                connection.invalidate()  # a new connection waits longer for locks

    def _close_returned(self, engine: Engine, pool: Pool) -> None:
        """Close a connection that was returned to a pool of `engine` after `close`."""
        if engine is not self._engine:
            pool.dispose()
            engine.dispose()  # `close` may have replaced the pool before the connection was made

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Raise a driver's error as StoreError."""
        try:
            yield
        except DBAPIError as error:
            kind = DatabaseLost if error.connection_invalidated and not self.file else StoreError
            raise kind(self.explain(error)) from error

    def _get_engine(self, *, writes: bool = False, is_queued: bool = False) -> Engine:
        """Return the engine of the open, updated database. `is_queued` is true if `_wait_in_queue` is running. Raises
        StoreError, DBAPIError."""
        with self._lock:
            if writes and self._is_read_only:
                self.close()
            if self._engine is not None and self.file and file_identity(self.file) != self._file_identity:
                self._refuse_replaced_file(self.file)
            if self._engine is None:
                self._engine = self._open(writes=writes, is_queued=is_queued)
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

    def _open(self, *, writes: bool, is_queued: bool) -> Engine:
        self._is_read_only = False
        if self.file:
            try:
                self._create_file(self.file)
            except StoreError:
                if writes or not may(os.R_OK, self.file):
                    raise
                return self._open_read_only(self.file)
        try:
            engine = create_engine(self.url, pool_pre_ping=not self.file, hide_parameters=True)
        except ImportError as error:
            raise StoreError(
                f"{self.name} needs a driver ({error}). Install 'psycopg[binary]' where crow is installed: "
                "uv tool install CLONE --with 'psycopg[binary]', or pip install 'psycopg[binary]'."
            ) from error
        if self.file:
            event.listen(engine, "connect", partial(prepare_connection, is_durable=self.is_durable))
        event.listen(engine, "begin", begin_transaction)
        with disposed_on_error(engine):
            with engine.begin() as connection:
                stale = self._needs_update(connection)
            if stale:
                with nullcontext() if is_queued else self._wait_in_queue(self._lock_timeout):
                    self._update(engine, self.file)
        return engine

    def _open_read_only(self, file: Path) -> Engine:
        """Open a file that cannot be written: as it is or, if its write-ahead log is not empty or its tables are of an
        earlier revision, as a copy. Raises StoreError, DBAPIError."""
        self._is_read_only = True
        with suppress(DBAPIError):
            alone = not shm_file(file).exists()
            engine = create_engine(
                "sqlite://", creator=partial(connect_to_read, file, alone=alone), poolclass=QueuePool
            )
            event.listen(engine, "begin", begin_transaction)
            with disposed_on_error(engine), engine.begin() as connection:
                if not (alone and has_content(wal_file(file))) and not self._needs_update(connection):
                    return engine
            engine.dispose()
        self._copy = tempfile.TemporaryDirectory(prefix="crow-")
        copy = Path(self._copy.name, file.name)
        try:
            shutil.copyfile(file, copy)
            if has_content(wal_file(file)):
                shutil.copyfile(wal_file(file), wal_file(copy))
        except OSError as error:
            raise StoreError(
                f"{file} cannot be copied to read it ({error.strerror}). Make room, then try again."
            ) from error
        engine = create_engine(self.url.set(database=str(copy)), hide_parameters=True)
        event.listen(engine, "connect", prepare_connection)
        event.listen(engine, "begin", begin_transaction)
        with disposed_on_error(engine):
            with engine.begin() as connection:
                stale = self._needs_update(connection)
            if stale:
                self._update(engine, copy)
        return engine

    def _create_file(self, file: Path) -> None:
        """Create the file, readable by its owner alone from the beginning. Raises StoreError."""
        try:
            make_private_folder(self.folder)
            make_private_folder(file.parent)
            with suppress(FileExistsError):  # not opened here: closing it would drop SQLite's locks
                os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
            if not may(os.R_OK | os.W_OK, file):  # SQLite would give its journal the same mode
                raise PermissionError(EACCES, "it is closed to you")
            if not may(os.W_OK, file.parent):
                raise PermissionError(EACCES, "its folder is closed to you")
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
            if read_oldest_reader(connection) <= LATEST_REVISION:
                return False
            raise StoreError(
                f"{self.name} was written by a newer crow (its revision is {found}, this one knows {LATEST_REVISION}). "
                "Update crow, or name another database in [database] url."
            )
        return found != LATEST_REVISION

    def _update(self, engine: Engine, file: Path | None) -> None:
        """Create or update the tables, once, even when several processes start together. A file that belongs to crow is
        copied before."""
        with engine.connect().execution_options(begin="BEGIN IMMEDIATE") as connection, connection.begin():
            if not self.file:
                connection.execute(text(NO_IDLE_LIMIT))
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": SCHEMA_LOCK})
            if read_revision(connection) is None:
                create_tables(connection)
            elif self._needs_update(connection):
                from crow_persistence.migrations import upgrade  # Alembic is slow to import and rarely needed

                if file and file == self.file:
                    self._back_up_before_update(file)
                upgrade(connection)
                connection.execute(update(VERSION).values(oldest_reader=OLDEST_READER))

    def _back_up_before_update(self, file: Path) -> None:
        """Copy the file while the connection that is about to change it stays open. Raises StoreError."""
        to = self.folder / f"{file.name}.before-{LATEST_REVISION}"
        try:
            with closing(sqlite3.connect(file)) as source:
                back_up(source, to)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"{file} must be updated and cannot be backed up to {to} first ({error}). Make room, then try again."
            ) from error

    def back_up(self, to: Path) -> None:
        """Copy the SQLite database to a new file. Raises StoreError."""
        if not self.file:
            url = self.url.set(drivername="postgresql", query={}).render_as_string()
            raise StoreError(f"crow backs up SQLite files. Back up PostgreSQL with: pg_dump --file={to} {url}")
        if to.exists():
            raise StoreError(f"{to} is there already. Name a file that is not.")
        try:
            with self.begin_read() as connection:
                driver = connection.connection.driver_connection
                assert isinstance(driver, sqlite3.Connection)
                back_up(driver, to)
        except (OSError, sqlite3.Error) as error:
            why = f"{self.name} cannot be backed up to {to} ({error})"
            raise StoreError(f"{why}. Name another file, or make room.") from error

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


def prepare_connection(driver: Any, _: Any, *, is_durable: bool = False) -> None:
    """Set up a new SQLite connection. With `is_durable`, a commit waits until the disk has it."""
    driver.isolation_level = None  # `begin_transaction` begins transactions
    driver.text_factory = decode_text
    try:
        driver.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError:
        # SQLite does not wait here while another process does the same to a new file; a write transaction does.
        driver.execute("BEGIN IMMEDIATE")
        driver.execute("ROLLBACK")
        driver.execute("PRAGMA journal_mode = WAL")
    driver.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
    driver.execute("PRAGMA foreign_keys = ON")
    driver.execute("PRAGMA secure_delete = ON")  # deleted rows are overwritten


def reconnect(engine: Engine, timeout: float) -> Connection:
    """Connect to an open database; to PostgreSQL for at most `timeout` seconds, while it restarts. Raises
    DBAPIError."""
    if engine.dialect.name == "sqlite":
        return engine.connect()
    for attempt in retry_lost(OperationalError, timeout):
        with attempt:
            return engine.connect()
    raise AssertionError  # unreachable: the last attempt raises


def retry_lost(error: type[Exception], timeout: float = RECONNECT_TIMEOUT) -> Iterator[Any]:
    """Yield attempts to do something again for `timeout` seconds while it raises this error."""
    return iter(attempt_again(error, None, timeout=timeout, wait_initial=0.1, wait_max=1.0))


@contextmanager
def disposed_on_error(engine: Engine) -> Generator[None]:
    """Close the engine's connections if the block raises."""
    try:
        yield
    except BaseException:
        engine.dispose()
        raise


def begin_transaction(connection: Connection) -> None:
    """Begin a transaction with the lock timeout and the mode that the connection's options ask for."""
    options, is_sqlite = connection.get_execution_options(), connection.dialect.name == "sqlite"
    if options.get("briefly"):
        setting = "PRAGMA busy_timeout" if is_sqlite else "SET LOCAL lock_timeout"
        connection.exec_driver_sql(f"{setting} = {SHORT_TIMEOUT * 1000:.0f}")
    if options.get("postgresql_readonly"):  # a read may take long between two statements, and holds no locks
        connection.exec_driver_sql(NO_IDLE_LIMIT)
    if is_sqlite and (begin := options.get("begin", "BEGIN")):  # PostgreSQL's driver begins transactions itself
        connection.exec_driver_sql(begin)


def read_revision(connection: Connection) -> str | None:
    """Return the revision of the tables; None when there are no tables."""
    if not connection.dialect.has_table(connection, VERSION.name):
        return None
    return connection.scalar(select(VERSION.c.version_num))


def read_oldest_reader(connection: Connection) -> str:
    """Return the oldest revision whose crow may use the tables; the tables' own revision if that is unknown."""
    columns = [column["name"] for column in inspect(connection).get_columns(VERSION.name)]
    known = connection.scalar(select(VERSION.c.oldest_reader)) if VERSION.c.oldest_reader.name in columns else None
    return known or connection.execute(select(VERSION.c.version_num)).scalar_one()


def create_tables(connection: Connection) -> None:
    """Create the current tables. A test checks that the migrations create the same ones."""
    metadata.create_all(connection)
    search.create(connection)
    VERSION.create(connection)
    connection.execute(insert(VERSION).values(version_num=LATEST_REVISION, oldest_reader=OLDEST_READER))
