"""Fixtures: an empty home, a project and a clean environment for each test, in which the real command runs."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zlib import crc32

import pytest
from crow_agent.settings.discovery import LOCAL_SERVERS
from crow_core.acp.schema import ClientCapabilities, McpServer
from crow_core.acp.transports import (
    ByteSink,
    ByteSource,
    ChildTransport,
    StreamTransport,
    Transport,
    open_streams,
    spawn,
)
from crow_core.testing import Editor

if sys.platform != "win32":
    import pty

CROW = (sys.executable, "-m", "crow_cli")
PREFORK = Path(__file__).with_name("prefork.py")
CONFINED = Path(__file__).with_name("confined.py")
TEST_ALL = os.environ.get("CROW_TEST_ALL") == "1"
ALL_PROCESSES = os.environ.get("CROW_TEST_PROCESSES") == "1"
KEEPER = """
import json, os, subprocess, sys
held = os.open(sys.argv[1], os.O_WRONLY)
subprocess.Popen(["sleep", "600"], pass_fds=[held])

def answer(method, params):
    match method:
        case "initialize":
            version, about = params["protocolVersion"], {"name": "keeper", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            what = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
            return {"tools": [{"name": "keep", "description": "Keep something.", "inputSchema": what}]}
        case "tools/call":
            print("noise", file=sys.stderr, flush=True)
            return {"content": [{"type": "text", "text": "kept " + params["arguments"]["what"]}]}
    return {}

os.write(held, b"started\\n")
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message and "method" in message:
        result = answer(message["method"], message.get("params"))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
PATIENCE = 60.0
"""Seconds for `crow acp` to end by itself, also on a busy machine."""


@dataclass(frozen=True)
class CommandResult:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


class Prefork:
    """Runs commands by `prefork.py`, which takes a tenth of the time that a new process takes for its imports."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def open(self) -> str:
        """Start `prefork.py`, unless it runs, and return the address of its socket."""
        name = f"crow-prefork-{os.getpid()}"
        if self.process is None:
            env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
            command = [sys.executable, str(PREFORK), name]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=PREFORK.parent, env=env)
            assert self.process.stdout
            assert self.process.stdout.readline() == b"ready\n"
        return f"\0{name}"

    def close(self) -> None:
        if self.process:
            self.process.communicate()
            self.process = None

    def connect(self, args: Sequence[str], env: dict[str, str], cwd: Path, streams: Sequence[int]) -> socket.socket:
        """Start a command on three standard streams, which are closed here. The socket receives its process id, then
        its exit code."""
        assert sys.platform != "win32"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self.open())
        socket.send_fds(connection, [json.dumps([args, env, str(cwd)]).encode()], streams)
        for each in streams:
            os.close(each)
        connection.setblocking(False)
        return connection

    async def run(self, args: Sequence[str], env: dict[str, str], cwd: Path, stdin: bytes) -> CommandResult:
        loop = asyncio.get_running_loop()
        (stdin_read, stdin_write), (out_read, out_write), (err_read, err_write) = (os.pipe() for _ in range(3))
        with self.connect(args, env, cwd, [stdin_read, out_write, err_write]) as connection:
            os.write(stdin_write, stdin)
            os.close(stdin_write)
            out, err = await asyncio.gather(*(asyncio.to_thread(read_all, each) for each in (out_read, err_read)))
            await loop.sock_recv(connection, 16)
            code = await loop.sock_recv(connection, 16)
        return CommandResult(int(code), out.decode(), err.decode())

    async def start(
        self, args: Sequence[str], env: dict[str, str], cwd: Path, stdout: int | None = None
    ) -> "ForkedProcess":
        """Start a command without input."""
        err_read, err_write = os.pipe()
        out_read, out_write = os.pipe() if stdout is None else (None, os.dup(stdout))
        connection = self.connect(args, env, cwd, [os.open(os.devnull, os.O_RDONLY), out_write, err_write])
        pid = int(await asyncio.get_running_loop().sock_recv(connection, 16))
        out, err = [None if each is None else await open_reader(each) for each in (out_read, err_read)]
        assert err
        return ForkedProcess(pid, connection, out, err)

    async def spawn(self, args: Sequence[str], env: dict[str, str], cwd: Path, stderr: Path) -> "ForkedAgent":
        (stdin_read, stdin_write), (out_read, out_write) = os.pipe(), os.pipe()
        errors = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        connection = self.connect(args, env, cwd, [stdin_read, out_write, errors])
        pid = int(await asyncio.get_running_loop().sock_recv(connection, 16))
        streams = await open_streams(FileIO(out_read, "rb"), FileIO(stdin_write, "wb"))
        return ForkedAgent(*streams, pid, connection)


FORKS = Prefork()
"""One for the tests of all packages: each imports the fixtures."""


class ForkedProcess:
    """A command that runs in a fork, with the members of `asyncio.subprocess.Process` that tests use."""

    def __init__(
        self, pid: int, connection: socket.socket, stdout: asyncio.StreamReader | None, stderr: asyncio.StreamReader
    ) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.exit: asyncio.Future[Any] = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(connection, 16))
        self.exit.add_done_callback(lambda _: connection.close())

    @property
    def returncode(self) -> int | None:
        return int(self.exit.result()) if self.exit.done() else None

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises ProcessLookupError if the process has ended."""
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        assert sys.platform != "win32"
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        return int(await asyncio.shield(self.exit))

    async def communicate(self, stdin: bytes | None = None) -> tuple[bytes, bytes]:
        """Return the rest of the output when the process has ended."""
        assert stdin is None
        out, err = await asyncio.gather(self.stdout.read() if self.stdout else no_output(), self.stderr.read())
        await self.wait()
        return out, err


async def no_output() -> bytes:
    return b""


async def open_reader(descriptor: int) -> asyncio.StreamReader:
    """Return a stream that reads a pipe, which it closes at its end."""
    reader = asyncio.StreamReader()
    file = FileIO(descriptor, "rb")
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader


class ForkedAgent(StreamTransport):
    """A transport to an agent that runs in a fork."""

    def __init__(self, source: ByteSource, sink: ByteSink, pid: int, connection: socket.socket) -> None:
        super().__init__(source, sink)
        self.pid = pid
        self.exit: asyncio.Future[Any] = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(connection, 16))
        """Done when the process has ended."""
        self.connection = connection

    async def close(self) -> None:
        await self._sink.close()
        await asyncio.wait({self.exit}, timeout=PATIENCE)
        self.source.close()
        self.connection.close()


