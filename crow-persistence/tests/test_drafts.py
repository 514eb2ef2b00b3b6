"""A reply that is still streaming is stored in parts: each text once, and all of it is there after a crash."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from crow_core.acp.connection import RpcError
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.masking import MASK
from crow_core.messages.message import Delta, Message
from crow_core.models.model_call import ModelRequest
from crow_core.models.reply import ReplyBuilder
from crow_core.session import log as log_module
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_persistence import commits, loader
from crow_persistence.commits import GroupCommit
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.sql_store import BlockingStore
from crow_persistence.tables import draft_parts, drafts
from crow_persistence.writes import SessionWrite
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, event, func, select

pytestmark = pytest.mark.anyio

SECRET = "sk-0123456789abcdef"


@pytest.fixture(autouse=True)
def frequent_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a draft for nearly every delta."""
    monkeypatch.setattr(log_module, "DRAFT_INTERVAL", 0.001)
    monkeypatch.setattr(commits, "COMMIT_DELAY", 0.001)


class DictatedModel:
    """Streams what the test says, until the turn is cancelled."""

    name, window = "dictated", None

    def __init__(self) -> None:
        self.says = asyncio.Queue[str]()

    async def stream(self, request: ModelRequest) -> AsyncIterator[Delta]:
        while True:
            yield {"content": await self.says.get()}


@asynccontextmanager
async def dictate(database: Database) -> AsyncGenerator[Callable[[str], Awaitable[None]]]:
    """Run a turn whose reply streams; yield a function that lets it say a text and waits until the client has it."""
    url, model = database.url.render_as_string(hide_password=False), DictatedModel()
    crow = Crow(model).use(persistence, url=url, folder=database.folder, secrets=lambda session: {SECRET})
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "hi"))
        said = ""

        async def say(text: str) -> None:
            nonlocal said
            said += text
            model.says.put_nowait(text)
            await editor.until(lambda editor: editor.text == said)

        yield say
        await editor.cancel(id)
        await turn
    assert count_rows(database) == (0, 0)


def read_texts(database: Database) -> dict[str, str]:
    """Return the texts of the only draft, by their keys."""
    with database.begin_read() as connection:
        number = connection.scalar(select(drafts.c.session))
        return loader.read_draft_texts(connection, number or 0)


async def wait_for_draft(database: Database, text: str) -> None:
    """Wait until the only draft holds a text."""
    while read_texts(database)["content"] != text:
        await asyncio.sleep(0.001)


@contextmanager
def record_texts() -> Generator[list[str]]:
    """Collect the texts that are written to the tables of drafts."""
    found: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("INSERT INTO draft"):
            values: Sequence[Any] = list(parameters.values()) if isinstance(parameters, dict) else parameters
            bodies = (value for value in values if isinstance(value, str))
            found.extend(json.loads(body).get("content", "") for body in bodies)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def test_each_text_of_a_streaming_reply_is_written_once(database: Database):
    text = ""
    async with dictate(database) as say:
        with record_texts() as written:
            for number in range(20):
                await say(f"{number} ")
                text += f"{number} "
                await wait_for_draft(database, text)
        assert written == [f"{number} " for number in range(20)]
        assert count_rows(database) == (1, 19)


def count_rows(database: Database) -> tuple[int, int]:
    """Return the numbers of drafts and of their parts."""
    with database.begin_read() as connection:
        first, rest = (connection.scalar(select(func.count()).select_from(table)) for table in (drafts, draft_parts))
    return first or 0, rest or 0


async def test_secret_that_spans_parts_is_masked(database: Database):
    async with dictate(database) as say:
        text = ""
        for piece in ("The key is ", SECRET[:5], SECRET[5:9], SECRET[9:], ", keep it. Or ", SECRET, "."):
            await say(piece)
            text += piece
            await wait_for_draft(database, text.replace(SECRET, MASK))


FAULT = {
    "sqlite": ["CREATE TRIGGER fault BEFORE INSERT ON draft_parts BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"],
    "postgresql": [
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the disk is full'; END $$",
        "CREATE TRIGGER fault BEFORE INSERT ON draft_parts FOR EACH ROW EXECUTE FUNCTION fail()",
    ],
}
MEND = {"sqlite": ["DROP TRIGGER fault"], "postgresql": ["DROP TRIGGER fault ON draft_parts"]}


