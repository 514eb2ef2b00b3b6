"""Malformed lines: the agent survives, answers each request once, and serves its sessions."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from crow_core.acp.transports import HIGH_WATER_BYTES, memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.messages.message import Delta
from crow_core.session.store import Record
from crow_core.testing import MemoryStore, Reply, ScriptedModel
from crow_core.testing.wire import INVALID_LINES, RawClient
from crow_extensions.ask_user import ask_user
from crow_extensions.commands import commands
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.plan import plan
from crow_extensions.telemetry import telemetry
from crow_extensions.titles import titles
from crow_extensions.undo import undo
from crow_extensions.usage import usage
from crow_permissions.extension import permissions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TEXT: list[Any] = [{"type": "text", "text": "hi"}]
HERE = "HERE"
"""Stands for the id of an open session."""
WILD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from([HERE, "/", "..", "\ud800", "a" * 100_000, -1, 10**40, "on", "ask", "text", "append", "main"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
META: dict[str, Any] = {
    "sessionId": "other",
    "cwd": "/nowhere",
    "prompt": [],
    "params": {},
    "modeId": "yolo",
    "traceparent": "00-0-0-0",
    "_meta": {"_meta": None},
}
"""Has the names of real parameters, and must change nothing."""
BASE: dict[str, dict[str, Any]] = {
    "initialize": {"protocolVersion": 1, "clientCapabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
    "authenticate": {"methodId": "configured"},
    "logout": {},
    "session/new": {"cwd": "/", "mcpServers": [], "additionalDirectories": [], "systemPrompt": None},
    "session/load": {"sessionId": "kept", "cwd": "/", "mcpServers": []},
    "session/resume": {"sessionId": "kept", "cwd": "/"},
    "session/fork": {"sessionId": "kept", "cwd": "/"},
    "session/list": {"cwd": "/", "cursor": "x"},
    "session/delete": {"sessionId": "gone"},
    "session/close": {"sessionId": "gone"},
    "session/prompt": {"sessionId": HERE, "prompt": TEXT},
    "session/set_mode": {"sessionId": HERE, "modeId": "plan"},
    "session/set_config_option": {"sessionId": HERE, "configId": "mode", "value": "plan", "type": "boolean"},
    "providers/list": {},
    "providers/set": {"providerId": "main", "apiType": "openai", "baseUrl": "ftp://x", "headers": {"a": "b"}},
    "providers/disable": {"providerId": "main"},
    "_crow/usage": {"sessionId": HERE},
    "_session/rewind": {"sessionId": HERE, "messageId": "m", "mode": "both"},
    "_unknown/thing": {},
    "nonsense": {},
    "": {},
}
BASE_2: dict[str, dict[str, Any]] = {
    "initialize": {"protocolVersion": 2, "info": {"name": "x", "version": "1"}, "capabilities": {}},
    "auth/login": {"methodId": "configured"},
    "auth/logout": {},
    "session/new": {"cwd": "/", "mcpServers": [{"type": "http", "name": "x", "url": "y"}], "additionalDirectories": []},
    "session/resume": {"sessionId": "kept", "cwd": "/", "replayFrom": {"type": "_message", "messageId": "1"}},
    "session/list": {"cwd": "/", "cursor": "x"},
    "session/delete": {"sessionId": "gone"},
    "session/close": {"sessionId": "gone"},
    "session/prompt": {"sessionId": HERE, "prompt": TEXT},
    "session/set_config_option": {"sessionId": HERE, "configId": "mode", "value": "plan", "type": "id"},
    "tool_call/cancel": {"sessionId": HERE, "toolCallId": "1"},
    "terminal/cancel": {"sessionId": HERE, "terminalId": "1"},
    **{method: BASE[method] for method in ("_crow/usage", "_session/rewind", "_unknown/thing", "nonsense", "")},
}
"""The parameters of each method of version 2."""
BLOCKS: list[Any] = [
    *TEXT,
    {"type": "image", "data": "x", "mimeType": "image/png"},
    {"type": "audio", "data": "x", "mimeType": "audio/wav"},
    {"type": "resource_link", "uri": "file:///x", "name": "x"},
    {"type": "resource", "resource": {"uri": "file:///x", "text": "x"}},
    {"type": "resource", "resource": {"uri": "file:///x", "blob": "x", "mimeType": "image/png"}},
]


@st.composite
def requests_with_faults(draw: st.DrawFn, base: dict[str, dict[str, Any]]) -> tuple[str, Any]:
    """Draw a request that may have a fault."""
    method = draw(st.sampled_from(list(base)))
    params: Any = {**base[method]}
    match draw(st.integers(0, 5)):
        case 0:
            params = draw(WILD)
        case 1 if params:
            params[draw(st.sampled_from(sorted(params)))] = draw(WILD)
        case 2 if params:
            del params[draw(st.sampled_from(sorted(params)))]
        case 3 if "prompt" in params:
            block = dict(draw(st.sampled_from(BLOCKS)))
            block[draw(st.sampled_from([*block, "annotations", "_meta"]))] = draw(WILD)
            params["prompt"] = [*TEXT, block]
        case 4:
            params["_meta"] = draw(st.just(META) | WILD)
        case _:
            pass
    return method, params


LINES = st.lists(requests_with_faults(BASE) | st.sampled_from(INVALID_LINES), min_size=50, max_size=50)
LINES_2 = st.lists(requests_with_faults(BASE_2) | st.sampled_from(INVALID_LINES), min_size=50, max_size=50)


def everything() -> Crow:
    """Make an app with all methods that a client can call, and a store with one session."""
    crow = Crow(ScriptedModel(lambda request: Reply("Well.")))
    crow.use(telemetry).use(mask_secrets).use(permissions).use(commands).use(usage).use(titles).use(undo).use(plan).use(
        ask_user
    )
    entry: Any = {"role": "user", "content": "earlier", "crow": {"id": "1"}}
    crow.store = MemoryStore(Record("kept", [entry]))
    return crow


def encode_request(id: str, method: str, params: Any, session: str, twice: bool) -> bytes:
    """Encode a request as a line; with `twice`, the method is named twice."""
    again = f'"method": {json.dumps(method)}, ' if twice else ""
    line = f'{{"jsonrpc": "2.0", {again}"id": "{id}", "method": {json.dumps(method)}, "params": {json.dumps(params)}}}'
    return line.replace(HERE, session).encode()


async def open_session(wire: RawClient) -> str:
    return (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]["sessionId"]


async def survive(lines: list[bytes | tuple[str, Any]], begin: dict[str, Any] | None = None) -> None:
    ours, theirs = memory_pair()
    crow = everything()
    serving = asyncio.ensure_future(AcpAgent(theirs, crow, unstable=True).serve())
    wire = RawClient(ours)
    if begin:
        assert (await wire.ask("initialize", begin))["result"]["protocolVersion"] == 2
    here, other = await open_session(wire), await open_session(wire)
    asked: set[str] = set()
    for number, line in enumerate(lines):
        if isinstance(line, bytes):
            wire.transport.write(line + b"\n")
        else:
            asked.add(f"r{number}")
            wire.transport.write(encode_request(f"r{number}", line[0], line[1], here, twice=number % 7 == 0) + b"\n")
        await asyncio.sleep(0)
    prompt = {"sessionId": other, "prompt": TEXT}
    while (answer := await wire.ask("session/prompt", prompt)).get("error"):
        assert answer["error"]["code"] == -32000  # a line has logged out
        for method in ("authenticate", "auth/login"):  # a line may have agreed on the other version
            await wire.ask(method, {"methodId": "configured"})
    assert answer["result"].get("stopReason") == "end_turn" or (begin and answer["result"]["messageId"])
    while asked - {message.get("id") for message in wire.received}:
        await wire.receive()
    await wire.ask("_the/end", {})
    answers = [message for message in wire.received if "method" not in message]
    counted = Counter(message["id"] for message in answers)
    assert {counted[id] for id in asked} <= {1}
    assert all(("result" in message) != ("error" in message) for message in answers)
    assert crow.sessions[other].cwd == "/"
    await ours.close()
    await serving
    await crow.shut_down()


@settings(
    max_examples=2 * settings.default.max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)
@given(LINES)
def test_malformed_lines_neither_end_the_agent_nor_block_it(lines: list[bytes | tuple[str, Any]]):
    asyncio.run(survive(lines))


@settings(
    max_examples=2 * settings.default.max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)
@given(LINES_2)
def test_malformed_lines_of_the_second_version_neither_end_the_agent_nor_block_it(
    lines: list[bytes | tuple[str, Any]],
):
    asyncio.run(survive(lines, BASE_2["initialize"]))


@pytest.mark.anyio
async def test_a_client_that_stops_reading_pauses_the_model_stream():
    """Little is buffered: then the model's stream is not read until the client reads."""
    words, said = "word " * 200, 0

    class Talker:
        name = "talker"
        window: int | None = None

        async def stream(self, request: Any) -> AsyncIterator[Delta]:
            nonlocal said
            for _ in range(1000):
                said += 1
                yield {"content": words}
            yield {"finish_reason": "stop"}

    ours, theirs = memory_pair()
    crow = Crow(Talker())
    serving = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    wire = RawClient(ours)
    session = await open_session(wire)
    wire.send("p", "session/prompt", {"sessionId": session, "prompt": TEXT})
    before = -1
    while said == 0 or said > before:  # until nothing more is sent
        before = said
        for _ in range(100):
            await asyncio.sleep(0)
    assert said <= HIGH_WATER_BYTES // len(words) + 2
    heard = 0
    while (message := await wire.receive()).get("id") != "p":
        heard += message.get("method") == "session/update"
    assert message["result"] == {"stopReason": "end_turn"}
    assert said == 1000
    assert heard >= 1000
    await ours.close()
    await serving
    await crow.shut_down()
