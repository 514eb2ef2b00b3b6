"""The loop, as seen by the editor, in the log, and in the next request."""

import asyncio
import json
from typing import Any

import pytest
from crow_core.acp import schema
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import AgentMessageChunk, AgentThoughtChunk, ToolCallUpdate
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelCall
from crow_core.models.quirks import Quirks
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedModel, ScriptedServer, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.empty_replies import empty_replies
from fastmcp import FastMCP
from msgspec import UNSET

pytestmark = pytest.mark.anyio

TOOLS = FastMCP("demo")


@TOOLS.tool
def add(a: int, b: int) -> int:
    return a + b


@TOOLS.tool
def fail(why: str) -> str:
    raise ValueError(why)


@TOOLS.tool
def remember(note: dict[str, Any], tags: list[str] | None = None, text: str = "", maybe: str | list[str] = "") -> str:
    return json.dumps({"note": note, "tags": tags, "text": text, "maybe": maybe})


def crow_with(model: ScriptedModel, *tools: FastMCP, max_steps: int = 200) -> Crow:
    servers = [Server(server.name, lambda server=server: server, shared=True) for server in tools or (TOOLS,)]
    return Crow(model, servers=servers, max_requests=max_steps)


def use(name: str, arguments: dict[str, Any] | str, **more: Any) -> Use:
    return Use(name=name, arguments=arguments, **more)


def log_of(crow: Crow) -> list[Message]:
    """Return the messages of the only session, without markers and notes."""
    (session,) = crow.sessions.values()
    return [
        {key: value for key, value in entry.items() if key != "crow"}  # type: ignore[misc]
        for entry in session.log
        if "role" in entry
    ]


def results(request: dict[str, Any]) -> list[str]:
    """Return the tool results, as the model receives them."""
    return [message["content"] for message in request["messages"] if message["role"] == "tool"]


async def test_text_is_streamed_under_one_id_and_appended_to_the_log():
    model = ScriptedModel([Reply("Good morning.", reasoning="A greeting.")])
    crow = crow_with(model)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "hi")
        assert answer.stop_reason == "end_turn"
        assert editor.text == "Good morning."
        assert editor.thoughts == "A greeting."
        chunks = [*editor.of(AgentThoughtChunk), *editor.of(AgentMessageChunk)]
        assert len({chunk.message_id for chunk in chunks}) == 1
        assert log_of(crow) == [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "reasoning_content": "A greeting.", "content": "Good morning."},
        ]


async def test_a_tool_result_is_sent_to_the_model_and_to_the_client():
    model = ScriptedModel([Reply("Let me see.", tool_calls=[use("demo_add", {"a": 2, "b": 3})]), Reply("Five.")])
    crow = crow_with(model)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "2 + 3?")
        first = log_of(crow)[1]
    (call,) = editor.of(schema.ToolCall)
    assert (call.name, call.raw_input, call.status) == ("demo_add", {"a": 2, "b": 3}, "pending")
    assert editor.calls() == {call.tool_call_id: ["pending", "in_progress", "completed"]}
    # Text and call of one reply are one message, with one result behind it.
    assert model.requests[1]["messages"][-2:] == [
        first,
        {"role": "tool", "tool_call_id": call.tool_call_id, "content": "5"},
    ]
    assert first.get("content") == "Let me see."
    assert model.requests[1]["messages"][: len(model.requests[0]["messages"])] == model.requests[0]["messages"]


