"""What was said is in the database, whatever happens, and comes back as it was."""

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
from typing import Any

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
from crow_core.log import new_id
from crow_core.messages import Message, view
from crow_core.models.chat import ModelCall
from crow_core.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_persistence import extension, reading
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.store import Store
from crow_persistence.tables import blobs, calls, drafts, messages, metadata, sessions
from sqlalchemy import Connection, select, text

pytestmark = pytest.mark.anyio

CANARY = "canary-4711-Zeisig"
IMAGE = ImageBlock(data="iVBORw0KGgo" * 500, mime_type="image/png")


def app(database: Database, *replies: Reply, **options: Any) -> Crow:
    """An app that remembers in this database, as another process would; its model plays the replies, or echoes."""
    model = ScriptedModel(replies or (lambda request: Reply(f"To {request['messages'][-1]['content']}.")))
    return Crow(model).use(persistence, url=url_of(database), folder=database.folder, **options)


def url_of(database: Database) -> str:
    return database.url.render_as_string(hide_password=False)


def asked(crow: Crow) -> list[dict[str, Any]]:
    """The requests to its model."""
    model = crow.models["scripted"]
    assert isinstance(model, ScriptedModel)
    return model.requests


async def load(editor: Editor, id: str) -> None:
    await editor.request("session/load", LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[]))


def stored(database: Database, id: str) -> list[Message]:
    """The log as anybody can read it."""
    with database.reading() as connection:
        record = reading.load(connection, reading.find(connection, id))
    assert not record.damage
    return record.log


def everything(database: Database) -> str:
    """All that is in all tables."""
    with database.reading() as connection:
        rows = [tuple(row) for table in metadata.sorted_tables for row in connection.execute(select(table))]
    return str(rows)


async def test_what_was_said_comes_back_in_another_process(database: Database):
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


async def test_what_was_chosen_comes_back(database: Database):
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


async def test_a_session_is_listed_once_something_was_said(database: Database):
    async with connect(crow := app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        crow.sessions[id].append({"crow": {"kind": "title", "title": "Nothing yet"}})
        await crow.sessions[id].written()
        assert (await editor.request("session/list", ListSessionsRequest())).sessions == []
        await editor.prompt(id, "hi")
        listed = await editor.request("session/list", ListSessionsRequest())
        assert [found.title for found in listed.sessions] == ["Nothing yet"]


async def test_of_many_prompts_the_last_begins_when_the_first_is_written(database: Database):
    crow, moments = app(database), list[str]()
    crow.before_model(lambda request, session: moments.append("asked"))
    crow.message(lambda session, entry: moments.append("written") if entry.get("role") == "user" else None)
    async with connect(crow) as editor:
        sessions = [await editor.new_session("/") for _ in range(10)]
        await asyncio.gather(*(editor.prompt(session.session_id, "hi") for session in sessions))
    assert "asked" in moments[moments.index("written") :]
    assert moments.count("asked") == moments.count("written") == 10


async def test_nothing_is_shown_before_what_it_answers_is_committed(database: Database):
    async with connect(crow := app(database, Reply("Hello.", hang=True))) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "hi"))
        await editor.until(lambda editor: editor.text)
        assert view(stored(database, id))[0] == {"role": "user", "content": "hi"}
        await crow.cancel(crow.sessions[id])
        await turn