def read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


@dataclass
class Machine:
    """The folders and the environment in which commands run."""

    home: Path
    project: Path
    env: dict[str, str]
    """The complete environment of the command."""
    stderr: Path
    """The file for the standard error of `crow acp`."""
    prefork: Prefork | None = None
    """Runs commands and agents in forks; without it, each starts as a process of its own."""
    launcher: tuple[str, ...] = ()
    """Starts the commands and agents, if they are to be confined."""

    def ask(self, url: str, key: str = "key") -> None:
        """Configure the model at this URL by environment variables."""
        self.env |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "CROW_MODEL": "scripted"}

    def configure(self, toml: str) -> Path:
        """Write crow's configuration file."""
        file = Path(self.env["CROW_HOME"], "config.toml")
        file.parent.mkdir(exist_ok=True)
        file.write_text(toml)
        return file

    def keeper(self, pipe: "PipeReader") -> McpServer:
        """Return an MCP server on standard streams that holds the pipe open, as does a child that it leaves running."""
        script = self.home / "keeper.py"
        script.write_text(KEEPER)
        return McpServer(name="keeper", command=sys.executable, args=[str(script), str(pipe.path)])

    async def start(self, *args: str, stdin: int = DEVNULL, stdout: int = PIPE) -> "Process | ForkedProcess":
        """Start `crow` with these arguments in the project; in a fork if it reads nothing."""
        if self.forks and stdin == DEVNULL:
            return await self.forks.start(args, self.env, self.project, None if stdout == PIPE else stdout)
        return await asyncio.create_subprocess_exec(
            *self.launcher, *CROW, *args, stdin=stdin, stdout=stdout, stderr=PIPE, env=self.env, cwd=self.project
        )

    def confine(self, *options: str) -> None:
        """Forbid the commands and agents from now on to make namespaces, as a container does."""
        self.launcher = (sys.executable, str(CONFINED), *options)

    async def start_on(self, terminal: int, *args: str) -> Process:
        """Start `crow` on a pseudo-terminal, and close this process's descriptor of it."""
        try:
            return await asyncio.create_subprocess_exec(
                *CROW, *args, stdin=terminal, stdout=terminal, stderr=terminal, env=self.env, cwd=self.project
            )
        finally:
            os.close(terminal)

    @property
    def forks(self) -> Prefork | None:
        """The runner of commands in forks; None with PYTHONPATH, which decides the first imports, or with a
        launcher."""
        return None if "PYTHONPATH" in self.env or self.launcher else self.prefork

    async def crow(self, *args: str, stdin: str = "") -> CommandResult:
        """Run `crow` to its end."""
        if self.forks:
            return await self.forks.run(args, self.env, self.project, stdin.encode())
        return await self.finish(await self.start(*args, stdin=PIPE), stdin.encode())

    async def finish(self, process: "Process | ForkedProcess", stdin: bytes | None = None) -> CommandResult:
        """Wait for a command's end."""
        out, err = await process.communicate(stdin)
        assert process.returncode is not None
        return CommandResult(process.returncode, *(each.decode().replace(os.linesep, "\n") for each in (out, err)))

    async def agent(self, *more: str) -> ChildTransport:
        """Start `crow acp` in the home folder: an editor does not start it in the project either."""
        with self.stderr.open("ab") as stderr:
            command, *args = *self.launcher, *CROW
            return await spawn(command, [*args, "acp", *more], self.env, self.home, stderr, close_timeout=PATIENCE)

    async def fork_agent(self) -> "ForkedAgent | ChildTransport":
        """Start `crow acp` in a fork, or as `agent` does where there are no forks."""
        if self.forks is None:
            return await self.agent()
        return await self.forks.spawn(["acp"], self.env, self.home, self.stderr)

    @asynccontextmanager
    async def editor(self, transport: Transport | None = None, *, permit: str | None = None) -> AsyncGenerator[Editor]:
        """Connect an editor to `crow acp` and initialize it."""
        editor = Editor(transport or await self.fork_agent(), permit=permit)
        async with editor.serving():
            await editor.initialize("editor", ClientCapabilities())
            yield editor


