"""Tests of the bridge, with a real FastMCP server on one side and a recording client on the other."""

import asyncio
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from crow_core.acp.client import OPTION_NAMES, AcpClient
from crow_core.acp.schema import (
    AudioBlock,
    BlockContent,
    ClientCapabilities,
    ClientSessionCapabilities,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    ElicitationUrlCapabilities,
    ImageBlock,
    McpServer,
    NoticeCapabilities,
    NoticeUpdate,
    ResourceBlock,
    ResourceContents,
    ResourceLinkBlock,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
)
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.errors import ElicitationError, ModelError
from crow_core.mcp import running_calls, schemas
from crow_core.mcp.running_calls import RunningCall
from crow_core.mcp.server import Server
from crow_core.mcp.server_source import from_acp
from crow_core.messages.message import marker_kind
from crow_core.models.model_call import ModelCall
from crow_core.models.token_usage import SESSION_TOTALS
from crow_core.session import bridge
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Asked
from crow_core.testing.wire import connect_raw
from crow_extensions.usage import usage
from crow_permissions.extension import permissions
from fastmcp import Context, FastMCP
from fastmcp.tools import ToolResult
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp.server.mcpserver import Context as MCPContext
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import UrlElicitationRequiredError
from mcp_types import ElicitRequestURLParams, NotificationParams, ToolAnnotations
from msgspec import ValidationError

pytestmark = pytest.mark.anyio

ROOT = Path("/").absolute()
"""`/`, on Windows with the drive."""

BIRDS = Path(__file__).parent / "birds.py"
SECRET = "kraa-4711-secret-0815"
FORMS = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))
PAGES = ClientCapabilities(elicitation=ElicitationCapabilities(url=ElicitationUrlCapabilities()))
NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))
NEITHER = ClientCapabilities()

Birds = Callable[..., Server]


def in_memory(mode: str, **more: Any) -> Server:
    spec = importlib.util.spec_from_file_location("birds", BIRDS)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Server("birds", lambda: module.server, mode=mode, **more)  # pyright: ignore[reportArgumentType]


def over_stdio(mode: str, **more: Any) -> Server:
    server = from_acp(McpServer(name="birds", command=sys.executable, args=[str(BIRDS)], env=[]), "/")
    for name, value in {"mode": mode, **more}.items():
        setattr(server, name, value)
    return server


@pytest.fixture(params=["auto", "legacy"], ids=["2026", "2025"])
def mode(request: pytest.FixtureRequest) -> str:
    """The version of MCP. Before 2026 a server asks with requests, since then with its answer to a tool call."""
    return request.param


@pytest.fixture
def birds(mode: str) -> Birds:
    return lambda **more: in_memory(mode, **more)


@pytest.fixture(params=[in_memory, over_stdio], ids=["in memory", "over stdio"])
def birds_anywhere(mode: str, request: pytest.FixtureRequest) -> Birds:
    return lambda **more: request.param(mode, **more)


@pytest.fixture
def pipe(tmp_path: Path) -> Callable[[str], str]:
    if not hasattr(os, "mkfifo"):
        pytest.skip("not on Windows: there are no named pipes in folders")

    def make(name: str) -> str:
        os.mkfifo(tmp_path / name)
        return str(tmp_path / name)

    return make


def use(name: str, **arguments: Any) -> Asked:
    return {"name": f"birds_{name}", "arguments": arguments}


def asking(method: str, times: int = 1, **params: Any) -> Asked:
    return use("ask", method=method, params=params, times=times)


def form(message: str = "Which one?", **properties: Any) -> Asked:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return asking("elicitation/create", mode="form", message=message, requestedSchema=schema)


def sample(text: str = "Is it a crow?", times: int = 1, **more: Any) -> Asked:
    messages = [{"role": "user", "content": {"type": "text", "text": text}}]
    return asking("sampling/createMessage", times, **{"messages": messages, "maxTokens": 100, **more})


def script(*uses: Asked, sampled: Reply | None = None) -> ScriptedModel:
    """A model that makes one tool call in each reply, and answers sampling requests with `sampled`."""
    steps = iter([*(Reply(tool_calls=[each]) for each in uses), Reply("Done.")])
    return ScriptedModel(lambda request: next(steps) if "tools" in request else (sampled or Reply("It is a crow.")))


def crow_with(model: ScriptedModel, server: Server) -> Crow:
    crow = Crow(model)
    crow.mcp_servers(lambda session: [server])
    return crow


async def turn(
    model: ScriptedModel,
    server: Server,
    *,
    capabilities: ClientCapabilities = NEITHER,
    answer: CreateElicitationResponse | None = None,
    permit: str | None = "allow_once",
    crow: Crow | None = None,
) -> Editor:
    async with connect(crow or crow_with(model, server), capabilities=capabilities, permit=permit) as editor:
        editor.answer = answer
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    return editor


def results(model: ScriptedModel) -> list[str]:
    last = next(request for request in reversed(model.requests) if "tools" in request)
    return [message["content"] for message in last["messages"] if message["role"] == "tool"]


