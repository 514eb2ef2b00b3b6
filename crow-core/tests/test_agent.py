"""The agent, seen by a client that reads and writes lines of JSON."""

import asyncio
from typing import Any

import msgspec
import pytest
from crow_core import __version__
from crow_core.acp.schema import AUTH_REQUIRED, INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND
from crow_core.agent.app_source import LazyApp
from crow_core.app import Crow
from crow_core.errors import ConfigError, ModelError
from crow_core.testing import Reply, ScriptedModel
from crow_core.testing.wire import connect_raw
from crow_extensions.commands import commands

pytestmark = pytest.mark.anyio


def make_app() -> Crow:
    return Crow(ScriptedModel(lambda request: Reply("Hello."))).use(commands)


async def test_initialize_returns_name_version_and_capabilities():
    async with connect_raw(make_app()) as wire:
        answer = (await wire.ask("initialize", {"protocolVersion": 1}))["result"]
    assert answer["protocolVersion"] == 1
    assert answer["agentInfo"] == {"name": "crow", "title": "Crow", "version": __version__}
    capabilities = answer["agentCapabilities"]
    assert capabilities["promptCapabilities"] == {"image": True, "embeddedContext": True}
    assert capabilities["mcpCapabilities"] == {"http": True, "sse": True}
    assert not capabilities.get("loadSession")  # the app has no store
    assert "list" not in capabilities["sessionCapabilities"]


@pytest.mark.parametrize("version", [0, 1, 2, 65535])
async def test_initialize_returns_the_supported_protocol_version(version: int):
    async with connect_raw(make_app()) as wire:
        answer = await wire.ask("initialize", {"protocolVersion": version})
        assert answer["result"]["protocolVersion"] == 1


async def test_initialize_can_be_repeated_with_other_capabilities():
    async with connect_raw(make_app()) as wire:
        for known in ("{}", '{"session": {"notices": {}}}'):
            answer = await wire.ask(
                "initialize", {"protocolVersion": 1, "clientCapabilities": msgspec.Raw(known.encode())}
            )
            assert answer["result"]["protocolVersion"] == 1
        assert "result" in await wire.ask("session/new", {"cwd": "/", "mcpServers": []})


@pytest.mark.parametrize(
    "capabilities",
    [
        None,
        {"fs": None, "terminal": "yes", "session": 7, "elicitation": [], "auth": None},
        {"fs": {"readTextFile": True, "rename": True}, "telepathy": {"deep": [1, 2]}, "_meta": {"x": 1}},
        {"session": {"notices": True, "configOptions": {"boolean": {}}}},
    ],
)
async def test_malformed_capabilities_are_no_error(capabilities: Any):
    async with connect_raw(make_app()) as wire:
        answer = await wire.ask("initialize", {"protocolVersion": 1, "clientCapabilities": capabilities})
        assert "result" in answer
        session = (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]
        prompt = {"sessionId": session["sessionId"], "prompt": [{"type": "text", "text": "hi"}]}
        assert (await wire.ask("session/prompt", prompt))["result"] == {"stopReason": "end_turn"}
        assert {option["type"] for option in session["configOptions"]} == {"select"}


@pytest.mark.parametrize(
    "servers", [None, "absent", [], [{"name": "half"}, 7, {"type": "carrier-pigeon", "name": "x", "url": "y"}]]
)
async def test_a_session_opens_with_a_malformed_list_of_servers(servers: Any):
    params = {"cwd": "/"} if servers == "absent" else {"cwd": "/", "mcpServers": servers}
    async with connect_raw(make_app()) as wire:
        answer = await wire.ask("session/new", params)
        assert answer["result"]["sessionId"]


async def test_the_response_to_session_new_is_sent_before_updates_of_the_session():
    async with connect_raw(make_app()) as wire:
        for _ in range(5):
            session = (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]["sessionId"]
            assert session not in repr(wire.received[:-1])
            update = await wire.receive()
            assert update["method"] == "session/update"
            assert update["params"]["sessionId"] == session
            assert update["params"]["update"]["sessionUpdate"] == "available_commands_update"


async def test_all_updates_of_a_turn_are_sent_before_its_response():
    async with connect_raw(make_app()) as wire:
        session = (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]["sessionId"]
        await wire.receive()
        at = len(wire.received)
        prompt = {"sessionId": session, "prompt": [{"type": "text", "text": "hi"}]}
        await wire.ask("session/prompt", prompt)
        said = [message["params"]["update"]["content"]["text"] for message in wire.received[at:-1]]
        assert "".join(said) == "Hello."
        await wire.ask("session/set_config_option", {"sessionId": session, "configId": "model", "value": "scripted"})
        assert len(wire.received) == at + len(said) + 2


async def test_the_configured_model_is_the_only_way_to_authenticate():
    async with connect_raw(make_app()) as wire:
        methods = (await wire.ask("initialize", {"protocolVersion": 1}))["result"]["authMethods"]
        assert [method["id"] for method in methods] == ["configured"]
        assert (await wire.ask("authenticate", {"methodId": "configured"}))["result"] == {}
        assert (await wire.ask("authenticate", {"methodId": "magic"}))["error"]["code"] == INVALID_PARAMS


