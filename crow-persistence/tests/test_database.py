import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree
from threading import Barrier

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
    """Opens `crow.db` in a folder."""
    opened: list[Database] = []

    def sqlite(folder: Path = tmp_path, query: str = "") -> Database:
        opened.append(Database(f"sqlite:///{folder / 'crow.db'}{query}"))
        return opened[-1]

    yield sqlite
    for database in opened:
        database.close()


@pytest.fixture
def unprivileged(sqlite: object) -> Iterator[Path]:
    """A folder of a user for whom modes count, and the rights of that user: root may write everything."""
    folder = Path(tempfile.mkdtemp())
    before = os.geteuid()
    if before == 0:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    yield folder
    os.seteuid(before)
    rmtree(folder)


def test_what_is_written_is_read_back(database: Database) -> None:
    write(database, "a")
    assert written(database) == ["a"]


def test_a_block_that_fails_leaves_nothing_behind(database: Database) -> None:
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


def test_who_reads_sees_one_state_while_another_writes(database: Database) -> None:
    write(database, "a")
    with database.begin_read() as connection:
        assert connection.scalar(select(func.count()).select_from(blobs)) == 1
        write(database, "b")
        assert connection.scalar(select(func.count()).select_from(blobs)) == 1
    assert written(database) == ["a", "b"]


def test_a_row_that_points_nowhere_is_refused_in_a_sentence_that_quotes_nothing(database: Database) -> None:
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
    """A process that waits for a line, opens the database and writes ten rows."""
    url = database.url.render_as_string(hide_password=False)
    arguments = [sys.executable, "-c", OPEN, url, str(database.folder), name]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_that_start_at_once_make_one_database(database: Database) -> None:
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


def test_a_database_that_is_up_to_date_is_opened_without_alembic(database: Database) -> None:
    write(database, "z")
    assert start(database, "a").communicate("\n")[0].split() == ["ready", "False"]


def test_only_its_owner_can_read_a_database(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    database = sqlite(tmp_path / "new" / "folder")
    write(database, "a")
    assert stat.S_IMODE(database.folder.stat().st_mode) == 0o700
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in database.folder.iterdir()}
    assert files == {"crow.db": 0o600, "crow.db-shm": 0o600, "crow.db-wal": 0o600}


