"""Quirks: from the shipped rules, the configuration and refusals, and the requests that they change."""

import asyncio
import copy
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import stamina
from crow_agent.settings.discovery import to_chat_model
from crow_agent.settings.structs import ModelSettings
from crow_core.errors import ConfigError, ModelError
from crow_core.messages.message import Delta
from crow_core.models.adaptation import adapt_request
from crow_core.models.chat_model import ChatModel, get_window
from crow_core.models.model_call import ModelCall
from crow_core.models.quirks import Body, Quirks, find_quirks, load_rules
from crow_core.models.refusals import learn_from_refusal
from crow_core.testing import Failure, Raw, Reply, ScriptedServer
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
NESTED = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}, "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    "required": ["place"],
    "$defs": {"Place": {"title": "Place", "type": "object", "properties": {"name": {"type": "string"}}}},
    "$schema": "https://json-schema.org/draft/2020-12/schema",
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": NESTED}}


def conversation() -> list[dict[str, Any]]:
    """Return messages of every kind, before they are adapted."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    return [
        {"role": "system", "content": "You are crow."},
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "reasoning_content": "Let me look.", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": [{"type": "text", "text": "the picture:"}, IMAGE]},
        {"role": "assistant", "reasoning_content": "No cloud.", "content": "It will not."},
        {"role": "user", "content": "Sure?"},
    ]


def body(**more: Any) -> Body:
    return {
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 99,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [TOOL],
        **more,
        "messages": conversation(),
    }


def adapt(**quirks: Any) -> Body:
    return adapt_request(body(), Quirks(**quirks))


def said(messages: list[dict[str, Any]], key: str) -> list[Any]:
    return [message.get(key) for message in messages if message["role"] == "assistant"]


def test_default_quirks_remove_only_the_reasoning() -> None:
    sent = adapt()
    assert said(sent["messages"], "reasoning_content") == [None, None]
    assert {key: value for key, value in sent.items() if key != "messages"} == {
        key: value for key, value in body().items() if key != "messages"
    }
    assert list(sent)[-1] == "messages"


@pytest.mark.parametrize(
    ("quirks", "key", "echoed"),
    [
        ({"echo": "always"}, "reasoning_content", ["Let me look.", "No cloud."]),
        ({"echo": "tool_calls"}, "reasoning_content", ["Let me look.", None]),
        ({"echo": "always", "reasoning": "reasoning"}, "reasoning", ["Let me look.", "No cloud."]),
        (
            {"echo": "tags"},
            "content",
            ["<think>\nLet me look.\n</think>\n\n", "<think>\nNo cloud.\n</think>\n\nIt will not."],
        ),
    ],
)
def test_reasoning_is_sent_back_in_the_form_of_the_endpoint(quirks: Any, key: str, echoed: list[Any]) -> None:
    assert said(adapt(**quirks)["messages"], key) == echoed


def test_limit_of_a_reply_has_the_endpoints_name_for_it() -> None:
    sent = adapt(max_tokens="max_completion_tokens")
    assert (sent["max_completion_tokens"], "max_tokens" in sent) == (99, False)
    assert adapt_request(body() | {"max_completion_tokens": 9, "max_tokens": None}, Quirks())["max_tokens"] == 9
    assert "max_tokens" not in adapt_request({"messages": []}, Quirks())


def test_temperature_and_usage_are_left_out_if_they_are_refused() -> None:
    sent = adapt(temperature=False, stream_usage=False)
    assert not sent.keys() & {"temperature", "top_p", "stream_options"}


def test_parallel_tool_calls_are_switched_off_only_with_tools() -> None:
    assert adapt(parallel_calls=False)["parallel_tool_calls"] is False
    assert "parallel_tool_calls" not in adapt_request({"messages": []}, Quirks(parallel_calls=False))


def test_plain_schemas_hold_no_references_and_no_choices() -> None:
    (tool,) = adapt(schemas="plain")["tools"]
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "place": {"type": "object", "properties": {"name": {"type": "string"}}},
            "unit": {"type": "string"},
        },
        "required": ["place"],
    }
    assert tool["function"]["description"] == "The weather."


def parameters(schema: dict[str, Any]) -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return adapt_request({"tools": [tool], "messages": []}, Quirks(schemas="plain"))["tools"][0]["function"][
        "parameters"
    ]


def test_plain_schema_merges_all_of() -> None:
    parts = [{"properties": {"a": {"type": "string"}}, "required": ["a"]}, {"properties": {"b": {"const": 1}}}]
    assert parameters({"type": "object", "allOf": parts}) == {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"enum": [1]}},
        "required": ["a"],
    }


def test_properties_named_like_keywords_stay() -> None:
    names = {"title": {"type": "string"}, "default": {"type": "string"}, "definitions": {"type": "string"}}
    assert parameters({"type": "object", "properties": names})["properties"] == names


def test_schema_that_refers_to_itself_is_cut() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/T"}, "right": {"$ref": "#/$defs/T"}}}
    assert "$ref" not in json.dumps(parameters({"$ref": "#/$defs/T", "$defs": {"T": tree}}))


def test_schema_with_exponential_references_stays_small() -> None:
    bomb = {str(n): {"properties": {str(k): {"$ref": f"#/$defs/{n + 1}"} for k in range(50)}} for n in range(50)}
    assert len(json.dumps(parameters({"$ref": "#/$defs/0", "$defs": bomb}))) < 1_000_000


anything = st.recursive(
    st.sampled_from([None, True, 7, "string", "#/$defs/x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["$ref", "anyOf", "oneOf", "allOf", "type", "items", "properties", "const", "x", "required"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["properties", "anyOf", "allOf", "items", "type", "$ref"]), anything))
def test_any_schema_becomes_a_plain_one(schema: dict[str, Any]) -> None:
    plain = parameters(schema)
    assert isinstance(plain, dict)
    assert parameters(plain) == plain


def test_content_gets_one_form() -> None:
    messages = adapt(content="parts")["messages"]
    assert all(isinstance(message["content"], list) for message in messages if message["content"] is not None)
    assert messages[2]["content"] is None, "no empty text"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (
        adapt_request({"messages": [{"role": "user", "content": parts}]}, Quirks())["messages"][0]["content"]
        == "a\n\nb"
    )


def test_images_are_replaced_by_a_note_for_a_model_that_does_not_take_them() -> None:
    assert adapt(images=False)["messages"][4]["content"] == ("the picture:\n\n[an image, which this model cannot see]")
    assert adapt()["messages"][4]["content"][1] == IMAGE


def test_audio_is_replaced_by_a_note_and_images_stay() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    given = {"messages": [{"role": "user", "content": [sound, IMAGE]}]}
    note = {"type": "text", "text": "[a sound, which this model cannot hear]"}
    assert adapt_request(given, Quirks())["messages"][0]["content"] == [note, IMAGE]
    assert adapt_request(given, Quirks(audio=True))["messages"][0]["content"] == [sound, IMAGE]


@pytest.mark.parametrize(
    ("role", "first"),
    [
        ("system", {"role": "system", "content": "You are crow."}),
        ("developer", {"role": "developer", "content": "You are crow."}),
        ("user", {"role": "user", "content": "You are crow.\n\nWill it rain?"}),
    ],
)
def test_system_prompt_is_sent_in_the_role_that_the_endpoint_takes(role: str, first: Any) -> None:
    assert adapt(system_role=role)["messages"][0] == first


def test_system_prompt_before_an_image_is_a_separate_part() -> None:
    messages = [{"role": "system", "content": "You are crow."}, {"role": "user", "content": [IMAGE]}]
    (only,) = adapt_request({"messages": messages}, Quirks(system_role="user"))["messages"]
    assert only["content"] == [{"type": "text", "text": "You are crow."}, IMAGE]


def test_tool_call_ids_of_nine_characters_still_match_their_results() -> None:
    messages = adapt(call_ids="nine")["messages"]
    id = messages[2]["tool_calls"][0]["id"]
    assert (len(id), id.isalnum(), messages[3]["tool_call_id"]) == (9, True, id)


every_quirk = st.builds(
    Quirks,
    reasoning=st.sampled_from(["reasoning_content", "reasoning"]),
    echo=st.sampled_from(["never", "tool_calls", "always", "tags"]),
    max_tokens=st.sampled_from(["max_tokens", "max_completion_tokens"]),
    stream_usage=st.booleans(),
    parallel_calls=st.booleans(),
    schemas=st.sampled_from(["full", "plain"]),
    content=st.sampled_from(["text", "parts"]),
    images=st.booleans(),
    audio=st.booleans(),
    system_role=st.sampled_from(["system", "developer", "user"]),
    temperature=st.booleans(),
    call_ids=st.sampled_from(["any", "nine"]),
)


@given(every_quirk)
def test_adapting_copies_the_body_and_adapting_again_changes_nothing(quirks: Quirks) -> None:
    given_body, before = body(), copy.deepcopy(body())
    sent = adapt_request(given_body, quirks)
    assert given_body == before
    assert adapt_request(sent, quirks) == sent


@given(every_quirk, st.integers(2, 6))
def test_next_request_begins_with_the_bytes_of_the_one_before_under_every_quirk(quirks: Quirks, length: int) -> None:
    def sent(messages: list[dict[str, Any]]) -> tuple[str, Any]:
        adapted = adapt_request({**body(), "messages": messages}, quirks)
        return json.dumps(adapted, ensure_ascii=False), adapted["messages"][-1]

    earlier, last = sent(conversation()[:length])
    later, _ = sent(conversation()[: length + 1])
    assert later.startswith(earlier[: earlier.rindex(json.dumps(last, ensure_ascii=False))])


def test_every_shipped_rule_has_valid_quirks() -> None:
    assert load_rules()
    for rule in load_rules():
        assert msgspec.convert(rule.quirks, Quirks)
        assert (rule.host, rule.model) != ("*", "*")


def test_later_rules_override_earlier_ones_and_settings_override_rules() -> None:
    assert find_quirks("http://localhost:8080/v1", "gpt-5-mini").reasoning == "reasoning_content"
    both = find_quirks("https://openrouter.ai/api/v1", "openai/gpt-5-mini")
    assert (both.max_tokens, both.effort) == ("max_completion_tokens", "reasoning.effort"), "family, then host"
    own = find_quirks("https://openrouter.ai/api/v1", "openai/gpt-5-mini", {"effort": "", "window": 9})
    assert (own.effort, own.window, own.max_tokens) == ("", 9, "max_completion_tokens")


@pytest.mark.parametrize(
    ("url", "name", "quirk", "value"),
    [
        ("https://api.mistral.ai/v1", "devstral", "call_ids", "nine"),
        ("https://api.deepseek.com", "deepseek-reasoner", "echo", "tool_calls"),
        ("http://localhost:11434/v1", "gemma3:4b", "system_role", "user"),
        ("http://localhost:8000/v1", "openai/gpt-oss-120b", "echo", "tool_calls"),
        ("https://api.openai.com/v1", "o3-mini", "temperature", False),
        ("https://api.openai.com/v1", "gpt-4.1-mini", "window", 1047576),
        ("https://api.openai.com/v1", "gpt-4", "window", 8192),
        ("https://generativelanguage.googleapis.com/v1beta/openai", "gemini-3-pro", "schemas", "plain"),
        ("http://localhost:8000/v1", "qwen3-coder", "echo", "never"),
    ],
)
def test_rules_for_hosts_and_families_apply(url: str, name: str, quirk: str, value: Any) -> None:
    assert getattr(find_quirks(url, name), quirk) == value


@pytest.mark.parametrize("wrong", [{"echo": "sometimes"}, {"colour": "blue"}, {"window": "large"}])
def test_unknown_quirk_is_an_error_that_names_the_model(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^config\.toml, \[models\.local\.quirks\]: .*(echo|colour|window)"):
        to_chat_model("local", ModelSettings(base_url="http://localhost/v1", model="m", quirks=wrong))


def test_window_of_the_quirks_does_not_count_for_a_local_server() -> None:
    far, near = "https://api.deepseek.com", "http://localhost:11434/v1"
    assert (
        get_window(ChatModel(name="deepseek-chat", base_url=far, quirks=find_quirks(far, "deepseek-chat"))) == 128_000
    )
    assert get_window(ChatModel(name="deepseek-chat", base_url=near, quirks=find_quirks(near, "deepseek-chat"))) is None
    assert get_window(ChatModel(name="m", base_url=far, window=5, quirks=Quirks(window=9))) == 5


# Refusals, quoted from public reports about the servers.

REFUSALS: list[tuple[str, int, Any, dict[str, Any], dict[str, Any]]] = [
    (
        "OpenAI: the limit has another name",
        400,
        {
            "error": {
                "message": "Unsupported parameter: 'max_tokens' is not supported with this model. "
                "Use 'max_completion_tokens' instead.",
                "type": "invalid_request_error",
                "param": "max_tokens",
                "code": "unsupported_parameter",
            }
        },
        {},
        {"max_tokens": "max_completion_tokens"},
    ),
    (
        "OpenAI: only the default temperature",
        400,
        {
            "error": {
                "message": "Unsupported value: 'temperature' does not support 0.5 with this model. "
                "Only the default (1) value is supported.",
                "type": "invalid_request_error",
                "param": "temperature",
                "code": "unsupported_value",
            }
        },
        {},
        {"temperature": False},
    ),
    (
        "OpenAI: no system role",
        400,
        {"error": {"message": "Unsupported value: 'messages[0].role' does not support 'system' with this model."}},
        {},
        {"system_role": "user"},
    ),
    (
        "vLLM: no developer role",
        400,
        {"object": "error", "message": "Unexpected message role 'developer'.", "type": "BadRequestError", "code": 400},
        {"system_role": "developer"},
        {"system_role": "system"},
    ),
    (
        "Pydantic: no developer role",
        422,
        {
            "detail": [
                {
                    "type": "literal_error",
                    "loc": ["body", "messages", 0, "role"],
                    "msg": "Input should be 'system', 'user', 'assistant' or 'tool'",
                    "input": "developer",
                }
            ]
        },
        {"system_role": "developer"},
        {"system_role": "system"},
    ),
    (
        "llama.cpp: a template without a system role",
        500,
        {"error": {"code": 500, "message": "System role not supported", "type": "server_error"}},
        {},
        {"system_role": "user"},
    ),
    (
        "Gemini: no instructions for Gemma",
        400,
        [{"error": {"code": 400, "message": "Developer instruction is not enabled for models/gemma-3-27b-it"}}],
        {},
        {"system_role": "user"},
    ),
    (
        "llama.cpp: no projector for images",
        500,
        {
            "error": {
                "code": 500,
                "message": "image input is not supported - hint: you may need to provide the mmproj",
                "type": "server_error",
            }
        },
        {},
        {"images": False},
    ),
    (
        "OpenRouter: no images",
        404,
        {"error": {"message": "No endpoints found that support image input", "code": 404}},
        {},
        {"images": False},
    ),
    (
        "DeepSeek: no images",
        400,
        {
            "error": {
                "message": "Failed to deserialize the JSON body into the target type: messages[4]: unknown variant "
                "`image_url`, expected `text` at line 1 column 4021",
                "type": "invalid_request_error",
            }
        },
        {},
        {"images": False},
    ),
    (
        "vLLM: no images",
        400,
        {"object": "error", "message": "At most 0 image(s) may be provided in one request.", "code": 400},
        {},
        {"images": False},
    ),
    (
        "Mistral: an extra parameter",
        422,
        {
            "object": "error",
            "message": {
                "detail": [
                    {
                        "type": "extra_forbidden",
                        "loc": ["body", "stream_options"],
                        "msg": "Extra inputs are not permitted",
                        "input": {"include_usage": True},
                    }
                ]
            },
            "type": "invalid_request_error",
        },
        {},
        {"stream_usage": False},
    ),
    (
        "Mistral: call ids",
        400,
        {
            "object": "error",
            "message": "Tool call id was call_1 but must be a-z, A-Z, 0-9, with a length of 9.",
            "type": "invalid_function_call",
        },
        {},
        {"call_ids": "nine"},
    ),
    (
        "DeepSeek: reasoning wanted back",
        400,
        {
            "error": {
                "message": "The `reasoning_content` in the thinking mode must be passed back to the API.",
                "type": "invalid_request_error",
            }
        },
        {},
        {"echo": "always", "reasoning": "reasoning_content"},
    ),
    (
        "OpenRouter: what DeepSeek behind it said",
        400,
        {
            "error": {
                "message": "Provider returned error",
                "code": 400,
                "metadata": {
                    "raw": '{"error":{"message":"The `reasoning_content` in the thinking mode must be passed back."}}'
                },
            }
        },
        {},
        {"echo": "always"},
    ),
    (
        "Moonshot: reasoning missing",
        400,
        {"error": {"message": "thinking is enabled but reasoning_content is missing in assistant message at index 2"}},
        {},
        {"echo": "always"},
    ),
    (
        "Groq: reasoning not wanted",
        400,
        {
            "error": {
                "message": "'messages.2' : for 'role:assistant' the following must be satisfied[('messages.2' : "
                "property 'reasoning_content' is unsupported)]",
                "type": "invalid_request_error",
            }
        },
        {"echo": "always"},
        {"echo": "never"},
    ),
    (
        "Gemini: references in a schema",
        400,
        [
            {
                "error": {
                    "code": 400,
                    "message": 'Invalid JSON payload received. Unknown name "$ref" at '
                    "'tools.function_declarations[0].parameters.properties[0].value': Cannot find field.",
                    "status": "INVALID_ARGUMENT",
                }
            }
        ],
        {},
        {"schemas": "plain"},
    ),
    (
        "llama.cpp: a grammar that cannot be made",
        400,
        {"error": {"code": 400, "message": 'JSON schema conversion failed:\nUnrecognized schema: {"anyOf":[]}'}},
        {},
        {"schemas": "plain"},
    ),
    (
        "OpenAI: a function's schema",
        400,
        {"error": {"message": "Invalid schema for function 'weather': $ref must resolve.", "param": "tools[0]"}},
        {},
        {"schemas": "plain"},
    ),
    (
        "a strict server: content as parts",
        422,
        {"detail": [{"loc": ["body", "messages", 1, "content"], "msg": "Input should be a valid list"}]},
        {},
        {"content": "parts"},
    ),
    (
        "a strict server: content as text",
        422,
        {"detail": [{"loc": ["body", "messages", 1, "content"], "msg": "Input should be a valid string"}]},
        {"content": "parts", "images": False},
        {"content": "text"},
    ),
    (
        "TGI: no stream options",
        422,
        "Failed to deserialize the JSON body into the target type: unknown field `stream_options`",
        {},
        {"stream_usage": False},
    ),
]


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    with stamina.set_testing(True, attempts=100, cap=True):
        yield


async def run_call(model: ChatModel, request: dict[str, Any]) -> tuple[ModelCall, list[str]]:
    """Run a model call; return it and its notices."""
    call, notices = ModelCall(model, request), list[str]()

    async def tell(delta: Delta) -> None:
        notices.extend([delta["notice"]] if "notice" in delta else [])

    await call.run(tell)
    return call, notices


def request() -> dict[str, Any]:
    return {"temperature": 0.5, "max_tokens": 99, "tools": [TOOL], "messages": conversation()}


@pytest.mark.parametrize(
    ("status", "refusal", "before", "learned"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS]
)
async def test_refusal_changes_the_quirks_once_with_a_notice(
    status: int, refusal: Any, before: dict[str, Any], learned: dict[str, Any]
) -> None:
    """The second request succeeds, and so does the next prompt's first one."""
    answers = [Failure(status, refusal), Reply("Hi"), Reply("Hi")]
    async with ScriptedServer(answers) as server:
        model = ChatModel(name="m", base_url=server.url, quirks=Quirks(**before))
        try:
            _, notices = await run_call(model, request())
            _, later = await run_call(model, request())
        finally:
            await model.close()
        assert len(server.requests) == 3
        assert server.requests[0] != server.requests[1] == server.requests[2]
    assert {name: getattr(model.quirks, name) for name in learned} == learned
    (notice,) = notices
    assert notice.startswith(server.url)
    assert notice.endswith(f"({status}). Asking again now.")
    assert later == []


