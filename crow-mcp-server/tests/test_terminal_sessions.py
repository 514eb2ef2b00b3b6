"""What lasts between the calls of `terminal`: the folder and the environment, and terminals that stay."""

import asyncio
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from crow_mcp_server import create_server, processes, shell, surroundings
from crow_mcp_server.output import MAX_FILE, Capture
from crow_mcp_server.screen import Screen
from crow_mcp_server.workspace import Workspace
from fastmcp import Client
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

LINUX = sys.platform == "linux"
RUNNING = "[still running in session"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that wait for an answer are noticed sooner than people would notice."""
    monkeypatch.setattr(shell, "ASKS", 0.3)


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    stat = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(stat.strip()) and not stat.startswith("Z")


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def pids(folder: Path, count: int) -> list[int]:
    """The process ids that commands have written to files named *.pid, once there are `count`."""

    def written() -> list[int]:
        return [int(text) for file in folder.glob("*.pid") if (text := file.read_text()).endswith("\n")]

    await until(lambda: len(written()) == count)
    return written()


async def refused(tools: Any, **arguments: Any) -> str:
    result = await tools.call("terminal", arguments)
    assert result.is_error, result.text
    return result.text


async def look(tools: Any, session: str, **arguments: Any) -> str:
    result = await tools.call("terminal", {"session": session} | arguments)
    assert not result.is_error, result.text
    return result.text


async def look_until(tools: Any, session: str, *signs: str) -> str:
    """Look again until all signs have been seen."""
    seen = ""
    while not all(sign in seen for sign in signs):
        seen += await look(tools, session, wait=0.05)
    return seen


# The folder and the environment


async def test_the_folder_lasts(tools, folder):
    (folder / "sub").mkdir()
    assert await tools.run("cd sub") == f"[now in {folder}/sub]"
    assert await tools.run("pwd; cd ..") == f"{folder}/sub\n[now in {folder}]"
    assert await tools.run("(cd sub); pwd") == str(folder)
    assert await tools.run("cd sub && exit 3") == f"[exit code 3]\n[now in {folder}/sub]"
    assert await tools.run("cd -") == f"{folder}\n[now in {folder}]"


async def test_a_folder_given_is_for_one_command(tools, folder):
    (folder / "sub").mkdir()
    assert await tools.run("pwd", cwd="sub") == f"{folder}/sub"
    assert await tools.run("pwd") == str(folder)


async def test_exported_variables_last_and_unset_ones_are_gone(tools, monkeypatch):
    monkeypatch.setenv("CROW_TEST_OTHER", "inherited")
    value = 'it\'s a "test" $HOME\n`ls` \\ é日'
    await tools.run("export GREETING='" + value.replace("'", "'\\''") + "'; unset CROW_TEST_OTHER; local=1")
    assert await tools.run('printf %s "$GREETING"') == value
    assert await tools.run('echo "[$CROW_TEST_OTHER] [$local]"') == "[] []"
    await tools.run("export GREETING=again PATH=$PATH:/nowhere; exit 1")
    assert await tools.run("echo $GREETING ${PATH##*:}") == "again /nowhere"


async def test_functions_and_aliases_do_not_last_so_words_keep_their_meaning(tools):
    await tools.run("git() { echo mine; }; export -f git; alias ls='echo mine'")
    assert "mine" not in await tools.run("git --version; ls -d .")


async def test_a_command_that_was_killed_changes_nothing(tools, folder):
    await tools.run("export A=1")
    assert await tools.run("cd /; export A=2; kill -9 $$") == "[killed by SIGKILL]"
    assert await tools.run("echo $A; pwd") == f"1\n{folder}"


async def test_commands_side_by_side_add_to_the_environment(tools):
    await asyncio.gather(*(tools.run(f"export N{n}={n}") for n in range(10)))
    assert await tools.run("echo $N0$N1$N2$N3$N4$N5$N6$N7$N8$N9") == "0123456789"


async def test_a_folder_that_is_gone_is_a_clear_error_with_a_way_out(tools, folder):
    await tools.run("mkdir sub && cd sub")
    (folder / "sub").rmdir()
    assert f"The folder {folder}/sub does not exist" in await refused(tools, command="touch ran")
    assert await tools.run("pwd", cwd=str(folder)) == f"{folder}\n[now in {folder}]"
    assert await tools.run("pwd") == str(folder)


async def test_the_host_is_told_the_folder_and_may_set_it(tools, folder):
    (folder / "sub").mkdir()
    moved = await tools.call("terminal", {"command": "cd sub"})
    assert moved.meta["crow/folder"] == f"{folder}/sub"
    there = await tools.call("terminal", {"command": "pwd"}, folder=str(folder))
    assert there.text == str(folder)
    assert await tools.run("pwd") == str(folder)


async def test_what_bash_reads_before_scripts_is_still_read(tools, folder, monkeypatch):
    (folder / "env.sh").write_text("module() { echo module $1; }\n")
    monkeypatch.setenv("BASH_ENV", str(folder / "env.sh"))
    assert await tools.run("module one; bash -c 'module two'") == "module one\nmodule two"


async def test_sessions_of_the_host_share_nothing(tools, folder):
    await tools.run("export A=1; cd /")
    other = await tools.call("terminal", {"command": "echo [$A]; pwd"}, session="two")
    assert other.text == f"[]\n{folder}"


# Commands that take long


async def test_a_command_that_takes_long_goes_on_and_is_told_of(tools, folder):
    text = await tools.run("echo one; while [ ! -e go ]; do sleep 0.01; done; echo two; cd /; exit 4", wait=0.2)
    assert text.startswith(f'one\n{RUNNING} "1"')
    assert (await look(tools, "1", wait=0)).startswith(RUNNING)
    (folder / "go").touch()
    assert await look(tools, "1") == "two\n[exit code 4]\n[now in /]"
    assert "There is no session '1'. None is open." in await refused(tools, session="1")


async def test_what_goes_on_can_be_interrupted_and_killed(tools, folder):
    await tools.run("echo $$ > 1.pid; exec sleep 999", wait=0.2)
    await tools.run("trap '' INT TERM; echo $$ > 2.pid; sleep 999 & wait", wait=0.2)
    family = await pids(folder, 2)
    assert "takes no input" in await refused(tools, session="1", input="hello")
    assert await look(tools, "1", keys="C-c") == "[killed by SIGINT]"
    assert await look(tools, "2", keys="kill") == "[killed]"
    await until(lambda: not any(alive(pid) for pid in family))


async def test_a_timeout_holds_for_what_goes_on(tools):
    assert RUNNING in await tools.run("echo begun; sleep 999", wait=0.1, timeout=0.6)
    assert (await look(tools, "1")).startswith("[timed out after 0.6 s and was killed")


async def test_looking_again_shows_what_is_new_only(tools, folder):
    await tools.run("seq 1 40000; while [ ! -e go ]; do sleep 0.01; done; seq 40001 40003", wait=1.5)
    (folder / "go").touch()
    assert await look(tools, "1") == "40001\n40002\n40003"


# Terminals that stay


async def test_a_terminal_keeps_all_of_its_shell(tools, folder):
    await tools.run("x=5; f() { echo f $x; }; cd /; alias hi='echo hi there'", session="a")
    assert await tools.run("f\npwd\nhi", session="a") == "f 5\n/\nhi there"
    assert await tools.run("tty >/dev/null && test -t 0 -a -t 1 -a -t 2 && stty size", session="a") == "40 120"
    assert await tools.run("pwd; echo [$x]") == f"{folder}\n[]"


async def test_a_terminal_begins_where_commands_are(tools, folder):
    (folder / "sub").mkdir()
    await tools.run("cd sub; export A=1")
    assert await tools.run("pwd; echo $A", session="a") == f"{folder}/sub\n1"
    assert await tools.run("pwd", session="b", cwd="/") == "/"
    assert "cwd is for a new session" in await refused(tools, command="pwd", session="b", cwd="/")


async def test_exit_codes_are_known_whatever_is_printed(tools):
    assert await tools.run("false", session="a") == "[exit code 1]"
    assert await tools.run("echo $?; (exit 7)", session="a") == "1\n[exit code 7]"
    assert await tools.run(
        r"printf '1 0\0'; printf '99 0\0' >&8; (exit 9)", session="a"
    ) == "1 0bash: 8: Bad file descriptor\n[exit code 9]".replace("bash", os.path.basename(processes.SHELL))
    assert await tools.run("true", session="a") == "[no output]"
    assert "[exit code 127]" in await tools.run("no-such-command-here", session="a")
    assert "[exit code 2]" in await tools.run("echo (", session="a")
    assert await tools.run("kill -9 $BASHPID & wait $!", session="a", wait=5) != ""
    assert await tools.run("cat <<'X'\nit's !! $x\nX\necho after # comment", session="a") == "it's !! $x\nafter"


async def test_a_program_that_asks_is_answered(tools):
    asks = await tools.run("read -p 'Name? ' name; echo \"Hello $name\"", session="a")
    assert asks.startswith(f'Name?\n{RUNNING} "a"')
    assert await look(tools, "a", input="Zoë") == "Zoë\nHello Zoë"


async def test_a_python_prompt_is_talked_to(tools):
    assert ">>>" in await tools.run(f"{sys.executable} -q", session="py")
    assert "\n42\n" in await look(tools, "py", input="print(6 * 7)")
    assert "something else is running" in await refused(tools, command="ls", session="py")
    assert await look(tools, "py", keys="C-d") == "[no output]"
    assert await tools.run("echo shell", session="py") == "shell"


async def test_keys_interrupt_stop_and_end_what_reads(tools):
    await tools.run("sleep 999", session="a", wait=0.1)
    assert await look(tools, "a", keys="C-c") == "^C\n[exit code 130]"
    await tools.run("while :; do :; done", session="a", wait=0.1)
    assert await look(tools, "a", keys="C-c") == "^C\n[exit code 130]"
    await tools.run("sleep 999", session="a", wait=0.1)
    assert (await look(tools, "a", keys="C-z")).endswith("[stopped: fg or bg lets it go on]")
    assert "sleep 999" in await tools.run("jobs", session="a")
    await tools.run("fg", session="a", wait=0.1)
    await look(tools, "a", keys="C-c")
    await tools.run("cat", session="a", wait=0.1)
    assert "one" in await look(tools, "a", input="one", wait=0.2)
    assert await look(tools, "a", keys="C-d") == "[no output]"
    assert "Nothing runs in session 'a'" in await refused(tools, session="a", keys="C-d")


async def test_a_background_job_runs_on_in_its_terminal(tools, folder):
    await tools.run("(while [ ! -e go ]; do sleep 0.01; done; echo came) &", session="a")
    assert await tools.run("echo free", session="a") == "free"
    (folder / "go").touch()
    assert "came" in await look_until(tools, "a", "came")


async def test_an_editor_is_seen_as_a_screen(tools, folder):
    if not shutil.which("vi"):
        pytest.skip("needs vi")
    seen = await tools.run("vi -u NONE a.txt", session="a")
    assert "[screen]\n" in seen
    assert "a.txt" in seen
    await look(tools, "a", keys="i", wait=0.2)
    await look(tools, "a", input="typed by a model", wait=0.2)
    assert "\x1b" not in await look(tools, "a", keys="Escape", wait=0.2)
    assert await look(tools, "a", keys=": w q Enter") == "[no output]"
    assert (folder / "a.txt").read_text().startswith("typed by a model")


async def test_nothing_is_left_of_a_terminal_whose_shell_has_ended(tools, folder):
    await tools.run("nohup sh -c 'echo $$ > a.pid; sleep 999' > log 2>&1 &", session="a")
    [pid] = await pids(folder, 1)
    assert "[the shell has ended, exit code 0]" in await tools.run("exit", session="a")
    await until(lambda: not alive(pid))


async def test_a_shell_that_ends_says_so_and_makes_room(tools):
    assert (await tools.run("exit 3", session="a")).endswith("[the shell has ended, exit code 3]")
    assert "There is no session 'a'" in await refused(tools, session="a")
    assert await tools.run("set -e; false", session="a") == "[the shell has ended, exit code 1]"
    assert await tools.run("echo new", session="a") == "new"


async def test_a_timeout_ends_the_command_and_the_terminal_stays_if_it_can(tools):
    await tools.run("x=5", session="a")
    assert "[timed out after 0.3 s" in await tools.run("sleep 999", session="a", timeout=0.3)
    assert await tools.run("echo $x", session="a") == "5"
    assert "[timed out after 0.3 s" in await tools.run("trap '' TERM; while :; do :; done", session="a", timeout=0.3)
    assert await tools.run("echo [$x]", session="a") == "[]"


async def test_several_terminals_run_at_once(tools):
    meet = "touch {0}; while [ ! -e {1} ]; do sleep 0.01; done; echo met"
    answers = await asyncio.gather(
        tools.run(meet.format("a", "b"), session="a"), tools.run(meet.format("b", "a"), session="b")
    )
    assert answers == ["met", "met"]


async def test_two_commands_at_once_for_one_terminal_do_not_mix(tools):
    first = asyncio.create_task(tools.call("terminal", {"command": "echo one; sleep 0.5", "session": "a"}))
    second = asyncio.create_task(tools.call("terminal", {"command": "echo two; sleep 0.5", "session": "a"}))
    texts = sorted([(await first).text, (await second).text])
    assert texts[0].startswith("Not run: in session 'a' something else is running.")
    assert texts[1] in ("one", "two")


async def test_a_cancelled_call_ends_its_terminal(tools, folder):
    command = (
        "echo $$ > shell.pid; (trap '' TERM INT HUP; echo $BASHPID > deaf.pid; while :; do sleep 999; done) & sleep 999"
    )
    call = asyncio.create_task(tools.call("terminal", {"command": command, "session": "a"}))
    family = await pids(folder, 2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not any(alive(pid) for pid in family))
    assert await tools.run("echo next", session="a") == "next"


async def test_a_cancelled_look_ends_nothing(tools, folder):
    await tools.run("echo $$ > a.pid; sleep 999", session="a", wait=0.1)
    [pid] = await pids(folder, 1)
    call = asyncio.create_task(tools.call("terminal", {"session": "a", "wait": 60}))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert RUNNING in await look(tools, "a", wait=0.05)
    assert alive(pid)


async def test_the_end_of_the_hosts_session_ends_all_that_runs(folder):
    ends: list[Any] = []

    def workspace(meta: dict[str, Any]) -> Workspace:
        return Workspace("one", str(folder), (str(folder),), at_end=ends.append)

    async with Client(create_server(workspace)) as client:

        async def run(**arguments: Any) -> None:
            assert not (await client.call_tool_mcp("terminal", arguments)).is_error

        leave = "setsid" if LINUX else "command"
        await run(command=f"{leave} sh -c 'echo $$ > a.pid; sleep 999' &")
        await run(command="echo $$ > b.pid; sleep 999", wait=0.1)
        await run(command="(echo $BASHPID > c.pid; sleep 999) & echo $$ > d.pid", session="a")
        family = await pids(folder, 4)
        assert len(ends) == 1
        assert all(alive(pid) for pid in family)
        await ends[0]()
        await until(lambda: not any(alive(pid) for pid in family))
        await run(command="true")


async def test_what_cannot_be_done_in_a_session_is_said(tools):
    assert "There is no session 'a'" in await refused(tools, session="a", input="x")
    assert "name it. None is open." in await refused(tools, keys="C-c")
    assert "is no name" in await refused(tools, command="true", session="a b/\x1b")
    assert "either a command, or input" in await refused(tools, command="true", session="a", input="x")
    assert "give positive numbers" in await refused(tools, command="true", wait=-1)
    assert await tools.run("true", session="", input="", keys="", cwd="") == "[no output]"


async def test_a_hung_reader_is_a_clear_error(tools, monkeypatch):
    monkeypatch.setattr(shell, "TAKES", 0.3)
    await tools.run("stty raw -echo; sleep 999", session="a", wait=0.3)
    assert "does not read its input" in await refused(tools, session="a", input="x" * 200_000)


@pytest.mark.skipif(not Path("/bin/dash").exists(), reason="needs dash at /bin/dash")
async def test_a_plain_sh_does_the_same(tools, folder, monkeypatch):
    monkeypatch.setattr(processes, "SHELL", "/bin/dash")
    await tools.run("cd /; export A='a  b'")
    assert await tools.run('pwd; echo "$A"; echo $0; exit 3') == "/\na  b\ndash\n[exit code 3]"
    await tools.run("x=5", session="a")
    assert await tools.run("echo $x; (exit 3)", session="a") == "5\n[exit code 3]"
    assert "Syntax error" in await tools.run("echo (", session="a")
    await tools.run("while :; do sleep 0.1; done", session="a", wait=0.2)
    assert "[exit code 130]" in await look(tools, "a", keys="C-c")
    assert await tools.run("echo $x", session="a") == "5"


# Whatever comes


async def test_a_hundred_commands_at_once(tools):
    said = await asyncio.gather(*(tools.run(f"echo {n}; exit {n % 3}") for n in range(100)))
    assert said == [f"{n}\n[exit code {n % 3}]" if n % 3 else str(n) for n in range(100)]


async def test_a_long_output_is_whole_in_a_file(tools):
    text = await tools.run("seq 1 100000")
    path = re.search(r"all of it is in (\S+): look there", text)[1]  # type: ignore[index]
    assert await anyio.Path(path).read_text() == "".join(f"{n}\n" for n in range(1, 100_001))
    assert (await anyio.Path(path).parent.stat()).st_mode & 0o077 == 0
    assert await tools.run(f"tail -1 {path}") == "100000"


def test_a_gigabyte_costs_little_memory_and_a_file_of_64_megabytes():
    script = f"""
