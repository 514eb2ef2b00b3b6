"""State between calls of the tool `terminal`: the working folder, the environment, and sessions."""

import asyncio
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import crow_system as system
import pytest
from crow_mcp_server import create_server
from crow_mcp_server.terminal import interactive_shell as shell
from crow_mcp_server.terminal import processes, shell_state
from crow_mcp_server.terminal.command_environment import find_editor
from crow_mcp_server.terminal.command_output import OutputCapture
from crow_mcp_server.terminal.key_names import to_keystrokes
from crow_mcp_server.terminal.screen import TerminalScreen
from crow_mcp_server.workspace import Workspace
from fastmcp import Client
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

LINUX = sys.platform == "linux"
RUNNING = "[still running in session"
CONTROLS = r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]|\r(?!\r*\n)"  # all but line ends and form feeds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detect programs that wait for input sooner than usual."""
    monkeypatch.setattr(shell, "PROMPT_SILENCE", 0.3)


# The folder and the environment


async def test_working_folder_persists(tools, folder):
    (folder / "sub").mkdir()
    assert await tools.run("cd sub") == f"[now in {folder}/sub]"
    assert await tools.run("pwd; cd ..") == f"{folder}/sub\n[now in {folder}]"
    assert await tools.run("(cd sub); pwd") == str(folder)
    assert await tools.run("cd sub && exit 3") == f"[exit code 3]\n[now in {folder}/sub]"
    assert await tools.run("cd -") == f"{folder}\n[now in {folder}]"


async def test_cwd_holds_for_one_command(tools, folder):
    (folder / "sub").mkdir()
    assert await tools.run("pwd", cwd="sub") == f"{folder}/sub"
    assert await tools.run("pwd") == str(folder)


async def test_exported_and_unset_variables_persist(tools, monkeypatch):
    monkeypatch.setenv("CROW_TEST_OTHER", "inherited")
    value = 'it\'s a "test" $HOME\n`ls` \\ é日'
    await tools.run("export GREETING='" + value.replace("'", "'\\''") + "'; unset CROW_TEST_OTHER; local=1")
    assert await tools.run('printf %s "$GREETING"') == value
    assert await tools.run('echo "[$CROW_TEST_OTHER] [$local]"') == "[] []"
    await tools.run("export GREETING=again PATH=$PATH:/nowhere; exit 1")
    assert await tools.run("echo $GREETING ${PATH##*:}") == "again /nowhere"


async def test_functions_and_aliases_do_not_persist(tools):
    await tools.run("git() { echo mine; }; export -f git; alias ls='echo mine'")
    assert "mine" not in await tools.run("git --version; ls -d .")


async def test_killed_command_does_not_change_the_shell_state(tools, folder):
    await tools.run("export A=1")
    assert await tools.run("cd /; export A=2; kill -9 $$") == "[killed by SIGKILL]"
    assert await tools.run("echo $A; pwd") == f"1\n{folder}"


async def test_parallel_commands_each_change_the_environment(tools):
    await asyncio.gather(*(tools.run(f"export N{n}={n}") for n in range(10)))
    assert await tools.run("echo $N0$N1$N2$N3$N4$N5$N6$N7$N8$N9") == "0123456789"


async def test_removed_working_folder_is_an_error_that_names_another(tools, folder):
    await tools.run("mkdir sub && cd sub")
    (folder / "sub").rmdir()
    assert f"The folder {folder}/sub does not exist" in await tools.get_terminal_error(command="touch ran")
    assert await tools.run("pwd", cwd=str(folder)) == f"{folder}\n[now in {folder}]"
    assert await tools.run("pwd") == str(folder)


async def test_host_receives_the_folder_and_may_set_it(tools, folder):
    (folder / "sub").mkdir()
    moved = await tools.call("terminal", {"command": "cd sub"})
    assert moved.meta["crow/folder"] == f"{folder}/sub"
    there = await tools.call("terminal", {"command": "pwd"}, folder=str(folder))
    assert there.text == f"{folder}\n"
    assert await tools.run("pwd") == str(folder)


async def test_bash_env_of_the_user_is_still_read(tools, folder, monkeypatch):
    (folder / "env.sh").write_text("module() { echo module $1; }\n")
    monkeypatch.setenv("BASH_ENV", str(folder / "env.sh"))
    assert await tools.run("module one; bash -c 'module two'") == "module one\nmodule two"


async def test_host_sessions_share_nothing(tools, folder):
    await tools.run("export A=1; cd /")
    other = await tools.call("terminal", {"command": "echo [$A]; pwd"}, session="two")
    assert other.text == f"[]\n{folder}\n"


