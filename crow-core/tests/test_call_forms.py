"""Calls in a form that crow describes: what is sent, and how replies under a JSON schema are read."""

import json
from typing import Any

import pytest
from crow_core.acp.schema import ToolCall
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.models.call_forms import StepReader
from crow_core.models.chat_model import ChatModel
from crow_core.models.quirks import Quirks, find_quirks
from crow_core.models.reply import ReplyBuilder
from crow_core.testing import Failure, Reply, ScriptedServer, connect
from crow_extensions.printed_calls import printed_calls
from fastmcp import FastMCP
from hypothesis import given
from hypothesis import strategies as st

SERVER = FastMCP("demo")
TOOL: dict[str, Any] = {
    "name": "read",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}},
}
REQUEST: dict[str, Any] = {
    "tools": [{"type": "function", "function": TOOL}],
    "messages": [{"role": "user", "content": "How do tool calls look?"}],
}


@SERVER.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def demo() -> Server:
    return Server("demo", lambda: SERVER, shared=True)


CALL = '{"use_tool": true, "name": "demo_add", "arguments": {"a": 1, "b": 2}}'
ANSWER = '{"use_tool": false, "answer": "It is \\"3\\",\\nI think \\ud83d\\ude00."}'
SHOWN = 'It is "3",\nI think 😀.'


@pytest.mark.anyio
async def test_model_chooses_a_call_or_an_answer_under_a_schema_and_reads_its_own_form():
    async with ScriptedServer([Reply(CALL), Reply(ANSWER), Reply(ANSWER)]) as server:
        model = ChatModel(name="m", base_url=server.url, quirks=Quirks(call_form="schema"))
        crow = Crow(model, servers=[demo()])
        async with connect(crow) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "1 + 2?")
            await editor.prompt(session.session_id, "Sure?")
            (opened,) = crow.sessions.values()
            stored = [entry for entry in opened.log if entry.get("role") == "assistant"]
    assert editor.text == SHOWN * 2
    assert [call.raw_input for call in editor.of(ToolCall)] == [{"a": 1, "b": 2}]
    assert [states[-1] for states in editor.calls().values()] == ["completed"]
    assert [entry.get("content") or "" for entry in stored] == ["", SHOWN, SHOWN]
    assert [entry.get("crow", {}).get("printed") for entry in stored] == [CALL, ANSWER, ANSWER]
    first, _, last = server.requests
    assert not {"tools", "parallel_tool_calls"} & first.keys()
    schema = first["response_format"]["json_schema"]["schema"]
    names = [choice["properties"].get("name", {}).get("const") for choice in schema["anyOf"]]
    assert names == ["demo_add", None]
    assert '- demo_add {"a": integer, "b": integer}: Add two numbers.' in first["messages"][0]["content"]
    assert last["messages"][1:] == [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": CALL},
        {"role": "user", "content": "<tool_response>\n3\n</tool_response>"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "Sure?"},
    ]
    assert last["messages"][0] == first["messages"][0], "the prefix is the same"


@pytest.mark.parametrize(
    ("form", "written"),
    [
        ("json", '{"name": "read", "arguments": {"path": "a"}}'),
        ("fences", '```json\n{"name": "read", "arguments": {"path": "a"}}\n```'),
        ("tools", '<tools>\n{"name": "read", "arguments": {"path": "a"}}\n</tools>'),
        ("schema", '{"name": "read", "arguments": {"path": "a"}}'),
    ],
)
def test_calls_of_another_model_are_sent_in_the_form(form: Any, written: str):
    use = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Read a."},
        {"role": "assistant", "content": "", "tool_calls": [use]},
        {"role": "tool", "tool_call_id": "1", "content": "text"},
    ]
    model = ChatModel(name="m", base_url="http://x/v1", quirks=Quirks(call_form=form))
    body = model.build_body({**REQUEST, "messages": messages})
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == written
    assert body["messages"][3]["content"] == "<tool_response>\ntext\n</tool_response>"
    assert ("response_format" in body) is (form == "schema")
    assert model.adapt(body) == body


def test_the_first_reply_decides_and_later_ones_call_or_answer():
    model = ChatModel(name="m", base_url="http://x/v1", quirks=Quirks(call_form="schema"))
    result: list[Any] = [*REQUEST["messages"], {"role": "user", "content": "<tool_response>\nx\n</tool_response>"}]
    bodies = [model.build_body({**REQUEST, "messages": messages}) for messages in (REQUEST["messages"], result)]
    choices = [body["response_format"]["json_schema"]["schema"]["anyOf"] for body in bodies]
    assert [[*choice["properties"]] for choice in choices[0]] == [
        ["use_tool", "name", "arguments"],
        ["use_tool", "answer"],
    ]
    assert [[*choice["properties"]] for choice in choices[1]] == [["name", "arguments"], ["answer"]]


def test_request_that_may_not_call_tools_keeps_its_prompt_and_has_only_the_answer_in_its_schema():
    model = ChatModel(name="m", base_url="http://x/v1", quirks=Quirks(call_form="schema"))
    free, bound = (model.build_body({**more, **REQUEST}) for more in ({}, {"tool_choice": "none"}))
    assert bound["messages"] == free["messages"]
    assert "tool_choice" not in bound
    assert [*bound["response_format"]["json_schema"]["schema"]["properties"]] == ["use_tool", "answer"]


def test_schema_of_a_typed_result_is_kept():
    model = ChatModel(name="m", base_url="http://x/v1", quirks=Quirks(call_form="schema"))
    form = {"type": "json_schema", "json_schema": {"name": "result", "schema": {}}}
    assert model.build_body({**REQUEST, "response_format": form})["response_format"] == form