async def test_parallel_calls_run_together_and_are_answered_in_order():
    server, second_is_done = FastMCP("demo"), asyncio.Event()

    @server.tool
    async def first() -> str:
        await second_is_done.wait()
        return "one"

    @server.tool
    async def second() -> str:
        second_is_done.set()
        return "two"

    model = ScriptedModel([Reply(tool_calls=[use("demo_first", {}), use("demo_second", {})]), Reply("Done.")])
    async with connect(crow_with(model, server)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert results(model.requests[1]) == ["one", "two"]
    ended = [update.tool_call_id for update in editor.of(ToolCallUpdate) if update.status == "completed"]
    begun = [call.tool_call_id for call in editor.of(schema.ToolCall)]
    assert ended == begun[::-1]


async def test_a_failing_tool_returns_an_error_result_and_other_calls_go_on():
    calls = [use("demo_fail", {"why": "no such bird"}), use("demo_add", {"a": 1, "b": 1})]
    model = ScriptedModel([Reply(tool_calls=calls), Reply("I see.")])
    async with connect(crow_with(model)) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
    assert answer.stop_reason == "end_turn"
    failed, added = results(model.requests[1])
    assert "no such bird" in failed
    assert added == "2"
    assert [states[-1] for states in editor.calls().values()] == ["failed", "completed"]


async def test_the_word_error_in_a_result_does_not_make_it_an_error():
    server = FastMCP("demo")
    server.tool(lambda: "Error: 0 errors found", name="lint")
    model = ScriptedModel([Reply(tool_calls=[use("demo_lint", {})]), Reply("Clean.")])
    async with connect(crow_with(model, server)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert [states[-1] for states in editor.calls().values()] == ["completed"]


async def test_a_call_of_an_unknown_tool_is_answered_with_the_list_of_tools():
    model = ScriptedModel([Reply(tool_calls=[use("demo_fly", {})]), Reply("I cannot.")])
    async with connect(crow_with(model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "fly")
    (said,) = results(model.requests[1])
    assert said == "There is no tool 'demo_fly'. The tools are: demo_add, demo_fail, demo_remember."
    assert [states[-1] for states in editor.calls().values()] == ["failed"]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ('{"a": 1, "b": }', "char 14"),
        ('{"a": 1, "b"', "char 12"),
        ('{"a": 1} {"b": 2}', "char 9"),
        ("add 1 and 2", "char 0"),
        ("[1, 2]", "got `array`"),
        ("null", "got `null`"),
        ('{"a": NaN, "b": 1}', "byte 6"),
        ('{"a": ' + "[" * 50_000 + "]" * 50_000 + "}", "depth"),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", "more than 100 levels"),
        ('{"a": "\\ud800", "b": 1}', "surrogate"),
    ],
)
async def test_a_call_whose_arguments_are_no_json_object_is_answered_with_an_error(arguments: str, where: str):
    """The error has the position and the schema. The next request has valid arguments in their place."""
    model = ScriptedModel([Reply(tool_calls=[use("demo_add", arguments)]), Reply("Sorry.")])
    crow = crow_with(model)
    ran: list[str] = []
    crow.before_tool(lambda session, tool_call: ran.append(tool_call.id))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "add")
    assert answer.stop_reason == "end_turn"
    assert ran == []
    (said,) = results(model.requests[1])
    assert said.startswith("The call was not run: its arguments are not a JSON object (")
    assert where in said
    assert '"required":["a","b"]' in said
    (call,) = model.requests[1]["messages"][-2]["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert [[*dict.fromkeys(states)] for states in editor.calls().values()] == [["pending", "failed"]]


async def test_arguments_that_are_json_text_are_decoded_unless_the_schema_wants_a_string():
    quoted = {"note": '{"a": 1}', "tags": '["x"]', "text": '{"a": 1}', "maybe": '["x"]'}
    model = ScriptedModel([Reply(tool_calls=[use("demo_remember", quoted)]), Reply("Noted.")])
    async with connect(crow_with(model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "note that")
    (said,) = results(model.requests[1])
    assert json.loads(said) == {"note": {"a": 1}, "tags": ["x"], "text": '{"a": 1}', "maybe": '["x"]'}


async def test_an_argument_that_is_no_json_text_reaches_the_tool_unchanged():
    model = ScriptedModel([Reply(tool_calls=[use("demo_remember", {"note": '"just a string"'})]), Reply("Oh.")])
    async with connect(crow_with(model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "note that")
    (said,) = results(model.requests[1])
    assert "validation error" in said
    assert [states[-1] for states in editor.calls().values()] == ["failed"]


@pytest.mark.parametrize(("finish_reason", "stop_reason"), [("length", "max_tokens"), ("content_filter", "refusal")])
async def test_a_tool_call_of_a_truncated_reply_is_not_run(finish_reason: str, stop_reason: str):
    half = use("demo_add", '{"a": 1, "b": 2')
    whole = use("demo_add", {"a": 1, "b": 2})
    model = ScriptedModel([Reply("So I", tool_calls=[whole, half], finish_reason=finish_reason), Reply("On.")])
    crow = crow_with(model)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "add")
        assert answer.stop_reason == stop_reason
        assert editor.of(schema.ToolCall) == []
        assert log_of(crow)[-1] == {"role": "assistant", "content": "So I"}
        answer = await editor.prompt(session.session_id, "go on")
        assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize("silence", [Reply(), Reply(reasoning="Hm.")])
async def test_the_model_is_asked_once_more_after_an_empty_reply(silence: Reply):
    model = ScriptedModel([silence, Reply("Here I am.")])
    async with connect(crow_with(model).use(empty_replies)) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "hello?")
    assert answer.stop_reason == "end_turn"
    assert editor.text == "Here I am."
    assert "empty" in model.requests[1]["messages"][-1]["content"]


async def test_two_empty_replies_are_an_error_and_the_next_prompt_starts_the_count_again():
    model = ScriptedModel([Reply(), Reply(), Reply(), Reply("Here I am.")])
    async with connect(crow_with(model).use(empty_replies)) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as caught:
            await editor.prompt(session.session_id, "hello?")
        assert "answered nothing" in caught.value.data["details"]
        await editor.prompt(session.session_id, "hello again?")
    assert editor.text == "Here I am."


ECHOED = "Please add one and one, and tell me the sum of them."
ENDLESS = {"a word": "Go on, go on. ", "blanks": " \n", "a line": "The file is empty, so there is nothing to do.\n"}


def small(url: str) -> ChatModel:
    return ChatModel(name="m", base_url=url, quirks=Quirks(profile="small", printed_calls=True))


@pytest.mark.parametrize("piece", ENDLESS)
@pytest.mark.parametrize("begin", ["Well. ", '{"name": "demo_add", "arguments": {"a": "'])
async def test_a_reply_that_only_repeats_itself_is_cut_and_asked_for_once_more(piece: str, begin: str):
    endless = Reply(begin + ENDLESS[piece] * 2_000, hang=True)
    async with ScriptedServer([endless, Reply("Here I am.")]) as server:
        crow = Crow(small(server.url), servers=[Server("demo", lambda: TOOLS, shared=True)]).use(empty_replies)
        async with connect(crow) as editor:
            session = await editor.new_session("/")
            answer = await editor.prompt(session.session_id, "hello?")
    assert answer.stop_reason == "end_turn"
    assert editor.text.endswith("Here I am.")
    assert len(editor.text) < 3_000
    assert "Your last reply repeated itself" in server.requests[1]["messages"][-1]["content"]


@pytest.mark.parametrize("said", ["a table", "a list", "code"])
async def test_a_long_reply_with_equal_lines_is_whole(said: str):
    lines = {"a table": "| 0 | 0 |\n" * 150, "a list": "- item\n" * 200, "code": "x = 1\n" * 300}
    text = lines[said] + "Done."
    async with ScriptedServer([Reply(text)]) as server, connect(Crow(small(server.url))) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hello?")
    assert editor.text == text


async def test_a_larger_model_may_repeat_itself():
    text = "Go on. " * 2_000
    async with connect(crow_with(ScriptedModel([Reply(text)])).use(empty_replies)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hello?")
    assert editor.text == text


async def test_a_model_that_repeats_the_prompt_twice_ends_the_turn_with_a_sentence():
    model = ScriptedModel([Reply(f" {ECHOED}\n"), Reply(ECHOED), Reply("Two.")])
    async with connect(crow_with(model).use(empty_replies)) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as caught:
            await editor.prompt(session.session_id, ECHOED)
    assert "The model 'scripted' repeated the prompt, twice." in caught.value.data["details"]
    assert model.requests[1]["messages"][-1]["content"].startswith("Your last reply only repeated the prompt.")


async def test_an_empty_reply_of_a_cancelled_turn_does_not_count_in_the_next_turn():
    nudged = asyncio.Event()

    def script(request: dict[str, Any]) -> Reply:
        match len(model.requests):
            case 2:
                nudged.set()
                return Reply(hang=True)
            case 4:
                return Reply("Here I am.")
            case _:
                return Reply()

    model = ScriptedModel(script)
    async with connect(crow_with(model).use(empty_replies)) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "hello?"))
        await nudged.wait()
        await editor.cancel(session.session_id)
        assert (await turn).stop_reason == "cancelled"
        await editor.prompt(session.session_id, "hello again?")
    assert editor.text == "Here I am."


