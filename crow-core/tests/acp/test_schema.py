"""Test the ACP structs against the official schema, a JSON schema validator, and the official Python SDK."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import acp.schema as sdk
import msgspec
import pytest
from crow_core.acp import schema
from crow_core.acp.decoding import decode, encode
from crow_core.acp.schema import UNSET
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[3]
OFFICIAL = json.loads((ROOT / "crow-core/schema/schema.json").read_text("utf-8"))
DEFS = OFFICIAL["$defs"]
TABLES = {"agent": schema.AGENT_METHODS, "client": schema.CLIENT_METHODS, "protocol": schema.PROTOCOL_METHODS}
MESSAGES = [*sorted(name for name, definition in DEFS.items() if "x-method" in definition), "Error"]
MARK = "x-deserialize-default-on-error"


def is_valid(definition: dict[str, Any] | str, value: Any) -> bool:
    if isinstance(definition, str):
        definition = {"$ref": f"#/$defs/{definition}"}
    return Draft202012Validator({**definition, "$defs": DEFS}).is_valid(value)


text = st.text(st.characters(codec="utf-8"), max_size=8)
anything = st.one_of(st.none(), st.integers(0, 9), text, st.just({"k": [1, None]}))
PLAIN = {
    "string": text.map(lambda value: value + "."),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
}


def instances(definition: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for the values that a schema allows."""
    if "$ref" in definition:
        return st.deferred(lambda: instances(DEFS[definition["$ref"].removeprefix("#/$defs/")]))
    if "const" in definition:
        return st.just(definition["const"])
    options = definition.get("anyOf") or definition.get("oneOf")
    if definition.get("type") == "object":
        parts = [properties(definition)]
        parts += [instances(part) for part in definition.get("allOf", ())]
        parts += [st.one_of(*map(instances, options))] if options else []
        return st.tuples(*parts).map(lambda dicts: {key: value for part in dicts for key, value in part.items()})
    if options:
        return st.one_of(*map(instances, options))
    if "allOf" in definition:
        return instances(definition["allOf"][0])
    kinds = definition.get("type", "any")
    return st.one_of(*(plain(kind, definition) for kind in ([kinds] if isinstance(kinds, str) else kinds)))


def plain(kind: str, definition: dict[str, Any]) -> st.SearchStrategy[Any]:
    if kind == "array":
        return st.lists(instances(definition["items"]), max_size=2)
    if kind == "object":
        values = definition.get("additionalProperties", True)
        return st.dictionaries(text, anything if values is True else instances(values), max_size=2)
    if kind == "integer":
        return st.integers(0, definition.get("maximum", 2**31))
    return PLAIN.get(kind, anything)


