"""The bridge between the two protocols: a real FastMCP server on one side, a recording editor on the other."""

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from crow_core import bridge
from crow_core.acp.client import AcpClient
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
from crow_core.agent import Agent
from crow_core.app import Crow
from crow_core.errors import ElicitationError, ModelError
from crow_core.extensions.permissions import permissions
from crow_core.extensions.usage import usage
from crow_core.mcp import schemas
from crow_core.mcp import server as servers
from crow_core.mcp.server import RunningCall, Server
from crow_core.messages import marker_kind
from crow_core.models.chat import ModelCall
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Asked
from crow_core.testing.wire import wired
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
    server = servers.from_acp(McpServer(name="birds", command=sys.executable, args=[str(BIRDS)], env=[]), "/")
    for name, value in {"mode": mode, **more}.items():
        setattr(server, name, value)
    return server


@pytest.fixture(params=["auto", "legacy"], ids=["2026", "2025"])
def mode(request: pytest.FixtureRequest) -> str:
    """The two eras of MCP: before 2026 a server asks by requests of its own, since then by what it answers."""
    return request.param


@pytest.fixture
def birds(mode: str) -> Birds:
    return lambda **more: in_memory(mode, **more)


@pytest.fixture(params=[in_memory, over_stdio], ids=["in memory", "over stdio"])
def birds_anywhere(mode: str, request: pytest.FixtureRequest) -> Birds:
    return lambda **more: request.param(mode, **more)


@pytest.fixture
def pipe(tmp_path: Path) -> Callable[[str], str]:
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
    """A model that makes one call a step; what it is asked for a server it answers as told."""
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
    """What the client answered to what the server asked."""
    return json.loads(results(model)[-1])


def accepted(**content: Any) -> CreateElicitationResponse:
    return CreateElicitationResponse(action="accept", content=content)


def said(editor: Editor) -> list[str]:
    """What was shown of calls while they ran."""
    return [
        part.content.text
        for update in editor.of(ToolCallUpdate)
        if update.status == "in_progress" and update.content
        for part in update.content
        if isinstance(part, BlockContent) and isinstance(part.content, TextBlock)
    ]


# progress


async def test_what_a_server_says_of_its_progress_is_shown_at_the_call(
    birds_anywhere: Birds, pipe: Callable[[str], str]
):
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


async def test_a_flood_of_progress_becomes_a_few_words(birds: Birds):
    """At most four a second."""
    model = script(use("count", words=[f"bird {n}" for n in range(2000)]))
    editor = await turn(model, birds())
    assert results(model) == ["counted"]
    assert len(said(editor)) < 400


async def test_words_of_progress_command_no_screen_and_tell_no_secret(birds: Birds, pipe: Callable[[str], str]):
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
    assert len(text) <= bridge.LINE


async def test_a_call_that_gives_signs_of_life_is_waited_for(mode: str, monkeypatch: pytest.MonkeyPatch):
    """Its clock stands still where this process does; it is looked at each time that half a second has passed."""
    passed = 0.0
    monkeypatch.setattr(servers, "monotonic", lambda: passed)
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


async def test_a_servers_own_patience_holds_for_its_calls(birds: Birds):
    model = script(use("wait"))
    await turn(model, birds(timeout=0.2))
    assert results(model) == ["The tool failed: it timed out: nothing was heard for 0.2 s."]


