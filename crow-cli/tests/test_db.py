"""`crow db` as a real command, with text and JSON output."""

import asyncio
import json
import re
import shutil
import sqlite3
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crow_core.testing import Reply, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine, Prefork

pytestmark = pytest.mark.anyio


async def use(machine: "Machine") -> None:
    """Run one prompt, so that there is a database."""
    async with ScriptedServer([Reply("Hello.")]) as server:
        machine.ask(server.url)
        assert (await machine.crow("run", "hi")).code == 0


@pytest.fixture(scope="module")
def after_use(prepared: Callable[..., Callable[..., "Machine"]]) -> Callable[..., "Machine"]:
    return prepared(use)


@pytest.fixture
def used(after_use: Callable[..., "Machine"], prefork: "Prefork | None") -> "Machine":
    """A machine on which one prompt was run."""
    return after_use(prefork)


async def test_path_is_printed_before_and_after_the_database_exists(machine: "Machine"):
    assert (await machine.crow("db", "path")).out == f"{machine.home / 'crow' / 'crow.db'}\n"
    assert not (machine.home / "crow").exists()
    machine.configure('[database]\nurl = "postgresql://me:hidden@host/crow?password=hidden"\n')
    assert (await machine.crow("db", "path")).out == "postgresql+psycopg://me:***@host/crow\n"


async def test_missing_database_is_reported_and_not_made(machine: "Machine"):
    for command in (("db", "info"), ("db", "check"), ("sessions", "search", "a"), ("sessions", "fork", "a")):
        done = await machine.crow(*command)
        assert (done.code, done.out) == (2, "")
        assert "Nothing has been stored yet" in done.err
    assert not (machine.home / "crow").exists()


async def test_unusable_url_is_reported_without_its_password(machine: "Machine"):
    machine.configure('[database]\nurl = "mysql://me:hidden@host/crow"\n')
    for command in ("path", "info", "check"):
        done = await machine.crow("db", command)
        assert (done.code, done.out) == (2, "")
        assert "[database] url mysql://me:***@host/crow cannot be used" in done.err


async def test_unknown_setting_is_reported(machine: "Machine"):
    machine.configure('[database]\nsynchronous = "off"\n')
    done = await machine.crow("db", "path")
    assert (done.code, done.out) == (2, "")
    assert "database.synchronous: invalid enum value 'off'" in done.err


async def test_durable_database_is_the_same_one(used: "Machine"):
    used.configure('[database]\nsynchronous = "full"\n')
    assert (await used.crow("db", "path")).out == f"{used.home / 'crow' / 'crow.db'}\n"
    assert len(await list_titles(used)) == 1
    async with ScriptedServer([Reply("Hello.")]) as server:
        used.ask(server.url)
        assert (await used.crow("run", "two")).code == 0
    assert len(await list_titles(used)) == 2


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
    with closing(sqlite3.connect(used.home / "crow" / "crow.db")) as connection, connection:
        connection.execute("UPDATE messages SET kind = 'user\x1b[2J', body = '{' WHERE kind = 'user'")
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


def age_sessions(machine: "Machine", days: int) -> None:
    """Make all sessions that many days older."""
    with closing(sqlite3.connect(machine.home / "crow" / "crow.db")) as connection, connection:
        connection.execute("UPDATE sessions SET updated = updated - ?", (days * 86_400_000,))


async def list_titles(machine: "Machine") -> list[str]:
    return [one["title"] for one in json.loads((await machine.crow("sessions", "list", "--all", "--json")).out)]


async def use_and_age(machine: "Machine") -> None:
    """Run a long prompt with a tool call a hundred days ago, and another one today."""
    machine.configure('[permissions]\nallow = ["terminal:true"]\n')
    call = Reply(tool_calls=[{"name": "terminal", "arguments": {"command": "true"}}])
    async with ScriptedServer([call, Reply("Done."), Reply("Hello.")]) as server:
        machine.ask(server.url)
        assert (await machine.crow("run", "long ago", stdin="L" * 300_000)).code == 0
        age_sessions(machine, 100)
        assert (await machine.crow("run", "today")).code == 0


@pytest.fixture(scope="module")
def after_aging(prepared: Callable[..., Callable[..., "Machine"]]) -> Callable[..., "Machine"]:
    return prepared(use_and_age)