def properties(definition: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    if "properties" not in definition and "additionalProperties" in definition:
        return plain("object", definition)
    required = definition.get("required", ())
    fields = {name: instances(value) for name, value in definition.get("properties", {}).items()}
    if "not" in definition:  # an unknown variant
        fields = {**fields, **{name: st.just("_other") for name in required}}
    return st.fixed_dictionaries(
        {name: value for name, value in fields.items() if name in required},
        optional={name: value for name, value in fields.items() if name not in required},
    )


def defaulted(definition: Any) -> set[str]:
    """Return the properties whose absence means the same as their default."""
    if isinstance(definition, list):
        return set().union(*map(defaulted, definition))
    if not isinstance(definition, dict):
        return set()
    found = set().union(*map(defaulted, definition.values()))
    for name, value in definition.get("properties", {}).items():
        if isinstance(value, dict) and ("default" in value or "x-deserialize-default-on-null" in value):
            found.add(name)
    return found


DEFAULTED = defaulted(DEFS)


def drop_defaults(value: Any) -> Any:
    """Return a message without the properties that have their default."""
    if isinstance(value, list):
        return [drop_defaults(item) for item in value]
    if not isinstance(value, dict):
        return value
    pairs = {key: drop_defaults(item) for key, item in value.items()}
    empty = (False, [], {}, "object")
    return {key: item for key, item in pairs.items() if key not in DEFAULTED or item not in empty}


def test_committed_modules_are_the_output_of_the_generator() -> None:
    script = ROOT / "scripts/generate_acp_schema.py"
    spec = importlib.util.spec_from_file_location("generate_acp_schema", script)
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = generator  # dataclasses look up their module
    try:
        spec.loader.exec_module(generator)
        assert generator.generate(OFFICIAL) == Path(schema.__file__).read_text("utf-8"), f"run python {script}"
        second = Path(schema.__file__).with_name("schema_v2.py").read_text("utf-8")
        official = json.loads((ROOT / "crow-core/schema/schema_v2.json").read_text("utf-8"))
        assert generator.generate(official, generator.V2) == second, f"run python {script}"
    finally:
        del sys.modules[spec.name]


def test_vendored_schema_has_every_property_and_no_prose() -> None:
    def keywords(node: Any, names: bool = False) -> set[str]:
        if isinstance(node, list):
            return set().union(*map(keywords, node))
        if not isinstance(node, dict):
            return set()
        below = (keywords(value, not names and key in ("properties", "$defs")) for key, value in node.items())
        return set().union(set() if names else node, *below)

    assert not keywords(OFFICIAL) & {"description", "title", "$schema"}
    assert {"title", "description"} <= DEFS["StringPropertySchema"]["properties"].keys()


def test_every_method_of_the_schema_is_in_its_table() -> None:
    for name, definition in DEFS.items():
        if "x-method" in definition:
            method = TABLES[definition["x-side"]][definition["x-method"]]
            assert getattr(schema, name) in (method.params, method.result)
    for methods in TABLES.values():
        for wire, method in methods.items():
            assert (method.result is None) == method.params.__name__.endswith("Notification"), wire


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MESSAGES)
@settings(max_examples=settings.default.max_examples * 3 // 10, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_message_that_the_schema_allows_survives_decoding_and_encoding(name: str, data: st.DataObject) -> None:
    sent = data.draw(instances(DEFS[name]))
    assert is_valid(name, sent), "the test's own instance"
    struct = getattr(schema, name)
    message = decode(json.dumps(sent).encode(), struct)
    assert isinstance(message, struct)
    back = json.loads(encode(message))
    assert drop_defaults(back) == drop_defaults(sent)
    assert is_valid(name, back)
    assert decode(encode(message), struct) == message


def sent_as(message: Any) -> Any:
    return json.loads(encode(message))


def read_as(message: Any, struct: Any) -> Any:
    return decode(json.dumps(message).encode(), struct)


def test_required_lists_are_written_even_when_empty() -> None:
    request = schema.NewSessionRequest(cwd="/", mcp_servers=[schema.McpServer(name="a", command="b")])
    assert sent_as(schema.NewSessionRequest(cwd="/")) == {"cwd": "/", "mcpServers": []}
    assert sent_as(request)["mcpServers"] == [{"name": "a", "command": "b", "args": [], "env": []}]
    http = schema.McpServer(type="http", name="a", url="http://b")
    assert sent_as(http) == {"type": "http", "name": "a", "url": "http://b", "headers": []}
    assert is_valid("McpServer", sent_as(http))


NEW_BLOCK = {"type": "hologram", "depth": [1, {"x": None}], "text": "hi"}
NEW_UPDATE = {"sessionUpdate": "mood", "mood": {"deep": [1]}, "_meta": {"a": 1}}


def test_unknown_block_and_update_are_encoded_unchanged() -> None:
    chunk = {"sessionId": "s", "update": {"sessionUpdate": "agent_message_chunk", "content": NEW_BLOCK}}
    update = {"sessionId": "s", "update": NEW_UPDATE}
    prompt = {"sessionId": "s", "prompt": [{"type": "text", "text": "a"}, NEW_BLOCK]}

    notification = decode(json.dumps(chunk).encode(), schema.SessionNotification)
    assert notification.update == schema.AgentMessageChunk(content=schema.UnknownContentBlock(NEW_BLOCK))
    assert json.loads(encode(notification)) == sent_as(notification) == chunk

    assert read_as(update, schema.SessionNotification).update == schema.UnknownSessionUpdate(NEW_UPDATE)
    assert json.loads(encode(read_as(update, schema.SessionNotification))) == update

    request = decode(json.dumps(prompt).encode(), schema.PromptRequest)
    assert [type(block) for block in request.prompt] == [schema.TextBlock, schema.UnknownContentBlock]
    assert json.loads(encode(request)) == prompt


@pytest.mark.parametrize(
    ("struct", "message", "unknown"),
    [
        (schema.RequestPermissionResponse, {"outcome": {"outcome": "later", "at": 1}}, "UnknownOutcome"),
        (
            schema.SetSessionConfigOptionResponse,
            {"configOptions": [{"type": "slider", "max": 3}]},
            "UnknownConfigOption",
        ),
        (schema.BlockContent, {"type": "content", "content": NEW_BLOCK}, "UnknownContentBlock"),
        (
            schema.ToolCallUpdate,
            {"sessionUpdate": "tool_call_update", "toolCallId": "t", "content": [{"type": "chart"}]},
            "UnknownToolCallContent",
        ),
        (
            schema.ElicitationSchema,
            {"type": "object", "properties": {"c": {"type": "colour"}}},
            "UnknownPropertySchema",
        ),
    ],
)
def test_every_tagged_union_keeps_unknown_variants(struct: Any, message: Any, unknown: str) -> None:
    value = read_as(message, struct)
    assert f"{unknown}({{" in repr(value)
    assert json.loads(encode(value)) == message


def test_unknown_variant_needs_its_tag() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"^prompt\[0\]\.type: required, but missing$"):
        read_as({"sessionId": "s", "prompt": [{"text": "a"}]}, schema.PromptRequest)