async def test_no_call_lasts_for_ever_whatever_it_says(birds: Birds, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(servers, "LONGEST_CALL", 0.5)
    model = script(use("tick", times=100_000, every=0.02))
    await turn(model, birds(timeout=100))
    assert results(model) == ["The tool failed: it timed out: no call may take 0.5 s."]


def test_while_a_person_is_asked_no_time_passes_for_the_call():
    assert RunningCall(heard=0, end=0).left(5) < 0
    assert RunningCall(heard=0, end=0, asking=1).left(5) == 5


# elicitation


COLOUR = {"type": "string", "enum": ["red", "blue"], "title": "Colour\x1b[2J"}


async def test_a_form_is_shown_as_the_servers_and_its_answer_goes_back(birds: Birds):
    model = script(form(colour=COLOUR))
    editor = await turn(model, birds(), capabilities=FORMS, answer=accepted(colour="blue", more="?"))
    assert answered(model) == {"action": "accept", "content": {"colour": "blue"}}
    (shown,) = editor.forms
    assert shown.message == "MCP server 'birds': Which one?"
    assert shown.requested_schema
    assert shown.requested_schema.properties["colour"].title == "Colour [2J"  # pyright: ignore
    assert editor.questions == []


async def test_a_form_of_2026_stands_at_the_call_it_is_for():
    model = script(form(colour=COLOUR))
    editor = await turn(model, in_memory("auto"), capabilities=FORMS, answer=accepted(colour="blue"))
    assert editor.forms[0].tool_call_id == "call_1_0"


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_form_can_be_refused_or_put_aside(action: str, birds: Birds):
    model = script(form(colour=COLOUR))
    await turn(model, birds(), capabilities=FORMS, answer=CreateElicitationResponse(action=action))
    assert answered(model) == {"action": action}


async def test_an_answer_that_does_not_fit_the_form_never_reaches_the_server(birds: Birds):
    model = script(form(colour=COLOUR))
    editor = await turn(model, birds(), capabilities=FORMS, answer=accepted(colour="green"))
    assert answered(model) == {"action": "decline"}
    assert "A question of MCP server 'birds' was declined: the answer has an unfit 'colour'." in editor.thoughts


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ({"api_key": {"type": "string"}}, "A form must not ask for secrets"),
        ({"nested": {"type": "object"}}, "its form has a field of a kind that clients do not know"),
        ({"many": {"type": "string", "description": "caw" * 100_000}}, "its form is too long"),
    ],
)
async def test_a_form_that_nobody_should_fill_in_is_not_shown(properties: dict[str, Any], why: str):
    model = script(form(**properties))
    editor = await turn(model, in_memory("auto"), capabilities=FORMS, answer=accepted())
    assert answered(model) == {"action": "decline"}
    assert why in editor.thoughts
    assert editor.forms == []


async def test_a_pattern_that_takes_for_ever_is_left_to_the_server(birds: Birds):
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
def test_whatever_a_form_is_made_of_it_is_shown_or_refused(schema: dict[str, Any], fields: dict[str, Any]):
    for each in (schema, {"type": "object", "properties": fields}):
        with suppress(ElicitationError, ValidationError):
            assert bridge.choices_of(bridge.form_of(each, str.upper))


@CALMLY
@given(schema=JSON)
def test_whatever_a_schema_is_made_of_it_is_judged(schema: Any):
    assert schemas.is_fit(schema) >= schemas.is_tame(schema)


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
async def test_where_the_client_shows_no_forms_one_choice_is_a_permission(
    properties: dict[str, Any], names: list[str], content: dict[str, Any], birds: Birds
):
    model = script(form("Shall it be?", **properties))
    editor = await turn(model, birds())
    (question,) = editor.questions
    assert question.tool_call.title == "MCP server 'birds': Shall it be?"
    assert question.tool_call.tool_call_id == "call_1_0"
    assert [option.name for option in question.options] == [*names, "None of these"]
    assert answered(model) == {"action": "accept", "content": content}
    titles = [u.title for u in editor.updates if isinstance(u, ToolCall | ToolCallUpdate) and u.title]
    assert titles[0] == titles[-1] != question.tool_call.title  # the call looks again as it did


async def test_none_of_the_choices_is_a_refusal(birds: Birds):
    model = script(form(sure={"type": "boolean"}))
    await turn(model, birds(), permit="reject_once")
    assert answered(model) == {"action": "decline"}


async def test_where_the_client_shows_no_forms_a_longer_one_is_declined(birds: Birds):
    model = script(form(name={"type": "string"}, age={"type": "integer"}))
    editor = await turn(model, birds())
    assert answered(model) == {"action": "decline"}
    assert "A question of MCP server 'birds' was declined: the client shows no forms" in editor.thoughts


