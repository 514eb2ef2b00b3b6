"""A command that changes what crow may do is refused where crow has started it, however it was started."""

import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
import pytest
from crow_cli.cli import cli
from crow_cli.own_tree import CLASSES, guard, list_commands
from crow_core.testing import Reply, ScriptedCall, ScriptedServer
from crow_mcp_server.terminal.command_watchdog import MARK_VARIABLE
from crow_permissions.running import MARKS, RunningAgents

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

CHANGE = "from crow_cli.own_tree import refuse_below_crow; refuse_below_crow(); print('it was changed')"
"""A program that refuses as commands that change permissions do."""

LATER = "sh -c 'sleep 0.3; {change} > part 2>&1; mv part out'"
"""Changes it when its parents have ended."""
WAIT = "until [ -e out ]; do sleep 0.05; done"

WRAPPERS = {
    "plain": "{change} > out 2>&1",
    "without the mark": "env -u CROW_COMMAND {change} > out 2>&1",
    "without an environment": "env -i {home} {change} > out 2>&1",
    "in a shell": 'sh -c "env -i {home} {change}" > out 2>&1',
    "in the background": "env -i {home} {change} > out 2>&1 & wait",
    "in a session of its own": "setsid -w env -i {home} {change} > out 2>&1",
    "without parents": f"env -i {{home}} setsid -f {LATER}; {WAIT}",
    "without parents, with the mark": f"setsid -f {LATER}; {WAIT}",
    "in a terminal of its own": "script -qec {quoted} /dev/null > out 2>&1",
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_a_change_is_refused_below_crow_however_the_model_starts_it(machine: "Machine") -> None:
    script = machine.home / "change.py"
    script.write_text(CHANGE)
    home = f"CROW_HOME={machine.env['CROW_HOME']}"
    change = f"{sys.executable} {script}"
    commands = {
        name: wrapper.format(change=change, home=home, quoted=shlex.quote(f"env -i {home} {change}"))
        .replace("out", f"out-{number}")
        .replace("part", f"part-{number}")
        for number, (name, wrapper) in enumerate(WRAPPERS.items())
    }

    def reply(request: dict[str, Any]) -> Reply:
        if request["messages"][-1]["role"] == "tool":
            return Reply("Done.")
        uses: list[ScriptedCall] = [{"name": "terminal", "arguments": {"command": each}} for each in commands.values()]
        return Reply(tool_calls=uses)

    async with ScriptedServer(reply) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "--yolo", "Change it")

    assert done.code == 0, done.err
    said = {name: (machine.project / f"out-{number}").read_text() for number, name in enumerate(commands)}
    assert [name for name, text in said.items() if "changes what crow may do" not in text or "it was" in text] == []
    assert os.listdir(Path(machine.env["CROW_HOME"], "agents")) == []


def test_a_process_that_the_user_has_started_may_change_it(tmp_path: Path) -> None:
    env = {"CROW_HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", CHANGE], env=env, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "it was changed\n")


def test_the_file_of_a_process_that_was_killed_counts_for_nothing(tmp_path: Path) -> None:
    killed = (
        "import os, sys; from pathlib import Path; from crow_permissions.running import RunningAgents\n"
        "class Owner: pass\n"
        "owner = Owner(); RunningAgents(Path(sys.argv[1])).add(owner); print(os.listdir(sys.argv[1] + '/agents'))\n"
        "sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "-" in done.stdout
    assert os.listdir(tmp_path / "agents") != []

    assert RunningAgents(tmp_path).list_pids() == set()
    assert os.listdir(tmp_path / "agents") == []


def test_each_command_has_a_class() -> None:
    assert sorted(list_commands(cli)) == sorted(CLASSES)
    assert MARK_VARIABLE in MARKS


def test_new_command_without_a_class_is_found_and_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = cast("click.Group", cli.get_command(click.Context(cli), "config"))
    monkeypatch.setitem(config.commands, "wipe", click.Command("wipe", callback=lambda: print("it was changed")))
    monkeypatch.setenv("CROW_HOME", str(tmp_path))
    monkeypatch.setenv(MARK_VARIABLE, "1")
    assert sorted({*list_commands(cli)} - {*CLASSES}) == ["config wipe"]

    guard(config.commands["wipe"], lambda output_format: nullcontext(), "config wipe")
    with pytest.raises(SystemExit):
        config.commands["wipe"].main([], standalone_mode=False)
    printed = capsys.readouterr()
    assert "where crow has started it" in printed.err
    assert printed.out == ""


REFUSED = """
mcp add x -- ls
mcp remove x
mcp login x
sessions delete --yes x
sessions fork x
db prune --yes --older-than 1
db repair new.db
audit repair --yes
import pi .
worker program.py
eval program
undo --yes
skills new mine
config set permissions.mode yolo
setup --list
acp setup --list
acp check true
acp record true
workflows approve x
prompts unpin system
trust revoke --all
perms revoke --all
run --yolo Hello
run --mode yolo Hello
run --mode accept-edits Hello
run --allow terminal Hello
run --add-dir / Hello
run --mcp-config {} Hello
-p Hello --yolo
batch --mode yolo --out out program.py
doctor --save
"""


@pytest.mark.parametrize("command", REFUSED.strip().splitlines())
def test_what_changes_something_is_refused_below_crow(command: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("open('ran', 'w')")
    (tmp_path / "program").mkdir()
    env = {"CROW_HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"], MARK_VARIABLE: "1"}
    words = [sys.executable, "-m", "crow_cli", *shlex.split(command)]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, "where crow has started it" in done.stderr) == (2, True), done.stderr
    assert sorted(os.listdir(tmp_path)) == ["program", "program.py"]


HOLD = (
    "import sys; from pathlib import Path; from crow_permissions.running import RunningAgents\n"
    "class Owner: pass\n"
    "owner = Owner(); RunningAgents(Path(sys.argv[1])).add(owner); print('works', flush=True); sys.stdin.read()"
)
"""A process in which crow works."""


@pytest.mark.posix(reason="looks for a terminal")
def test_a_script_whose_parent_is_older_than_crow_may_change_it_without_a_terminal(tmp_path: Path) -> None:
    env = {"CROW_HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as works:
        assert works.stdout
        assert works.stdout.readline() == "works\n"
        words = [sys.executable, "-c", CHANGE]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, start_new_session=True)
        works.communicate()

    assert (done.returncode, done.stdout) == (0, "it was changed\n"), done.stderr


ANSWER = (
    "import asyncio; from crow_agent.workflows import WorkflowError, answer\n"
    "try: asyncio.run(answer('w1', True))\n"
    "except WorkflowError as error: print(error)"
)
START = HOLD.partition("; print(")[0] + (
    "; import os, subprocess; env = {'CROW_HOME': sys.argv[1], 'PATH': os.environ['PATH']}\n"
    "subprocess.run([sys.executable, '-c', sys.argv[2]], env=env)"
)
"""A process in which crow works, and which starts a program with an empty environment."""


def test_a_program_below_crow_answers_no_workflow(tmp_path: Path) -> None:
    words = [sys.executable, "-c", START, str(tmp_path), ANSWER]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    assert "crow has started this process (it runs below process" in done.stdout