async def test_new_server_starts_in_the_last_folder_and_tells_what_is_gone(folder):
    (folder / "sub").mkdir()
    last: dict[str, Any] = {}

    async def run(*calls: dict[str, Any]) -> list[str]:
        def workspace(meta: dict[str, Any]) -> Workspace:
            return Workspace("one", str(folder), (str(folder),), shell=lambda: last)

        texts: list[str] = []
        async with Client(create_server(workspace)) as client:
            for call in calls:
                answer = await client.call_tool_mcp("terminal", call)
                texts.append(answer.content[0].text)
                last.clear()
                last.update((answer.meta or {}).get("crow/shell") or {})
        return texts

    await run({"command": "cd sub; export B=1 A=2; c=3"}, {"command": "x=1", "session": "a"})
    environment = last.pop("environment")
    assert environment
    assert last == {"folder": f"{folder}/sub", "variables": ["A", "B"], "sessions": ["a"]}
    gone = "[the server was restarted since the last command; variables are no longer set or unset: A, B; "
    gone += "sessions have ended: a]"
    kept, (unknown, first, second) = dict(last), await run({"session": "a"}, {"command": "pwd"}, {"command": "pwd"})
    assert unknown == f"There is no session 'a'. None is open. {gone}"
    assert (first, second) == (f"{folder}/sub\n{gone}", f"{folder}/sub\n")
    assert last == {"folder": f"{folder}/sub"}
    last.update(kept)
    assert await run({"command": "echo $x", "session": "a"}) == [f"\n[nothing but white space]\n{gone}"]
    (folder / "sub").rmdir()
    assert (await run({"command": "pwd"}))[0].startswith(f"{folder}\n")


# Long commands


async def test_long_command_continues_in_a_session(tools, folder, later):
    command = "echo one; touch ready; while [ ! -e go ]; do sleep 0.01; done; echo two; cd /; exit 4"
    call = asyncio.create_task(tools.run(command, wait=300, timeout=900))
    await tools.wait_until(lambda: (folder / "ready").exists() and later.has_timer(900))  # and so the wait has begun
    later(300)
    assert (await call).startswith(f'one\n{RUNNING} "1"')
    assert (await tools.poll("1", wait=0)).startswith(RUNNING)
    (folder / "go").touch()
    ended = await tools.call("terminal", {"session": "1", "wait": 60})
    assert ended.text == "two\n[exit code 4]\n[now in /]"
    assert ended.meta["crow/folder"] == "/"
    assert "There is no session '1'. None is open." in await tools.get_terminal_error(session="1")


async def test_continuing_command_can_be_interrupted_and_killed(tools, folder):
    await tools.run("echo $$ > 1.pid; exec sleep 999", wait=0)
    await tools.run("trap '' INT TERM; echo $$ > 2.pid; sleep 999 & wait", wait=0)
    family = await tools.wait_for_pids(2)
    assert "takes no input" in await tools.get_terminal_error(session="1", input="hello")
    assert await tools.poll("1", keys="C-c", wait=60) == "[killed by SIGINT]"
    assert await tools.poll("2", keys="kill") == "[killed]"
    await tools.wait_until_gone(family)


@pytest.fixture
def ignored_signals() -> Iterator[None]:
    """Ignore the signals that a process started by `nohup` or `&` ignores."""
    numbers = [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP]
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.posix("signals that programs inherit as ignored")
async def test_programs_get_signals_that_crow_itself_ignores(tools, ignored_signals):
    sleeps = "sh -c 'echo $$ > {0}; mv {0} {0}.pid; exec sleep 999'"
    await tools.run(f"exec {sleeps.format(1)}", wait=0)
    await tools.run(sleeps.format(2), session="a", wait=0)
    await tools.wait_for_pids(2)
    assert await tools.poll("1", keys="C-c", wait=60) == "[killed by SIGINT]"
    assert await tools.poll("a", keys="C-c", wait=60) == "^C\n[exit code 130]"
    for name in ("INT", "QUIT", "HUP"):
        command = f"sh -c 'ulimit -c 0; echo begun; kill -{name} $$; echo $((99 + 1))00'"
        for place in ({}, {"session": "a"}):
            text = await tools.run(command, **place)
            assert "begun" in text
            assert "10000" not in text
    assert "bash: line 1: nonsense" in await tools.run("nonsense")  # the shell keeps its name


async def test_timeout_applies_to_a_continuing_command(tools, later):
    assert RUNNING in await tools.run("sleep 999", wait=0, timeout=300)
    later(300)
    assert (await tools.poll("1", wait=60)).startswith("[timed out after 300 s and was killed")