async def test_parameter_that_is_refused_by_name_is_left_out() -> None:
    def script(asked: dict[str, Any]) -> Reply | Failure:
        if "top_k" in asked:
            return Failure(400, {"error": {"message": "property 'top_k' is unsupported"}})
        return Reply("Hi")

    async with ScriptedServer(script) as server:
        model = ChatModel(name="m", base_url=server.url, parameters={"top_k": 5, "seed": 1})
        _, notices = await run_call(model, request())
        await model.close()
    assert server.requests[1]["seed"] == 1
    assert notices == [f"{server.url} does not take top_k; it is left out from now on (400). Asking again now."]


async def test_same_refusal_again_is_an_error_and_not_a_loop() -> None:
    refusal = Failure(400, {"error": {"message": "'temperature' is not supported; also reasoning_content is missing"}})
    async with ScriptedServer(lambda asked: refusal) as server:
        model = ChatModel(name="m", base_url=server.url)
        with pytest.raises(ModelError, match="refused the request"):
            await run_call(model, request())
        await model.close()
        assert len(server.requests) == 2


async def test_refusal_that_another_session_has_learned_from_is_retried() -> None:
    refusal = Failure(400, {"error": {"message": "'temperature' is not supported"}})

    async def script(asked: dict[str, Any]) -> Reply | Failure:
        """Refuse two requests that are under way together, the second after the first has taught its lesson."""
        if "temperature" not in asked:
            return Reply("Hi")
        wanted = next(numbers)
        await server.until(lambda: len(server.requests) >= wanted)
        return refusal

    numbers = iter((2, 3))
    async with ScriptedServer(script) as server:
        model = ChatModel(name="m", base_url=server.url)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(run_call(model, request())) for _ in range(2)]
        await model.close()
    notices = [call.result()[1] for call in calls]
    assert sorted(notice.partition(" ")[2] for (notice,) in notices) == [
        "does not take temperature; it is left out from now on (400). Asking again now.",
        "refused what it had just refused in another session (400). Asking again now.",
    ]


