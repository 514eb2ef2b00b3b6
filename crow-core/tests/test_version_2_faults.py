"""Bad input in version 2: streams that are cut anywhere, half a peer, what nobody knows, sessions resumed twice."""

import asyncio
import json
from typing import Any

import pytest
from crow_core.acp.client import AcpClient
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import ClientCapabilities, SessionNotification
from crow_core.acp.transports import LineQueue, MemoryTransport, memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.session.store import Record
from crow_core.testing import MemoryStore, Reply, ScriptedModel
from crow_testing.version_2 import INITIALIZE, connect_2

pytestmark = pytest.mark.anyio

ENTRY: Any = {"role": "user", "content": "earlier", "crow": {"id": "1"}}


def encode(method: str, params: Any, id: int | None = None) -> bytes:
    more = {} if id is None else {"id": id}
    return json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}).encode() + b"\n"


def answer(id: int, result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id, "result": result}).encode() + b"\n"


def update(kind: str, **fields: Any) -> bytes:
    return encode("session/update", {"sessionId": "s", "update": {"sessionUpdate": kind, **fields}})


TEXT = [{"type": "text", "text": "go"}]
REQUESTS = (
    encode("initialize", INITIALIZE, 1)
    + encode("session/resume", {"sessionId": "kept", "cwd": "/", "replayFrom": {"type": "start"}}, 2)
    + encode("session/prompt", {"sessionId": "kept", "prompt": TEXT}, 3)
)
"""The lines of a client that resumes a session and prompts."""
CAPABILITIES: dict[str, Any] = {"info": {"name": "x", "version": "1"}, "capabilities": {"session": {}}}
ANSWERS = (
    answer(1, {"protocolVersion": 2, **CAPABILITIES})
    + answer(2, {"sessionId": "s"})
    + answer(3, {"messageId": "m"})
    + update("user_message", messageId="m", content=TEXT)
    + update("state_update", state="running")
    + update("agent_message_chunk", messageId="a", content={"type": "text", "text": "Hé"})
    + update("state_update", state="idle", stopReason="end_turn")
)
"""The lines of an agent in a conversation of one turn."""


def put(transport: MemoryTransport, data: bytes) -> None:
    """Send bytes as lines; the last may be cut."""
    for line in data.splitlines(keepends=True):
        transport.write(line)


async def test_a_clients_stream_may_be_cut_at_every_byte_and_no_entry_is_lost():
    for cut in range(len(REQUESTS) + 1):
        crow = Crow(ScriptedModel([Reply("Well.")]))
        crow.store = store = MemoryStore(Record("kept", [ENTRY]))
        ours, theirs = memory_pair()
        serving = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
        put(ours, REQUESTS[:cut])
        theirs._incoming.close()  # pyright: ignore[reportPrivateUsage] - the agent still can write
        await asyncio.wait_for(serving, 60)
        assert crow.sessions == {}
        found = await store.load("kept")
        assert found is not None
        assert found.log[0] == ENTRY
        sent = [json.loads(line) for line in read_all(ours)]
        assert all(message.get("error", {}).get("code", -32700) in (-32700, -32800, -32603) for message in sent), cut
        await crow.shut_down()


def read_all(transport: MemoryTransport) -> list[bytes]:
    queue: LineQueue = transport.readline.__self__
    return [*queue.lines]


async def prompt_agent(data: bytes, shown: list[Any]) -> str:
    """Let a client speak with an agent that sends these bytes and leaves. Return the stop reason."""
    ours, theirs = memory_pair()

    async def show(params: SessionNotification) -> None:
        shown.append(params.update)

    client = AcpClient(ours, {"session/update": show})
    async with client.serving():
        lines = data.splitlines(keepends=True)
        talking = asyncio.ensure_future(talk(client))
        for line in lines:
            if b'"id"' in line:
                await theirs.readline()  # each answer comes after its request
            theirs.write(line)
        await theirs.close()
        return await talking


async def talk(client: AcpClient) -> str:
    await client.initialize("editor", ClientCapabilities(), version=2)
    session = (await client.new_session("/")).session_id
    return (await client.prompt(session, "go")).stop_reason


async def test_an_agents_stream_may_be_cut_at_every_byte_and_the_prompt_says_so():
    for cut in range(len(ANSWERS) - 1):  # the last byte is a newline
        with pytest.raises((ConnectionClosed, RpcError)) as caught:
            await prompt_agent(ANSWERS[:cut], [])
        assert "\n" not in str(caught.value)
    shown: list[Any] = []
    assert await prompt_agent(ANSWERS, shown) == "end_turn"
    assert [each.content.text for each in shown] == ["Hé"]


async def test_unknown_updates_and_fields_of_an_agent_change_nothing():
    strange = (
        update("dance", partner="x")
        + update("_mood", mood=7)
        + update("tool_call_update", toolCallId="c", content=[{"type": "hologram"}], status="paused", aura="blue")
        + update("state_update", state="sleeping", background=[{"type": "dream"}], depth=3)
        + update("plan_update", plan={"type": "spiral", "planId": "p"})
        + encode("agent/mood", {"mood": "fine"})
        + encode("session/update", {"sessionId": "s"})
        + encode("session/update", [])
        + b'{"jsonrpc": "2.0", "method": "session/update"}\n'
    )
    lines = ANSWERS.splitlines(keepends=True)
    shown: list[Any] = []
    assert await prompt_agent(b"".join(lines[:5]) + strange + b"".join(lines[5:]), shown) == "end_turn"
    assert [each.content.text for each in shown if hasattr(each, "content") and hasattr(each.content, "text")] == ["Hé"]


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (2, {"stopReason": "end_turn"}),
        (1, {"id": "s"}),
        (2, None),
        (2, []),
    ],
)
async def test_half_a_peer_is_told_apart_in_one_sentence(number: int, told: Any):
    lines = ANSWERS.splitlines(keepends=True)
    lines[number] = answer(number + 1, told)
    with pytest.raises(RpcError) as caught:
        await prompt_agent(b"".join(lines[: number + 1]), [])
    assert caught.value.to_sentence().startswith(("Unreadable answer to session/", "The session has ended"))


async def test_a_session_that_is_resumed_twice_stays_one():
    crow = Crow(ScriptedModel([Reply("One."), Reply("Two.")]))
    crow.store = MemoryStore(Record("kept", [ENTRY]))
    resume = {"sessionId": "kept", "cwd": "/", "replayFrom": {"type": "start"}}
    async with connect_2(crow) as client:
        both = [client.send("session/resume", resume) for _ in range(2)]
        answers = [await each for each in both]
        assert any("result" in each for each in answers)
        await client.ask("session/resume", resume)
        assert await client.prompt("kept", "go") == "end_turn"
        assert [*crow.sessions] == ["kept"]
        assert client.text in ("One.", "Two.")
