"""A database is opened, shared and recovered; every fault is a StoreError with a clear message."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import rmtree
from threading import Barrier, Event, Timer

import psycopg
import pytest
from crow_core.errors import StoreError
from crow_persistence import database as module
from crow_persistence.database import Database
from crow_persistence.tables import blobs, drafts
from sqlalchemy import create_engine, func, insert, make_url, select, text


def write(database: Database, hash: str, data: bytes = b"data") -> None:
    with database.begin_write() as connection:
        connection.execute(insert(blobs).values(hash=hash, data=data))


def written(database: Database) -> list[str]:
    with database.begin_read() as connection:
        return list(connection.scalars(select(blobs.c.hash).order_by(blobs.c.hash)))


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Callable[..., Database]]:
    """Return a function that opens `crow.db` in a folder."""
    opened: list[Database] = []

    def sqlite(folder: Path = tmp_path, query: str = "") -> Database:
        opened.append(Database(f"sqlite:///{folder / 'crow.db'}{query}"))
        return opened[-1]

    yield sqlite
    for database in opened:
        database.close()


@pytest.fixture
def unprivileged(sqlite: object) -> Iterator[Path]:
    """Yield a folder of a user without root's rights, and run the test with that user's rights: root may write
    everything."""
    folder = Path(tempfile.mkdtemp())
    before = os.geteuid()
    if before == 0:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    yield folder
    os.seteuid(before)
    rmtree(folder)


def test_written_rows_are_read_back(database: Database) -> None:
    write(database, "a")
    assert written(database) == ["a"]


def test_failed_block_is_rolled_back(database: Database) -> None:
    def fail() -> None:
        with database.begin_write() as connection:
            connection.execute(insert(blobs).values(hash="a", data=b""))
            connection.execute(text("CREATE TABLE more (number INTEGER)"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    write(database, "b")
    assert written(database) == ["b"]
    with database.begin_write() as connection:
        connection.execute(text("CREATE TABLE more (number INTEGER)"))


def test_reader_sees_one_snapshot_during_writes(database: Database) -> None:
    write(database, "a")
    with database.begin_read() as connection:
        assert connection.scalar(select(func.count()).select_from(blobs)) == 1
        write(database, "b")
        assert connection.scalar(select(func.count()).select_from(blobs)) == 1
    assert written(database) == ["a", "b"]


def test_invalid_reference_is_refused_without_quoting_data(database: Database) -> None:
    with pytest.raises(StoreError, match=r"(?i)foreign key") as error, database.begin_write() as connection:
        connection.execute(insert(drafts).values(session=987654, at=0, body="confidential"))
    assert "confidential" not in str(error.value)
    assert "987654" not in str(error.value)


def test_threads_share_a_database(database: Database) -> None:
    start = Barrier(4)

    def work(name: str) -> None:
        start.wait()
        for number in range(10):
            write(database, f"{name}{number}")
            written(database)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, "abcd"))
    assert len(written(database)) == 40


OPEN = """
import sys
from pathlib import Path
from crow_persistence.database import Database
from crow_persistence.tables import blobs
from sqlalchemy import insert

url, folder, name = sys.argv[1:]
database = Database(url, Path(folder))
print("ready", flush=True)
sys.stdin.readline()
for number in range(10):
    with database.begin_write() as connection:
        connection.execute(insert(blobs).values(hash=name + str(number), data=b""))
