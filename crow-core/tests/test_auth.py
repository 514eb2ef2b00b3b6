"""Authentication: login and logout, and clients that log in first."""

import asyncio
from typing import Any

import pytest
from crow_core.acp.schema import AUTH_REQUIRED
from crow_core.agent.app_source import Announced, LazyApp
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.testing import Reply, ScriptedModel
from crow_core.testing.wire import RawClient, connect_raw

pytestmark = pytest.mark.anyio

LOGIN = {"methodId": "configured"}


def make_app() -> Crow:
    return Crow(ScriptedModel(lambda request: Reply("Hello.")))


async def open_session(wire: RawClient) -> str:
    return (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]["sessionId"]


def make_prompt(session: str, text: str = "hi") -> dict[str, Any]:
    return {"sessionId": session, "prompt": [{"type": "text", "text": text}]}


@pytest.mark.parametrize("capabilities", [{}, {"auth": {"terminal": True}}])
async def test_all_authentication_methods_are_agent_methods_without_a_command_to_log_in(capabilities: dict[str, Any]):
    async with connect_raw(make_app()) as wire:
        answer = await wire.ask("initialize", {"protocolVersion": 1, "clientCapabilities": capabilities})
    (method,) = answer["result"]["authMethods"]
    assert method.get("type", "agent") == "agent"
    assert method["description"]
    assert answer["result"]["agentCapabilities"]["auth"] == {"logout": {}}


async def test_a_client_can_log_in_first():
    async with connect_raw(make_app()) as wire:
        assert (await wire.ask("authenticate", LOGIN))["result"] == {}
        assert (await wire.ask("authenticate", LOGIN))["result"] == {}
        assert await open_session(wire)


async def test_sessions_and_prompts_are_refused_after_logout_until_the_next_login():
    crow = make_app()
    async with connect_raw(crow) as wire:
        session = await open_session(wire)
        assert (await wire.ask("logout", {}))["result"] == {}
        new: dict[str, Any] = {"cwd": "/", "mcpServers": []}
        for method, params in (("session/new", new), ("session/prompt", make_prompt(session))):
            error = (await wire.ask(method, params))["error"]
            assert error["code"] == AUTH_REQUIRED
            assert error["data"]["details"]
        assert (await wire.ask("authenticate", LOGIN))["result"] == {}
        assert (await wire.ask("session/prompt", make_prompt(session)))["result"]["stopReason"] == "end_turn"


async def test_logout_cancels_running_turns():
    asked = asyncio.Event()

    async def think(request: Any) -> Reply:
        asked.set()
        return Reply(hang=True)

    async with connect_raw(Crow(ScriptedModel(think))) as wire:
        session = await open_session(wire)
        prompting = asyncio.ensure_future(wire.ask("session/prompt", make_prompt(session)))
        await asked.wait()
        wire.transport.write(b'{"jsonrpc": "2.0", "id": "bye", "method": "logout"}\n')
        assert (await prompting)["result"]["stopReason"] == "cancelled"


async def test_a_session_can_be_closed_after_logout():
    crow = make_app()
    async with connect_raw(crow) as wire:
        session = await open_session(wire)
        await wire.ask("logout", {})
        assert (await wire.ask("session/close", {"sessionId": session}))["result"] == {}
        assert crow.sessions == {}


async def test_logout_works_before_the_app_is_made():
    async def make() -> Crow:
        raise ModelError("No model is configured.")

    async with connect_raw(LazyApp(make)) as wire:
        assert (await wire.ask("logout", {}))["result"] == {}
        assert (await wire.ask("authenticate", LOGIN))["error"]["data"] == {"details": "No model is configured."}


@pytest.mark.parametrize(
    ("capabilities", "kind", "args", "meta"),
    [
        ({"auth": {"terminal": True}}, "terminal", ["setup"], None),
        ({"_meta": {"terminal-auth": True}}, None, None, ["acp", "setup"]),
        ({"auth": {"terminal": True}, "_meta": {"terminal-auth": True}}, "terminal", ["setup"], ["acp", "setup"]),
        ({"_meta": {"terminal-auth": "yes"}}, None, None, None),
        ({}, None, None, None),
    ],
)
async def test_a_client_with_a_terminal_is_offered_to_log_in_there(
    capabilities: dict[str, Any], kind: str | None, args: list[str] | None, meta: list[str] | None
):
    async def make() -> Crow:
        return make_app()

    app = LazyApp(make, Announced(login=("/bin/agent", "acp", "setup")))
    async with connect_raw(app) as wire:
        answer = await wire.ask("initialize", {"protocolVersion": 1, "clientCapabilities": capabilities})
        first, *terminal = answer["result"]["authMethods"]
        assert first["id"] == "configured"  # clients that log in with the first method need no user for it
        if kind is None and meta is None:
            assert terminal == []
            return
        (method,) = terminal
        assert (method.get("type"), method.get("args")) == (kind, args)
        legacy = method.get("_meta", {}).get("terminal-auth")
        assert (legacy and [legacy["command"], *legacy["args"]]) == (meta and ["/bin/agent", *meta])
        assert (await wire.ask("authenticate", {"methodId": method["id"]}))["result"] == {}


async def test_a_login_reads_the_models_again():
    class Reloaded(LazyApp):
        async def reload(self) -> None:
            assert self.made
            self.made.models = {"other": ScriptedModel([Reply("I am the other one.")])}

    async def make() -> Crow:
        return make_app()

    async with connect_raw(Reloaded(make)) as wire:
        await open_session(wire)
        assert (await wire.ask("authenticate", LOGIN))["result"] == {}
        answer = await wire.ask("session/new", {"cwd": "/", "mcpServers": []})
        assert "other" in str(answer["result"]["configOptions"])