def answered(model: ScriptedModel) -> Any:
    """Return the client's answer to the question of the server."""
    return json.loads(results(model)[-1])


def accepted(**content: Any) -> CreateElicitationResponse:
    return CreateElicitationResponse(action="accept", content=content)


def said(editor: Editor) -> list[str]:
    """Return the texts that were shown in tool calls while they ran."""
    return [
        part.content.text
        for update in editor.of(ToolCallUpdate)
        if update.status == "in_progress" and update.content
        for part in update.content
        if isinstance(part, BlockContent) and isinstance(part.content, TextBlock)
    ]


# progress


@pytest.mark.sampled(2)
async def test_progress_is_shown_in_the_tool_call(birds_anywhere: Birds, pipe: Callable[[str], str]):
    gate = pipe("gate")
    model = script(use("count", words=["Counting crows"], gate=gate))
    async with connect(crow_with(model, birds_anywhere())) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(said)
        await asyncio.to_thread(Path(gate).write_text, "go on")
        await turn
    assert said(editor) == ["Counting crows (1 of 4)"]
    assert editor.calls() == {"call_1_0": ["pending", "in_progress", "in_progress", "completed"]}
    assert results(model) == ["counted"]


async def test_progress_is_shown_at_most_four_times_a_second(birds: Birds):
    model = script(use("count", words=[f"bird {n}" for n in range(2000)]))
    editor = await turn(model, birds())
    assert results(model) == ["counted"]
    assert len(said(editor)) < 400


async def test_progress_is_shown_without_control_characters_and_secrets(birds: Birds, pipe: Callable[[str], str]):
    gate = pipe("gate")
    model = script(use("count", words=[f"\x1b]52;c;aGk=\x07 {SECRET} \n" + "caw" * 1000], gate=gate, total=None))
    async with connect(crow_with(model, birds(secrets=[SECRET]))) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(said)
        await asyncio.to_thread(Path(gate).write_text, "go on")
        await turn
    (text,) = said(editor)
    assert text.isprintable()
    assert SECRET not in text
    assert len(text) <= bridge.LINE_LIMIT


@pytest.mark.sampled(2)
async def test_tool_call_with_progress_does_not_time_out(mode: str, monkeypatch: pytest.MonkeyPatch):
    """The test's own clock advances with each progress notification, so that a busy machine does not matter."""
    passed = 0.0
    monkeypatch.setattr(running_calls, "monotonic", lambda: passed)
    server = FastMCP("birds")

    @server.tool
    async def tick(context: Context) -> str:
        nonlocal passed
        for done in range(50):
            await context.report_progress(done)
            await asyncio.sleep(0.05)
            passed += 0.05
        return "ticked"

    model = script(use("tick"))
    await turn(model, Server("birds", lambda: server, timeout=0.5, mode=mode))  # pyright: ignore[reportArgumentType]
    assert results(model) == ["ticked"]


async def test_timeout_of_a_server_applies_to_its_tool_calls(birds: Birds):
    model = script(use("wait"))
    await turn(model, birds(timeout=0.2))
    assert results(model) == ["The tool failed: it timed out: nothing was heard for 0.2 s."]


async def test_tool_call_with_progress_ends_at_the_limit(birds: Birds, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running_calls, "CALL_LIMIT", 0.5)
    model = script(use("tick", times=100_000, every=0.02))
    await turn(model, birds(timeout=100))
    assert results(model) == ["The tool failed: it timed out: no call may take 0.5 s."]


async def test_tool_call_does_not_time_out_while_a_question_is_open(monkeypatch: pytest.MonkeyPatch):
    """By the test's own clock, the user takes three hours: that is no silence, and does not count for the limit."""
    passed, checks, count_seconds = 0.0, 0, RunningCall.seconds_left

    def count_and_note(running: RunningCall) -> float | None:
        nonlocal checks
        checks += 1
        return count_seconds(running)

    async def wait_for_checks() -> None:
        seen = checks
        while checks < seen + 4 and not turn.done():
            await asyncio.sleep(0.01)

    server = FastMCP("birds")

    @server.tool
    async def choose(context: Context) -> str:
        answer = await context.elicit("Which colour?", response_type=str)
        await wait_for_checks()
        return answer.action

    monkeypatch.setattr(running_calls, "monotonic", lambda: passed)
    monkeypatch.setattr(RunningCall, "seconds_left", count_and_note)
    model = script(use("choose"))
    crow = crow_with(model, Server("birds", lambda: server, timeout=0.1, mode="legacy"))
    async with connect(crow, capabilities=FORMS) as editor:
        answer = editor.waits["elicitation/create"] = asyncio.Event()
        editor.answer = accepted(value="blue")
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: editor.forms)
        passed += 3 * 3600
        await wait_for_checks()
        answer.set()
        await turn
    assert results(model) == ["accept"]


# elicitation


COLOUR = {"type": "string", "enum": ["red", "blue"], "title": "Colour\x1b[2J"}


