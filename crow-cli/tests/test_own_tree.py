"""A command that changes what crow may do is refused where crow has started it, however it was started."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_agent.settings.running import RunningAgents
from crow_core.testing import Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from conftest import Machine

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
        "import os, sys; from pathlib import Path; from crow_agent.settings.running import RunningAgents\n"
        "class Owner: pass\n"
        "owner = Owner(); RunningAgents(Path(sys.argv[1])).add(owner); print(os.listdir(sys.argv[1] + '/agents'))\n"
        "sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "-" in done.stdout
    assert os.listdir(tmp_path / "agents") != []

    assert RunningAgents(tmp_path).list_pids() == set()
    assert os.listdir(tmp_path / "agents") == []