@pytest.mark.parametrize(
    "after",
    [
        Failure(400, {"error": {"message": "'temperature' is not supported (request 2)"}}),
        Failure(400, {"error": {"message": "Invalid 'messages[2].content': it is empty."}}),
        Failure(503, "down", {"x-should-retry": "false"}),
        Raw([b'data: {"error": {"message": "no"}}\n\n']),
    ],
    ids=["same", "other", "down", "stream"],
)
async def test_lesson_after_which_no_request_is_answered_is_unlearned(after: Failure | Raw) -> None:
    refusal = Failure(400, {"error": {"message": "'temperature' is not supported (request 1)"}})
    async with ScriptedServer([refusal, after, Reply("Hi")]) as server:
        model = ChatModel(name="m", base_url=server.url)
        with pytest.raises(ModelError):
            await run_call(model, request())
        assert model.quirks == Quirks()
        await run_call(model, request())
        await model.close()
    assert [("temperature" in asked) for asked in server.requests] == [True, False, True]


async def test_refused_parameter_is_sent_again_if_leaving_it_out_does_not_help() -> None:
    refusal = Failure(400, {"error": {"message": "property 'top_k' is unsupported"}})
    async with ScriptedServer(lambda asked: refusal) as server:
        model = ChatModel(name="m", base_url=server.url, parameters={"top_k": 5})
        with pytest.raises(ModelError, match="refused the request"):
            await run_call(model, request())
        await model.close()
        assert len(server.requests) == 2
    assert model.refused_parameters == set()