@dataclass
class PipeReader:
    """The reading end of a named pipe. It shows what processes write, and when the last one has closed the pipe."""

    path: Path
    reader: asyncio.StreamReader

    def holding_command(self) -> str:
        """Return a command that holds the pipe open together with its two children; one of them ignores SIGTERM."""
        return f'exec 9>{self.path}; (trap "" TERM; while :; do sleep 600; done) & sleep 600 & echo $$ >&9; wait'

    async def line(self) -> str:
        return (await self.reader.readline()).decode().strip()

    async def wait_for_close(self) -> None:
        """Wait until no process is left that has the pipe open."""
        await self.reader.read()


class PersonAtTerminal:
    """A pseudo-terminal at which the test reads and types."""

    here: int
    there: int

    def __init__(self) -> None:
        assert sys.platform != "win32"
        self.here, self.there = pty.openpty()

    async def shown(self, until: str = "") -> str:
        """Read the output up to these words, else to the end, without crow's own colours."""
        loop, data = asyncio.get_running_loop(), b""
        while not until or until.encode() not in data:
            ready = asyncio.Event()
            loop.add_reader(self.here, ready.set)
            await ready.wait()
            loop.remove_reader(self.here)
            try:
                data += os.read(self.here, 4096)
            except OSError:  # nobody is left who could write
                os.close(self.here)
                break
        return re.sub(r"\x1b\[\d+m", "", data.decode()).replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self.here, text.encode())