async def test_a_turn_ends_at_the_limit_of_requests():
    model = ScriptedModel(lambda request: Reply("Once more.", tool_calls=[use("demo_add", {"a": 1, "b": 1})]))
    crow = crow_with(model, max_steps=3)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
        assert answer.stop_reason == "max_turn_requests"
        assert len(model.requests) == 3
        assert log_of(crow)[-1].get("content") == "2"  # the last call is answered, too
        await editor.prompt(session.session_id, "go on")
    assert len(model.requests) == 6


async def test_a_broken_reply_is_an_error_and_its_text_stays_in_the_log():
    half = use("demo_add", '{"a": 1')
    model = ScriptedModel([Reply("I was about", tool_calls=[half], error=OSError("line cut")), Reply("Right.")])
    crow = crow_with(model)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as caught:
            await editor.prompt(session.session_id, "go")
        assert caught.value.data == {"details": "line cut"}
        assert editor.text == "I was about"
        assert log_of(crow) == [{"role": "user", "content": "go"}, {"role": "assistant", "content": "I was about"}]
        answer = await editor.prompt(session.session_id, "go on")
        assert answer.stop_reason == "end_turn"
    assert model.requests[1]["messages"][1:] == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I was about"},
        {"role": "user", "content": "go on"},
    ]