def test_absent_and_null_are_different() -> None:
    absent = decode(b'{"sessionUpdate":"session_info_update"}', schema.SessionInfoUpdate)
    null = decode(b'{"sessionUpdate":"session_info_update","title":null}', schema.SessionInfoUpdate)
    assert absent.title is UNSET
    assert null.title is None
    assert encode(absent) == b'{"sessionUpdate":"session_info_update"}'
    assert encode(null) == b'{"sessionUpdate":"session_info_update","title":null}'
    assert json.loads(encode(schema.ToolCallUpdate(tool_call_id="t", raw_output=None))) == {
        "sessionUpdate": "tool_call_update",
        "toolCallId": "t",
        "rawOutput": None,
    }


def test_empty_capability_is_not_absent() -> None:
    asked = decode(b'{"protocolVersion":1,"clientCapabilities":{"elicitation":{"form":{}}}}', schema.InitializeRequest)
    elicitation = asked.client_capabilities.elicitation
    assert elicitation
    assert elicitation.form == schema.ElicitationFormCapabilities()
    assert elicitation.url is UNSET
    assert b'"elicitation":{"form":{}}' in encode(asked)


def test_meta_key_never_replaces_a_parameter() -> None:
    raw = b'{"sessionId":"s","path":"/a","_meta":{"path":"/b","line":7,"session_id":"t","meta":1}}'
    request = decode(raw, schema.ReadTextFileRequest)
    assert (request.session_id, request.path, request.line) == ("s", "/a", UNSET)
    assert request.meta == {"path": "/b", "line": 7, "session_id": "t", "meta": 1}
    assert json.loads(encode(request)) == json.loads(raw)


def marked_fields() -> list[tuple[str, str]]:
    return [
        (name, wire)
        for name, definition in DEFS.items()
        for wire, value in definition.get("properties", {}).items()
        if MARK in value and hasattr(schema, name)
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "wire"), marked_fields())
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_malformed_tolerant_field_gets_its_default(name: str, wire: str, data: st.DataObject) -> None:
    wrong = next((bad for bad in (7, "seven") if not is_valid(DEFS[name]["properties"][wire], bad)), UNSET)
    if wrong is UNSET:
        return  # anything is allowed there
    sent = data.draw(instances(DEFS[name]))
    required = wire in DEFS[name].get("required", ())
    without = {**sent, wire: []} if required else {key: value for key, value in sent.items() if key != wire}
    struct = getattr(schema, name)
    assert read_as({**sent, wire: wrong}, struct) == read_as(without, struct)


def test_malformed_fields_of_variants_get_their_defaults() -> None:
    update = {
        "sessionUpdate": "tool_call",
        "toolCallId": "t",
        "title": "x",
        "kind": "sing",
        "status": 3,
        "locations": [{"path": "/a", "line": "three"}, {"line": 1}, None],
        "content": [{"type": "content", "content": {"type": "text"}}, {"type": "terminal", "terminalId": "1"}],
    }
    assert read_as({"sessionId": "s", "update": update}, schema.SessionNotification).update == schema.ToolCall(
        tool_call_id="t",
        title="x",
        locations=[schema.ToolCallLocation(path="/a")],
        content=[schema.TerminalContent(terminal_id="1")],
    )