async def test_form_is_shown_with_the_servers_name_and_answered(birds: Birds):
    model = script(form(colour=COLOUR))
    editor = await turn(model, birds(), capabilities=FORMS, answer=accepted(colour="blue", more="?"))
    assert answered(model) == {"action": "accept", "content": {"colour": "blue"}}
    (form_request,) = editor.forms
    assert form_request.message == "MCP server 'birds': Which one?"
    assert form_request.requested_schema
    assert form_request.requested_schema.properties["colour"].title == "Colour [2J"  # pyright: ignore
    assert editor.questions == []


async def test_form_of_2026_names_its_tool_call():
    model = script(form(colour=COLOUR))
    editor = await turn(model, in_memory("auto"), capabilities=FORMS, answer=accepted(colour="blue"))
    assert editor.forms[0].tool_call_id == "call_1_0"


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_form_can_be_declined_or_cancelled(action: str, birds: Birds):
    model = script(form(colour=COLOUR))
    await turn(model, birds(), capabilities=FORMS, answer=CreateElicitationResponse(action=action))
    assert answered(model) == {"action": action}


async def test_answer_that_does_not_match_the_form_is_not_sent(birds: Birds):
    model = script(form(colour=COLOUR))
    editor = await turn(model, birds(), capabilities=FORMS, answer=accepted(colour="green"))
    assert answered(model) == {"action": "decline"}
    assert "A question of MCP server 'birds' was declined: the answer has an unfit 'colour'." in editor.thoughts


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ({"api_key": {"type": "string"}}, "A form must not ask for secrets"),
        ({"nested": {"type": "object"}}, "its form has a field of a kind that clients do not know"),
        ({"many": {"type": "string", "description": "caw" * 100_000}}, "its form is too long"),
    ],
)
async def test_unsuitable_form_is_declined(properties: dict[str, Any], why: str):
    model = script(form(**properties))
    editor = await turn(model, in_memory("auto"), capabilities=FORMS, answer=accepted())
    assert answered(model) == {"action": "decline"}
    assert why in editor.thoughts
    assert editor.forms == []


async def test_pattern_of_a_form_is_not_matched(birds: Birds):
    model = script(form(name={"type": "string", "pattern": "(a+)+$"}))
    await turn(model, birds(), capabilities=FORMS, answer=accepted(name="a" * 60 + "!"))
    assert answered(model)["action"] == "accept"


KEYWORDS = ["type", "properties", "required", "enum", "enumNames", "oneOf", "anyOf", "const", "items", "default"]
CALMLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
WORDS = st.sampled_from(
    [*KEYWORDS, "string", "object", "array", "boolean", "title", "pattern", "$ref", "#/$defs/a", "a"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(), inner, max_size=4),
    max_leaves=20,
)


@CALMLY
@given(schema=st.dictionaries(WORDS, JSON, max_size=4), fields=st.dictionaries(st.text(), JSON, max_size=3))
def test_every_form_is_converted_or_refused(schema: dict[str, Any], fields: dict[str, Any]):
    for each in (schema, {"type": "object", "properties": fields}):
        with suppress(ElicitationError, ValidationError):
            assert bridge.find_choices(bridge.to_form(each, str.upper))


@CALMLY
@given(schema=JSON)
def test_every_schema_is_measured(schema: Any):
    assert schemas.is_small(schema) >= schemas.is_checkable(schema)


@pytest.mark.parametrize(
    ("properties", "names", "content"),
    [
        ({"sure": {"type": "boolean"}}, ["Yes", "No"], {"sure": True}),
        ({"colour": {"type": "string", "enum": ["red", "blue"]}}, ["red", "blue"], {"colour": "red"}),
        (
            {"colour": {"type": "string", "enum": ["r", "b"], "enumNames": ["Red", "Blue"]}},
            ["Red", "Blue"],
            {"colour": "r"},
        ),
        (
            {"colour": {"type": "string", "oneOf": [{"const": "r", "title": "Red"}, {"const": "b", "title": "Blue"}]}},
            ["Red", "Blue"],
            {"colour": "r"},
        ),
        ({}, ["Yes"], {}),
    ],
)
async def test_form_with_one_choice_is_a_permission_without_client_forms(
    properties: dict[str, Any], names: list[str], content: dict[str, Any], birds: Birds
):
    model = script(form("Shall it be?", **properties))
    editor = await turn(model, birds(), capabilities=ClientCapabilities(meta=OPTION_NAMES))
    (question,) = editor.questions
    assert question.tool_call.title == "MCP server 'birds': Shall it be?"
    assert question.tool_call.tool_call_id == "call_1_0"
    assert [option.name for option in question.options] == [*names, "None of these"]
    assert answered(model) == {"action": "accept", "content": content}
    titles = [u.title for u in editor.updates if isinstance(u, ToolCall | ToolCallUpdate) and u.title]
    assert titles[0] == titles[-1] != question.tool_call.title  # the call looks again as it did


