"""Transports for lines: standard streams, a child process, memory."""

import asyncio
import os
import socket
import stat
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from queue import SimpleQueue
from typing import IO, Protocol, cast

import crow_system as system

MAX_MESSAGE_BYTES = 50 * 1024 * 1024
"""Bytes that a line may have; longer lines are discarded as they arrive."""
CHUNK_BYTES = 1024 * 1024
"""Bytes requested per read. At most three times as many are buffered; then the other side has to wait."""

HIGH_WATER_BYTES = 64 * 1024
"""Bytes in the write buffer above which `drain` waits; the same as asyncio's default."""

CLOSE_TIMEOUT = 2.0
"""Default seconds to wait for the last bytes, for a child's exit after the end of its input and after SIGTERM."""


class LineTooLong(Exception):
    """A line of more than MAX_MESSAGE_BYTES was discarded; the next line can be read."""


class Transport(Protocol):
    """Lines in both directions, with backpressure."""

    async def readline(self) -> bytes | bytearray:
        """Return the next line that is not empty, with or without its newline; `b""` at the end. Raises LineTooLong."""
        ...

    def write(self, line: bytes, /) -> None:
        """Buffer a line, which ends with a newline. Never raises; `drain` reports errors."""
        ...

    async def drain(self) -> None:
        """Wait until there is room in the buffer. Raises OSError if the connection was closed."""
        ...

    async def close(self) -> None:
        """Send the buffered data, if the other side reads it, then close both directions. May be called again."""
        ...


class ByteSource(Protocol):
    """A stream of incoming bytes."""

    async def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class ByteSink(Protocol):
    """A stream of outgoing bytes."""

    def write(self, data: bytes, /) -> None: ...

    async def drain(self) -> None: ...

    async def close(self) -> None: ...


class StreamTransport:
    """A transport over two streams of bytes.

    It splits lines itself, because asyncio's readline limits them to 64 KiB.
    """

    def __init__(self, source: ByteSource, sink: ByteSink) -> None:
        self.source = source
        """The incoming bytes, for users that split lines in another way."""
        self._sink = sink
        self._lines: deque[bytes | bytearray | None] = deque()
        self._partial: bytearray | None = bytearray()
        """The beginning of an unfinished line; None for a line that is too long, also in `_lines`."""
        self.write = sink.write
        self.drain = sink.drain

    async def readline(self) -> bytes | bytearray:
        while not self._lines:
            try:
                chunk = await self.source.read(CHUNK_BYTES)
            except OSError:  # treat a reset as the end
                chunk = b""
            if chunk:
                self._split(chunk)
            elif self._partial is None or self._partial:
                self._end_line()
            else:
                return b""
        line = self._lines.popleft()
        if line is None:
            raise LineTooLong(f"a message may have at most {MAX_MESSAGE_BYTES} bytes")
        return line

    async def close(self) -> None:
        try:
            await self._sink.close()
        finally:
            self.source.close()

    def _split(self, chunk: bytes) -> None:
        first, *others = chunk.split(b"\n")
        self._continue_line(first)
        if others:
            self._end_line()
            *whole, rest = others
            self._lines.extend(filter(None, whole))
            self._continue_line(rest)

    def _continue_line(self, piece: bytes) -> None:
        if self._partial is not None:
            self._partial += piece
            if len(self._partial) > MAX_MESSAGE_BYTES:
                self._partial = None

    def _end_line(self) -> None:
        if self._partial is None or self._partial:
            self._lines.append(self._partial)
            self._partial = bytearray()


class PipeSource:
    """A source that can be polled: a pipe, a socket or a terminal."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.BaseTransport) -> None:
        self.read = reader.read
        self.close = transport.close


class PipeSink:
    """A sink that can be polled: a pipe, a socket or a terminal."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.drain = writer.drain

    def write(self, data: bytes) -> None:
        if not self._writer.is_closing():  # otherwise asyncio logs a warning for each line
            self._writer.write(data)

    async def close(self) -> None:
        try:
            with suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._flush(), CLOSE_TIMEOUT)
        finally:
            self._restore_blocking()
            if not self._writer.is_closing():  # asyncio's pipes cannot be aborted twice
                self._writer.transport.abort()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _flush(self) -> None:
        self._writer.transport.set_write_buffer_limits(0)  # now drain waits for the last byte
        await self._writer.drain()

    def _restore_blocking(self) -> None:
        """Make the file blocking again: asyncio changed that, and other processes may share the terminal."""
        pipe = cast("FileIO | None", self._writer.get_extra_info("pipe"))
        if pipe is not None and not pipe.closed:
            system.set_blocking(pipe.fileno(), True)


