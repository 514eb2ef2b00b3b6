"""An interactive shell in a terminal of its own, for programs that ask for input or keep running."""

import asyncio
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import crow_system as system
from anyio import CancelScope, to_thread

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.terminal import processes
from crow_mcp_server.terminal.command_output import OutputCapture
from crow_mcp_server.terminal.command_watchdog import CommandWatchdog
from crow_mcp_server.terminal.key_names import to_keystrokes
from crow_mcp_server.terminal.processes import ProcessTree
from crow_mcp_server.terminal.screen import COLUMNS, ROWS, TerminalScreen
from crow_mcp_server.terminal.shell_state import format_process_limit
from crow_mcp_server.workspace import Launch

PROMPT_SILENCE = 1.0  # seconds without output in the middle of a line after which a program seems to wait for input
INPUT_SILENCE = 3.0  # seconds without output after which a program that has been given input seems to wait for more
INPUT_TIMEOUT = 5.0  # seconds a program may take to read its input
MAX_DRAINED_CHUNKS = 256  # of output that are read after a command has ended
LAUNCHER = f"""{processes.RESET_SIGNALS}
import fcntl, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
reports = int(sys.argv[1])
if reports != 8:
    os.dup2(reports, 8)
    os.close(reports)
os.execv(sys.argv[2], sys.argv[3:])
"""
"""A Python program that makes standard output the controlling terminal, which shells cannot do portably, and runs the
shell in its arguments. It passes the descriptor for reports on as number 8."""
SETTING = r"""
__crow() { __crow=$1; return "$2"; }
__crow_end() {
    case ":${SHELLOPTS-}:" in
        *:posix:*) \unset -f command ;;
        *) POSIXLY_CORRECT=; \unset -f command; \unset POSIXLY_CORRECT ;;
    esac
    \command printf '%s %s\0' "$1" "$2" >&8
    \command set +e
    \command unset PROMPT_COMMAND PS0 TMOUT
    PS1=@PROMPT@ PS2=
    \command return "$2"
}
unset HISTFILE
exec > /dev/null 2>&1
"""
"""Read by the shell at its start. Each line calls `__crow` with the number of the command and the status of the last
one, runs the command, and calls `__crow_end`, which reports both to descriptor 8. That descriptor is closed for the
command, so that it cannot write a report. Output of the shell apart from commands (prompts, traces) is dropped.

Commands may define functions with any name: POSIX mode finds `unset` before a function, and `command` finds builtins
only. They may set prompts and options: those that could keep the shell from reading its next line are set back."""


CURSOR_KEY = re.compile(r"\x1b\[(?=[ABCDHF])")
MAX_LINE_BYTES = 4095 if sys.platform == "linux" else 1023  # a terminal drops the rest of a line that a program reads
HISTORY_MOVES = {"\x1b[A": 1, "\x10": 1, "\x1b[B": -1, "\x0e": -1}  # Up, C-p, Down, C-n