async def test_polling_shows_only_new_output(tools, folder):
    stop = "while [ ! -e {} ]; do sleep 0.01; done"
    await tools.run(f"{stop.format('one')}; seq 1 40000; {stop.format('two')}; seq 40001 40003", wait=0)
    (folder / "one").touch()
    await tools.poll_until("1", "\n40000")
    (folder / "two").touch()
    assert await tools.poll("1", wait=60) == "40001\n40002\n40003"


# Sessions


async def test_session_keeps_the_state_of_its_shell(tools, folder):
    await tools.run("x=5; f() { echo f $x; }; cd /; alias hi='echo hi there'", session="a")
    assert await tools.run("f\npwd\nhi", session="a") == "f 5\n/\nhi there"
    assert await tools.run("tty >/dev/null && test -t 0 -a -t 1 -a -t 2 && stty size", session="a") == "40 120"
    assert await tools.run("pwd; echo [$x]") == f"{folder}\n[]"


async def test_session_starts_in_the_current_folder(tools, folder):
    (folder / "sub").mkdir()
    await tools.run("cd sub; export A=1")
    assert await tools.run("pwd; echo $A", session="a") == f"{folder}/sub\n1"
    assert await tools.run("pwd", session="b", cwd="/") == "/"
    assert "cwd is for a new session" in await tools.get_terminal_error(command="pwd", session="b", cwd="/")


async def test_exit_codes_are_reported_with_any_output(tools):
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


SHADOWED = ["printf", "eval", "command", "builtin", "unset", "return", "set", "exit", "exec", "trap", "readonly", ":"]
DISTURBANCES = [
    "PROMPT_COMMAND='echo prompt'",
    "PROMPT_COMMAND=cat PS1='$(cat)' PS0='$(cat)'",
    "PROMPT_COMMAND=('echo one' 'echo two'); PS1='$ '",
    r"printf 'PROMPT_COMMAND=cat\nPS1=\"\\u \\w \"\nset -o vi\nshopt -s histappend\n' > rc; . ./rc",
    "precmd() { echo precmd; }; preexec() { seen=$BASH_COMMAND; }; PROMPT_COMMAND=precmd; trap preexec DEBUG",
    "trap 'seen=$BASH_COMMAND' DEBUG",
    "trap 'true' ERR",
    "trap 'echo end' EXIT",
    "set -e",
    "set -u",
    "set -eu -o pipefail",
    "set -f -C -o posix",
    "set -o history",
    "IFS=0123456789",
    "TMOUT=1",
    "; ".join(f"{name}() {{ echo shadowed; }}" for name in SHADOWED),
    "; ".join(f"alias {name}='echo alias'" for name in (*SHADOWED, "__crow", "__crow_end", "case", "{")),
    "exec 8>&-; exec 9>&-; exec > /dev/null 2>&1; exec < /dev/null",
    "unset -f __crow __crow_end; unset __crow",
    "exit() { echo shadowed; }; cd() { echo shadowed; }",
]


@pytest.mark.sampled(4)
@pytest.mark.skipif(os.path.basename(processes.SHELL) != "bash", reason="uses features of bash")
@pytest.mark.parametrize("disturbance", DISTURBANCES)
async def test_nothing_that_a_command_sets_breaks_its_session(tools, disturbance):
    await tools.run(f"x=5\n{disturbance}", session="a", wait=60)
    assert await tools.run("\\echo begun; false", session="a", wait=60) == "begun\n[exit code 1]"
    await tools.run("sh -c 'echo $$ > a; mv a a.pid; exec sleep 999'", session="a", wait=0)
    await tools.wait_for_pids(1)
    assert await tools.poll("a", keys="C-c", wait=60) == "^C\n[exit code 130]"
    assert await tools.run('\\echo again "$x" >&2', session="a", wait=60) == "again 5"


async def test_only_commands_are_traced(tools):
    await tools.run("set -xv; PS4='+ '", session="a")
    assert (await tools.run("echo traced", session="a")).splitlines()[-2:] == ["++ echo traced", "traced"]
    assert await tools.run("set +xv; trap 'echo before $BASH_COMMAND' DEBUG", session="a") != ""
    assert await tools.run("true", session="a") == "before true"


async def test_failure_under_set_e_ends_only_the_shell_of_that_command(tools):
    await tools.run("x=5; set -e", session="a")
    assert await tools.run("false; echo $x", session="a") == "5"
    assert await tools.run("set -e; false", session="a") == "[the shell has ended, exit code 1]"
    assert await tools.run("echo new", session="a") == "new"


