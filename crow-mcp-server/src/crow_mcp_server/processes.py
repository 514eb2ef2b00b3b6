"""Commands as processes of this machine: one process group each, bounded output, and nothing left behind."""

import asyncio
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import IO

import anyio

from crow_mcp_server.output import Capture
from crow_mcp_server.watchdog import Watchdog
from crow_mcp_server.workspace import Outcome, Watch

MARK = "CROW_COMMAND"  # in the environment of all that a command starts: how those that leave its group are found
SWITCHES = {
    "FASTMCP_ENV_FILE": "/dev/null",  # FastMCP reads .env of the working directory otherwise, somebody else's
    "FASTMCP_CHECK_FOR_UPDATES": "off",
    "FASTMCP_LOG_ENABLED": "false",
    "PY_KEY_VALUE_DISABLE_BEARTYPE": "true",  # a quarter of the import time
}
"""Set for this server before FastMCP is imported; no business of the commands."""

TERM_GRACE = 2.0  # seconds between asking a command to stop and killing it
LINGER = 0.1  # seconds to wait for more output once the shell has ended
POLL = 0.05  # seconds between looks at whether the shell has ended while others hold its output
CHUNK = 65536
BEAT = 0.5  # seconds between the times a watch is shown the output so far
WATCHED = 4_000  # characters of it


class LocalTerminals:
    """Runs commands on this machine."""

    def __init__(self, hidden_env: Collection[str] = ()) -> None:
        """`hidden_env` names variables that commands never see, such as the API keys of the agent."""
        self.hidden = frozenset(hidden_env)
        self._shell = shutil.which("bash") or "/bin/sh"
        self._watchdog = Watchdog()

    async def run(
        self,
        command: str,
        *,
        cwd: str,
        env: Mapping[str, str],
        timeout: float,
        output_limit: int,
        watch: Watch | None = None,
    ) -> Outcome:
        """See `Terminals.run`. When cancelled, it returns once nothing of the command is left."""
        mark = uuid.uuid4().hex
        marks = f"{os.environ.get(MARK, '')}:{mark}"  # ours may be a command's child itself
        environment = {**inherited_environment(self.hidden), **env, MARK: marks}
        capture = Capture()
        cancelled, cancel = os.pipe()

        def work() -> Outcome:
            watch = self._watchdog.over  # by its mark before it starts: it is quicker than we are
            with (
                watch("", mark),
                Run(self._shell, command, cwd, environment, mark, cancelled, capture) as run,
                watch(run.group, mark),
            ):
                return run.outcome(timeout, output_limit)

        thread = ThreadPoolExecutor(1, thread_name_prefix="command")  # its own: commands never wait for one another
        running = asyncio.get_running_loop().run_in_executor(thread, work)
        try:
            shown = ""
            while not (await asyncio.wait([running], timeout=BEAT if watch else None))[0]:
                if watch and (text := capture.end(WATCHED)) != shown:
                    await watch(shown := text)
        finally:
            os.close(cancel)  # heard at the other end, which kills the command if it still runs
            with anyio.CancelScope(shield=True):
                await asyncio.wait([running])
            thread.shutdown(wait=False)
        return running.result()


