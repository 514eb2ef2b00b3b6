"""Sessions are stored whatever happens, and restored unchanged."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    ImageBlock,
    ListSessionsRequest,
    LoadSessionRequest,
    TextBlock,
    UserMessageChunk,
)
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.messages.message import Message
from crow_core.messages.passes import view
from crow_core.models.model_call import ModelCall
from crow_core.session.log import new_id
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_extensions.commands import commands
from crow_extensions.undo import undo
from crow_persistence import commits, loader
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.sql_store import BlockingStore
from crow_persistence.tables import blobs, calls, draft_parts, drafts, messages, metadata, sessions
from crow_persistence.writes import SessionWrite
from sqlalchemy import Connection, Engine, create_engine, event, func, inspect, select, text

if TYPE_CHECKING:
    from conftest import Relay

pytestmark = pytest.mark.anyio

CANARY = "canary-4711-Zeisig"
IMAGE = ImageBlock(data="iVBORw0KGgo" * 500, mime_type="image/png")


def app(database: Database, *replies: Reply, **options: Any) -> Crow:
    """Return an app on this database, as in another process; its model plays the replies, or echoes."""
    model = ScriptedModel(replies or (lambda request: Reply(f"To {request['messages'][-1]['content']}.")))
    return Crow(model).use(persistence, url=url_of(database), folder=database.folder, **options)


def url_of(database: Database) -> str:
    return database.url.render_as_string(hide_password=False)


def asked(crow: Crow) -> list[dict[str, Any]]:
    """Return the requests to the app's model."""
    model = crow.models["scripted"]
    assert isinstance(model, ScriptedModel)
    return model.requests


async def load(editor: Editor, id: str) -> None:
    await editor.request("session/load", LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[]))


def stored(database: Database, id: str) -> list[Message]:
    """Return the stored log of a session."""
    with database.begin_read() as connection:
        record = loader.load_session(connection, loader.find_session(connection, id))
    assert not record.damage
    return record.log


def dump_tables(database: Database) -> str:
    """Return the contents of all tables."""
    with database.begin_read() as connection:
        rows = [tuple(row) for table in metadata.sorted_tables for row in connection.execute(select(table))]
    return str(rows)


async def test_session_is_restored_in_another_process(database: Database):
    async with connect(first := app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "one")
        await editor.prompt(id, [TextBlock(text="two"), IMAGE])
        log = first.sessions[id].log
    assert stored(database, id) == log
    async with connect(later := app(database)) as editor:
        await load(editor, id)
        said = [chunk.content for chunk in editor.of(UserMessageChunk)]
        assert said == [TextBlock(text="one"), TextBlock(text="two"), IMAGE]
        assert later.sessions[id].log == log
        await editor.prompt(id, "three")
        assert stored(database, id) == later.sessions[id].log
    before, after = asked(first)[-1]["messages"], asked(later)[0]["messages"]
    assert after[: len(before)] == before
    assert after[len(before)]["role"] == "assistant"


async def test_chosen_options_are_restored(database: Database):
    models = {name: ScriptedModel([Reply("Hello.")], name) for name in ("small", "large")}

    def crow() -> Crow:
        return Crow(models).use(persistence, url=url_of(database))

    async with connect(first := crow()) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.set_option(id, "model", "large")
        await editor.prompt(id, "hi")
        await first.sessions[id].set_title("A greeting")
    async with connect(later := crow()) as editor:
        await load(editor, id)
        session = later.sessions[id]
        assert (session.model.name, session.log.title, session.prompts.system) == (
            "large",
            "A greeting",
            asked_system(models),
        )
        listed = await editor.request("session/list", ListSessionsRequest())
        assert [found.title for found in listed.sessions] == ["A greeting"]


def asked_system(models: dict[str, ScriptedModel]) -> str:
    return models["large"].requests[0]["messages"][0]["content"]