class ThreadReader(asyncio.ReadTransport):
    """Reads a file that the event loop cannot poll, in a thread, for a StreamReader that pauses it.

    The thread is a daemon: nothing interrupts a read that waits, and it must not hold up the end of the process. It
    closes the file itself, so that the number of the descriptor is not given away while it reads.
    """

    def __init__(self, file: FileIO, reader: asyncio.StreamReader) -> None:
        super().__init__()
        self._file = file
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        self._wanted = threading.Event()
        self._wanted.set()
        self._closed = False
        reader.set_transport(self)
        threading.Thread(target=self._run, daemon=True, name="crow-read").start()

    def pause_reading(self) -> None:
        self._wanted.clear()

    def resume_reading(self) -> None:
        self._wanted.set()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()

    def _run(self) -> None:
        data = b"-"
        with self._file, suppress(RuntimeError):  # the loop is closed
            while data and not self._closed:
                self._wanted.wait()
                try:
                    data = b"" if self._closed else os.read(self._file.fileno(), CHUNK_BYTES)
                except OSError:  # treat a reset as the end
                    data = b""
                self._loop.call_soon_threadsafe(self._feed, data)

    def _feed(self, data: bytes) -> None:
        if data and not self._closed:
            self._reader.feed_data(data)
        else:  # later than what was read, as from a pipe that the loop polls
            self._loop.call_soon(self._reader.feed_eof)


class ThreadSink:
    """A sink that the event loop cannot poll, such as a regular file; written in a thread."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._size = 0
        """Bytes that are not written yet."""
        self._failure: OSError | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._written: asyncio.Future[None] = self._loop.create_future()
        """Done when the file is closed."""
        threading.Thread(target=self._run, daemon=True, name="crow-write").start()

    def write(self, data: bytes) -> None:
        if self._failure is None and data:
            self._size += len(data)
            if self._size > HIGH_WATER_BYTES:
                self._room.clear()
            self._lines.put(data)

    async def drain(self) -> None:
        await self._room.wait()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        if self._failure is None:
            self._failure = BrokenPipeError("the file is closed")
        self._lines.put(b"")
        await asyncio.wait([self._written], timeout=CLOSE_TIMEOUT)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            failure: OSError | None = None
            with suppress(OSError), self._file:
                while data := self._lines.get():
                    size = len(data)
                    try:
                        while data and failure is None:
                            data = data[self._file.write(data) :]
                    except OSError as error:  # such as a full disk
                        failure = error
                    self._loop.call_soon_threadsafe(self._note_written, size, failure)
            self._loop.call_soon_threadsafe(self._written.cancel)

    def _note_written(self, size: int, failure: OSError | None) -> None:
        self._size -= size
        self._failure = self._failure or failure
        if self._size <= HIGH_WATER_BYTES or self._failure:
            self._room.set()


async def stdio() -> StreamTransport:
    """Return a transport over standard input and output, reserved for it as long as the process lives.

    Redirect file descriptor 1 to standard error and 0 to /dev/null, so that libraries and child processes cannot write
    or read protocol messages.
    """
    source, sink = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return StreamTransport(*await open_streams(FileIO(source, "rb"), FileIO(sink, "wb"), ends_unread=True))


async def open_streams(source: FileIO, sink: FileIO, *, ends_unread: bool = False) -> tuple[ByteSource, ByteSink]:
    """Return streams over two open files, by the kind of each file. The streams close the files.

    With `ends_unread`, the source ends when nobody reads a pipe that is the sink any more.
    """
    if is_same_socket(source, sink):
        sink.close()
        connection = socket.socket(fileno=os.dup(source.fileno()))
        reader, writer = await asyncio.open_connection(sock=connection, limit=CHUNK_BYTES)
        source.close()
        return PipeSource(reader, writer.transport), PipeSink(writer)
    incoming = await open_source(source)
    return incoming, await open_sink(sink, incoming.close if ends_unread else lambda: None)


async def open_source(file: FileIO) -> ByteSource:
    """Return a source over an open file."""
    reader = asyncio.StreamReader(CHUNK_BYTES)
    if not can_be_polled(file):
        return PipeSource(reader, ThreadReader(file, reader))
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return PipeSource(reader, transport)


class SinkProtocol(asyncio.StreamReaderProtocol):
    """The protocol of a sink, which calls a function when nobody reads the other end any more."""

    def __init__(self, on_lost: Callable[[], object]) -> None:
        super().__init__(asyncio.StreamReader())
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()


async def open_sink(file: FileIO, on_lost: Callable[[], object] = lambda: None) -> ByteSink:
    """Return a sink over an open file. `on_lost` is called when nobody reads a pipe any more, also while it is idle."""
    if not can_be_polled(file):
        return ThreadSink(file)
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(lambda: SinkProtocol(on_lost), file)
    return PipeSink(asyncio.StreamWriter(transport, protocol, None, loop))


def can_be_polled(file: FileIO) -> bool:
    """Return whether the event loop can wait for a file: a pipe, a socket or a terminal, except on Windows."""
    mode = os.fstat(file.fileno()).st_mode
    return system.POLLS_PIPES and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or file.isatty())


def is_same_socket(source: FileIO, sink: FileIO) -> bool:
    """Return whether both files are one socket, as under inetd, sshd and socat.

    Two asyncio pipes over one socket would close each other.
    """
    if not system.POLLS_PIPES:
        return False
    source_stat, sink_stat = os.fstat(source.fileno()), os.fstat(sink.fileno())
    return stat.S_ISSOCK(source_stat.st_mode) and os.path.samestat(source_stat, sink_stat)


class ChildTransport(StreamTransport):
    """A transport over the standard streams of a process that `spawn` started."""

    def __init__(
        self,
        source: ByteSource,
        sink: ByteSink,
        errors: ByteSource | None,
        process: subprocess.Popen[bytes],
        close_timeout: float,
    ) -> None:
        super().__init__(source, sink)
        self.process = process
        self.errors = errors
        """Its standard error; None if that is not a PIPE."""
        self.exit = watch_exit(process)
        """Its exit code; done when the process has ended, even if other processes hold its streams."""
        self._close_timeout = close_timeout
        self._closed = False

    async def close(self) -> None:
        """Close its input, wait for its exit, then send SIGTERM and wait again, then kill its process group."""
        if self._closed:  # another process may have its id by now
            return
        self._closed = True
        try:
            await self._sink.close()
            await asyncio.wait({self.exit}, timeout=self._close_timeout)
            if not self.exit.done():
                system.end_group(self.process.pid)
                await asyncio.wait({self.exit}, timeout=self._close_timeout)
        finally:
            system.kill_group(self.process.pid)
            self.source.close()
            await asyncio.wait({self.exit})


def watch_exit(process: subprocess.Popen[bytes]) -> "asyncio.Future[int]":
    """Return a future of a process's exit code, which a thread waits for."""
    loop = asyncio.get_running_loop()
    exit_code: asyncio.Future[int] = loop.create_future()

    def wait() -> None:
        code = process.wait()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: exit_code.done() or exit_code.set_result(code))

    threading.Thread(target=wait, daemon=True, name="crow-exit").start()
    return exit_code


