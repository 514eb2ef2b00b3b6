"""Commands as processes of this machine: one process group each, bounded output, and nothing left behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from threading import Thread

import anyio
from anyio import to_thread

from crow_mcp_server.terminal.output import OutputCapture
from crow_mcp_server.terminal.watchdog import CommandWatchdog
from crow_mcp_server.workspace import CommandOutcome, Watch

MARK_VARIABLE = (
    "CROW_COMMAND"  # in the environment of all that a command starts: how those that leave its group are found
)
SERVER_ENVIRONMENT = {
    "FASTMCP_ENV_FILE": "/dev/null",  # FastMCP reads .env of the working directory otherwise, somebody else's
    "FASTMCP_CHECK_FOR_UPDATES": "off",
    "FASTMCP_LOG_ENABLED": "false",
    "PY_KEY_VALUE_DISABLE_BEARTYPE": "true",  # a quarter of the import time
}
"""Set for this server before FastMCP is imported; no business of the commands."""

LINUX = sys.platform == "linux"
SHELL = shutil.which("bash") or "/bin/sh"
TERM_GRACE = 2.0  # seconds between asking a command to stop and killing it
KILL_GRACE = 1.0  # seconds for the system to tell that one is dead
LINGER = 0.1  # seconds to wait for more output once the shell has ended
CHUNK_BYTES = 65536
WATCH_INTERVAL = 0.5  # seconds between the times a watch is shown the output so far
MAX_WATCHED_CHARACTERS = 4_000  # characters of it


class ProcessTree:
    """A process and all that it starts, from its start until nothing of it is left.

    Belongs to the event loop it is started in.
    """

    survives_timeout = False
    """Whether it stays when its command was ended by the clock."""

    def __init__(self, mark: str, capture: OutputCapture, watchdog: CommandWatchdog) -> None:
        """`mark` is in the environment of all that it starts."""
        self.mark = mark
        self.capture = capture
        self.group = -1
        """Its process group, once it has started; also the id of its session."""
        self.code: int | None = None
        """What the process returned; None while it runs."""
        self.timeout = 0.0
        """Seconds that the clock was set to."""
        self.timed_out = False
        self.ended = asyncio.Event()
        self.over = asyncio.Event()
        """The command is: at the latest when the process has ended."""
        self.closed = asyncio.Event()
        """Nobody can write to its output any more."""
        self._watchdog = watchdog
        self._watchdog_entries = ExitStack()
        self.output_fd = -1
        self._deadline: asyncio.TimerHandle | None = None
        self._expiry: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a command runs in it."""
        return not self.over.is_set()

    async def start(self, spawn: "Callable[[], subprocess.Popen[bytes]]", output: int) -> None:
        """Start the process and read what it prints from a descriptor, which is closed in the end. Raises OSError."""
        self.output_fd = output
        os.set_blocking(output, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(output, self.read_output)
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
            signal_members(started.result(), self.mark, signal.SIGKILL)

    def _run_in_thread(
        self,
        spawn: "Callable[[], subprocess.Popen[bytes]]",
        loop: asyncio.AbstractEventLoop,
        started: "asyncio.Future[int]",
    ) -> None:
        """In a thread of its own, so that commands never wait for one another."""
        try:
            with self._watchdog.watch("", self.mark):  # by its mark before it starts: it is quicker than we are
                process = spawn()
                self._watchdog_entries.enter_context(self._watchdog.watch(process.pid, self.mark))
        except BaseException as error:
            loop.call_soon_threadsafe(started.set_exception, error)
            return
        with suppress(RuntimeError):  # the loop is closed, and nobody is left to hear of it
            loop.call_soon_threadsafe(started.set_result, process.pid)
            code = process.wait()
            loop.call_soon_threadsafe(self._set_exit_code, code)

    def _set_exit_code(self, code: int) -> None:
        self.code = code
        self.ended.set()
        self.set_over()

    def read_output(self) -> bool:
        """Take a piece of the output, if there is one."""
        try:
            data = os.read(self.output_fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal that nobody has open; our own side, if it is closed
            data = b""
        if data:
            self.take_output(data)
        else:
            self._close()
        return bool(data)

    def _close(self) -> None:
        if not self.closed.is_set():
            asyncio.get_running_loop().remove_reader(self.output_fd)
            os.close(self.output_fd)
            self.output_fd = -1
            self.closed.set()

    def take_output(self, data: bytes) -> None:
        """Take a piece of the output."""
        self.capture.feed(data)

    def set_over(self) -> None:
        """The command is over."""
        if self._deadline:
            self._deadline.cancel()
        self.over.set()

    def seems_waiting(self) -> bool:
        """Whether what runs seems to wait for somebody."""
        return False

    async def wait(self, seconds: float, watch: Watch | None = None, *, patient: bool = True) -> None:
        """Until the command is over; at most so long, and unless patient, until it rests. `watch` is shown what it
        prints meanwhile."""
        loop = asyncio.get_running_loop()
        end, shown = loop.time() + seconds, ""
        while self.is_running and (left := end - loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, WATCH_INTERVAL if patient else WATCH_INTERVAL / 5)):
                    await self.over.wait()
            if watch and self.is_running and (text := self.capture.get_end(MAX_WATCHED_CHARACTERS)) != shown:
                await watch(shown := text)
            if not patient and self.seems_waiting():
                break

    def set_timeout(self, seconds: float) -> None:
        """Have the command killed after so many seconds."""
        self.timeout, self.timed_out = seconds, False

        def expire() -> None:
            self.timed_out = True
            self._expiry = asyncio.ensure_future(self._expire())

        self._deadline = asyncio.get_running_loop().call_later(seconds, expire)

    async def _expire(self) -> None:
        await self.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(TERM_GRACE):
                await self.over.wait()
        if self.is_running or not self.survives_timeout:
            await self.kill()

    async def send_signal(self, number: signal.Signals) -> None:
        """To all that runs of it."""
        await to_thread.run_sync(signal_members, self.group, self.mark, number)

    async def settle(self) -> None:
        """Wait for the last of its output, once its process has ended, and for all to be killed that shall be."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER):  # others may hold the output open
                await self.closed.wait()
        if self._expiry:
            await asyncio.shield(self._expiry)

    async def kill(self) -> None:
        """Kill until nothing is left, half a second at most: what has not died then waits in the kernel."""
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._kill)
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_GRACE):
                    await self.ended.wait()
            self.release()

    def _kill(self) -> None:
        group = self.group if self.code is None or not LINUX else -1  # the number may be another's by now
        for _ in range(50):
            if not signal_members(group, self.mark, signal.SIGKILL):
                return
            time.sleep(0.01)

    def release(self) -> None:
        """Forget it: nothing of it is left, or what is left may stay."""
        self._close()
        self.capture.close()
        self._watchdog_entries.close()


class PipedCommand(ProcessTree):
    """One shell command in pipes, without input."""

    def __init__(self, mark: str, capture: OutputCapture, watchdog: CommandWatchdog, learn: Callable[[], None]) -> None:
        super().__init__(mark, capture, watchdog)
        self.learn = learn
        """To be called when it has ended."""
        self._ignores_output = False
        """Its call is over: what those in the background print is thrown away."""

    async def run(self, arguments: list[str], *, cwd: str, env: Mapping[str, str]) -> None:
        """Start it. Raises OSError and ValueError."""
        output, theirs = os.pipe()

        def spawn() -> subprocess.Popen[bytes]:
            try:
                return subprocess.Popen(
                    [os.path.basename(SHELL), *arguments],
                    executable=SHELL,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=theirs,
                    stderr=theirs,
                    start_new_session=True,
                )
            finally:
                os.close(theirs)

        await self.start(spawn, output)

    def take_output(self, data: bytes) -> None:
        if not self._ignores_output:  # a background process writes here: closing would kill it at its next line
            super().take_output(data)

    async def collect_outcome(self, output_limit: int) -> CommandOutcome:
        """How it ended. What it left in the background stays, unless it was killed."""
        await self.settle()
        background: list[int] = []
        if not self.timed_out and self.has_survivors():
            background = await to_thread.run_sync(list_members, self.group, self.mark)
        code = self.code
        outcome = CommandOutcome(
            exit_code=code if code is not None and code >= 0 else None,
            signal=_name_signal(-code) if code is not None and code < 0 else None,
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
        """Whether something of it runs on once it has ended."""
        try:
            os.killpg(self.group, 0)
        except (ProcessLookupError, PermissionError):
            return not self.closed.is_set()
        return True


def inherit_environment(hidden: Collection[str]) -> dict[str, str]:
    """The environment of this process without what is hidden and without what makes its Python ours."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in hidden and SERVER_ENVIRONMENT.get(name) != value
    }
    if sys.prefix == sys.base_prefix:
        return environment
    ours = os.path.realpath(sys.prefix)
    if os.path.realpath(environment.get("VIRTUAL_ENV", "/")) == ours:
        for name in ("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "PYTHONHOME"):
            environment.pop(name, None)
    folders = environment.get("PATH", os.defpath).split(os.pathsep)
    kept = [folder for folder in folders if os.path.realpath(folder) != os.path.join(ours, "bin")]
    return {**environment, "PATH": os.pathsep.join(kept)}


def signal_members(group: int, mark: str, number: signal.Signals) -> bool:
    """Send a signal to a group and to those that left it; tells whether there was anybody."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError when only zombies are left
        if number == signal.SIGKILL and group > 0:  # whoever is born meanwhile, too
            os.killpg(group, number)
        elif group > 0:  # first, so that a shell has no time to report how its children fared
            os.kill(group, number)
    members = list_members(group, mark)
    for pid in members:
        if pid != group or number == signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
    return bool(members)


def list_members(group: int, mark: str) -> list[int]:
    """The living processes of a group and of its session, and on Linux those that left both but carry the mark in their
    environment."""
    if not os.path.exists("/proc/self/environ"):
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,pgid=,tty=,stat="], capture_output=True, text=True, check=False
        )
        rows = [line.split() for line in listed.stdout.splitlines()]
        ttys = {tty for pid, _, tty, *_ in rows if int(pid) == group and "?" not in tty}
        return [
            int(pid)
            for pid, its_group, tty, state, *_ in rows
            if (int(its_group) == group or tty in ttys) and not state.startswith("Z")
        ]
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_member(pid, group, mark.encode())]


def _is_member(pid: str, group: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, _, its_group, session, *_ = file.read().rpartition(b")")[2].split()
        if state in b"ZX":
            return False
        if group in (int(its_group), int(session)):
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except OSError:  # ended meanwhile, or somebody else's
        return False


def _name_signal(number: int) -> str:
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")
