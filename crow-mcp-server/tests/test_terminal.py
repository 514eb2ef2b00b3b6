"""Commands without a session in the tool `terminal`."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from crow_mcp_server import create_server
from crow_mcp_server.terminal import processes, sessions
from crow_mcp_server.terminal.command_output import MAX_FILE_BYTES
from fastmcp import Client
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

LINUX = sys.platform == "linux"


async def test_output_and_errors_are_merged_in_order(tools):
    assert await tools.run("echo 1; echo 2 >&2; echo 3") == "1\n2\n3"


async def test_exit_code_is_reported_unless_zero(tools):
    assert await tools.run("echo out; exit 3") == "out\n[exit code 3]"
    assert await tools.run("false") == "[exit code 1]"
    assert await tools.run("true") == "[no output]"
    assert "[exit code 127]" in await tools.run("no-such-command-here")


async def test_a_signal_is_named(tools):
    assert await tools.run("kill -SEGV $$") == "[killed by SIGSEGV]"


async def test_command_runs_in_the_working_folder_or_the_one_given(tools, folder):
    (folder / "sub").mkdir()
    assert await tools.run("pwd -P") == str(folder.resolve())
    assert await tools.run("pwd -P", cwd="sub") == str((folder / "sub").resolve())
    assert await tools.run("pwd -P", cwd="/") == "/"
    (folder / "link").symlink_to("sub")
    assert await tools.run("pwd", cwd="link") == f"{folder}/link"


async def test_missing_folder_is_a_clear_error(tools, folder):
    (folder / "file").touch()
    missing = await tools.call("terminal", {"command": "touch ran", "cwd": "gone"})
    assert missing.is_error
    assert f"The folder {folder}/gone does not exist, so the command was not run" in missing.text
    no_folder = await tools.call("terminal", {"command": "touch ran", "cwd": "file"})
    assert no_folder.is_error
    assert "is not a folder" in no_folder.text
    assert not list(folder.rglob("ran"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"command": ""},
        {"command": " \n"},
        {"command": "a\0b"},
        {"command": "x", "timeout": 0},
        {"command": "x", "z": 1},
    ],
)
async def test_invalid_call_is_an_error_with_the_reason(tools, arguments):
    result = await tools.call("terminal", arguments)
    assert result.is_error
    assert "Traceback" not in result.text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [99_000, 131_000, 140_000, 5_000_000])
async def test_command_may_be_longer_than_an_argument_of_a_process(tools, length):
    script = f"text={'é' * (length // 2)}\nwc -c <<X\n${{text}}\nX\ncd /; export A=1; (exit 3)"
    assert await tools.run(script) == f"{length // 2 * 2 + 1}\n[exit code 3]\n[now in /]"
    assert await tools.run("pwd; echo $A $0") == "/\n1 bash"


async def test_input_is_empty_and_programs_neither_ask_nor_page(tools):
    assert await tools.run("cat; read answer; echo $?") == "1"
    shown = await tools.run("echo $PAGER $GIT_PAGER $GIT_TERMINAL_PROMPT $TERM $NO_COLOR $PYTHONUNBUFFERED")
    assert shown == "cat cat 0 dumb 1 1"
    assert "no tty" in await tools.run("(: < /dev/tty) 2>/dev/null || echo no tty")


@pytest.mark.parametrize("command", ["git commit", "git tag -a x", "git rebase -i HEAD", "$EDITOR a", "$VISUAL a"])
async def test_an_editor_fails_at_once_with_advice(tools, command):
    await tools.run("git init -q . && git config user.email a@b.c && git config user.name n && touch a && git add a")
    await tools.run("git commit -qm one; touch b; git add b; git commit -qm two; touch c; git add c")
    text = await tools.run(command.replace("-i HEAD", "-i --root --autostash"))
    assert "git commit -m" in text
    assert "run the command in a session" in text
    assert "[exit code" in text


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "command", ["top", "vi -u NONE a", "stty size", ": < /dev/tty", "ssh-keygen -y -f a; tty && :"]
)
async def test_program_that_needs_a_terminal_leads_to_advice(tools, command):
    program = command.split()[0]
    if not shutil.which(program) and program != ":":
        pytest.skip(f"needs {program}")
    assert "needs a terminal: run it with a session]" in await tools.run(command, timeout=5)


async def test_hidden_variables_never_reach_a_command(tools, monkeypatch):
    monkeypatch.setenv("CROW_TEST_KEY", "canary-4711")
    monkeypatch.setenv("CROW_TEST_OTHER", "visible")
    shown = await tools.run("env")
    assert "canary-4711" not in shown
    assert "CROW_TEST_OTHER=visible" in shown
    if LINUX:
        assert "canary-4711" not in await tools.run("tr '\\0' '\\n' < /proc/self/environ")


async def test_commands_do_not_inherit_the_servers_virtual_environment(tools, monkeypatch):
    own = Path(sys.prefix)
    if sys.prefix == sys.base_prefix:
        pytest.skip("these tests run outside of a virtual environment")
    monkeypatch.setenv("VIRTUAL_ENV", str(own))
    monkeypatch.setenv("PATH", f"{own}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FASTMCP_LOG_ENABLED", "false")
    assert await tools.run("echo [$VIRTUAL_ENV] [$FASTMCP_LOG_ENABLED]") == "[] []"
    assert f"{own}/bin" not in (await tools.run("echo $PATH")).split(":")


async def test_virtual_environment_of_the_project_is_inherited(tools, monkeypatch, folder):
    monkeypatch.setenv("VIRTUAL_ENV", str(folder / ".venv"))
    assert await tools.run("echo $VIRTUAL_ENV") == str(folder / ".venv")


async def test_long_output_keeps_both_ends_and_counts_what_is_left_out(tools):
    text = await tools.run("seq 1 200000")
    assert len(text) <= 30_000
    assert text.startswith("1\n2\n3\n")
    assert text.endswith("\n199999\n200000")
    before, after = text.split("\n[")
    count, rest = after.split(" of ", 1)
    whole = len("".join(f"{n}\n" for n in range(1, 200_001)))
    assert len(before) + int(count.replace(",", "")) + len(rest.split("]\n", 1)[1]) + 1 == whole


async def test_a_character_is_never_cut_in_two(tools):
    text = await tools.run(f"""{sys.executable} -c 'print("x" + "日本語ü" * 400000)'""")
    assert "\ufffd" not in text
    left_out = int(text.split("\n[")[1].split(" ")[0].replace(",", ""))
    front, back = text.split("\n[")[0], text.split("]\n")[1]
    assert len(front) + left_out + len(back) + 1 == 1 + 4 * 400_000 + 1


async def test_undecodable_bytes_are_replaced(tools):
    assert await tools.run(r"printf 'a\377\376bc\n'") == "a\ufffd\ufffdbc"


@pytest.mark.parametrize("printed", [r"a\000b\n", r"one\rtwo\n", r"\007a\n", r"a\vb"])
async def test_control_characters_that_are_not_shown_are_mentioned(tools, printed):
    assert "\n[control characters such as NUL" in await tools.run(f"printf '{printed}'")


OUTPUTS = [
    "",
    "a",
    "a\n",
    "a\n\n\n",
    "\n\na \t\n \n",
    "a\r\nb\r\n\r\n",
    "a\r\r\n",
    "\fa\n\f\n",
    "é日\n\n",
    "a\tb\t\n",
    "[x]\n\n",
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arguments", [{}, {"session": "a"}])
@pytest.mark.parametrize("printed", OUTPUTS)
async def test_output_is_exact_to_the_last_newline(tools, folder, printed, arguments):
    (folder / "file").write_bytes(printed.encode())
    shown = (await tools.call("terminal", {"command": "cat file"} | arguments)).text
    assert shown == (printed or "[no output]")
    shown = (await tools.call("terminal", {"command": "cat file; (exit 3)"} | arguments)).text
    assert shown == printed + ("" if printed.endswith("\n") or not printed else "\n") + "[exit code 3]"


async def test_blank_output_is_not_an_empty_answer(tools):
    assert (await tools.call("terminal", {"command": "echo; echo"})).text == "\n\n[nothing but white space]"


LINES = st.lists(st.sampled_from(["a", "", "  ", "\tb ", "é", "c\f", "+d", "- e", "\\", "x\r", "@@"]), max_size=12)


@given(LINES, LINES, st.booleans(), st.booleans())
@settings(max_examples=settings.default.max_examples // 4)
def test_a_diff_can_be_applied_as_the_model_sees_it(before, after, is_last_cut, in_session):
    def write(lines: list[str]) -> bytes:
        text = "".join(f"{line}\n" for line in lines)
        (folder / "file").write_bytes(data := (text.removesuffix("\n") if is_last_cut else text).encode())
        return data

    async def diff() -> str:
        async with Client(create_server()) as client:
            arguments = {"command": "git diff", "cwd": str(folder)} | ({"session": "a"} if in_session else {})
            return (await client.call_tool_mcp("terminal", arguments)).content[0].text

    def git(*arguments: str, **options: Any) -> None:
        subprocess.run(["git", "-c", "core.autocrlf=false", *arguments], cwd=folder, check=True, **options)

    with TemporaryDirectory() as name:
        folder = Path(name)
        git("init", "-q")
        write(before)
        git("add", "file")
        wanted = write(after)
        shown = asyncio.run(diff())
        if wanted == write(before):
            return
        git("apply", "--whitespace=nowarn", input=shown.encode(), capture_output=True)
        assert (folder / "file").read_bytes() == wanted


async def test_escape_sequences_and_control_characters_are_removed(tools):
    printed = (
        r"printf '\033[1;31mred\033[0m \033]0;title\007\033]8;;http://x\033\\link\033]8;;\033\\ \033(B\033=\007bell\n'"
    )
    assert (await tools.run(printed)).startswith("red link bell\n")


async def test_progress_bars_show_their_last_state(tools):
    assert (await tools.run(r"printf ' 10%%\r 50%%\r100%%\ndone\r\nnext\n'")).startswith("100%\ndone\r\nnext\n")
    assert (await tools.run(r"printf 'N\bNA\bA |\b/\b-\b\n'")).startswith("NA")
    bar = await tools.run(f'{sys.executable} -c \'for i in range(200001): print(f"\\r{{i/2000:.1f}}%", end="")\'')
    assert bar.startswith("100.0%\n")
    assert len(bar) < 1000


async def test_control_characters_are_removed_quickly(tools):
    assert await tools.run(f"{sys.executable} -X utf8 -c 'print(\"\\x9d\\x90\" * 100_000)'") != ""


async def timed_out(tools: Any, later: Any, command: str, begun: Callable[[], object]) -> str:
    """Return the answer to a command whose timeout expires once `begun` holds."""
    call = asyncio.create_task(tools.run(command, timeout=300))
    await tools.wait_until(lambda: begun() and later.has_timer(300))  # the command may begin before its timer is set
    later(300)
    return await call


async def test_timeout_kills_and_keeps_the_output(tools, folder, later):
    pid = folder / "a.pid"
    text = await timed_out(tools, later, "echo begun; echo $$ > a; mv a a.pid; sleep 999", pid.exists)
    assert text.startswith("begun\n[timed out after 300 s and was killed")
    assert not tools.is_alive(int(pid.read_text()))


async def test_timeout_lets_a_command_clean_up(tools, folder, later, monkeypatch):
    monkeypatch.setattr(processes, "TERM_GRACE", 50)
    command = "trap 'echo cleaned; exit 0' TERM; echo begun; touch ready; sleep 999 & wait"
    text = await timed_out(tools, later, command, (folder / "ready").exists)
    assert text.startswith("begun\ncleaned\n[timed out")


async def test_timeout_kills_a_command_that_ignores_sigterm(tools, folder, later, monkeypatch):
    monkeypatch.setattr(processes, "TERM_GRACE", 0.3)
    command = "trap '' TERM; echo $$ > a; mv a a.pid; (echo $BASHPID > b; mv b b.pid; sleep 999); sleep 999"
    text = await timed_out(tools, later, command, lambda: (folder / "a.pid").exists() and (folder / "b.pid").exists())
    assert "timed out" in text
    await tools.wait_until_gone(await tools.wait_for_pids(2))


async def test_call_waits_for_a_command_that_dies_slowly(tools, folder, later, monkeypatch):
    monkeypatch.setattr(processes, "TERM_GRACE", 1.0)
    monkeypatch.setattr(sessions, "TERM_GRACE", 0.1)
    text = await timed_out(tools, later, "trap '' TERM; touch ready; while :; do :; done", (folder / "ready").exists)
    assert text.startswith("[timed out after 300 s")


async def test_endless_output_is_stopped_by_the_timeout(tools, folder, later):
    command = "yes | { head -c 1000000; touch ready; cat; }"
    text = await timed_out(tools, later, command, (folder / "ready").exists)
    assert text.startswith("y\ny\n")
    assert "characters left out" in text
    assert "timed out after 300 s" in text
    assert len(text) < 31_000


async def test_background_process_is_reported_and_does_not_delay_the_answer(tools, folder):
    text = await tools.run("sleep 999 & echo $! > a.pid; echo started")
    [pid] = await tools.wait_for_pids(1)
    try:
        assert text.startswith(f"started\n[still running in the background: {pid};")
        assert tools.is_alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


async def test_background_process_with_redirected_output_is_reported(tools, folder):
    text = await tools.run("sleep 999 > log 2>&1 & echo $! > a.pid")
    [pid] = await tools.wait_for_pids(1)
    os.kill(pid, signal.SIGKILL)
    assert text.startswith(f"[still running in the background: {pid};")


async def test_background_process_survives_writing_after_the_call(tools, folder):
    await tools.run(
        "(while [ ! -e go ]; do sleep 0.01; done; echo more; echo written > result; echo $BASHPID > a.pid) &"
    )
    (folder / "go").touch()
    await tools.wait_for_pids(1)
    assert (folder / "result").read_text() == "written\n"


async def test_call_waits_for_a_shell_that_closes_its_output_early(tools, folder):
    assert (
        await tools.run("exec >&- 2>&-; while [ ! -e never ]; do touch never; sleep 0.1; done; exit 4")
        == "[exit code 4]"
    )


async def test_cancelled_call_kills_all_processes(tools, folder):
    leave = "setsid" if LINUX else "command"
    command = (
        "echo $$ > shell.pid; (echo $BASHPID > deaf.pid; trap '' TERM INT HUP; while :; do sleep 999; done) &\n"
        f"{leave} sh -c 'echo $$ > left.pid; sleep 999' &\n"
        "trap '' TERM; sleep 999"
    )
    call = asyncio.create_task(tools.call("terminal", {"command": command}))
    family = await tools.wait_for_pids(3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await tools.wait_until_gone(family)
    assert await tools.run("echo next") == "next"


async def test_cancelled_calls_leave_the_server_working(tools, folder):
    for n in range(20):
        call = asyncio.create_task(tools.call("terminal", {"command": f"echo $$ > {n}.pid; sleep 999"}))
        if n % 2:
            await tools.wait_until(lambda file=folder / f"{n}.pid": file.exists() and file.read_text())
        else:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    running = [int(text) for file in folder.glob("*.pid") if (text := file.read_text())]
    assert len(running) >= 10
    await tools.wait_until_gone(running)
    assert await tools.run("echo next") == "next"


async def test_commands_run_side_by_side(tools):
    meet = "touch {0}; while [ ! -e {1} ]; do sleep 0.01; done; echo met"
    answers = await asyncio.gather(tools.run(meet.format("a", "b")), tools.run(meet.format("b", "a")))
    assert answers == ["met", "met"]


async def test_other_calls_are_answered_while_a_command_floods(tools, folder):
    flood = asyncio.create_task(tools.run("yes | { head -c 10000000; touch flooding; cat; }"))
    await tools.wait_until((folder / "flooding").exists)
    assert await tools.run("echo free") == "free"
    assert not flood.done()
    flood.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flood


async def test_dry_run_runs_nothing(tools, folder):
    result = await tools.call("terminal", {"command": "touch ran"}, dry_run=True)
    assert not result.is_error
    assert "was not run" in result.text
    assert not (folder / "ran").exists()


MEASURE = """
import asyncio, os, re, resource, sys
from crow_mcp_server import create_server
from fastmcp import Client

