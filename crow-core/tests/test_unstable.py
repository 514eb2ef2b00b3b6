"""Unstable parts of ACP: off by default, and as the drafts describe them."""

from typing import Any

import pytest
from crow_core.acp.schema import AUTH_REQUIRED, INVALID_PARAMS, METHOD_NOT_FOUND
from crow_core.agent.app_source import LazyApp
from crow_core.app import Crow
from crow_core.errors import ConfigError, ModelError
from crow_core.models.chat_model import ChatModel
from crow_core.session.prompts import Prompt
from crow_core.session.session import Session
from crow_core.session.store import Record
from crow_core.testing import MemoryStore, Reply, ScriptedModel, ScriptedServer
from crow_core.testing.script import ScriptedCall as Use
from crow_core.testing.wire import RawClient, connect_raw
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.usage import usage

pytestmark = pytest.mark.anyio

HI = [{"type": "text", "text": "hi"}]
COUNTS = {
    "prompt_tokens": 1000,
    "completion_tokens": 20,
    "prompt_tokens_details": {"cached_tokens": 900},
    "completion_tokens_details": {"reasoning_tokens": 5},
}


async def open_session(wire: RawClient, **params: Any) -> str:
    return (await wire.ask("session/new", {"cwd": "/", "mcpServers": [], **params}))["result"]["sessionId"]


async def prompt(wire: RawClient, session: str) -> dict[str, Any]:
    return (await wire.ask("session/prompt", {"sessionId": session, "prompt": HI}))["result"]


def instructions(text: str, mode: str = "append") -> dict[str, Any]:
    return {"systemPrompt": {"mode": mode, "content": [{"type": "text", "text": text}]}}


def system_of(model: ScriptedModel, request: int = -1) -> str:
    return model.requests[request]["messages"][0]["content"]


def answer_well(request: Any) -> Reply:
    return Reply("Well.")


def make_model() -> ScriptedModel:
    return ScriptedModel(answer_well)


async def no_app(models: Any = None) -> Crow:
    """Refuse to make an app, as without a configuration."""
    if models is None:
        raise ModelError("No model is configured.")
    return Crow(models).use(mask_secrets)


async def test_unstable_features_are_off_by_default():
    model = ScriptedModel(lambda request: Reply("Well.", usage=COUNTS))
    async with connect_raw(make_app_with_store(model).use(usage)) as wire:
        capabilities = (await wire.ask("initialize", {"protocolVersion": 1}))["result"]["agentCapabilities"]
        assert "providers" not in capabilities
        assert "systemPrompt" not in capabilities["sessionCapabilities"]
        assert (await wire.ask("providers/list", {}))["error"]["code"] == METHOD_NOT_FOUND
        session = await open_session(wire, **instructions("Speak French."))
        assert await prompt(wire, session) == {"stopReason": "end_turn"}
    assert "French" not in system_of(model)


async def test_titles_and_the_archive_are_announced_if_sessions_are_stored():
    for app, announced in ((make_app_with_store(make_model()), True), (Crow(make_model()), False)):
        for unstable in (True, False):
            async with connect_raw(app, unstable=unstable) as wire:
                capabilities = (await wire.ask("initialize", {"protocolVersion": 1}))["result"]["agentCapabilities"]
            wanted = {"archive": {}, "title": {}, "status": {}} if announced and unstable else {}
            assert capabilities["sessionCapabilities"].items() >= wanted.items()
            assert ("archive" in capabilities["sessionCapabilities"]) == bool(wanted)
            assert capabilities["auth"] == ({"logout": {}, "status": {}} if unstable else {"logout": {}})


async def get_auth_state(wire: RawClient) -> str:
    return (await wire.ask("auth/status", {}))["result"]["state"]


@pytest.mark.parametrize(("key", "state"), [("sk-of-the-user-1234", "authenticated"), ("", "not_required")])
async def test_auth_status_tells_whether_a_login_is_needed(key: str, state: str):
    model = ChatModel(name="some-model", base_url="http://127.0.0.1:9/v1", api_key=key)
    async with connect_raw(Crow(model), unstable=True) as wire:
        assert await get_auth_state(wire) == state
        await wire.ask("logout", {})
        assert await get_auth_state(wire) == "unauthenticated"
        await wire.ask("authenticate", {"methodId": "configured"})
        assert await get_auth_state(wire) == state


async def test_auth_status_without_a_model_is_unauthenticated_until_the_client_sets_an_endpoint():
    async with connect_raw(LazyApp(no_app), unstable=True) as wire:
        assert await get_auth_state(wire) == "unauthenticated"
        endpoint = {"providerId": "main", "apiType": "openai", "baseUrl": "http://127.0.0.1:9/v1"}
        await wire.ask("providers/set", endpoint)
        assert await get_auth_state(wire) == "not_required"
        await wire.ask("providers/set", {**endpoint, "headers": {"Authorization": "Bearer sk-of-the-client-1234"}})
        answer = await wire.ask("auth/status", {})
        assert answer["result"] == {"state": "authenticated"}
        await wire.ask("providers/disable", {"providerId": "main"})
        assert await get_auth_state(wire) == "unauthenticated"