async def test_lessons_that_help_together_are_kept() -> None:
    def script(asked: dict[str, Any]) -> Reply | Failure:
        for name in ("temperature", "stream_options", "max_tokens"):
            if name in asked:
                return Failure(400, {"error": {"message": f"Unknown parameter: '{name}'.", "param": name}})
        return Reply("Hi")

    async with ScriptedServer(script) as server:
        model = ChatModel(name="m", base_url=server.url)
        await run_call(model, request())
        await run_call(model, request())
        await model.close()
        assert len(server.requests) == 5
    assert model.quirks == Quirks(temperature=False, stream_usage=False, max_tokens="max_completion_tokens")


async def test_lesson_after_which_an_empty_answer_comes_is_kept() -> None:
    refusal = Failure(400, {"error": {"message": "'temperature' is not supported"}})
    async with ScriptedServer([refusal, Reply()]) as server:
        model = ChatModel(name="m", base_url=server.url)
        await run_call(model, request())
        await model.close()
    assert model.quirks == Quirks(temperature=False)


async def test_cancelled_call_unlearns_what_was_not_confirmed() -> None:
    refusal = Failure(400, {"error": {"message": "'temperature' is not supported"}})
    async with ScriptedServer([refusal, Raw([], hang=True)]) as server:
        model = ChatModel(name="m", base_url=server.url)
        calling = asyncio.create_task(run_call(model, request()))
        await server.until(lambda: len(server.requests) == 2)
        assert model.quirks == Quirks(temperature=False)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await model.close()
    assert model.quirks == Quirks()


