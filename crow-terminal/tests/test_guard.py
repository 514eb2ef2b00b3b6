"""A terminal is usable after `kill -9`, whether its shell prints its prompt before the guard has written, or after.

CROW_SOAK is how often each case is tried with a real shell in tmux.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crow_testing.process_states import is_alive

if TYPE_CHECKING:
    from conftest import Screen

    Start = Callable[..., Screen]

SOAK = int(os.environ.get("CROW_SOAK") or 0)
PROMPT = b"Killed\r\n$ "
"""What a shell prints when its command was killed."""


def find_children(parent: int) -> dict[int, str]:
    """Find the children of a process, with their names."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {int(pid): name for pid, of, name in rows if int(of) == parent}


def find_guard(process: int) -> int:
    """Find the guard of the program: its child that is a shell."""
    return next(pid for pid, name in find_children(process).items() if name.endswith("sh"))


def wait_for_end(process: int) -> None:
    end = time.monotonic() + 90
    while is_alive(process):
        assert time.monotonic() < end
        time.sleep(0.05)


def kill(screen: "Screen", *, shell_first: bool) -> None:
    """Kill the program. The prompt of the shell comes before the guard has written, or after."""
    guard = find_guard(screen.process.pid)
    if shell_first:
        os.kill(guard, signal.SIGSTOP)
    screen.process.send_signal(signal.SIGKILL)
    screen.process.wait()
    if shell_first:
        os.write(screen.terminal, PROMPT)
        screen.settle()
        os.kill(guard, signal.SIGCONT)
    screen.until(lambda: screen.written.endswith(b"\x1b[J"))
    if not shell_first:
        os.write(screen.terminal, PROMPT)
        screen.settle()


