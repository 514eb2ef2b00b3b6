"""Executors of workflows on PostgreSQL: who loses its lock stops, and goes on when it has it again."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from crow_agent import Agent, tool
from crow_agent.workflows import open_workflows, takeover, workflow
from crow_core.messages.message import INTERRUPTED
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
