"""Group commit: what sessions gather is committed together, and a fault of one session fails that session alone."""

import asyncio
import sqlite3
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, NoReturn

import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import CloseSessionRequest, SetSessionModeRequest
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.mcp.server import Server
from crow_core.messages.message import marker_kind
from crow_core.testing import Reply, ScriptedCall, ScriptedModel, connect
from crow_permissions.extension import permissions
from crow_persistence import commits, leases, requests
from crow_persistence import database as module
from crow_persistence.batch import SELECT_LAST_ID
from crow_persistence.checks import check
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_persistence.loader import find_session, load_session
from crow_persistence.tables import calls, messages, sessions
from fastmcp import FastMCP
from sqlalchemy import Connection, Engine, event, func, select, text, update

pytestmark = pytest.mark.anyio

DEMO = FastMCP("demo")


@DEMO.tool
def add(a: int, b: int) -> int:
    return a + b


def app(database: Database, model: ScriptedModel) -> Crow:
    url = database.url.render_as_string(hide_password=False)
    server = Server("demo", lambda: DEMO, shared=True)
    return Crow(model, servers=[server]).use(persistence, url=url, folder=database.folder)


@contextmanager
def count_commits(database: Database) -> Generator[list[Connection]]:
    """Collect the commits of transactions that may write, of all connections of this process."""
    found: list[Connection] = []

    def note(connection: Connection) -> None:
        options = connection.get_execution_options()
        if "begin" in options if database.file else not options.get("postgresql_readonly"):
            found.append(connection)

    event.listen(Engine, "commit", note)
    try:
        yield found
    finally:
        event.remove(Engine, "commit", note)


@contextmanager
def count_statements() -> Generator[list[str]]:
    """Collect the statements of all databases of this process."""
    found: list[str] = []

    def note(connection: Connection, cursor: object, statement: str, *_: object) -> None:
        found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def test_a_prompt_takes_two_commits_and_a_tool_turn_two_more(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commits, "COMMIT_DELAY", 3600)  # the machine may be slow
    use = Reply("Let me see.", tool_calls=[{"name": "demo_add", "arguments": {"a": 1, "b": 2}}])
    model = ScriptedModel([Reply("Hello."), Reply("Hello."), use, Reply("3."), *[use] * 10, Reply("3.")])
    async with connect(app(database, model).use(permissions, mode="yolo")) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "open the database")
        with count_commits(database) as found:
            await editor.prompt(session.session_id, "hi")
            assert 1 <= len(found) <= 2
            found.clear()
            await editor.prompt(session.session_id, "1 + 2?")
            assert 1 <= len(found) <= 4
            found.clear()
            await editor.prompt(session.session_id, "1 + 2, ten times?")
            assert 11 <= len(found) <= 2 + 2 * 10


async def test_a_turn_with_a_key_takes_no_more_commits(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commits, "COMMIT_DELAY", 3600)  # the machine may be slow
    asked: ScriptedCall = {"name": "demo_add", "arguments": {"a": 1, "b": 2}}
    use = Reply("Let me see.", tool_calls=[asked])
    crow = app(database, ScriptedModel([Reply("Hello."), Reply("Hello."), use, Reply("3.")]))
    async with connect(crow.use(permissions, mode="yolo")) as editor:
        session = crow.sessions[(await editor.new_session("/")).session_id]
        counts: list[int] = []
        for key in ("open the database", "hi", "1 + 2?"):
            with count_commits(database) as found:
                await crow.prompt(session, {"role": "user", "content": key, "crow": {"key": key}})
            counts.append(len(found))
        assert 1 <= counts[1] <= 2
        assert 1 <= counts[2] <= 4
        assert [marker_kind(entry) for entry in session.log].count("started") == 1


@pytest.mark.parametrize(("limit", "is_idle"), [(3600, True), (0, False)], ids=["idle", "busy too long"])
async def test_database_is_opened_when_the_process_is_idle_or_after_a_limit(
    database: Database, monkeypatch: pytest.MonkeyPatch, limit: float, is_idle: bool
):
    """While the first request is made, the process is busy. No turn ends meanwhile, which would open the database."""
    spent = chain(range(10), repeat(10))  # at the start and at the end of each check
    monkeypatch.setattr(commits, "COMMIT_DELAY", 0.01)
    monkeypatch.setattr(commits, "OPEN_LIMIT", limit)
    monkeypatch.setattr(commits, "process_time", lambda: next(spent) * commits.COMMIT_DELAY)

    async def answer(request: object) -> Reply:
        while not await asyncio.to_thread(count_sessions, database):
            await asyncio.sleep(0.01)
        return Reply("Hello.")

    async with connect(app(database, ScriptedModel(answer))) as editor:
        await editor.prompt((await editor.new_session("/")).session_id, "hi")
        assert (next(spent) == 10) == is_idle


