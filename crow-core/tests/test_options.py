"""Options and modes for clients with and without config options."""

import asyncio
from typing import Any

import pytest
from crow_core.acp.schema import INVALID_PARAMS
from crow_core.app import Crow
from crow_core.models.chat_model import ChatModel
from crow_core.models.quirks import Quirks
from crow_core.session.options import ON_OFF, Choice, Option
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.testing import Reply, ScriptedModel, ScriptedServer
from crow_core.testing.wire import RawClient, connect_raw
from crow_extensions.commands import commands
from crow_extensions.reasoning_effort import reasoning_effort
from crow_permissions.extension import permissions

pytestmark = pytest.mark.anyio

BOOLEANS: dict[str, Any] = {"session": {"configOptions": {"boolean": {}}}}


def make_model() -> ScriptedModel:
    return ScriptedModel(lambda request: Reply("Well."))


VERBOSE = StateKey("verbose", lambda: "off")


def verbosity(crow: Crow) -> None:
    """An option that is on or off."""

    @crow.options
    def option(session: Session) -> Option:
        def choose(value: str) -> None:
            session.state[VERBOSE] = value

        return Option(
            "verbose",
            "Verbose",
            "",
            ON_OFF,
            lambda: session.state[VERBOSE],
            choose,
            "Says more",
            is_switch=True,
        )


async def open_session(wire: RawClient, capabilities: Any = None) -> dict[str, Any]:
    """Open a session for a client with these capabilities; return the result of `session/new`."""
    await wire.ask("initialize", {"protocolVersion": 1, "clientCapabilities": capabilities or {}})
    return (await wire.ask("session/new", {"cwd": "/", "mcpServers": []}))["result"]


async def choose(wire: RawClient, session: str, option: str, value: Any, **more: Any) -> dict[str, Any]:
    return await wire.ask(
        "session/set_config_option", {"sessionId": session, "configId": option, "value": value, **more}
    )


def values(options: list[dict[str, Any]]) -> dict[str, Any]:
    return {option["id"]: option["currentValue"] for option in options}


def updates(wire: RawClient, kind: str) -> list[dict[str, Any]]:
    heard = (message["params"]["update"] for message in wire.received if message.get("method") == "session/update")
    return [update for update in heard if update["sessionUpdate"] == kind]


async def test_a_client_with_boolean_options_receives_one():
    async with connect_raw(Crow(make_model()).use(verbosity)) as wire:
        session = await open_session(wire, BOOLEANS)
        assert session["configOptions"][-1] == {
            "type": "boolean",
            "id": "verbose",
            "name": "Verbose",
            "description": "Says more",
            "currentValue": False,
        }
        answer = await choose(wire, session["sessionId"], "verbose", True, type="boolean")
        assert values(answer["result"]["configOptions"]) == {"model": "scripted", "verbose": True}
        answer = await choose(wire, session["sessionId"], "model", True, type="boolean")
        assert answer["error"]["code"] == INVALID_PARAMS


@pytest.mark.parametrize("capabilities", [{}, {"session": {"configOptions": {"boolean": None}}}, {"session": {}}])
async def test_a_client_without_boolean_options_receives_two_choices(capabilities: dict[str, Any]):
    async with connect_raw(Crow(make_model()).use(verbosity)) as wire:
        session = await open_session(wire, capabilities)
        option = session["configOptions"][-1]
        assert (option["type"], option["currentValue"]) == ("select", "off")
        assert [entry["value"] for entry in option["options"]] == ["on", "off"]
        answer = await choose(wire, session["sessionId"], "verbose", "on")
        assert values(answer["result"]["configOptions"])["verbose"] == "on"
        answer = await choose(wire, session["sessionId"], "verbose", "perhaps")
        assert answer["error"]["code"] == INVALID_PARAMS


async def test_a_mode_set_with_set_mode_is_announced_as_a_config_option():
    async with connect_raw(Crow(make_model()).use(permissions)) as wire:
        session = await open_session(wire)
        assert session["modes"]["currentModeId"] == values(session["configOptions"])["mode"] == "ask"
        answer = await wire.ask("session/set_mode", {"sessionId": session["sessionId"], "modeId": "plan"})
        assert answer["result"] == {}
        (update,) = updates(wire, "config_option_update")
        assert values(update["configOptions"]) == {"model": "scripted", "mode": "plan"}
        assert [update["currentModeId"] for update in updates(wire, "current_mode_update")] == ["plan"]