async def test_rejected_choices_decline_the_form(birds: Birds):
    model = script(form(sure={"type": "boolean"}))
    await turn(model, birds(), permit="reject_once")
    assert answered(model) == {"action": "decline"}


async def test_longer_form_is_declined_without_client_forms(birds: Birds):
    model = script(form(name={"type": "string"}, age={"type": "integer"}))
    editor = await turn(model, birds())
    assert answered(model) == {"action": "decline"}
    assert "A question of MCP server 'birds' was declined: the client shows no forms" in editor.thoughts


def page(url: str) -> Asked:
    return asking("elicitation/create", mode="url", message="Log in", url=url, elicitationId="page-1")


async def test_user_is_sent_to_a_page_and_its_completion_is_reported():
    model = script(page("https://example.org/login"), use("page_done", id="page-1"), use("page_done", id="page-1"))
    server = in_memory("legacy")
    editor = await turn(model, server, capabilities=PAGES, answer=CreateElicitationResponse(action="accept"))
    (request,) = editor.forms
    assert (request.mode, request.url) == ("url", "https://example.org/login")
    assert request.message == "MCP server 'birds': Log in"
    assert editor.completed == [request.elicitation_id]


async def test_page_of_2026_is_part_of_the_answer():
    model = script(page("http://127.0.0.1:8123/login"))
    server = in_memory("auto")
    editor = await turn(model, server, capabilities=PAGES, answer=CreateElicitationResponse(action="accept"))
    assert editor.forms[0].tool_call_id == "call_1_0"
    assert answered(model) == {"action": "accept"}


@pytest.mark.parametrize("url", ["http://example.org/", "javascript:alert(1)", "file:///etc/passwd", "https://[", ""])
async def test_unsafe_page_is_not_opened(url: str, birds: Birds):
    model = script(page(url))
    editor = await turn(model, birds(), capabilities=PAGES, answer=CreateElicitationResponse(action="accept"))
    assert answered(model) == {"action": "decline"}
    assert editor.forms == []


async def test_page_is_declined_if_the_client_opens_none(birds: Birds):
    model = script(page("https://example.org/login"))
    editor = await turn(model, birds(), capabilities=FORMS)
    assert answered(model) == {"action": "decline"}
    assert editor.forms == []


@pytest.mark.parametrize(
    ("action", "words"),
    [("accept", "Call it again once they say that it is done."), ("decline", "they did not want to")],
)
async def test_page_required_by_a_tool_call_is_opened_and_the_model_informed(action: str, words: str, mode: str):
    server = MCPServer("birds")

    @server.tool()
    def fly() -> str:
        page = ElicitRequestURLParams(message="Log in", url="https://example.org/login", elicitation_id="page")
        raise UrlElicitationRequiredError([page])

    model = script(use("fly"))
    ours = Server("birds", lambda: server, mode=mode)  # pyright: ignore[reportArgumentType]
    editor = await turn(model, ours, capabilities=PAGES, answer=CreateElicitationResponse(action=action))
    assert editor.forms[0].url == "https://example.org/login"
    assert words in results(model)[0]


async def test_cancelled_turn_withdraws_the_question(birds: Birds):
    model = script(form(colour=COLOUR))
    async with connect(crow_with(model, birds()), capabilities=FORMS) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: editor.forms)
        await editor.cancel(session.session_id)
        assert (await turn).stop_reason == "cancelled"
        assert editor.cancelled_questions == 1


# sampling


async def test_model_answers_a_server_that_the_user_allows(birds: Birds):
    calls: list[ModelCall] = []
    counted: list[int] = []
    model = script(sample(systemPrompt="You are a bird.", temperature=0.5, stopSequences=["!"]))
    crow = crow_with(model, birds()).use(usage)
    crow.model_call(lambda session, call: calls.append(call))
    crow.session_end(lambda session: counted.append(session.state[SESSION_TOTALS].calls))
    editor = await turn(model, birds(), crow=crow)
    assert answered(model) == {
        "role": "assistant",
        "content": {"type": "text", "text": "It is a crow."},
        "model": "scripted",
        "stopReason": "endTurn",
    }
    assert model.requests[1] == {
        "max_tokens": 100,
        "temperature": 0.5,
        "stop": ["!"],
        "messages": [
            {"role": "system", "content": "You are a bird."},
            {"role": "user", "content": "Is it a crow?"},
        ],
    }
    (question,) = editor.questions
    assert question.tool_call.title == "MCP server 'birds' wants to ask the model"
    assert "user: Is it a crow?" in str(question.tool_call.content)
    assert "system: You are a bird." in str(question.tool_call.content)
    assert [call.purpose for call in calls if call.ended] == ["turn", "sampling", "turn"]
    assert counted == [3]
    assert "It is a crow." not in editor.text


@pytest.mark.parametrize(
    ("permit", "asked", "sampled"),
    [("allow_once", 3, 3), ("allow_always", 1, 3), ("reject_once", 3, 0), ("reject_always", 1, 0)],
)
async def test_sampling_is_allowed_once_or_for_the_session(permit: str, asked: int, sampled: int, birds: Birds):
    model = script(sample(), sample(), sample())
    editor = await turn(model, birds(), permit=permit)
    assert len(editor.questions) == asked
    assert len(model.requests) - 4 == sampled
    assert all(("It is a crow." in result) == (sampled > 0) for result in results(model))