async def test_choice_of_a_mode_before_the_first_prompt_does_not_open_the_database_and_is_stored_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(commits, "COMMIT_DELAY", 0)
    url = f"sqlite:///{tmp_path / 'crow.db'}"
    crow = Crow(ScriptedModel([Reply("Hello.")])).use(persistence, url=url).use(permissions)
    async with connect(crow) as editor:
        await editor.new_session("/")
        session = await editor.new_session("/")
        await editor.request("session/set_mode", SetSessionModeRequest(session_id=session.session_id, mode_id="plan"))
        assert "crow-writes_0" not in [thread.name for thread in threading.enumerate()]
        await editor.prompt(session.session_id, "hi")
    with closing(Database(url)) as database, database.begin_read() as connection:
        record = load_session(connection, find_session(connection, session.session_id))
        assert connection.scalar(select(func.count()).select_from(sessions)) == 1
    assert [entry.get("crow", {}).get("kind") for entry in record.log][:1] == ["option"]


def count_sessions(database: Database) -> int:
    with database.begin_read() as connection:
        return connection.scalar(select(func.count()).select_from(sessions)) or 0


async def test_a_prompt_takes_few_statements_and_no_more_after_a_long_history(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(commits, "COMMIT_DELAY", 3600)  # the machine may be slow
    monkeypatch.setattr(commits, "HEARTBEAT_INTERVAL", 3600)
    used: list[list[str]] = []
    model = ScriptedModel(lambda request: Reply("Hello."))
    async with connect(app(database, model)) as editor:
        session = await editor.new_session("/")
        for _ in range(40):
            with count_statements() as found:
                await editor.prompt(session.session_id, "hi")
            used.append(found)
    assert len(used[2]) <= (10 if database.file else 8)  # BEGIN is a statement on SQLite
    assert used[2] == used[39]


async def test_a_tool_turn_takes_few_statements(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(commits, "COMMIT_DELAY", 3600)

    def use_often(request: dict[str, Any]) -> Reply:
        uses = [{"name": "demo_add", "arguments": {"a": 1, "b": 2}}]
        return Reply("3.") if request["messages"][-1]["role"] == "tool" else Reply("Let me see.", tool_calls=uses)

    crow = app(database, ScriptedModel(use_often)).use(permissions, mode="yolo")
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "open the database")
        with count_statements() as found:
            await editor.prompt(session.session_id, "1 + 2?")
    assert len(found) <= 30
    selects = [statement for statement in found if "SELECT" in statement and "FROM messages" in statement]
    assert set(selects) <= {str(SELECT_LAST_ID)}, "messages are not read again"


async def test_a_commit_of_many_sessions_takes_as_many_statements_as_one_of_few(database: Database):
    def count_rows() -> int:
        with database.begin_read() as connection:
            return connection.execute(select(func.count()).select_from(messages)).scalar_one()

    used: list[float] = []
    async with connect(app(database, ScriptedModel(lambda request: Reply("Hello.")))) as editor:
        opened = [(await editor.new_session("/")).session_id for _ in range(50)]
        await asyncio.gather(*(editor.prompt(id, "hi") for id in opened))
        for some in (opened[:5], opened):
            rounds: list[float] = []
            for _ in range(3):  # the best counts: a heartbeat, or a second attempt, adds statements to one
                before = count_rows()
                with count_statements() as found, count_commits(database) as commits_made:
                    await asyncio.gather(*(editor.prompt(id, "hi") for id in some))
                assert count_rows() == before + 2 * len(some)
                rounds.append(len(found) / len(commits_made))
            used.append(min(rounds))
    assert used[1] <= used[0] + 2


async def test_prompts_of_many_sessions_share_commits(database: Database):
    model = ScriptedModel(lambda request: Reply("Hello."))
    async with connect(app(database, model)) as editor:
        opened = [(await editor.new_session("/")).session_id for _ in range(50)]
        with count_commits(database) as found:
            await asyncio.gather(*(editor.prompt(id, "hi") for id in opened))
        assert 1 <= len(found) < 50
    with database.begin_read() as connection:
        assert connection.scalar(select(func.count()).select_from(calls)) == 50
        for id in opened:
            record = load_session(connection, find_session(connection, id))
            assert [entry["role"] for entry in record.log if "role" in entry] == ["user", "assistant"]


async def test_sessions_that_are_closed_together_share_commits_and_are_all_released(database: Database):
    def count_leases() -> int:
        with database.begin_read() as connection:
            held = select(func.count()).select_from(sessions).where(sessions.c.owner.is_not(None))
            return connection.execute(held).scalar_one()

    async with connect(app(database, ScriptedModel(lambda request: Reply("Hello.")))) as editor:
        opened = [(await editor.new_session("/")).session_id for _ in range(50)]
        await asyncio.gather(*(editor.prompt(id, "hi") for id in opened))
        assert count_leases() == 50
        with count_commits(database) as found:
            closing_all = (CloseSessionRequest(session_id=id) for id in opened)
            await asyncio.gather(*(editor.request("session/close", each) for each in closing_all))
        assert 1 <= len(found) < 50
        assert count_leases() == 0


async def test_a_session_that_breaks_fails_alone(database: Database):
    model = ScriptedModel(lambda request: Reply("Hello."))
    async with connect(app(database, model)) as editor:
        opened = [(await editor.new_session("/")).session_id for _ in range(50)]
        await asyncio.gather(*(editor.prompt(id, "one") for id in opened))
        with database.begin_write() as connection:
            taken = sessions.c.id == opened[20]
            connection.execute(update(sessions).where(taken).values(owner="another", beat=leases.now()))
        results = await asyncio.gather(*(editor.prompt(id, "two") for id in opened), return_exceptions=True)
    (broken,) = [result for result in results if isinstance(result, BaseException)]
    assert results.index(broken) == 20
    assert isinstance(broken, RpcError)
    assert "was taken over by" in str(broken.data)
    with database.begin_read() as connection:
        for id in opened:
            record = load_session(connection, find_session(connection, id))
            prompts = [entry.get("content") for entry in record.log if entry.get("role") == "user"]
            assert prompts == (["one"] if id == opened[20] else ["one", "two"])


async def test_the_model_call_of_a_failed_write_is_written_with_the_next(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    def refuse(database: Database, **_: object) -> NoReturn:
        raise StoreError("The database is locked.")

    model = ScriptedModel(lambda request: Reply("Hello."))
    async with connect(app(database, model)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "one")
        with monkeypatch.context() as broken:
            broken.setattr(Database, "begin_write", refuse)
            with pytest.raises(RpcError):
                await editor.prompt(id, "two")
        await editor.prompt(id, "three")
    with database.begin_read() as connection:
        stored = connection.execute(select(calls.c.id, calls.c.total).order_by(calls.c.started)).all()
        record = load_session(connection, find_session(connection, id))
    assert len(stored) == len(model.requests)
    assert all(call.total is not None for call in stored)
    replies = {entry.get("crow", {}).get("id") for entry in record.log if entry.get("role") == "assistant"}
    assert replies <= {call.id for call in stored}


async def test_an_unexpected_fault_of_a_write_ends_the_turn_and_the_next_prompt_works(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> NoReturn:
        raise TypeError("not serializable")

    async with connect(app(database, ScriptedModel(lambda request: Reply("Hello.")))) as editor:
        id = (await editor.new_session("/")).session_id
        with monkeypatch.context() as broken:
            broken.setattr("crow_persistence.writer.write_entries", fail)
            with pytest.raises(RpcError):
                await editor.prompt(id, "one")
        assert (await editor.prompt(id, "two")).stop_reason == "end_turn"


async def test_a_model_call_that_cannot_be_stored_is_told_once_and_the_session_goes_on(database: Database):
    model = ScriptedModel(lambda request: Reply("Hello."))
    async with connect(app(database, model)) as editor:
        first, second = [(await editor.new_session("/")).session_id for _ in range(2)]
        await editor.prompt(first, "one")
        with database.begin_write() as connection:
            refuse_model_calls(connection)
        assert (await editor.prompt(first, "two")).stop_reason == "end_turn"
        await editor.until(lambda editor: "is not stored" in editor.thoughts)
        with database.begin_write() as connection:
            accept_model_calls(connection)
        assert (await editor.prompt(first, "three")).stop_reason == "end_turn"
        assert (await editor.prompt(second, "one")).stop_reason == "end_turn"
    assert editor.thoughts.count("is not stored") == 1
    with database.begin_read() as connection:
        record = load_session(connection, find_session(connection, first))
        prompts = [entry.get("content") for entry in record.log if entry.get("role") == "user"]
        assert prompts == ["one", "two", "three"]
        assert connection.scalar(select(func.count()).select_from(calls)) == 3
        assert all(requests.rebuild_request(connection, id)[1] for id in connection.scalars(select(calls.c.id)))


def refuse_model_calls(connection: Connection) -> None:
    """Make the database refuse new rows of `calls`, as it does those that break a constraint."""
    if connection.dialect.name == "sqlite":
        connection.execute(
            text("CREATE TRIGGER refuse BEFORE INSERT ON calls BEGIN SELECT RAISE(ABORT, 'no calls today'); END")
        )
    else:
        connection.execute(text("ALTER TABLE calls ADD CONSTRAINT refuse CHECK (started < 0) NOT VALID"))


def accept_model_calls(connection: Connection) -> None:
    """Undo `refuse_model_calls`."""
    is_file = connection.dialect.name == "sqlite"
    connection.execute(text("DROP TRIGGER refuse" if is_file else "ALTER TABLE calls DROP CONSTRAINT refuse"))


async def test_a_count_of_tokens_that_fits_no_column_is_left_out(database: Database):
    usage = {"prompt_tokens": 10**14, "completion_tokens": 3}
    model = ScriptedModel(lambda request: Reply("Hello.", usage=usage))
    async with connect(app(database, model)) as editor:
        id = (await editor.new_session("/")).session_id
        assert (await editor.prompt(id, "hi")).stop_reason == "end_turn"
    with database.begin_read() as connection:
        row = connection.execute(select(calls)).one()
    assert (row.input, row.output) == (None, 3)
    assert "100000000000000" in row.usage


async def test_a_turn_waits_once_for_a_locked_file_and_the_next_prompt_waits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "SHORT_TIMEOUT", 0.0)
    crow = Crow(ScriptedModel(lambda request: Reply("Hello."))).use(
        persistence, url=f"sqlite:///{tmp_path}/x.db?timeout=2"
    )
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "one")
        with closing(sqlite3.connect(tmp_path / "x.db", isolation_level=None)) as other:
            for text in ("two", "three"):
                other.execute("BEGIN IMMEDIATE")
                with count_statements() as found, pytest.raises(RpcError):
                    await editor.prompt(id, text)
                begun = [before for before, statement in pairwise(["", *found]) if statement == "BEGIN IMMEDIATE"]
                assert len([before for before in begun if before != "PRAGMA busy_timeout = 0"]) == 1
                other.execute("ROLLBACK")
            other.execute("BEGIN IMMEDIATE")
            asyncio.get_running_loop().call_later(0.5, other.execute, "ROLLBACK")
            await editor.prompt(id, "four")
    database = Database(f"sqlite:///{tmp_path}/x.db")
    with database.begin_read() as connection:
        record = load_session(connection, find_session(connection, id))
        assert connection.scalar(select(func.count()).select_from(calls)) == 4
    said = [entry.get("content") for entry in record.log if entry.get("role") == "user"]
    assert said == ["one", "two", "three", "four"]
    assert check(database) == []
    database.close()


async def test_a_session_whose_file_was_deleted_is_written_again_and_misses_no_model_call(tmp_path: Path):
    file = tmp_path / "x.db"
    crow = Crow(ScriptedModel(lambda request: Reply("Hello."))).use(persistence, url=f"sqlite:///{file}")
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "one")
        file.unlink()
        with pytest.raises(RpcError):
            await editor.prompt(id, "two")
        await editor.prompt(id, "three")
    database = Database(f"sqlite:///{file}")
    with database.begin_read() as connection:
        record = load_session(connection, find_session(connection, id))
        assert connection.scalar(select(func.count()).select_from(calls)) == 2
    said = [entry.get("content") for entry in record.log if entry.get("role") == "user"]
    assert said == ["one", "two", "three"]
    assert check(database) == []
    database.close()
