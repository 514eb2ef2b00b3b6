"""ACP version 2, a draft, over the same sessions as version 1."""

import subprocess
import sys
from base64 import b64decode
from itertools import groupby
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp.schema import INVALID_PARAMS, METHOD_NOT_FOUND, NOT_FOUND, REQUEST_CANCELLED
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.mcp.server import Server
from crow_core.session.store import Record
from crow_core.testing import MemoryStore, Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_core.testing.wire import connect_raw
from crow_extensions.commands import commands
from crow_extensions.plan import plan
from crow_extensions.steering import steering
from crow_extensions.undo import undo
from crow_permissions.extension import permissions
from crow_testing.version_2 import INITIALIZE, ClientV2, connect_2, make_prompt
from crow_testing.waiting_tool import WaitingTool

pytestmark = pytest.mark.anyio

BUILT_IN = Server(
    "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
)


WORKING = Reply("Calling.", tool_calls=[Use(name="demo_work", arguments={})])


def edit(file: Path, text: str) -> Use:
    return Use(name="file_editor", arguments={"command": "create", "path": str(file), "file_text": text})


def replace(file: Path, old: str, new: str) -> Use:
    arguments = {"command": "str_replace", "path": str(file), "old_str": old, "new_str": new}
    return Use(name="file_editor", arguments=arguments)


def run(line: str) -> Use:
    return Use(name="terminal", arguments={"command": line})


def apply(patch: str) -> None:
    subprocess.run(["git", "apply", "-p0", "--unsafe-paths", "-"], input=patch, text=True, check=True, cwd="/")


def show(terminal: dict[str, Any]) -> str:
    return b64decode(terminal["output"]["data"]).decode()


async def test_a_prompt_is_acknowledged_and_its_turn_is_told_by_updates():
    async with connect_2(Crow(ScriptedModel([Reply("Hello.", reasoning="Hm.")]))) as client:
        session = await client.open()
        acknowledged = await client.ask("session/prompt", make_prompt(session, "go"))
        await client.until(ClientV2.ends)
        message, thought = client.of("user_message")[0], client.of("agent_thought_chunk")[0]
        assert message["messageId"] == acknowledged["messageId"]
        assert message["content"] == [{"type": "text", "text": "go"}]
        assert client.text == "Hello."
        assert client.states() == ["running", "idle"]
        assert client.ends()[-1]["stopReason"] == "end_turn"
        assert thought["messageId"] != client.of("agent_message_chunk")[0]["messageId"]
    kinds = [kind for kind in client.order if kind != "available_commands_update"]
    told = ["user_message", "state_update", "agent_thought_chunk", "agent_message_chunk", "state_update"]
    assert [kind for kind, _ in groupby(kinds[2:])] == ["result", *told]


async def test_the_second_version_is_spoken_only_with_a_client_that_asks_for_it():
    for params, version in (
        (INITIALIZE, 2),
        ({**INITIALIZE, "protocolVersion": 1}, 1),
        ({**INITIALIZE, "protocolVersion": 3}, 1),
        ({**INITIALIZE, "protocolVersion": 65535}, 1),
        ({"protocolVersion": 2}, 1),
        ({"protocolVersion": 2, "clientInfo": {"name": "x", "version": "1"}, "clientCapabilities": {}}, 1),
    ):
        async with connect_raw(Crow(ScriptedModel([]))) as wire:
            answer = (await wire.ask("initialize", params))["result"]
            assert answer["protocolVersion"] == version
            assert ("agentCapabilities" in answer) == (version == 1)


@pytest.mark.parametrize("info", [None, 7, {}, {"name": "x"}])
async def test_a_client_of_the_second_version_with_wrong_info_is_told_so(info: Any):
    async with connect_raw(Crow(ScriptedModel([]))) as wire:
        error = (await wire.ask("initialize", {"protocolVersion": 2, "info": info}))["error"]
        assert error["code"] == INVALID_PARAMS
        assert error["message"].startswith("Invalid params: info")