@pytest.mark.parametrize("other", ["sh", "bash --norc", "python3 -q"])
async def test_shell_replaced_by_another_program_takes_input(tools, other):
    await tools.run("echo", session="a")
    await tools.poll_until("a", RUNNING, command=f"exec {other}")
    ends = "exit(4)" if "python" in other else "exit 4"
    assert "[the shell has ended, exit code 4]" in await tools.poll_until("a", "[the shell", input=ends)


async def test_program_that_asks_gets_its_answer(tools):
    asks = await tools.run("read -p 'Name? ' name; echo \"Hello $name\"", session="a")
    assert asks.startswith(f'Name? \n{RUNNING} "a"')
    assert await tools.poll("a", input="Zoë", wait=60) == "Zoë\nHello Zoë"


async def test_program_with_input_is_not_taken_to_ask_again_at_once(tools, monkeypatch):
    monkeypatch.setattr(shell, "PROMPT_SILENCE", 0.0)
    monkeypatch.setattr(shell, "INPUT_SILENCE", 60)
    await tools.run("read -s -p 'Password: ' word; echo \"Hello $word\"", session="a")
    assert (await tools.poll("a", input="Zoë")).startswith("Hello Zoë")


async def test_python_repl_is_used_interactively(tools):
    await tools.poll_until("py", ">>>", command=f"{sys.executable} -q")
    await tools.poll_until("py", "42", ">>>", input="print(6 * 7)")
    assert "something else is running" in await tools.get_terminal_error(command="ls", session="py")
    assert RUNNING not in await tools.poll("py", keys="C-d", wait=60)
    assert await tools.run("echo shell", session="py") == "shell"


async def test_keys_interrupt_suspend_and_end_a_reading_program(tools, folder):
    sleeps = "sh -c 'echo $$ > {0}; mv {0} {0}.pid; exec sleep 999'"
    await tools.run(sleeps.format("a"), session="a", wait=0)
    await tools.wait_for_pids(1)
    assert await tools.poll("a", keys="C-c", wait=60) == "^C\n[exit code 130]"
    await tools.run(": > busy; while :; do :; done", session="a", wait=0)
    await tools.wait_until((folder / "busy").exists)
    assert await tools.poll("a", keys="C-c", wait=60) == "^C\n[exit code 130]"
    (folder / "a.pid").unlink()
    await tools.run(sleeps.format("b"), session="a", wait=0)
    [pid] = await tools.wait_for_pids(1)
    assert (await tools.poll("a", keys="C-z", wait=60)).endswith("[stopped: fg or bg lets it go on]")
    assert "sleep 999" in await tools.run("jobs", session="a")
    await tools.run("fg", session="a", wait=0)
    await tools.wait_until(lambda: "+" in tools.get_state(pid))  # it is in the foreground of the terminal
    await tools.poll("a", keys="C-c", wait=60)
    await tools.run("sed -n s/one/two/p", session="a", wait=0)
    await tools.poll_until("a", "two", input="one")
    assert await tools.poll("a", keys="C-d", wait=60) == "[no output]"
    assert "Nothing runs in session 'a'" in await tools.get_terminal_error(session="a", keys="C-d")


async def test_background_job_keeps_running_in_its_session(tools, folder):
    await tools.run("(while [ ! -e go ]; do sleep 0.01; done; echo came) &", session="a")
    assert await tools.run("echo free", session="a") == "free"
    (folder / "go").touch()
    assert "came" in await tools.poll_until("a", "came")


async def test_prompt_ends_the_wait_also_with_an_explicit_wait(tools, folder):
    until = "until [ -e {} ]; do sleep 0.01; done"
    asks = f"{until.format('go')}; read -p 'Name? ' name; echo Hello $name; {until.format('on')}"
    await tools.run(asks, session="a", wait=0)
    (folder / "go").touch()
    assert (await tools.poll("a", wait=500)).startswith(f"Name? \n{RUNNING}")
    assert (await tools.poll("a", wait=0.4)).startswith(RUNNING)  # the model knows the prompt and waits for more
    waiting = asyncio.create_task(tools.poll("a", wait=500, input="Zoë"))
    (folder / "on").touch()
    assert await waiting == "Zoë\nHello Zoë"
    assert (await tools.run("read -p 'More? ' more", session="a", wait=500)).startswith(f"More? \n{RUNNING}")