async def test_auth_status_of_settings_that_cannot_be_used_is_unknown():
    async def fail(models: Any = None) -> Crow:
        raise ConfigError("config.toml: no such setting")

    async with connect_raw(LazyApp(fail), unstable=True) as wire:
        assert await get_auth_state(wire) == "unknown"


async def test_fork_is_announced_wherever_sessions_are_stored():
    for app, announced in ((make_app_with_store(make_model()), {}), (Crow(make_model()), None)):
        async with connect_raw(app) as wire:
            capabilities = (await wire.ask("initialize", {"protocolVersion": 1}))["result"]["agentCapabilities"]
        assert capabilities["sessionCapabilities"].get("fork") == announced


async def test_initialize_announces_unstable_capabilities():
    async with connect_raw(make_app_with_store(make_model()), unstable=True) as wire:
        capabilities = (await wire.ask("initialize", {"protocolVersion": 1}))["result"]["agentCapabilities"]
    assert capabilities["providers"] == {}
    assert capabilities["sessionCapabilities"]["systemPrompt"] == {"mode": {"override": {}}}


async def test_the_response_to_a_prompt_has_the_tokens_of_its_turn():
    calls = [Use(name="nothing", arguments={})]
    model = ScriptedModel([Reply(tool_calls=calls, usage=COUNTS), Reply("A", usage=COUNTS), Reply("B", usage=COUNTS)])
    async with connect_raw(Crow(model).use(usage), unstable=True) as wire:
        session = await open_session(wire)
        assert (await prompt(wire, session))["usage"] == {
            "inputTokens": 2000,
            "outputTokens": 40,
            "totalTokens": 2040,
            "cachedReadTokens": 1800,
            "thoughtTokens": 10,
        }
        assert (await prompt(wire, session))["usage"]["totalTokens"] == 1020


async def test_instructions_of_the_client_are_appended_to_those_of_the_agent():
    model = make_model()
    async with connect_raw(Crow(model), unstable=True) as wire:
        await prompt(wire, await open_session(wire, **instructions("Speak {{ cwd }} French.")))
    assert system_of(model).startswith("You are crow")
    assert system_of(model).endswith("\n\nSpeak {{ cwd }} French.")


async def test_instructions_of_the_client_can_replace_those_of_the_agent():
    model = make_model()
    crow = Crow(model)

    @crow.instructions
    def more(session: Session) -> str:
        return "The project's own rules."

    async with connect_raw(crow, unstable=True) as wire:
        await prompt(wire, await open_session(wire, **instructions("{% if %} Be a poet.", "override")))
    assert system_of(model) == "{% if %} Be a poet.\n\nThe project's own rules."


async def test_instructions_of_the_client_are_recorded_as_variables():
    crow = Crow(make_model())
    async with connect_raw(crow, unstable=True) as wire:
        session = await open_session(wire, **instructions("Be brief."))
        await prompt(wire, session)
        notes = [entry.get("crow", {}) for entry in crow.sessions[session].log]
        (render,) = (note for note in notes if note.get("kind") == "render")
    assert render["variables"]["instructions"] == ["Be brief."]
    assert "Be brief." not in render["template"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "prepend", "content": HI},
        {"mode": "append", "content": []},
        {"mode": "append", "content": [{"type": "image", "data": "", "mimeType": "image/png"}]},
        {"mode": "append", "content": [*HI, {"type": "smell"}]},
        {"mode": "append"},
        {"content": HI},
        "Be brief.",
    ],
)
async def test_invalid_instructions_open_no_session(wrong: Any):
    crow = Crow(make_model())
    async with connect_raw(crow, unstable=True) as wire:
        answer = await wire.ask("session/new", {"cwd": "/", "mcpServers": [], "systemPrompt": wrong})
        assert answer["error"]["code"] == INVALID_PARAMS
        assert crow.sessions == {}


def make_app_with_store(model: ScriptedModel) -> Crow:
    """Make an app whose store has a session with the instruction to be brief."""
    crow = Crow(model)
    variables: dict[str, Any] = {"instructions": ["Be brief."]}
    render = {"kind": "render", "purpose": "system", "prompt": "system", "variables": variables, "id": "1"}

    crow.store = MemoryStore(Record("s", [{"crow": render}], system="As it was: Be brief."))
    return crow


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "As it was: Be brief."),
        (instructions("Be brief."), "As it was: Be brief."),
        (instructions("Be verbose."), "Be verbose."),
        (instructions("Be brief.", "override"), "Be brief."),
    ],
)
@pytest.mark.parametrize("method", ["session/load", "session/resume"])
async def test_a_loaded_session_gets_a_new_system_prompt_only_for_new_instructions(
    method: str, given: dict[str, Any], told: str
):
    model = make_model()
    async with connect_raw(make_app_with_store(model), unstable=True) as wire:
        await wire.ask(method, {"sessionId": "s", "cwd": "/", "mcpServers": [], **given})
        await prompt(wire, "s")
    assert system_of(model).endswith(told)
    assert system_of(model).startswith("As it was") == told.startswith("As it was")


