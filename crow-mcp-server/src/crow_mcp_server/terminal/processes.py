"""Commands as processes of this machine: each has a process group, bounded output and a mark to find its processes."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import Thread

import anyio
import crow_system as system
from anyio import to_thread

from crow_mcp_server.terminal.command_output import OutputCapture
from crow_mcp_server.terminal.command_watchdog import CommandWatchdog
from crow_mcp_server.workspace import CommandOutcome, Launch, Watch

SERVER_ENVIRONMENT = {
    "FASTMCP_ENV_FILE": os.devnull,  # otherwise FastMCP reads .env of the working folder
    "FASTMCP_CHECK_FOR_UPDATES": "off",
    "FASTMCP_LOG_ENABLED": "false",
    "PY_KEY_VALUE_DISABLE_BEARTYPE": "true",  # a quarter of the import time
}
"""Variables for FastMCP, to set before it is imported; commands do not inherit them."""

SHELL = system.find_shell()
TERM_GRACE = 2.0  # seconds between asking a command to stop and killing it
KILL_GRACE = 1.0  # seconds to wait for the exit code of a killed process
LINGER = 0.1  # seconds to wait for more output after the shell has ended
CHUNK_BYTES = 65536
WATCH_INTERVAL = 0.5  # seconds between calls of a watch
MAX_WATCHED_CHARACTERS = 4_000  # of output passed to a watch
RESET_SIGNALS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
"""
"""The beginning of a Python program that starts another one. That one ignores no signal of these, although programs
inherit that a signal is ignored: `nohup` and `&` start crow with some ignored, and Python ignores the last two."""