async def test_a_model_call_that_fails_at_once_leaves_only_the_prompt_in_the_log():
    model = ScriptedModel([Reply(error=OSError("no route")), Reply("Right.")])
    crow = crow_with(model)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError):
            await editor.prompt(session.session_id, "go")
        assert log_of(crow) == [{"role": "user", "content": "go"}]
        await editor.prompt(session.session_id, "again")
    assert model.requests[1]["messages"][-1] == {"role": "user", "content": "go\n\nagain"}


async def test_a_repeated_tool_call_id_is_made_unique():
    again = Reply(tool_calls=[use("demo_add", {"a": 1, "b": 1}, id="call_0")])
    model = ScriptedModel([again, again, Reply("Done.")])
    async with connect(crow_with(model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert list(editor.calls()) == ["call_0", "call_0_2"]
    answers = [m["tool_call_id"] for m in model.requests[2]["messages"] if m["role"] == "tool"]
    assert answers == ["call_0", "call_0_2"]


LONG = use("demo_remember", {"note": {}, "text": "a word and " * 50}, id="call_0")
"""A call with long arguments."""


async def test_a_long_tool_call_is_shown_while_its_arguments_arrive():
    model = ScriptedModel([Reply(tool_calls=[LONG]), Reply("Done.")])
    async with connect(crow_with(model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    (begun,) = editor.of(schema.ToolCall)
    assert (begun.title, begun.name, begun.raw_input) == ("Remember", "demo_remember", UNSET)
    whole, *_ = editor.of(ToolCallUpdate)
    assert whole.raw_input == LONG["arguments"]
    assert str(whole.title).startswith("Remember: demo_remember(")
    assert editor.calls() == {"call_0": ["pending", "pending", "in_progress", "completed"]}


@pytest.mark.parametrize(
    "cut", [{"finish_reason": "length"}, {"hang": True}, {"error": ModelError("It broke off.", retry=True)}]
)
async def test_a_long_tool_call_that_was_cut_fails_and_its_id_is_not_used_again(cut: dict[str, Any]):
    model = ScriptedModel([Reply(tool_calls=[LONG], **cut), Reply(tool_calls=[LONG]), Reply("Done.")])
    crow = crow_with(model)
    async with connect(crow) as editor:
        id = (await editor.new_session("/")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "go"))
        await editor.until(lambda editor: editor.of(schema.ToolCall))
        if "hang" in cut:
            await editor.cancel(id)
        await asyncio.gather(turn, return_exceptions=True)
        assert editor.calls() == {"call_0": ["pending", "failed"]}
        assert [message.get("role") for message in log_of(crow)] == ["user"]
        await editor.prompt(id, "again")
        assert list(editor.calls()) == ["call_0", "call_0_2"]
        assert editor.calls()["call_0_2"][-1] == "completed"


async def test_a_long_tool_call_without_a_unique_id_is_shown_when_it_is_whole():
    model = ScriptedModel([Reply(tool_calls=[LONG, LONG, {**LONG, "id": ""}]), Reply("Done.")])
    async with connect(crow_with(model)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert [call.raw_input for call in editor.of(schema.ToolCall)] == [UNSET, LONG["arguments"], LONG["arguments"]]
    assert list(editor.calls()) == ["call_0", "call_0_2", "call"]
    assert {states[-1] for states in editor.calls().values()} == {"completed"}


async def test_arguments_of_any_type_do_not_break_the_display_of_a_call():
    """The kind of a tool that depends on `command` is found for any value of it."""
    server = FastMCP("crow")

    @server.tool(meta={"crow/kind": {"view": "read"}})
    def file_editor(command: Any, path: Any = "") -> str:
        return f"{command} {path}"

    strange = [{"command": ["view"]}, {"command": {"a": 1}, "path": 7}, {"command": None, "path": "a\0b"}]
    model = ScriptedModel([Reply(tool_calls=[use("file_editor", each) for each in strange]), Reply("Done.")])
    crow = Crow(model, servers=[Server("crow", lambda: server, built_in=True, shared=True)])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
    assert answer.stop_reason == "end_turn"
    assert [call.kind for call in editor.of(schema.ToolCall)] == ["other", "other", "other"]


async def test_system_prompt_and_tools_stay_equal_to_the_byte():
    calls = Reply(tool_calls=[use("demo_add", {"a": 1, "b": 1})])
    model = ScriptedModel([calls, Reply("Two."), Reply("Bye.")])
    crow = crow_with(model)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        await editor.prompt(session.session_id, "bye")
    first, *later = (json.dumps(request, ensure_ascii=False).removesuffix("]}") for request in model.requests)
    for request in later:
        assert request.startswith(first)
        first = request


async def test_model_error_can_make_and_send_a_refused_request_again():
    refusals: list[str] = []

    def answer(request: dict[str, Any]) -> Reply:
        return Reply("Well.") if refusals else Reply(error=ModelError("Too long.", too_long=True))

    crow = crow_with(ScriptedModel(answer))

    @crow.model_error
    def make_room(session: Session, error: ModelError) -> bool:
        refusals.append(f"{error} {error.too_long}")
        session.log.append({"role": "user", "content": "In short?"})
        return True

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        assert (await editor.prompt(session.session_id, "hi")).stop_reason == "end_turn"
    assert refusals == ["Too long. True"]
    assert editor.text == "Well."


async def test_a_passing_error_before_the_first_word_is_one_that_an_extension_may_answer():
    """There is no reply: the log has none, and no hook receives one."""
    model = ScriptedModel([Reply(error=ModelError("Try again.", retry=True)), Reply("Well.")])
    crow = crow_with(model)
    seen: list[str] = []
    crow.model_error(lambda session, error: seen.append(str(error)) or True)
    crow.after_model(lambda session, call: seen.append(str(call.reply.get("content"))))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        assert (await editor.prompt(session.session_id, "hi")).stop_reason == "end_turn"
        assert [message.get("content") for message in log_of(crow)] == ["hi", "Well."]
    assert seen == ["Try again.", "Well."]


async def test_ask_model_is_recorded_but_neither_shown_nor_appended_to_the_log():
    crow = crow_with(ScriptedModel([Reply("Aside.", usage={"prompt_tokens": 7})]))
    noted: list[ModelCall] = []

    @crow.model_call
    def note(session: Session, model_call: ModelCall) -> None:
        noted.append(model_call)

    async with connect(crow) as editor:
        await editor.new_session("/")
        (session,) = crow.sessions.values()
        call = await session.ask_model({"messages": [{"role": "user", "content": "hi"}]}, "title")
        await session.log.written()
        assert not session.log
        assert not editor.text
    assert (call.reply.get("content"), call.purpose, call.usage) == ("Aside.", "title", {"prompt_tokens": 7})
    assert noted == [call]


async def test_tool_hooks_receive_the_session_of_the_call():
    crow = crow_with(ScriptedModel([Reply(tool_calls=[use("demo_add", {"a": 1, "b": 2})]), Reply("Three.")]))
    sessions: list[object] = []
    crow.before_tool(lambda session, tool_call: sessions.append(session))
    crow.after_tool(lambda result, session, tool_call: sessions.append(session))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
        assert sessions == [crow.sessions[session.session_id]] * 2


async def test_call_that_a_hook_changes_is_decided_anew_and_runs_as_changed():
    model = ScriptedModel([Reply(tool_calls=[use("demo_add", {"a": 1, "b": 2})]), Reply("Done.")])
    crow = crow_with(model)
    judged: list[tuple[object, object]] = []

    @crow.before_tool
    def judge(session: Session, tool_call: ToolCall) -> None:
        judged.append((tool_call.arguments["a"], tool_call.is_changed))

    @crow.before_tool
    def change(session: Session, tool_call: ToolCall) -> ToolCall | None:
        return tool_call.change_arguments(a=40) if tool_call.arguments["a"] == 1 else None

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "add")
        entries = [*crow.sessions[session.session_id].log]
    assert judged == [(1, False), (40, True)]
    assert results(model.requests[1]) == ["42"]
    assert [update.raw_input for update in editor.updates if getattr(update, "raw_input", None)][-1] == {
        "a": 40,
        "b": 2,
    }
    (answer,) = (entry for entry in entries if entry.get("role") == "tool")
    assert answer["crow"]["shown"]["arguments"] == {"a": 40, "b": 2}
    (call,) = next(entry["tool_calls"] for entry in entries if entry.get("tool_calls"))
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}, "the reply stays as it was"


async def test_error_that_must_not_be_retried_ends_the_turn_after_the_reply_has_begun():
    model = ScriptedModel([Reply("Half of", error=ModelError("The endpoint refused the rest."))])
    crow = crow_with(model)
    asked: list[str] = []
    crow.before_end(lambda session, stop_reason: asked.append(stop_reason))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as failure:
            await editor.prompt(session.session_id, "go")
    assert failure.value.data == {"details": "The endpoint refused the rest."}
    assert asked == [], "nothing may continue the turn"


async def test_interrupted_reply_ends_the_turn_with_its_error_unless_a_hook_continues_it():
    broken = Reply("Half of", error=ModelError("The connection broke.", retry=True))
    model = ScriptedModel([broken, broken, Reply("it.")])
    crow = crow_with(model)
    more: list[Message] = [{"role": "user", "content": "Go on."}]
    crow.before_end(lambda session, stop_reason: more.pop() if len(model.requests) == 2 else None)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as failure:
            await editor.prompt(session.session_id, "go")
        assert failure.value.data == {"retry": True, "details": "The connection broke."}
        assert (await editor.prompt(session.session_id, "again")).stop_reason == "end_turn"
    assert len(model.requests) == 3
