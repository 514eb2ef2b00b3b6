"""Arguments of tool calls on their way from the model to a tool."""

import json
from pathlib import Path
from typing import Any

import pytest
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_system.arguments import fit_arguments
from fastmcp import FastMCP
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "sure": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"$ref": "#/$defs/place"},
        "any": {},
        "either": {"type": ["string", "integer"]},
    },
    "required": ["text"],
    "$defs": {"place": {"type": "object", "properties": {"line": {"type": "integer"}}}},
}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"text": "5", "count": "5"}, {"text": "5", "count": 5}),
        ({"text": 5, "count": "-5.0"}, {"text": "5", "count": -5}),
        ({"text": "null", "count": "null"}, {"text": "null"}),
        ({"text": "", "count": "", "sure": None}, {"text": ""}),
        ({"text": "a", "ratio": "0.5", "sure": "True"}, {"text": "a", "ratio": 0.5, "sure": True}),
        ({"text": "a", "ratio": None}, {"text": "a", "ratio": None}),
        ({"text": "[1]", "tags": '["a", 5]'}, {"text": "[1]", "tags": ["a", "5"]}),
        ({"text": "a", "tags": "['a']"}, {"text": "a", "tags": ["a"]}),
        ({"text": "a", "place": '{"line": "5"}'}, {"text": "a", "place": {"line": 5}}),
        ({"text": "a", "any": "5", "either": "5"}, {"text": "a", "any": "5", "either": "5"}),
        ({"text": None, "other": "[1]"}, {"text": None, "other": "[1]"}),
        ({"text": "a", "count": "5s", "tags": '["\\ud800"]'}, {"text": "a", "count": "5s", "tags": '["\\ud800"]'}),
        ({"text": "a", "count": "5.5", "sure": "yes"}, {"text": "a", "count": "5.5", "sure": "yes"}),
        ({"text": "a", "tags": "[" * 5000}, {"text": "a", "tags": "[" * 5000}),
    ],
)
def test_values_get_the_types_of_the_schema_and_keep_what_does_not_fit(sent: dict[str, Any], expected: dict[str, Any]):
    assert fit_arguments(sent, SCHEMA) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(sorted(SCHEMA["properties"])), JSON), JSON)
def test_any_arguments_and_any_schema_are_survived(arguments: dict[str, Any], schema: Any):
    fitted = fit_arguments(arguments, SCHEMA)
    assert fit_arguments(fitted, SCHEMA) == fitted
    fit_arguments({"a": arguments}, {"properties": {"a": schema}, "required": schema, "$defs": {}})


async def test_values_reach_a_tool_of_any_server_in_its_types(tmp_path: Path):
    birds = FastMCP("birds")

    @birds.tool
    def sing(song: str, times: int = 1, parts: list[int] | None = None, loud: bool = False) -> str:
        return f"{song!r} {times!r} {parts!r} {loud!r}"

    use: Use = {
        "name": "birds_sing",
        "arguments": {"song": "[1]", "times": "2", "parts": "[1, 2]", "loud": "true"},
    }
    model = ScriptedModel([Reply(tool_calls=[use]), Reply("Done.")])
    async with connect(Crow(model, servers=[Server("birds", lambda: birds)])) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "go")
    call, answer = model.requests[-1]["messages"][-2:]
    assert answer["content"] == "'[1]' 2 [1, 2] True"
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == use["arguments"]  # as the model wrote them


@pytest.mark.parametrize("name", ["todo_write", "TodoWrite"])
async def test_tool_of_another_agent_is_refused_with_the_name_of_ours(tmp_path: Path, name: str):
    definition = {
        "name": "plan",
        "inputSchema": {"type": "object", "properties": {"entries": {"type": "array"}}},
        "_meta": {"crow/replaces": ["todo_write"]},
    }
    for built_in in (True, False):
        model = ScriptedModel([Reply(tool_calls=[{"name": name, "arguments": {}}]), Reply("Done.")])
        server = Server("ours", None, definitions=[definition], built_in=built_in)
        async with connect(Crow(model, servers=[server])) as editor:
            session = await editor.new_session(str(tmp_path))
            await editor.prompt(session.session_id, "go")
        answer = model.requests[-1]["messages"][-1]["content"]
        assert answer.startswith(f"There is no tool {name!r}.")
        assert ("Use plan, whose arguments are: entries." in answer) == built_in