import asyncio, os, re, resource
from crow_mcp_server import create_server
from fastmcp import Client

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

async def main():
    async with Client(create_server()) as client:
        await client.call_tool("terminal", {{"command": "seq 100000"}})
        before = peak()
        result = await client.call_tool("terminal", {{"command": "yes | head -c 1000000000"}})
        text = result.content[0].text
        path = re.search(r"its beginning is in (\\S+):", text)[1]
        print((peak() - before) * (1024 if {LINUX} else 1) // 2**20, os.path.getsize(path), len(text))

asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    memory, size, shown = map(int, ran.stdout.split())
    assert memory < 16
    assert size == MAX_FILE
    assert shown <= 30_000


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.sampled_from(
                [
                    b"\x1b[?1049h",
                    b"\x1b[?1049l",
                    b"\x1b[2J",
                    b"\x1b[H",
                    b"\x1b[999;999H",
                    b"\x1b]0;t\x07",
                    b"\x1bP",
                    b"\x1b\\",
                ]
            ),
        ),
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None)
def test_whatever_a_program_prints_nothing_of_it_can_steer(pieces):
    screen, capture = Screen(), Capture()
    for piece in pieces:
        capture.feed(screen.split(piece))
    for text in (capture.text(30_000), screen.text()):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
@settings(max_examples=150, deadline=None)
def test_it_makes_no_difference_where_the_output_is_cut_into_pieces(data, cuts):
    whole, pieces = Screen(), Screen()
    at = [0, *sorted(cuts), len(data)]
    lines = b"".join(pieces.split(data[a:b]) for a, b in itertools.pairwise(at))
    assert whole.split(data) == lines
    assert whole.drawn == pieces.drawn


