"""A shell that stays, in a terminal of its own: for programs that ask, and for what shall keep running."""

import asyncio
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from contextlib import suppress

from anyio import CancelScope, to_thread

from crow_mcp_server.terminal import processes
from crow_mcp_server.terminal.output import OutputCapture
from crow_mcp_server.terminal.processes import ProcessTree
from crow_mcp_server.terminal.screen import COLUMNS, ROWS, TerminalScreen
from crow_mcp_server.terminal.shell_state import format_process_limit
from crow_mcp_server.terminal.watchdog import CommandWatchdog

PROMPT_SILENCE = 1.0  # seconds of silence in the middle of a line after which a program is taken to wait for an answer
INPUT_SILENCE = 3.0  # seconds of silence after which one that was given input is
INPUT_TIMEOUT = 5.0  # seconds a program may take to read its input
MAX_DRAINED_CHUNKS = 256  # pieces of output read at the end of a command, whatever still prints
LAUNCHER = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
os.dup2(int(sys.argv[1]), 8)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[3:])
"""
"""Makes standard output the terminal that controls a session, which no shell command does everywhere."""
REPORT_COMMAND = r"""printf '%s %s\0' "$__crow" "$?" >&8"""
"""How the shell says that it is ready for a command: number and status of the last one. Descriptor 8 is closed for
commands, so nothing that they print passes for it."""


KEYSTROKES = {
    "Enter": "\r", "Tab": "\t", "Escape": "\x1b", "Esc": "\x1b", "Space": " ", "Backspace": "\x7f", "BSpace": "\x7f",
    "Up": "\x1b[A", "Down": "\x1b[B", "Right": "\x1b[C", "Left": "\x1b[D", "Home": "\x1b[H", "End": "\x1b[F",
    "PageUp": "\x1b[5~", "PageDown": "\x1b[6~", "Insert": "\x1b[2~", "Delete": "\x1b[3~",
}  # fmt: skip
CONTROL_KEY = re.compile(r"(?:C-|Ctrl-|Ctrl\+|\^)([a-zA-Z@\[\\\]^_])\Z")


class Shell(ProcessTree):
    """An interactive shell: commands come to it over a pipe, and its terminal is theirs alone."""

    survives_timeout = True

    def __init__(self, mark: str, capture: OutputCapture, watchdog: CommandWatchdog) -> None:
        super().__init__(mark, capture, watchdog)
        self.status = 0
        """What that returned."""
        self.screen = TerminalScreen()
        self._command_number = 0
        self._tty = ""
        self._commands = self._reports = -1
        self._partial_report = b""
        self._last_activity = 0.0
        self._is_mid_line = self._had_input = False

    async def open(self, *, cwd: str, env: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        arguments, setting = configure_shell(os.path.basename(processes.SHELL))
        terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._tty = shlex.quote(os.ttyname(theirs))
        commands, self._commands = os.pipe()
        self._reports, reports = os.pipe()

        def spawn() -> subprocess.Popen[bytes]:
            try:
                return subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", LAUNCHER, str(reports), processes.SHELL, *arguments],
                    cwd=cwd,
                    env=env,
                    stdin=commands,
                    stdout=theirs,
                    stderr=theirs,
                    pass_fds=(reports,),
                    start_new_session=True,
                )
            finally:
                for descriptor in (commands, theirs, reports):
                    os.close(descriptor)

        os.set_blocking(self._reports, False)
        asyncio.get_running_loop().add_reader(self._reports, self._read_reports)
        try:
            await self.start(spawn, terminal)
        except OSError:
            self.release()
            raise
        await self._write_command(f"{setting}; {format_process_limit()}")
        await self.wait(INPUT_TIMEOUT)

    async def run(self, command: str) -> None:
        """Have it run a command."""
        self._command_number += 1
        self.timed_out = False
        self._last_activity, self._is_mid_line, self._had_input = time.monotonic(), False, False
        self.over.clear()
        with CancelScope(shield=True):  # else it would be taken to run what it never was told
            await self._write_command(
                f"__crow {self._command_number} $?; eval {shlex.quote(command)} <>{self._tty} 8>&-"
            )

    async def type(self, line: str | None, keys: str) -> None:
        """Give the program that runs a line, then keys. Raises TimeoutError when it does not take them."""
        self._last_activity, self._is_mid_line, self._had_input = time.monotonic(), False, True
        text = "" if line is None else line.removesuffix("\n").replace("\n", "\r") + "\r"
        data = (text + to_keystrokes(keys)).encode(errors="replace")
        async with asyncio.timeout(INPUT_TIMEOUT):
            while data and not self.closed.is_set():
                try:
                    data = data[os.write(self.output_fd, data) :]
                except BlockingIOError:
                    await asyncio.sleep(0.01)
                except OSError:  # nobody is left to read it
                    return

    def take_output(self, data: bytes) -> None:
        self._last_activity = time.monotonic()
        if (
            lines := self.screen.split(data)
        ) and self._command_number:  # what it says before the first command is for nobody
            self._is_mid_line = not lines.endswith(b"\n")
            super().take_output(lines)

    def seems_waiting(self) -> bool:
        silence = time.monotonic() - self._last_activity
        asks = self._is_mid_line or self.screen.is_active
        return silence > (PROMPT_SILENCE if asks else INPUT_SILENCE) and (asks or self._had_input)

    def release(self) -> None:
        super().release()
        for descriptor in (self._commands, self._reports):
            if descriptor >= 0:
                asyncio.get_running_loop().remove_reader(descriptor)
                os.close(descriptor)
        self._commands = self._reports = -1

    async def _write_command(self, line: str) -> None:
        def write() -> None:
            data = line.encode(errors="surrogateescape") + b"\n"
            with suppress(BrokenPipeError):  # it has ended
                while data:
                    data = data[os.write(self._commands, data) :]

        await to_thread.run_sync(write)

    def _read_reports(self) -> None:
        data = os.read(self._reports, 65536)
        if not data:  # its end is heard of otherwise
            asyncio.get_running_loop().remove_reader(self._reports)
            return
        *told, self._partial_report = (self._partial_report + data).split(b"\0")
        for report in told:
            count, _, status = report.partition(b" ")
            if count == b"%d" % self._command_number:  # else of a command before, which was interrupted as it ended
                self.status = int(status)
                for _ in range(MAX_DRAINED_CHUNKS):  # what it printed has been written before the report
                    if not self.read_output():
                        break
                self.set_over()


def configure_shell(name: str) -> tuple[list[str], str]:
    """How a shell is started, and what it is told first: to report when it is ready, and to keep no history."""
    common = "__crow=0; __crow() { __crow=$1; return $2; }; unset HISTFILE TMOUT; PS2="
    if name == "bash":
        setting = f"{common} PS1= PROMPT_COMMAND={shlex.quote(REPORT_COMMAND)}; set +H +o history"
        return [name, "--noprofile", "--norc", "--noediting", "-i"], setting
    return [name, "-i"], f"{common} PS1={shlex.quote(f'$({REPORT_COMMAND})')}"


def to_keystrokes(keys: str) -> str:
    """What a keyboard sends for keys such as "C-c", "Up" or "Enter"; other words are typed as they are."""
    return "".join(
        KEYSTROKES.get(key) or (chr(ord(control[1].upper()) & 31) if (control := CONTROL_KEY.match(key)) else key)
        for key in keys.split()
    )