async def test_the_client_is_asked_to_log_in_without_a_model_and_can_try_again():
    configured = False

    async def make() -> Crow:
        if not configured:
            raise ModelError("No model is configured. Set CROW_MODEL.")
        return make_app()

    async with connect_raw(LazyApp(make)) as wire:
        assert "result" in await wire.ask("initialize", {"protocolVersion": 1})
        for method, params in (("session/new", {"cwd": "/"}), ("authenticate", {"methodId": "configured"})):
            error = (await wire.ask(method, params))["error"]
            assert error["code"] == AUTH_REQUIRED
            assert error["data"] == {"details": "No model is configured. Set CROW_MODEL."}
        configured = True
        assert "result" in await wire.ask("session/new", {"cwd": "/"})


async def test_a_configuration_error_is_sent_with_its_own_text():
    async def make() -> Crow:
        raise ConfigError("config.toml, line 3: unknown key 'modle'.")

    async with connect_raw(LazyApp(make)) as wire:
        error = (await wire.ask("session/new", {"cwd": "/"}))["error"]
    assert error["code"] == INTERNAL_ERROR
    assert error["data"] == {"details": "config.toml, line 3: unknown key 'modle'."}


async def test_the_app_is_made_once_for_concurrent_requests():
    made: list[Crow] = []

    async def make() -> Crow:
        await asyncio.sleep(0)
        made.append(make_app())
        return made[-1]

    async with connect_raw(LazyApp(make)) as wire:
        for number in (1, 2):
            request = {"jsonrpc": "2.0", "id": f"new {number}", "method": "session/new", "params": {"cwd": "/"}}
            wire.transport.write(msgspec.json.encode(request) + b"\n")
        answers = 0
        while answers < 2:
            answers += "result" in await wire.receive()
    assert len(made) == 1


@pytest.mark.parametrize(
    ("prompt", "details"),
    [
        ([], "The prompt is empty."),
        ([{"type": "text", "text": ""}], "The prompt is empty."),
        ([{"type": "text", "text": " \n"}, {"type": "text", "text": "\t"}], "The prompt is empty."),
        (
            [{"type": "text", "text": "Listen."}, {"type": "audio", "data": "c291bmQ=", "mimeType": "audio/wav"}],
            "prompt[1] is audio, which was not announced in promptCapabilities.",
        ),
        (
            [{"type": "text", "text": "Look."}, {"type": "video\x1b[2J", "data": "eA=="}],
            "prompt[1] has the unknown type 'video [2J'.",
        ),
    ],
)
async def test_prompt_that_cannot_be_used_is_refused(prompt: list[Any], details: str):
    crow = make_app()
    async with connect_raw(crow) as wire:
        session = (await wire.ask("session/new", {"cwd": "/"}))["result"]["sessionId"]
        error = (await wire.ask("session/prompt", {"sessionId": session, "prompt": prompt}))["error"]
        (opened,) = crow.sessions.values()
        assert not [entry for entry in opened.log if entry.get("role") == "user"]
    assert error == {"code": INVALID_PARAMS, "message": f"Unusable prompt: {details}", "data": {"details": details}}


@pytest.mark.parametrize(
    "method", ["session/load", "session/list", "session/fork", "session/resume", "nonsense", "_x/y"]
)
async def test_methods_without_a_capability_are_unknown(method: str):
    async with connect_raw(make_app()) as wire:
        assert (await wire.ask(method, {}))["error"]["code"] == METHOD_NOT_FOUND


async def test_a_model_error_is_sent_with_its_own_text():
    model = ScriptedModel([Reply("Hel", error=ModelError("Nothing answers at http://localhost:1/v1. Start it."))])
    async with connect_raw(Crow(model)) as wire:
        session = (await wire.ask("session/new", {"cwd": "/"}))["result"]["sessionId"]
        prompt = {"sessionId": session, "prompt": [{"type": "text", "text": "hi"}]}
        error = (await wire.ask("session/prompt", prompt))["error"]
    assert error == {
        "code": INTERNAL_ERROR,
        "message": "The model did not answer: Nothing answers at http://localhost:1/v1. Start it.",
        "data": {"details": "Nothing answers at http://localhost:1/v1. Start it."},
    }


async def test_a_client_that_leaves_right_after_opening_a_session_leaves_nothing_behind():
    crow = make_app()
    async with connect_raw(crow) as wire:
        wire.transport.write(b'{"jsonrpc": "2.0", "id": 1, "method": "session/new", "params": {"cwd": "/"}}\n')
        await asyncio.sleep(0)
    assert crow.sessions == {}


async def test_a_client_that_leaves_while_a_session_opens_leaves_nothing_behind():
    crow, opening = make_app(), asyncio.Event()

    @crow.session_start
    async def slow(session: object) -> None:
        opening.set()
        await asyncio.Event().wait()

    async with connect_raw(crow) as wire:
        wire.transport.write(b'{"jsonrpc": "2.0", "id": 1, "method": "session/new", "params": {"cwd": "/"}}\n')
        await opening.wait()
    assert crow.sessions == {}