async def test_a_mode_set_as_a_config_option_is_announced_as_a_mode():
    async with connect_raw(Crow(make_model()).use(permissions)) as wire:
        session = await open_session(wire)
        answer = await choose(wire, session["sessionId"], "mode", "plan")
        assert values(answer["result"]["configOptions"]) == {"model": "scripted", "mode": "plan"}
        assert [update["currentModeId"] for update in updates(wire, "current_mode_update")] == ["plan"]
        await choose(wire, session["sessionId"], "mode", "plan")
        await choose(wire, session["sessionId"], "model", "scripted")
        assert len(updates(wire, "current_mode_update")) == 1
        assert updates(wire, "config_option_update") == []


async def test_a_mode_set_by_a_slash_command_is_announced_in_both_ways():
    async with connect_raw(Crow(make_model()).use(permissions).use(commands)) as wire:
        session = await open_session(wire)
        said = [{"type": "text", "text": "/mode plan"}]
        await wire.ask("session/prompt", {"sessionId": session["sessionId"], "prompt": said})
        assert [update["currentModeId"] for update in updates(wire, "current_mode_update")] == ["plan"]
        (update,) = updates(wire, "config_option_update")
        assert values(update["configOptions"])["mode"] == "plan"


@pytest.mark.parametrize("mode", ["god", "", "Plan"])
async def test_an_unknown_mode_changes_nothing(mode: str):
    async with connect_raw(Crow(make_model()).use(permissions)) as wire:
        session = await open_session(wire)
        answer = await wire.ask("session/set_mode", {"sessionId": session["sessionId"], "modeId": mode})
        assert answer["error"]["code"] == INVALID_PARAMS
        answer = await choose(wire, session["sessionId"], "model", "scripted")
        assert values(answer["result"]["configOptions"])["mode"] == "ask"


async def test_an_option_that_changes_the_mode_is_announced_as_a_mode_too():
    crow = Crow(make_model())

    @crow.options
    def mode(session: Session) -> Option:
        def current() -> str:
            return "bold" if session.state[VERBOSE] == "on" else "shy"

        def choose(value: str) -> None:
            session.state[VERBOSE] = {"bold": "on", "shy": "off"}[value]

        return Option("mode", "Mode", "mode", [Choice("shy", "Shy"), Choice("bold", "Bold")], current, choose)

    async with connect_raw(crow.use(verbosity)) as wire:
        session = await open_session(wire, BOOLEANS)
        await choose(wire, session["sessionId"], "verbose", True, type="boolean")
        assert [update["currentModeId"] for update in updates(wire, "current_mode_update")] == ["bold"]


async def test_the_list_of_options_can_depend_on_another_option():
    thinker = ChatModel(name="thinker", quirks=Quirks(effort="reasoning_effort"))
    async with connect_raw(Crow({"plain": make_model(), "thinker": thinker}).use(reasoning_effort)) as wire:
        session = await open_session(wire)
        assert list(values(session["configOptions"])) == ["model"]
        answer = await choose(wire, session["sessionId"], "model", "thinker")
        assert values(answer["result"]["configOptions"]) == {"model": "thinker", "thought_level": "default"}
        answer = await choose(wire, session["sessionId"], "thought_level", "high")
        assert values(answer["result"]["configOptions"])["thought_level"] == "high"
        answer = await choose(wire, session["sessionId"], "model", "plain")
        assert values(answer["result"]["configOptions"]) == {"model": "plain"}
        answer = await choose(wire, session["sessionId"], "thought_level", "low")
        assert answer["error"]["code"] == INVALID_PARAMS


async def test_an_option_set_while_a_turn_runs_holds_from_the_next_request_on():
    asked, chosen = asyncio.Event(), asyncio.Event()

    async def first(request: dict[str, Any]) -> Reply:
        asked.set()
        await chosen.wait()
        return Reply(tool_calls=[{"name": "nothing", "arguments": {}}])

    async with ScriptedServer([Reply("From the other.")]) as server:
        other = ChatModel(name="other", base_url=server.url)
        async with connect_raw(Crow({"one": ScriptedModel(first), "other": other}).use(permissions)) as wire:
            session = (await open_session(wire))["sessionId"]
            prompt = {"sessionId": session, "prompt": [{"type": "text", "text": "go"}]}
            prompting = asyncio.ensure_future(wire.ask("session/prompt", prompt))
            await asked.wait()
            for id, params in (
                ("a", {"configId": "model", "value": "other"}),
                ("b", {"configId": "mode", "value": "plan"}),
            ):
                wire.send(id, "session/set_config_option", {"sessionId": session, **params})
            while not {"a", "b"} <= {message.get("id") for message in wire.received}:
                await asyncio.sleep(0)
            chosen.set()
            assert (await prompting)["result"] == {"stopReason": "end_turn"}
            assert len(server.requests) == 1
            said = server.requests[0]["messages"]
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool"]