async def test_session_is_listed_after_its_first_message(database: Database):
    async with connect(crow := app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        crow.sessions[id].log.append({"crow": {"kind": "title", "title": "Nothing yet"}})
        await crow.sessions[id].log.written()
        assert (await editor.request("session/list", ListSessionsRequest())).sessions == []
        await editor.prompt(id, "hi")
        listed = await editor.request("session/list", ListSessionsRequest())
        assert [found.title for found in listed.sessions] == ["Nothing yet"]


async def test_first_prompt_is_stored_before_its_request_leaves(database: Database):
    """The database opens while the user types."""
    found: list[str] = []

    def reply(request: dict[str, Any]) -> Reply:
        found.extend(str(entry.get("content")) for entry in stored(database, id) if entry.get("role") == "user")
        return Reply("Hello.")

    crow = Crow(ScriptedModel(reply)).use(persistence, url=url_of(database), folder=database.folder)
    async with connect(crow) as editor:
        id = (await editor.new_session("/tmp")).session_id
        async with asyncio.timeout(60):
            while not has_tables(database):
                await asyncio.sleep(0.5)  # long enough that the process counts as idle in between
        await editor.prompt(id, "first")
    assert found == ["first"]


def has_tables(database: Database) -> bool:
    """Test whether a database was opened, without opening it."""
    if database.file:
        return database.file.exists() and database.file.stat().st_size > 0
    engine = create_engine(database.url)
    try:
        return inspect(engine).has_table("messages")
    finally:
        engine.dispose()


async def test_update_is_sent_after_earlier_messages_are_committed(database: Database):
    async with connect(crow := app(database, Reply("Hello.", hang=True))) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "hi"))
        await editor.until(lambda editor: editor.text)
        assert view(stored(database, id))[0] == {"role": "user", "content": "hi"}
        await crow.cancel(crow.sessions[id])
        await turn


PROCESS = """
import asyncio, os, sys
from crow_core.app import Crow
from crow_core.testing import Reply, ScriptedModel, connect
from crow_persistence.extension import persistence

async def main(url, name, turns, last):
    replies = [Reply(f"{name} reply {n}") for n in range(turns)]
    crow = Crow(ScriptedModel([*replies, Reply(last, pace=0.02, hang=True)])).use(persistence, url=url)
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        print(id, flush=True)
        for n in range(turns):
            await editor.prompt(id, f"{name} prompt {n}")
        if last:
            turn = asyncio.ensure_future(editor.prompt(id, "the last"))
            await turn

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
"""
"""A process that runs some turns and then, if `last` is given, starts one that never ends."""


@contextmanager
def run_process(database: Database, name: str, turns: int, last: str = "") -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROCESS, url_of(database), name, str(turns), last]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_id(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_session_of_a_killed_process_can_continue(database: Database):
    """The streamed text is restored and marked as interrupted; the next request is valid, and no lease has to
    expire."""
    with run_process(database, "crow", 2, "word " * 100) as process:
        id = await asyncio.to_thread(read_id, process)
        while count_parts(database) < 2:
            await asyncio.sleep(0)
        shown = read_draft(database)
        process.kill()
    async with connect(crow := app(database)) as editor:
        await load(editor, id)
        cut = crow.sessions[id].log[-1]
        assert cut.get("crow", {})["cut"] == "interrupted"
        assert editor.text == f"crow reply 0crow reply 1{cut.get('content')}"
        assert str(cut.get("content")).startswith(shown)
        assert "word word".startswith(shown[:9])
        await editor.prompt(id, "and now?")
        roles = [message["role"] for message in asked(crow)[0]["messages"]]
        assert roles == ["system", *["user", "assistant"] * 3, "user"]
        assert not read_draft(database)
        assert count_parts(database) == 0
        assert stored(database, id) == crow.sessions[id].log


def count_parts(database: Database) -> int:
    """Return the number of parts of drafts behind their beginnings."""
    with database.begin_read() as connection:
        return connection.scalar(select(func.count()).select_from(draft_parts)) or 0


def read_draft(database: Database) -> str:
    """Return the text of the only draft; "" if there is none."""
    with database.begin_read() as connection:
        number = connection.scalar(select(drafts.c.session))
        return loader.read_draft_texts(connection, number)["content"] if number else ""


async def test_complete_reply_leaves_no_draft(database: Database):
    async with connect(app(database, Reply("word " * 30, pace=0.01))) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "hi"))
        while "word word" not in read_draft(database):
            await asyncio.sleep(0)
        await turn
        assert not read_draft(database)