def page(url: str) -> Asked:
    return asking("elicitation/create", mode="url", message="Log in", url=url, elicitationId="page-1")


async def test_a_person_is_sent_to_a_page_and_told_when_it_is_done():
    model = script(page("https://example.org/login"), use("page_done", id="page-1"), use("page_done", id="page-1"))
    server = in_memory("legacy")
    editor = await turn(model, server, capabilities=PAGES, answer=CreateElicitationResponse(action="accept"))
    (shown,) = editor.forms
    assert (shown.mode, shown.url, shown.message) == ("url", "https://example.org/login", "MCP server 'birds': Log in")
    assert editor.completed == [shown.elicitation_id]


async def test_in_2026_a_page_is_part_of_the_answer():
    model = script(page("http://127.0.0.1:8123/login"))
    server = in_memory("auto")
    editor = await turn(model, server, capabilities=PAGES, answer=CreateElicitationResponse(action="accept"))
    assert editor.forms[0].tool_call_id == "call_1_0"
    assert answered(model) == {"action": "accept"}


@pytest.mark.parametrize("url", ["http://example.org/", "javascript:alert(1)", "file:///etc/passwd", "https://[", ""])
async def test_nobody_is_sent_to_a_page_that_is_not_safe(url: str, birds: Birds):
    model = script(page(url))
    editor = await turn(model, birds(), capabilities=PAGES, answer=CreateElicitationResponse(action="accept"))
    assert answered(model) == {"action": "decline"}
    assert editor.forms == []


async def test_a_client_that_opens_no_pages_declines_them(birds: Birds):
    model = script(page("https://example.org/login"))
    editor = await turn(model, birds(), capabilities=FORMS)
    assert answered(model) == {"action": "decline"}
    assert editor.forms == []


@pytest.mark.parametrize(
    ("action", "words"),
    [("accept", "Call it again once they say that it is done."), ("decline", "they did not want to")],
)
async def test_a_page_that_a_call_needs_first_is_shown_and_the_model_told(action: str, words: str, mode: str):
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


async def test_a_cancelled_turn_takes_the_question_back(birds: Birds):
    model = script(form(colour=COLOUR))
    async with connect(crow_with(model, birds()), capabilities=FORMS) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: editor.forms)
        await editor.cancel(session.session_id)
        assert (await turn).stop_reason == "cancelled"
        assert editor.cancelled_questions == 1


# sampling


async def test_the_model_answers_a_server_that_the_person_lets_ask(birds: Birds):
    calls: list[ModelCall] = []
    counted: list[int] = []
    model = script(sample(systemPrompt="You are a bird.", temperature=0.5, stopSequences=["!"]))
    crow = crow_with(model, birds()).use(usage)
    crow.model_call(lambda session, call: calls.append(call))
    crow.session_end(lambda session: counted.append(session.state["usage"].calls))
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
async def test_the_person_is_asked_each_time_or_once_for_the_session(
    permit: str, asked: int, sampled: int, birds: Birds
):
    model = script(sample(), sample(), sample())
    editor = await turn(model, birds(), permit=permit)
    assert len(editor.questions) == asked
    assert len(model.requests) - 4 == sampled
    assert all(("It is a crow." in result) == (sampled > 0) for result in results(model))


async def test_where_nobody_answers_no_server_has_the_model_asked(birds: Birds):
    model = script(sample())

    async def ignore(_: Any) -> None: ...

    ours, theirs = memory_pair()
    crow = crow_with(model, birds())
    agent = asyncio.ensure_future(Agent(theirs, crow).serve())
    client = AcpClient(ours, {"session/update": ignore})  # answers the question with -32601
    async with client.serving():
        await client.initialize("deaf", NEITHER)
        session = await client.new_session("/")
        await client.prompt(session.session_id, "go")
    await agent
    await crow.shut_down()
    assert "The user did not allow it." in results(model)[0]
    assert len(model.requests) == 2


