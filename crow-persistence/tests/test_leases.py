"""A session is open in one process at a time. Leases of ended processes expire, and such processes write nothing
more."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from time import time
from typing import Any, NoReturn

import crow_system as system
import pytest
from crow_core.acp.schema import ClientCapabilities
from crow_core.app import Crow
from crow_core.errors import ModelError, SessionBusy, StoreError
from crow_core.messages.passes import view
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedModel
from crow_persistence import commits, leases, loader
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.sql_store import BlockingStore
from crow_persistence.tables import drafts, sessions
from crow_persistence.writes import SessionWrite
from sqlalchemy import Engine, event, select, update

pytestmark = pytest.mark.anyio


class SilentClient:
    """A client that ignores updates and answers nothing."""

    capabilities = ClientCapabilities()

    async def request(self, method: str, params: Any) -> Any:
        raise NotImplementedError

    async def notify(self, method: str, params: Any) -> None: ...


@asynccontextmanager
async def app(database: Database) -> AsyncGenerator[Crow]:
    """Yield an app on this database, as in another process; its model echoes."""
    model = ScriptedModel(lambda request: Reply(f"To {request['messages'][-1]['content']}."))
    url = database.url.render_as_string(hide_password=False)
    crow = Crow(model).use(persistence, url=url, folder=database.folder)
    try:
        yield crow
    finally:
        await crow.shut_down()


async def say(crow: Crow, session: Session, words: str) -> None:
    await crow.prompt(session, {"role": "user", "content": words})


async def talk(crow: Crow, words: str) -> Session:
    """Return a new session with one turn."""
    session = await crow.open(SilentClient(), "/")
    await say(crow, session, words)
    return session


async def load(crow: Crow, id: str) -> Session:
    session = await crow.load(SilentClient(), id, "/")
    assert session is not None
    return session


def said(database: Database, id: str) -> list[Any]:
    with database.begin_read() as connection:
        record = loader.load_session(connection, loader.find_session(connection, id))
    return [message["content"] for message in view(record.log) if message["role"] == "user"]


def change(database: Database, **values: Any) -> None:
    """Update the only session's row."""
    with database.begin_write() as connection:
        connection.execute(update(sessions).values(**values))


def row(database: Database) -> Any:
    """Return the only session's row."""
    with database.begin_read() as connection:
        return connection.execute(select(sessions)).one()


async def test_second_process_is_offered_a_fork(database: Database):
    async with app(database) as first, app(database) as second:
        session = await talk(first, "one")
        with pytest.raises(SessionBusy, match=f"Session {session.id} is open in process {os.getpid()}.*fork it"):
            await load(second, session.id)
        fork = await second.fork(SilentClient(), session.id, "/")
        assert fork is not None
        await say(second, fork, "two")
        await say(first, session, "three")
        assert said(database, fork.id) == ["one", "two"]
        assert said(database, session.id) == ["one", "three"]


async def test_closed_session_can_be_opened_elsewhere(database: Database):
    async with app(database) as first, app(database) as second:
        session = await talk(first, "one")
        await first.close(session)
        again = await load(second, session.id)
        await say(second, again, "two")
        with pytest.raises(SessionBusy):
            await load(first, session.id)
        await second.close(again)
        await load(first, session.id)
    assert row(database).owner is None


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a process that runs until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_lease_of_a_killed_process_expires_at_once(database: Database, process: "subprocess.Popen[bytes]"):
    owner = f"{leases.machine_id()}:{process.pid}:{system.read_start_time(process.pid)}:0"
    async with app(database) as crow:
        id = (await talk(crow, "one")).id
    async with app(database) as crow:
        change(database, owner=owner, beat=leases.now())
        with pytest.raises(SessionBusy):
            await load(crow, id)
        process.kill()
        while system.read_start_time(process.pid) is not None:
            await asyncio.sleep(0)  # the process is a zombie: its exit code was not collected
        await load(crow, id)


async def test_executor_whose_leases_were_broken_writes_nothing(database: Database):
    leases.EXECUTOR[:] = ["worker_1"]
    async with app(database) as woken:
        session = await talk(woken, "one")
        leases.EXECUTOR.clear()
        async with app(database) as other:
            with database.begin_write() as connection:
                assert leases.break_leases(connection, "workerx1") == 0, "the id is no pattern"
                assert leases.break_leases(connection, "worker_1") == 1
            again = await load(other, session.id)
            with pytest.raises(StoreError, match="was taken over by"):
                await say(woken, session, "two")
            await say(other, again, "three")
            assert said(database, session.id) == ["one", "three"]


@pytest.mark.parametrize("owner", ["else/0/0:1:2:3", "", "nonsense", ":::::", "else:x:y:z"])
async def test_lease_of_an_unreachable_owner_expires_after_the_timeout(database: Database, owner: str):
    async with app(database) as crow:
        id = (await talk(crow, "one")).id
    async with app(database) as crow:
        change(database, owner=owner, beat=leases.now())
        with pytest.raises(SessionBusy, match=f"Session {id} is open in process"):
            await load(crow, id)
        change(database, beat=leases.now() - 2 * leases.LEASE_TIMEOUT)
        await load(crow, id)


@pytest.mark.parametrize("ahead", [-(10**9), 10**9])
async def test_wrong_clock_does_not_affect_leases(database: Database, monkeypatch: pytest.MonkeyPatch, ahead: int):
    async with app(database) as first, app(database) as second:
        session = await talk(first, "one")
        change(database, owner="else/0/0:1:2:3")
        monkeypatch.setattr(leases, "now", lambda: int(time() * 1000) + ahead)
        with pytest.raises(SessionBusy):
            await load(second, session.id)
        mine = await talk(second, "two")
        fork = await second.fork(SilentClient(), mine.id, "/")
        assert fork is not None
        with database.begin_read() as connection:
            now = connection.execute(select(leases.DatabaseClock())).scalar_one()
            beats = connection.scalars(select(sessions.c.beat)).all()
        assert len(beats) == 3
        assert all(abs(now - beat) < 10**8 for beat in beats if beat)


