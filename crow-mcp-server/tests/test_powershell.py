"""The terminal tool on Windows, where PowerShell runs the commands."""

import asyncio
import sys

import pytest

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "win32", reason="only on Windows does PowerShell run the commands"),
]

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "child.py"])
print("started", child.pid, flush=True)
time.sleep(600)
"""
CHILD = """
import os, time
open("child.pid", "w").write(str(os.getpid()))
time.sleep(600)
"""


def run_script(name: str) -> str:
    """Return the command that runs a Python script."""
    return f"& '{sys.executable}' '{name}'"


async def wait_for_end(pid: int) -> None:
    """Wait until a process has ended."""
    import psutil

    while psutil.pid_exists(pid):
        await asyncio.sleep(0.05)


async def test_output_errors_and_exit_code_of_a_program_are_shown(tools, folder):
    (folder / "a.py").write_text("import sys; print('one', flush=True); print('two', file=sys.stderr); sys.exit(3)")
    assert (await tools.run(run_script("a.py"))).split() == ["one", "two", "[exit", "code", "3]"]


async def test_program_that_succeeds_has_no_exit_code_in_its_output(tools, folder):
    (folder / "a.py").write_text("print('done')")
    assert (await tools.run(run_script("a.py"))).split() == ["done"]


async def test_unknown_program_fails(tools):
    assert "[exit code " in await tools.run("no-such-program-7")


async def test_commands_run_in_the_folder_with_the_environment_of_the_call(tools, folder):
    (folder / "a.py").write_text("import os; print(os.listdir()); print(os.environ['COLOUR'])")
    answer = await tools.call("terminal", {"command": run_script("a.py")}, env={"COLOUR": "red"})
    assert answer.text.split() == ["['a.py']", "red"]


async def test_timeout_ends_the_program_and_those_that_it_has_started(tools, folder):
    (folder / "parent.py").write_text(PARENT)
    (folder / "child.py").write_text(CHILD)
    answer = await tools.run(run_script("parent.py"), timeout=8)
    assert answer.startswith("started")
    assert "8 s" in answer
    await wait_for_end(int((folder / "child.pid").read_text()))


async def test_cancelled_call_ends_the_program_and_those_that_it_has_started(tools, folder):
    (folder / "parent.py").write_text(PARENT)
    (folder / "child.py").write_text(CHILD)
    call = asyncio.ensure_future(tools.run(run_script("parent.py")))
    while not (folder / "child.pid").exists() or not (folder / "child.pid").read_text():
        await asyncio.sleep(0.05)
    call.cancel()
    await wait_for_end(int((folder / "child.pid").read_text()))