@pytest.mark.slow
async def test_four_concurrent_processes_lose_nothing(database: Database):
    names = ["ada", "bob", "cyd", "dan"]
    with ExitStack() as stack:
        processes = [stack.enter_context(run_process(database, name, 25)) for name in names]
        ids = [await asyncio.to_thread(read_id, process) for process in processes]
        assert [await asyncio.to_thread(process.wait) for process in processes] == [0] * 4
    for name, id in zip(names, ids, strict=True):
        said = [message["content"] for message in view(stored(database, id))]
        assert said == [f"{name} {what} {n}" for n in range(25) for what in ("prompt", "reply")]


FAULT = {
    "sqlite": ["CREATE TRIGGER fault BEFORE INSERT ON messages BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"],
    "postgresql": [
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the disk is full'; END $$",
        "CREATE TRIGGER fault BEFORE INSERT ON messages FOR EACH ROW EXECUTE FUNCTION fail()",
    ],
}
MEND = {"sqlite": "DROP TRIGGER fault", "postgresql": "DROP TRIGGER fault ON messages"}


async def test_turn_that_cannot_be_written_fails_and_is_written_later(database: Database):
    async with connect(crow := app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "one")
        execute(database, FAULT)
        for words in ("two", "three"):
            with pytest.raises(RpcError) as caught:
                await editor.prompt(id, words)
            assert "the disk is full" in caught.value.data["details"]
        execute(database, {kind: [statement] for kind, statement in MEND.items()})
        await editor.prompt(id, "four")
        said = [message.get("content") for message in crow.sessions[id].log if message.get("role") == "user"]
        assert said == ["one", "two", "three", "four"]
        assert stored(database, id) == crow.sessions[id].log


def execute(database: Database, statements: dict[str, list[str]]) -> None:
    with database.begin_write() as connection:
        for statement in statements[connection.dialect.name]:
            connection.exec_driver_sql(statement)


async def test_locked_database_ends_the_turn_with_the_file_name(tmp_path: Path):
    file = tmp_path / "crow.db"
    database = Database(f"sqlite:///{file}?timeout=0.05")
    async with connect(crow := app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "one")
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            with pytest.raises(RpcError) as caught:
                await editor.prompt(id, "two")
            assert str(file) in caught.value.data["details"]
        await editor.prompt(id, "three")
        assert stored(database, id) == crow.sessions[id].log
    database.close()


async def test_session_is_rewritten_after_its_database_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commits, "HEARTBEAT_INTERVAL", 3600)  # a heartbeat must not be the first to fail
    database = Database(f"sqlite:///{tmp_path / 'crow.db'}")
    async with connect(crow := app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "one")
        for name in ("crow.db", "crow.db-wal", "crow.db-shm"):
            os.unlink(tmp_path / name)
        with pytest.raises(RpcError):
            await editor.prompt(id, "two")
        await editor.prompt(id, "three")
        with closing(Database(url_of(database))) as new:
            assert stored(new, id) == crow.sessions[id].log
        told = "This session is stored there again, without its earlier model calls."
        await editor.until(lambda editor: told in str(editor.updates))
        await editor.prompt(id, "four")
        assert str(editor.updates).count(told) == 1
    database.close()


async def test_model_call_in_another_file_is_written_with_its_session(tmp_path: Path):
    store, other = (BlockingStore(f"sqlite:///{tmp_path / name}.db", tmp_path) for name in ("crow", "other"))
    async with unstored_session() as mine, unstored_session() as foreign:
        for each, session in ((store, mine), (other, foreign)):
            session.log.append({"role": "user", "content": "one"})
            each.write_sessions([SessionWrite(session, entries=len(session.log))])
        other.database.close()
        for name in ("crow.db-wal", "crow.db-shm"):
            os.unlink(tmp_path / name)
        (tmp_path / "other.db").replace(tmp_path / "crow.db")
        with pytest.raises(StoreError, match="replaced"):
            store.send_heartbeat()  # is the first to notice
        call = ModelCall(mine.model, {"messages": []})
        store.write_sessions([SessionWrite(mine, model_calls=[call], entries=len(mine.log))])
        with store.database.begin_read() as connection:
            assert connection.scalar(select(sessions.c.id).join(calls)) == mine.id
    store.database.close()