async def spawn(
    command: str,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stderr: IO[bytes] | int | None = None,
    close_timeout: float = CLOSE_TIMEOUT,
    prepare: Callable[[], None] | None = None,
) -> ChildTransport:
    """Start a program that speaks the protocol on its standard streams, in a process group of its own.

    `env` is its whole environment; None inherits ours. `stderr` is as for Popen and may be PIPE. `close_timeout` is the
    time in seconds that `close` waits for its exit, and again after SIGTERM. `prepare` is called in the new process
    before the program runs. Raises OSError if it cannot start.
    """
    try:
        process = subprocess.Popen(  # noqa: ASYNC220, asyncio's own function blocks as long
            [system.find_program(command, os.environ if env is None else env), *args],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env,
            cwd=cwd,
            start_new_session=True,
            creationflags=system.NEW_GROUP,
            preexec_fn=prepare,
        )
    except FileNotFoundError as error:
        error.filename = error.filename or command  # Windows does not say what is missing
        raise
    source, sink = cast("FileIO", process.stdout), cast("FileIO", process.stdin)
    errors = cast("FileIO | None", process.stderr) and await open_source(cast("FileIO", process.stderr))
    return ChildTransport(*await open_streams(source, sink), errors, process, close_timeout)


class LineQueue:
    """A queue of lines with a limit of HIGH_WATER_BYTES, above which `writable` is cleared."""

    def __init__(self) -> None:
        self.lines: deque[bytes] = deque()
        self.size = 0
        self.closed = False
        self.readable = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()

    def write(self, line: bytes) -> None:
        if not self.closed:
            self.put(line)

    async def drain(self) -> None:
        """Wait until there is room. Raises BrokenPipeError if the queue is closed."""
        await self.writable.wait()
        if self.closed:
            raise BrokenPipeError("the connection has ended")

    def put(self, line: bytes) -> None:
        self.lines.append(line)
        self.size += len(line)
        self.readable.set()
        if self.size > HIGH_WATER_BYTES:
            self.writable.clear()

    async def take(self) -> bytes:
        """Return the next line; `b""` if the queue is empty and closed."""
        while not self.lines:
            if self.closed:
                return b""
            self.readable.clear()
            await self.readable.wait()
        line = self.lines.popleft()
        self.size -= len(line)
        if self.size <= HIGH_WATER_BYTES:
            self.writable.set()
        return line

    def close(self) -> None:
        self.closed = True
        self.readable.set()
        self.writable.set()


class MemoryTransport:
    """One end of a pair of transports in this process."""

    def __init__(self, incoming: LineQueue, outgoing: LineQueue) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.readline, self.write, self.drain = incoming.take, outgoing.write, outgoing.drain

    async def close(self) -> None:
        self._incoming.close()
        self._outgoing.close()


def memory_pair() -> tuple[MemoryTransport, MemoryTransport]:
    """Return two transports that are connected to each other."""
    first, second = LineQueue(), LineQueue()
    return MemoryTransport(first, second), MemoryTransport(second, first)