@pytest.fixture
def aged(after_aging: Callable[..., "Machine"], prefork: "Prefork | None") -> "Machine":
    """A machine with a large session of a hundred days ago, and another of today."""
    return after_aging(prefork)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [("--older-than", "90"), ("--max-size", "0", "--older-than", "1"), ("--older-than", "99", "--folder", ".")],
)
async def test_prune_lists_what_would_go_and_deletes_it_only_when_told_to(aged: "Machine", options: tuple[str, ...]):
    file = aged.home / "crow" / "crow.db"
    before, listed = file.stat().st_size, await list_titles(aged)
    done = await aged.crow("db", "prune", *options)
    assert done.code == 0, done.err
    assert "long ago" in done.out
    assert "today" not in done.out
    assert "1 sessions, about 3" in done.err
    assert "Nothing was deleted; --yes deletes them." in done.err
    assert await list_titles(aged) == listed
    done = await aged.crow("db", "prune", "--yes", *options)
    assert (done.code, done.out) == (0, ""), done.err
    assert "Deleted 1 sessions." in done.err
    assert await list_titles(aged) == ["today"]
    assert file.stat().st_size < before - 200_000
    assert (await aged.crow("audit", "verify")).out.startswith("All 2 records are as they were written.\n")
    assert (await aged.crow("db", "check")).code == 0


async def test_prune_by_size_keeps_the_latest_sessions(aged: "Machine"):
    said = (await aged.crow("db", "prune", "--max-size", "100", "--yes")).err
    assert re.fullmatch(r"All sessions take about 3\d\d,\d{3} bytes, no more than 100 MB: none has to go.\n", said)
    old = (await aged.crow("db", "prune", "--max-size", "0", "--older-than", "999")).err
    assert old == "No session was last used more than 999 days ago.\n"
    elsewhere = (await aged.crow("db", "prune", "--folder", str(aged.home), "--older-than", "999")).err
    assert elsewhere == f"No session in {aged.home} or below it was last used more than 999 days ago.\n"
    assert (await aged.crow("db", "prune", "--folder", str(aged.home))).err == (
        f"There is no session in {aged.home} or below it.\n"
    )
    assert (await aged.crow("db", "prune", "--max-size", "0", "--yes")).code == 0
    assert await list_titles(aged) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("folder", ["/nowhere", "%", "/", "proj"])
async def test_prune_takes_only_the_folder_that_is_named(aged: "Machine", folder: str):
    done = await aged.crow("db", "prune", "--folder", folder, "--yes")
    assert done.code == 0
    assert len(await list_titles(aged)) == (0 if folder == "/" else 2)


async def test_prune_leaves_an_open_session(used: "Machine"):
    async with ScriptedServer([Reply("Hello.")]) as server:
        used.ask(server.url)
        async with used.editor() as editor:
            session = await editor.new_session(str(used.project))
            await editor.prompt(session.session_id, "open")
            done = await used.crow("db", "prune", "--max-size", "0", "--yes")
            assert f"Session {session.session_id} is open in process" in done.err
            assert "Deleted 1 sessions." in done.err
    assert await list_titles(used) == ["open"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "say which sessions"),
        (("--yes",), "say which sessions"),
        (("--older-than", "soon"), "'soon' is not a valid integer"),
        (("--older-than", "-1"), "-1 is not in the range"),
        (("--max-size", "1GB"), "'1GB' is not a valid integer"),
    ],
)
async def test_prune_refuses_what_it_does_not_understand(used: "Machine", options: tuple[str, ...], said: str):
    done = await used.crow("db", "prune", *options)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert len(await list_titles(used)) == 1


async def test_backup_is_a_complete_database(used: "Machine"):
    copy = used.home / "copy.db"
    async with ScriptedServer([Reply("Hello.")]) as server:
        used.ask(server.url)
        async with used.editor() as editor:  # the database is open
            session = await editor.new_session(str(used.project))
            await editor.prompt(session.session_id, "two")
            done = await used.crow("db", "backup", str(copy))
    assert done.code == 0, done.err
    assert copy.stat().st_mode & 0o077 == 0
    assert (await used.crow("db", "restore", str(copy))).code == 0
    assert sorted(await list_titles(used)) == ["hi", "two"]
    assert (await used.crow("db", "check")).code == 0


def list_files(file: Path) -> dict[str, bytes]:
    """Return the files of a database by their names, without the one that is locked."""
    return {path.name: path.read_bytes() for path in file.parent.glob("crow.db*") if not path.name.endswith("-lock")}


def leave_unfinished(file: Path) -> None:
    """Leave the files of a crow that was killed: its last commits are in the write-ahead log alone."""
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("UPDATE sessions SET title = 'newer'")
    connection.commit()
    files = list_files(file)
    connection.close()
    for name, data in files.items():
        file.with_name(name).write_bytes(data)