@pytest.mark.parametrize("key", ["PgDwn", "Bogus", "<C-up>", "F13", "ctrl-shift-x", "Entr", "\\n", "dd"])
async def test_unknown_key_is_refused_with_the_known_ones(tools, folder, key):
    await tools.poll_until("a", RUNNING, command="cat > typed")
    told = await tools.get_terminal_error(session="a", input="text", keys=f"C-d {key}")
    assert told.startswith(f"Nothing was typed: there is no key {key!r}. Known are Enter, Tab,")
    await tools.poll("a", keys="C-d", wait=60)
    assert (folder / "typed").read_text() == ""


@pytest.mark.parametrize(
    ("keys", "typed"),
    [
        ("Up Down S-Tab", "\x1b[A\x1b[B\x1b[Z"),
        ("up ENTER return <CR> esc <Esc>", "\x1b[A\r\r\r\x1b\x1b"),
        ("C-c c-C Ctrl+C ctrl-c ^C <C-c> Control-C", "\x03" * 7),
        ("C-[ C-\\ C-Space C-? M-b Alt+b", "\x1b\x1c\0\x7f\x1bb\x1bb"),
        (": w q é / ^ \\ :wq /foo :%s/a/b/g", ":wqé/^\\:wq/foo:%s/a/b/g"),
        ("F1 f12 PgDn npage Del", "\x1bOP\x1b[24~\x1b[6~\x1b[6~\x1b[3~"),
        ("\n", "\r"),
        ("\x03 \x1c", "\x03\x1c"),
        (" ", " "),
        ("", ""),
    ],
)
def test_names_of_keys_become_what_a_keyboard_sends(keys, typed):
    assert "".join(to_keystrokes(keys)) == typed


async def test_cursor_keys_are_sent_as_the_program_requests(tools, folder):
    command = (
        "stty raw -echo; printf '\\033[?1h?\n'; head -c 6 > keys; printf '\\033[?1l!\n'; head -c 6 >> keys; stty sane"
    )
    await tools.poll_until("a", "?\n", command=command)
    await tools.poll("a", keys="Up Home", wait=0)
    await tools.wait_until(lambda: (folder / "keys").read_bytes() == b"\x1bOA\x1bOH")
    await tools.poll_until("a", "!\n")  # the program has requested other keys
    assert await tools.poll("a", keys="Up Home", wait=60) == "[no output]"
    assert (folder / "keys").read_bytes() == b"\x1bOA\x1bOH\x1b[A\x1b[H"


@pytest.mark.skipif(not LINUX, reason="tests the limit of Linux")
@pytest.mark.parametrize("reader", ["head -n 1", "head -n 1 | cat", "sh -c 'read line; echo $line'"])
async def test_long_line_is_typed_whole_or_refused(tools, folder, reader):
    await tools.run(f"{reader} > read", session="a", wait=0)
    told = await tools.get_terminal_error(session="a", input="short\n" + "é" * 2048)
    assert told.startswith("Nothing was typed: the program reads whole lines")
    await tools.poll("a", input="x" * 4095, wait=60)
    assert (folder / "read").read_text() == "x" * 4095 + "\n"


async def test_long_line_arrives_whole_where_no_line_is_read(tools, folder):
    await tools.poll_until("a", "?", command="stty raw -echo; echo ?; head -c 100000 > read; stty sane")
    await tools.poll("a", input="é" * 49_999 + "x", wait=60)
    assert (folder / "read").read_bytes() == ("é" * 49_999 + "x\r").encode()


async def test_history_keys_run_an_earlier_command_again(tools):
    await tools.run("echo one", session="a")
    await tools.run("echo two", session="a")
    assert await tools.poll("a", keys="Up Enter") == "$ echo two\ntwo"
    assert await tools.poll("a", keys="C-p Up Up Down Up Enter") == "$ echo one\none"
    for keys in ("Up", "Enter", "Up Down Enter", "C-d", "Up x Enter", "Up Up Up Up Up Up Enter"):
        assert 'keys "Up Enter"' in await tools.get_terminal_error(session="a", keys=keys)


async def test_commit_message_is_written_in_an_editor(tools, monkeypatch):
    if not shutil.which("vi"):
        pytest.skip("needs vi")
    monkeypatch.setenv("EDITOR", "code --wait")  # which opens a window
    monkeypatch.setenv("GIT_EDITOR", "code --wait")
    await tools.run("git init -q . && git config user.email a@b.c && git config user.name n && touch a && git add a")
    await tools.poll_until("a", "[screen]\n", "# Please enter the commit message", command="git commit")
    await tools.poll("a", keys="i", wait=0)
    await tools.poll_until("a", "written by a model", input="written by a model")
    await tools.poll("a", keys="Escape", wait=0)
    assert "1 file changed" in await tools.poll_until("a", "1 file changed", input=":wq")
    assert await tools.run("git log --format=%s") == "written by a model"