class ProcessTree:
    """A process with all its descendants, and their output. It belongs to the event loop in which it is started."""

    survives_timeout = False
    """True if the process stays when its command has ended because of a timeout."""
    polls_output = system.POLLS_PIPES
    """True if the event loop waits for the output, False if a thread reads it."""

    def __init__(self, mark: str, capture: OutputCapture, watchdog: CommandWatchdog) -> None:
        """`mark` is in the environment of the process and its descendants."""
        self.mark = mark
        self.capture = capture
        self.launched_by = ""
        """Id of the tool call whose `launch` started it; "" for an ordinary process."""
        self.group = -1
        """The process group, which is also the process's id and its session's; -1 before the start."""
        self.exit_code: int | None = None
        """The process's return code; None while it runs."""
        self.timeout = 0.0
        """The last timeout in seconds."""
        self.timed_out = False
        self.exited = asyncio.Event()
        """Set when the process has ended."""
        self.command_over = asyncio.Event()
        """Set when the command has ended, at the latest with the process."""
        self.answer_wanted = asyncio.Event()
        """Set when the waiting tool call is to be answered: the command has ended, or is to go on after the call."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when the command has ended."""
        self.output_closed = asyncio.Event()
        """Set when the output is closed: no more will come."""
        self._watchdog = watchdog
        self._watchdog_entries = ExitStack()
        self.output_fd = -1
        self._deadline: asyncio.TimerHandle | None = None
        self._expiry: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """True while a command runs."""
        return not self.command_over.is_set()

    async def start(self, spawn: "Callable[[], subprocess.Popen[bytes]]", output: int) -> None:
        """Start the process by `spawn`, and read its output from the descriptor `output` until that closes.

        Raises OSError.
        """
        self.output_fd = output
        loop = asyncio.get_running_loop()
        if self.polls_output:
            system.set_blocking(output, False)
            loop.add_reader(output, self.read_output)
        else:
            Thread(target=self._read_in_thread, args=(output, loop), name="output", daemon=True).start()
        started: asyncio.Future[int] = loop.create_future()
        Thread(target=self._run_in_thread, args=(spawn, loop, started), name="command", daemon=True).start()
        try:
            with anyio.CancelScope(shield=True):
                self.group = await asyncio.shield(started)
        except BaseException:
            started.add_done_callback(self._kill_when_started)
            raise

    def _kill_when_started(self, started: "asyncio.Future[int]") -> None:
        self._close()
        if not started.cancelled() and not started.exception():
            signal_members(started.result(), self.mark, system.KILL)

    def _run_in_thread(
        self,
        spawn: "Callable[[], subprocess.Popen[bytes]]",
        loop: asyncio.AbstractEventLoop,
        started: "asyncio.Future[int]",
    ) -> None:
        """Start the process and wait for it, in a thread of its own so that commands do not wait for one another."""
        try:
            with self._watchdog.watch("", self.mark):  # before the start: the process may fork before its id is known
                process = spawn()
                self._watchdog_entries.enter_context(self._watchdog.watch(process.pid, self.mark))
        except BaseException as error:
            loop.call_soon_threadsafe(started.set_exception, error)
            return
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(started.set_result, process.pid)
            code = process.wait()
            loop.call_soon_threadsafe(self._set_exit_code, code)

    def _set_exit_code(self, code: int) -> None:
        self.exit_code = code
        self.exited.set()
        self.set_command_over()

    def read_output(self) -> bool:
        """Read a chunk of the output without waiting; return whether there was one."""
        try:
            data = os.read(self.output_fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # nobody has the terminal open any more, or this side is closed
            data = b""
        if data:
            self.take_output(data)
        else:
            self._close()
        return bool(data)

    def _read_in_thread(self, output: int, loop: asyncio.AbstractEventLoop) -> None:
        """Read the output until all processes have closed it, and close it: nothing interrupts a read that waits."""
        data = b"-"
        with suppress(RuntimeError), open(output, "rb", buffering=0) as file:  # RuntimeError: the event loop is closed
            while data:
                try:
                    data = file.read(CHUNK_BYTES) or b""
                except OSError:
                    data = b""
                read = threading.Event()
                loop.call_soon_threadsafe(self._take_from_thread, data, read)
                read.wait()

    def _take_from_thread(self, data: bytes, read: threading.Event) -> None:
        read.set()
        if data and not self.output_closed.is_set():
            self.take_output(data)
        elif not data:
            self._close()

    def _close(self) -> None:
        if not self.output_closed.is_set():
            if self.polls_output:
                asyncio.get_running_loop().remove_reader(self.output_fd)
                os.close(self.output_fd)
            self.output_fd = -1
            self.output_closed.set()

    def take_output(self, data: bytes) -> None:
        """Handle a chunk of the output."""
        self.capture.feed(data)

    def set_command_over(self) -> None:
        """Note that the command has ended."""
        if self._deadline:
            self._deadline.cancel()
        self.command_over.set()
        self.answer_wanted.set()
        self.on_over()

    async def wait(
        self, seconds: float, watch: Watch | None = None, *, is_answerable: Callable[[], bool] | None = None
    ) -> None:
        """Wait until the command has ended, at most so many seconds, or until `is_answerable` returns True.

        Setting `answer_wanted` ends the wait.

        `watch` receives the last lines of the output meanwhile.
        """
        loop = asyncio.get_running_loop()
        end, shown = loop.time() + seconds, ""
        while not self.answer_wanted.is_set() and (left := end - loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, WATCH_INTERVAL / 5 if is_answerable else WATCH_INTERVAL)):
                    await self.answer_wanted.wait()
            if watch and self.is_running and (text := self.capture.get_end(MAX_WATCHED_CHARACTERS)) != shown:
                await watch(shown := text)
            if is_answerable and is_answerable():
                break
        if self.is_running:
            self.answer_wanted.clear()

    def set_timeout(self, seconds: float) -> None:
        """End the command after so many seconds, unless it has ended by then."""
        self.timeout, self.timed_out = seconds, False
        if not self.is_running:
            return

        def expire() -> None:
            self.timed_out = True
            self._expiry = asyncio.ensure_future(self._expire())

        self._deadline = asyncio.get_running_loop().call_later(seconds, expire)

    async def _expire(self) -> None:
        await self.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(TERM_GRACE):
                await self.command_over.wait()
        if self.is_running or not self.survives_timeout:
            await self.kill()

    async def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the tree; not to a launcher, which ends them all when it ends."""
        await to_thread.run_sync(self._signal, number)

    def _signal(self, number: signal.Signals) -> None:
        if not (self.launched_by and self.survives_timeout):
            signal_members(self.group, self.mark, number)
            return
        for pid in system.list_members(self.group, self.mark):
            if pid != self.group:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    async def settle(self) -> None:
        """After the end of the process, wait for its last output, and for the kill that a timeout has started."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):  # a descendant may hold the output open
                await self.output_closed.wait()
        if self._expiry:
            await asyncio.shield(self._expiry)

    async def kill(self) -> None:
        """Kill all processes of the tree, in up to 50 attempts: a process may fork, or wait in the kernel."""
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._kill)
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_GRACE):
                    await self.exited.wait()
            self.release()

    def _kill(self) -> None:
        group = (
            self.group if self.exit_code is None or not system.HAS_PROC else -1
        )  # the id may belong to another process by now
        for _ in range(50):
            if not signal_members(group, self.mark, system.KILL):
                return
            time.sleep(0.01)

    def release(self) -> None:
        """Close the output and stop watching the processes; those that are left keep running."""
        self._close()
        self.capture.close()
        self._watchdog_entries.close()


