"""No key that crow has is in a database, log, update or answer, whatever fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import EnvVariable, HttpHeader, McpServer
from crow_core.testing import Failure, Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

CANARIES = [f"canary-{n:02}-7f3a{n:02}c2e" for n in range(12)]
(TOKEN, PROXY, DOT_ENV, API_KEY, HEADER, URL, MCP_ENV, MCP_QUERY, MCP_HEADER, CLIENT_ENV, CLIENT_HEADER, STDERR) = (
    CANARIES
)

CONFIG = """
servers_wait = 60

[permissions]
mode = "yolo"

[models.one]
base_url = "{url}"
model = "scripted"
api_key = "{api_key}"
headers = {{ X-Route = "{header}" }}

[mcp.servers.birds]
command = "{python}"
args = ["{server}"]
env = {{ BIRDS = "{mcp_env}" }}

[mcp.servers.web]
url = "http://127.0.0.1:9/mcp?api_key={query}"
headers = {{ X-Bird = "{mcp_header}" }}

[mcp.servers.broken]
command = "{python}"
args = ["-c", "import os, sys; sys.exit('no entry with ' + os.environ['BIRD'])"]
env = {{ BIRD = "{stderr}" }}
"""

SERVER = """
import os
from fastmcp import FastMCP

server = FastMCP("birds")
server.tool(lambda: dict(os.environ), name="tell")
server.run(show_banner=False)
"""


def leaks(text: str) -> list[str]:
    return [canary for canary in CANARIES if canary in text]


@pytest.mark.slow
async def test_twelve_canary_keys_are_found_nowhere(machine: "Machine", tmp_path: Path):
    def reply(request: dict[str, Any]) -> Reply | Failure:
        texts = [message["content"] for message in request["messages"] if message["role"] == "user"]
        last = request["messages"][-1]
        if texts[-1] == "fail":
            return Failure(401, {"error": {"message": f"wrong key: {API_KEY}, {HEADER}"}})
        if last["role"] == "tool":
            return Reply("Done.")
        print_all = "env; cat $CROW_HOME/config.toml $CROW_HOME/.env; echo " + " ".join(
            f"{c[:9]}''{c[9:]}" for c in CANARIES
        )
        uses: list[ScriptedCall] = [
            {"name": "terminal", "arguments": {"command": print_all}},
            {"name": "birds_tell", "arguments": {}},
            {"name": "clients_tell", "arguments": {}},
            {"name": "file_editor", "arguments": {"command": "view", "path": "keys.txt"}},
            {
                "name": "file_editor",
                "arguments": {"command": "insert", "path": "keys.txt", "insert_line": 0, "new_str": "new"},
            },
        ]
        return Reply("Looking.", tool_calls=uses)

    server_file = tmp_path / "birds.py"
    server_file.write_text(SERVER)
    (machine.project / "keys.txt").write_text("\n".join(CANARIES))
    async with ScriptedServer(reply) as server:
        config = machine.configure(
            CONFIG.format(
                url=server.url.replace("//", f"//me:{URL}@"),
                api_key=API_KEY,
                header=HEADER,
                python=sys.executable,
                server=server_file,
                mcp_env=MCP_ENV,
                query=MCP_QUERY,
                mcp_header=MCP_HEADER,
                stderr=STDERR,
            )
        )
        config.with_name(".env").write_text(f"DEPLOY_KEY={DOT_ENV}\n")
        machine.env |= {"GITHUB_TOKEN": TOKEN, "FTP_PROXY": f"ftp://me:{PROXY}@proxy.example.com"}
        header = HttpHeader(name="Authorization", value=f"Bearer {CLIENT_HEADER}")
        clients = [
            McpServer(
                name="clients",
                command=sys.executable,
                args=[str(server_file)],
                env=[EnvVariable(name="BIRD", value=CLIENT_ENV)],
            ),
            McpServer(name="away", type="http", url="http://127.0.0.1:9/mcp", headers=[header]),
        ]
        async with machine.editor() as editor:
            session = (await editor.new_session(str(machine.project), clients)).session_id
            await editor.prompt(session, f"Use {' '.join(CANARIES)}")
            errors: list[str] = []
            with pytest.raises(RpcError) as caught:
                await editor.prompt(session, "fail")
            errors.append(str(caught.value.data))
    shown = json.dumps([msgspec.to_builtins(update) for update in editor.updates])
    assert all(state == "completed" for states in editor.calls().values() for state in states[-1:]), shown
    assert "no entry with [secret]" in shown
    assert leaks(shown) == []
    assert leaks(json.dumps(errors)) == []
    assert leaks(json.dumps(server.requests)) == []
    told = [message["content"] for message in server.requests[1]["messages"] if message["role"] == "tool"]
    assert [text.count("[secret]") > 0 for text in told] == [True] * 5
    assert leaks(machine.stderr.read_text()) == []
    kept = {config, config.with_name(".env")}
    files = [Path(folder, name) for folder, _, names in os.walk(machine.home) for name in names]
    written = [file for file in files if file not in kept]
    assert machine.home / "crow" / "crow.db" in written
    for file in written:
        assert leaks(file.read_bytes().decode("latin-1")) == [], file
        assert file.stat().st_mode & 0o77 == 0, file


async def test_children_get_no_keys(machine: "Machine", tmp_path: Path):
    """Neither a model's command nor a hook, a check or an MCP server has the variables that hold crow's own keys."""
    server_file = tmp_path / "birds.py"
    server_file.write_text(SERVER)
    keys = {
        "OPENAI_API_KEY": "canary-openai-7f3a",
        "ROUTER_KEY": "canary-router-7f3a",
        "ROUTE_TOKEN": "canary-header-7f3a",
        "BRAVE_API_KEY": "canary-brave-7f3a",
        "STORE_URL": f"sqlite:///{tmp_path}/canary-store-7f3a.db",
    }
    uses: list[ScriptedCall] = [
        {"name": "terminal", "arguments": {"command": "env > terminal.env"}},
        {"name": "birds_tell", "arguments": {}},
    ]
    async with ScriptedServer([Reply(tool_calls=uses), Reply("Done.")]) as server:
        machine.configure(
            f"""
            model = "one"
            [permissions]
            mode = "yolo"
            [models.one]
            base_url = "{server.url}"
            model = "scripted"
            api_key = "${{ROUTER_KEY}}"
            headers = {{ X-Route = "Bearer ${{ROUTE_TOKEN}}" }}
            [database]
            url = "${{STORE_URL}}"
            [mcp.servers.birds]
            command = "{sys.executable}"
            args = ["{server_file}"]
            [[hooks.before_tool]]
            command = "env > hook.env"
            [extensions.goal]
            every_turn = true
            until = "env > check.env"
            """
        )
        machine.env |= {**keys, "PAINTER": "canary-but-no-key"}
        ran = await machine.crow("run", "go")
        assert ran.code == 0, ran.err
        (told,) = (entry for entry in server.requests[1]["messages"] if entry.get("tool_call_id") == "call_1_1")
    files = [machine.project / f"{name}.env" for name in ("terminal", "hook", "check")]
    for text in [told["content"], *(file.read_text() for file in files)]:
        assert "PATH" in text
        assert [name for name, value in keys.items() if value in text] == []
    assert all("PAINTER=canary-but-no-key" in file.read_text() for file in files)
    assert "PAINTER" not in told["content"]


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2) is a call of Linux")
def test_environment_of_the_process_cannot_be_read_by_its_commands():
    script = """
import ctypes, os, subprocess
from crow_cli.process import PR_SET_DUMPABLE, hide_memory
if os.getuid() == 0:  # whom nothing holds back
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
def read():
    return subprocess.run(["cat", f"/proc/{os.getpid()}/environ"], capture_output=True, cwd="/").stdout
print(b"CANARY" in read())
hide_memory()
print(b"CANARY" in read())
"""
    env = {**os.environ, "KEY": "CANARY"}
    ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "False"]


@pytest.mark.posix("looks at the bits of the mode")
@pytest.mark.parametrize("command", ["status", "trust list", "perms list", "sessions list", "sandbox check", "demo"])
def test_new_data_folder_is_for_its_owner_alone(command: str, tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    env = {**os.environ, "CROW_HOME": str(home)}
    words = [sys.executable, "-m", "crow_cli", *command.split()]
    subprocess.run(
        words, env=env, cwd=tmp_path, capture_output=True, check=False, umask=0o022, stdin=subprocess.DEVNULL
    )
    folders = [home, *home.rglob("*")] if home.exists() else []
    assert [each for each in folders if each.is_dir() and each.stat().st_mode & 0o077 and "run" not in each.parts] == []
