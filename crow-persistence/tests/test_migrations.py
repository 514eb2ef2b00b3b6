"""Migrations update a database of any revision to the current one, completely or not at all."""

import re
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from crow_core.acp.schema import LoadSessionRequest
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.testing import Reply, ScriptedModel, connect
from crow_persistence import audit, loader, requests
from crow_persistence import database as module
from crow_persistence.checks import check
from crow_persistence.database import LATEST_REVISION, OLDEST_READER, Database, read_oldest_reader, read_revision
from crow_persistence.extension import persistence
from crow_persistence.migrations import upgrade
from crow_persistence.tables import calls, metadata, sessions
from sqlalchemy import Connection, MetaData, create_engine, func, inspect, select, text

DATABASES = Path(__file__).parent / "databases"


def script() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", "crow_persistence:migrations")
    return ScriptDirectory.from_config(config)


REVISIONS = [found.revision for found in script().walk_revisions()]


def count_rows(database: Database) -> dict[str, int]:
    """Return the number of rows in each table."""
    with database.begin_read() as connection:
        return {
            name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for name, table in metadata.tables.items()
        }


def is_defined(name: str | None, kind: str, parents: Any) -> bool:
    """Test whether `tables.py` defines an object; the full-text search has tables of its own."""
    return kind != "table" or not str(name).startswith("search")


def test_latest_revision_is_the_last_migration() -> None:
    assert script().get_heads() == [LATEST_REVISION]


def test_migrations_create_the_same_tables_as_a_new_database(database: Database) -> None:
    engine = create_engine(database.url)
    with engine.begin() as connection:
        upgrade(connection)
        context = MigrationContext.configure(connection, opts={"include_name": is_defined})
        assert compare_metadata(context, metadata) == []
        assert read_revision(connection) == LATEST_REVISION
        migrated = shape(connection)
        every = reflect(connection)
        every.drop_all(connection, [table for name, table in every.tables.items() if not name.startswith("search_")])
    with database.begin_read() as connection:
        assert shape(connection) == migrated
        assert read_revision(connection) == LATEST_REVISION
    engine.dispose()


def reflect(connection: Connection) -> MetaData:
    every = MetaData()
    every.reflect(connection)
    return every


def shape(connection: Connection) -> dict[str, Any]:
    """Return all tables with their columns, keys and indexes, as the database has them."""
    found = inspect(connection)
    return {
        name: (
            {column["name"]: (str(column["type"]), column["nullable"]) for column in found.get_columns(name)},
            found.get_pk_constraint(name)["constrained_columns"],
            sorted(str(sorted(key.items())) for key in found.get_foreign_keys(name)),
            sorted(str(sorted(index.items())) for index in found.get_indexes(name)),
        )
        for name in found.get_table_names()
    }


@pytest.mark.parametrize("number", REVISIONS)
def test_database_of_every_revision_is_updated_to_the_latest(
    number: str, database: Database, earlier: Callable[[str], None]
) -> None:
    earlier(number)
    rows = count_rows(database)
    dump = (DATABASES / f"{number}.{'sqlite' if database.file else 'postgresql'}.sql").read_text()
    tried = {name for name in metadata.tables if re.search(rf"INSERT INTO (public\.)?\"?{name}\b", dump)}
    assert tried == {name for name in metadata.tables if re.search(rf"CREATE TABLE (public\.)?{name}\b", dump)}
    assert all(rows[name] for name in tried)
    with database.begin_read() as connection:
        assert read_revision(connection) == LATEST_REVISION
        for row in connection.execute(select(sessions).where(sessions.c.deleted.is_(None))):
            record = loader.load_session(connection, row)
            assert record.log
            assert record.system
            assert not record.damage
        assert all(requests.rebuild_request(connection, id)[1] for id in connection.scalars(select(calls.c.id)))
    audit.anchor(database)
    assert check(database) == []


def test_parts_of_a_stored_draft_are_joined(database: Database, earlier: Callable[[str], None]) -> None:
    earlier("0002")
    with database.begin_read() as connection:
        row = connection.execute(select(sessions).where(sessions.c.number == 1)).one()
        cut = loader.load_session(connection, row).log[-1]
    assert cut.get("content") == "And with cinnamon on top"
    assert cut.get("crow", {})["cut"] == "interrupted"