@pytest.mark.parametrize("state", ["left by a killed crow", "damaged", "missing"])
async def test_restored_backup_is_the_database_and_what_was_there_is_moved_aside(used: "Machine", state: str):
    file, copy = used.home / "crow" / "crow.db", used.home / "copy.db"
    said = (await used.crow("db", "backup", str(copy))).out
    assert f"`crow db restore {copy}` puts it in the place of the database." in said
    backup = copy.read_bytes()
    match state:
        case "damaged":
            file.write_bytes(b"no database")
            assert "`crow db restore FILE`" in (await used.crow("db", "check")).out
        case "missing":
            file.unlink()
        case _:
            leave_unfinished(file)
    before = list_files(file)
    done = await used.crow("db", "restore", str(copy))
    assert done.code == 0, done.err
    assert copy.read_bytes() == backup
    assert file.stat().st_mode & 0o077 == 0
    aside = sorted(file.parent.glob("crow.db.replaced-*"))
    assert {re.sub(r".replaced-\d+-\d+", "", path.name): path.read_bytes() for path in aside} == before
    assert all(str(path) in done.out for path in aside)
    assert await list_titles(used) == ["hi"]
    assert (await used.crow("db", "check")).code == 0
    if state == "left by a killed crow":
        with closing(sqlite3.connect(aside[0])) as connection:
            assert connection.execute("SELECT title FROM sessions").fetchall() == [("newer",)]