async def test_sampling_is_denied_if_nobody_answers(birds: Birds):
    model = script(sample())

    async def ignore(_: Any) -> None: ...

    ours, theirs = memory_pair()
    crow = crow_with(model, birds())
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    client = AcpClient(ours, {"session/update": ignore})  # answers the question with -32601
    async with client.serving():
        await client.initialize("deaf", NEITHER)
        session = await client.new_session("/")
        await client.prompt(session.session_id, "go")
    await agent
    await crow.shut_down()
    assert "The user did not allow it." in results(model)[0]
    assert len(model.requests) == 2


async def test_sampling_decision_is_in_the_log(birds: Birds):
    model = script(sample())
    crow = crow_with(model, birds())
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        (opened,) = crow.sessions.values()
        (decision,) = [entry["crow"] for entry in opened.log if marker_kind(entry) == "decision"]
    assert {key: decision[key] for key in ("is", "by", "scope", "tool", "call")} == {
        "is": "allow",
        "by": "the user",
        "scope": "once",
        "tool": "MCP server 'birds': sampling/createMessage",
        "call": "call_1_0/sampling",
    }


async def test_mode_yolo_allows_sampling(birds: Birds):
    model = script(sample())
    editor = await turn(model, birds(), crow=crow_with(model, birds()).use(permissions, mode="yolo"))
    assert editor.questions == []
    assert answered(model)["content"]["text"] == "It is a crow."


async def test_questions_of_a_call_and_tokens_of_an_answer_are_limited(birds: Birds, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bridge, "QUESTIONS_LIMIT", 2)
    model = script(sample(maxTokens=10**9, times=2), sample(times=3))
    await turn(model, birds(), permit="allow_always")
    first, second = results(model)
    assert first.count("It is a crow.") == 2
    assert "A call may ask back at most 2 times." in second
    assert model.requests[1]["max_tokens"] == bridge.SAMPLE_TOKENS_LIMIT


async def test_sampling_request_is_shown_without_control_characters_and_shortened(birds: Birds):
    model = script(sample(f"\x1b[2J```\u202e{SECRET}" + "caw " * 10_000))
    crow = crow_with(model, birds(secrets=[SECRET]))
    editor = await turn(model, birds(), crow=crow, permit="reject_once")
    (block,) = editor.questions[0].tool_call.content or []
    assert isinstance(block, BlockContent)
    assert isinstance(block.content, TextBlock)
    text = block.content.text
    assert text.replace("\n", "").isprintable()
    assert text.startswith("````\n")
    assert SECRET not in text
    assert "characters left out]" in text
    assert len(text) < bridge.TEXT_LIMIT + 100


async def test_sampling_takes_images_and_no_tools(birds: Birds):
    image = {"role": "user", "content": {"type": "image", "data": "iVBORw0KGgpwaXhlbHM=", "mimeType": "image/png"}}
    lent = {"name": "fly", "inputSchema": {"type": "object"}}
    model = script(sample(messages=[image]), sample(tools=[lent]))
    editor = await turn(model, birds())
    assert model.requests[1]["messages"] == [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgpwaXhlbHM="}}],
        }
    ]
    assert "user: [image_url]" in str(editor.questions[0].tool_call.content)
    assert "Sampling with tools is not supported here" in results(model)[1]
    assert len(model.requests) == 4


async def test_model_error_is_shown_to_the_user_and_not_to_the_server(birds: Birds):
    model = script(sample(), sampled=Reply(error=ModelError("http://10.0.0.7/v1 refused the key (401).")))
    editor = await turn(model, birds())
    assert "10.0.0.7" not in results(model)[0]
    assert "The model did not answer." in results(model)[0]
    assert "MCP server 'birds' got no answer of the model: http://10.0.0.7/v1 refused the key (401)." in editor.thoughts


# roots


async def test_roots_are_the_folders_of_the_session(birds: Birds, tmp_path: Path):
    strange = tmp_path / ("a b#c%e\u00e9" if sys.platform == "win32" else "a b#c?d%e\u00e9")
    strange.mkdir()
    model = script(asking("roots/list"))
    async with connect(crow_with(model, birds())) as editor:
        session = await editor.new_session(str(tmp_path), roots=[str(strange)])
        await editor.prompt(session.session_id, "go")
    assert [root["uri"] for root in answered(model)["roots"]] == [tmp_path.as_uri(), strange.as_uri()]


