"""crow as a desktop starts it: without a shell, with the PATH of the system, with long paths."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crow_agent.settings.login_path as login_path
import pytest
from crow_agent.settings.login_path import complete_path
from crow_core.testing import Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no login shell")
SYSTEM_PATH = "/usr/bin:/bin"


def make_shell(folder: Path, *, after: str = "") -> Path:
    """Make a login shell that is talkative, and whose PATH has a folder of its own; `asked` has a line for each run."""
    shell = folder / "shell"
    own = folder / "own"
    shell.write_text(
        f"#!/bin/sh\necho asked >> {folder}/asked\necho Welcome back.\nPATH={own}:$PATH; export PATH\n{after}\n"
        'exec /bin/sh -c "$4"\n'
    )
    shell.chmod(0o755)
    return shell


def count_asked(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines()) if (folder / "asked").exists() else 0


def use(command: str) -> Reply:
    call: ScriptedCall = {"name": "terminal", "arguments": {"command": command}}
    return Reply(tool_calls=[call])


@pytest.mark.anyio
async def test_commands_find_what_the_login_shell_finds_which_is_asked_once(machine: "Machine") -> None:
    for name in ("SHLVL", "SHELL"):
        machine.env.pop(name, None)
    machine.env |= {"PATH": SYSTEM_PATH, "SHELL": str(make_shell(machine.home)), "HOME": str(machine.home)}

    def reply(request: dict[str, Any]) -> Reply:
        return Reply("Done.") if request["messages"][-1]["role"] == "tool" else use("printenv PATH > path")

    async with ScriptedServer(reply) as model:
        machine.ask(model.url)
        for profile in ("", "", "export A=1"):
            if profile:
                (machine.home / ".profile").write_text(profile)
            async with machine.editor(permit="allow_once") as editor:
                id = (await editor.new_session(str(machine.project))).session_id
                await editor.prompt(id, "What is on PATH?")
            assert (machine.project / "path").read_text() == f"{machine.home}/own:{SYSTEM_PATH}\n"
            (machine.project / "path").unlink()
            assert count_asked(machine.home) == (2 if profile else 1), "again only after the profile has changed"
    done = await machine.crow("doctor", "--machine")
    assert f"takes that of the login shell: {machine.home}/own" in done.out


@pytest.mark.parametrize("env", [{"SHLVL": "1"}, {"PATH": f"/home/me/bin:{SYSTEM_PATH}"}])
def test_login_shell_is_not_asked_where_a_shell_has_set_path(env: dict[str, str], tmp_path: Path) -> None:
    given = {"PATH": SYSTEM_PATH, "SHELL": str(make_shell(tmp_path)), "HOME": str(tmp_path), **env}
    before = given["PATH"]
    complete_path(given, tmp_path)
    assert (given["PATH"], count_asked(tmp_path)) == (before, 0)


def missing_shell(folder: Path) -> Path:
    return folder / "no-such-shell"


def hanging_shell(folder: Path) -> Path:
    return make_shell(folder, after="sleep 60")


def failing_shell(folder: Path) -> Path:
    return make_shell(folder, after="exit 1")


@pytest.mark.parametrize("make", [missing_shell, hanging_shell, failing_shell])
def test_login_shell_that_does_not_answer_leaves_path_and_is_not_asked_again(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login_path, "TIME_LIMIT", 0.3)
    env = {"PATH": SYSTEM_PATH, "SHELL": str(make(tmp_path)), "HOME": str(tmp_path)}
    for _ in range(2):
        complete_path(env, tmp_path / "data")
        assert env["PATH"] == SYSTEM_PATH
    assert count_asked(tmp_path) == (0 if make is missing_shell else 1)


def test_missing_home_is_one_sentence() -> None:
    program = (
        "import pwd\ndef fail(id): raise KeyError(id)\npwd.getpwuid = fail\nfrom crow_cli.__main__ import main\nmain()"
    )
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", program, "status"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith("crow finds no home folder for its files. Set HOME, or CROW_HOME.")
    )
    assert "Traceback" not in done.stderr


@pytest.mark.anyio
async def test_folder_with_a_path_of_more_than_300_characters_is_worked_in(machine: "Machine") -> None:
    folder = machine.project.joinpath(*["long" * 20] * 4)
    folder.mkdir(parents=True)
    assert len(str(folder)) > 300
    edit: ScriptedCall = {
        "name": "file_editor",
        "arguments": {"command": "create", "path": str(folder / "new.txt"), "file_text": "here\n"},
    }

    def reply(request: dict[str, Any]) -> Reply:
        results = sum(message["role"] == "tool" for message in request["messages"])
        return (use("pwd > place"), Reply(tool_calls=[edit]), Reply("Done."))[results]

    async with ScriptedServer(reply) as model:
        machine.ask(model.url)
        async with machine.editor(permit="allow_once") as editor:
            id = (await editor.new_session(str(folder))).session_id
            assert (await editor.prompt(id, "Work here.")).stop_reason == "end_turn"
    assert (folder / "place").read_text() == f"{folder}\n"
    assert (folder / "new.txt").read_text() == "here\n"