UNCLEAR: list[Any] = [
    {"error": {"message": "Bad request"}},
    {"error": {"message": "The server had an error while processing your request. Sorry about that!"}},
    "<html><body>400: your schema and temperature are not supported here</body></html>",
    {
        "error": {
            "message": "This model's maximum context length is 8192 tokens, however you requested 9000 tokens. "
            "'max_tokens' or 'max_completion_tokens' is too large: 99.",
        }
    },
    {"error": {"message": "temperature must be between 0 and 2"}},
    {"error": {"message": "Invalid max_tokens value, the valid range of max_tokens is [1, 8192]"}},
    {"error": {"message": "the request exceeds the available context size. try increasing the context size"}},
    {"error": {"message": "Conversation roles must alternate user/assistant/user/assistant/..."}},
    {
        "detail": [
            {
                "type": "missing",
                "loc": ["body", "user"],
                "msg": "Field required",
                "input": {"messages": [{"content": "The temperature is not supported by the stream_options schema."}]},
            }
        ]
    },
    {"error": {"message": "This model does not support reasoning."}},
    {"error": {"message": "Invalid 'messages[2].content': it is empty."}},
    "",
    # the model's own slips
    {
        "error": {
            "message": "Tool call validation failed: tool call validation failed: parameters for tool weather did not "
            "match schema: errors: [missing properties: 'place', additionalProperties 'x' not allowed]",
            "type": "invalid_request_error",
            "code": "tool_use_failed",
            "failed_generation": '<function=weather>{"temperature": "is not supported by this JSON schema"}',
        }
    },
    {"error": {"message": "tool call validation failed: attempted to call tool 'x' which was not in request.tools"}},
    {"error": {"message": "Failed to call a function. Please adjust your prompt. See 'failed_generation'."}},
    {"error": {"message": "The tool call arguments do not match the tool's input schema."}},
    {"error": {"message": "Invalid arguments for function weather: 'place' is required by the JSON schema"}},
    {"error": {"message": "The model produced a function call that does not conform to the parameters' schema"}},
    {"error": {"message": "Generated output does not match the provided json schema", "code": "json_validate_failed"}},
    # the order of messages
    {"error": {"message": "Unexpected role 'system' after role 'user'", "type": "invalid_request_message_order"}},
    {"error": {"message": "Unexpected role 'user' after role 'tool'"}},
    {"object": "error", "message": "System message must be at the beginning.", "code": 400},
    {"error": {"message": "Invalid request: system messages are only allowed at the start of the conversation"}},
    {
        "error": {
            "message": "After the optional system message, conversation roles must alternate user/assistant; invalid"
        }
    },
    {
        "error": {
            "message": "Only user, assistant and tool roles are supported, except an initial optional system message!"
        }
    },
    {
        "error": {
            "message": "messages with role 'tool' must follow a message with 'tool_calls'; unexpected system message"
        }
    },
    {"error": {"message": "Multiple system messages are not supported"}},
    # one image
    {"error": {"message": "Unsupported image format image/x-icon. Allowed are png and jpeg."}},
    {"error": {"message": "Could not process image"}},
    {"error": {"message": "Failed to download image from https://x.example/a.png: invalid status"}},
    {"error": {"message": "Invalid image: the image data you provided does not represent a valid image."}},
    {"error": {"message": "The image dimensions are not supported."}},
    {
        "error": {
            "message": "Invalid 'messages[2]'. Image URLs are only allowed for messages with role 'user', but this "
            "message with role 'tool' contains an image URL.",
            "param": "messages[2]",
        }
    },
    # what names a parameter, but not as the cause
    {
        "error": {
            "message": "Invalid type for 'messages[3].content': expected a string or a list of parts, but got null."
        }
    },
    {"error": {"message": "reasoning.effort must be one of low, medium, high"}},
    {"error": {"message": "Reasoning is required for this model."}},
    {"error": {"message": "Unsupported 'messages[0]': stop, user and temperature", "param": "messages[0]"}},
    {"error": {"message": "Invalid value: max_tokens must be positive"}},
    {"error": {"message": "Unexpected value. See https://developers.x.example/errors."}},
    {"error": {"message": "stream_options is fine"}},
]