async def test_methods_of_the_first_version_are_unknown_in_the_second_and_the_other_way_round():
    async with connect_2(Crow(ScriptedModel([]))) as client:
        session = await client.open()
        for method in ("session/load", "session/set_mode", "authenticate", "logout"):
            assert (await client.fail(method, {"sessionId": session}))["code"] == METHOD_NOT_FOUND
    async with connect_raw(Crow(ScriptedModel([]))) as wire:
        for method in ("auth/login", "tool_call/cancel", "terminal/cancel"):
            assert (await wire.ask(method, {}))["error"]["code"] == METHOD_NOT_FOUND


async def test_initialize_tells_capabilities_as_markers_and_that_it_is_experimental():
    async with connect_2(Crow(ScriptedModel([])).use(steering)) as client:
        told = await client.ask("initialize", INITIALIZE)
        assert told["capabilities"]["session"]["prompt"] == {"image": {}, "embeddedContext": {}}
        assert told["capabilities"]["session"]["mcp"] == {"stdio": {}, "http": {}}
        assert told["capabilities"]["_meta"]["crow"]["experimental"] is True
        assert told["_meta"] == {"steering": {"supported": True}}
        assert [(one["type"], one["methodId"]) for one in told["authMethods"]] == [("agent", "configured")]
        assert await client.ask("auth/login", {"methodId": "configured"}) == {}
        assert await client.ask("auth/logout", {}) == {}


async def test_a_prompt_during_a_turn_joins_it_and_is_acknowledged_when_it_has():
    work, model = WaitingTool(), ScriptedModel([WORKING, Reply("Done.")])
    async with connect_2(Crow(model, servers=[work.server]).use(steering)) as client:
        session = await client.open()
        await client.ask("session/prompt", make_prompt(session, "go"))
        await work.started.wait()
        joining = client.send("session/prompt", make_prompt(session, "in blue"))
        await client.ask("session/list", {})
        assert not joining.done()
        work.go_on.set()
        id = (await joining)["result"]["messageId"]
        await client.until(ClientV2.ends)
        assert [each["messageId"] for each in client.of("user_message_chunk")] == [id]
        assert client.states() == ["running", "idle"]
    assert model.requests[-1]["messages"][-1]["content"] == "in blue"


async def test_without_steering_a_prompt_waits_for_the_turn_before_it():
    work, model = WaitingTool(), ScriptedModel([WORKING, Reply("Done."), Reply("Second.")])
    async with connect_2(Crow(model, servers=[work.server])) as client:
        session = await client.open()
        first = (await client.ask("session/prompt", make_prompt(session, "one")))["messageId"]
        await work.started.wait()
        waiting = client.send("session/prompt", make_prompt(session, "two"))
        await client.ask("session/list", {})
        assert not waiting.done()
        work.go_on.set()
        second = (await waiting)["result"]["messageId"]
        await client.until(lambda client: len(client.ends()) == 2)
        assert [each["messageId"] for each in client.of("user_message")] == [first, second]
        assert client.states() == ["running", "idle"] * 2


async def test_cancel_ends_the_turn_and_refuses_the_prompts_that_wait():
    work = WaitingTool()
    async with connect_2(Crow(ScriptedModel([WORKING]), servers=[work.server])) as client:
        session = await client.open()
        await client.ask("session/prompt", make_prompt(session, "one"))
        await work.started.wait()
        waiting = client.send("session/prompt", make_prompt(session, "two"))
        client.notify("session/cancel", {"sessionId": session})
        assert (await waiting)["error"]["code"] == REQUEST_CANCELLED
        await client.until(ClientV2.ends)
        assert client.ends()[-1]["stopReason"] == "cancelled"
        (call,) = client.calls().values()
        assert call["status"] == "cancelled"
        assert "capabilities" not in call
        assert client.order[-1] == "state_update"


async def test_one_tool_call_is_cancelled_and_the_turn_goes_on():
    work, model = WaitingTool(), ScriptedModel([WORKING, Reply("Without it.")])
    async with connect_2(Crow(model, servers=[work.server])) as client:
        session = await client.open()
        await client.ask("session/prompt", make_prompt(session, "go"))
        await work.started.wait()
        ((id, call),) = client.calls().items()
        assert (call["status"], call["capabilities"]) == ("in_progress", {"cancel": {}})
        asked = {"sessionId": session, "toolCallId": id}
        assert await client.ask("tool_call/cancel", asked) == {}
        await client.until(ClientV2.ends)
        assert client.calls()[id]["status"] == "cancelled"
        assert client.ends()[-1]["stopReason"] == "end_turn"
        assert client.text == "Calling.Without it."
        assert (await client.fail("tool_call/cancel", asked))["code"] == INVALID_PARAMS
    assert "The user cancelled this call." in model.requests[-1]["messages"][-1]["content"]