TYPED = st.one_of(
    st.fixed_dictionaries({"input": st.text(st.characters(exclude_categories=["Cs"]), max_size=50)}),
    st.fixed_dictionaries(
        {
            "keys": st.lists(
                st.sampled_from(["C-c", "C-d", "C-z", "Up", "Enter", "Tab", "Escape", "C-\\", "q", "é"]),
                min_size=1,
                max_size=4,
            ).map(" ".join)
        }
    ),
    st.fixed_dictionaries(
        {
            "command": st.sampled_from(
                ["cat", "true", "read x", "stty raw", "stty sane", "exit", "yes | head -3", "sleep 0.01", "echo '"]
            )
        }
    ),
)


@given(st.lists(TYPED, min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_whatever_is_typed_the_server_goes_on(calls):
    async def type_all() -> None:
        async with Client(create_server()) as client:
            for call in calls:
                result = await client.call_tool_mcp("terminal", {"session": "a", "wait": 0.05} | call)
                text = result.content[0].text
                assert "Traceback" not in text
                assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
            await client.call_tool_mcp("terminal", {"session": "a", "keys": "kill"})
            assert (await client.call_tool_mcp("terminal", {"command": "echo alive"})).content[0].text == "alive"

    asyncio.run(type_all())


@pytest.mark.skipif(
    not LINUX or os.geteuid() != 0 or not shutil.which("setpriv"), reason="becomes a user whom limits hold: needs root"
)
async def test_a_fork_bomb_is_stopped_by_the_limit(tools, monkeypatch):
    now = int((await anyio.Path("/proc/loadavg").read_text()).split("/")[1].split()[0])
    monkeypatch.setattr(surroundings, "SPARE_PROCESSES", 60 - now)
    bomb = "bash -c 'bomb() { bomb | bomb & }; bomb; sleep 999'"
    text = await tools.run(f"setpriv --reuid=65534 --regid=65534 --clear-groups {bomb}", timeout=2)
    assert "Resource temporarily unavailable" in text
    assert "timed out after 2 s" in text
    assert await tools.run("ps -u 65534 -o stat= | grep -v Z; echo alive") == "alive"
