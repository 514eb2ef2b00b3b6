"""Test that a compacted session is stored completely and continues in another process."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from crow_compact.extension import compact
from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.schema import ClientCapabilities, LoadSessionRequest, TextBlock, UserMessageChunk
from crow_core.acp.transports import ChildTransport, spawn
from crow_core.app import Crow
from crow_core.messages.message import marker_kind
from crow_core.messages.passes import SUMMARY_TEMPLATE
from crow_core.testing import Editor, Raw, Reply, ScriptedModel, ScriptedServer, connect
from crow_persistence.extension import persistence

pytestmark = pytest.mark.anyio

LONG = "These are words that nobody needs to read. " * 100


def is_compaction(request: dict[str, Any]) -> bool:
    return "Write a summary that you will go on from" in str(request["messages"][-1]["content"])


def get_user_texts(editor: Editor) -> list[str]:
    """Return the first six characters of each user message that the editor received."""
    return [c.content.text[:6] for c in editor.of(UserMessageChunk) if isinstance(c.content, TextBlock)]


async def test_compacted_session_continues_in_another_process_and_replays_everything(tmp_path: Path):
    def speak(request: dict[str, Any]) -> Reply:
        return Reply("All went well." if is_compaction(request) else "Well.")

    def crow() -> Crow:
        app = Crow(ScriptedModel(speak, window=8_000))
        return app.use(persistence, url=f"sqlite:///{tmp_path / 'crow.db'}", folder=tmp_path).use(compact)

    async with connect(first := crow()) as editor:
        id = (await editor.new_session("/")).session_id
        turns = 0
        while not [entry for entry in first.sessions[id].log if marker_kind(entry) == "compaction"]:
            await editor.prompt(id, f"Turn {turns}. {LONG}")
            turns += 1
        await editor.prompt(id, "And now?")
    async with connect(later := crow()) as editor:
        await editor.request("session/load", LoadSessionRequest(session_id=id, cwd="/", mcp_servers=[]))
        assert get_user_texts(editor) == [*(f"Turn {turn}" for turn in range(turns)), "And no"]
        await editor.prompt(id, "Go on")
    model, before = later.models["scripted"], first.models["scripted"]
    assert isinstance(model, ScriptedModel)
    assert isinstance(before, ScriptedModel)
    old, new = before.requests[-1]["messages"], model.requests[0]["messages"]
    assert SUMMARY_TEMPLATE.format("All went well.") in old[1]["content"]
    assert new[: len(old)] == old
    assert (new[-1]["content"], len(new)) == ("Go on", len(old) + 2)


class Process:
    """Runs `crow acp` and other commands with `home` as the home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {"PATH": os.environ["PATH"], "HOME": str(home), "CROW_HOME": str(home), "LANG": "C.UTF-8"}

    @asynccontextmanager
    async def acp(self) -> AsyncGenerator[tuple[ChildTransport, Editor]]:
        child = await spawn(sys.executable, ["-m", "crow_cli", "acp"], self.env, self.home)
        editor = Editor(child)
        try:
            async with editor.serving():
                await editor.initialize("editor", ClientCapabilities())
                yield child, editor
        finally:
            with suppress(ProcessLookupError):
                child.process.kill()

    async def run(self, *args: str) -> str:
        """Run a command and return its output."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "crow_cli", *args, stdin=DEVNULL, stdout=PIPE, env=self.env, cwd=self.home
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out.decode()


@pytest.mark.slow
async def test_killed_process_leaves_the_view_before_the_compaction(tmp_path: Path):
    hangs = True

    def speak(request: dict[str, Any]) -> Reply | Raw:
        if not is_compaction(request):
            return Reply("Well.")
        return (
            Raw([b'data: {"choices": [{"delta": {"content": "Half of"}}]}\n\n'], hang=True) if hangs else Reply("All.")
        )

    process = Process(tmp_path)
    async with ScriptedServer(speak) as server:
        settings = f'[models.local]\nbase_url = "{server.url}"\nmodel = "scripted"\nwindow = 16000\n'
        (tmp_path / "config.toml").write_text(settings)
        async with process.acp() as (child, editor):
            id = (await editor.new_session(str(tmp_path))).session_id
            for turn in range(3):
                await editor.prompt(id, f"Turn {turn}. {LONG}")
            compacting = asyncio.ensure_future(editor.prompt(id, "/compact"))
            await server.until(lambda: any(map(is_compaction, server.requests)))
            child.process.kill()
            with suppress(ConnectionClosed):
                await compacting
        summed_up = server.requests[-1]["messages"]
        hangs = False
        async with process.acp() as (child, editor):
            await editor.request("session/load", LoadSessionRequest(session_id=id, cwd=str(tmp_path), mcp_servers=[]))
            assert get_user_texts(editor) == ["Turn 0", "Turn 1", "Turn 2"]
            await editor.prompt(id, "Go on")
            await editor.prompt(id, "/compact")
        old = next(request["messages"] for request in server.requests if request["messages"][-1]["content"] == "Go on")
        assert old[: len(summed_up) - 1] == summed_up[:-1], "the old view"
        assert "summary" not in str(old[1:])

    view = json.loads(await process.run("sessions", "show", id, "--view", "--json"))
    assert SUMMARY_TEMPLATE.format("All.") in view[1]["content"]
    told = await process.run("sessions", "show", id)
    assert told.count("Turn 2. These") == 1
    assert "Compacted from about" in told
    calls = json.loads(await process.run("calls", "list", id, "--json"))
    assert calls[0]["purpose"] == "compaction"
