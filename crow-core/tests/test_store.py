"""The store of an app, as a client sees it."""

from typing import Any

import pytest
from crow_core.acp.schema import AgentMessageChunk, LoadSessionRequest
from crow_core.agent.app_source import Announced, LazyApp
from crow_core.app import Crow
from crow_core.session.session import Session
from crow_core.testing import MemoryStore, Reply, ScriptedModel, connect
from crow_core.testing.wire import RawClient, connect_raw

pytestmark = pytest.mark.anyio

STORING = ("session/load", "session/resume", "session/fork", "session/list", "session/delete")
MANAGING = ("session/archive", "session/unarchive", "session/status", "session/set_title")


def make_app(store: MemoryStore | None) -> Crow:
    crow = Crow(ScriptedModel(lambda request: Reply("Hello.")))
    crow.store = store
    return crow


async def talk(wire: RawClient, *texts: str) -> str:
    """Open a session and send prompts; return its id."""
    id = (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]["sessionId"]
    for text in texts:
        await wire.ask("session/prompt", {"sessionId": id, "prompt": [{"type": "text", "text": text}]})
    return id


async def list_ids(wire: RawClient, **params: Any) -> list[str]:
    return [found["sessionId"] for found in (await wire.ask("session/list", params))["result"]["sessions"]]


@pytest.mark.parametrize("store", [None, MemoryStore()], ids=["no store", "a store"])
async def test_sessions_are_loaded_and_listed_only_if_the_app_has_a_store(store: MemoryStore | None):
    async with connect_raw(make_app(store), unstable=True) as wire:
        answer = await wire.ask("initialize", {"protocolVersion": 1})
        capabilities = answer["result"]["agentCapabilities"]
        assert capabilities.get("loadSession", False) is (store is not None)
        offered = {"list", "delete", "resume", "fork", "archive", "title", "status"}
        assert offered & {*capabilities["sessionCapabilities"]} == (offered if store is not None else set())
        for method in (*STORING, *MANAGING):
            answer = await wire.ask(method, {"sessionId": "s", "cwd": "/", "mcpServers": [], "title": "A"})
            assert ("Method not found" in str(answer)) is (store is None), method


async def test_app_that_turns_out_to_have_no_store_knows_no_sessions():
    async def make(**_: Any) -> Crow:
        return make_app(None)

    async with connect_raw(LazyApp(make, Announced(stored=True)), unstable=True) as wire:
        assert await list_ids(wire) == []
        for method in {*STORING, *MANAGING} - {"session/list", "session/delete"}:
            answer = await wire.ask(method, {"sessionId": "s", "cwd": "/", "mcpServers": [], "title": "A"})
            assert answer["error"]["message"].startswith("Unknown session"), method
        assert "result" in await wire.ask("session/delete", {"sessionId": "s"})


async def test_closed_session_is_listed_loaded_forked_renamed_archived_and_deleted():
    store = MemoryStore()
    async with connect_raw(make_app(store), unstable=True) as wire:
        first, second = await talk(wire, "one", "two"), await talk(wire, "three")
        await talk(wire)  # without a message, it is not stored
        for id in (first, second):
            await wire.ask("session/close", {"sessionId": id})
        assert await list_ids(wire) in ([second, first], [first, second])  # perhaps in the same millisecond
        fork = (await wire.ask("session/fork", {"sessionId": first, "cwd": "/", "mcpServers": []}))["result"][
            "sessionId"
        ]
        await wire.ask("session/set_title", {"sessionId": first, "title": "A name"})
        await wire.ask("session/archive", {"sessionId": second})
        assert await list_ids(wire, archived="only") == [second]
        await wire.ask("session/delete", {"sessionId": fork})
        assert await list_ids(wire) == [first]
        loaded = await wire.ask("session/load", {"sessionId": first, "cwd": "/", "mcpServers": []})
        assert "result" in loaded
    assert store.summaries[first].title == "A name"
    assert [entry.get("content") for entry in store.records[first].log if "role" in entry] == [
        *("one", "Hello."),
        *("two", "Hello."),
    ]


async def test_client_is_shown_what_follows_only_when_the_store_has_what_came_before():
    """Also in an app without a function in the hook `message`."""
    crow, store = make_app(None), MemoryStore()
    crow.store = store
    assert not crow.message
    stored: list[Any] = []

    @crow.before_end
    async def remark(session: Session, stop_reason: str) -> None:
        session.log.append({"role": "assistant", "content": "Noted."})
        await session.say("Shown.")
        stored.append(store.records[session.id].log[-1].get("content"))

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
    assert stored == ["Noted."]


async def test_session_is_loaded_in_another_app_of_the_same_store():
    store = MemoryStore()
    async with connect(make_app(store)) as editor:
        id = (await editor.new_session("/")).session_id
        await editor.prompt(id, "hi")
    async with connect(make_app(store)) as editor:
        await editor.request("session/load", LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[]))
        assert [update.content for update in editor.of(AgentMessageChunk)]
