"""Methods beyond ACP, whose names begin with an underscore."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
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
from crow_extensions.commands import commands
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


async def prompt(wire: RawClient, session: str, text: str = "go") -> dict[str, Any]:
    return await wire.ask("session/prompt", {"sessionId": session, "prompt": [{"type": "text", "text": text}]})


def make_app() -> Crow:
    return Crow(ScriptedModel(lambda request: Reply("Hello.")))


def code(answer: dict[str, Any]) -> int:
    return answer["error"]["code"]


async def test_initialize_lists_the_extension_methods():
    async with connect_raw(make_app().use(usage).use(undo)) as wire:
        capabilities = (await wire.ask("initialize", {"protocolVersion": 1}))["result"]["agentCapabilities"]
        methods = ["_crow/usage", "_session/rewind_points", "_session/rewind"]
        assert capabilities["_meta"] == {"crow": {"methods": methods}}
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


def edit(file: Path, text: str) -> Use:
    return Use(name="file_editor", arguments={"command": "create", "path": str(file), "file_text": text})


@asynccontextmanager
async def two_turns(folder: Path) -> AsyncGenerator[tuple[RawClient, str]]:
    """A session whose turns `one` and `two` have created files with these names."""
    replies = [Reply(f"Writing {n}.", tool_calls=[edit(folder / n, f"{n}\n")]) for n in ("one", "two")]
    script = [reply for reply in replies for reply in (reply, Reply("Done."))]
    crow = Crow(ScriptedModel([*script, Reply("Again.")]), servers=[BUILT_IN])
    async with connect_raw(crow.use(permissions, mode="yolo").use(commands).use(undo)) as wire:
        session = await open_session(wire, str(folder))
        for text in ("one", "two"):
            await prompt(wire, session, text)
        yield wire, session


async def list_points(wire: RawClient, session: str) -> list[dict[str, Any]]:
    return (await wire.ask("_session/rewind_points", {"sessionId": session}))["result"]["points"]


async def rewind(wire: RawClient, session: str, point: dict[str, Any], **params: Any) -> dict[str, Any]:
    asked = {"sessionId": session, "messageId": point["messageId"], **params}
    answer = await wire.ask("_session/rewind", asked)
    return {key: value for key, value in answer["result"].items() if key != "_meta"}


async def test_rewind_points_name_the_messages_that_began_a_turn_and_the_replies_before_them(tmp_path: Path):
    async with two_turns(tmp_path) as (wire, session):
        first, second = await list_points(wire, session)
        await wire.ask("session/close", {"sessionId": session})
    assert (first["text"], first["index"], first["resumeAtMessageId"]) == ("one", 1, None)
    assert (second["text"], second["index"]) == ("two", 2)
    assert second["resumeAtMessageId"]


async def test_a_dry_run_tells_what_a_rewind_changes_and_changes_nothing(tmp_path: Path):
    async with two_turns(tmp_path) as (wire, session):
        first, second = await list_points(wire, session)
        told = await rewind(wire, session, second, mode="both", dryRun=True)
        files = {"canRewind": True, "filesChanged": [str(tmp_path / "two")], "insertions": 0, "deletions": 1}
        assert told == {"files": files, "conversation": {"rewound": False, "messagesDropped": 3}}
        told = await rewind(wire, session, first, mode="both", dryRun=True)
        assert told["conversation"]["messagesDropped"] == 6
        assert len(await list_points(wire, session)) == 2
        assert (tmp_path / "two").exists()


async def test_rewind_takes_back_files_conversation_or_both(tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    async with two_turns(tmp_path) as (wire, session):
        first, second = await list_points(wire, session)
        assert (await rewind(wire, session, second))["files"]["filesChanged"] == [str(two)]
        assert [one.exists(), two.exists()] == [True, False]
        assert len(await list_points(wire, session)) == 2
        done = await rewind(wire, session, second, mode="conversation")
        assert done == {"conversation": {"rewound": True, "messagesDropped": 3}}
        assert [point["text"] for point in await list_points(wire, session)] == ["one"]
        assert (await rewind(wire, session, first, mode="both"))["files"]["filesChanged"] == [str(one)]
        assert not one.exists()
        assert await list_points(wire, session) == []


async def test_redo_after_a_rewind_of_the_conversation_alone_changes_no_file(tmp_path: Path):
    two = tmp_path / "two"
    async with two_turns(tmp_path) as (wire, session):
        _, second = await list_points(wire, session)
        await rewind(wire, session, second, mode="conversation")
        two.write_text("mine")
        await prompt(wire, session, "/redo")
        assert len(await list_points(wire, session)) == 2
    assert two.read_text() == "mine"


async def test_a_file_that_somebody_else_changed_stops_a_rewind_of_both_unless_it_is_kept(tmp_path: Path):
    two = tmp_path / "two"
    async with two_turns(tmp_path) as (wire, session):
        _, second = await list_points(wire, session)
        two.write_text("mine")
        refused = await rewind(wire, session, second, mode="both")
        why = f"{two} has been changed by somebody else since."
        assert refused == {"files": {"canRewind": False, "error": why}}
        assert len(await list_points(wire, session)) == 2
        kept = await rewind(wire, session, second, mode="both", _meta={"crow": {"keep": True}})
        assert kept["conversation"]["rewound"]
        assert kept["files"]["filesChanged"] == []
    assert two.read_text() == "mine"


async def test_a_wrong_rewind_is_an_error_and_changes_nothing(tmp_path: Path):
    async with two_turns(tmp_path) as (wire, session):
        first, _ = await list_points(wire, session)
        asked = {"sessionId": session, "messageId": first["messageId"]}
        for wrong in ({"mode": "all"}, {"mode": 7}, {"dryRun": "yes"}, {"messageId": "other"}, {"messageId": [1]}):
            assert code(await wire.ask("_session/rewind", {**asked, **wrong})) == INVALID_PARAMS
        assert code(await wire.ask("_session/rewind", {"sessionId": session})) == INVALID_PARAMS
        assert len(await list_points(wire, session)) == 2


async def test_rewind_is_refused_while_a_turn_runs():
    asked = asyncio.Event()

    async def think(request: Any) -> Reply:
        asked.set()
        return Reply(hang=True)

    async with connect_raw(Crow(ScriptedModel(think)).use(undo)) as wire:
        session = await open_session(wire)
        wire.send("p", "session/prompt", {"sessionId": session, "prompt": [{"type": "text", "text": "go"}]})
        await asked.wait()
        (point,) = await list_points(wire, session)
        params = {"sessionId": session, "messageId": point["messageId"]}
        assert code(await wire.ask("_session/rewind", params)) == INVALID_REQUEST