async def test_server_of_2025_is_notified_of_changed_roots(tmp_path: Path):
    changed = asyncio.Event()

    async def hear(context: Any, params: Any) -> None:
        changed.set()

    server = in_memory("legacy")
    assert server.source
    server.source()._mcp_server.add_notification_handler("notifications/roots/list_changed", NotificationParams, hear)
    crow = crow_with(ScriptedModel(lambda request: Reply("Hello.")), server)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        for _ in range(2):
            await editor.prompt(session.session_id, "hello")
        assert not changed.is_set()
        (opened,) = crow.sessions.values()
        opened.folders.roots.append(str(tmp_path))
        await editor.prompt(session.session_id, "hello again")
        await changed.wait()


# logging


async def test_warnings_of_a_server_become_notices(birds: Birds):
    model = script(use("say", level="info", data="all is well"), use("say", level="error", data={"egg": "cracked"}))
    async with connect(crow_with(model, birds()), capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        await editor.until(lambda editor: editor.of(NoticeUpdate))
    (notice,) = editor.of(NoticeUpdate)
    assert (notice.severity, notice.title) == ("error", 'birds: {"egg":"cracked"}')


async def test_warnings_become_at_most_one_notice_a_second(birds: Birds):
    model = script(use("say", level="warning", data=f"\x1b[2J{SECRET}\n" + "rain " * 1000, times=500))
    async with connect(crow_with(model, birds(secrets=[SECRET])), capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        await editor.until(lambda editor: editor.of(NoticeUpdate))
    notices = editor.of(NoticeUpdate)
    assert len(notices) < 100
    assert notices[0].title.isprintable()
    assert SECRET not in notices[0].title
    assert len(notices[0].title) < 2 * bridge.LINE_LIMIT


async def test_warning_is_logged_if_the_client_shows_no_notices(birds: Birds, caplog: pytest.LogCaptureFixture):
    model = script(use("say", level="warning", data="rain is coming"))
    editor = await turn(model, birds())
    assert "birds: rain is coming" in [record.getMessage() for record in caplog.records if record.name == "crow"]
    assert "rain" not in editor.thoughts


async def test_invalid_notifications_are_dropped_and_logged_by_the_sdk_alone(
    birds: Birds, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    caplog.set_level(logging.CRITICAL, "client")  # as the command crow does
    model = script(use("babble"))
    await turn(model, birds(), capabilities=NOTICES)
    assert results(model) == ["babbled"]
    assert [record.getMessage() for record in caplog.records if not record.name.startswith("fastmcp")] == []
    assert "Traceback" not in capfd.readouterr().err


# tools that change


def offered(request: dict[str, Any]) -> set[str]:
    return {tool["function"]["name"].removeprefix("birds_") for tool in request["tools"]} & {"crow", "rook"}


@pytest.mark.sampled(2)
async def test_changed_tools_are_offered_from_the_next_turn_with_a_marker_and_a_notice(birds_anywhere: Birds):
    model = ScriptedModel(
        [
            Reply(tool_calls=[use("change", add=["crow"], remove=[])]),
            Reply("Done."),
            Reply(tool_calls=[use("crow"), use("change", add=["rook"], remove=["crow"])]),
            Reply("Done."),
            Reply(tool_calls=[use("crow")]),
            Reply("Done."),
        ]
    )
    crow = crow_with(model, birds_anywhere())
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        for _ in range(3):
            await editor.prompt(session.session_id, "go")
        (opened,) = crow.sessions.values()
        assert len([entry for entry in opened.log if marker_kind(entry) == "tools"]) == 3
    assert [offered(request) for request in model.requests] == [
        *(set(), set()),
        *({"crow"}, {"crow"}),
        *({"rook"}, {"rook"}),
    ]
    assert "The tools of 'birds' have changed (new: birds_crow)." in editor.thoughts
    assert "The tools of 'birds' have changed (new: birds_rook; gone: birds_crow)." in editor.thoughts
    *_, caw, changed, gone = results(model)
    assert (caw, changed) == ("caw", "changed")
    assert gone.startswith("The tool 'birds_crow' is gone: its server took it back. The tools are: ")


async def test_tools_that_stay_keep_their_order(birds: Birds):
    model = script(use("change", add=["crow"], remove=[]))
    crow = crow_with(model, birds())
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        (opened,) = crow.sessions.values()
        before = opened.toolbox.sent
        model._script = lambda request: Reply("Hello.")  # pyright: ignore[reportPrivateUsage]
        await editor.prompt(session.session_id, "go")
        assert before
        assert opened.toolbox.sent
        assert opened.toolbox.sent[: len(before)] == before


async def test_permission_for_the_session_ends_when_the_tool_changes(birds: Birds):
    again = [Reply(tool_calls=[use("crow")]), Reply("Done.")]
    model = ScriptedModel(
        [
            *(Reply(tool_calls=[use("change", add=["crow"], remove=[])]), Reply("Done.")),
            *again,
            *again,
            *(Reply(tool_calls=[use("change", add=["crow"], remove=[], describe="Another bird.")]), Reply("Done.")),
            *again,
        ]
    )
    async with connect(crow_with(model, birds()).use(permissions), permit="allow_always") as editor:
        session = await editor.new_session("/")
        for _ in range(5):
            await editor.prompt(session.session_id, "go")
    assert [question.tool_call.name for question in editor.questions] == ["birds_change", "birds_crow", "birds_crow"]
    assert "The tools of 'birds' have changed (different: birds_crow)." in editor.thoughts


async def test_changes_of_a_server_of_2026_are_subscribed_to():
    """It sends changes only to clients that subscribed."""
    server = MCPServer("birds")

    @server.tool()
    async def grow(context: MCPContext) -> str:
        server.add_tool(lambda: "caw", name="crow")
        await context.notify_tools_changed()
        return "grown"

    ours = Server("birds", lambda: server)
    model = ScriptedModel([Reply(tool_calls=[use("grow")]), Reply("Done."), Reply("Done.")])
    async with connect(crow_with(model, ours)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        await editor.prompt(session.session_id, "go")
    assert offered(model.requests[-1]) == {"crow"}


# cancelling


@pytest.mark.sampled(2)
async def test_cancelled_tool_call_is_cancelled_at_the_server(birds_anywhere: Birds, pipe: Callable[[str], str]):
    started, ended = pipe("started"), pipe("ended")
    model = ScriptedModel([Reply(tool_calls=[use("wait", started=started, ended=ended)])])
    async with connect(crow_with(model, birds_anywhere())) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await asyncio.to_thread(Path(started).read_text)
        end = asyncio.ensure_future(asyncio.to_thread(Path(ended).read_text))
        await editor.cancel(session.session_id)
        assert (await turn).stop_reason == "cancelled"
        assert await end == "cancelled"


# the context of a tool call, and its result


async def test_trace_context_is_sent_with_the_tool_call(birds: Birds):
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    model = script(use("meta"))
    async with connect_raw(crow_with(model, birds())) as wire:
        id = (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]["sessionId"]
        await wire.ask("session/prompt", {"sessionId": id, "prompt": [{"type": "text", "text": "go"}], "_meta": trace})
    sent = answered(model)
    assert {key: sent[key] for key in trace} == trace
    assert not [key for key in sent if key.startswith("crow/")]


async def test_content_of_every_kind_reaches_user_and_model(birds: Birds):
    model = script(use("everything"))
    editor = await turn(model, birds())
    end = editor.of(ToolCallUpdate)[-1]
    assert end.status == "completed"
    text, image, sound, page, blob, picture, link = [part.content for part in end.content or []]  # pyright: ignore
    assert text == TextBlock(text="words")
    assert image == ImageBlock(data="iVBORw0KGgpwaXhlbHM=", mime_type="image/png")
    assert sound == AudioBlock(data="cGl4ZWxz", mime_type="audio/wav")
    contents = ResourceContents(uri="memory://page", text="a page", mime_type="text/plain")
    assert page == ResourceBlock(resource=contents)
    assert blob.resource.uri == "memory://egg.bin"
    assert picture.resource.blob == "iVBORw0KGgpwaXhlbHM="
    assert link == ResourceLinkBlock(uri="https://example.org/", name="site", description="All of them")
    sent = str(model.requests[-1]["messages"])
    for words in (
        "words",
        "a page",
        "[a sound, audio/wav, 6 bytes: the user hears it, you cannot]",
        "[memory://egg.bin: 6 bytes that are neither text nor an image]",
        "[site](https://example.org/): All of them",
    ):
        assert words in sent
    assert sent.count("data:image/png;base64,iVBORw0KGgpwaXhlbHM=") == 2


async def test_error_of_a_tool_is_a_failed_tool_call(birds: Birds):
    model = script(use("everything", structured=True, fail=True))
    editor = await turn(model, birds())
    assert editor.calls()["call_1_0"][-1] == "failed"
    assert results(model) == ['{"birds":3}']


@pytest.mark.sampled(2)
async def test_server_over_stdio_asks_user_and_model(mode: str):
    model = script(
        asking("roots/list"),
        form(colour=COLOUR),
        sample(),
        use("say", level="error", data="an egg is cracked"),
        use("everything"),
    )
    capabilities = ClientCapabilities(elicitation=FORMS.elicitation, session=NOTICES.session)
    async with connect(crow_with(model, over_stdio(mode)), capabilities=capabilities) as editor:
        editor.answer = accepted(colour="red")
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        await editor.until(lambda editor: editor.of(NoticeUpdate))
    roots, colour, sampled, _, _ = results(model)
    assert json.loads(roots) == {"roots": [{"uri": ROOT.as_uri()}]}
    assert json.loads(colour) == {"action": "accept", "content": {"colour": "red"}}
    assert json.loads(sampled)["content"]["text"] == "It is a crow."
    assert editor.of(NoticeUpdate)[0].title == "birds: an egg is cracked"
    assert list(editor.calls().values())[-1][-1] == "completed"


BOMB = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"type": "integer"}, "The tool failed: Invalid structured content"),
        ({"type": "string", "pattern": "(a+)+$"}, "{"),
        ({"$ref": "#/$defs/a0"}, "{"),
        ({"$ref": "#/$defs/one"}, "The tool failed: Invalid structured content"),
    ],
    ids=["wrong", "pattern", "bomb", "reference"],
)
async def test_result_is_checked_only_if_the_check_ends(schema: dict[str, Any], wanted: str):
    server = FastMCP("birds")
    definitions = {**BOMB, "a60": {"type": "string"}} if "a0" in str(schema) else {"one": {"type": "integer"}}
    output = {"type": "object", "properties": {"caw": schema}, "$defs": definitions}
    text = "a" * 50 + "!"
    server.tool(lambda: ToolResult([], structured_content={"caw": text}), name="sing", output_schema=output)
    model = script(use("sing"))
    await turn(model, Server("birds", lambda: server))
    assert results(model)[0].startswith(wanted)