@pytest.fixture
def terminal() -> PersonAtTerminal:
    if sys.platform == "win32":
        pytest.skip("Windows has no pseudo-terminals")
    return PersonAtTerminal()


@pytest.fixture(scope="session")
def forks() -> Iterator[Prefork | None]:
    """Start the process that runs commands in forks when it is needed; None where forks are not safe, and with
    CROW_TEST_PROCESSES=1."""
    yield FORKS if sys.platform == "linux" and not ALL_PROCESSES else None
    FORKS.close()


@pytest.fixture
def prefork(request: pytest.FixtureRequest, forks: Prefork | None) -> Prefork | None:
    """The process that runs commands in forks.

    None in `.ci/run` for the tests that are marked `processes` and for one in 24 of the others, chosen by its name:
    their commands start as processes of their own. `just processes` runs all so.
    """
    chosen = request.node.get_closest_marker("processes") or crc32(request.node.nodeid.encode()) % 24 == 0
    return None if TEST_ALL and chosen else forks


def machine_in(folder: Path, prefork: Prefork | None) -> Machine:
    home, project, scratch = (folder / name for name in ("home", "project", "scratch"))
    for each in (home, project, scratch):
        each.mkdir(exist_ok=True)
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CROW_HOME": str(home / "crow"),
        "TMPDIR": str(scratch),
        "LANG": "C.UTF-8",
        "CROW_SANDBOX": "off",  # commands run as where there is no sandbox; its own tests remove this
    }
    if sys.platform == "win32":  # without these, no program starts, or finds its home and a folder for temporary files
        kept = ("SYSTEMROOT", "COMSPEC", "PATHEXT", "WINDIR")
        env |= {name: os.environ[name] for name in kept if name in os.environ}
        env |= {"USERPROFILE": str(home), "TEMP": str(scratch), "TMP": str(scratch), "PYTHONUTF8": "1"}
    return Machine(home, project, env, folder / "stderr.txt", prefork)


@pytest.fixture
def machine(tmp_path: Path, prefork: Prefork | None) -> Machine:
    return machine_in(tmp_path, prefork)


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, forks: Prefork | None
) -> Callable[[Callable[[Machine], Coroutine[Any, Any, None]]], Callable[[Prefork | None], Machine]]:
    """Prepares a machine once, and returns a function that restores its files as they were prepared."""

    def prepared(prepare: Callable[[Machine], Coroutine[Any, Any, None]]) -> Callable[[Prefork | None], Machine]:
        folder = tmp_path_factory.mktemp("prepared")
        saved = folder.with_name(f"{folder.name}-saved")
        asyncio.run(prepare(machine_in(folder, forks)))
        shutil.copytree(folder, saved, symlinks=True)

        def restore(prefork: Prefork | None) -> Machine:
            shutil.rmtree(folder)
            shutil.copytree(saved, folder, symlinks=True)
            return machine_in(folder, prefork)

        return restore

    return prepared


@pytest.fixture
def no_local_model() -> None:
    """Skip the test if a local model server runs: crow would find it at its usual port."""
    for name, url in LOCAL_SERVERS.items():
        address = urlsplit(url)
        with suppress(OSError), socket.create_connection((address.hostname, address.port), 1):
            pytest.skip(f"{name} seems to run on this machine, at {url}")


@pytest.fixture
async def open_pipe(tmp_path: Path) -> AsyncIterator[Callable[[str], Awaitable[PipeReader]]]:
    """Return a function that opens a named pipe for reading."""
    async with AsyncExitStack() as stack:

        async def open_pipe(name: str) -> PipeReader:
            assert sys.platform != "win32"
            path = tmp_path / name
            os.mkfifo(path)
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)
            reader = asyncio.StreamReader()
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
            stack.callback(transport.close)
            return PipeReader(path, reader)

        yield open_pipe