def ignores_terminal_signals() -> bool:
    """Return whether this process ignores a signal by which a terminal interrupts or ends programs."""
    signals = [getattr(signal, name, None) for name in ("SIGINT", "SIGQUIT", "SIGHUP")]
    return system.HAS_TERMINALS and signal.SIG_IGN in [signal.getsignal(number) for number in signals if number]


class PipedCommand(ProcessTree):
    """A shell command without input, whose output is a pipe."""

    def __init__(
        self, mark: str, capture: OutputCapture, watchdog: CommandWatchdog, update_state: Callable[[], None]
    ) -> None:
        super().__init__(mark, capture, watchdog)
        self.update_state = update_state
        """Takes over the shell state; to be called when the command has ended."""
        self.state_path = ""
        """The beginning of the paths in which its script saves the shell state."""
        self._ignores_output = False
        """True if the tool call is answered, so that the output of background processes is dropped."""

    async def run(
        self,
        command: str,
        *,
        cwd: str,
        env: Mapping[str, str],
        launch: Launch | None = None,
        readable: Sequence[str] = (),
    ) -> None:
        """Start the shell with this command. `launch` is told the folder of `state_path`, and the `readable` folders.

        Raises OSError, ValueError and LaunchError.
        """
        program, arguments = SHELL, system.make_terminal_command(SHELL, command)
        if launch:
            own = os.path.dirname(self.state_path)
            arguments, env = launch([program, *arguments[1:]], env, cwd, [own], readable)
            program = arguments[0]
        if ignores_terminal_signals():
            launcher = f"{RESET_SIGNALS}os.execv(sys.argv[1], sys.argv[2:])"
            program, arguments = sys.executable, [sys.executable, "-I", "-S", "-c", launcher, program, *arguments]
        output, shell_output = os.pipe()

        def spawn() -> subprocess.Popen[bytes]:
            try:
                return subprocess.Popen(
                    arguments,
                    executable=program,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=shell_output,
                    stderr=shell_output,
                    start_new_session=True,
                    creationflags=system.NEW_GROUP,
                )
            finally:
                os.close(shell_output)

        await self.start(spawn, output)

    def take_output(self, data: bytes) -> None:
        if not self._ignores_output:  # not closed, because SIGPIPE would kill background processes
            super().take_output(data)

    async def collect_outcome(self, output_limit: int) -> CommandOutcome:
        """Return the outcome of the command, which has ended. Background processes keep running unless it timed out."""
        await self.settle()
        background: list[int] = []
        if not self.timed_out and self.has_survivors():
            background = await to_thread.run_sync(system.list_members, self.group, self.mark)
        code = self.exit_code
        outcome = CommandOutcome(
            exit_code=code if code is not None and code >= 0 else None,
            signal=name_signal(-code) if code is not None and code < 0 else None,
            output=self.capture.get_text(output_limit),
            timed_out=self.timed_out,
            background=background,
        )
        self._ignores_output = True
        self.capture.close()
        if not background:
            self.release()
        return outcome

    def has_survivors(self) -> bool:
        """Return whether processes of the command, which has ended, are still running."""
        return system.has_group(self.group) or not self.output_closed.is_set()


def inherit_environment(hidden: Collection[str]) -> dict[str, str]:
    """Return this process's environment without hidden variables, SERVER_ENVIRONMENT and its virtual environment."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and SERVER_ENVIRONMENT.get(name) != value
    }
    if sys.prefix == sys.base_prefix:
        return environment
    prefix = os.path.realpath(sys.prefix)
    if os.path.realpath(environment.get("VIRTUAL_ENV", "/")) == prefix:
        for name in ("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "PYTHONHOME"):
            environment.pop(name, None)
    folders = environment.get("PATH", os.defpath).split(os.pathsep)
    folders = [folder for folder in folders if os.path.realpath(folder) != os.path.join(prefix, "bin")]
    return {**environment, "PATH": os.pathsep.join(folders)}


def signal_members(group: int, mark: str, number: int) -> bool:
    """Send a signal to a process group and to the processes that left it; return whether there were any."""
    if group > 0 and number == system.KILL:
        system.kill_group(group)  # reaches processes that start meanwhile, too
    elif group > 0:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(group, number)  # the leader first, so that a shell does not report the end of its children
    members = system.list_members(group, mark)
    for pid in members:
        if pid != group or number == system.KILL:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
    return bool(members)


def name_signal(number: int) -> str:
    """Return a signal's name, such as "SIGTERM"."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")
