"""How lines reach the other side: standard streams, a child process, memory."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from typing import IO, Protocol, cast

MAX_MESSAGE = 50 * 1024 * 1024
"""Bytes a line may have; the rest of a longer one is thrown away as it arrives."""

CHUNK = 1024 * 1024
"""Bytes asked for at once. At most three times as much waits unread; beyond that the other side has to wait."""

HIGH_WATER = 64 * 1024
"""Bytes written and not yet taken at which `drain` begins to wait, as asyncio has it."""

GRACE = 2.0
"""Seconds granted, each, to the last bytes, to a child after the end of its input, and to a child after SIGTERM, where
nobody says otherwise."""


class LineTooLong(Exception):
    """A line of more than MAX_MESSAGE bytes came and was dropped; the next one can be read."""


class Transport(Protocol):
    """What a connection needs: whole lines in, whole lines out, and word when to slow down."""

    async def readline(self) -> bytes | bytearray:
        """The next line that is not empty, with or without its newline; `b""` at the end. Raises LineTooLong."""
        ...

    def write(self, line: bytes, /) -> None:
        """Take one line, newline included, in the order of the calls. Never raises: `drain` tells."""
        ...

    async def drain(self) -> None:
        """Return at once while there is room, else when there is. Raises OSError once the other side is gone."""
        ...

    async def close(self) -> None:
        """Hand over what was written, if anyone takes it, then end both directions. May be called again."""
        ...


class Source(Protocol):
    """Where bytes come from."""

    async def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class Sink(Protocol):
    """Where bytes go to."""

    def write(self, data: bytes, /) -> None: ...

    async def drain(self) -> None: ...

    async def close(self) -> None: ...


class Streams:
    """Lines over two streams of bytes. Does its own splitting: asyncio's readline ends at 64 KiB, ACP does not."""

    def __init__(self, source: Source, sink: Sink) -> None:
        self.source = source
        """For whoever splits lines otherwise."""
        self._sink = sink
        self._lines: deque[bytes | bytearray | None] = deque()
        self._begun: bytearray | None = bytearray()
        """The line whose end has not come; None while one that is too long passes by. It stands so in `_lines` too."""
        self.write = sink.write
        self.drain = sink.drain

    async def readline(self) -> bytes | bytearray:
        while not self._lines:
            try:
                chunk = await self.source.read(CHUNK)
            except OSError:  # a reset is an end
                chunk = b""
            if chunk:
                self._split(chunk)
            elif self._begun is None or self._begun:
                self._end_line()
            else:
                return b""
        line = self._lines.popleft()
        if line is None:
            raise LineTooLong(f"a message may have at most {MAX_MESSAGE} bytes")
        return line

    async def close(self) -> None:
        try:
            await self._sink.close()
        finally:
            self.source.close()

    def _split(self, chunk: bytes) -> None:
        end, *others = chunk.split(b"\n")
        self._continue_line(end)
        if others:
            self._end_line()
            *whole, begun = others
            self._lines.extend(filter(None, whole))
            self._continue_line(begun)

    def _continue_line(self, piece: bytes) -> None:
        if self._begun is not None:
            self._begun += piece
            if len(self._begun) > MAX_MESSAGE:
                self._begun = None

    def _end_line(self) -> None:
        if self._begun is None or self._begun:
            self._lines.append(self._begun)
            self._begun = bytearray()


class PipeSource:
    """The reading end of what can be polled."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.BaseTransport) -> None:
        self.read = reader.read
        self.close = transport.close


class PipeSink:
    """The writing end of what can be polled."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.drain = writer.drain

    def write(self, data: bytes) -> None:
        if not self._writer.is_closing():  # else asyncio logs a warning a line
            self._writer.write(data)

    async def close(self) -> None:
        try:
            with suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._flush(), GRACE)
        finally:
            self._share()
            if not self._writer.is_closing():  # asyncio's pipes cannot be aborted twice
                self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _flush(self) -> None:
        self._writer.transport.set_write_buffer_limits(0)  # from here on, drain waits for the last byte
        await self._writer.drain()

    def _share(self) -> None:
        """Undo what asyncio did to a terminal that others use too: leave it blocking."""
        pipe = cast("FileIO | None", self._writer.get_extra_info("pipe"))
        if pipe is not None and not pipe.closed:
            os.set_blocking(pipe.fileno(), True)


class FileSource:
    """Regular files and the like, which cannot be polled and do not keep anyone waiting."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.close = file.close

    async def read(self, size: int) -> bytes:
        return await asyncio.to_thread(os.read, self._file.fileno(), size)


class FileSink:
    """As FileSource, for writing."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._failure: OSError | None = None

    def write(self, data: bytes) -> None:
        try:
            while data and self._failure is None:
                data = data[self._file.write(data) :]
        except OSError as failure:  # the disk is full
            self._failure = failure

    async def drain(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        self._failure = BrokenPipeError("the file is closed")
        self._file.close()


async def stdio() -> Streams:
    """Claim standard input and output for the protocol, in the whole process, for good.

    File descriptor 1 then leads to standard error and 0 to /dev/null: what a library or a child process prints or
    reads stays away from the protocol.
    """
    source, sink = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return Streams(*await open_streams(FileIO(source, "rb"), FileIO(sink, "wb")))


async def open_streams(source: FileIO, sink: FileIO) -> tuple[Source, Sink]:
    """Take over two open files: what suits each kind of them."""
    if is_same_socket(source, sink):
        sink.close()
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=os.dup(source.fileno())), limit=CHUNK)
        source.close()
        return PipeSource(reader, writer.transport), PipeSink(writer)
    return await open_source(source), await open_sink(sink)