print("alembic" in sys.modules)
database.close()
"""


def start(database: Database, name: str) -> "subprocess.Popen[str]":
    """Start a process that waits for a line, opens the database and writes ten rows."""
    url = database.url.render_as_string(hide_password=False)
    arguments = [sys.executable, "-c", OPEN, url, str(database.folder), name]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_starting_together_create_one_database(database: Database) -> None:
    processes = [start(database, name) for name in "abcd"]
    for process in processes:
        assert process.stdout
        process.stdout.readline()
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0] * 4
    assert len(written(database)) == 40


def test_current_database_is_opened_without_alembic(database: Database) -> None:
    write(database, "z")
    assert start(database, "a").communicate("\n")[0].split() == ["ready", "False"]


def test_new_database_is_readable_by_its_owner_only(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    database = sqlite(tmp_path / "new" / "folder")
    write(database, "a")
    assert stat.S_IMODE(database.folder.stat().st_mode) == 0o700
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in database.folder.iterdir()}
    assert files == dict.fromkeys(["crow.db", "crow.db-lock", "crow.db-shm", "crow.db-wal"], 0o600)


def test_existing_database_is_made_private(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    file = tmp_path / "crow.db"
    file.touch(0o644)
    write(sqlite(), "a")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "url",
    [
        "crow.db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite://host/crow.db",
        "mysql://me:hidden@host/crow",
        "postgresql+nodriver://me:hidden@host/crow",
        "postgresql://me:hidden@host:port/crow",
    ],
)
def test_unusable_url_is_reported_with_an_example(url: str) -> None:
    with pytest.raises(StoreError, match=r"\[database\] url.*sqlite:////.*postgresql\+psycopg://") as error:
        Database(url)
    assert "hidden" not in str(error.value)


def test_home_folder_is_expanded_in_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Database("sqlite:///~/crow.db").file == tmp_path / "crow.db"


def test_missing_psycopg_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    database = Database("postgresql://me:hidden@host/crow")
    with pytest.raises(StoreError, match=r"pip install 'psycopg\[binary\]'") as error:
        written(database)
    assert "hidden" not in str(error.value)


def test_unreachable_server_is_reported_without_the_password(tmp_path: Path) -> None:
    database = Database("postgresql://me:hidden@127.0.0.1:1/crow?password=hidden", tmp_path)
    with pytest.raises(
        StoreError, match=r"cannot be reached .*127\.0\.0\.1:1/crow.*refused.*\[database\] url"
    ) as error:
        written(database)
    assert "hidden" not in str(error.value)


def test_missing_database_works_once_it_is_created(postgres: str, tmp_path: Path) -> None:
    url = make_url(postgres)
    database = Database(url.set(database=f"{url.database}_x").render_as_string(hide_password=False), tmp_path)
    with pytest.raises(StoreError, match=r'"crow_\w+" does not exist'):
        written(database)
    server = create_engine(url, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {url.database}_x"))
    try:
        assert written(database) == []
    finally:
        database.close()
        with server.connect() as connection:
            connection.execute(text(f"DROP DATABASE {url.database}_x"))
        server.dispose()


def test_broken_connection_is_replaced(postgres: str, tmp_path: Path) -> None:
    database = Database(postgres, tmp_path)
    write(database, "a")
    disconnect(postgres)
    assert written(database) == ["a"]

    def use_broken_connection() -> None:
        with database.begin_write() as connection:
            connection.execute(insert(blobs).values(hash="b", data=b""))
            disconnect(postgres)
            connection.execute(insert(blobs).values(hash="c", data=b""))

    with pytest.raises(StoreError, match="PostgreSQL"):
        use_broken_connection()
    write(database, "d")
    assert written(database) == ["a", "d"]
    database.close()


def disconnect(postgres: str) -> None:
    """End all connections to a database."""
    engine = create_engine(postgres)
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    with engine.connect() as connection:
        connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"))
    engine.dispose()


def test_process_that_is_frozen_in_a_transaction_loses_its_locks(postgres: str, tmp_path: Path) -> None:
    frozen = Database(f"{postgres}?options=-c%20idle_in_transaction_session_timeout=100ms", tmp_path)
    other = Database(postgres, tmp_path)
    change = text("UPDATE alembic_version SET oldest_reader = oldest_reader")

    def freeze() -> None:
        with frozen.begin_write() as connection:
            connection.execute(change)
            with other.begin_write() as waiting:
                waiting.execute(change)  # waits until the server has ended the other transaction
            connection.execute(change)

    with pytest.raises(StoreError):
        freeze()
    with frozen.begin_write() as connection:
        connection.execute(change)
    with frozen.begin_read() as connection:
        assert connection.scalar(text("SHOW idle_in_transaction_session_timeout")) == "0"
    frozen.close()
    other.close()


def test_wait_for_a_locked_table_is_limited(postgres: str, tmp_path: Path) -> None:
    database = Database(f"{postgres}?options=-c%20lock_timeout=20ms", tmp_path)
    write(database, "a")
    other = create_engine(postgres)
    with other.begin() as connection:
        connection.execute(text("LOCK TABLE blobs"))
        with pytest.raises(StoreError, match="lock timeout"):
            write(database, "b")
    other.dispose()
    write(database, "c")
    assert written(database) == ["a", "c"]
    database.close()


def test_a_transaction_that_ends_after_the_database_was_closed_closes_its_connection(database: Database) -> None:
    write(database, "a")
    with database.begin_read() as connection:
        driver = connection.connection.driver_connection
        assert driver
        database.close()
        assert connection.scalar(select(blobs.c.hash)) == "a"
    with pytest.raises((sqlite3.ProgrammingError, psycopg.OperationalError), match="closed"):
        driver.execute("SELECT 1")
    assert written(database) == ["a"]


@pytest.mark.parametrize("kind", ["IMMEDIATE", "EXCLUSIVE"])
def test_wait_for_a_locked_file_is_limited(kind: str, tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    database = sqlite(query="?timeout=0.02")
    other = sqlite3.connect(tmp_path / "crow.db", isolation_level=None)
    other.execute(f"BEGIN {kind}")  # while the file is empty
    with pytest.raises(StoreError, match=r"crow\.db is held by another program"):
        write(database, "a")
    other.execute("ROLLBACK")
    write(database, "b")
    other.execute(f"BEGIN {kind}")
    with pytest.raises(StoreError, match=r"crow\.db is held by another program"):
        write(database, "c")
    assert written(database) == ["b"]
    other.execute("ROLLBACK")
    other.close()
    write(database, "d")
    assert written(database) == ["b", "d"]


def test_write_after_a_failed_one_waits_for_the_lock_again(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    database = sqlite(query="?timeout=0.5")
    write(database, "a")
    with closing(sqlite3.connect(tmp_path / "crow.db", isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="held by another program, which is not crow"):
            write(database, "b")
        Timer(0.2, other.execute, ["ROLLBACK"]).start()
        write(database, "b")
    assert written(database) == ["a", "b"]


def test_heartbeat_waits_only_briefly(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORT_TIMEOUT", 0.02)
    asked = "PRAGMA busy_timeout" if database.file else "SELECT current_setting('lock_timeout')"

    def read_lock_timeout(**options: bool) -> str:
        with database.begin_write(**options) as connection:
            return str(connection.exec_driver_sql(asked).scalar_one())

    before = read_lock_timeout()
    assert read_lock_timeout(briefly=True) == ("20" if database.file else "20ms")
    assert read_lock_timeout() == before


HOLD = """
import os, sys
from pathlib import Path
from crow_persistence.database import Database

