"""Test `crow serve` with the WebSocket clients of the official SDKs."""

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
    """Run `crow serve` and yield its address and token; check that it exits cleanly and prints nothing else."""
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
    folders = {"HOME": str(tmp_path), "CROW_HOME": str(tmp_path / "crow")}
    return {"PATH": os.environ["PATH"], **folders, "LANG": "C.UTF-8", "CROW_SANDBOX": "off"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


class Client(acp.Client):
    """Records updates and permission requests, and gives every permission."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.questions: list[ToolCallUpdate] = []
        self._changed = asyncio.Condition()

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        async with self._changed:
            self.updates.append(update)
            self._changed.notify_all()

    async def request_permission(
        self, session_id: str, tool_call: ToolCallUpdate, options: list[PermissionOption], **kwargs: Any
    ) -> RequestPermissionResponse:
        self.questions.append(tool_call)
        chosen = next(option for option in options if option.kind == "allow_once")
        return RequestPermissionResponse(outcome=AllowedOutcome(outcome="selected", option_id=chosen.option_id))

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until a condition holds; it is checked after every update."""
        async with self._changed:
            await self._changed.wait_for(condition)

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
    """Connect the Python SDK's client and initialize the agent."""
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


REPLIES = [command("echo 42 | tee answer"), Reply("It is 42."), command("sleep 600; touch late"), Reply("Still here.")]


async def test_python_client_prompts_permits_cancels_and_loads_again(env: dict[str, str], project: Path):
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
            texts = [update.content.text for update in client.of(UserMessageChunk)]
            assert texts == ["What is six times seven?", "Wait for me."]


@pytest.mark.slow
async def test_python_client_is_refused_without_the_token(env: dict[str, str]):
    async with ScriptedServer([]) as model, serving(model, env) as (url, _):
        for headers in (None, {"Authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as refusal:
                await create_websocket_stream(url, headers=headers)
            assert refusal.value.response.status_code == 401


def states(updates: list[dict[str, Any]]) -> list[str]:
    """Return the states of the tool calls."""
    return [update["status"] for update in updates if update["sessionUpdate"].startswith("tool_call")]


def text(updates: list[dict[str, Any]], kind: str) -> str:
    """Return the text of one side."""
    return "".join(update["content"]["text"] for update in updates if update["sessionUpdate"] == kind)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "scheme"), [("remote.mjs", "ws"), ("remote_http.mjs", "http")])
async def test_typescript_client_does_the_same_with_subprotocols_and_over_http(node: "Node", program: str, scheme: str):
    async with ScriptedServer(REPLIES) as model, serving(model, node.env) as (url, token):
        done = await node.run(model.url, program, url.replace("ws", scheme, 1), token)

    assert (done.code, done.err) == (0, "")
    output = json.loads(done.out)
    assert output["greeting"]["protocolVersion"] == 1
    assert [question["toolCall"]["name"] for question in output["questions"]] == ["terminal", "terminal"]
    assert output["finished"]["response"]["stopReason"] == "end_turn"
    assert text(output["finished"]["updates"], "agent_message_chunk") == "It is 42."
    assert states(output["finished"]["updates"]) == ["pending", "in_progress", "completed"]
    assert (node.project / "answer").read_text() == "42\n"
    assert output["cancelled"]["response"]["stopReason"] == "cancelled"
    assert states(output["cancelled"]["updates"]) == ["pending", "in_progress", "failed"]
    again = output["second"]
    assert text(again["replayed"], "user_message_chunk") == "What is six times seven?Wait for me."
    assert text(again["replayed"], "agent_message_chunk") == "It is 42."
    assert again["response"]["stopReason"] == "end_turn"


@pytest.mark.slow
async def test_typescript_client_is_refused_with_a_wrong_token(node: "Node"):
    async with ScriptedServer([]) as model, serving(model, node.env) as (url, _):
        done = await node.run(model.url, "remote.mjs", url, "wrong")

    assert done.code != 0
    assert done.out == ""
