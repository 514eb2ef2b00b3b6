"""Tool calls that a server runs as tasks (an extension of MCP), with a real FastMCP server."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from crow_core.acp.schema import (
    BlockContent,
    ClientCapabilities,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    LoadSessionRequest,
    TextBlock,
    ToolCallUpdate,
)
from crow_core.app import Crow
from crow_core.mcp import call_tasks
from crow_core.mcp.result import LEFT_TO_SERVER
from crow_core.mcp.server import Server
from crow_core.messages.message import Message, marker_kind
from crow_core.session.store import Record
from crow_core.testing import Editor, MemoryStore, Reply, ScriptedModel, connect
from fastmcp import FastMCP
from fastmcp.server.extensions import MethodBinding, ServerExtension
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, RequestParams
from pydantic import BaseModel, ConfigDict

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

FORMS = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))
BUILD = Reply(tool_calls=[{"name": "jobs_build", "arguments": {}}])
DONE = {"status": "completed", "result": {"content": [{"type": "text", "text": "built"}]}}
WORKING = {"status": "working"}
TIMES = {"createdAt": "2026-11-27T10:00:00Z", "lastUpdatedAt": "2026-11-27T10:00:00Z", "ttlMs": None}
WHO = {
    "method": "elicitation/create",
    "params": {
        "mode": "form",
        "message": "Who builds?",
        "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}


class Created(BaseModel):
    model_config = ConfigDict(extra="allow")
    resultType: str = "task"


class TaskParams(RequestParams):
    model_config = ConfigDict(extra="allow")
    taskId: str


class Jobs(ServerExtension):
    """Runs the tool `build` as a task if the client can; each `tasks/get` gives the next state, the last one again."""

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self, states: Sequence[dict[str, Any]]) -> None:
        self.states = [*states]
        self.calls, self.hangs = 0, False
        self.answers: list[dict[str, Any]] = []
        self.polled, self.cancelled = asyncio.Event(), asyncio.Event()

    def methods(self) -> list[MethodBinding]:
        handlers = {"tasks/get": self.get, "tasks/update": self.update, "tasks/cancel": self.cancel}
        return [MethodBinding(method, TaskParams, handler) for method, handler in handlers.items()]

    async def intercept_tool_call(self, params: Any, context: Any, call_next: Any) -> Any:
        self.calls += 1
        if context.client_extension_settings(self.identifier) is None:
            return await call_next()
        return Created.model_validate({"taskId": "t1", "pollIntervalMs": 0, **WORKING, **TIMES})

    async def get(self, context: Any, params: TaskParams) -> dict[str, Any]:
        assert self.client_settings(context) == {}
        self.polled.set()
        if self.hangs:
            self.hangs = False
            await asyncio.Event().wait()
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state["status"] == "unknown" or params.taskId != "t1":
            raise MCPError(INVALID_PARAMS, "Failed to retrieve task: Task not found")
        return {"resultType": "complete", "taskId": "t1", "pollIntervalMs": 0, **TIMES, **state}

    async def update(self, context: Any, params: TaskParams) -> dict[str, Any]:
        self.answers.append((params.model_extra or {})["inputResponses"])
        return {"resultType": "complete"}

    async def cancel(self, context: Any, params: TaskParams) -> dict[str, Any]:
        self.cancelled.set()
        return {"resultType": "complete"}


def serve(*states: dict[str, Any], mode: Any = "auto") -> tuple[Jobs, Server]:
    """Return a server that runs its tool as a task, which has these states."""
    jobs, app = Jobs(states), FastMCP("jobs")
    app.add_extension(jobs)

    @app.tool
    def build() -> str:
        return "built at once"

    return jobs, Server("jobs", lambda: app, mode=mode, timeout=60)


def answers_of(model: ScriptedModel) -> list[str]:
    """Return the results of tool calls that the model has read."""
    return [str(message["content"]) for message in model.requests[-1]["messages"] if message["role"] == "tool"]


def progress_of(editor: Editor) -> list[str]:
    """Return the texts that running tool calls have shown."""
    return [
        part.content.text
        for update in editor.of(ToolCallUpdate)
        if update.status == "in_progress"
        for part in update.content or []
        if isinstance(part, BlockContent) and isinstance(part.content, TextBlock)
    ]


def interrupted(task: str = "t1", server: str = "jobs") -> list[Message]:
    """Return the log of a session whose process was killed while a server ran a call as a task."""
    use: Any = {"id": "call_1", "type": "function", "function": {"name": "jobs_build", "arguments": "{}"}}
    return [
        {"role": "user", "content": "Build."},
        {"role": "assistant", "content": None, "tool_calls": [use]},
        {"crow": {"kind": "task", "call": "call_1", "server": server, "task": task}},
    ]


async def reopen(
    log: list[Message], *servers: Server, text: str = "Well?"
) -> tuple[Editor, ScriptedModel, list[Message]]:
    """Load a session from its log, prompt once, and return what the client, the model and the log have then."""
    model = ScriptedModel([Reply("Good.")])
    crow = Crow(model, servers=servers)
    crow.store = MemoryStore(Record("work", [*log]))
    async with connect(crow) as editor:
        await editor.request("session/load", LoadSessionRequest(session_id="work", cwd="/", mcp_servers=[]))
        await editor.prompt("work", "Well?")
        return editor, model, crow.sessions["work"].log.entries


async def test_long_call_runs_as_a_task_whose_messages_are_its_progress():
    jobs, server = serve(WORKING, {**WORKING, "statusMessage": "Compiling"}, DONE)
    model = ScriptedModel([BUILD, Reply("Good.")])
    async with connect(Crow(model, servers=[server])) as editor:
        session = (await editor.new_session("/")).session_id
        assert (await editor.prompt(session, "Build.")).stop_reason == "end_turn"
    assert answers_of(model) == ["built"]
    assert progress_of(editor) == ["Compiling"]
    assert jobs.calls == 1


async def test_server_of_2025_is_not_told_of_tasks():
    jobs, server = serve(DONE, mode="legacy")
    model = ScriptedModel([BUILD, Reply("Good.")])
    async with connect(Crow(model, servers=[server])) as editor:
        await editor.prompt((await editor.new_session("/")).session_id, "Build.")
    assert answers_of(model) == ["built at once"]
    assert not jobs.polled.is_set()


async def test_cancelling_the_turn_cancels_the_task():
    jobs, server = serve(WORKING)
    crow = Crow(ScriptedModel([BUILD]), servers=[server])
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "Build."))
        await jobs.polled.wait()
        await editor.cancel(session)
        assert (await turn).stop_reason == "cancelled"
        await jobs.cancelled.wait()
        answer = next(entry for entry in crow.sessions[session].log if entry.get("role") == "tool")
        assert "Interrupted before it finished" in str(answer.get("content"))


async def test_questions_of_a_task_reach_the_user_once():
    asks = {"status": "input_required", "inputRequests": {"who": WHO}}
    jobs, server = serve(asks, asks, WORKING, DONE)
    model = ScriptedModel([BUILD, Reply("Good.")])
    async with connect(Crow(model, servers=[server]), capabilities=FORMS) as editor:
        editor.answer = CreateElicitationResponse(action="accept", content={"name": "Ada"})
        await editor.prompt((await editor.new_session("/")).session_id, "Build.")
    assert [form.message for form in editor.forms] == ["MCP server 'jobs': Who builds?"]
    assert editor.forms[0].tool_call_id == "call_1_0"
    assert jobs.answers == [{"who": {"action": "accept", "content": {"name": "Ada"}}}]
    assert answers_of(model) == ["built"]


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"status": "unknown"}, f"The tool failed: {call_tasks.FORGOTTEN}."),
        (
            {"status": "failed", "error": {"code": -32603, "message": "The disk is full"}},
            "The tool failed: The disk is full.",
        ),
        (
            {"status": "cancelled", "statusMessage": "Maintenance"},
            "The tool failed: its server has cancelled the task. Maintenance.",
        ),
        ({"status": "completed", "result": {"content": "?"}}, "The tool failed: what it sent does not keep to MCP"),
        ({"status": 7}, "The tool failed: "),
    ],
)
async def test_task_without_a_result_is_one_sentence_for_the_model(state: dict[str, Any], text: str):
    _, server = serve(WORKING, state)
    model = ScriptedModel([BUILD, Reply("Well.")])
    async with connect(Crow(model, servers=[server])) as editor:
        session = (await editor.new_session("/")).session_id
        assert (await editor.prompt(session, "Build.")).stop_reason == "end_turn"
    assert answers_of(model)[0].startswith(text)


async def test_result_of_a_task_is_asked_for_in_the_next_process():
    jobs, server = serve({**WORKING, "statusMessage": "Linking"}, DONE)
    editor, model, log = await reopen(interrupted(), server)
    assert answers_of(model) == ["built"]
    assert [entry["role"] for entry in log if "role" in entry] == ["user", "assistant", "tool", "user", "assistant"]
    assert progress_of(editor)[-1] == "Linking"
    assert LEFT_TO_SERVER in str(editor.updates[:4])
    assert editor.calls()["call_1"][-1] == "completed"
    assert jobs.calls == 0, "the call is not sent again"


async def test_task_goes_on_when_its_session_closes():
    jobs, server = serve(WORKING)
    server.shared = True
    crow = Crow(ScriptedModel([BUILD]), servers=[server])
    async with connect(crow) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "Build."))
        await jobs.polled.wait()
        log = crow.sessions[session].log
        await crow.close(crow.sessions[session])
        await asyncio.wait([turn])
        assert [marker_kind(entry) for entry in log if marker_kind(entry) == "task"] == ["task"]
        assert not [entry for entry in log if entry.get("role") == "tool"]
        assert not jobs.cancelled.is_set()
    _, again = serve(DONE)
    _, model, _ = await reopen(log.entries, again)
    assert answers_of(model) == ["built"]


async def test_task_is_asked_for_again_over_another_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(call_tasks, "ANSWER_TIMEOUT", 0.5)
    jobs, server = serve(DONE)
    jobs.hangs = True
    model = ScriptedModel([BUILD, Reply("Good.")])
    async with connect(Crow(model, servers=[server])) as editor:
        session = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(session, "Build."))
        await jobs.polled.wait()
        monkeypatch.setattr(call_tasks, "ANSWER_TIMEOUT", 30)
        await turn
    assert (answers_of(model), jobs.calls) == (["built"], 1)


async def test_server_that_forgot_a_task_is_one_sentence_for_the_model():
    _, server = serve(DONE)
    _, model, _ = await reopen(interrupted(task="t0"), server)
    assert answers_of(model) == [f"The tool failed: {call_tasks.FORGOTTEN}."]


async def test_task_of_a_server_that_is_gone_is_answered():
    _, model, _ = await reopen(interrupted())
    assert "There is no tool 'jobs_build'" in answers_of(model)[0]