class LostReplyDatabase(Database):
    """A database whose next commit succeeds and is then reported as failed."""

    lose_reply = False

    @contextmanager
    def begin_write(self, *, briefly: bool = False) -> Generator[Connection]:
        with super().begin_write(briefly=briefly) as connection:
            yield connection
        if self.lose_reply:
            self.lose_reply = False
            raise StoreError("The connection was lost.")


@asynccontextmanager
async def unstored_session() -> AsyncGenerator[Session]:
    """Yield a session of an app without a store."""
    async with connect(crow := Crow(ScriptedModel([]))) as editor:
        yield crow.sessions[(await editor.new_session("/")).session_id]


@pytest.mark.parametrize("first", [True, False])
async def test_committed_rows_are_not_written_twice_after_a_lost_reply(database: Database, first: bool):
    store = BlockingStore(url_of(database), database.folder)
    store.database = lossy = LostReplyDatabase(url_of(database), database.folder)
    async with unstored_session() as session:
        if not first:
            session.log.append({"role": "user", "content": "zero"})
            store.write_sessions([SessionWrite(session, entries=len(session.log))])
        lossy.lose_reply = True
        session.log.append({"role": "user", "content": "one"})
        with pytest.raises(StoreError):
            store.write_sessions([SessionWrite(session, entries=len(session.log))])
        session.log.append({"role": "user", "content": "two"})
        store.write_sessions([SessionWrite(session, entries=len(session.log))])
        assert stored(database, session.id) == session.log.entries
    lossy.close()


async def test_session_acquired_with_a_lost_reply_can_be_acquired_again(database: Database):
    async with connect(app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "one")
    store = BlockingStore(url_of(database), database.folder)
    store.database = lossy = LostReplyDatabase(url_of(database), database.folder)
    lossy.lose_reply = True
    with pytest.raises(StoreError):
        store.acquire(id)
    assert store.acquire(id)
    lossy.close()


async def test_five_thousand_messages_are_restored(database: Database):
    store = BlockingStore(url_of(database), database.folder)
    async with unstored_session() as session:
        for n in range(2500):
            session.log.append({"role": "user", "content": f"prompt {n}"})
            session.log.append({"role": "assistant", "content": f"reply {n}"})
        store.write_sessions([SessionWrite(session, entries=len(session.log))])
        assert stored(database, session.id) == session.log.entries
    store.database.close()


async def test_secret_is_nowhere_in_the_database(database: Database):
    crow = app(database, Reply(f"It is {CANARY}. " * 9, pace=0.03), secrets=lambda session: [CANARY])
    crow.instructions(lambda session: f"The key is {CANARY}.")
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, f"Tell {CANARY}"))
        while "It is [secret]" not in dump_tables(database):
            await asyncio.sleep(0)
        await turn
        await crow.sessions[id].set_title(CANARY)
    assert CANARY not in dump_tables(database)
    for file in database.folder.iterdir():
        assert CANARY.encode() not in file.read_bytes()


async def test_image_is_stored_once(database: Database):
    async with connect(app(database)) as editor:
        for _ in range(2):
            id = (await editor.new_session("/")).session_id
            await editor.prompt(id, [IMAGE])
            await editor.prompt(id, [IMAGE])
    with database.begin_read() as connection:
        images = [data for data in connection.scalars(select(blobs.c.data)) if IMAGE.data.encode() in data]
    assert len(images) == 1


