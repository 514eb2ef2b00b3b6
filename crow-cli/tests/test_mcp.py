"""`crow mcp` as a real command, with real servers."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from crow_agent.app import build
from crow_cli.mcp_commands import edit_servers, lock_folder
from crow_core.acp.schema import AvailableCommandsUpdate
from crow_core.testing import Reply, ScriptedModel, ScriptedServer, connect
from crow_persistence.extension import persistence
from fastmcp import FastMCP

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

SERVER = """
import os
from fastmcp import FastMCP

server = FastMCP("birds", version="7")
server.tool(lambda: "caw", name="sing")
server.resource("bird://crow", name="crow")(lambda: "black")
server.prompt(lambda: "sing", name="song")

@server.resource("bird://{name}")
def bird(name: str) -> str:
    return name

server.run(show_banner=False)
"""


@pytest.fixture
def birds(tmp_path: Path) -> list[str]:
    """Return the command of a server."""
    file = tmp_path / "birds.py"
    file.write_text(SERVER)
    return [sys.executable, str(file)]


def file_of(machine: "Machine") -> Path:
    return Path(machine.env["CROW_HOME"], "mcp.json")


def write(machine: "Machine", text: str) -> Path:
    file = file_of(machine)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def servers_in(machine: "Machine") -> dict[str, Any]:
    return json.loads(file_of(machine).read_text())["mcpServers"]


async def test_command_is_added_tested_and_removed(machine: "Machine", birds: list[str]):
    added = await machine.crow("mcp", "add", "birds", "--env", "KEY=a b", "--env", "HOME", "--", *birds, "-x", "$(id)")
    assert (added.code, added.out) == (0, "")
    assert servers_in(machine) == {
        "birds": {"command": birds[0], "args": [*birds[1:], "-x", "$(id)"], "env": {"KEY": "a b", "HOME": "${HOME}"}}
    }
    assert file_of(machine).stat().st_mode & 0o777 == 0o600
    tried = await machine.crow("mcp", "test", "birds")
    assert tried.code == 0, tried.err
    first, *rest = tried.out.splitlines()
    assert first.startswith("birds: birds 7, MCP 2026-07-28, up in ")
    assert rest == [
        "tools (1): sing",
        "resources (1): bird://crow",
        "templates (1): bird://{name}",
        "prompts (1): song",
    ]
    assert (await machine.crow("mcp", "remove", "birds")).code == 0
    assert servers_in(machine) == {}


async def test_url_is_added_with_its_headers(machine: "Machine"):
    await machine.crow("mcp", "add", "a", "https://x/mcp", "--header", "Authorization: Bearer ${KEY}")
    await machine.crow("mcp", "add", "b", "--transport", "sse", "--auth", "oauth", "http://x/sse")
    assert servers_in(machine) == {
        "a": {"type": "http", "url": "https://x/mcp", "headers": {"Authorization": "Bearer ${KEY}"}},
        "b": {"type": "sse", "url": "http://x/sse", "auth": "oauth"},
    }


async def test_other_contents_of_the_file_are_kept_also_behind_a_link(machine: "Machine", tmp_path: Path):
    real = tmp_path / "dotfiles.json"
    real.write_text('{"inputs": [1], "servers": {"old": {"command": "x", "gallery": true}}}')
    write(machine, "").unlink()
    file_of(machine).symlink_to(real)
    assert (await machine.crow("mcp", "add", "new", "y")).code == 0
    assert json.loads(real.read_text()) == {
        "inputs": [1],
        "servers": {"old": {"command": "x", "gallery": True}, "new": {"command": "y", "args": []}},
    }
    assert file_of(machine).is_symlink()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["add", "a b", "x"], "is not a name for a server"),
        (["add", "old", "x"], "has a server 'old' already. Remove it first: crow mcp remove old"),
        (["add", "set", "x"], "config.toml has a server 'set' already. Change it there."),
        (["add", "new"], "crow mcp add NAME URL, or crow mcp add NAME -- COMMAND"),
        (["remove", "set"], "config.toml: remove it there."),
        (["add", "new", "--transport", "http", "--", "x"], "--transport http takes one http or https address."),
        (["add", "new", "--transport", "stdio", "https://x"], "--transport stdio takes a command."),
        (["add", "new", "--header", "A: b", "--", "x"], "--header and --auth are for a server with an address"),
        (["add", "new", "--env", "A=b", "https://x"], "--env is for a command"),
        (["add", "new", "--env", "a b=c", "x"], "a variable is KEY=VALUE, or KEY."),
        (["add", "new", "--header", "nothing", "https://x"], "a header is 'Name: value'."),
        (["remove", "no"], "has no server 'no'."),
        (["test", "no"], "There is no MCP server 'no'. crow mcp list shows all servers."),
        (["login", "old"], "has no auth = \"oauth\" for 'old'. Add it to log in there."),
    ],
)
async def test_wrong_usage_is_a_sentence_and_changes_nothing(machine: "Machine", arguments: list[str], sentence: str):
    text = '{"mcpServers": {"old": {"command": "x"}}}'
    file = write(machine, text)
    machine.configure('[mcp.servers.set]\ncommand = "x"\n')
    done = await machine.crow("mcp", *arguments)
    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err
    assert file.read_text() == text
    assert sorted(os.listdir(file.parent)) == ["config.toml", "mcp.json"]


async def test_changes_to_the_file_wait_for_each_other(machine: "Machine"):
    file = write(machine, "{}")
    with lock_folder(file.parent), edit_servers(file) as servers:
        adding = asyncio.ensure_future(machine.crow("mcp", "add", "new", "--", "x"))
        await asyncio.wait([adding], timeout=1)
        servers["old"] = {"command": "y"}
    assert (await adding).code == 0
    assert [*servers_in(machine)] == ["old", "new"]


@pytest.mark.parametrize("text", ["{", '{"mcpServers": []}', "[]", '{"a": 1,}'])
async def test_invalid_file_is_never_overwritten(machine: "Machine", text: str):
    file = write(machine, text)
    done = await machine.crow("mcp", "add", "new", "x")
    assert done.code == 2
    assert str(file) in done.err
    assert file.read_text() == text


async def test_server_that_does_not_start_is_reported_with_its_stderr(machine: "Machine"):
    await machine.crow("mcp", "add", "bad", "--", sys.executable, "-c", "import sys; sys.exit('no ink left')")
    done = await machine.crow("mcp", "test", "bad")
    assert done.code == 1
    assert done.err == "crow: MCP server 'bad' did not start: Connection closed. It said: no ink left.\n"


async def test_invalid_tool_is_reported_and_the_others_are_listed(machine: "Machine"):
    fault = "lists a tool that is none"
    await machine.crow("mcp", "add", "odd", "--", sys.executable, "-m", "crow_testing.servers", fault)
    done = await machine.crow("mcp", "test", "odd")
    assert done.code == 0
    assert done.out.endswith("tools (2): bad, pid\n")
    assert done.err.startswith("MCP server 'odd' has tools that were left out: 'odd': ")


async def test_list_shows_the_file_and_the_state_of_each_server(machine: "Machine", birds: list[str]):
    machine.configure(
        f'[mcp.servers.birds]\ncommand = "{birds[0]}"\nargs = ["{birds[1]}"]\nstart_timeout = 200\n'
        '[mcp.servers.off]\ncommand = "x"\ndisabled = true\n[mcp.servers.lacking]\ncommand = "${NO}"\n'
    )
    write(machine, '{"mcpServers": {"web": {"url": "http://127.0.0.1:9/mcp?api_key=canary-7f3a02c2"}}}')
    (machine.project / ".mcp.json").write_text('{"mcpServers": {"theirs": {"command": "touch", "args": ["started"]}}}')
    done = await machine.crow("mcp", "list", "--check", "--json")
    assert done.code == 1
    rows = {row["name"]: row for row in json.loads(done.out)}
    assert [*rows] == ["birds", "off", "lacking", "web", "theirs"]
    assert rows["birds"]["tools"] == ["sing"]
    assert rows["birds"]["from"].endswith("config.toml")
    assert rows["off"]["disabled"]
    assert "uses ${NO}, which is not set" in rows["lacking"]["error"]
    assert rows["web"]["what"] == "http://127.0.0.1:9/mcp?api_key=[secret]"
    assert rows["web"]["transport"] == "http"
    assert not rows["theirs"]["trusted"]
    assert not (machine.project / "started").exists()

    printed = await machine.crow("mcp", "list", "--check")
    assert "canary" not in done.out + printed.out + printed.err
    assert [line.split()[3] for line in printed.out.splitlines()[1:]] == [
        "tools:",
        "disabled",
        "failed",
        "failed",
        "not",
    ]
    assert "theirs is ignored until you trust its folder: crow trust" in printed.err


async def test_without_servers_the_list_says_how_to_add_one(machine: "Machine"):
    done = await machine.crow("mcp", "list")
    assert (done.code, done.out, done.err) == (
        0,
        "",
        "There are no MCP servers. Add one: crow mcp add NAME -- COMMAND\n",
    )
    assert json.loads((await machine.crow("mcp", "list", "--json")).out) == []


@asynccontextmanager
async def listening(app: Any) -> AsyncGenerator[str]:
    """Serve an app and give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as at:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=1))
        serving = asyncio.ensure_future(server.serve(sockets=[at]))
        yield f"http://127.0.0.1:{at.getsockname()[1]}"
        server.should_exit = True
        await asyncio.wait([serving])