TALKER = """
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
"""A process that talks so many turns, and then starts one that never ends, if there is something to say in it."""


@contextmanager
def talker(database: Database, name: str, turns: int, last: str = "") -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", TALKER, url_of(database), name, str(turns), last]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def id_told_by(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_a_killed_process_leaves_a_session_that_goes_on(database: Database):
    """What it had streamed is there, shown as interrupted; the next request is valid, and nobody has to wait."""
    with talker(database, "crow", 2, "word " * 100) as process:
        id = await asyncio.to_thread(id_told_by, process)
        while "word word" not in drafted(database):
            await asyncio.sleep(0)
        process.kill()
    async with connect(crow := app(database)) as editor:
        await load(editor, id)
        cut = crow.sessions[id].log[-1]
        assert cut.get("crow", {})["cut"] == "interrupted"
        assert editor.text == f"crow reply 0crow reply 1{cut.get('content')}"
        assert str(cut.get("content")).startswith("word word")
        await editor.prompt(id, "and now?")
        roles = [message["role"] for message in asked(crow)[0]["messages"]]
        assert roles == ["system", *["user", "assistant"] * 3, "user"]
        assert not drafted(database)
        assert stored(database, id) == crow.sessions[id].log


def drafted(database: Database) -> str:
    """The reply that is being written down, as JSON."""
    with database.reading() as connection:
        return connection.scalar(select(drafts.c.body)) or ""


async def test_a_reply_that_ended_leaves_no_draft(database: Database):
    async with connect(app(database, Reply("word " * 30, pace=0.01))) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "hi"))
        while "word word" not in drafted(database):
            await asyncio.sleep(0)
        await turn
        assert not drafted(database)


@pytest.mark.slow
async def test_four_processes_that_write_at_once_lose_nothing(database: Database):
    names = ["ada", "bob", "cyd", "dan"]
    with ExitStack() as stack:
        processes = [stack.enter_context(talker(database, name, 25)) for name in names]
        ids = [await asyncio.to_thread(id_told_by, process) for process in processes]
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


async def test_a_turn_that_cannot_be_written_ends_and_is_written_when_it_can_be(database: Database):
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
    with database.writing() as connection:
        for statement in statements[connection.dialect.name]:
            connection.exec_driver_sql(statement)


async def test_a_database_that_another_holds_ends_the_turn_with_its_name(tmp_path: Path):
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


async def test_a_session_whose_database_was_deleted_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extension, "BEAT", 3600)  # or a heartbeat could be the first to find out
    database = Database(f"sqlite:///{tmp_path / 'crow.db'}")
    async with connect(crow := app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "one")
        for name in ("crow.db", "crow.db-wal", "crow.db-shm"):
            os.unlink(tmp_path / name)
        with pytest.raises(RpcError):
            await editor.prompt(id, "two")
        await editor.prompt(id, "three")
        assert stored(Database(url_of(database)), id) == crow.sessions[id].log
    database.close()


async def test_a_call_is_never_written_down_as_that_of_a_session_in_another_file(tmp_path: Path):
    store, other = (Store(f"sqlite:///{tmp_path / name}.db", tmp_path) for name in ("crow", "other"))
    async with forgetful() as mine, forgetful() as foreign:
        for each, session in ((store, mine), (other, foreign)):
            session.log.append({"role": "user", "content": "one"})
            each.append(session)
        other.database.close()
        for name in ("crow.db-wal", "crow.db-shm"):
            os.unlink(tmp_path / name)
        (tmp_path / "other.db").replace(tmp_path / "crow.db")
        with pytest.raises(StoreError, match="replaced"):
            store.beat()  # hears of it, and nobody else does
        call = ModelCall(mine.model, {"messages": []})
        store.call(mine, call)
        with store.database.reading() as connection:
            assert connection.scalars(select(calls.c.id)).all() == []
        mine.append({"role": "user", "content": "two"})
        store.append(mine)
        store.call(mine, call)
        with store.database.reading() as connection:
            assert connection.scalar(select(sessions.c.id).join(calls)) == mine.id
    store.database.close()


class Deaf(Database):
    """One that does what it is told, and whose answer is lost once."""

    deaf = False

    @contextmanager
    def writing(self) -> Generator[Connection]:
        with super().writing() as connection:
            yield connection
        if self.deaf:
            self.deaf = False
            raise StoreError("The connection was lost.")


@asynccontextmanager
async def forgetful() -> AsyncGenerator[Session]:
    """A session of an app that does not write down anything."""
    async with connect(crow := Crow(ScriptedModel([]))) as editor:
        yield crow.sessions[(await editor.new_session("/")).session_id]


@pytest.mark.parametrize("first", [True, False])
async def test_what_was_committed_is_not_written_twice_although_the_answer_was_lost(database: Database, first: bool):
    store = Store(url_of(database), database.folder)
    store.database = deaf = Deaf(url_of(database), database.folder)
    async with forgetful() as session:
        if not first:
            session.log.append({"role": "user", "content": "zero"})
            store.append(session)
        deaf.deaf = True
        session.log.append({"role": "user", "content": "one"})
        with pytest.raises(StoreError):
            store.append(session)
        session.log.append({"role": "user", "content": "two"})
        store.append(session)
        assert stored(database, session.id) == session.log
    deaf.close()


async def test_a_session_that_was_opened_although_the_answer_was_lost_can_be_opened(database: Database):
    async with connect(app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "one")
    store = Store(url_of(database), database.folder)
    store.database = deaf = Deaf(url_of(database), database.folder)
    deaf.deaf = True
    with pytest.raises(StoreError):
        store.take(id)
    assert store.take(id)
    deaf.close()


async def test_five_thousand_messages_come_back(database: Database):
    store = Store(url_of(database), database.folder)
    async with forgetful() as session:
        for n in range(2500):
            session.log.append({"role": "user", "content": f"prompt {n}"})
            session.log.append({"role": "assistant", "content": f"reply {n}"})
        store.append(session)
        assert stored(database, session.id) == session.log
    store.database.close()


async def test_a_secret_is_nowhere_in_the_database(database: Database):
    crow = app(database, Reply(f"It is {CANARY}. " * 9, pace=0.03), secrets=lambda session: [CANARY])
    crow.instructions(lambda session: f"The key is {CANARY}.")
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, f"Tell {CANARY}"))
        while "It is [secret]" not in everything(database):
            await asyncio.sleep(0)
        await turn
        await crow.sessions[id].set_title(CANARY)
    assert CANARY not in everything(database)
    for file in database.folder.iterdir():
        assert CANARY.encode() not in file.read_bytes()


async def test_an_image_is_stored_once(database: Database):
    async with connect(app(database)) as editor:
        for _ in range(2):
            id = (await editor.new_session("/")).session_id
            await editor.prompt(id, [IMAGE])
            await editor.prompt(id, [IMAGE])
    with database.reading() as connection:
        images = [data for data in connection.scalars(select(blobs.c.data)) if IMAGE.data.encode() in data]
    assert len(images) == 1


HARM: dict[str, tuple[int, int, str]] = {
    "a body that is no JSON": (-1, 0, "UPDATE messages SET body = '{' WHERE id = {user}"),
    "a body that is no entry": (-1, 0, """UPDATE messages SET body = '{"role": [1]}' WHERE id = {user}"""),
    "a parent that is itself": (-1, 0, "UPDATE messages SET parent = id WHERE id = {user}"),
    "a parent that comes later": (-1, 0, "UPDATE messages SET parent = id + 1 WHERE id = {user}"),
    "a parent that is gone": (-1, 0, "DELETE FROM messages WHERE id = {user}"),
    "a tip that is gone": (0, 1, "UPDATE sessions SET head = 4711"),
    "an image that is gone": (-1, 0, "DELETE FROM blobs WHERE hash IN (SELECT blob FROM links WHERE message = {user})"),
    "a render that is gone": (-1, 0, "DELETE FROM renders"),
    "options that are no JSON": (0, 0, "UPDATE sessions SET options = '{', roots = 'x'"),
    "a draft that is no JSON": (0, 0, "INSERT INTO drafts SELECT number, 0, '{' FROM sessions"),
}
"""What can be done to a session by hand, how many more of how many more messages are restored, and how it is done."""


@pytest.mark.parametrize("harm", HARM)
async def test_what_is_left_of_a_damaged_session_is_restored_and_counted(database: Database, harm: str):
    async with connect(first := app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        for words in ("one", [TextBlock(text="two"), IMAGE], "three"):
            await editor.prompt(id, words)
        log = first.sessions[id].log
    restored, total, statement = HARM[harm]
    with database.reading() as connection:
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


def damage(database: Database, statement: str) -> None:
    """Do something to the database that its constraints would not let happen."""
    if database.file:
        with closing(sqlite3.connect(database.file, isolation_level=None)) as connection:
            connection.execute(statement)
        return
    with database.writing() as connection:
        connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        connection.execute(text(statement.replace(":", "\\:")))


def add_sessions(database: Database, times: list[int], cwd: str = "/") -> list[str]:
    """Sessions that were last heard of then; gives their ids."""
    ids = [f"{time:08}{new_id()}" for time in times]
    nothing = {"cwd": cwd, "roots": "[]", "options": "{}", "created": 0}
    with database.writing() as connection:
        rows = [{**nothing, "id": id, "updated": time} for id, time in zip(ids, times, strict=True)]
        connection.execute(sessions.insert(), rows)
    return ids


def pages(database: Database, cwd: str, limit: int, between: Callable[[], Any] = lambda: None) -> list[list[str]]:
    """The ids on each page of the list; something may happen between them."""
    found: list[list[str]] = []
    cursor: str | None = ""
    while cursor is not None:
        with database.reading() as connection:
            page = reading.listing(connection, cwd, cursor, limit)
        found.append([session.id for session in page.sessions])
        cursor = page.cursor
        between()
    return found


def test_the_list_comes_in_pages_the_latest_first(database: Database):
    ids = add_sessions(database, [1, 2, 2, 2, 3])
    add_sessions(database, [9], cwd="/elsewhere")
    assert pages(database, "/", 2) == [ids[:2:-1], ids[2:0:-1], ids[:1]]
    assert pages(database, "/", 5) == [ids[::-1]]
    assert pages(database, "/nowhere", 5) == [[]]
    assert sum(map(len, pages(database, "", 2))) == 6


def test_sessions_that_are_added_meanwhile_shift_no_page(database: Database):
    ids = add_sessions(database, [1, 2, 3, 4, 5])
    assert pages(database, "/", 2, lambda: add_sessions(database, [6])) == [ids[:2:-1], ids[2:0:-1], ids[:1]]


@pytest.mark.parametrize(
    "cursor", ["x", "4", "eA==", "MQ==", "é", "LTEgeA==", "OTk5OTk5OTk5OTk5OTk5OTk5OTkgMQ==", "\0"]
)
def test_a_cursor_that_no_list_gave_is_refused(database: Database, cursor: str):
    with database.reading() as connection, pytest.raises(ValueError, match="cursor"):
        reading.listing(connection, "", cursor, 5)


def test_a_session_is_found_by_the_beginning_of_its_id(database: Database):
    one, two = add_sessions(database, [1, 2])

    def found(prefix: str) -> str:
        with database.reading() as connection:
            return reading.find(connection, prefix).id

    assert found(one) == one
    assert found(two[:8]) == two
    with pytest.raises(StoreError, match=f"More than one.*{two}.*{one}"):
        found("0000000")
    for nothing in ("x", "", "%", "_", "\0", "\udc80", "'"):
        with pytest.raises(StoreError, match="There is no session"):
            found(nothing)


async def test_an_unknown_session_is_unknown(database: Database):
    async with connect(app(database)) as editor:
        for id in ("nobody", "", "\0", "%"):
            with pytest.raises(RpcError) as caught:
                await load(editor, id)
            assert caught.value.data["sessionId"] == id


async def test_the_agent_can_search_its_own_past(database: Database):
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


async def test_an_app_that_ended_leaves_no_thread(database: Database):
    async with connect(app(database)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "hi")
        assert "crow-writes_0" in [thread.name for thread in threading.enumerate()]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("crow-")]


def test_the_extension_is_light():
    """What it needs of a database is loaded when the first request is on its way."""
    code = "import sys, crow_persistence.extension; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"sqlalchemy", "alembic", "jinja2", "sqlite3", "psycopg"} & set(done.stdout.split())