@pytest.mark.parametrize("shell_first", [False, True])
@pytest.mark.parametrize("prompt", ["ask make", "numbers 400 0.01", "wait", "idle"])
def test_prompt_of_the_shell_stands_alone_below_the_answer_after_kill_9(prompt: str, shell_first: bool, start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("hello\r")
    screen.until("You said: hello")
    if prompt.startswith("numbers"):
        screen.type(f"{prompt}\r")
        screen.until("line-00012")
    elif prompt != "idle":
        screen.type(f"{prompt}\r")
        screen.until("letter, or" if "ask" in prompt else "waiting")
    kill(screen, shell_first=shell_first)
    lines = screen.text.rstrip().split("\n")
    at = screen.screen.cursor
    assert not at.hidden
    assert (lines[-1], at.x, at.y) == ("$", 2, len(lines) - 1)
    assert sum("Killed" in line for line in lines) == 1
    everything = "\n".join(screen.everything)
    for shown in {"ask make": ["│ make", "a  Allow always"], "wait": ["waiting", "Esc stops"]}.get(prompt, []):
        assert shown in everything
    numbers = re.findall(r"line-\d+", everything)
    assert numbers == [f"line-{n:05}" for n in range(len(numbers))]
    assert len(numbers) > 12 or not prompt.startswith("numbers")
    assert "small" not in lines[-1]


def test_frames_are_whole_and_no_mode_is_left_after_kill_9(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("wait\r")
    screen.until("waiting")
    kill(screen, shell_first=False)
    for sequence in (b"\x1b[?1049h", b"\x1b[?1000h", b"\x1b[?1006h", b"\x1b[>"):
        assert sequence not in screen.written
    assert screen.written.count(b"\x1b[?2026h") + 1 == screen.written.count(b"\x1b[?2026l")  # every frame was whole
    assert screen.written.rfind(b"\x1b[?2004h") < screen.written.rfind(b"\x1b[?2004l")


class Pane:
    """A shell in tmux."""

    def __init__(self, socket: Path, shell: str) -> None:
        self._socket = socket
        size = ["-x", "80", "-y", "24"]
        self.tmux("new-session", "-d", "-s", "t", *size, f"env PS1='PROMPT$ ' {shell}")
        self.until("PROMPT$")

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket), "-f", os.devnull, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def read(self) -> list[str]:
        return self.tmux("capture-pane", "-p", "-S", "-", "-t", "t").rstrip().split("\n")

    def until(self, text: str, times: int = 1) -> None:
        end = time.monotonic() + 90
        while "\n".join(self.read()).count(text) < times:
            assert time.monotonic() < end, self.read()

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-t", "t", text, "Enter")

    def find_command(self) -> int:
        """Find what the shell runs."""
        (child,) = find_children(int(self.tmux("display", "-p", "-t", "t", "#{pane_pid}")))
        return child


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")
@pytest.mark.parametrize("shell", ["bash --norc --noprofile", "sh"])
@pytest.mark.parametrize("kind", ["question", "stream", "plain"])
@pytest.mark.parametrize("attempt", range(SOAK or 1))
def test_real_shell_goes_on_below_the_answer_after_kill_9(
    attempt: int, kind: str, shell: str, program: list[str], tmp_path: Path
):
    words = {"question": "letter, or", "stream": "line-00012", "plain": "line-00012"}[kind]
    pane = Pane(tmp_path / "tmux", shell)
    try:
        pane.type(shlex.join([*program[:3], "plain", *program[4:]] if kind == "plain" else program))
        pane.until("\n>" if kind == "plain" else "small")
        pane.type("ask make" if kind == "question" else "numbers 4000 0.01")
        pane.until(words)
        command = pane.find_command()
        guard = find_guard(command) if kind != "plain" else 0
        os.kill(command, signal.SIGKILL)
        pane.until("PROMPT$", 2)
        wait_for_end(guard)
        pane.type("echo the shell; stty -a")
        pane.until("PROMPT$", 3)
        lines, cursor = pane.read(), pane.tmux("display", "-p", "-t", "t", "#{cursor_flag} #{cursor_x}").split()
    finally:
        pane.tmux("kill-server")
    assert cursor == ["1", "8"]
    at = lines.index("PROMPT$ echo the shell; stty -a")
    assert lines[at + 1] == "the shell", "\n".join(lines)
    modes = " ".join(lines[at:]).split()
    assert {"icanon", "echo", "isig", "icrnl", "ixon"} <= {*modes}
    assert sum("Killed" in line for line in lines[:at]) == 1
    shown = "\n".join(lines[:at])
    if kind == "question":
        assert "│ make" in shown
    else:
        numbers = re.findall(r"line-\d+", shown)
        assert numbers == [f"line-{n:05}" for n in range(len(numbers))]
        assert len(numbers) > 12


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="Linux alone says when a parent ends")
@pytest.mark.parametrize("shell", ["bash --norc --noprofile", "sh"])
@pytest.mark.parametrize("prompt", ["ask make", "numbers 4000 0.01"])
def test_crow_ends_when_its_launcher_was_killed_and_the_shell_has_the_terminal(
    prompt: str, shell: str, program: list[str], tmp_path: Path
):
    pane = Pane(tmp_path / "tmux", shell)
    try:
        pane.type(shlex.join(["sh", "-c", f"{shlex.join(program)}; true"]))  # as `uv run crow` starts it
        pane.until("small")
        pane.type(prompt)
        pane.until("letter, or" if "ask" in prompt else "line-00012")
        launcher = pane.find_command()
        (command,) = find_children(launcher)
        guard = find_guard(command)
        os.kill(launcher, signal.SIGKILL)
        wait_for_end(command)
        wait_for_end(guard)
        pane.until("PROMPT$", 2)
        pane.type("echo the shell; stty -a")
        pane.until("PROMPT$", 3)
        lines = pane.read()
    finally:
        pane.tmux("kill-server")
    at = lines.index("PROMPT$ echo the shell; stty -a")
    assert lines[at + 1] == "the shell", "\n".join(lines)
    assert {"icanon", "echo", "isig", "icrnl", "ixon"} <= {*" ".join(lines[at:]).split()}
