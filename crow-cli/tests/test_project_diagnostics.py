"""`[diagnostics]` in the files of the user and of a project, as a real process."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = [pytest.mark.anyio, pytest.mark.posix("the commands are those of a POSIX shell")]

EDIT = {"command": "str_replace", "path": "a.py", "old_str": "one", "new_str": "two"}
LINTER = '[diagnostics]\ntimeout = 9\n"*.py" = ["echo $(cat *.py):1:1: %s"]\n'


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


async def edit(machine: "Machine", said: list[str] | None = None) -> str:
    """Run a turn with an edit; return its result, and add to `said` what the terminal showed."""
    write(machine.project, "a.py", "one")
    call = Reply(tool_calls=[{"name": "file_editor", "arguments": EDIT}])
    async with ScriptedServer([call, Reply("Done.")]) as model:
        machine.ask(model.url)
        done = await machine.crow("run", "--mode", "yolo", "Edit it.")
        result: Any = model.requests[-1]["messages"][-1]["content"]
    assert done.code == 0, done.err
    if said is not None:
        said.append(done.err)
    return json.dumps(result)


async def test_commands_of_a_project_run_once_its_folder_is_trusted(machine: "Machine") -> None:
    machine.configure(LINTER % "mine")
    write(machine.project, ".crow/config.toml", LINTER % "theirs")
    before = await edit(machine)
    shown = await machine.crow("trust", "--yes")
    after = await edit(machine)
    write(machine.project, ".crow/config.toml", LINTER % "changed")
    changed = await edit(machine)
    assert ["two:1:1: mine" in each for each in (before, after, changed)] == [True, True, True]
    assert ["two:1:1: theirs" in each for each in (before, after)] == [False, True]
    assert "two:1:1: changed" not in changed
    assert "1 check" in shown.out
    assert "Runs before and after an edit, to look for problems:\n  *.py: echo $(cat *.py):1:1: theirs" in shown.out


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('[diagnostics]\n"*.py" = 3\n', "'*.py' in [diagnostics] is not a command or a list of commands"),
        ('[diagnostics]\ntimeout = "3"\n', "'timeout' in [diagnostics] is not a number of seconds above 0"),
    ],
)
async def test_a_wrong_value_is_named(machine: "Machine", table: str, says: str) -> None:
    machine.configure(table)
    done = await machine.crow("run", "Hello")
    assert done.code != 0
    assert says in done.err
    assert "Traceback" not in done.err


async def test_a_program_of_a_project_is_found_if_its_folder_is_trusted(machine: "Machine") -> None:
    tsc = machine.project / "node_modules" / ".bin" / "tsc"
    write(machine.project, "node_modules/.bin/tsc", '#!/bin/sh\necho "$(cat a.py)(1,2): error TS1: no"; exit 2\n')
    tsc.chmod(0o755)
    (machine.project / ".git").mkdir()
    machine.configure('[diagnostics]\n"*.py" = "tsc"\n')
    said: list[str] = []
    before = await edit(machine, said)
    assert (await machine.crow("trust", "--yes")).code == 0
    after = await edit(machine)
    assert "TS1" not in before
    assert "`tsc` is not installed, or cannot be run" in said[0]
    assert "- two(1,2): error TS1: no" in after