@pytest.mark.slow
async def test_configured_servers_of_every_transport_offer_their_allowed_tools(
    machine: "Machine", birds: list[str], tmp_path: Path
):
    def kept(transport: Any) -> Any:
        server = FastMCP("web")
        for name in ("read_one", "read_two", "write"):
            server.tool(lambda: "x", name=name)
        return server.http_app(transport=transport)

    (tmp_path / "birds.py").write_text(SERVER.replace('"caw"', "os.getcwd()"))
    async with listening(kept("http")) as http, listening(kept("sse")) as sse:
        machine.configure(
            f'[mcp.servers.birds]\ncommand = "{birds[0]}"\nargs = ["{birds[1]}"]\ncwd = "{tmp_path}"\n'
            f'[mcp.servers.page]\nurl = "{http}/mcp"\nallow = ["read_*"]\ndeny = ["*_two"]\n'
        )
        write(machine, json.dumps({"mcpServers": {"old": {"type": "sse", "url": f"{sse}/sse"}}}))
        model = ScriptedModel([Reply(tool_calls=[{"name": "birds_sing", "arguments": {}}]), Reply("Done.")])
        crow = await build(machine.env, models={"scripted": model}, without=[persistence])
        async with connect(crow) as editor:
            session = await editor.new_session(str(machine.project))
            (opened,) = crow.sessions.values()
            await asyncio.gather(*(server.list() for server in opened.toolbox.servers))
            await editor.prompt(session.session_id, "go")
    offered = [tool["function"]["name"] for tool in model.requests[0]["tools"]]
    assert [name for name in offered if name.startswith(("birds_", "page_", "old_"))] == [
        *("birds_sing", "old_read_one", "old_read_two", "old_write", "page_read_one")
    ]
    assert "mcp_resources" in offered
    assert model.requests[1]["messages"][-1]["content"] == str(tmp_path)


async def test_servers_wait_sets_how_long_the_first_prompt_waits(machine: "Machine"):
    machine.configure("servers_wait = 0.25\n")
    crow = await build(machine.env, models={"scripted": ScriptedModel([])}, without=[persistence])
    assert crow.servers_wait == 0.25


@pytest.mark.slow
async def test_editor_gets_the_prompts_of_a_server_as_commands(machine: "Machine", birds: list[str]):
    async with ScriptedServer([Reply("Caw.")]) as model:
        machine.ask(model.url)
        await machine.crow("mcp", "add", "birds", "--", *birds)
        async with machine.editor() as editor:
            session = await editor.new_session(str(machine.project))
            await editor.until(
                lambda editor: any(
                    command.name == "birds:song"
                    for update in editor.of(AvailableCommandsUpdate)
                    for command in update.available_commands
                )
            )
            await editor.prompt(session.session_id, "/birds:song")
            assert editor.text == "Caw."
            assert model.requests[0]["messages"][-1]["content"] == "sing"
