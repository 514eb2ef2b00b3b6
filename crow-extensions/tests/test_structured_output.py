"""Typed results through ACP, and the schemas and values behind them."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from crow_core.acp.connection import RpcError
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.session.output import OutputSchema, check_schema, find_json, list_faults
from crow_core.testing import Reply, ScriptedCall, ScriptedModel, connect
from crow_extensions.structured_output import structured_output
from fastmcp import FastMCP
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
INTEGER: dict[str, Any] = {"type": "integer"}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/Tree",
    "$defs": {
        "Tree": {
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
            "additionalProperties": False,
        }
    },
}


def call(name: str, **arguments: Any) -> ScriptedCall:
    return {"name": name, "arguments": arguments}


def give(value: Any) -> Reply:
    return Reply(tool_calls=[call("give_result", result=value)])


def ask(schema: Any, **more: Any) -> dict[str, Any]:
    return {"crow": {"outputSchema": schema, **more}}


async def test_value_comes_with_the_answer_and_no_further_model_call():
    model = ScriptedModel([give(4)])
    crow = Crow(model).use(structured_output)
    async with connect(crow) as editor:
        id = (await editor.new_session("/tmp")).session_id
        response = await editor.prompt(id, "2 + 2?", ask(INTEGER))
        assert (response.stop_reason, response.meta) == ("end_turn", {"crow": {"output": 4}})
        *_, reply, answer = crow.sessions[id].log
        assert (reply["role"], answer["role"], answer["content"]) == ("assistant", "tool", "The result was taken.")
    assert len(model.requests) == 1


async def test_faults_come_with_the_answer():
    async with connect(Crow(ScriptedModel([give("x"), give(None)])).use(structured_output)) as editor:
        id = (await editor.new_session("/tmp")).session_id
        response = await editor.prompt(id, "2 + 2?", ask(INTEGER, outputRetries=1))
        assert response.stop_reason == "end_turn"
        first, second = response.meta["crow"]["outputFaults"]
        assert "'x' is not of type 'integer'" in first
        assert "None is not of type 'integer'" in second


async def test_app_without_the_extension_announces_nothing_and_says_so():
    async with connect(Crow(ScriptedModel([Reply("Never.")]))) as editor:
        id = (await editor.new_session("/tmp")).session_id
        with pytest.raises(RpcError) as raised:
            await editor.prompt(id, "2 + 2?", ask(INTEGER))
        assert "structured_output is off" in raised.value.data["details"]


async def test_prompt_without_a_schema_has_no_notes_and_no_tool():
    model = ScriptedModel([Reply("Four.")])
    async with connect(Crow(model).use(structured_output)) as editor:
        id = (await editor.new_session("/tmp")).session_id
        assert not (await editor.prompt(id, "2 + 2?")).meta
    assert "tools" not in model.requests[0]
    assert model.requests[0]["messages"][-1]["content"] == "2 + 2?"


async def test_queued_prompts_get_each_its_own_result():
    script = [give(1), give("two"), Reply("Three.")]
    async with connect(Crow(ScriptedModel(script)).use(structured_output)) as editor:
        id = (await editor.new_session("/tmp")).session_id
        first, second, third = await asyncio.gather(
            editor.prompt(id, "One.", ask(INTEGER)),
            editor.prompt(id, "Two.", ask({"type": "string"})),
            editor.prompt(id, "Three."),
        )
    assert (first.meta, second.meta) == ({"crow": {"output": 1}}, {"crow": {"output": "two"}})
    assert not third.meta


async def test_other_calls_of_the_same_reply_still_run():
    tools = FastMCP("birds")
    seen: list[str] = []

    @tools.tool
    def look(at: str) -> str:
        seen.append(at)
        return "a crow"

    replies = [Reply(tool_calls=[call("give_result", result=1), call("birds_look", at="roof")])]
    crow = Crow(ScriptedModel(replies), servers=[Server("birds", lambda: tools)]).use(structured_output)
    async with connect(crow) as editor:
        id = (await editor.new_session("/tmp")).session_id
        assert (await editor.prompt(id, "Look.", ask(INTEGER))).meta == {"crow": {"output": 1}}
    assert seen == ["roof"]


async def test_cancelled_turn_has_no_result():
    async with connect(Crow(ScriptedModel([Reply("Hm", hang=True), give(1)])).use(structured_output)) as editor:
        id = (await editor.new_session("/tmp")).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "Go.", ask(INTEGER)))
        await editor.until(lambda editor: editor.text == "Hm")
        await editor.cancel(id)
        response = await turn
        assert (response.stop_reason, "output" in (response.meta or {}).get("crow", {})) == ("cancelled", False)
        assert (await editor.prompt(id, "Go.", ask(INTEGER))).meta == {"crow": {"output": 1}}


async def test_second_call_does_not_replace_the_result():
    replies = [Reply(tool_calls=[call("give_result", result=1), call("give_result", result=2)])]
    async with connect(Crow(ScriptedModel(replies)).use(structured_output)) as editor:
        id = (await editor.new_session("/tmp")).session_id
        assert (await editor.prompt(id, "Go.", ask(INTEGER))).meta["crow"]["output"] in (1, 2)


@given(JSON)
def test_any_value_passes_a_schema_that_allows_all(value: Any):
    schema = OutputSchema({})
    assert schema.is_wrapped
    assert schema.accept({"result": value}) == value


@given(st.text())
def test_reading_a_text_raises_only_value_errors(text: str):
    for schema in (INTEGER, TREE, {"type": "object"}):
        with suppress(ValueError):
            OutputSchema(schema).accept_text(text)


@given(JSON)
def test_no_schema_makes_the_check_fail_otherwise(schema: Any):
    try:
        check_schema(schema)
    except ValueError:
        return
    list_faults({"a": [1, None]}, schema)
    assert OutputSchema(schema).parameters["type"] == "object"


@pytest.mark.parametrize(
    "given",
    [
        {"size": 3},
        {"result": {"size": 3}},
        {"arguments": {"size": 3}},
        {"name": "give_result", "arguments": {"size": 3}},
        {"name": "give_result", "parameters": {"result": {"size": 3}}},
    ],
)
def test_result_in_a_needless_wrapper_is_taken_out(given: Any):
    schema = OutputSchema({"type": "object", "properties": {"size": INTEGER}, "required": ["size"]})
    assert schema.accept(given) == {"size": 3}


def test_property_that_is_called_like_a_wrapper_stays():
    schema = OutputSchema({"type": "object", "properties": {"result": {"type": "object"}}, "required": ["result"]})
    assert schema.accept({"result": {"result": {}}}) == {"result": {"result": {}}}


def test_fault_is_that_of_the_value_as_it_was_given():
    schema = OutputSchema({"type": "object", "properties": {"size": INTEGER}, "required": ["size"]})
    with pytest.raises(ValueError, match=r"^the result: 'size' is a required property$"):
        schema.accept({"result": {"size": "x"}})


def test_deep_value_is_accepted_or_a_fault():
    value: dict[str, Any] = {}
    for _ in range(45):
        value = {"children": [value]}
    assert OutputSchema(TREE).accept(value) == value
    for _ in range(2_000):
        value = {"children": [value]}
    assert list_faults(value, TREE) == ["the result: it is nested too deeply"]


def test_fault_of_a_union_is_that_of_the_nearest_choice():
    schema: dict[str, Any] = {
        "anyOf": [
            {"type": "object", "properties": {"n": INTEGER}, "required": ["n"]},
            {"type": "array", "items": INTEGER},
        ]
    }
    assert list_faults([1, "x"], schema) == ["[1]: 'x' is not of type 'integer'"]


def test_many_faults_are_cut():
    faults = list_faults(["x" * 1000] * 50, {"type": "array", "items": INTEGER})
    assert len(faults) == 11
    assert faults[-1] == "and 40 more"
    assert all(len(fault) < 400 for fault in faults)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ('Here: {"a": 1}. Done.', {"a": 1}),
        ("The list is [1, 2].", [1, 2]),
        ("First\n```json\n{}\n```\nthen better\n```\n[3]\n```\n", [3]),
        ('"text"', "text"),
    ],
)
def test_json_is_found_in_a_text(text: str, value: Any):
    assert find_json(text) == value


def test_reference_to_the_root_follows_the_schema_into_the_wrapper():
    schema = OutputSchema({"type": "array", "items": {"$ref": "#"}})
    assert schema.parameters["properties"]["result"]["items"] == {"$ref": "#/properties/result"}
    check_schema(schema.parameters)


def test_unknown_draft_and_draft_7_are_checked():
    for draft in ("http://json-schema.org/draft-07/schema#", "https://example.com/my-own-draft"):
        check_schema(schema := {"$schema": draft, **INTEGER})
        assert list_faults("x", schema)