def test_a_database_that_others_could_read_is_closed_to_them(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
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
def test_a_url_that_cannot_be_used_is_told_with_one_that_can(url: str) -> None:
    with pytest.raises(StoreError, match=r"\[database\] url.*sqlite:////.*postgresql\+psycopg://") as error:
        Database(url)
    assert "hidden" not in str(error.value)


def test_a_file_may_be_named_from_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Database("sqlite:///~/crow.db").file == tmp_path / "crow.db"


def test_without_psycopg_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    database = Database("postgresql://me:hidden@host/crow")
    with pytest.raises(StoreError, match=r"pip install 'crow-persistence\[postgres\]'") as error:
        written(database)
    assert "hidden" not in str(error.value)


def test_a_server_that_is_not_there_is_named_without_the_password(tmp_path: Path) -> None:
    database = Database("postgresql://me:hidden@127.0.0.1:1/crow?password=hidden", tmp_path)
    with pytest.raises(
        StoreError, match=r"cannot be reached .*127\.0\.0\.1:1/crow.*refused.*\[database\] url"
    ) as error:
        written(database)
    assert "hidden" not in str(error.value)


def test_a_database_that_the_server_does_not_know_works_as_soon_as_it_is_made(postgres: str, tmp_path: Path) -> None:
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


def test_a_connection_that_broke_between_two_uses_is_made_anew(postgres: str, tmp_path: Path) -> None:
    database = Database(postgres, tmp_path)
    write(database, "a")
    disconnect(postgres)
    assert written(database) == ["a"]

    def be_disconnected() -> None:
        with database.begin_write() as connection:
            connection.execute(insert(blobs).values(hash="b", data=b""))
            disconnect(postgres)
            connection.execute(insert(blobs).values(hash="c", data=b""))

    with pytest.raises(StoreError, match="PostgreSQL"):
        be_disconnected()
    write(database, "d")
    assert written(database) == ["a", "d"]
    database.close()


def disconnect(postgres: str) -> None:
    """End everyone's connections to a database."""
    engine = create_engine(postgres)
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    with engine.connect() as connection:
        connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"))
    engine.dispose()


def test_a_table_that_someone_holds_is_waited_for_only_so_long(postgres: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_locked_file_is_waited_for_only_so_long(kind: str, tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    database = sqlite(query="?timeout=0.02")
    other = sqlite3.connect(tmp_path / "crow.db", isolation_level=None)
    other.execute(f"BEGIN {kind}")  # before there is anything in it
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


def test_who_waited_in_vain_has_waited_for_all_that_is_written_at_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOW_FAILURE", 0.0)
    monkeypatch.setattr(module, "FAIL_FAST_PERIOD", 3600.0)

    def patience() -> str:
        asked = "PRAGMA busy_timeout" if database.file else "SELECT current_setting('lock_timeout')"
        with database.begin_write() as connection:
            return str(connection.exec_driver_sql(asked).scalar_one())

    before = patience()
    with pytest.raises(StoreError), database.begin_write() as connection:
        connection.execute(text("INSERT INTO nothing VALUES (1)"))  # as if a lock had been waited for
    assert [patience(), patience()] == ["0" if database.file else "1ms", before]


def test_a_full_disk_is_told_and_it_works_again_when_there_is_room(sqlite: Callable[..., Database]) -> None:
    database = sqlite()
    write(database, "a")
    with database.begin_write() as connection:  # this connection may not let the file grow any more
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
    with pytest.raises(StoreError, match=r"crow\.db cannot grow"):
        write(database, "b", bytes(100_000))
    write(database, "c", bytes(100_000))
    assert written(database) == ["a", "c"]


@pytest.mark.parametrize("mode", [0o400, 0o000])
def test_a_file_that_may_not_be_written_is_told_and_it_works_again_when_it_may(
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
def test_a_folder_that_is_closed_is_told_and_it_works_again_when_it_is_open(
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


def test_a_folder_in_the_files_place_is_told(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
    (tmp_path / "crow.db").mkdir()
    database = sqlite()
    with pytest.raises(StoreError, match=r"crow\.db cannot be opened"):
        written(database)
    (tmp_path / "crow.db").rmdir()
    assert written(database) == []


@pytest.mark.parametrize("content", [b"{}", b"not a database, but long enough to be one" * 100])
def test_a_file_of_another_kind_is_told_and_left_as_it_is(
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


def test_a_truncated_file_is_told_and_left_as_it_is(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
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


def test_another_programs_database_is_told_and_left_as_it_is(database: Database, tmp_path: Path) -> None:
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


def test_a_newer_crows_database_is_told_and_left_as_it_is(database: Database) -> None:
    write(database, "a")
    with database.begin_write() as connection:
        revision = connection.scalar(text("SELECT version_num FROM alembic_version"))
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(StoreError, match=rf"newer crow \(its revision is 9999, this one knows {revision}\)"):
        write(database, "b")
    other = create_engine(database.url)
    with other.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    other.dispose()
    assert written(database) == ["a"]


def test_a_deleted_file_is_told_once_and_a_new_one_is_begun(tmp_path: Path, sqlite: Callable[..., Database]) -> None:
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


def test_a_file_in_anothers_place_is_never_opened_with_the_journal_of_that(
    tmp_path: Path, sqlite: Callable[..., Database]
) -> None:
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


def test_two_processes_that_find_the_file_deleted_begin_one_new_one(
    tmp_path: Path, sqlite: Callable[..., Database]
) -> None:
    first, second = sqlite(), sqlite()
    write(first, "a")
    assert written(second) == ["a"]
    (tmp_path / "crow.db").unlink()
    for database in (first, second):
        with pytest.raises(StoreError, match="was moved, deleted or replaced"):
            write(database, "b")
        write(database, "c" if database is first else "d")
    assert written(first) == ["c", "d"]


def test_text_that_was_damaged_can_still_be_read(sqlite: Callable[..., Database]) -> None:
    database = sqlite()
    with database.begin_write() as connection:
        connection.execute(text("INSERT INTO blobs VALUES (CAST(x'61ff62' AS TEXT), x'')"))
    assert written(database) == ["a\udcffb"]
