"""A damaged file is repaired into a new one: what can be read is there, and the new file is consistent."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.testing import Reply, ScriptedModel, connect
from crow_persistence.checks import check, count_rows
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.repair import repair

PAGE_SIZE = 4096
REPEATS = 20
"""Number of different damages that are tried."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def content(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> bytes:
    """The content of a database with four sessions of ten prompts."""
    file = tmp_path_factory.mktemp("intact") / "crow.db"
    model = ScriptedModel(lambda request: Reply("word " * 400))
    async with connect(Crow(model).use(persistence, url=f"sqlite:///{file}")) as editor:
        for _ in range(4):
            id = (await editor.new_session("/")).session_id
            for number in range(10):
                await editor.prompt(id, f"prompt {number}")
    return file.read_bytes()


def repair_file(folder: Path, content: bytes) -> tuple[dict[str, int], list[str]]:
    """Repair a file. Return the number of rows in each table of the new one, and its faults."""
    damaged, new = folder / "crow.db", folder / "new.db"
    damaged.write_bytes(content)
    repair(damaged, new)
    assert damaged.read_bytes() == content
    assert sorted(file.name for file in folder.iterdir()) == ["crow.db", "crow.db-lock", "new.db"]
    repaired = Database(f"sqlite:///{new}")
    with repaired.begin_read() as connection:
        rows = count_rows(connection)
    faults = [fault for fault in check(repaired) if not fault.endswith("is not there.")]
    repaired.close()
    return rows, faults


@pytest.mark.anyio
async def test_intact_file_is_copied(content: bytes, tmp_path: Path):
    rows, faults = repair_file(tmp_path, content)
    assert faults == []
    assert (rows["sessions"], rows["calls"]) == (4, 40)


@pytest.mark.sampled(4)
@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(REPEATS))
async def test_damaged_pages_cost_only_their_rows(seed: int, content: bytes, tmp_path: Path):
    random, damaged = Random(seed), bytearray(content)
    pages = range(1, len(content) // PAGE_SIZE)  # the first one has the list of tables
    for page in random.sample(pages, random.randint(1, 3)):
        junk = random.randbytes(PAGE_SIZE) if seed % 2 else bytes(PAGE_SIZE)
        damaged[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = junk
    _, faults = repair_file(tmp_path, bytes(damaged))
    assert faults == []


@pytest.mark.anyio
async def test_one_damaged_leaf_of_the_messages_costs_few_of_them(content: bytes, tmp_path: Path):
    intact, damaged = tmp_path / "intact.db", bytearray(content)
    intact.write_bytes(content)
    with closing(sqlite3.connect(intact)) as connection:
        total = connection.execute("SELECT count(*) FROM messages").fetchone()[0]
        wanted = "SELECT pageno FROM dbstat WHERE name = 'messages' AND pagetype = 'leaf' ORDER BY pageno"
        try:
            leaves = [page for (page,) in connection.execute(wanted)]
        except sqlite3.OperationalError:
            pytest.skip("this SQLite cannot tell the pages of a table")
    intact.unlink()
    for page in (leaves[0], leaves[len(leaves) // 2], leaves[-1]):
        damaged[(page - 1) * PAGE_SIZE : page * PAGE_SIZE] = bytes(PAGE_SIZE)
    rows, faults = repair_file(tmp_path, bytes(damaged))
    assert faults == []
    assert rows["messages"] >= total - 3 * total / len(leaves) - 10
    assert rows["sessions"] == 4


@pytest.mark.anyio
@pytest.mark.parametrize("rest", [0, PAGE_SIZE // 2, 1])
async def test_end_of_a_file_that_was_cut_off_is_lost(rest: int, content: bytes, tmp_path: Path):
    rows, faults = repair_file(tmp_path, content[: len(content) // 2 // PAGE_SIZE * PAGE_SIZE + rest])
    assert faults == []
    assert rows["messages"]


@pytest.mark.parametrize("damage", [b"", b"no database", bytes(5 * PAGE_SIZE)])
def test_file_without_tables_is_refused(damage: bytes, tmp_path: Path):
    (tmp_path / "crow.db").write_bytes(damage)
    with pytest.raises(StoreError, match="Nothing can be saved"):
        repair(tmp_path / "crow.db", tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()


def test_database_of_an_earlier_revision_is_repaired(
    database: Database, earlier: Callable[[str], None], tmp_path: Path
) -> None:
    if not database.file:
        pytest.skip("crow repairs SQLite files")
    earlier("0001")
    assert len(repair(database.file, tmp_path / "new.db")) > 5
    repaired = Database(f"sqlite:///{tmp_path / 'new.db'}")
    assert [fault for fault in check(repaired) if "audit.head" not in fault] == []
    repaired.close()