# hints of tools


def hinted(*, trust: bool = False, title: str = "Sing a song", **hints: bool) -> Server:
    server = FastMCP("birds")
    server.tool(lambda: "caw", name="sing", annotations=ToolAnnotations(title=title, **hints))
    return Server("birds", lambda: server, trust=trust)


@pytest.mark.parametrize(
    ("server", "asked"),
    [
        (hinted(), 2),
        (hinted(readOnlyHint=True), 2),
        (hinted(readOnlyHint=True, trust=True), 0),
        (hinted(readOnlyHint=True, destructiveHint=True, trust=True), 2),
        (hinted(idempotentHint=True, trust=True), 2),
    ],
    ids=["no hint", "not trusted", "trusted", "destructive", "idempotent"],
)
async def test_read_only_hint_of_a_trusted_server_alone_saves_a_permission(server: Server, asked: int):
    model = script(use("sing"), use("sing"))
    editor = await turn(model, server, crow=crow_with(model, server).use(permissions))
    assert len(editor.questions) == asked
    assert results(model) == ["caw", "caw"]


async def test_destructive_tool_needs_a_permission_each_time():
    model = script(use("sing"), use("sing"))
    server = hinted(destructiveHint=True)
    editor = await turn(model, server, crow=crow_with(model, server).use(permissions))
    assert [[option.option_id for option in question.options] for question in editor.questions] == [
        ["allow", "reject"],
        ["allow", "reject"],
    ]