def test_malformed_field_without_the_mark_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"^limit: expected int or null, got str$"):
        decode(b'{"sessionId":"s","path":"/a","limit":"all"}', schema.ReadTextFileRequest)


def test_invalid_mcp_server_is_dropped_and_the_others_are_kept() -> None:
    servers = [
        {"name": "no command"},
        {"name": "stdio", "command": "a", "args": None, "env": []},
        {"type": "stdio", "name": "named its transport", "command": "b", "args": [], "env": []},
        {"type": "http", "name": "no url"},
        {"type": "http", "name": "http", "url": "http://c", "headers": [{"name": "A", "value": "b"}]},
        {"type": "acp", "name": "from the future", "id": "x"},
        None,
    ]
    for struct, rest in [
        (schema.NewSessionRequest, {}),
        (schema.LoadSessionRequest, {"sessionId": "s"}),
        (schema.ResumeSessionRequest, {"sessionId": "s"}),
    ]:
        request = read_as({"cwd": "/", "mcpServers": servers, **rest}, struct)
        assert [(server.type, server.name) for server in request.mcp_servers] == [
            (UNSET, "stdio"),
            (UNSET, "named its transport"),
            ("http", "http"),
        ]
        assert request.mcp_servers[0].args == []


@pytest.mark.parametrize("given", [{}, {"mcpServers": None}, {"mcpServers": []}])
def test_missing_or_null_mcp_servers_mean_none(given: dict[str, Any]) -> None:
    assert read_as({"cwd": "/", **given}, schema.NewSessionRequest).mcp_servers == []


def test_auth_method_of_unknown_type_is_an_agent_method() -> None:
    methods = [{"id": "a", "name": "A", "type": "agent"}, {"id": "t", "name": "T", "type": "terminal", "args": ["x"]}]
    answer = read_as({"protocolVersion": 1, "authMethods": [*methods, {"id": 3}]}, schema.InitializeResponse)
    assert [(method.id, method.type) for method in answer.auth_methods] == [("a", UNSET), ("t", "terminal")]


def test_absent_params_are_read_as_empty() -> None:
    assert decode(b"null", schema.ListSessionsRequest) == schema.ListSessionsRequest()
    with pytest.raises(msgspec.ValidationError, match=r"^cwd: required, but missing$"):
        decode(b"null", schema.NewSessionRequest)


def test_whole_float_is_an_integer_and_a_fraction_is_not() -> None:
    request = decode(b'{"sessionId":"s","path":"/a","line":3.0,"limit":10}', schema.ReadTextFileRequest)
    assert encode(request) == b'{"sessionId":"s","path":"/a","line":3,"limit":10}'
    with pytest.raises(msgspec.ValidationError, match="line: expected int or null, got float"):
        decode(b'{"sessionId":"s","path":"/a","line":3.5}', schema.ReadTextFileRequest)