async def test_who_let_a_server_ask_is_in_the_log(birds: Birds):
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


async def test_mode_yolo_asks_nothing_here_either(birds: Birds):
    model = script(sample())
    editor = await turn(model, birds(), crow=crow_with(model, birds()).use(permissions, mode="yolo"))
    assert editor.questions == []
    assert answered(model)["content"]["text"] == "It is a crow."


async def test_a_server_gets_only_so_many_answers_a_call_and_tokens_an_answer(
    birds: Birds, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bridge, "QUESTIONS", 2)
    model = script(sample(maxTokens=10**9, times=2), sample(times=3))
    await turn(model, birds(), permit="allow_always")
    first, second = results(model)
    assert first.count("It is a crow.") == 2
    assert "A call may ask back at most 2 times." in second
    assert model.requests[1]["max_tokens"] == bridge.SAMPLE_TOKENS


async def test_what_would_be_sent_is_shown_clean_and_bounded(birds: Birds):
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
    assert "characters more]" in text
    assert len(text) < bridge.SHOWN + 100


async def test_a_server_may_show_the_model_images_and_no_tools(birds: Birds):
    image = {"role": "user", "content": {"type": "image", "data": "cGl4ZWxz", "mimeType": "image/png"}}
    lent = {"name": "fly", "inputSchema": {"type": "object"}}
    model = script(sample(messages=[image]), sample(tools=[lent]))
    editor = await turn(model, birds())
    assert model.requests[1]["messages"] == [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,cGl4ZWxz"}}]}
    ]
    assert "user: [image_url]" in str(editor.questions[0].tool_call.content)
    assert "Tools are not lent to the model here" in results(model)[1]
    assert len(model.requests) == 4


async def test_why_the_model_did_not_answer_is_the_persons_business(birds: Birds):
    model = script(sample(), sampled=Reply(error=ModelError("http://10.0.0.7/v1 refused the key (401).")))
    editor = await turn(model, birds())
    assert "10.0.0.7" not in results(model)[0]
    assert "The model did not answer." in results(model)[0]
    assert "MCP server 'birds' got no answer of the model: http://10.0.0.7/v1 refused the key (401)." in editor.thoughts


# roots


async def test_a_server_works_in_the_sessions_folders(birds: Birds, tmp_path: Path):
    strange = tmp_path / "a b#c?d%e\u00e9"
    strange.mkdir()
    model = script(asking("roots/list"))
    async with connect(crow_with(model, birds())) as editor:
        session = await editor.new_session(str(tmp_path), roots=[str(strange)])
        await editor.prompt(session.session_id, "go")
    assert [root["uri"] for root in answered(model)["roots"]] == [tmp_path.as_uri(), strange.as_uri()]


async def test_a_server_of_before_2026_hears_that_the_folders_are_others_now(tmp_path: Path):
    heard = asyncio.Event()

    async def hear(context: Any, params: Any) -> None:
        heard.set()

    server = in_memory("legacy")
    assert server.source
    server.source()._mcp_server.add_notification_handler("notifications/roots/list_changed", NotificationParams, hear)
    crow = crow_with(ScriptedModel(lambda request: Reply("Hello.")), server)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        for _ in range(2):
            await editor.prompt(session.session_id, "hello")
        assert not heard.is_set()
        (opened,) = crow.sessions.values()
        opened.folders.roots.append(str(tmp_path))
        await editor.prompt(session.session_id, "hello again")
        await heard.wait()


# logging