async def test_rule_of_the_user_overrides_hints_of_a_tool():
    model = script(use("sing"))
    server = hinted(destructiveHint=True)
    editor = await turn(model, server, crow=crow_with(model, server).use(permissions, allow=["birds_*"]))
    assert editor.questions == []
    assert results(model) == ["caw"]


async def test_plan_mode_allows_read_only_tools_of_a_trusted_server():
    model = script(use("sing"))
    server = hinted(readOnlyHint=True, trust=True)
    await turn(model, server, crow=crow_with(model, server).use(permissions, mode="plan"))
    assert results(model) == ["caw"]


async def test_title_of_a_tool_is_shown_before_its_name():
    """It does not replace the name, because the server can choose any title."""
    model = script(use("sing"))
    server = hinted(title="\x1b[2JRead a file\n" + "caw " * 100)
    editor = await turn(model, server, crow=crow_with(model, server).use(permissions))
    (call,) = editor.of(ToolCall)
    assert call.title.isprintable()
    assert call.title.endswith(": birds_sing()")
    assert len(call.title) < 120
    assert editor.questions[0].tool_call.title == call.title


# shared servers


async def test_question_of_a_shared_server_goes_to_the_session_of_the_call(tmp_path: Path, birds: Birds):
    model = ScriptedModel(
        lambda request: (
            Reply("Done.") if request["messages"][-1]["role"] == "tool" else Reply(tool_calls=[asking("roots/list")])
        )
    )
    async with connect(Crow(model, servers=[birds(shared=True)])) as editor:
        for folder in ("/", str(tmp_path)):
            session = await editor.new_session(folder)
            await editor.prompt(session.session_id, "go")
            assert answered(model) == {"roots": [{"uri": (ROOT / folder).as_uri()}]}


@pytest.mark.slow
async def test_question_of_a_shared_server_of_2025_waits_until_one_session_is_meant(pipe: Callable[[str], str]):
    started = pipe("started")
    uses = iter([use("wait", started=started), form(colour=COLOUR)])
    model = ScriptedModel(
        lambda request: Reply("Done.") if request["messages"][-1]["role"] == "tool" else Reply(tool_calls=[next(uses)])
    )
    crow = Crow(model, servers=[over_stdio("legacy", shared=True)])
    async with connect(crow, capabilities=FORMS) as editor:
        editor.answer = accepted(colour="red")
        one, other = [await editor.new_session("/") for _ in range(2)]
        waiting = asyncio.ensure_future(editor.prompt(one.session_id, "go"))
        await asyncio.to_thread(Path(started).read_text)
        asking = asyncio.ensure_future(editor.prompt(other.session_id, "go"))
        await editor.until(lambda each: len(model.requests) > 1)
        assert editor.forms == []
        await editor.cancel(one.session_id)
        await waiting
        await asking
    assert [question.session_id for question in editor.forms] == [other.session_id]
