"""Extensions that the configuration names, in the real command."""

from pathlib import Path
from typing import TYPE_CHECKING

import crow_mcp_server
import msgspec
import pytest
from crow_agent.app import build
from crow_cli.acp import METHODS
from crow_core.acp.schema import (
    AgentMessageChunk,
    ClientCapabilities,
    FileSystemCapabilities,
    ListSessionsRequest,
    LoadSessionRequest,
    TextBlock,
)
from crow_core.testing import Editor, Reply, ScriptedCall, ScriptedModel, ScriptedServer, connect

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

SHOUT = """
def shout(crow, *, mark: str = "!", times: int = 1):
    @crow.before_prompt
    def louder(message, session):
        return {**message, "content": message["content"].upper() + mark * times}
"""
FOREIGN = """
def whisper(crow, **options):
    @crow.before_prompt
    def lower(message, session):
        return {**message, "content": message["content"].lower() + str(options)}
"""


def write(machine: "Machine", name: str, code: str) -> None:
    folder = Path(machine.env["CROW_HOME"], "extensions")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(code)


def install(machine: "Machine", name: str, code: str) -> None:
    """Install the metadata and the module of a package with an entry point."""
    site = machine.home / "site"
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}_package.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[crow.extensions]\n{name} = {name}_package:{name}\n")
    machine.env["PYTHONPATH"] = str(site)


async def read_by_model(machine: "Machine", toml: str) -> str:
    """Run a prompt with this configuration and return what the model reads of it."""
    machine.configure(toml)
    async with ScriptedServer([Reply("Yes.")]) as model:
        machine.ask(model.url)
        done = await machine.crow("run", "Hi")
        assert done.code == 0, done.err
        return model.requests[0]["messages"][-1]["content"]


async def error_message(machine: "Machine", toml: str) -> str:
    """Run a prompt with this configuration, which is invalid, and return the message."""
    machine.configure(toml)
    machine.ask("http://localhost:1")
    done = await machine.crow("run", "Hi")
    assert done.code != 0
    assert "Traceback" not in done.err
    return done.err


async def test_an_extension_in_a_file_gets_its_options_from_its_table(machine: "Machine"):
    write(machine, "shout", SHOUT)
    assert await read_by_model(machine, '[extensions.shout]\nmark = "?"\ntimes = 2\n') == "HI??"


async def test_an_extension_that_is_not_named_is_not_loaded(machine: "Machine"):
    write(machine, "shout", SHOUT)
    assert await read_by_model(machine, "[extensions]\nshout = false\n") == "Hi"


async def test_extensions_of_packages_and_files_are_used_in_the_order_of_the_configuration(machine: "Machine"):
    write(machine, "shout", SHOUT)
    install(machine, "whisper", FOREIGN)
    assert await read_by_model(machine, "[extensions.shout]\n[extensions.whisper]\nany = 1\n") == "hi!{'any': 1}"


async def test_crows_own_extensions_can_be_configured_and_left_out(machine: "Machine"):
    assert await read_by_model(machine, "[extensions]\ncommands = false\n[extensions.truncate]\nlimit = 100\n") == "Hi"


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[extensions.shout]\nmarks = 1\n", "config.toml, line 2, extensions.shout.marks: no such setting."),
        ('[extensions.shout]\ntimes = "x"\n', "config.toml, line 2, extensions.shout.times: expected `int`, got `str`"),
        ("[extensions.compact]\nthreshold = -1\n", "line 2, extensions.compact.threshold: expected `float` >= 0"),
        ("[extensions.budgets]\nturns = 1\n", "line 2, extensions.budgets.turns: this setting is called requests now."),
        ("[[hooks.before_lunch]]\n", "line 1, hooks.before_lunch: no such setting."),
        ('[[hooks.turn_end]]\ncommand = "x"\ntimeout = 0\n', "line 3, hooks.turn_end.timeout: expected `float` > 0.0"),
        ("[extensions.nobody]\n", "there is no extension 'nobody'. Install the package that has it, write "),
        (
            "[extensions.broken]\n",
            "[extensions.broken] cannot be loaded: ModuleNotFoundError: No module named 'nowhere'.",
        ),
        ("[extensions.other]\n", "[extensions.other] cannot be loaded: AttributeError"),
        ("[extensions.picky]\n", "[extensions.picky] cannot be used: nothing is good enough."),
    ],
)
async def test_invalid_configuration_is_one_sentence(machine: "Machine", toml: str, says: str):
    write(machine, "shout", SHOUT)
    write(machine, "broken", "import nowhere")
    write(machine, "other", SHOUT)
    write(machine, "picky", 'def picky(crow):\n    raise ValueError("nothing is good enough")')
    assert says in await error_message(machine, toml)


async def test_hook_commands_of_a_project_are_ignored(machine: "Machine"):
    (machine.project / ".crow").mkdir()
    (machine.project / ".crow" / "config.toml").write_text('[[hooks.turn_end]]\ncommand = "touch theirs"\n')
    await machine.crow("trust", "--yes", str(machine.project))
    await read_by_model(machine, '[[hooks.turn_end]]\ncommand = "touch ours"\n')
    assert (machine.project / "ours").exists()
    assert not (machine.project / "theirs").exists()


