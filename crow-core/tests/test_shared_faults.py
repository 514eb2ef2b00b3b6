"""Clients that share a session and come, leave or fail at bad moments: nothing is lost, and nobody waits for ever."""

import asyncio
from typing import Any

import pytest
from crow_core.acp.transports import MemoryTransport, memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.session.session import Session
from crow_core.session.store import Record
from crow_core.testing import MemoryStore, Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_core.testing.wire import RawClient, connect_raw
from crow_testing.version_2 import INITIALIZE, ClientV2, join_2, make_prompt
from crow_testing.waiting_tool import WaitingTool

pytestmark = pytest.mark.anyio

WORKING = Reply("Calling.", tool_calls=[Use(name="demo_work", arguments={})])


class SlowStore(MemoryStore):
    """A store that reads a session when it may."""

    def __init__(self, *records: Record) -> None:
        super().__init__(*records)
        self.may = asyncio.Event()

    async def load(self, id: str) -> Record | None:
        await self.may.wait()
        return await super().load(id)


def send_load(wire: RawClient, id: str) -> None:
    wire.send(id, "session/load", {"sessionId": "kept", "cwd": "/", "mcpServers": []})


async def find_answer(wire: RawClient, id: str) -> Any:
    """Return the result that answers a request."""
    while not (found := [message for message in wire.received if message.get("id") == id]):
        await wire.receive()
    return found[0]["result"]


async def test_two_clients_that_load_a_stored_session_at_the_same_time_both_have_it():
    crow = Crow(ScriptedModel([Reply("One."), Reply("Two.")]))
    crow.store = store = SlowStore(Record("kept", [{"role": "user", "content": "earlier"}]))
    async with connect_raw(crow) as one, connect_raw(crow) as two:
        for wire in (one, two):
            send_load(wire, "a")
            await wire.ask("session/list", {})
        store.may.set()
        for wire in (one, two):
            await find_answer(wire, "a")
            assert "earlier" in str(wire.received)
            assert (await wire.ask("session/prompt", make_prompt("kept", "a")))["result"]["stopReason"] == "end_turn"


async def test_a_session_that_one_client_loads_twice_at_once_is_usable():
    server, opened, may = WaitingTool().server, list[Session](), asyncio.Event()
    crow = Crow(ScriptedModel([Reply("One.")]), servers=[server])
    crow.store = store = MemoryStore(Record("kept", [{"role": "user", "content": "earlier"}]))

    @crow.mcp_servers
    async def wait(session: Session) -> list[Server]:
        opened.append(session)
        await may.wait()
        return []

    async with connect_raw(crow) as wire:
        for id in ("a", "b"):
            send_load(wire, id)
        await wire.ask("session/list", {})
        may.set()
        await find_answer(wire, "a")
        await find_answer(wire, "b")
        assert (await wire.ask("session/prompt", make_prompt("kept", "a")))["result"]["stopReason"] == "end_turn"
        assert [*crow.sessions.values()] == opened[-1:]
    assert not server.calls.hosts
    record = await store.load("kept")
    assert record is not None
    assert [entry.get("content") for entry in record.log if "role" in entry] == ["earlier", "a", "One."]


async def test_a_client_that_is_slow_to_leave_does_not_close_the_session_that_was_opened_again():
    crow, started, may = Crow(ScriptedModel([Reply("One.")])), asyncio.Event(), asyncio.Event()
    crow.store = MemoryStore(Record("kept", []))

    async def work(session: Session, params: dict[str, Any]) -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await may.wait()

    crow.methods["_my/work"] = work
    ours, theirs = memory_pair()
    leaving = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    first = RawClient(ours)
    send_load(first, "a")
    await find_answer(first, "a")
    first.send("b", "_my/work", {"sessionId": "kept"})
    await started.wait()
    async with connect_raw(crow) as second:
        await ours.close()
        send_load(second, "a")
        await find_answer(second, "a")
        opened = crow.sessions["kept"]
        may.set()
        await leaving
        assert crow.sessions["kept"] is opened


class BreakingTransport:
    """A transport over which nothing can be sent any more once it is `broken`."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.readline, self.write, self.close = transport.readline, transport.write, transport.close
        self._drain, self.broken = transport.drain, False

    async def drain(self) -> None:
        if self.broken:
            raise BrokenPipeError
        await self._drain()


async def test_a_client_that_is_killed_at_the_end_of_its_turn_does_not_hold_up_the_others():
    crow = Crow(ScriptedModel([Reply("One."), Reply("Two.")]))
    ours, theirs = memory_pair()
    breaking = BreakingTransport(theirs)

    @crow.turn_end
    def kill(session: Session, outcome: Any) -> None:
        breaking.broken = True

    serving = asyncio.ensure_future(AcpAgent(breaking, crow).serve())
    async with join_2(crow) as second:
        first = RawClient(ours)
        await first.ask("initialize", INITIALIZE)
        session = (await first.ask("session/new", {"cwd": "/"}))["result"]["sessionId"]
        await second.ask("session/resume", {"sessionId": session, "cwd": "/"})
        await first.ask("session/prompt", make_prompt(session, "a"))
        await second.until(ClientV2.ends)
        assert await second.prompt(session, "b") == "end_turn"
        await serving
    await crow.shut_down()


async def test_a_turn_that_ends_after_all_clients_have_left_may_tell_something():
    work, told = WaitingTool(), list[Any]()
    crow = Crow(ScriptedModel([WORKING]), servers=[work.server])

    @crow.turn_end
    async def tell(session: Session, outcome: Any) -> None:
        await session.notice("It is over.")
        told.append(outcome)

    async with join_2(crow) as first, join_2(crow) as second:
        session = await first.open()
        await second.ask("session/resume", {"sessionId": session, "cwd": "/"})
        await first.ask("session/prompt", make_prompt(session, "a"))
        await work.started.wait()
    await crow.shut_down()
    assert told == ["cancelled"]
