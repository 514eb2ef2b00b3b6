"""Forks and rewinds store one row and copy nothing; deleting a session keeps the rows that its forks use."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from crow_core.acp.schema import ClientCapabilities, ImageBlock, TextBlock
from crow_core.app import Crow
from crow_core.content import to_user_message
from crow_core.errors import SessionBusy, StoreError
from crow_core.messages.message import Message
from crow_core.messages.passes import view
from crow_core.session.session import Session
from crow_core.session.store import Page
from crow_core.testing import Reply, ScriptedModel
from crow_persistence import checks, forks, loader
from crow_persistence.database import Database
from crow_persistence.entries import pack
from crow_persistence.extension import persistence
from crow_persistence.search import search
from crow_persistence.tables import draft_parts, drafts, messages, metadata, sessions
from sqlalchemy import func, insert, select

pytestmark = pytest.mark.anyio


class SilentClient:
    """A client that ignores updates and answers nothing."""

    capabilities = ClientCapabilities()

    async def request(self, method: str, params: Any) -> Any:
        raise NotImplementedError

    async def notify(self, method: str, params: Any) -> None: ...


@asynccontextmanager
async def app(database: Database) -> AsyncGenerator[Crow]:
    """Yield an app on this database; its model echoes."""
    model = ScriptedModel(lambda request: Reply(f"To {request['messages'][-1]['content']}."))
    url = database.url.render_as_string(hide_password=False)
    crow = Crow(model).use(persistence, url=url, folder=database.folder)
    try:
        yield crow
    finally:
        await crow.shut_down()


async def say(crow: Crow, session: Session, *words: str) -> None:
    for prompt in words:
        await crow.prompt(session, {"role": "user", "content": prompt})


async def talk(crow: Crow, *words: str) -> Session:
    """Return a new session with these prompts."""
    session = await crow.open(SilentClient(), "/")
    await say(crow, session, *words)
    return session


async def forked(crow: Crow, id: str, at: str = "") -> Session:
    session = await crow.fork(SilentClient(), id, "/", at=at)
    assert session is not None
    return session


def said(log: list[Message]) -> list[Any]:
    """Return the user's messages as the model receives them."""
    return [message["content"] for message in view(log) if message["role"] == "user"]


def stored(database: Database, id: str) -> list[Message]:
    """Return the stored log of a session."""
    with database.begin_read() as connection:
        record = loader.load_session(connection, loader.find_session(connection, id))
    assert not record.damage
    return record.log


def count(database: Database) -> dict[str, int]:
    """Return the number of rows in each table."""
    with database.begin_read() as connection:
        tables = metadata.sorted_tables
        return {table.name: connection.scalar(select(func.count()).select_from(table)) or 0 for table in tables}


def entry_id(session: Session, words: str) -> str:
    """Return the id of the entry with this content."""
    return next(entry.get("crow", {})["id"] for entry in session.log if entry.get("content") == words)


async def test_fork_is_one_row_and_independent(database: Database):
    async with app(database) as crow:
        first = await talk(crow, "one", "two")
        before = count(database)
        fork = await forked(crow, first.id)
        assert count(database) == before | {"sessions": before["sessions"] + 1}
        assert fork.log == first.log
        await say(crow, fork, "three")
        await say(crow, first, "four")
        assert said(stored(database, fork.id)) == ["one", "two", "three"]
        assert said(stored(database, first.id)) == ["one", "two", "four"]
        assert stored(database, fork.id) == fork.log


async def test_fork_can_begin_at_an_earlier_entry(database: Database):
    async with app(database) as crow:
        first = await talk(crow, "one", "two", "three")
        fork = await forked(crow, first.id, entry_id(first, "To one."))
        await say(crow, fork, "other")
        assert said(fork.log) == ["one", "other"]
        assert stored(database, fork.id) == fork.log
        with pytest.raises(StoreError, match=f"Session {first.id} has no entry 'nonsense'"):
            await forked(crow, first.id, "nonsense")
        assert await crow.fork(SilentClient(), "nobody", "/") is None


async def test_fork_copies_title_and_options_and_has_its_own_lease(database: Database):
    async with app(database) as crow, app(database) as other:
        first = await talk(crow, "one")
        await first.set_title("A name")
        fork = await forked(other, first.id)  # the first session is open in the other app
        assert fork.log.title == "A name"
        with pytest.raises(SessionBusy):
            await crow.load(SilentClient(), fork.id, "/")


async def test_fork_copies_the_draft_of_an_unfinished_reply(database: Database):
    async with app(database) as crow:
        first = await talk(crow, "one")
        half: Message = {"role": "assistant", "content": "half a rep", "crow": {"id": "0"}}
        with database.begin_write() as connection:
            connection.execute(insert(drafts).values(session=1, at=0, body=pack(half).body))
            connection.execute(insert(draft_parts).values(session=1, number=1, body='{"content":"ly"}'))
            forks.fork(connection, first.id, "f" * 32)
        whole = stored(database, "f" * 32)
        assert whole[:-1] == first.log
        assert whole[-1] == {**half, "content": "half a reply", "crow": {"id": "0", "cut": "interrupted"}}
        fork = await crow.load(SilentClient(), "f" * 32, "/")
        assert fork is not None
        await say(crow, fork, "two")
        assert stored(database, fork.id) == fork.log
        assert view(fork.log)[2]["content"] == "half a reply"