DAMAGE: dict[str, tuple[int, int, str]] = {
    "a body that is no JSON": (-1, 0, "UPDATE messages SET body = '{' WHERE id = {user}"),
    "a body that is no entry": (-1, 0, """UPDATE messages SET body = '{"role": [1]}' WHERE id = {user}"""),
    "a parent that is itself": (-1, 0, "UPDATE messages SET parent = id WHERE id = {user}"),
    "a parent that comes later": (-1, 0, "UPDATE messages SET parent = id + 1 WHERE id = {user}"),
    "a parent that is gone": (-1, 0, "DELETE FROM messages WHERE id = {user}"),
    "a head that is gone": (0, 1, "UPDATE sessions SET head = 4711"),
    "an image that is gone": (-1, 0, "DELETE FROM blobs WHERE hash IN (SELECT blob FROM links WHERE message = {user})"),
    "a render that is gone": (-1, 0, "DELETE FROM renders"),
    "options that are no JSON": (0, 0, "UPDATE sessions SET options = '{', roots = 'x'"),
    "a draft that is no JSON": (0, 0, "INSERT INTO drafts SELECT number, 0, '{' FROM sessions"),
}
"""Damage by name: change of the restored and of the total number of messages, and the statement that does it."""


@pytest.mark.parametrize("name", DAMAGE)
async def test_rest_of_a_damaged_session_is_restored_and_counted(database: Database, name: str):
    async with connect(first := app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        for words in ("one", [TextBlock(text="two"), IMAGE], "three"):
            await editor.prompt(id, words)
        log = first.sessions[id].log
    restored, total, statement = DAMAGE[name]
    with database.begin_read() as connection:
        user = connection.scalars(select(messages.c.id).where(messages.c.kind == "user")).all()[1]
    damage(database, statement.replace("{user}", str(user)))
    async with connect(crow := app(database)) as editor:
        await load(editor, id)
        session = crow.sessions[id]
        said = f"{len(log) + restored} of {len(log) + total} messages of session {id} could be restored; crow db check"
        assert session.log.damage.startswith(said) if restored or total else not session.log.damage
        assert len([entry for entry in session.log if entry in log]) >= len(log) + restored
        await editor.prompt(id, "four")
        asked_again = view(session.log)
        assert asked(crow)[0]["messages"][1:] == asked_again[:-1]
        assert json.dumps(asked_again).count("one") == 2
        assert asked_again[-2]["content"] == "four"


@pytest.mark.parametrize("moment", ["between turns", "within a turn", "within a transaction"])
async def test_restart_of_postgresql_ends_no_turn(relay: "tuple[Relay, str]", tmp_path: Path, moment: str):
    server, url = relay
    database = Database(url, tmp_path)
    crow = app(database, Reply("One."), Reply("Two."), Reply("Three."))
    begun = False

    @crow.before_model
    def restart(request: Any, session: Session) -> Any:
        if moment == "within a turn" and begun:
            server.restart(0.5)
        return request

    def restart_once(*_: Any) -> None:
        event.remove(Engine, "before_cursor_execute", restart_once)
        server.restart(0.5)

    async with connect(crow) as editor:
        id = (await editor.new_session("/tmp")).session_id
        await editor.prompt(id, "first")
        begun = True
        if moment == "between turns":
            server.restart(0.5)
        elif moment == "within a transaction":
            event.listen(Engine, "before_cursor_execute", restart_once)
        assert (await editor.prompt(id, "second")).stop_reason == "end_turn"
        assert (await editor.prompt(id, "third")).stop_reason == "end_turn"
    said = [entry.get("content") for entry in stored(database, id) if "role" in entry]
    assert said == ["first", "One.", "second", "Two.", "third", "Three."]
    database.close()


def damage(database: Database, statement: str) -> None:
    """Run a statement without constraints."""
    if database.file:
        with closing(sqlite3.connect(database.file, isolation_level=None)) as connection:
            connection.execute(statement)
        return
    with database.begin_write() as connection:
        connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        connection.execute(text(statement.replace(":", "\\:")))


def add_sessions(database: Database, times: list[int], cwd: str = "/") -> list[str]:
    """Insert sessions with these update times. Return their ids."""
    ids = [f"{time:08}{new_id()}" for time in times]
    nothing = {"cwd": cwd, "roots": "[]", "options": "{}", "created": 0}
    with database.begin_write() as connection:
        rows = [{**nothing, "id": id, "updated": time} for id, time in zip(ids, times, strict=True)]
        connection.execute(sessions.insert(), rows)
    return ids


def pages(database: Database, cwd: str, limit: int, between: Callable[[], Any] = lambda: None) -> list[list[str]]:
    """Return the ids on each page of the list; `between` is called after each page."""
    found: list[list[str]] = []
    cursor: str | None = ""
    while cursor is not None:
        with database.begin_read() as connection:
            page = loader.list_sessions(connection, cwd, cursor, limit)
        found.append([session.id for session in page.sessions])
        cursor = page.cursor
        between()
    return found


def test_list_has_pages_with_the_latest_first(database: Database):
    ids = add_sessions(database, [1, 2, 2, 2, 3])
    add_sessions(database, [9], cwd="/elsewhere")
    assert pages(database, "/", 2) == [ids[:2:-1], ids[2:0:-1], ids[:1]]
    assert pages(database, "/", 5) == [ids[::-1]]
    assert pages(database, "/nowhere", 5) == [[]]
    assert sum(map(len, pages(database, "", 2))) == 6


def test_sessions_added_meanwhile_do_not_shift_pages(database: Database):
    ids = add_sessions(database, [1, 2, 3, 4, 5])
    assert pages(database, "/", 2, lambda: add_sessions(database, [6])) == [ids[:2:-1], ids[2:0:-1], ids[:1]]


@pytest.mark.parametrize(
    "cursor", ["x", "4", "eA==", "MQ==", "é", "LTEgeA==", "OTk5OTk5OTk5OTk5OTk5OTk5OTkgMQ==", "\0"]
)
def test_invalid_cursor_is_refused(database: Database, cursor: str):
    with database.begin_read() as connection, pytest.raises(ValueError, match="cursor"):
        loader.list_sessions(connection, "", cursor, 5)


def test_session_is_found_by_id_prefix(database: Database):
    one, two = add_sessions(database, [1, 2])

    def found(prefix: str) -> str:
        with database.begin_read() as connection:
            return loader.find_session(connection, prefix).id

    assert found(one) == one
    assert found(two[:8]) == two
    with pytest.raises(StoreError, match=f"More than one.*{two}.*{one}"):
        found("0000000")
    for nothing in ("x", "", "%", "_", "\0", "\udc80", "'"):
        with pytest.raises(StoreError, match="There is no session"):
            found(nothing)


async def test_unknown_session_is_an_error(database: Database):
    async with connect(app(database)) as editor:
        for id in ("nobody", "", "\0", "%"):
            with pytest.raises(RpcError) as caught:
                await load(editor, id)
            assert caught.value.data["sessionId"] == id.replace("\0", "\N{REPLACEMENT CHARACTER}")


async def test_agent_can_search_earlier_sessions(database: Database):
    async with connect(app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "The port is 4711.")
    look = Reply(tool_calls=[{"name": "search_sessions", "arguments": {"words": "port"}}])
    async with connect(crow := app(database, look, Reply("It was 4711."))) as editor:
        await editor.prompt((await editor.new_session("/")).session_id, "Which was it?")
        answer = asked(crow)[1]["messages"][-1]
    assert answer["role"] == "tool"
    assert f"{id[:8]} " in answer["content"]
    assert "The ⟦port⟧ is 4711." in answer["content"]


async def test_ended_app_leaves_no_thread(database: Database):
    async with connect(app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "hi")
        assert "crow-writes_0" in [thread.name for thread in threading.enumerate()]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("crow-")]


def test_extension_imports_no_database_modules():
    """Database modules are imported after the first request was sent."""
    code = "import sys, crow_persistence.extension; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"sqlalchemy", "alembic", "jinja2", "sqlite3", "psycopg"} & set(done.stdout.split())


async def test_what_was_brought_back_after_an_undo_is_loaded(database: Database):
    crow = app(database, *(Reply(f"Answer {n}.") for n in range(3))).use(commands).use(undo)
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        for text in ("one", "two", "/undo 2 yes", "/redo", "/undo yes", "/redo"):
            await editor.prompt(id, text)
        seen = view(crow.sessions[id].log)
        assert [message.get("content") for message in seen if message.get("role") == "user"] == ["one", "two"]
    with database.begin_read() as connection:
        record = loader.load_session(connection, loader.find_session(connection, id))
    assert view(record.log) == seen