def test_update_leaves_a_backup_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: Callable[[str], None], database: Database
) -> None:
    earlier(LATEST_REVISION)
    rows = count_rows(database)
    database.close()
    monkeypatch.setattr(module, "LATEST_REVISION", "9998")  # as in a later version
    assert count_rows(database) == rows
    copy = tmp_path / "crow.db.before-9998"
    if database.file:
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        monkeypatch.undo()
        backup = Database(f"sqlite:///{copy}")
        assert count_rows(backup) == rows
        backup.close()
    else:
        assert not copy.exists()


def test_database_without_a_backup_is_not_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(f"sqlite:///{tmp_path / 'crow.db'}")
    rows = count_rows(database)
    database.close()
    (tmp_path / "crow.db.before-9998").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, "LATEST_REVISION", "9998")
        with pytest.raises(StoreError, match=r"crow\.db must be updated and cannot be backed up to .*before-9998"):
            count_rows(database)
    assert count_rows(database) == rows
    database.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["crow.db", "crow.db-lock", "crow.db.before-9998"]


def test_failed_first_start_is_repeated(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'crow.db'}")
    with limit_file_size(50_000), pytest.raises(StoreError, match=r"crow\.db could not be read or written"):
        count_rows(database)
    assert not any(count_rows(database).values())
    database.close()


@contextmanager
def limit_file_size(size: int) -> Generator[None]:
    """Limit the size of this process's files in bytes, as a full disk does."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def make_newer(database: Database, oldest_reader: str) -> None:
    """Change the database as a later version of crow may: a table and a column are added."""
    number = "BIGINT" if not database.file else "INTEGER"
    with database.begin_write() as connection:
        connection.execute(
            text(f"CREATE TABLE later (session {number} REFERENCES sessions (number) ON DELETE CASCADE)")
        )
        connection.execute(text("ALTER TABLE messages ADD COLUMN later TEXT"))
        connection.execute(text("ALTER TABLE calls ADD COLUMN later TEXT DEFAULT 'x' NOT NULL"))
        made = {"number": "9999", "oldest": oldest_reader}
        connection.execute(text("UPDATE alembic_version SET version_num = :number, oldest_reader = :oldest"), made)
    database.close()


def converse(database: Database) -> Crow:
    url = database.url.render_as_string(hide_password=False)
    return Crow(ScriptedModel(lambda request: Reply("Hello."))).use(persistence, url=url, folder=database.folder)


@pytest.mark.anyio
async def test_two_versions_share_a_database_whose_changes_both_understand(database: Database):
    """A worker of this version goes on while another has updated the tables, and sessions go from one to the other."""
    async with connect(converse(database)) as before:
        id = (await before.new_session("/")).session_id
        await before.prompt(id, "one")
        make_newer(database, oldest_reader=LATEST_REVISION)
        await before.prompt(id, "two")
    async with connect(converse(database)) as after:
        await after.request("session/load", LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[]))
        await after.prompt(id, "three")
    with database.begin_read() as connection:
        record = loader.load_session(connection, loader.find_session(connection, id))
        assert read_revision(connection) == "9999"
        assert connection.scalar(select(func.count()).select_from(calls)) == 3
    assert [entry.get("content") for entry in record.log if entry.get("role") == "user"] == ["one", "two", "three"]
    assert check(database) == []


@pytest.mark.parametrize("number", REVISIONS)
def test_updated_database_says_who_may_use_it(number: str, database: Database, earlier: Callable[[str], None]) -> None:
    earlier(number)
    with database.begin_read() as connection:
        assert read_oldest_reader(connection) == OLDEST_READER


def test_migrations_since_the_oldest_reader_only_add(database: Database, earlier: Callable[[str], None]) -> None:
    """Rows that the oldest reader writes fit the current tables, which have all that it reads."""
    if OLDEST_READER == LATEST_REVISION:
        pytest.skip("no other revision may use the current tables")
    earlier(OLDEST_READER)
    engine = create_engine(database.url)
    with engine.connect() as connection:
        old = shape(connection)
    engine.dispose()
    with database.begin_read() as connection:
        new = shape(connection)
        found = inspect(connection)
        for name, (columns, *_) in old.items():
            assert columns.items() <= new[name][0].items()
            added = [column for column in found.get_columns(name) if column["name"] not in columns]
            assert all(column["nullable"] or column["default"] for column in added), name
