"""A database of any crow becomes one of this crow's, whole or not at all."""

import resource
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
from crow_core.errors import StoreError
from crow_persistence import audit, loader, requests
from crow_persistence import database as module
from crow_persistence.checks import check
from crow_persistence.database import LATEST_REVISION, Database, read_revision
from crow_persistence.migrations import upgrade
from crow_persistence.tables import calls, metadata, sessions
from sqlalchemy import Connection, MetaData, create_engine, func, inspect, select

DATABASES = Path(__file__).parent / "databases"


def script() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", "crow_persistence:migrations")
    return ScriptDirectory.from_config(config)


REVISIONS = [found.revision for found in script().walk_revisions()]


def counted(database: Database) -> dict[str, int]:
    """How many rows each table has."""
    with database.begin_read() as connection:
        return {
            name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for name, table in metadata.tables.items()
        }


def ours(name: str | None, kind: str, parents: Any) -> bool:
    """Whether it is for tables.py to say what it looks like; the full text has its own tables."""
    return kind != "table" or not str(name).startswith("search")


def test_the_revision_that_is_asked_for_is_the_last_one() -> None:
    assert script().get_heads() == [LATEST_REVISION]


def test_the_migrations_make_the_tables_that_a_new_database_has(database: Database) -> None:
    engine = create_engine(database.url)
    with engine.begin() as connection:
        upgrade(connection)
        context = MigrationContext.configure(connection, opts={"include_name": ours})
        assert compare_metadata(context, metadata) == []
        assert read_revision(connection) == LATEST_REVISION
        migrated = shape(connection)
        every = reflected(connection)
        every.drop_all(connection, [table for name, table in every.tables.items() if not name.startswith("search_")])
    with database.begin_read() as connection:
        assert shape(connection) == migrated
        assert read_revision(connection) == LATEST_REVISION
    engine.dispose()


def reflected(connection: Connection) -> MetaData:
    every = MetaData()
    every.reflect(connection)
    return every


def shape(connection: Connection) -> dict[str, Any]:
    """All tables with their columns, keys and indexes, as the database has them."""
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
def test_a_database_of_every_revision_becomes_one_of_the_last(
    number: str, database: Database, earlier: Callable[[str], None]
) -> None:
    earlier(number)
    rows = counted(database)
    assert all(rows.values()), "a table is not tried out"
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


def test_what_is_in_a_database_stays_in_a_copy_when_it_is_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: Callable[[str], None], database: Database
) -> None:
    earlier(LATEST_REVISION)
    rows = counted(database)
    database.close()
    monkeypatch.setattr(module, "LATEST_REVISION", "9998")  # as the next crow has it
    assert counted(database) == rows
    copy = tmp_path / "crow.db.before-9998"
    if database.file:
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        monkeypatch.undo()
        backup = Database(f"sqlite:///{copy}")
        assert counted(backup) == rows
        backup.close()
    else:
        assert not copy.exists()


def test_a_database_that_cannot_be_copied_is_not_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(f"sqlite:///{tmp_path / 'crow.db'}")
    rows = counted(database)
    database.close()
    (tmp_path / "crow.db.before-9998").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, "LATEST_REVISION", "9998")
        with pytest.raises(StoreError, match=r"crow\.db must be updated and cannot be copied to .*before-9998"):
            counted(database)
    assert counted(database) == rows
    database.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["crow.db", "crow.db.before-9998"]


def test_a_first_start_that_fails_half_way_is_begun_anew(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'crow.db'}")
    with files_of_at_most(50_000), pytest.raises(StoreError, match=r"crow\.db could not be read or written"):
        counted(database)
    assert not any(counted(database).values())
    database.close()


@contextmanager
def files_of_at_most(size: int) -> Generator[None]:
    """Let no file of this process grow beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
