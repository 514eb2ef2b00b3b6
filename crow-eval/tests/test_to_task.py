"""`crow sessions to-task` makes tasks of sessions, with checks that fail on the start and pass on the end."""

import asyncio
import json
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = [pytest.mark.anyio, pytest.mark.posix]

WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TEST = """\
import unittest

from calc import add


class AddTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
"""


def edit(command: str, path: str, **more: str) -> ScriptedCall:
    return {"name": "file_editor", "arguments": {"command": command, "path": path, **more}}


def run(line: str) -> ScriptedCall:
    return {"name": "terminal", "arguments": {"command": line}}


async def talk(machine: "Machine", prompt: str, *calls: ScriptedCall) -> str:
    """Run a session whose model makes these calls, and answers; return its id."""
    replies = [*(Reply("I work.", tool_calls=[call]) for call in calls), Reply("Done.")]
    async with ScriptedServer(replies) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "--yolo", prompt)
    assert done.code == 0, done.err
    return json.loads((await machine.crow("sessions", "list", "--json")).out)[0]["id"]


async def commit(folder: Path) -> None:
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@here"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "Begin"]):
        await asyncio.to_thread(subprocess.run, [*git, *words], check=True)


def read_checks(folder: Path) -> list[dict[str, Any]]:
    return tomllib.loads((folder / "task.toml").read_text()).get("checks", [])


async def test_tests_and_files_of_several_sessions_become_checks_that_are_tried(machine: "Machine"):
    machine.env["PYTHONDONTWRITEBYTECODE"] = "1"  # a fix of the same length in the same second would run the old code
    (machine.project / "calc.py").write_text(WRONG)
    (machine.project / "test_calc.py").write_text(TEST)
    (machine.project / "old.py").write_text("unused = True\n")
    await commit(machine.project)
    fix = edit("str_replace", "calc.py", old_str="a - b", new_str="a + b")
    tests = run(f"cd {machine.project} && python3 -m unittest -q")
    fixed = await talk(machine, "Mend add in calc.py.", tests, fix, tests, run("echo python3 -m unittest; ls"))
    (machine.project / "calc.py").write_text(WRONG)
    asked = await talk(machine, "What does calc.py do?", run("python3 -m compileall -q ."))
    made = await machine.crow("sessions", "to-task", fixed, asked, "--into", "tasks")
    assert made.code == 1, "one has no checks"
    assert "1 of 2 tasks have checks that fail on the start and pass on the end." in made.err
    tasks = machine.project / "tasks"
    assert read_checks(tasks / f"task-{fixed[:8]}") == [{"kind": "command", "run": "python3 -m unittest -q"}]
    assert (tasks / f"task-{fixed[:8]}" / "solution" / "calc.py").read_text() == RIGHT
    assert read_checks(tasks / f"task-{asked[:8]}") == []
    valid = await machine.crow("eval", "--validate", str(tasks / f"task-{fixed[:8]}"))
    assert (valid.code, valid.out) == (0, "1 of 1 tasks are right.\n"), valid


async def test_checks_that_pass_on_the_start_are_not_kept(machine: "Machine"):
    (machine.project / "calc.py").write_text(RIGHT)
    (machine.project / "test_calc.py").write_text(TEST)
    await commit(machine.project)
    id = await talk(
        machine,
        "Rename the arguments, and add a readme.",
        edit("str_replace", "calc.py", old_str="return a + b", new_str="return sum((a, b))"),
        edit("create", "README.md", file_text="# Calc\n"),
        run("python3 -m unittest -q"),
    )
    made = await machine.crow("sessions", "to-task", id)
    assert made.code == 0, made.err
    assert "Not kept: command: python3 -m unittest -q passes on the untouched start." in made.err
    assert read_checks(machine.project / f"task-{id[:8]}") == [
        {"kind": "file", "path": "calc.py", "contains": "return sum((a, b))"},
        {"kind": "file", "path": "README.md", "exists": True},
    ]


async def test_session_without_a_repository_starts_from_the_files_that_it_changed(machine: "Machine"):
    (machine.project / "calc.py").write_text(WRONG)
    fix = edit("str_replace", "calc.py", old_str="a - b", new_str="a + b")
    id = await talk(machine, "Mend add in calc.py.", fix)
    made = await machine.crow("sessions", "to-task", id)
    assert made.code == 0, made.err
    task = machine.project / f"task-{id[:8]}"
    assert (task / "files" / "calc.py").read_text() == WRONG
    assert read_checks(task) == [{"kind": "file", "path": "calc.py", "contains": "return a + b"}]
