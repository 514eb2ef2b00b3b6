"""Methods beyond ACP, whose names begin with an underscore."""

import asyncio
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp.schema import INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, NOT_FOUND
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_core.testing.wire import RawClient, connect_raw
from crow_extensions.undo import undo
from crow_extensions.usage import usage
from crow_permissions.extension import permissions

pytestmark = pytest.mark.anyio

ROOT = str(Path("/").absolute())
"""The folder of a session in "/"; on Windows with the drive."""

BUILT_IN = Server(
    "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
)


async def open_session(wire: RawClient, cwd: str = "/") -> str:
    return (await wire.ask("session/new", {"cwd": cwd, "mcpServers": []}))["result"]["sessionId"]


async def prompt(wire: RawClient, session: str) -> dict[str, Any]:
    return await wire.ask("session/prompt", {"sessionId": session, "prompt": [{"type": "text", "text": "go"}]})


def make_app() -> Crow:
    return Crow(ScriptedModel(lambda request: Reply("Hello.")))


def code(answer: dict[str, Any]) -> int:
    return answer["error"]["code"]


async def test_initialize_lists_the_extension_methods():
    async with connect_raw(make_app().use(usage).use(undo)) as wire:
        capabilities = (await wire.ask("initialize", {"protocolVersion": 1}))["result"]["agentCapabilities"]
        assert capabilities["_meta"] == {"crow": {"methods": ["_crow/usage", "_crow/undo"]}}
    async with connect_raw(make_app()) as wire:
        capabilities = (await wire.ask("initialize", {"protocolVersion": 1}))["result"]["agentCapabilities"]
        assert "_meta" not in capabilities


async def test_an_extension_can_add_a_method():
    crow = make_app()

    async def double(session: Session, params: dict[str, Any]) -> Any:
        return {"twice": params["n"] * 2, "cwd": session.cwd}

    crow.methods["_mine/double"] = double
    async with connect_raw(crow) as wire:
        session = await open_session(wire)
        assert (await wire.ask("_mine/double", {"sessionId": session, "n": 4}))["result"] == {
            "twice": 8,
            "cwd": ROOT,
        }
        assert code(await wire.ask("_mine/double", {"sessionId": session})) == INTERNAL_ERROR
        assert code(await wire.ask("_mine/double", {"sessionId": "other", "n": 4})) == NOT_FOUND
        assert code(await wire.ask("_mine/double", {"n": 4})) == INVALID_PARAMS
        assert code(await wire.ask("_mine/double", [1])) == INVALID_PARAMS
        assert code(await wire.ask("_mine/treble", {"sessionId": session})) == METHOD_NOT_FOUND
        wire.notify("_mine/double", {"sessionId": session, "n": 4})
        wire.notify("_mine/treble", {})
        assert (await prompt(wire, session))["result"] == {"stopReason": "end_turn"}


async def test_a_method_does_not_reach_the_session_of_another_client():
    crow = make_app().use(usage)
    async with connect_raw(crow) as one, connect_raw(crow) as other:
        session = await open_session(one)
        assert code(await other.ask("_crow/usage", {"sessionId": session})) == NOT_FOUND
        assert "result" in await one.ask("_crow/usage", {"sessionId": session})


async def test_the_method_usage_returns_numbers():
    counts = {"prompt_tokens": 1000, "completion_tokens": 20, "prompt_tokens_details": {"cached_tokens": 900}}
    model = ScriptedModel([Reply("Hello.", usage=counts)], window=8192)
    async with connect_raw(Crow(model).use(usage)) as wire:
        session = await open_session(wire)
        assert (await wire.ask("_crow/usage", {"sessionId": session}))["result"]["calls"] == 0
        await prompt(wire, session)
        assert (await wire.ask("_crow/usage", {"sessionId": session}))["result"] == {
            "calls": 1,
            "inputTokens": 1000,
            "outputTokens": 20,
            "cachedReadTokens": 900,
            "thoughtTokens": 0,
            "used": 1020,
            "size": 8192,
        }


async def test_the_method_undo_returns_a_plan_and_carries_it_out_if_confirmed(tmp_path: Path):
    file = tmp_path / "new.txt"
    edit = Use(name="file_editor", arguments={"command": "create", "path": str(file), "file_text": "hello\n"})
    model = ScriptedModel([Reply(tool_calls=[edit]), Reply("Done.")])
    crow = Crow(model, servers=[BUILT_IN]).use(permissions, mode="yolo").use(undo)
    async with connect_raw(crow) as wire:
        session = await open_session(wire, str(tmp_path))
        assert code(await wire.ask("_crow/undo", {"sessionId": session})) == INVALID_REQUEST
        await prompt(wire, session)
        assert file.exists()
        told = (await wire.ask("_crow/undo", {"sessionId": session}))["result"]
        files = [{"path": str(file), "removed": True}]
        assert told == {"done": False, "turns": 1, "prompt": "go", "files": files, "kept": [], "stays": []}
        assert file.exists()
        for wrong in ({"turns": "1"}, {"turns": True}, {"confirm": "yes"}):
            assert code(await wire.ask("_crow/undo", {"sessionId": session, **wrong})) == INVALID_PARAMS
        done = (await wire.ask("_crow/undo", {"sessionId": session, "confirm": True}))["result"]
        assert done == {**told, "done": True}
        assert not file.exists()
        assert code(await wire.ask("_crow/undo", {"sessionId": session})) == INVALID_REQUEST


async def test_the_method_undo_is_refused_while_a_turn_runs():
    asked = asyncio.Event()

    async def think(request: Any) -> Reply:
        asked.set()
        return Reply(hang=True)

    async with connect_raw(Crow(ScriptedModel(think)).use(undo)) as wire:
        session = await open_session(wire)
        wire.send("p", "session/prompt", {"sessionId": session, "prompt": [{"type": "text", "text": "go"}]})
        await asked.wait()
        assert code(await wire.ask("_crow/undo", {"sessionId": session, "confirm": True})) == INVALID_REQUEST