def test_form_is_chosen_by_the_quirk_and_measured_models():
    local = "http://127.0.0.1:8080/v1"
    for name, form in [("qwen2.5-coder:1.5b", "schema"), ("qwen2.5-coder-32b", "native"), ("gpt-oss-20b", "native")]:
        assert find_quirks(local, name).call_form == form
    assert find_quirks(local, "qwen2.5-coder:1.5b", {"call_form": "native"}).call_form == "native"
    assert find_quirks("https://api.example.com/v1", "qwen2.5-coder-7b").call_form == "native"


def read(pieces: list[str], end: str = "stop") -> tuple[str, str, Any, str, list[str]]:
    """Return the thought, the text, the calls and the printed text of a reply, and the pieces of text as shown."""
    reader, builder, shown = StepReader(REQUEST), ReplyBuilder(), list[str]()
    for piece in pieces:
        for delta in reader.feed({"content": piece}):
            builder.add(delta)
            shown += [delta["content"]] if "content" in delta else []
    for delta in [*reader.feed({"finish_reason": end}), *reader.finish()]:
        builder.add(delta)
    reply = builder.build()
    calls = [(use["function"]["name"], json.loads(use["function"]["arguments"])) for use in reply.get("tool_calls", [])]
    printed = reply.get("crow", {}).get("printed", "")
    return str(reply.get("reasoning_content", "")), str(reply.get("content") or ""), calls, printed, shown


READ: list[Any] = [("read", {"path": "a"})]
REPLIES: dict[str, tuple[str, tuple[str, str, Any]]] = {
    "a call": ('{"use_tool": true, "name": "read", "arguments": {"path": "a"}}', ("", "", READ)),
    "a call over lines": ('{\n  "name": "read",\n  "arguments": {\n    "path": "a"\n  }\n}\n', ("", "", READ)),
    "an answer": (ANSWER, ("", SHOWN, [])),
    "an answer with braces": ('{"answer": "{\\"a\\": \\"}\\"}"}', ("", '{"a": "}"}', [])),
    "plain text": ("It is sunny.", ("", "It is sunny.", [])),
    "a fence": ('```json\n{"a": 1}\n```', ("", '```json\n{"a": 1}\n```', [])),
    "other JSON": ('{"a": 1}', ("", '{"a": 1}', [])),
    "an unknown tool": (
        '{"use_tool": true, "name": "fly", "arguments": {}}',
        ("", '{"use_tool": true, "name": "fly", "arguments": {}}', []),
    ),
    "nothing": ("", ("", "", [])),
    "white space": ("\n \n", ("", "\n \n", [])),
}


@pytest.mark.parametrize("name", REPLIES)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=10))
def test_reply_is_read_alike_in_any_pieces(name: str, lengths: list[int]):
    text, expected = REPLIES[name]
    pieces, at = list[str](), 0
    while at < len(text):
        pieces.append(text[at : at + lengths[len(pieces) % len(lengths)]])
        at += len(pieces[-1])
    thought, content, calls, printed, _ = read(pieces)
    assert (thought, content, calls) == expected
    assert printed in ("", text)


def test_answer_is_shown_as_it_arrives():
    pieces = ['{"use_tool": fa', 'lse, "answer": "It', " is ", "3\\", 'n.", she said', '."}']
    *_, shown = read([*pieces[:4], *['n."}']])
    assert shown == ["It", " is ", "3", "\n."]


def test_answer_that_is_cut_keeps_what_was_shown_and_a_call_that_is_cut_does_not_run():
    assert read(['{"use_tool": false, "answer": "It is'], "length")[1:3] == ("It is", [])
    assert read(['{"use_tool": true, "name": "read", "argume'], "length")[2] == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ('{"use_tool": true, "name": "fly", "arguments": {}}', "there is no tool 'fly'. The tools are: demo_add."),
        ('{"use_tool": true, "name": "demo_add", "arguments": {"a": 1}}', "Missing required argument"),
        ('{"use_tool": true, "name": "demo_add", "arguments": "1 and 2"}', "are not a JSON object"),
        ('{"use_tool": true, "name": "demo_add", "argum', "the call is not complete JSON"),
        ("{'use_tool': true, // add\n'name': 'demo_add', 'arguments': {'a': 1}", "the call is not complete JSON"),
        ("\n".join(CALL.replace("1", str(n)) for n in range(3, 203)), "these are over 16 calls"),
    ],
    ids=["unknown tool", "missing argument", "arguments as text", "half a call", "quotes and comments", "200 calls"],
)
async def test_bad_call_without_a_schema_runs_nothing_and_the_model_is_told_why(bad: str, fault: str):
    async with ScriptedServer([Reply(bad), Reply(ANSWER)]) as server:
        quirks = Quirks(call_form="schema", printed_calls=True)
        model = ChatModel(name="m", base_url=server.url, quirks=quirks, refused_parameters={"response_format"})
        async with connect(Crow(model, servers=[demo()]).use(printed_calls)) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "1 + 2?")
    assert not any("completed" in states for states in editor.calls().values())
    assert fault in json.dumps(server.requests[-1]["messages"][-1], ensure_ascii=False)


@pytest.mark.anyio
async def test_endpoint_that_takes_no_schemas_gets_the_form_without_one():
    refusal = Failure(400, {"error": {"message": "response_format is not supported"}})
    async with ScriptedServer([refusal, Reply(CALL), Reply(ANSWER)]) as server:
        model = ChatModel(name="m", base_url=server.url, quirks=Quirks(call_form="schema"))
        async with connect(Crow(model, servers=[demo()])) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "1 + 2?")
    assert editor.text.endswith(SHOWN)
    assert ["response_format" in request for request in server.requests] == [True, False, False]