async def open_source(file: FileIO) -> Source:
    if not can_be_polled(file):
        return FileSource(file)
    reader = asyncio.StreamReader(CHUNK)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return PipeSource(reader, transport)


async def open_sink(file: FileIO) -> Sink:
    if not can_be_polled(file):
        return FileSink(file)
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), file
    )
    return PipeSink(asyncio.StreamWriter(transport, protocol, None, loop))


def can_be_polled(file: FileIO) -> bool:
    mode = os.fstat(file.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or file.isatty()


def is_same_socket(source: FileIO, sink: FileIO) -> bool:
    """Whether both ends are one, as inetd, sshd and socat give them; asyncio's pipes would each close the other."""
    one, other = os.fstat(source.fileno()), os.fstat(sink.fileno())
    return stat.S_ISSOCK(one.st_mode) and os.path.samestat(one, other)


class Child(Streams):
    """The standard streams of a process that `spawn` started."""

    def __init__(
        self, source: Source, sink: Sink, errors: Source | None, process: subprocess.Popen[bytes], grace: float
    ) -> None:
        super().__init__(source, sink)
        self.process = process
        self.errors = errors
        """Its standard error, where it is a PIPE."""
        self.exit = exit_of(process)
        """Done when the process has ended, whoever still holds its standard streams."""
        self._grace = grace
        self._closed = False

    async def close(self) -> None:
        """End its input, wait, terminate, wait, and kill what is left of its process group."""
        if self._closed:  # by now, its number may be another's
            return
        self._closed = True
        try:
            await self._sink.close()
            await asyncio.wait({self.exit}, timeout=self._grace)
            if not self.exit.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait({self.exit}, timeout=self._grace)
        finally:
            self._signal(signal.SIGKILL)
            self.source.close()
            await asyncio.wait({self.exit})

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(self.process.pid, number)


def exit_of(process: subprocess.Popen[bytes]) -> "asyncio.Future[int]":
    """A process's exit code, once it has ended; waited for in a thread of its own, as asyncio does."""
    loop = asyncio.get_running_loop()
    exit: asyncio.Future[int] = loop.create_future()

    def wait() -> None:
        code = process.wait()
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(lambda: exit.done() or exit.set_result(code))

    threading.Thread(target=wait, daemon=True, name="crow-exit").start()
    return exit


async def spawn(
    command: str,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stderr: IO[bytes] | int | None = None,
    grace: float = GRACE,
) -> Child:
    """Start a program that speaks the protocol on its standard streams, in a process group of its own.

    `env` is its whole environment, None hands ours on; so it is with `stderr`, which may be a PIPE. `grace` are the
    seconds it has after the end of its input, and again after SIGTERM. Raises OSError if it cannot start.
    """
    process = subprocess.Popen(  # noqa: ASYNC220, asyncio's own way blocks as long
        [command, *args],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=env,
        cwd=cwd,
        start_new_session=True,
    )
    source, sink = cast("FileIO", process.stdout), cast("FileIO", process.stdin)
    errors = cast("FileIO | None", process.stderr) and await open_source(cast("FileIO", process.stderr))
    return Child(*await open_streams(source, sink), errors, process, grace)


class Channel:
    """One direction of a memory pair: what was written waits here to be read."""

    def __init__(self) -> None:
        self.lines: deque[bytes] = deque()
        self.size = 0
        self.closed = False
        self.readable = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()

    def put(self, line: bytes) -> None:
        self.lines.append(line)
        self.size += len(line)
        self.readable.set()
        if self.size > HIGH_WATER:
            self.writable.clear()

    async def take(self) -> bytes:
        while not self.lines:
            if self.closed:
                return b""
            self.readable.clear()
            await self.readable.wait()
        line = self.lines.popleft()
        self.size -= len(line)
        if self.size <= HIGH_WATER:
            self.writable.set()
        return line

    def close(self) -> None:
        self.closed = True
        self.readable.set()
        self.writable.set()


class Memory:
    """One end of a pair in this process."""

    def __init__(self, incoming: Channel, outgoing: Channel) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self.readline = incoming.take

    def write(self, line: bytes) -> None:
        if not self._outgoing.closed:
            self._outgoing.put(line)

    async def drain(self) -> None:
        await self._outgoing.writable.wait()
        if self._outgoing.closed:
            raise ConnectionResetError("the other end of the memory pair is closed")

    async def close(self) -> None:
        self._incoming.close()
        self._outgoing.close()


def memory_pair() -> tuple[Memory, Memory]:
    """Two transports whose lines reach each other."""
    there, back = Channel(), Channel()
    return Memory(back, there), Memory(there, back)