async def test_a_command_is_shown_in_a_terminal_and_its_permission_names_it(tmp_path: Path):
    model = ScriptedModel([Reply(tool_calls=[run("echo $((6 * 7)) | tee answer")]), Reply("It is 42.")])
    async with connect_2(Crow(model, servers=[BUILT_IN]).use(permissions)) as client:
        session = await client.open(str(tmp_path))
        assert await client.prompt(session, "go") == "end_turn"
        (question,) = client.questions
        ((id, call),) = client.calls().items()
        assert question["subject"] == {
            "type": "command",
            "command": "echo $((6 * 7)) | tee answer",
            "cwd": str(tmp_path),
            "toolCallId": id,
        }
        assert client.states() == ["running", "requires_action", "running", "idle"]
        ((terminal_id, terminal),) = client.terminals().items()
        assert call["content"] == [{"type": "terminal", "terminalId": terminal_id}]
        assert call["status"] == "completed"
        assert (terminal["command"], terminal["cwd"]) == ("echo $((6 * 7)) | tee answer", str(tmp_path))
        assert show(terminal).strip() == "42"
        assert terminal["exitStatus"] == {"exitCode": 0}
        assert "capabilities" not in terminal
    kinds = [kind for kind in client.order if kind in ("terminal_update", "tool_call_update")]
    assert kinds[0] == "terminal_update"


async def test_a_command_that_fails_has_its_exit_code_and_one_that_hangs_is_cancelled_by_its_terminal(tmp_path: Path):
    fails, hangs = Reply(tool_calls=[run("echo no; exit 3")]), Reply(tool_calls=[run("touch begun; sleep 600")])
    model = ScriptedModel([fails, Reply("It failed."), hangs, Reply("As you like.")])
    crow = Crow(model, servers=[BUILT_IN]).use(permissions, mode="yolo")
    async with connect_2(crow) as client:
        session = await client.open(str(tmp_path))
        await client.prompt(session, "go")
        ((_, call),) = client.calls().items()
        ((_, terminal),) = client.terminals().items()
        assert (call["status"], terminal["exitStatus"]) == ("failed", {"exitCode": 3})
        ends = len(client.ends())
        await client.ask("session/prompt", make_prompt(session, "again"))
        await client.until(lambda client: any("capabilities" in each for each in client.terminals().values()))
        id = next(id for id, each in client.terminals().items() if "capabilities" in each)
        await client.ask("terminal/cancel", {"sessionId": session, "terminalId": id})
        await client.until(lambda client: len(client.ends()) > ends)
        assert "exitStatus" in client.terminals()[id]
        assert client.ends()[-1]["stopReason"] == "end_turn"
        asked = {"sessionId": session, "terminalId": id}
        assert (await client.fail("terminal/cancel", asked))["code"] == INVALID_PARAMS


async def test_edits_are_changes_with_patches_that_git_applies(tmp_path: Path):
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    old.write_text("one\ntwo")
    calls = [replace(old, "two", "2"), edit(new, "made\n")]
    model = ScriptedModel([Reply(tool_calls=calls), Reply("Done.")])
    crow = Crow(model, servers=[BUILT_IN]).use(permissions, mode="yolo")
    async with connect_2(crow) as client:
        session = await client.open(str(tmp_path))
        await client.prompt(session, "go")
        diffs = [part for call in client.calls().values() for part in call["content"] if part["type"] == "diff"]
    changes = {each["changes"][0]["path"]: each["changes"][0]["operation"] for each in diffs}
    assert changes == {str(old): "modify", str(new): "add"}
    after = {path: path.read_text() for path in (old, new)}
    new.unlink()
    old.write_text("one\ntwo")
    patch = "".join(each["patch"]["text"] for each in diffs)
    apply(patch)
    assert {path: path.read_text() for path in (old, new)} == after