def peak():
    if sys.platform == "linux":  # getrusage includes the memory of the parent process
        return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

async def main():
    async with Client(create_server()) as client:
        await client.call_tool("terminal", {"command": "seq 100000"})
        before = peak()
        result = await client.call_tool("terminal", {"command": sys.argv[1], "timeout": 500})
        more, text = (peak() - before) // 2**20, result.content[0].text
        print(more, os.path.getsize(re.search(r" its beginning is in (\\S+): ", text)[1]), len(text))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("command", "megabytes"),
    [
        ("head -c 100000000 /dev/zero | tr '\\0' x", 32),  # one line
        ("head -c 100000000 /dev/urandom", 32),
        ("yes | head -c 1000000000", 16),
    ],
)
def test_a_gigabyte_of_output_uses_little_memory_and_a_64_megabyte_file(command, megabytes):
    ran = subprocess.run([sys.executable, "-c", MEASURE, command], capture_output=True, text=True, check=True)
    more, size, shown = map(int, ran.stdout.split())
    assert more < megabytes
    assert size == MAX_FILE_BYTES
    assert shown <= 30_200  # with the notes below it


async def test_last_line_of_the_output_is_reported_as_progress(tools: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "WATCH_INTERVAL", 0.01)
    seen: list[tuple[float, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, message))
        (tools.folder / "go").touch()

    command = "echo one; echo two; until [ -e go ]; do sleep 0.01; done; echo three"
    meta = {"crow/session": "one", "crow/cwd": str(tools.folder)}
    answer = await tools.client.call_tool_mcp("terminal", {"command": command}, progress_handler=hear, meta=meta)
    assert answer.content[0].text == "one\ntwo\nthree\n"
    lines = ["one", "two", "three"]
    told = [lines.index(message) for _, message in seen if message]
    assert told == sorted(told)
    assert seen[0][1] in ("one", "two")  # the command ends only after the first report
    assert [seconds for seconds, _ in seen] == sorted({seconds for seconds, _ in seen})