async def test_the_client_can_set_an_endpoint_if_none_is_configured():
    headers = {"Authorization": "Bearer sk-of-the-client-1234", "X-Route": "eu"}
    async with (
        ScriptedServer(lambda request: Reply("From afar.")) as server,
        connect_raw(LazyApp(no_app), unstable=True) as wire,
    ):
        new: dict[str, Any] = {"cwd": "/", "mcpServers": []}
        assert (await wire.ask("session/new", new))["error"]["code"] == AUTH_REQUIRED
        assert (await wire.ask("providers/list", {}))["result"] == {
            "providers": [{"providerId": "main", "supported": ["openai"], "required": False}]
        }
        wanted: dict[str, Any] = {"providerId": "main", "apiType": "openai", "baseUrl": server.url, "headers": headers}
        assert (await wire.ask("providers/set", wanted))["result"] == {}
        (info,) = (await wire.ask("providers/list", {}))["result"]["providers"]
        assert info["current"] == {"apiType": "openai", "baseUrl": server.url}
        await prompt(wire, await open_session(wire))
        assert server.requests[0]["model"] == "scripted"
        assert server.headers[0]["authorization"] == headers["Authorization"]
        assert server.headers[0]["x-route"] == "eu"
        assert (await wire.ask("providers/disable", {"providerId": "main"}))["result"] == {}
        assert (await wire.ask("session/new", new))["error"]["code"] == AUTH_REQUIRED


async def test_an_endpoint_of_the_client_is_used_from_the_next_session_until_it_is_disabled():
    configured = ScriptedModel(lambda request: Reply("From here."))
    crow = Crow(configured)
    async with ScriptedServer(lambda request: Reply("From afar.")) as server, connect_raw(crow, unstable=True) as wire:
        before = await open_session(wire)
        await wire.ask("providers/set", {"providerId": "main", "apiType": "openai", "baseUrl": server.url})
        during = await open_session(wire)
        await wire.ask("providers/disable", {"providerId": "main"})
        await wire.ask("providers/disable", {"providerId": "main"})
        after = await open_session(wire)
        for session in (before, during, after):
            await prompt(wire, session)
        assert (len(configured.requests), len(server.requests)) == (2, 1)


async def test_the_key_of_the_clients_endpoint_is_secret():
    key = "sk-of-the-client-1234"

    async def make(models: Any = None) -> Crow:
        return made

    made = Crow(make_model()).use(mask_secrets)
    async with (
        ScriptedServer(lambda request: Reply("Well.")) as server,
        connect_raw(LazyApp(make), unstable=True) as wire,
    ):
        wanted = {"providerId": "main", "apiType": "openai", "baseUrl": server.url, "headers": {"X-Api-Key": key}}
        await wire.ask("providers/set", wanted)
        session = made.sessions[await open_session(wire)]
        assert key in session.secrets
        said = [{"type": "text", "text": f"my key is {key}"}]
        await wire.ask("session/prompt", {"sessionId": session.id, "prompt": said})
        assert key not in repr(session.log)
        assert key not in repr(session.models)
        assert key not in repr(await wire.ask("providers/list", {}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"providerId": "other"},
        {"apiType": "anthropic"},
        {"baseUrl": "ftp://example.org"},
        {"baseUrl": "example.org/v1"},
        {"baseUrl": "https://me:secret@example.org/v1"},
        {"baseUrl": "https://example.org/v1?key=secret"},
        {"baseUrl": "http://[broken"},
        {"baseUrl": 7},
        {"headers": {"a": 1}},
    ],
)
async def test_an_invalid_endpoint_is_refused_and_changes_nothing(wrong: dict[str, Any]):
    async with connect_raw(Crow(make_model()), unstable=True) as wire:
        right = {"providerId": "main", "apiType": "openai", "baseUrl": "https://example.org/v1"}
        assert (await wire.ask("providers/set", {**right, **wrong}))["error"]["code"] == INVALID_PARAMS
        assert "current" not in (await wire.ask("providers/list", {}))["result"]["providers"][0]
        assert (await wire.ask("providers/disable", {"providerId": "unknown"}))["result"] == {}


async def test_an_endpoint_without_a_model_list_serves_the_configured_models():
    pages = {"/v1/models": "nothing here"}
    async with (
        ScriptedServer(answer_well, pages=pages) as server,
        connect_raw(Crow(make_model()), unstable=True) as wire,
    ):
        await wire.ask("providers/set", {"providerId": "main", "apiType": "openai", "baseUrl": server.url})
        await prompt(wire, await open_session(wire))
        assert server.requests[0]["model"] == "scripted"
    async with ScriptedServer(answer_well, pages=pages) as server, connect_raw(LazyApp(no_app), unstable=True) as wire:
        await wire.ask("providers/set", {"providerId": "main", "apiType": "openai", "baseUrl": server.url})
        error = (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["error"]
        assert error["data"]["details"] == f"{server.url} does not list its models, and none is named. Set CROW_MODEL."


def test_the_template_for_client_instructions_has_no_text_of_its_own():
    assert Prompt.from_package("client").render(instructions=["a", "b"]) == "a\n\nb"