async def test_a_resumed_session_is_replayed_in_whole_objects_from_its_start_or_a_message(tmp_path: Path):
    replies = [Reply("I look.", reasoning="Hm.", tool_calls=[run("echo 42")]), Reply("It is 42."), Reply("Yes.")]
    crow = Crow(ScriptedModel(replies), servers=[BUILT_IN]).use(permissions, mode="yolo")
    crow.store = MemoryStore()
    async with connect_2(crow) as client:
        session = await client.open(str(tmp_path))
        await client.prompt(session, "one")
        await client.prompt(session, "two")
        live = [each["messageId"] for each in client.of("user_message")]
        shown = len(client.updates)
        resume = {"sessionId": session, "cwd": str(tmp_path)}
        await client.ask("session/resume", resume)
        assert client.updates[-1] == {"sessionUpdate": "state_update", "state": "idle", "background": []}
        assert not any("message" in each["sessionUpdate"] for each in client.updates[shown:])
        shown = len(client.updates)
        await client.ask("session/resume", {**resume, "replayFrom": {"type": "start"}})
        replayed = [each for each in client.updates[shown:] if "available" not in each["sessionUpdate"]]
        kinds = [each["sessionUpdate"] for each in replayed][:7]
        assert kinds == [
            "user_message",
            "agent_thought",
            "agent_message",
            "terminal_update",
            "tool_call_update",
            "agent_message",
            "user_message",
        ]
        assert [each["messageId"] for each in replayed if each["sessionUpdate"] == "user_message"] == live
        assert show(replayed[3]).strip() == "42"
        assert replayed[4]["status"] == "completed"
        shown = len(client.updates)
        point = {"type": "_message", "messageId": live[1]}
        await client.ask("session/resume", {**resume, "replayFrom": point})
        told = [each["content"][0]["text"] for each in client.updates[shown:] if "message" in each["sessionUpdate"]]
        assert told == ["two", "Yes."]
        for wrong in ({"type": "_message", "messageId": "other"}, {"type": "_message"}, {"type": "end"}):
            assert (await client.fail("session/resume", {**resume, "replayFrom": wrong}))["code"] == INVALID_PARAMS
        await client.ask("session/resume", resume)
        assert (await client.fail("session/resume", {**resume, "sessionId": "no"}))["code"] == NOT_FOUND


async def test_a_client_of_the_first_version_may_load_a_session_from_a_message():
    entries: list[Any] = [
        {"role": "user", "content": "one", "crow": {"id": "1"}},
        {"role": "assistant", "content": "Eins.", "crow": {"id": "2"}},
        {"role": "user", "content": "two", "crow": {"id": "3"}},
    ]
    crow = Crow(ScriptedModel([]))
    crow.store = MemoryStore(Record("kept", entries))
    async with connect_raw(crow) as wire:
        params: dict[str, Any] = {"sessionId": "kept", "cwd": "/", "mcpServers": []}
        for start, texts in (("3", ["two"]), ("2", ["Eins.", "two"]), ("", ["one", "Eins.", "two"])):
            wanted = {"type": "_message", "messageId": start} if start else {"type": "start"}
            wire.received.clear()
            params["_meta"] = {"crow": {"replayFrom": wanted}}
            assert "result" in await wire.ask("session/load", params)
            updates = [each["params"]["update"] for each in wire.received if "params" in each]
            assert [each["content"]["text"] for each in updates if "content" in each] == texts
        params["_meta"] = {"crow": {"replayFrom": {"type": "_message", "messageId": "9"}}}
        assert (await wire.ask("session/load", params))["error"]["code"] == INVALID_PARAMS
        del params["_meta"]
        assert "result" in await wire.ask("session/load", params)


@pytest.mark.parametrize("unstable", [False, True])
async def test_sessions_are_listed_and_deleted(unstable: bool):
    crow = Crow(ScriptedModel([Reply("Hello.")]))
    crow.store = MemoryStore()
    async with connect_2(crow, unstable=unstable) as client:
        session = await client.open()
        await client.prompt(session, "go")
        assert [one["sessionId"] for one in (await client.ask("session/list", {}))["sessions"]] == [session]
        assert await client.ask("session/delete", {"sessionId": session}) == {}
        assert (await client.ask("session/list", {}))["sessions"] == []


