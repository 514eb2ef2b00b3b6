"""A pseudo-terminal with the program in it, and its screen as pyte reads it."""

import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pyte
import pytest

with suppress(ImportError):  # Windows has no pseudo-terminals
    import fcntl
    import pty
    import termios

AGENT = f"{sys.executable} {Path(__file__).with_name('agent.py')}"
PATIENCE = 90.0
START = """
import fcntl
import os
import shlex
import sys
import termios
from crow_terminal.agent_connections import AgentAddress
from crow_terminal.chat import run
from crow_terminal.settings import Settings
from crow_terminal.plain import run_plain
if os.environ.get("CONTROLS"):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
kind, command, folder = sys.argv[1:4]
agent = AgentAddress("parrot", shlex.split(command))
if kind == "plain":
    sys.exit(run_plain(Settings(agent, folder)))
page = shlex.split(os.environ.get("PAGE", ""))
sys.exit(run(Settings(agent, folder, history=lambda: folder + "/history", page=page)))
"""


class Screen:
    """A program on a pseudo-terminal."""

    def __init__(self, command: Sequence[str], folder: Path, columns: int, rows: int, env: dict[str, str]) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.001)
        self.stream = pyte.ByteStream(self.screen)
        self.written = bytearray()
        """All bytes that the program has written."""
        self.main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(terminal)
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=env, start_new_session=True
        )
        self.terminal = terminal

    def read(self, seconds: float) -> bool:
        """Read what the program writes; return whether it wrote something."""
        if not select.select([self.main], [], [], seconds)[0]:
            return False
        data = os.read(self.main, 65536)
        self.written += data
        self.stream.feed(data)
        return True

    def until(self, condition: str | Callable[[], bool]) -> None:
        """Read until a text is on the screen, or until a condition holds, and the frame has ended."""
        end = time.monotonic() + PATIENCE
        while self.is_in_frame() or not (condition in self.text if isinstance(condition, str) else condition()):
            self.read(0.2)
            assert time.monotonic() < end, f"not {condition!r}:\n{self.text}"
        self.settle()

    def is_in_frame(self) -> bool:
        """Tell whether the program is in the middle of a synchronized update."""
        return self.written.rfind(b"\x1b[?2026h") > self.written.rfind(b"\x1b[?2026l")

    def settle(self) -> None:
        """Read on until nothing more comes for a moment, so that the frame is whole."""
        end = time.monotonic() + 0.5
        while time.monotonic() < end and self.read(0.1):
            pass

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def answer(self, text: str, mark: str = "╰ ") -> None:
        """Type again and again until the question that is shown is gone: it takes keys after a pause. A second key
        right after the first would not answer, so a slow program gets time."""
        self.until(mark)
        end = time.monotonic() + PATIENCE
        while mark in self.text:
            self.until(lambda: "stop typing" not in self.text)
            self.type(text)
            again = time.monotonic() + 5.0
            while time.monotonic() < again and mark in self.text:
                self.read(0.1)
            self.settle()
            assert time.monotonic() < end, self.text

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.killpg(self.process.pid, signal.SIGWINCH)

    @property
    def text(self) -> str:
        """The screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def everything(self) -> list[str]:
        """The lines that have left the screen, and those on it."""
        gone = ["".join(row[x].data for x in sorted(row)).rstrip() for row in self.screen.history.top]
        return [*gone, *(line.rstrip() for line in self.screen.display)]

    def wait(self) -> int:
        """Wait for the end of the program and return its exit code."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            self.read(0.1)
            assert time.monotonic() < end, self.text
        while self.read(0):
            pass
        return int(self.process.returncode)

    def hang_up(self) -> int:
        """Close the terminal, wait for the end of the program and return its exit code."""
        for each in (self.main, self.terminal):
            os.close(each)
        self.main = self.terminal = -1
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for each in (self.main, self.terminal):
            if each >= 0:
                os.close(each)


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    """The command of the terminal with the agent of the tests."""
    script = tmp_path / "start.py"
    script.write_text(START)
    return [sys.executable, "-P", str(script), "chat", AGENT, str(tmp_path)]


@pytest.fixture
def start(tmp_path: Path, program: list[str]) -> Iterator[Callable[..., Screen]]:
    """Return a function that starts the terminal with an agent, by default the one of the tests."""
    screens: list[Screen] = []

    def start(columns: int = 80, rows: int = 24, agent: str = AGENT, before: str = "", **env: str) -> Screen:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        agent = f"sh -c '{before}exec {agent}'" if before else agent
        screens.append(Screen([*program[:4], agent, str(tmp_path)], tmp_path, columns, rows, environment | env))
        return screens[-1]

    yield start
    for each in screens:
        each.close()