@pytest.mark.parametrize(
    ("struct", "message", "error"),
    [
        (schema.NewSessionRequest, {"cwd": 1}, "cwd: expected str, got int"),
        (schema.NewSessionRequest, [], "message: expected object, got array"),
        (
            schema.PromptRequest,
            {"sessionId": "s", "prompt": [{"type": "text", "text": None}]},
            "prompt[0].text: expected str, got null",
        ),
        (
            schema.PromptRequest,
            {"sessionId": "s", "prompt": [{"type": "resource", "resource": {"uri": "file:///a"}}]},
            "prompt[0].resource: resource contents need `text` or `blob`",
        ),
        (
            schema.PromptResponse,
            {"stopReason": "tired"},
            "stopReason: expected one of cancelled, end_turn, max_tokens, max_turn_requests, refusal, got 'tired'",
        ),
        (
            schema.SetSessionConfigOptionRequest,
            {"sessionId": "s", "configId": "c", "value": True},
            "message: a boolean `value` needs `type`: `boolean`",
        ),
        (
            schema.CreateElicitationRequest,
            {"message": "m", "mode": "url", "sessionId": "s", "url": "http://a"},
            "message: an elicitation by url needs `url` and `elicitationId`",
        ),
    ],
)
def test_wrong_required_field_names_its_path(struct: Any, message: Any, error: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        decode(json.dumps(message).encode(), struct)
    assert str(raised.value) == error
    with pytest.raises(msgspec.ValidationError) as raised:
        read_as(message, struct)
    assert str(raised.value) == error


def test_endless_nesting_is_an_error() -> None:
    raw = b'{"cwd":"/","_meta":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    with pytest.raises(msgspec.ValidationError, match="nested too deeply"):
        decode(raw, schema.NewSessionRequest)


def test_invalid_json_and_wrong_types_are_different_errors() -> None:
    with pytest.raises(msgspec.DecodeError) as raised:
        decode(b'{"cwd":', schema.NewSessionRequest)
    assert not isinstance(raised.value, msgspec.ValidationError)


def test_foreign_object_is_not_encoded() -> None:
    with pytest.raises(TypeError, match="object is not part of the ACP vocabulary"):
        encode(schema.TextBlock(text="a", meta={"x": object()}))


SDK_MESSAGES = [
    schema.InitializeResponse(
        protocol_version=1,
        agent_capabilities=schema.AgentCapabilities(
            load_session=True,
            prompt_capabilities=schema.PromptCapabilities(image=True),
            session_capabilities=schema.SessionCapabilities(list=schema.SessionListCapabilities()),
        ),
        auth_methods=[schema.AuthMethod(id="a", name="A")],
        agent_info=schema.Implementation(name="crow", version="1"),
    ),
    schema.NewSessionResponse(
        session_id="s",
        modes=schema.SessionModeState(
            current_mode_id="ask", available_modes=[schema.SessionMode(id="ask", name="Ask")]
        ),
        config_options=[
            schema.SelectConfigOption(
                id="model",
                name="Model",
                category="model",
                current_value="m",
                options=[schema.SelectEntry(group="g", name="G", options=[schema.SelectEntry(value="m", name="M")])],
            )
        ],
    ),
    schema.PromptResponse(stop_reason="end_turn"),
    schema.RequestPermissionRequest(
        session_id="s",
        tool_call=schema.ToolCallFields(
            tool_call_id="t",
            title="edit",
            kind="edit",
            content=[schema.DiffContent(path="/a", old_text=None, new_text="b")],
        ),
        options=[schema.PermissionOption(option_id="y", name="Yes", kind="allow_once")],
    ),
    schema.SessionNotification(
        session_id="s",
        update=schema.AgentMessageChunk(content=schema.TextBlock(text="hé\n"), message_id="m"),
    ),
    schema.SessionNotification(
        session_id="s",
        update=schema.PlanUpdate(entries=[schema.PlanEntry(content="x", priority="low", status="pending")]),
    ),
    schema.SessionNotification(
        session_id="s",
        update=schema.UsageUpdate(used=1, size=2, cost=schema.Cost(amount=0.5, currency="USD")),
    ),
    schema.NewSessionRequest(
        cwd="/",
        mcp_servers=[
            schema.McpServer(name="a", command="b", env=[schema.EnvVariable(name="K", value="V")]),
            schema.McpServer(type="http", name="h", url="http://a"),
        ],
    ),
]


@pytest.mark.parametrize("message", SDK_MESSAGES, ids=lambda message: type(message).__name__)
def test_official_sdk_reads_our_messages(message: Any) -> None:
    model = getattr(sdk, type(message).__name__)
    read = model.model_validate_json(encode(message))
    written = read.model_dump_json(by_alias=True, exclude_unset=True)
    assert json.loads(written) == json.loads(encode(message))
    assert decode(written.encode(), type(message)) == message


def test_importing_the_schema_loads_no_large_library() -> None:
    heavy = {
        "asyncio",
        "pydantic",
        "jsonschema",
        "fastmcp",
        "mcp",
        "acp",
        "openai",
        "httpx2",
        "sqlite3",
        "json.decoder",
    }
    script = "import sys, crow_core.acp.decoding; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "crow_core.acp.schema" in loaded
    assert not heavy & set(loaded)
