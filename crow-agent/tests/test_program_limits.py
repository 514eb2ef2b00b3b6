"""Servers and hooks that crow starts in a sandbox."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from crow_agent.app import build
from crow_agent.program_limits import find_project_level
from crow_agent.settings.config import find_ignored_settings
from crow_agent.settings.home import Home
from crow_agent.settings.project_files import take_snapshot
from crow_agent.settings.structs import Config
from crow_agent.settings.trust import TrustedFolders
from crow_core.testing import Reply, ScriptedModel, connect
from crow_persistence.extension import persistence
from crow_sandbox import landlock, programs, sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.posix("there is no sandbox on Windows")]
PYTHON = os.path.realpath(sys.executable)

SERVER = """
import json, subprocess, sys

def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

START
for line in sys.stdin:
    message = json.loads(line)
    id = message.get("id")
    match message.get("method"):
        case "initialize":
            send(id=id, result={"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                                "serverInfo": {"name": "shell", "version": "1"}})
        case "tools/list":
            send(id=id, result={"tools": [{"name": "run", "inputSchema": {"type": "object"}}]})
        case "tools/call":
            line = message["params"]["arguments"]["line"]
            done = subprocess.run(line, shell=True, capture_output=True, text=True)
            send(id=id, result={"content": [{"type": "text", "text": done.stdout + done.stderr + "."}]})
        case _ if id is not None:
            send(id=id, error={"code": -32601, "message": "Method not found"})
"""
"""An MCP server that runs lines of the shell, and does START first."""


class Project:
    """A project with a server of its own, and files beside it."""

    def __init__(self, base: Path) -> None:
        self.folder, self.beside = base / "project", base / "beside"
        self.env = {"HOME": str(base / "home"), "CROW_HOME": str(base / "home/crow"), "PATH": "/usr/bin:/bin"}
        self.home = Home.find(self.env)
        for each in (self.folder, self.beside, self.home.config):
            each.mkdir(parents=True)
        (self.beside / "file").write_text("as it was\n")
        self.write_server()

    def write_server(self, start: str = "", **settings: Any) -> None:
        (self.folder / "server.py").write_text(SERVER.replace("START", start))
        server = {"command": PYTHON, "args": [str(self.folder / "server.py")], **settings}
        (self.folder / ".mcp.json").write_text(json.dumps({"mcpServers": {"shell": server}}))

    def configure(self, text: str) -> None:
        (self.home.config / "config.toml").write_text(text)

    async def run(self, line: str) -> str:
        """Run a line in the project's server; return its output, and what the user is told."""
        TrustedFolders(self.home.data).add(take_snapshot(self.folder, keep=True))
        model = ScriptedModel([Reply(tool_calls=[{"name": "shell_run", "arguments": {"line": line}}]), Reply("Done.")])
        crow = await build(self.env, models={"scripted": model}, mode="yolo", without=[persistence])
        async with connect(crow) as editor:
            session = await editor.new_session(str(self.folder))
            await editor.prompt(session.session_id, "Go.")
            return "\n".join(map(str, editor.updates))


@pytest.fixture(params=["the first that holds", "Landlock"])
async def project(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Project:
    if request.param == "Landlock":
        forbid_namespaces(monkeypatch)
    made = Project(tmp_path)
    level, why = await find_project_level(Config(), made.home)
    if level == "off":
        if os.environ.get("CROW_TEST_ALL") == "1":
            pytest.fail(why)
        pytest.skip(why)
    return made


def forbid_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let crow find what it finds where namespaces are forbidden."""
    monkeypatch.setattr(sandbox, "prove", lambda folder: sandbox.Proof(None, None, "Namespaces are forbidden."))


def attempt(project: Project) -> str:
    """Return a line that writes into the project and beside it."""
    return f"echo new > {project.folder}/new; echo evil > {project.beside}/file; cat {project.beside}/file"


async def test_server_of_a_project_writes_to_the_project_alone(project: Project) -> None:
    said = await project.run(attempt(project))
    assert (project.folder / "new").read_text() == "new\n"
    assert (project.beside / "file").read_text() == "as it was\n"
    assert "cannot create" in said
    assert os.listdir(project.home.data / "sandbox") == []


async def test_server_of_a_project_has_no_network(project: Project) -> None:
    said = await project.run(f"{PYTHON} -c \"import socket; socket.create_connection(('127.0.0.1', 1), 3)\"")
    assert "refused" in said or "unreachable" in said or "not supported" in said


async def test_server_of_a_project_gets_the_variables_that_its_settings_give_it(project: Project) -> None:
    project.write_server(env={"BIRDS_TOKEN": "magpie"})
    assert "It is 6" in await project.run("printf 'It is %s' ${#BIRDS_TOKEN}")


async def test_project_can_name_a_stricter_sandbox_and_no_looser_one(project: Project) -> None:
    project.write_server(sandbox="read-only")
    await project.run(attempt(project))
    assert not (project.folder / "new").exists()
    project.write_server(sandbox="off", network=True)
    await project.run(attempt(project))
    assert (project.folder / "new").exists()
    assert (project.beside / "file").read_text() == "as it was\n"


async def test_user_can_start_the_servers_of_projects_without_a_sandbox(project: Project) -> None:
    project.configure('[mcp]\nproject_sandbox = "off"\n')
    await project.run(attempt(project))
    assert (project.beside / "file").read_text() == "evil\n"


def test_settings_of_the_sandbox_that_a_project_cannot_make_are_named(tmp_path: Path) -> None:
    (tmp_path / ".crow").mkdir()
    (tmp_path / ".crow/config.toml").write_text(
        '[mcp]\nproject_sandbox = "off"\n[mcp.servers.x]\ncommand = "x"\nnetwork = true\n'
    )
    assert find_ignored_settings(tmp_path) == ["network of [mcp.servers.x]", "project_sandbox of [mcp]"]


async def test_server_that_cannot_start_in_its_sandbox_says_how_to_change_that(project: Project) -> None:
    project.write_server(start=f"open({str(project.beside / 'state')!r}, 'w')")
    said = await project.run("true")
    assert "did not start" in said
    assert "crow config set mcp.project_sandbox off" in said


async def test_user_is_told_where_the_servers_of_a_project_have_no_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = forbid_everything(tmp_path, monkeypatch)
    said = await project.run(attempt(project))
    assert (project.beside / "file").read_text() == "evil\n"
    assert "The MCP servers of this project run without a sandbox: " in said
    project.configure('[mcp]\nproject_sandbox = "workspace"\n')
    (project.beside / "file").write_text("as it was\n")
    said = await project.run(attempt(project))
    assert (project.beside / "file").read_text() == "as it was\n"
    assert "did not start" in said


def forbid_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Make a project on a machine where nothing limits a program."""
    if sys.platform != "linux":
        pytest.skip("asks the kernel of Linux")
    forbid_namespaces(monkeypatch)
    monkeypatch.setattr(landlock, "read_version", lambda: 0)
    monkeypatch.setattr(programs, "proofs", {})
    return Project(tmp_path)


async def test_server_and_hook_that_name_a_sandbox_do_not_start_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = forbid_everything(tmp_path, monkeypatch)
    (project.folder / ".mcp.json").unlink()
    command = f'["/bin/sh", "-c", "echo evil > {project.beside}/file"]'
    project.configure(f"""
[[hooks.before_prompt]]
command = {command}
sandbox = "read-only"
[mcp.servers.shell]
command = "/bin/sh"
args = ["-c", "echo evil > {project.beside}/file"]
sandbox = "workspace"
""")
    said = await project.run("true")
    assert (project.beside / "file").read_text() == "as it was\n"
    assert said.count("The kernel has no Landlock") == 2, "one sentence about each"


async def test_server_of_the_user_has_the_sandbox_of_its_settings(project: Project) -> None:
    (project.folder / ".mcp.json").unlink()
    table = f'[mcp.servers.shell]\ncommand = "{PYTHON}"\nargs = ["{project.folder}/server.py"]\n'
    project.configure(table)
    await project.run(attempt(project))
    assert (project.beside / "file").read_text() == "evil\n"
    (project.beside / "file").write_text("as it was\n")
    project.configure(f'{table}sandbox = "workspace"\n')
    await project.run(attempt(project))
    assert (project.beside / "file").read_text() == "as it was\n"


async def test_hook_in_a_sandbox_writes_to_the_project_alone(project: Project) -> None:
    script = project.folder / "hook.sh"
    script.write_text(f"cat > {project.folder}/seen; echo evil > {project.beside}/file\n")
    project.configure(f'[[hooks.before_prompt]]\ncommand = ["/bin/sh", "{script}"]\nsandbox = "workspace"\n')
    await project.run("true")
    assert json.loads((project.folder / "seen").read_text())["prompt"] == "Go."
    assert (project.beside / "file").read_text() == "as it was\n"


@pytest.mark.parametrize("asks", ["the call", "the setting"])
async def test_sub_agent_that_may_only_read_changes_nothing_and_its_parent_goes_on(project: Project, asks: str) -> None:
    """What its commands change is discarded where that is possible, and else they do not run."""
    option = "sandbox = 'read-only'\n" if asks == "the setting" else ""
    project.configure(f"[extensions.subagents]\n{option}")
    task = {"description": "Look", "prompt": "Look.", **({"sandbox": "read-only"} if asks == "the call" else {})}
    command = {"name": "terminal", "arguments": {"command": "touch made-by-$RANDOM$RANDOM; echo 'it ran'"}}
    edit = {"command": "create", "path": str(project.folder / "made"), "file_text": "made"}
    calls = [{"name": "agent", "arguments": task}, command, {"name": "file_editor", "arguments": edit}, command]
    ask, run, create, run_again = (Reply(tool_calls=[call]) for call in calls)
    model = ScriptedModel([ask, run, create, Reply("Seen."), run_again, Reply("Done.")])
    crow = await build(project.env, models={"scripted": model}, mode="yolo", without=[persistence])
    async with connect(crow) as editor:
        session = await editor.new_session(str(project.folder))
        await editor.prompt(session.session_id, "Go.")
        assert crow.sessions[session.session_id].options.find_mode().get() == "yolo"  # type: ignore[union-attr]
    said = [message["content"] for message in model.requests[3]["messages"] if message["role"] == "tool"]
    has_run = "it ran" in said[0]
    assert ("discarded" if has_run else "plan mode only reads") in said[0]
    assert "plan mode only reads" in said[1]
    assert not (project.folder / "made").exists()
    kept = [message["content"] for message in model.requests[4]["messages"] if message["role"] == "tool"]
    assert kept[-1] == "Seen."
    assert len([*project.folder.glob("made-by-*")]) == 1, "the file of the parent"


async def run_in_yolo(project: Project, *commands: str, permit: str = "reject_once", **more: str) -> tuple[str, Any]:
    """Run commands of the terminal in the mode yolo, each in a turn; return their results, and the editor."""
    calls = [{"name": "terminal", "arguments": {"command": command, **more}} for command in commands]
    model = ScriptedModel([reply for call in calls for reply in (Reply(tool_calls=[call]), Reply("Done."))])
    (project.folder / ".mcp.json").unlink()
    crow = await build(project.env, models={"scripted": model}, mode="yolo", without=[persistence])
    async with connect(crow, permit=permit) as editor:
        session = await editor.new_session(str(project.folder))
        for _ in commands:
            await editor.prompt(session.session_id, "Go.")
    results = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    return "\n".join(results), editor


def count_told(editor: Any, sentence: str) -> int:
    return sum(sentence in str(update) for update in editor.updates)


async def test_what_yolo_means_for_commands_is_said_once_in_a_session(project: Project) -> None:
    _, editor = await run_in_yolo(project, attempt(project), "true")
    assert (project.beside / "file").read_text() == "evil\n"
    assert editor.questions == []
    assert count_told(editor, "In yolo, commands run unasked, outside of the sandbox") == 1


async def test_commands_in_yolo_write_only_to_the_project_where_the_user_wants_that(project: Project) -> None:
    project.configure('[sandbox]\nyolo = "workspace"\n')
    project.env["BIRDS_TOKEN"] = "magpie"
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 3); print('con' + 'nected')"
        command = f'{attempt(project)}; printf "It is %s." "$BIRDS_TOKEN"; {PYTHON} -c "import socket; {connection}"'
        said, editor = await run_in_yolo(project, command, f"cd {project.folder}; touch later; echo the second")
    assert (project.beside / "file").read_text() == "as it was\n"
    if await is_possible(project):
        assert (project.folder / "new").read_text() == "new\n"
        assert (project.folder / "later").exists()
        assert "It is ." in said
        assert "connected" in said
        assert editor.questions == []
        assert count_told(editor, "they write only to the folders") == 1
        assert count_told(editor, "{'sandbox': 'workspace'}") == 1
    else:
        assert not (project.folder / "new").exists()
        assert "Namespaces are forbidden" in said
        assert len(editor.questions) == 2
    assert [name for name in os.listdir(project.home.data / "sandbox") if name.startswith("run")] == []


async def test_sessions_of_the_terminal_write_only_to_the_project_where_yolo_is_limited(project: Project) -> None:
    project.configure('[sandbox]\nyolo = "workspace"\n')
    said, editor = await run_in_yolo(project, attempt(project), "touch later; echo the second", session="one")
    assert (project.beside / "file").read_text() == "as it was\n"
    if await is_possible(project):
        assert (project.folder / "new").read_text() == "new\n"
        assert (project.folder / "later").exists()
        assert editor.questions == []
    else:
        assert "Namespaces are forbidden" in said
        assert len(editor.questions) == 2


async def is_possible(project: Project) -> bool:
    """Return whether commands of the terminal can be limited."""
    return (await sandbox.Sandbox(project.home.data / "sandbox").prove("workspace")).level == "workspace"