async def test_a_servers_warnings_are_notices_and_the_rest_is_silence(birds: Birds):
    model = script(use("say", level="info", data="all is well"), use("say", level="error", data={"egg": "cracked"}))
    async with connect(crow_with(model, birds()), capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        await editor.until(lambda editor: editor.of(NoticeUpdate))
    (notice,) = editor.of(NoticeUpdate)
    assert (notice.severity, notice.title) == ("error", 'birds: {"egg":"cracked"}')


async def test_a_flood_of_warnings_is_a_notice_a_second(birds: Birds):
    model = script(use("say", level="warning", data=f"\x1b[2J{SECRET}\n" + "rain " * 1000, times=500))
    async with connect(crow_with(model, birds(secrets=[SECRET])), capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        await editor.until(lambda editor: editor.of(NoticeUpdate))
    notices = editor.of(NoticeUpdate)
    assert len(notices) < 100
    assert notices[0].title.isprintable()
    assert SECRET not in notices[0].title
    assert len(notices[0].title) < 2 * bridge.LINE


async def test_where_the_client_knows_no_notices_a_warning_goes_to_the_log(
    birds: Birds, caplog: pytest.LogCaptureFixture
):
    model = script(use("say", level="warning", data="rain is coming"))
    editor = await turn(model, birds())
    assert "birds: rain is coming" in [record.getMessage() for record in caplog.records if record.name == "crow"]
    assert "rain" not in editor.thoughts


async def test_notifications_that_make_no_sense_are_dropped_without_a_word(
    birds: Birds, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    model = script(use("babble"))
    await turn(model, birds(), capabilities=NOTICES)
    assert results(model) == ["babbled"]
    assert [record.getMessage() for record in caplog.records if not record.name.startswith("fastmcp")] == []
    assert "Traceback" not in capfd.readouterr().err


# tools that change


def offered(request: dict[str, Any]) -> set[str]:
    return {tool["function"]["name"].removeprefix("birds_") for tool in request["tools"]} & {"crow", "rook"}


async def test_tools_change_at_the_next_turns_start_with_a_marker_and_a_word(birds_anywhere: Birds):
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


async def test_what_goes_on_being_sent_keeps_its_order(birds: Birds):
    """So that a model's server reads anew as little as it can."""
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


async def test_an_answer_for_the_session_does_not_hold_for_a_tool_that_is_another_now(birds: Birds):
    """Approved once, it cannot be exchanged for another."""
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


async def test_a_server_of_2026_is_listened_to():
    """It says what changes to those alone who listen."""
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


async def test_a_cancelled_call_is_cancelled_at_the_server_too(birds_anywhere: Birds, pipe: Callable[[str], str]):
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


# what is told with a call, and what comes back


async def test_the_trace_context_goes_along(birds: Birds):
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    model = script(use("meta"))
    async with wired(crow_with(model, birds())) as wire:
        id = (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]["sessionId"]
        await wire.ask("session/prompt", {"sessionId": id, "prompt": [{"type": "text", "text": "go"}], "_meta": trace})
    told = answered(model)
    assert {key: told[key] for key in trace} == trace
    assert not [key for key in told if key.startswith("crow/")]


async def test_every_kind_of_content_reaches_the_person_and_the_model(birds: Birds):
    model = script(use("everything"))
    editor = await turn(model, birds())
    end = editor.of(ToolCallUpdate)[-1]
    assert end.status == "completed"
    text, image, sound, page, blob, picture, link = [part.content for part in end.content or []]  # pyright: ignore
    assert text == TextBlock(text="words")
    assert image == ImageBlock(data="cGl4ZWxz", mime_type="image/png")
    assert sound == AudioBlock(data="cGl4ZWxz", mime_type="audio/wav")
    contents = ResourceContents(uri="memory://page", text="a page", mime_type="text/plain")
    assert page == ResourceBlock(resource=contents)
    assert blob.resource.uri == "memory://egg.bin"
    assert picture.resource.blob == "cGl4ZWxz"
    assert link == ResourceLinkBlock(uri="https://example.org/", name="site", description="All of them")
    told = str(model.requests[-1]["messages"])
    for words in (
        "words",
        "a page",
        "[a sound, audio/wav, 6 bytes: the user hears it, you cannot]",
        "[memory://egg.bin: 6 bytes that are neither text nor an image]",
        "[site](https://example.org/): All of them",
    ):
        assert words in told
    assert told.count("data:image/png;base64,cGl4ZWxz") == 2


async def test_a_tools_error_is_a_failed_call(birds: Birds):
    model = script(use("everything", structured=True, fail=True))
    editor = await turn(model, birds())
    assert editor.calls()["call_1_0"][-1] == "failed"
    assert results(model) == ['{"birds":3}']


async def test_a_process_asks_as_well_as_a_server_in_this_one(mode: str):
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
    assert json.loads(roots) == {"roots": [{"uri": "file:///"}]}
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
async def test_an_answer_is_checked_only_where_that_comes_to_an_end(schema: dict[str, Any], wanted: str):
    server = FastMCP("birds")
    definitions = {**BOMB, "a60": {"type": "string"}} if "a0" in str(schema) else {"one": {"type": "integer"}}
    output = {"type": "object", "properties": {"caw": schema}, "$defs": definitions}
    text = "a" * 50 + "!"
    server.tool(lambda: ToolResult([], structured_content={"caw": text}), name="sing", output_schema=output)
    model = script(use("sing"))
    await turn(model, Server("birds", lambda: server))
    assert results(model)[0].startswith(wanted)


# what tools say of themselves


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
async def test_only_a_trusted_servers_word_loosens_a_permission(server: Server, asked: int):
    model = script(use("sing"), use("sing"))
    editor = await turn(model, server, crow=crow_with(model, server).use(permissions))
    assert len(editor.questions) == asked
    assert results(model) == ["caw", "caw"]


async def test_what_destroys_is_asked_for_each_time():
    model = script(use("sing"), use("sing"))
    server = hinted(destructiveHint=True)
    editor = await turn(model, server, crow=crow_with(model, server).use(permissions))
    assert [[option.option_id for option in question.options] for question in editor.questions] == [
        ["allow", "reject"],
        ["allow", "reject"],
    ]


async def test_a_rule_of_the_users_beats_what_a_tool_says_of_itself():
    model = script(use("sing"))
    server = hinted(destructiveHint=True)
    editor = await turn(model, server, crow=crow_with(model, server).use(permissions, allow=["birds_*"]))
    assert editor.questions == []
    assert results(model) == ["caw"]


async def test_in_plan_mode_a_trusted_server_may_be_read_from():
    model = script(use("sing"))
    server = hinted(readOnlyHint=True, trust=True)
    await turn(model, server, crow=crow_with(model, server).use(permissions, mode="plan"))
    assert results(model) == ["caw"]


async def test_a_tools_title_stands_before_its_name():
    """Never in its place: it says what it likes."""
    model = script(use("sing"))
    server = hinted(title="\x1b[2JRead a file\n" + "caw " * 100)
    editor = await turn(model, server, crow=crow_with(model, server).use(permissions))
    (call,) = editor.of(ToolCall)
    assert call.title.isprintable()
    assert call.title.endswith(": birds_sing()")
    assert len(call.title) < 120
    assert editor.questions[0].tool_call.title == call.title


# whom a server means that serves several sessions


async def test_a_shared_server_means_the_session_whose_call_is_in_flight(tmp_path: Path, birds: Birds):
    model = ScriptedModel(
        lambda request: (
            Reply("Done.") if request["messages"][-1]["role"] == "tool" else Reply(tool_calls=[asking("roots/list")])
        )
    )
    async with connect(Crow(model, servers=[birds(shared=True)])) as editor:
        for folder in ("/", str(tmp_path)):
            session = await editor.new_session(folder)
            await editor.prompt(session.session_id, "go")
            assert answered(model) == {"roots": [{"uri": Path(folder).as_uri()}]}


async def test_in_2025_a_shared_process_asks_nobody_when_it_could_mean_either(pipe: Callable[[str], str]):
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
        await editor.prompt(other.session_id, "go")
        assert "more than one that could be meant" in results(model)[0]
        assert editor.forms == []
        await editor.cancel(one.session_id)
        await waiting