async def test_restore_refuses_what_is_no_backup_and_an_open_database(used: "Machine"):
    file, copy = used.home / "crow" / "crow.db", used.home / "copy.db"
    assert (await used.crow("db", "backup", str(copy))).code == 0
    (used.project / "text").write_text("mine")
    (used.project / "torn").write_bytes(copy.read_bytes()[:-8192])
    with closing(sqlite3.connect(used.project / "other")) as connection:
        connection.execute("CREATE TABLE t (x)")
    shutil.copy(copy, used.project / "newer")
    with closing(sqlite3.connect(used.project / "newer")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999', oldest_reader = '9999'")
    for name, said in (
        ("text", "cannot be used: file is not a database"),
        ("torn", "Nothing was changed."),
        ("other", "is not a database of crow"),
        ("newer", "was written by a newer crow"),
        ("nothing", "is not a file"),
        (str(file), "is the database itself"),
    ):
        done = await used.crow("db", "restore", name)
        assert (done.code, done.out) == (2, ""), name
        assert said in done.err
    async with ScriptedServer([Reply("Hello.")]) as server:
        used.ask(server.url)
        async with used.editor() as editor:
            session = await editor.new_session(str(used.project))
            await editor.prompt(session.session_id, "two")
            done = await used.crow("db", "restore", str(copy))
            assert (done.code, done.out) == (2, "")
            assert "crow.db is open in another process. End every crow, then try again." in done.err
    assert sorted(await list_titles(used)) == ["hi", "two"]
    assert not [*file.parent.glob("crow.db.replaced-*")]


async def test_words_of_deleted_sessions_are_gone_from_the_files(used: "Machine"):
    file = used.home / "crow" / "crow.db"
    word = "zyzzyva"
    async with ScriptedServer([Reply(f"{word} {n}") for n in range(20)]) as server:
        used.ask(server.url)
        async with used.editor() as editor:
            for n in range(20):
                session = await editor.new_session(str(used.project))
                await editor.prompt(session.session_id, f"{word} {n}")
    old = file.with_name("crow.db.before-0001")
    old.write_text("an earlier copy")
    assert word.encode() in file.read_bytes()
    rows = json.loads((await used.crow("sessions", "list", "--all", "--json")).out)
    assert str(old) in (await used.crow("db", "info")).out
    done = await used.crow("sessions", "delete", "--yes", *(one["id"] for one in rows))
    assert done.code == 0, done.err
    assert f"An earlier copy of the database still has them: {old}." in done.err
    assert "`crow db prune` deletes" in done.err
    for path in file.parent.glob("crow.db*"):
        assert word.encode() not in path.read_bytes(), path
    said = (await used.crow("db", "prune", "--max-size", "0")).err
    assert f"With --yes, a copy of the database goes, too: {old}." in said
    assert old.exists()
    assert f"{old}." in (await used.crow("db", "prune", "--max-size", "0", "--yes")).err
    assert not old.exists()
    assert (await used.crow("db", "check")).code == 0


@pytest.mark.parametrize("command", ["backup", "repair"])
async def test_copy_never_replaces_a_file(used: "Machine", command: str):
    (used.project / "copy.db").write_text("mine")
    for name, said in (("copy.db", "is there already"), ("no/folder/copy.db", "No such file or directory")):
        done = await used.crow("db", command, name)
        assert (done.code, done.out) == (2, "")
        assert said in done.err
    assert (used.project / "copy.db").read_text() == "mine"


async def test_backup_of_postgresql_names_its_own_program(machine: "Machine"):
    machine.configure('[database]\nurl = "postgresql://me:hidden@host/crow?password=hidden"\n')
    done = await machine.crow("db", "backup", "x.sql")
    assert (done.code, done.out) == (2, "")
    assert f"pg_dump --file={machine.project}/x.sql postgresql://me:***@host/crow" in done.err
    done = await machine.crow("db", "repair", "x.db")
    assert (done.code, done.out) == (2, "")
    assert "pg_dump" in done.err


async def test_repair_saves_what_can_be_read(aged: "Machine"):
    file, new = aged.home / "crow" / "crow.db", aged.home / "new.db"
    content = bytearray(file.read_bytes())
    with closing(sqlite3.connect(file)) as connection, connection:
        page = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'calls'").fetchone()[0]
    content[(page - 1) * 4096 : page * 4096] = bytes(4096)
    file.write_bytes(content)
    assert (await aged.crow("db", "check")).code == 1
    done = await aged.crow("db", "repair", str(new))
    assert done.code == 0, done.err
    assert file.read_bytes() == bytes(content)
    assert "sessions: 2 rows saved." in done.out
    assert "calls: 0 rows saved" in done.out
    new.replace(file)
    assert [title[:8] for title in sorted(await list_titles(aged))] == ["long ago", "today"]
    assert (await aged.crow("audit", "verify")).code == 0
    found = (await aged.crow("sessions", "search", "today")).out
    assert "today" in found


async def test_repair_of_what_is_no_database_is_one_sentence(used: "Machine"):
    (used.home / "crow" / "crow.db").write_text("no database")
    done = await used.crow("db", "repair", "new.db")
    assert (done.code, done.out) == (2, "")
    assert "Nothing can be saved" in done.err
    assert not (used.project / "new.db").exists()


async def run_read_only(machine: "Machine", *args: str) -> tuple[int, str, str]:
    """Run `crow` where its data is on a read-only disk."""
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, str(machine.home), sys.executable, "-m", "crow_cli", *args]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=machine.env, cwd=machine.project
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def mounts() -> None:
    """Skip the test where this user may not mount a disk."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mounting a read-only disk needs root's rights on Linux")


@pytest.mark.slow
async def test_all_history_is_read_on_a_read_only_disk(aged: "Machine", mounts: None):
    id = json.loads((await aged.crow("sessions", "list", "--json")).out)[0]["id"]
    call = json.loads((await aged.crow("calls", "list", "--json")).out)[0]["id"]
    for command in (
        ("sessions", "list"),
        ("sessions", "show", id),
        ("sessions", "search", "today"),
        ("sessions", "export", id),
        ("calls", "list"),
        ("calls", "show", call, "--request"),
        ("prompts", "list"),
        ("audit", "list"),
        ("audit", "verify"),
        ("db", "check"),
        ("db", "backup", str(aged.project / "copy.db")),
    ):
        expected = await aged.crow(*command) if command[:2] != ("db", "backup") else None
        code, out, err = await run_read_only(aged, *command)
        assert code == 0, (command, err)
        assert expected is None or (out, err) == (expected.out, expected.err)
    assert (aged.project / "copy.db").stat().st_size > 100_000


@pytest.mark.slow
async def test_nothing_is_deleted_on_a_read_only_disk(aged: "Machine", mounts: None):
    id = json.loads((await aged.crow("sessions", "list", "--json")).out)[0]["id"]
    shown = (await aged.crow("sessions", "show", id)).out
    assert await run_read_only(aged, "sessions", "show", id) == (0, shown, "")
    for command in (("sessions", "delete", "--yes", id), ("db", "prune", "--max-size", "0", "--yes")):
        code, _, err = await run_read_only(aged, *command)
        assert code == 2
        assert "crow.db cannot be opened. It must be a file that you may read and write" in err
    assert len(await list_titles(aged)) == 2


async def test_history_of_an_earlier_version_is_read_on_a_read_only_disk(machine: "Machine", mounts: None):
    machine.configure("")
    dump = Path(__file__).parents[2] / "crow-persistence" / "tests" / "databases" / "0001.sqlite.sql"
    with closing(sqlite3.connect(machine.home / "crow" / "crow.db")) as connection, connection:
        connection.executescript(dump.read_text())
    code, out, err = await run_read_only(machine, "sessions", "list", "--all")
    assert code == 0, err
    assert "pancakes" in out
    with closing(sqlite3.connect(machine.home / "crow" / "crow.db")) as connection, connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("0001",)


@pytest.mark.parametrize("command", ["sessions", "calls", "audit", "prompts", "workflows", "eval"])
async def test_lists_are_empty_before_anything_is_stored(machine: "Machine", command: str):
    done = await machine.crow(command, "list")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith("Nothing has been stored yet")
    done = await machine.crow(command, "list", "--json")
    assert (done.code, done.out) == (0, "[]\n")