async def test_options_have_ids_of_their_own_and_a_mode_is_one_of_them():
    crow = Crow(ScriptedModel([])).use(permissions).use(commands)
    async with connect_2(crow) as client:
        opened = await client.ask("session/new", {"cwd": "/"})
        mode = next(one for one in opened["configOptions"] if one["configId"] == "mode")
        assert mode["category"] == "mode"
        assert {one["name"] for one in opened["availableCommands"]} >= {"help"}
        asked = {"sessionId": opened["sessionId"], "configId": "mode", "type": "id", "value": "plan"}
        answer = await client.ask("session/set_config_option", asked)
        assert next(one for one in answer["configOptions"] if one["configId"] == "mode")["currentValue"] == "plan"
        for wrong in ({"value": "loud"}, {"configId": "no"}, {"value": 7}):
            assert (await client.fail("session/set_config_option", {**asked, **wrong}))["code"] == INVALID_PARAMS


async def test_a_plan_has_an_id():
    steps = [{"step": "Look", "status": "in_progress"}]
    model = ScriptedModel([Reply(tool_calls=[Use(name="plan", arguments={"steps": steps})]), Reply("Done.")])
    async with connect_2(Crow(model).use(plan)) as client:
        await client.prompt(await client.open(), "go")
        assert [each["plan"]["planId"] for each in client.of("plan_update")] == ["plan"]


async def test_a_turn_that_fails_ends_with_the_error():
    async with connect_2(Crow(ScriptedModel([Reply(error=ModelError("The model is asleep."))]))) as client:
        assert await client.prompt(await client.open(), "go") == "error"
        assert "The model is asleep." in client.ends()[-1]["error"]["message"]


async def test_a_slash_command_is_echoed_and_ends_the_turn():
    async with connect_2(Crow(ScriptedModel([])).use(commands).use(undo)) as client:
        session = await client.open()
        assert await client.prompt(session, "/undo") == "end_turn"
        assert client.of("user_message")[0]["content"][0]["text"] == "/undo"


async def test_wrong_prompts_are_refused_before_they_are_acknowledged():
    async with connect_2(Crow(ScriptedModel([]))) as client:
        session = await client.open()
        for wrong in ([], "go", [{"type": "text"}], [{"type": "hologram"}], None):
            assert (await client.fail("session/prompt", {"sessionId": session, "prompt": wrong}))["code"] == -32602
        assert (await client.fail("session/prompt", make_prompt("other", "go")))["code"] == NOT_FOUND
        assert client.of("state_update") == []


async def test_servers_of_the_client_connect_and_unknown_kinds_are_left_out(tmp_path: Path):
    script = tmp_path / "server.py"
    script.write_text(
        "from fastmcp import FastMCP\nserver = FastMCP('mine')\n\n@server.tool\ndef hello() -> str:\n"
        "    return 'hi'\n\nserver.run(show_banner=False)\n"
    )
    servers: list[Any] = [
        {"type": "stdio", "name": "mine", "command": sys.executable, "args": [str(script)]},
        {"type": "carrier_pigeon", "name": "bird"},
        {"type": "stdio", "name": "nothing"},
        {"type": "http", "name": "nowhere"},
    ]
    model = ScriptedModel([Reply(tool_calls=[Use(name="mine_hello", arguments={})]), Reply("Done.")])
    async with connect_2(Crow(model)) as client:
        session = await client.open(str(tmp_path), mcpServers=servers)
        await client.prompt(session, "go")
        (call,) = client.calls().values()
        assert call["content"] == [{"type": "content", "content": {"type": "text", "text": "hi"}}]


async def test_the_client_leaves_while_a_turn_runs():
    work = WaitingTool()
    crow = Crow(ScriptedModel([WORKING]), servers=[work.server])
    async with connect_2(crow) as client:
        await client.ask("session/prompt", make_prompt(await client.open(), "go"))
        await work.started.wait()
    assert crow.sessions == {}


def test_the_first_version_does_not_load_the_second():
    script = "import sys, crow_core.agent.acp_agent; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if "v2" in name} == set()