class Shell(ProcessTree):
    """An interactive shell that reads commands from a pipe, so that only the commands use its terminal."""

    survives_timeout = True
    polls_output = True  # where there are pseudo-terminals, they can be polled; a report empties them without waiting

    def __init__(self, mark: str, capture: OutputCapture, watchdog: CommandWatchdog) -> None:
        super().__init__(mark, capture, watchdog)
        self.status = 0
        """The exit status of the last command."""
        self.screen = TerminalScreen()
        self._command_number = 0
        self._tty = ""
        self._commands = self._reports = -1
        self._partial_report = b""
        self._last_activity = 0.0
        self._last_report = self._last_request = 0.0
        self._is_mid_line = self._had_input = False
        self._commands_run: list[str] = []

    async def open(
        self, *, cwd: str, env: Mapping[str, str], launch: Launch | None = None, readable: Sequence[str] = ()
    ) -> None:
        """Start the shell, by `launch` if there is one, which is told the `readable` folders.

        Raises OSError and LaunchError.
        """
        arguments, setting = configure_shell(os.path.basename(processes.SHELL))
        program = processes.SHELL
        if launch:
            arguments, env = launch([program, *arguments[1:]], env, cwd, [], readable)
            program = arguments[0]
        terminal, shell_side, name = system.open_pseudo_terminal(ROWS, COLUMNS)
        self._tty = shlex.quote("/dev/tty" if launch else name)  # a launcher may show another /dev/pts
        commands, self._commands = os.pipe()
        self._reports, reports = os.pipe()

        def spawn() -> subprocess.Popen[bytes]:
            try:
                return subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", LAUNCHER, str(reports), program, *arguments],
                    cwd=cwd,
                    env=env,
                    stdin=commands,
                    stdout=shell_side,
                    stderr=shell_side,
                    pass_fds=(reports,),
                    start_new_session=True,
                )
            finally:
                for descriptor in (commands, shell_side, reports):
                    os.close(descriptor)

        system.set_blocking(self._reports, False)
        asyncio.get_running_loop().add_reader(self._reports, self._read_reports)
        try:
            await self.start(spawn, terminal)
        except OSError:
            self.release()
            raise
        await self._write_commands(setting, format_process_limit(), format_report(0))
        await self.wait(INPUT_TIMEOUT)

    async def run(self, command: str) -> None:
        """Start a command in the shell."""
        self._command_number += 1
        self.timed_out = False
        self._commands_run.append(command)
        self._note_request(had_input=False)
        self.command_over.clear()
        self.answer_wanted.clear()
        number, evaluation = self._command_number, f"eval {shlex.quote(command)} 0<>{self._tty} 1>&0 2>&0 8>&-"
        line = f'\\__crow {number} "$?" && :; \\command {evaluation}; {format_report(number)}'
        with CancelScope(shield=True):  # a command that was not written would never report its end
            await self._write_commands(line, format_report(number))  # again, as an interrupted command ends its line

    def recall(self, keys: str) -> str:
        """Return the earlier command that keys such as "Up Up Enter" choose; "" if they choose none."""
        *moves, last = to_keystrokes(keys) or [""]
        back = 0
        for move in moves:
            if move not in HISTORY_MOVES:
                return ""
            back = max(back + HISTORY_MOVES[move], 0)
        return self._commands_run[-back] if last == "\r" and 0 < back <= len(self._commands_run) else ""

    async def type(self, line: str | None, keys: str) -> None:
        """Type a line and then keys for the running program.

        Raises ToolRefusal for an unknown key and for a line that would be cut, TimeoutError when the program does not
        read.
        """
        strokes = "".join(to_keystrokes(keys))
        if self.screen.wants_application_keys:
            strokes = CURSOR_KEY.sub("\x1bO", strokes)
        text = "" if line is None else line.removesuffix("\n").replace("\n", "\r") + "\r"
        data = (text + strokes).encode(errors="replace")
        if max(map(len, data.split(b"\r"))) > MAX_LINE_BYTES and system.reads_lines(self.output_fd):
            raise ToolRefusal(
                f"Nothing was typed: the program reads whole lines, and its terminal would cut a line after "
                f"{MAX_LINE_BYTES} bytes. Type shorter lines, or write the text to a file that the program reads."
            )
        self._note_request(had_input=True)
        async with asyncio.timeout(INPUT_TIMEOUT):
            while data and not self.output_closed.is_set():
                try:
                    data = data[os.write(self.output_fd, data) :]
                except BlockingIOError:
                    await asyncio.sleep(0.01)
                except OSError:  # the terminal is closed
                    return

    def take_output(self, data: bytes) -> None:
        self._last_activity = time.monotonic()
        lines = self.screen.split(data)
        if lines and self._command_number:  # what the shell prints before the first command is dropped
            self._is_mid_line = not lines.endswith(b"\n")
            super().take_output(lines)

    def _note_request(self, *, had_input: bool) -> None:
        self._last_request = self._last_activity = time.monotonic()
        self._is_mid_line, self._had_input = False, had_input

    def note_report(self) -> None:
        """Note that the model has been told the output so far."""
        self._last_report = time.monotonic()

    def shows_new_prompt(self) -> bool:
        """Return whether the program has printed part of a line or a screen since the last report and then stopped."""
        has_prompt = (self._is_mid_line or self.screen.is_active) and self._last_activity > self._last_report
        return has_prompt and time.monotonic() - self._last_activity > PROMPT_SILENCE

    def seems_waiting(self) -> bool:
        """Return whether the program seems to wait for input, or is one that draws and will not end by itself."""
        now = time.monotonic()
        if self.screen.is_active and now - self._last_request > INPUT_SILENCE:
            return True
        has_prompt = self._is_mid_line or self.screen.is_active
        silence = now - self._last_activity
        return silence > (PROMPT_SILENCE if has_prompt else INPUT_SILENCE) and (has_prompt or self._had_input)

    def set_command_over(self) -> None:
        if lines := self.screen.reset():
            self.capture.feed(lines)
        super().set_command_over()

    def release(self) -> None:
        super().release()
        for descriptor in (self._commands, self._reports):
            if descriptor >= 0:
                asyncio.get_running_loop().remove_reader(descriptor)
                os.close(descriptor)
        self._commands = self._reports = -1

    async def _write_commands(self, *lines: str) -> None:
        def write() -> None:
            data = "\n".join((*lines, "")).encode(errors="surrogateescape")
            with suppress(BrokenPipeError):  # the shell has ended
                while data:
                    data = data[os.write(self._commands, data) :]

        await to_thread.run_sync(write)

    def _read_reports(self) -> None:
        data = os.read(self._reports, 65536)
        if not data:  # the shell has ended, which the waiting thread handles
            asyncio.get_running_loop().remove_reader(self._reports)
            return
        *reports, self._partial_report = (self._partial_report + data).split(b"\0")
        for report in reports:
            number, _, status = report.partition(b" ")
            if self.is_running and number == b"%d" % self._command_number:  # else a later report of the same command
                self.status = int(status)
                for _ in range(MAX_DRAINED_CHUNKS):  # the command's output was written before the report
                    if not self.read_output():
                        break
                self.set_command_over()


def configure_shell(name: str) -> tuple[list[str], str]:
    """Return a shell's arguments and its first lines, which define how it reports that a command has ended."""
    if name == "bash":
        setting = f"{SETTING.replace('@PROMPT@', '')}readonly -f __crow __crow_end; set +H +o history"
        return [name, "--noprofile", "--norc", "--noediting", "-i"], setting
    # Such a shell drops all that it has read when a command is interrupted. Therefore, its prompt reports, too.
    return [name, "-i"], SETTING.replace("@PROMPT@", """'$(__crow_end "$__crow" "$?")'""")


def format_report(number: int) -> str:
    """Return the shell command that reports the end of a command.

    As a part of a list, it is not a failure for `set -e` and `trap … ERR`.
    """
    return f'\\__crow_end {number} "$?" && :'
