"""Executors of workflows on PostgreSQL: who loses its lock stops, and goes on when it has it again."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from crow_agent import Agent, tool
from crow_agent.workflows import open_workflows, takeover, workflow
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.messages.message import INTERRUPTED
from crow_core.session.session import Session
from crow_core.testing import Reply
from sqlalchemy import create_engine, text

pytestmark = pytest.mark.parametrize("store", ["postgresql"], indirect=True)
HOLDERS = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = "
DATABASE = "(SELECT oid FROM pg_database WHERE datname = current_database())"


def cut_locks(store: str) -> int:
    """Cut the connections that hold locks; return their number."""
    server = create_engine(store, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        cut = connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM ({HOLDERS}{DATABASE}) held")).all()
    server.dispose()
    return len(cut)


def test_executor_that_lost_its_lock_stops_its_tools_and_goes_on_from_the_log(
    make_agent: Callable[..., Agent], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "HEARTBEAT_INTERVAL", 0.1)
    monkeypatch.setattr(takeover, "LOOK_INTERVAL", 0.1)

    async def main() -> None:
        began, stopped = asyncio.Event(), asyncio.Event()

        @tool
        async def note() -> str:
            """Write a note."""
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()
            return "noted"

        call: Any = {"name": "note", "arguments": {}}
        agent = make_agent(Reply(tool_calls=[call]), Reply("Did it."), tools=[note], store=store)

        @workflow(version="1")
        async def work() -> list[Any]:
            result = await (await agent.session()).prompt("Note it.")
            return [result.text, *[call.status for call in result.tool_calls]]

        async with agent, open_workflows([work], url=store) as engine:
            first = engine.executor
            handle = await work.start(id="w")
            await began.wait()
            assert cut_locks(store)
            await stopped.wait()
            assert await handle.result() == ["Did it.", "failed"]
            assert engine.executor == first
        assert agent.model.requests[-1]["messages"][-1]["content"] == INTERRUPTED  # pyright: ignore

    asyncio.run(main())


def test_work_of_an_executor_that_ended_is_done_by_another(make_agent: Callable[..., Agent], store: str) -> None:
    async def main() -> None:
        is_first = True
        began = asyncio.Event()

        @workflow(version="1")
        async def work() -> str:
            began.set()
            if is_first:
                await asyncio.Event().wait()
            return "done"

        async with open_workflows([work], url=store) as engine:
            first = engine.executor
            await work.start(id="w")
            await began.wait()
        is_first = False
        async with open_workflows([work], url=store) as engine:
            assert engine.executor != first
            assert await work.retrieve("w").result() == "done"

    asyncio.run(main())


def give_away(store: str, executor: str) -> int:
    """Give all running workflows to an executor; return their number."""
    server = create_engine(store)
    with server.begin() as connection:
        taken = text("UPDATE dbos.workflow_status SET executor_id = :to WHERE status = 'PENDING'")
        count = connection.execute(taken, {"to": executor}).rowcount
    server.dispose()
    return count


@pytest.mark.parametrize("times", [1, 3])
def test_workflow_that_is_taken_over_and_back_while_it_waits_for_the_model_completes(
    make_agent: Callable[..., Agent], store: str, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Another executor takes it over and ends, before this one has noticed it."""
    monkeypatch.setattr(takeover, "LOOK_INTERVAL", 0.1)

    async def main() -> None:
        is_up = False
        begun: list[int] = []
        asked: list[int] = []

        def reply(request: dict[str, Any]) -> Reply:
            asked.append(1)
            return Reply("Did it.") if is_up else Reply(error=ModelError("The model is down.", retry=True))

        agent = make_agent(reply, store=store)

        @workflow(version="1")
        async def work() -> list[str]:
            begun.append(1)
            sessions = [await agent.session(), await agent.session()]
            return [(await each.prompt("Do it.")).text for each in sessions]

        async with agent, open_workflows([work], url=store):
            handle = await work.start(id="w")
            for time in range(times):
                while len(begun) <= time or len(asked) <= 2 * time:
                    await asyncio.sleep(0.05)
                assert give_away(store, "ended") == 1
            while len(begun) <= times:
                await asyncio.sleep(0.05)
            is_up = True
            assert await handle.result() == ["Did it."] * 2

    asyncio.run(main())


def break_leases(store: str) -> None:
    """Release the leases of all sessions, as who takes over from this executor does."""
    server = create_engine(store)
    with server.begin() as connection:
        connection.execute(text("UPDATE sessions SET owner = NULL"))
    server.dispose()


def test_workflow_that_lost_its_session_and_then_its_lock_closes_all_sessions_and_completes(
    make_agent: Callable[..., Agent], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled for the one, and again for the other while its first session is being closed."""
    monkeypatch.setattr(takeover, "HEARTBEAT_INTERVAL", 0.1)
    monkeypatch.setattr(takeover, "LOOK_INTERVAL", 0.1)

    async def main() -> None:
        is_up = False
        asked, closing, may_close = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def reply(request: dict[str, Any]) -> Reply:
            asked.set()
            return Reply("Did it.") if is_up else Reply(error=ModelError("The model is down.", retry=True))

        def close_slowly(crow: Crow) -> None:
            @crow.session_end
            async def wait(session: Session) -> None:
                closing.set()
                await may_close.wait()

        agent = make_agent(reply, store=store, extensions=[close_slowly])

        @workflow(version="1")
        async def work() -> list[str]:
            sessions = [await agent.session(), await agent.session()]
            return [(await each.prompt("Do it.")).text for each in sessions]

        async with agent, open_workflows([work], url=store) as engine:
            handle = await work.start(id="w")
            await asked.wait()
            break_leases(store)
            is_up = True
            await closing.wait()
            assert cut_locks(store)
            while engine.is_alive:
                await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_later(0.5, may_close.set)
            assert await handle.result() == ["Did it."] * 2

    asyncio.run(main())