def test_the_users_editor_is_used_if_it_works_in_a_terminal(tmp_path, monkeypatch):
    for name in ("nano", "hx", "code"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_editor({"VISUAL": "code --wait", "EDITOR": f"{tmp_path}/hx -w"}) == f"{tmp_path}/hx -w"
    assert find_editor({"EDITOR": "code --wait"}) == find_editor({"EDITOR": "vi"}) == find_editor({}) == "nano"
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_editor({"EDITOR": "vi"}) == ""


async def test_top_is_shown_as_a_screen(tools):
    if not shutil.which("top"):
        pytest.skip("needs top")
    text = await tools.poll_until("a", "[screen]\n", "PID", command="top")
    screens = text.split("[screen]\n")
    assert "PID" not in screens[0]  # no frame comes as lines
    assert max(map(len, screens)) < 8_000
    ended = await tools.poll("a", keys="q", wait=60)
    assert "PID" in ended  # the last screen stays on the terminal
    assert RUNNING not in ended
    assert await tools.run("echo next", session="a") == "next"


async def test_spinners_and_a_cleared_screen_stay_lines(tools):
    lines = "\n".join(map(str, range(1, 101)))
    assert await tools.run("printf '\\033[H\\033[2J\\033[3J'; seq 100", session="a") == lines
    spinner = "printf '\\033[?25l-\\r/\\r\\033[Kdone\\033[?25h\\n'; seq 100"
    assert await tools.run(spinner, session="a") == f"done\n{lines}"


async def test_full_screen_editor_is_shown_as_a_screen(tools, folder):
    if not shutil.which("vi"):
        pytest.skip("needs vi")
    await tools.poll_until("a", "[screen]\n", "a.txt", command="vi -u NONE a.txt")
    await tools.poll("a", keys="i", wait=0)
    assert "\x1b" not in await tools.poll_until("a", "typed by a model", input="typed by a model")
    await tools.poll("a", keys="Escape", wait=0)
    assert await tools.poll("a", keys=": w q Enter", wait=60) == "[no output]"
    assert (folder / "a.txt").read_text().startswith("typed by a model")


async def test_end_of_a_shell_kills_its_processes(tools, folder):
    await tools.run("nohup sh -c 'echo $$ > a.pid; sleep 999' > log 2>&1 &", session="a")
    [pid] = await tools.wait_for_pids(1)
    assert "[the shell has ended, exit code 0]" in await tools.run("exit", session="a")
    await tools.wait_until_gone([pid])


async def test_end_of_a_shell_is_reported_and_frees_its_name(tools):
    assert (await tools.run("exit 3", session="a")).endswith("[the shell has ended, exit code 3]")
    assert "There is no session 'a'" in await tools.get_terminal_error(session="a")
    assert await tools.run("echo new", session="a") == "new"


async def test_timeout_ends_the_command_and_keeps_the_shell_if_possible(tools, folder, later, monkeypatch):
    async def timed_out(command: str, grace: float) -> str:
        monkeypatch.setattr(processes, "TERM_GRACE", grace)
        call = asyncio.create_task(tools.run(command, session="a", timeout=300, wait=600))
        await tools.wait_until(lambda: (folder / "ready").exists() and later.has_timer(300))
        (folder / "ready").unlink()
        later(300)
        return await call

    await tools.run("x=5", session="a")
    assert "[timed out after 300 s" in await timed_out("sh -c 'touch ready; exec sleep 999'", grace=50)
    assert await tools.run("echo $x", session="a") == "5"
    assert "[timed out after 300 s" in await timed_out("trap '' TERM; touch ready; while :; do :; done", grace=0.3)
    assert await tools.run("echo [$x]", session="a") == "[]"


async def test_several_sessions_run_at_once(tools):
    meet = "touch {0}; while [ ! -e {1} ]; do sleep 0.01; done; echo met"
    answers = await asyncio.gather(
        tools.run(meet.format("a", "b"), session="a"), tools.run(meet.format("b", "a"), session="b")
    )
    assert answers == ["met", "met"]


async def test_second_command_in_a_busy_session_is_refused(tools, folder):
    command = "echo {}; while [ ! -e go ]; do sleep 0.01; done"
    calls = [asyncio.create_task(tools.call("terminal", {"command": command.format(n), "session": "a"})) for n in "12"]
    [refused], [ran] = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert (await refused).text.startswith("Not run: in session 'a' something else is running.")
    (folder / "go").touch()
    assert (await ran).text == f"{1 + calls.index(ran)}\n"


async def test_cancelled_call_ends_its_session(tools, folder):
    command = (
        "echo $$ > shell.pid; (trap '' TERM INT HUP; echo $BASHPID > deaf.pid; while :; do sleep 999; done) & sleep 999"
    )
    call = asyncio.create_task(tools.call("terminal", {"command": command, "session": "a"}))
    family = await tools.wait_for_pids(2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await tools.wait_until_gone(family)
    assert await tools.run("echo next", session="a") == "next"


async def test_session_name_is_free_after_a_call_cancelled_at_any_moment(tools):
    for moment in range(8):
        await tools.run("true", session="a")
        call = asyncio.create_task(tools.call("terminal", {"command": "sleep 999", "session": "a"}))
        for _ in range(moment):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while "something else is running" in (await tools.call("terminal", {"command": "true", "session": "a"})).text:
            await asyncio.sleep(0.01)


async def test_cancelled_poll_ends_nothing(tools, folder):
    await tools.run("echo $$ > a.pid; sleep 999", session="a", wait=0)
    [pid] = await tools.wait_for_pids(1)
    call = asyncio.create_task(tools.call("terminal", {"session": "a", "wait": 60}))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert RUNNING in await tools.poll("a", wait=0)
    assert tools.is_alive(pid)


async def test_end_of_the_host_session_ends_all_its_processes(tools, folder):
    ends: list[Any] = []

    def workspace(meta: dict[str, Any]) -> Workspace:
        return Workspace("one", str(folder), (str(folder),), at_end=ends.append)

    async with Client(create_server(workspace)) as client:

        async def run(**arguments: Any) -> None:
            assert not (await client.call_tool_mcp("terminal", arguments)).is_error

        leave = "setsid" if LINUX else "command"
        await run(command=f"{leave} sh -c 'echo $$ > a.pid; sleep 999' &")
        await run(command="echo $$ > b.pid; sleep 999", wait=0)
        await run(command="(echo $BASHPID > c.pid; sleep 999) & echo $$ > d.pid", session="a")
        family = await tools.wait_for_pids(4)
        assert len(ends) == 1
        assert all(tools.is_alive(pid) for pid in family)
        await ends[0]()
        await tools.wait_until_gone(family)
        await run(command="true")


async def test_invalid_uses_of_a_session_are_explained(tools):
    assert "There is no session 'a'" in await tools.get_terminal_error(session="a", input="x")
    assert "name it. None is open." in await tools.get_terminal_error(keys="C-c")
    assert "is no name" in await tools.get_terminal_error(command="true", session="a b/\x1b")
    assert "either a command, or input" in await tools.get_terminal_error(command="true", session="a", input="x")
    assert "give positive numbers" in await tools.get_terminal_error(command="true", wait=-1)
    assert await tools.run("true", session="", input="", keys="", cwd="") == "[no output]"


async def test_program_that_does_not_read_its_input_is_an_error(tools, folder, monkeypatch):
    await tools.run("stty raw -echo; touch ready; sleep 999", session="a", wait=0)
    await tools.wait_until((folder / "ready").exists)
    monkeypatch.setattr(shell, "INPUT_TIMEOUT", 0.3)
    assert "does not read its input" in await tools.get_terminal_error(session="a", input="x" * 200_000)


async def test_program_that_ends_amid_its_input_is_reported(tools, folder):
    await tools.run("stty raw -echo; touch ready; head -c 5000 > part; exit 3", session="a", wait=0)
    await tools.wait_until((folder / "ready").exists)
    told = await tools.poll("a", input="x" * 200_000, wait=60)
    assert told.endswith("[the shell has ended, exit code 3]")


async def test_failure_to_open_a_session_leaks_nothing(tools, monkeypatch):
    await tools.run("true", session="a")
    await tools.poll("a", keys="kill")
    before = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(shell, "LAUNCHER", "x" * 200_000)  # longer than the system allows
    assert "No terminal could be opened" in await tools.get_terminal_error(command="true", session="a")
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.skipif(not Path("/bin/dash").exists(), reason="needs dash at /bin/dash")
async def test_plain_sh_works_like_bash(tools, folder, monkeypatch):
    monkeypatch.setattr(processes, "SHELL", "/bin/dash")
    await tools.run("cd /; export A='a  b'")
    assert await tools.run('pwd; echo "$A"; echo $0; exit 3') == "/\na  b\ndash\n[exit code 3]"
    await tools.run("x=5", session="a")
    assert await tools.run("echo $x; (exit 3)", session="a") == "5\n[exit code 3]"
    assert "Syntax error" in await tools.run("echo (", session="a")
    await tools.run(f": > {folder}/busy; while :; do :; done", session="a", wait=0)
    await tools.wait_until((folder / "busy").exists)
    assert "[exit code 130]" in await tools.poll("a", keys="C-c", wait=60)
    assert await tools.run("echo $x", session="a") == "5"


# Load and malicious output


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_hundred_commands_run_at_once(tools):
    said = await asyncio.gather(*(tools.run(f"echo {n}; exit {n % 3}") for n in range(100)))
    assert said == [f"{n}\n[exit code {n % 3}]" if n % 3 else str(n) for n in range(100)]


async def test_long_output_is_complete_in_a_file(tools):
    text = await tools.run("seq 1 100000")
    path = re.search(r"all of it is in (\S+): look there", text)[1]  # type: ignore[index]
    assert await anyio.Path(path).read_text() == "".join(f"{n}\n" for n in range(1, 100_001))
    assert (await anyio.Path(path).parent.stat()).st_mode & 0o077 == 0
    assert await tools.run(f"tail -1 {path}") == "100000"


async def test_removed_output_folder_is_recreated(tools):
    def kept(text: str) -> Path:
        return Path(re.search(r"all of it is in (\S+): look there", text)[1])  # type: ignore[index]

    folder = kept(await tools.run("seq 1 100000")).parent
    during = await tools.run(f"rm -r {folder}; seq 1 1000000")
    assert during.startswith("1\n2\n")
    assert during.endswith("\n1000000")
    assert "characters left out; narrow the output" in during
    after = kept(await tools.run("seq 1 100000"))
    assert after.read_text().endswith("\n100000\n")


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.sampled_from(
                [
                    b"\x1b[?1049h",
                    b"\x1b[?1;25h",
                    b"\x1b[?25l",
                    b"\x1b[?1l",
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
@settings(max_examples=settings.default.max_examples * 3 // 2)
def test_no_output_leaves_escape_sequences_in_the_text(pieces):
    screen, capture = TerminalScreen(), OutputCapture()
    for piece in pieces:
        capture.feed(screen.split(piece))
    for text in (capture.get_text(30_000), screen.get_text()):
        assert not re.search(CONTROLS, text)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
@settings(max_examples=settings.default.max_examples * 3 // 2)
def test_chunks_of_output_do_not_change_the_text(data, cuts):
    whole, pieces = TerminalScreen(), TerminalScreen()
    at = [0, *sorted(cuts), len(data)]
    lines = b"".join(pieces.split(data[a:b]) for a, b in itertools.pairwise(at))
    assert whole.split(data) == lines
    assert whole.is_active == pieces.is_active


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


@pytest.mark.timeout(600)
@given(st.lists(TYPED, min_size=1, max_size=8))
@settings(max_examples=settings.default.max_examples * 15 // 100)
def test_server_survives_any_input(calls):
    async def type_all() -> None:
        async with Client(create_server()) as client:
            for call in calls:
                result = await client.call_tool_mcp("terminal", {"session": "a", "wait": 0.05} | call)
                text = result.content[0].text
                assert "Traceback" not in text
                assert not re.search(CONTROLS, text)
            await client.call_tool_mcp("terminal", {"session": "a", "keys": "kill"})
            assert (await client.call_tool_mcp("terminal", {"command": "echo alive"})).content[0].text == "alive\n"

    asyncio.run(type_all())


@pytest.mark.skipif(
    not system.HAS_PROC or os.geteuid() != 0 or not shutil.which("setpriv"),
    reason="becomes a user whom limits hold: needs root, and /proc to count processes",
)
async def test_fork_bomb_is_stopped_by_the_limit(tools, folder, later, monkeypatch):
    monkeypatch.setattr(shell_state, "SPARE_PROCESSES", 0)
    user, log = 10_000 + os.getpid() % 50_000, folder / "log"
    bomb = "bash -c 'bomb() { bomb | bomb & }; bomb; sleep 999'"
    command = f"setpriv --reuid={user} --regid=65534 --clear-groups {bomb} 2>&1 | tee log"
    call = asyncio.create_task(tools.run(command, timeout=300))
    await tools.wait_until(lambda: log.exists() and b"Resource temporarily unavailable" in log.read_bytes())
    later(300)
    text = await call
    assert "Resource temporarily unavailable" in text
    assert "timed out after 300 s" in text
    while await tools.run(f"ps -u {user} -o stat= | grep -v Z; echo alive") != "alive":
        pass