def execute(database: Database, statements: dict[str, list[str]]) -> None:
    engine = create_engine(database.url)
    with engine.begin() as connection:
        for statement in statements["sqlite" if database.file else "postgresql"]:
            connection.exec_driver_sql(statement)
    engine.dispose()


async def test_parts_that_could_not_be_written_are_written_with_the_next_ones(database: Database):
    url = database.url.render_as_string(hide_password=False)
    commits = GroupCommit(url, database.folder, lambda session: ())
    session, reply = await make_session(), ReplyBuilder()

    async def write(text: str) -> None:
        reply.add({"content": text})
        part = reply.take_part()
        part.setdefault("crow", {})["id"] = "1"
        commits.add(session).parts.append(part)
        await commits.flush(session)

    await write("Once")
    execute(database, FAULT)
    with pytest.raises(StoreError, match="the disk is full"):
        await write(" upon")
    assert read_texts(database)["content"] == "Once"
    execute(database, MEND)
    await write(" a time")
    assert read_texts(database)["content"] == "Once upon a time"
    await commits.close()


async def test_turn_ends_whose_parts_cannot_be_written_and_what_was_shown_is_stored(database: Database):
    """Nothing goes on to be shown that a crash would lose. The reply itself is not written to the table at fault."""
    url, model = database.url.render_as_string(hide_password=False), DictatedModel()
    crow = Crow(model).use(persistence, url=url, folder=database.folder)
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "hi"))
        model.says.put_nowait("Once")
        await wait_for_draft(database, "Once")
        execute(database, FAULT)
        while not turn.done():
            model.says.put_nowait(" upon")
            await asyncio.sleep(0.001)
        with pytest.raises(RpcError, match="cannot be stored"):
            await turn
        shown = editor.text
    store = BlockingStore(url, database.folder)
    row = store.acquire(id)
    assert row is not None
    assert str(store.load(row).log[-1].get("content")).startswith(shown)
    store.database.close()


async def make_session() -> Session:
    """Return a session with one message in it."""
    crow = Crow(ScriptedModel([Reply("Hello.")]))
    editor: Editor
    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session("/")).session_id, "hi")
        (session,) = crow.sessions.values()
    return session


async def open_store(folder: str) -> tuple[BlockingStore, Session]:
    """Return a store, and a session with one message in it."""
    session = await make_session()
    store = BlockingStore(f"sqlite:///{folder}/crow.db", Path(folder))
    store.write_sessions([SessionWrite(session, entries=len(session.log))])
    return store, session


TEXTS = st.lists(
    st.sampled_from([SECRET, SECRET[:7], SECRET[7:], SECRET[:1], "a", "ü\n", '"\\', "\ud83d"]), max_size=12
)


@settings(deadline=None)
@given(data=st.data())
def test_parts_of_any_lengths_give_the_masked_whole(data: st.DataObject) -> None:
    """A part may be written by itself or with others, and again after its commit seemed to fail."""
    deltas = data.draw(st.lists(st.tuples(st.sampled_from(["content", "reasoning_content"]), TEXTS), max_size=8))
    ends = data.draw(st.sampled_from([None, 1, 3]), label="the delta with which the thought ends")
    with TemporaryDirectory() as folder:
        store, session = asyncio.run(open_store(folder))
        reply, pending = ReplyBuilder(), list[Message]()
        for at, (key, words) in enumerate(deltas):
            reply.add({key: "".join(words), **({"thought_ends": True} if at == ends else {})})  # pyright: ignore[reportArgumentType]
            part = reply.take_part()
            part.setdefault("crow", {})["id"] = "1"
            pending.append(part)
            if data.draw(st.booleans(), label="written now"):
                store.write_sessions([SessionWrite(session, parts=pending, secrets={SECRET})])
                if not data.draw(st.integers(0, 3), label="written again unless"):
                    store.get_progress(session).engine = None  # as after a failure
                    continue
                pending = []
        store.write_sessions([SessionWrite(session, parts=pending, secrets={SECRET})])
        found, whole = read_texts(store.database), reply.build()
        for key in ("content", "reasoning_content"):
            assert found[key] == str(whole.get(key) or "").replace(SECRET, MASK)
        store.database.close()