async def test_owner_that_lost_its_lease_writes_nothing_and_gets_an_error(database: Database):
    """This happens to a laptop that sleeps."""
    async with app(database) as asleep, app(database) as awake:
        session = await talk(asleep, "one")
        change(database, owner=row(database).owner.replace(str(os.getpid()), "1", 1), beat=0)
        again = await load(awake, session.id)
        await say(awake, again, "two")
        for _ in range(2):
            with pytest.raises(StoreError, match=f"Session {session.id} was taken over by process {os.getpid()}"):
                await say(asleep, session, "three")
        await awake.close(again)
        with pytest.raises(StoreError, match="taken over by another process"):
            await say(asleep, session, "four")
        assert said(database, session.id) == ["one", "two"]


async def test_owner_that_lost_its_lease_leaves_the_new_one_in_place_when_it_closes(database: Database):
    """Otherwise, a third process could open the session while the second has it open."""
    async with app(database) as asleep, app(database) as awake, app(database) as third:
        session = await talk(asleep, "one")
        change(database, owner=None, beat=None)
        again = await load(awake, session.id)
        owner = row(database).owner
        await asleep.close(session)
        assert row(database).owner == owner
        with pytest.raises(SessionBusy):
            await load(third, session.id)
        await say(awake, again, "two")


@pytest.mark.parametrize("cancels", [1, 2])
async def test_cancelled_load_releases_the_lease(database: Database, cancels: int):
    async with app(database) as crow:
        id = (await talk(crow, "one")).id
    taking, go = Event(), Event()

    def wait(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE sessions SET owner=") and not taking.is_set():
            taking.set()
            go.wait()

    event.listen(Engine, "before_cursor_execute", wait)
    try:
        async with app(database) as crow:
            loading = asyncio.ensure_future(load(crow, id))
            await asyncio.to_thread(taking.wait)
            for _ in range(cancels):
                loading.cancel()
                await asyncio.sleep(0)
            if cancels == 1:
                go.set()
            with pytest.raises(asyncio.CancelledError):
                await loading
            again = asyncio.ensure_future(load(crow, id)) if cancels == 2 else None
            go.set()
            await (again or load(crow, id))
            owner = row(database).owner
            assert owner is not None
            await crow.shut_down()
            assert row(database).owner is None
    finally:
        event.remove(Engine, "before_cursor_execute", wait)


async def test_failed_load_releases_the_lease(database: Database):
    async with app(database) as crow:
        id = (await talk(crow, "one")).id
    async with app(database) as crow:
        models, crow.models = crow.models, {}
        for open_ in (crow.load, crow.fork):
            with pytest.raises(ModelError, match="No model is configured"):
                await open_(SilentClient(), id, "/")
        crow.models = models
        assert row(database).owner is None
        await load(crow, id)


async def test_draft_is_not_written_under_a_lost_lease(database: Database):
    store = BlockingStore(database.url.render_as_string(hide_password=False), database.folder)
    async with app(database) as crow:
        session = await talk(crow, "one")
        change(database, owner="another", beat=leases.now())
        errors = store.write_sessions([SessionWrite(session, parts=[{"role": "assistant", "content": "half a"}])])
        assert "taken over" in str(errors[session.id])
    with database.begin_read() as connection:
        assert connection.scalar(select(drafts.c.session)) is None
    store.database.close()


async def test_turn_in_a_deleted_session_gets_an_error(database: Database):
    async with app(database) as crow, app(database) as other:
        session = await talk(crow, "one")
        with pytest.raises(SessionBusy, match=f"{session.id} is open in .* Close it there"):
            await other.delete(session.id)
        change(database, owner=None)
        await other.delete(session.id)
        with pytest.raises(StoreError, match=f"Session {session.id} was deleted"):
            await say(crow, session, "two")


async def test_heartbeat_keeps_a_lease(database: Database):
    store, other = (
        BlockingStore(database.url.render_as_string(hide_password=False), database.folder) for _ in range(2)
    )
    async with app(database) as crow:
        id = (await talk(crow, "one")).id
    assert store.acquire(id)
    change(database, beat=0)
    store.send_heartbeat()
    with pytest.raises(SessionBusy):
        other.acquire(id)
    change(database, beat=0)
    assert other.acquire(id)
    store.send_heartbeat()
    assert row(database).beat == 0 or row(database).owner == other.owner
    for each in (store, other):
        each.database.close()


async def test_heartbeats_are_sent_while_a_session_is_open(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commits, "HEARTBEAT_INTERVAL", 0.01)
    async with app(database) as crow:
        await talk(crow, "one")
        change(database, beat=0)
        while not row(database).beat:
            await asyncio.sleep(0.01)
    assert row(database).beat is None


def test_owner_whose_process_cannot_be_inspected_has_not_ended(monkeypatch: pytest.MonkeyPatch):
    owner = leases.make_owner()

    def closed(path: Path) -> NoReturn:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", closed)
    assert not leases.has_ended(owner)


def test_owner_identifies_this_process():
    owner = leases.make_owner()
    assert owner != leases.make_owner()
    assert not leases.has_ended(owner)
    reused = owner.replace(f":{system.read_start_time(os.getpid())}:", ":1:")
    assert leases.has_ended(reused)
    assert leases.has_ended(f"{leases.machine_id()}:4194305:1:0")  # above the largest process id
    assert not leases.has_ended("elsewhere:4194305:1:0")