@pytest.mark.parametrize("refusal", UNCLEAR, ids=lambda refusal: json.dumps(refusal)[:60])
def test_refusal_that_is_not_clear_changes_nothing(refusal: Any) -> None:
    text = refusal if isinstance(refusal, str) else json.dumps(refusal)
    asked = {**body(user="me", stop=["x"]), "messages": conversation()}
    assert learn_from_refusal(text, asked, Quirks()) is None
    assert learn_from_refusal(text, asked, Quirks(system_role="developer")) is None


@pytest.mark.parametrize(
    ("message", "learned"),
    [
        ("Only user and assistant roles are supported!", {"system_role": "user"}),
        ("m-9 does not support image inputs", {"images": False}),
        ("m-9 is not a multimodal model", {"images": False}),
        ("invalid content type. image_url is only supported by certain models.", {"images": False}),
        ("This is a text-only model; image input was given", {"images": False}),
        ("tools.0.custom.input_schema: JSON schema is invalid", {"schemas": "plain"}),
        ("Invalid parameters schema for tool weather: $ref is not supported", {"schemas": "plain"}),
        ("failed to parse grammar", {"schemas": "plain"}),
        ("invalid temperature: only 1 is allowed for this model", {"temperature": False}),
        ("Unrecognized request argument supplied: stream_options", {"stream_usage": False}),
    ],
)
def test_refusal_in_other_words_is_clear(message: str, learned: dict[str, Any]) -> None:
    found = learn_from_refusal(json.dumps({"error": {"message": message}}), body(), Quirks())
    assert found is not None
    assert found.changes == learned


