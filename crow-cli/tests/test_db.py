"""`crow db` as a real command, with text and JSON output."""

import json
import sqlite3
from typing import TYPE_CHECKING

import pytest
from crow_core.testing import Reply, ScriptedServer

if TYPE_CHECKING:
    from conftest import Machine

pytestmark = pytest.mark.anyio


@pytest.fixture
async def used(machine: "Machine") -> "Machine":
    """Run one prompt, so that there is a database."""
    async with ScriptedServer([Reply("Hello.")]) as server:
        machine.ask(server.url)
        assert (await machine.crow("run", "hi")).code == 0
    return machine


async def test_path_is_printed_before_and_after_the_database_exists(machine: "Machine"):
    assert (await machine.crow("db", "path")).out == f"{machine.home / 'crow' / 'crow.db'}\n"
    assert not (machine.home / "crow").exists()
    machine.configure('[database]\nurl = "postgresql://me:hidden@host/crow?password=hidden"\n')
    assert (await machine.crow("db", "path")).out == "postgresql+psycopg://me:***@host/crow\n"


async def test_missing_database_is_reported_and_not_made(machine: "Machine"):
    for command in ("info", "check"):
        done = await machine.crow("db", command)
        assert (done.code, done.out) == (2, "")
        assert "Nothing has been stored yet" in done.err
    assert not (machine.home / "crow").exists()


async def test_unusable_url_is_reported_without_its_password(machine: "Machine"):
    machine.configure('[database]\nurl = "mysql://me:hidden@host/crow"\n')
    for command in ("path", "info", "check"):
        done = await machine.crow("db", command)
        assert (done.code, done.out) == (2, "")
        assert "[database] url mysql://me:***@host/crow is of no use" in done.err


async def test_info_prints_size_and_row_counts(used: "Machine"):
    file = used.home / "crow" / "crow.db"
    done = await used.crow("db", "info")
    assert done.code == 0, done.err
    lines = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert lines["path"] == str(file)
    assert lines["sessions"] == "1"
    about = json.loads((await used.crow("db", "info", "--json")).out)
    assert about["path"] == str(file)
    assert about["bytes"] == len(file.read_bytes())
    assert about["revision"] == lines["revision"]
    assert about["rows"]["calls"] == 1


async def test_check_accepts_an_undamaged_database(used: "Machine"):
    done = await used.crow("db", "check")
    assert (done.code, done.err) == (0, "")
    assert "crow.db is well: 1 sessions, " in done.out


async def test_check_reports_damage_without_controlling_the_terminal(used: "Machine"):
    with sqlite3.connect(used.home / "crow" / "crow.db") as connection:
        connection.execute("UPDATE messages SET kind = 'user\x1b[2J', body = '{' WHERE kind = 'user'")
    connection.close()
    done = await used.crow("db", "check")
    assert (done.code, done.err) == (1, "")
    damaged, counted = done.out.splitlines()
    assert damaged.startswith("Row ")
    assert damaged.endswith("entry that was written.")
    assert "\x1b" not in damaged
    assert counted == "The full-text index holds 2 messages, and 1 are there."


async def test_check_reports_a_file_that_is_not_a_database(used: "Machine"):
    (used.home / "crow" / "crow.db").write_text("no database")
    done = await used.crow("db", "check")
    assert (done.code, done.err) == (1, "")
    assert "crow.db is no SQLite database" in done.out