database = Database(sys.argv[1], Path(sys.argv[2]))
with database.begin_write():
    print(os.getpid(), flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held(database: Database) -> Generator[int]:
    """Let another process of crow write as long as the block runs; yield its process id."""
    command = [sys.executable, "-c", HOLD, f"sqlite:///{database.file}", str(database.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield int(process.stdout.readline())
        process.communicate("\n")


def test_process_of_crow_that_holds_the_lock_is_named(sqlite: Callable[..., Database]) -> None:
    database = sqlite(query="?timeout=0.2")
    write(database, "a")
    with held(database) as pid:
        with pytest.raises(StoreError, match=rf"crow\.db is held by crow \(process {pid}\)"):
            write(database, "b")
        assert written(database) == ["a"]
    write(database, "b")
    assert written(database) == ["a", "b"]


def test_killed_process_does_not_hold_the_lock(sqlite: Callable[..., Database]) -> None:
    database = sqlite(query="?timeout=5")
    write(database, "a")
    with held(database) as pid:
        os.kill(pid, signal.SIGKILL)
        write(database, "b")
    assert written(database) == ["a", "b"]


@pytest.mark.slow
def test_writers_wait_longer_than_their_time_limit_while_others_are_served(sqlite: Callable[..., Database]) -> None:
    """Twelve writers take 0.1 seconds each, and wait 1.5 seconds for one of the others."""
    databases = [sqlite(query="?timeout=1.5") for _ in range(12)]
    write(databases[0], "a")
    start = Barrier(len(databases))

    def work(database: Database) -> None:
        start.wait()
        for _ in range(2):
            with database.begin_write() as connection:
                connection.execute(text("SELECT 1"))
                Event().wait(0.1)

    with ThreadPoolExecutor(len(databases)) as threads:
        list(threads.map(work, databases))


def test_full_disk_is_reported_until_there_is_room(sqlite: Callable[..., Database]) -> None:
    database = sqlite()
    write(database, "a")
    with database.begin_write() as connection:  # limits the size of the file
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
    with pytest.raises(StoreError, match=r"crow\.db cannot grow"):
        write(database, "b", bytes(100_000))
    write(database, "c", bytes(100_000))
    assert written(database) == ["a", "c"]


@pytest.mark.parametrize("mode", [0o400, 0o000])
def test_read_only_file_is_reported_until_it_is_writable(
    mode: int, unprivileged: Path, sqlite: Callable[..., Database]
) -> None:
    first, file = sqlite(unprivileged), unprivileged / "crow.db"
    write(first, "a")
    first.close()
    file.chmod(mode)
    database = sqlite(unprivileged)
    with pytest.raises(StoreError, match=r"crow\.db cannot be opened"):
        write(database, "b")
    file.chmod(0o600)
    write(database, "c")
    assert written(database) == ["a", "c"]


@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_inaccessible_folder_is_reported_until_it_is_accessible(
    mode: int, unprivileged: Path, sqlite: Callable[..., Database]
) -> None:
    database = sqlite(unprivileged)
    unprivileged.chmod(mode)
    with pytest.raises(StoreError, match=r"crow\.db cannot be opened"):
        written(database)
    unprivileged.chmod(0o700)
    write(database, "a")
    unprivileged.chmod(0o000)
    with pytest.raises(StoreError, match=r"crow\.db (cannot be opened|was moved)"):
        written(sqlite(unprivileged))
    unprivileged.chmod(0o700)
    assert written(sqlite(unprivileged)) == ["a"]


@pytest.mark.parametrize(("query", "level"), [("", 1), ("?synchronous=normal", 1), ("?synchronous=full", 2)])
def test_commit_waits_for_the_disk_if_asked_to(query: str, level: int, sqlite: Callable[..., Database]) -> None:
    database = sqlite(query=query)
    with database.begin_write() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == level
    assert database.address == sqlite().address


def test_unknown_synchronous_is_reported() -> None:
    with pytest.raises(StoreError, match=r"\[database\] synchronous is 'off'. Give 'normal' or 'full'"):
        Database("sqlite:////tmp/crow.db?synchronous=off")


@pytest.mark.parametrize("left", ["nothing", "log", "log and index"])
def test_file_that_cannot_be_written_is_read(left: str, unprivileged: Path, sqlite: Callable[..., Database]) -> None:
    """A killed process leaves a write-ahead log; a copy of the folder may lack its index."""
    writer = sqlite(unprivileged)
    write(writer, "a")
    if left == "nothing":
        writer.close()
    elif left == "log":
        other = unprivileged / "other"
        other.mkdir()
        for name in ("crow.db", "crow.db-wal"):
            (other / name).write_bytes((unprivileged / name).read_bytes())
        unprivileged = other
    files = list(unprivileged.glob("crow.db*"))
    contents = [file.read_bytes() for file in files if not file.name.endswith("-shm")]
    for file in files:
        file.chmod(0o400)
    unprivileged.chmod(0o500)
    database = sqlite(unprivileged)
    assert written(database) == ["a"]
    assert [file.read_bytes() for file in files if not file.name.endswith("-shm")] == contents
    with pytest.raises(StoreError, match=r"crow\.db cannot be opened.*that you may read and write"):
        write(database, "b")
    assert written(database) == ["a"]
    unprivileged.chmod(0o700)
    for file in files:
        file.chmod(0o600)
    write(database, "b")
    assert written(database) == ["a", "b"]


def test_folder_in_place_of_the_file_is_reported(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    (tmp_path / "crow.db").mkdir()
    database = sqlite()
    with pytest.raises(StoreError, match=r"crow\.db cannot be opened"):
        written(database)
    (tmp_path / "crow.db").rmdir()
    assert written(database) == []


@pytest.mark.parametrize("content", [b"{}", b"not a database, but long enough to be one" * 100])
def test_foreign_file_is_reported_and_not_changed(
    content: bytes, tmp_path: Path, sqlite: Callable[..., Database]
) -> None:
    file = tmp_path / "crow.db"
    file.write_bytes(content)
    database = sqlite()
    with pytest.raises(StoreError, match=r"crow\.db is no SQLite database"):
        written(database)
    assert file.read_bytes() == content
    file.unlink()
    assert written(database) == []


def test_truncated_file_is_reported_and_not_changed(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    first = sqlite()
    write(first, "a", bytes(100_000))
    first.close()
    file = tmp_path / "crow.db"
    content = file.read_bytes()
    file.write_bytes(content[:5000])
    database = sqlite()
    with pytest.raises(StoreError, match=r"crow\.db is damaged.*crow db check"):
        written(database)
    assert file.read_bytes() == content[:5000]
    file.write_bytes(content)
    assert written(database) == ["a"]


def test_database_of_another_program_is_reported_and_not_changed(database: Database, tmp_path: Path) -> None:
    other = create_engine(database.url)
    with other.begin() as connection:
        connection.execute(text("CREATE TABLE bookmarks (url TEXT)"))
    with pytest.raises(StoreError, match=r"belongs to another program \(bookmarks\)"):
        written(database)
    with other.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num TEXT)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('1975ea83b712')"))
    with pytest.raises(StoreError, match=r"belongs to another program \(1975ea83b712\)"):
        written(database)
    with other.begin() as connection:
        connection.execute(text("DROP TABLE alembic_version"))
        connection.execute(text("DROP TABLE bookmarks"))
    other.dispose()
    assert written(database) == []


def test_database_of_a_newer_crow_is_reported_and_not_changed(database: Database) -> None:
    write(database, "a")
    with database.begin_write() as connection:
        revision = connection.scalar(text("SELECT version_num FROM alembic_version"))
        connection.execute(text("UPDATE alembic_version SET version_num = '9999', oldest_reader = '9999'"))
    database.close()
    with pytest.raises(StoreError, match=rf"newer crow \(its revision is 9999, this one knows {revision}\)"):
        write(database, "b")
    other = create_engine(database.url)
    with other.begin() as connection:
        connection.execute(
            text("UPDATE alembic_version SET version_num = :found, oldest_reader = :found"), {"found": revision}
        )
    other.dispose()
    assert written(database) == ["a"]


def test_deleted_file_is_reported_once_and_recreated(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    database = sqlite()
    write(database, "a")
    with database.begin_write() as connection:
        engine = connection.engine
    (tmp_path / "crow.db").unlink()
    with pytest.raises(StoreError, match=r"crow\.db was moved, deleted or replaced.*Nothing was written"):
        write(database, "b")
    write(database, "c")
    assert written(database) == ["c"]
    with database.begin_write() as connection:
        assert connection.engine is not engine


def test_replaced_file_is_not_opened_with_the_old_journal(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    database, other = sqlite(), sqlite(tmp_path / "other")
    write(database, "a")
    write(other, "b")
    other.close()
    (tmp_path / "other" / "crow.db").replace(tmp_path / "crow.db")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"Remove that and crow\.db-shm"):
            written(database)
    for name in ("crow.db-wal", "crow.db-shm"):
        (tmp_path / name).unlink()
    with pytest.raises(StoreError, match="was moved, deleted or replaced"):
        write(database, "c")
    assert written(database) == ["b"]


def test_two_processes_recreate_a_deleted_file_once(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    first, second = sqlite(), sqlite()
    write(first, "a")
    assert written(second) == ["a"]
    (tmp_path / "crow.db").unlink()
    for database in (first, second):
        with pytest.raises(StoreError, match="was moved, deleted or replaced"):
            write(database, "b")
        write(database, "c" if database is first else "d")
    assert written(first) == ["c", "d"]


def test_damaged_text_can_still_be_read(sqlite: Callable[..., Database]) -> None:
    database = sqlite()
    with database.begin_write() as connection:
        connection.execute(text("INSERT INTO blobs VALUES (CAST(x'61ff62' AS TEXT), x'')"))
    assert written(database) == ["a\udcffb"]