async def test_system_prompt_and_tools_are_short(machine: "Machine"):
    """A token is estimated, cautiously, as three and a half characters."""
    async with ScriptedServer([Reply("Yes.")]) as model:
        machine.ask(model.url)
        await machine.crow("run", "Hi")
    (request,) = model.requests
    system, ours = request["messages"][0]["content"], {tool["name"] for tool in crow_mcp_server.tools()}
    schemas = {tool["function"]["name"]: len(msgspec.json.encode(tool)) for tool in request["tools"]}
    assert len(system) < 600 * 3.5
    assert len(system) + sum(schemas[name] for name in ours & schemas.keys()) < 2000 * 3.5
    assert len(system) + sum(schemas.values()) < 2250 * 3.5
    assert "read_output" not in schemas


async def test_a_sub_agent_is_a_stored_session_and_works_with_the_files_of_the_same_client(machine: "Machine"):
    machine.configure('[permissions]\nmode = "yolo"\n[extensions.subagents]\n')
    file = str(machine.project / "a.txt")
    write: ScriptedCall = {"name": "file_editor", "arguments": {"command": "create", "path": file, "file_text": "a\n"}}
    task: ScriptedCall = {"name": "agent", "arguments": {"description": "Write a", "prompt": "Write a."}}
    replies = [Reply(tool_calls=[task]), Reply(tool_calls=[write]), Reply("Written."), Reply("Done.")]
    files = ClientCapabilities(fs=FileSystemCapabilities(read_text_file=True, write_text_file=True))
    crow = await build(machine.env, models={"scripted": ScriptedModel(replies)})
    async with connect(crow, capabilities=files) as editor:
        session = await editor.new_session(str(machine.project))
        await editor.prompt(session.session_id, "Have a written.")
        page = await editor.request("session/list", ListSessionsRequest())
        assert [found.title for found in page.sessions] == ["Have a written."]
        listed = await machine.crow("sessions", "list", "--agents", "--json")
        titles = {found["title"]: found["id"] for found in msgspec.json.decode(listed.out)}
        assert set(titles) == {"Have a written.", "Write a"}
        asked = {params.session_id for _, params in editor.requests}
        assert asked == {session.session_id}
        before = len(editor.updates)
        again = LoadSessionRequest(session_id=titles["Write a"], cwd=str(machine.project), mcp_servers=[])
        await editor.request("session/load", again)
        shown = [update for update in editor.updates[before:] if isinstance(update, AgentMessageChunk)]
        logs = {id: crow.sessions[id].log for id in titles.values()}
        shown_by_command = await machine.crow("sessions", "show", session.session_id)
        for id in (titles["Write a"], session.session_id):
            await crow.close(crow.sessions[id])
        await crow.delete(session.session_id)
    assert (machine.project / "a.txt").read_text() == "a\n"
    assert [chunk.content for chunk in shown] == [TextBlock(text="Written.")]
    links = {note["kind"]: note["session"] for log in logs.values() for e in log if "session" in (note := e["crow"])}
    assert links == {"child": titles["Write a"], "parent": session.session_id, "changes": titles["Write a"]}
    assert f"Started a sub-agent: session {titles['Write a']}" in shown_by_command.out
    assert msgspec.json.decode((await machine.crow("sessions", "list", "--agents", "--json")).out) == []


async def test_budget_ends_the_turn_when_nobody_can_be_asked(machine: "Machine"):
    machine.configure("[extensions.budgets]\nrequests = 1\n")
    look: ScriptedCall = {"name": "tree", "arguments": {}}
    async with ScriptedServer([Reply("I look.", tool_calls=[look])]) as model:
        machine.ask(model.url)
        done = await machine.crow("run", "Look around")
    assert "The budget is used up: 1 of 1 requests. [extensions.budgets] sets it." in done.err
    assert done.code != 0


ANSWERING = """
def answering(crow):
    crow.methods["_mine/double"] = lambda session, params: 2 * params["n"]
"""


async def test_crow_acp_announces_the_methods_of_an_extension_that_is_not_crows(machine: "Machine"):
    write(machine, "answering", ANSWERING)
    machine.configure("[extensions.answering]")
    async with ScriptedServer([Reply("Yes.")]) as model:
        machine.ask(model.url)
        editor = Editor(await machine.agent())
        async with editor.serving():
            announced = await editor.initialize("editor", ClientCapabilities())
            assert announced.agent_capabilities.meta["crow"]["methods"] == [*METHODS, "_mine/double"]


@pytest.mark.parametrize("on", [True, False])
async def test_crow_acp_announces_typed_results_unless_they_are_off(machine: "Machine", on: bool):
    machine.configure("" if on else "[extensions]\nstructured_output = false\n")
    async with ScriptedServer([Reply("4")]) as model:
        machine.ask(model.url)
        editor = Editor(await machine.agent())
        async with editor.serving():
            announced = await editor.initialize("editor", ClientCapabilities())
            assert announced.agent_capabilities.meta["crow"].get("outputSchema", False) is on
            if on:
                id = (await editor.new_session(str(machine.home))).session_id
                meta = {"crow": {"outputSchema": {"type": "integer"}}}
                assert (await editor.prompt(id, "2 + 2?", meta)).meta == {"crow": {"output": 4}}


async def test_crow_acp_announces_its_own_methods_before_the_app_is_made(machine: "Machine"):
    async with ScriptedServer([Reply("Yes.")]) as model:
        machine.ask(model.url)
        crow = await build(machine.env)
        assert {*crow.methods} == {*METHODS}
        await crow.shut_down()
