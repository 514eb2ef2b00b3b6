"""The official SDKs' WebSocket clients, in conversation with `crow serve`."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import acp
import pytest
from acp.schema import (
    AgentMessageChunk,
    AllowedOutcome,
    PermissionOption,
    RequestPermissionResponse,
    ToolCallProgress,
    ToolCallStart,
    ToolCallUpdate,
    UserMessageChunk,
)
from acp.ws import create_websocket_stream
from crow_core.testing import Reply, ScriptedCall, ScriptedServer
from websockets.exceptions import InvalidStatus

if TYPE_CHECKING:
    from conftest import Node

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving(model: ScriptedServer, env: dict[str, str]) -> AsyncIterator[tuple[str, str]]:
    """The address of a `crow serve`, and its token; it ends well and has nothing to say."""
    env = env | {"OPENAI_BASE_URL": model.url, "OPENAI_API_KEY": "key", "CROW_MODEL": "scripted"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "crow_cli", "serve", "--port", "0"), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=env
    )
    try:
        assert process.stdout
        url, *_, token = (await process.stdout.readline()).decode().split()
        yield url, token
    finally:
        process.terminate()
        ended = await process.communicate()
    assert (process.returncode, *ended) == (0, b"", b"")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CROW_HOME": str(tmp_path / "crow"), "LANG": "C.UTF-8"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


class Client(acp.Client):
    """Records what it is shown, and permits everything."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.questions: list[ToolCallUpdate] = []
        self._news = asyncio.Condition()

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        async with self._news:
            self.updates.append(update)
            self._news.notify_all()

    async def request_permission(
        self, session_id: str, tool_call: ToolCallUpdate, options: list[PermissionOption], **kwargs: Any
    ) -> RequestPermissionResponse:
        self.questions.append(tool_call)
        chosen = next(option for option in options if option.kind == "allow_once")
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=chosen.option_id))

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait until this holds; it is looked at after every update."""
        async with self._news:
            await self._news.wait_for(true)

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [update for update in self.updates if isinstance(update, kinds)]

    @property
    def text(self) -> str:
        return "".join(update.content.text for update in self.of(AgentMessageChunk))

    @property
    def states(self) -> list[str]:
        return [call.status for call in self.of(ToolCallStart, ToolCallProgress)]


@asynccontextmanager
async def conversation(client: Client, url: str, token: str) -> AsyncIterator[Any]:
    """The Python SDK's client, past `initialize`."""
    stream = await create_websocket_stream(url, headers={"Authorization": f"Bearer {token}"})
    connection = acp.connect_to_agent(client, stream)
    try:
        agreed = await connection.initialize(protocol_version=1)
        assert (agreed.protocol_version, agreed.agent_capabilities.load_session) == (1, True)
        yield connection
    finally:
        await connection.close()


def command(line: str) -> Reply:
    call: ScriptedCall = {"name": "terminal", "arguments": {"command": line}}
    return Reply(tool_calls=[call])


REPLIES = [command("echo 42 | tee answer"), Reply("It is 42."), command("sleep 600"), Reply("Still here.")]


async def test_pythons_client_asks_permits_cancels_and_comes_back(env: dict[str, str], project: Path):
    async with ScriptedServer(REPLIES) as model, serving(model, env) as (url, token):
        client = Client()
        async with conversation(client, url, token) as crow:
            session = await crow.new_session(cwd=str(project))
            id = session.session_id
            response = await crow.prompt(session_id=id, prompt=[acp.text_block("What is six times seven?")])
            await client.until(lambda: client.text == "It is 42.")
            assert response.stop_reason == "end_turn"
            assert [question.raw_input for question in client.questions] == [{"command": "echo 42 | tee answer"}]
            assert client.states == ["pending", "in_progress", "completed"]
            assert (project / "answer").read_text() == "42\n"
            turn = asyncio.create_task(crow.prompt(session_id=id, prompt=[acp.text_block("Wait for me.")]))
            await client.until(lambda: client.states[3:] == ["pending", "in_progress"])
            await crow.cancel(session_id=id)
            assert (await turn).stop_reason == "cancelled"
            await client.until(lambda: client.states[-1] == "failed")
        client = Client()
        async with conversation(client, url, token) as crow:
            await crow.load_session(session_id=id, cwd=str(project), mcp_servers=[])
            response = await crow.prompt(session_id=id, prompt=[acp.text_block("And now?")])
            await client.until(lambda: client.text == "It is 42.Still here.")
            assert response.stop_reason == "end_turn"
            said = [update.content.text for update in client.of(UserMessageChunk)]
            assert said == ["What is six times seven?", "Wait for me."]


async def test_pythons_client_is_refused_without_the_token(env: dict[str, str]):
    async with ScriptedServer([]) as model, serving(model, env) as (url, _):
        for headers in (None, {"Authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as refusal:
                await create_websocket_stream(url, headers=headers)
            assert refusal.value.response.status_code == 401


def states(updates: list[dict[str, Any]]) -> list[str]:
    """What the tool calls went through."""
    return [update["status"] for update in updates if update["sessionUpdate"].startswith("tool_call")]


def text(updates: list[dict[str, Any]], kind: str) -> str:
    """What one side said."""
    return "".join(update["content"]["text"] for update in updates if update["sessionUpdate"] == kind)


async def test_typescripts_client_does_the_same_as_a_page_in_a_browser(node: "Node"):
    async with ScriptedServer(REPLIES) as model, serving(model, node.env) as (url, token):
        done = await node.run(model.url, "remote.mjs", url, token)

    assert (done.code, done.err) == (0, "")
    seen = json.loads(done.out)
    assert seen["greeting"]["protocolVersion"] == 1
    assert [question["toolCall"]["name"] for question in seen["questions"]] == ["terminal", "terminal"]
    assert seen["finished"]["response"]["stopReason"] == "end_turn"
    assert text(seen["finished"]["updates"], "agent_message_chunk") == "It is 42."
    assert states(seen["finished"]["updates"]) == ["pending", "in_progress", "completed"]
    assert (node.project / "answer").read_text() == "42\n"
    assert seen["cancelled"]["response"]["stopReason"] == "cancelled"
    assert states(seen["cancelled"]["updates"]) == ["pending", "in_progress", "failed"]
    again = seen["second"]
    assert text(again["replayed"], "user_message_chunk") == "What is six times seven?Wait for me."
    assert text(again["replayed"], "agent_message_chunk") == "It is 42."
    assert again["response"]["stopReason"] == "end_turn"


async def test_typescripts_client_is_refused_with_a_wrong_token(node: "Node"):
    async with ScriptedServer([]) as model, serving(model, node.env) as (url, _):
        done = await node.run(model.url, "remote.mjs", url, "wrong")

    assert done.code != 0
    assert done.out == ""