@given(st.text(), every_quirk)
def test_any_text_of_a_refusal_is_accepted(words: str, quirks: Quirks) -> None:
    learn_from_refusal(words, body(), quirks)


@pytest.mark.parametrize(
    ("status", "refusal"),
    [
        (500, {"error": {"code": 500, "message": "tools param requires --jinja flag", "type": "server_error"}}),
        (500, {"error": {"code": 500, "message": "Unsupported param: tools", "type": "server_error"}}),
        (400, {"message": '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'}),
        (400, {"error": {"message": "registry.ollama.ai/library/gemma:2b does not support tools"}}),
        (404, {"error": {"message": "No endpoints found that support tool use."}}),
    ],
)
async def test_server_without_tools_is_an_error_that_names_the_flags(status: int, refusal: Any) -> None:
    async with ScriptedServer(lambda asked: Failure(status, refusal)) as server:
        model = ChatModel(name="m", base_url=server.url)
        with pytest.raises(ModelError, match=r"takes no tools \(\d+\): .+ Start llama\.cpp with --jinja, vLLM with "):
            await run_call(model, request())
        await model.close()
        assert len(server.requests) == 1


async def test_refused_schema_names_the_tool() -> None:
    refusal = Failure(400, {"error": {"message": "Invalid tools[0]: unrecognized schema"}})
    async with ScriptedServer([refusal, Reply("Hi")]) as server:
        model = ChatModel(name="m", base_url=server.url)
        _, (notice,) = await run_call(model, request())
        await model.close()
    assert "cannot read the schema of the tool 'weather'" in notice


def test_page_on_models_names_quirks_that_exist() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    (block,) = re.findall(r"^```toml\n(\[models\.local\.quirks\].*?)^```", text, re.M | re.S)
    shown = tomllib.loads(block)["models"]["local"]["quirks"]
    assert msgspec.convert(shown, Quirks) != Quirks()
    table = re.findall(r"^\| `(\w+)` \|", text.partition("## Quirks")[2], re.M)
    assert {*table} < {*Quirks.__struct_fields__}
