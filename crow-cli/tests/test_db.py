"""`crow db`, as a person and as a script use it."""

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
    """A machine on which crow was asked something."""
    async with ScriptedServer([Reply("Hello.")]) as server:
        machine.ask(server.url)
        assert (await machine.crow("run", "hi")).code == 0
    return machine


async def test_path_says_where_the_database_is_or_will_be(machine: "Machine"):
    assert (await machine.crow("db", "path")).out == f"{machine.home / 'crow' / 'crow.db'}\n"
    assert not (machine.home / "crow").exists()
    machine.configure('[database]\nurl = "postgresql://me:hidden@host/crow?password=hidden"\n')
    assert (await machine.crow("db", "path")).out == "postgresql+psycopg://me:***@host/crow\n"


async def test_a_database_that_is_not_there_yet_is_told_and_not_made(machine: "Machine"):
    for command in ("info", "check"):
        told = await machine.crow("db", command)
        assert (told.code, told.out) == (2, "")
        assert "Nothing has been stored yet" in told.err
    assert not (machine.home / "crow").exists()


async def test_a_url_of_no_use_is_told(machine: "Machine"):
    machine.configure('[database]\nurl = "mysql://me:hidden@host/crow"\n')
    for command in ("path", "info", "check"):
        told = await machine.crow("db", command)
        assert (told.code, told.out) == (2, "")
        assert "[database] url mysql://me:***@host/crow cannot be used" in told.err


async def test_info_says_how_much_there_is(used: "Machine"):
    file = used.home / "crow" / "crow.db"
    told = await used.crow("db", "info")
    assert told.code == 0, told.err
    lines = dict(line.split(maxsplit=1) for line in told.out.splitlines())
    assert lines["path"] == str(file)
    assert lines["sessions"] == "1"
    about = json.loads((await used.crow("db", "info", "--json")).out)
    assert about["path"] == str(file)
    assert about["bytes"] == len(file.read_bytes())
    assert about["revision"] == lines["revision"]
    assert about["rows"]["calls"] == 1


async def test_check_says_that_all_is_well(used: "Machine"):
    told = await used.crow("db", "check")
    assert (told.code, told.err) == (0, "")
    assert "crow.db is well: 1 sessions, " in told.out


async def test_check_says_what_is_damaged_without_a_word_to_the_terminal(used: "Machine"):
    with sqlite3.connect(used.home / "crow" / "crow.db") as connection:
        connection.execute("UPDATE messages SET kind = 'user\x1b[2J', body = '{' WHERE kind = 'user'")
    connection.close()
    told = await used.crow("db", "check")
    assert (told.code, told.err) == (1, "")
    damaged, counted = told.out.splitlines()
    assert damaged.startswith("Row ")
    assert damaged.endswith("entry that was written.")
    assert "\x1b" not in damaged
    assert counted == "The full-text index holds 2 messages, and 1 are there."


async def test_check_says_what_it_cannot_open(used: "Machine"):
    (used.home / "crow" / "crow.db").write_text("no database")
    told = await used.crow("db", "check")
    assert (told.code, told.err) == (1, "")
    assert "crow.db is no SQLite database" in told.out