async def test_forks_of_forks_share_their_common_rows(database: Database):
    async with app(database) as crow:
        first = await talk(crow, "one")
        second = await forked(crow, first.id)
        await say(crow, second, "two")
        third = await forked(crow, second.id)
        await say(crow, third, "three")
        fourth = await forked(crow, third.id, entry_id(third, "To one."))
        await say(crow, fourth, "four")
        assert said(stored(database, third.id)) == ["one", "two", "three"]
        assert said(stored(database, fourth.id)) == ["one", "four"]
        with database.begin_read() as connection:
            bodies = connection.scalars(select(messages.c.body).where(messages.c.kind == "user")).all()
        assert len(bodies) == 4


async def test_rewound_entries_leave_the_path_and_stay_stored(database: Database):
    async with app(database) as crow:
        session = await talk(crow, "one", "two", "three")
        session.rewind(entry_id(session, "To one."))
        await say(crow, session, "four")
        session.rewind(entry_id(session, "To four."))
        await say(crow, session, "five")
        assert said(session.log) == said(stored(database, session.id)) == ["one", "four", "five"]
        session.rewind("")
        await say(crow, session, "six")
        assert said(stored(database, session.id)) == ["six"]
        with database.begin_read() as connection:
            assert [hit.snippet for hit in search(connection, "two") if hit.kind == "user"] == ["⟦two⟧"]
    async with app(database) as crow:
        again = await crow.load(SilentClient(), session.id, "/")
        assert again is not None
        await say(crow, again, "seven")
        assert said(stored(database, session.id)) == ["six", "seven"]


async def test_deleted_session_leaves_only_its_own_row(database: Database):
    image = ImageBlock(data="iVBORw0KGgo" * 500, mime_type="image/png")
    async with app(database) as crow:
        session = await talk(crow, "one")
        await crow.prompt(session, to_user_message([TextBlock(text="Look:"), image]))
        session.log.append({"crow": {"kind": "decision", "call": "1", "tool": "t", "is": "allow", "by": "me"}})
        await session.set_title("A name")
        await say(crow, session, "two")
        await crow.delete(session.id)
        await crow.delete(session.id)
        await crow.delete("nobody")
        assert await crow.load(SilentClient(), session.id, "/") is None
        assert crow.store is not None
        assert await crow.store.list_sessions("", "", 9, "include") == Page([])
    left = {name: number for name, number in count(database).items() if number}
    assert left == {"sessions": 1, "prompts": 1, "decisions": 1}
    with database.begin_read() as connection:
        tomb = connection.execute(select(sessions)).one()
        assert (tomb.id, tomb.title, tomb.cwd, tomb.roots, tomb.options) == (session.id, None, "", "[]", "{}")
        assert tomb.deleted
        assert search(connection, "two") == []


async def test_fork_keeps_the_rows_it_uses_of_a_deleted_session(database: Database):
    async with app(database) as crow:
        first = await talk(crow, "one", "two", "three")
        fork = await forked(crow, first.id, entry_id(first, "To two."))
        await say(crow, fork, "four")
        await crow.delete(first.id)
        assert stored(database, fork.id) == fork.log
        assert said(fork.log) == ["one", "two", "four"]
        with database.begin_read() as connection:
            assert "three" not in str(connection.scalars(select(messages.c.body)).all())
        await say(crow, fork, "five")
        assert stored(database, fork.id) == fork.log
        assert checks.check(database) == []
    async with app(database) as crow:
        again = await crow.load(SilentClient(), fork.id, "/")
        assert again is not None
        assert again.prompts.system


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
async def test_deleting_the_last_fork_deletes_all_messages(database: Database, order: tuple[int, ...]):
    async with app(database) as crow:
        first = await talk(crow, "one", "two")
        second = await forked(crow, first.id)
        await say(crow, second, "three")
        third = await forked(crow, second.id, entry_id(second, "To three."))
        await say(crow, third, "four")
        third.rewind("")
        await say(crow, third, "five")
        ids = [first.id, second.id, third.id]
        for n in order:
            await crow.delete(ids[n])
            assert checks.check(database) == []
        left = {name: number for name, number in count(database).items() if number}
        assert left == {"sessions": 3, "prompts": 1}


async def test_blob_used_by_another_session_stays(database: Database):
    image = ImageBlock(data="iVBORw0KGgo" * 500, mime_type="image/png")
    async with app(database) as crow:
        one, other = await talk(crow, "one"), await talk(crow, "one")
        for session in (one, other):
            await crow.prompt(session, to_user_message([image]))
        await crow.delete(one.id)
        assert stored(database, other.id) == other.log
        assert checks.check(database) == []