def inherited_environment(hidden: Collection[str]) -> dict[str, str]:
    """The environment of this process without what is hidden and without what makes its Python ours."""
    environment = {
        name: value for name, value in os.environ.items() if name not in hidden and SWITCHES.get(name) != value
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


class Run:
    """One command from its start to its end, followed in a thread of its own."""

    def __init__(
        self,
        shell: str,
        command: str,
        cwd: str,
        environment: Mapping[str, str],
        mark: str,
        cancelled: int,
        capture: Capture,
    ) -> None:
        """`cancelled` is a descriptor that becomes readable when the command shall end; it is closed here."""
        self._mark = mark
        self._cancelled = cancelled
        self._capture = capture
        try:
            self._process = subprocess.Popen(
                [os.path.basename(shell), "-c", command],
                executable=shell,
                cwd=cwd,
                env=environment,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            os.close(cancelled)
            raise
        self.group = self._process.pid
        assert self._process.stdout
        self._output: IO[bytes] = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(cancelled, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)
        self._open = True
        """Somebody may still write."""

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:  # something went wrong on our side
            self._kill()
        self._selector.close()
        os.close(self._cancelled)
        if not self._open:
            self._output.close()
            return
        # A background process writes here: closing would kill it at its next line.
        os.set_blocking(self._output.fileno(), True)
        Thread(target=_discard, args=(self._output,), name="background output", daemon=True).start()

    def outcome(self, timeout: float, output_limit: int) -> Outcome:
        """Follow the command to its end, which comes at the latest soon after `timeout` seconds."""
        ended = self._follow(timeout)
        timed_out = not ended and not self._is_cancelled()
        if timed_out:
            self._signal(signal.SIGTERM)
            self._follow(TERM_GRACE)
        self._drain()
        if not ended or self._is_cancelled():
            self._kill()
            self._drain()
        code = self._process.returncode
        return Outcome(
            exit_code=code if code is not None and code >= 0 else None,
            signal=_signal_name(-code) if code is not None and code < 0 else None,
            output=self._capture.text(output_limit),
            timed_out=timed_out,
            background=tuple(family(self.group, self._mark)) if self._open or self._group_lives() else (),
        )

    def _follow(self, seconds: float) -> bool:
        """Read until the shell has ended: True; until time is up or the call is cancelled: False."""
        end = time.monotonic() + seconds
        pause = 0.0005
        while self._process.poll() is None:
            left = end - time.monotonic()
            if left <= 0 or self._is_cancelled():
                return False
            self._read(min(POLL if self._open else pause, left))
            if not self._open:  # usually the end of the shell as well: look soon, and ever less often after
                pause = min(pause * 2, POLL)
        return True

    def _group_lives(self) -> bool:
        try:
            os.killpg(self.group, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _drain(self) -> None:
        """Take what is still in the pipe; others may hold it open, so only for a moment."""
        end = time.monotonic() + LINGER
        while self._open and (left := end - time.monotonic()) > 0 and not self._is_cancelled():
            self._read(left)

    def _read(self, seconds: float) -> None:
        """Wait for output or the cancel, and take one piece of output."""
        if self._output not in self._ready(seconds):
            return
        data = os.read(self._output.fileno(), CHUNK)
        self._capture.feed(data)
        if not data:
            self._selector.unregister(self._output)
            self._open = False

    def _is_cancelled(self) -> bool:
        return self._cancelled in self._ready(0)

    def _ready(self, seconds: float) -> list[object]:
        return [key.fileobj for key, _ in self._selector.select(seconds)]

    def _signal(self, number: signal.Signals) -> None:
        """To the group, and to those that left it."""
        with suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError when only zombies are left
            os.killpg(self.group, number)
        for pid in family(self.group, self._mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _kill(self) -> None:
        """Kill until nothing is left, half a second at most: what has not died then waits in the kernel."""
        for _ in range(50):
            self._signal(signal.SIGKILL)
            if self._process.poll() is not None and not family(self.group, self._mark):
                return
            time.sleep(0.01)


def family(group: int, mark: str) -> list[int]:
    """The living processes of a group, and on Linux those that left it but carry the mark in their environment."""
    if not os.path.exists("/proc/self/environ"):
        listed = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=False)
        rows = [line.split() for line in listed.stdout.splitlines()]
        return [int(pid) for pid, its_group, state, *_ in rows if int(its_group) == group and not state.startswith("Z")]
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _belongs(pid, group, mark.encode())]


def _belongs(pid: str, group: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, _, its_group, *_ = file.read().rpartition(b")")[2].split()
        if state in b"ZX":
            return False
        if int(its_group) == group:
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except OSError:  # ended meanwhile, or somebody else's
        return False


def _signal_name(number: int) -> str:
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def _discard(output: IO[bytes]) -> None:
    with output:
        while output.read(CHUNK):
            pass
