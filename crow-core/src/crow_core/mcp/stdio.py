"""A command as an MCP server that may misbehave: one that prints junk, floods, answers with 100 MB, or does not end.

This is FastMCP's transport for it, in the place of its own, which takes minutes for such an answer, holds it several
times, and waits for a dead server as long as something that it started still lives. It brings FastMCP: import it where
a server is connected.
"""

import asyncio
import json
import os
import re
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fastmcp.client.transports import ClientTransport
from fastmcp.client.transports.base import SessionKwargs, TransportOptions
from mcp import ClientSession
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter
from typing_extensions import Unpack

from crow_core.acp.transports import CHUNK_BYTES, ByteSource, ChildTransport, spawn

LINE_LIMIT = 8 * 1024 * 1024
"""Bytes of a message that is read; a longer one goes to a file, and what is said of it takes its place."""
FILE_LIMIT = 64 * 1024 * 1024
"""Bytes of it that the file holds."""
EDGE = 2_000
"""Bytes that are shown of its beginning, and of its end."""
LAST_WORDS = 4096
"""Bytes that are remembered of what a server says beside the protocol."""
GRACE = 0.5
"""Seconds a server has after the end of its input, and again after SIGTERM; a dead one's last bytes have as much."""

ID = rb'"id"\s*:\s*(?P<%b>\d{1,18}|"[^"\\]{1,99}")'
VERSION = rb'"jsonrpc"\s*:\s*"2\.0"'
FIELD = rb"(?:%b\s*,\s*)?"
BEGIN = re.compile(
    rb"(?:data:)?\s*\{\s*" + FIELD % VERSION + FIELD % (ID % b"id") + FIELD % VERSION + rb'"(?:result|error)"'
)
END = re.compile(rb",\s*%b\s*(?:,\s*%b\s*)?\}\s*$" % (ID % b"id", VERSION))
"""An answer's id stands before its result or, as JavaScript's servers have it, behind."""
ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
ESCAPED = {b"n": b"\n", b"r": b"", b"t": b"\t", b'"': b'"', b"\\": b"\\", b"/": b"/"}


class Stdio(ClientTransport):
    """Runs a command and speaks with it over its standard streams, for as long as one client is connected."""

    def __init__(
        self, command: str, args: Sequence[str], env: Mapping[str, str], cwd: str, folder: Callable[[], Path | None]
    ) -> None:
        self.command = command
        self.args = args
        self.env = env
        """Beside the few harmless variables that every server is given."""
        self.cwd = cwd
        self.folder = folder
        """Gives where answers are kept that are too long to be read; None keeps none."""
        self.said = b""
        """The last of what the server said on its standard error, or among its messages without being one."""
        self._calls: set[int | str] = set()
        """The ids of the tool calls that have not been answered."""

    @asynccontextmanager
    async def connect_session(
        self, *, transport_options: TransportOptions | None = None, **session_kwargs: Unpack[SessionKwargs]
    ) -> AsyncGenerator[ClientSession]:
        options = transport_options or TransportOptions()
        env = get_default_environment() | dict(self.env)
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        starting = asyncio.create_task(spawn(self.command, self.args, env, self.cwd, subprocess.PIPE, GRACE))
        tasks: list[asyncio.Task[None]] = []
        try:
            child = await asyncio.shield(starting)
            hearing = asyncio.create_task(self._hear(child))
            reading = asyncio.create_task(self._read(child.source, incoming))
            writing = asyncio.create_task(self._write(child, outgoing, incoming))
            tasks += [hearing, reading, writing, asyncio.create_task(watch(child, reading))]
            async with options.session_class(read, write, **session_kwargs) as session:
                yield session
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([starting])
                if not starting.exception():
                    await starting.result().close()
                if tasks:
                    await asyncio.wait(tasks[:1], timeout=GRACE)  # its last words
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
                if not starting.exception() and (errors := starting.result().errors):
                    errors.close()
                for stream in (incoming, read, write, outgoing):
                    stream.close()

    async def _hear(self, child: ChildTransport) -> None:
        assert child.errors is not None
        while words := await child.errors.read(CHUNK_BYTES):
            self._remember(words)

    def _remember(self, words: bytes) -> None:
        self.said = (self.said + words)[-LAST_WORDS:]

    async def _read(self, source: ByteSource, incoming: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        line = Line(LINE_LIMIT, self.folder)
        try:
            async with incoming:
                while chunk := await source.read(CHUNK_BYTES):
                    *ends, begun = chunk.split(b"\n")
                    for end in ends:
                        await line.add(end)
                        message, line = self._message(line), Line(LINE_LIMIT, self.folder)
                        if message is not None:
                            await incoming.send(message)
                    await line.add(begun)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):  # nobody listens any more
            with suppress(OSError):
                while await source.read(CHUNK_BYTES):  # but it shall not choke on its last words
                    pass
        except OSError:  # a reset is an end
            pass
        finally:
            line.discard()

    def _message(self, line: "Line") -> SessionMessage | Exception | None:
        """What came in a line, as the session takes it: of an answer that is no use, what is wrong with it."""
        if not line.begun.strip():
            return None
        wrong = None
        if not line.too_long:
            try:
                message = parsed(line.begun)
            except ValueError as error:
                self._remember(bytes(line.begun) + b"\n")
                wrong = error
            else:
                if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
                    self._calls.discard(message.id)
                return SessionMessage(message)
        instead = line.instead(self._calls)
        return wrong if instead is None else SessionMessage(instead)

    async def _write(
        self,
        child: ChildTransport,
        outgoing: MemoryObjectReceiveStream[SessionMessage],
        incoming: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        try:
            async with outgoing:
                async for each in outgoing:
                    message = each.message
                    if isinstance(message, JSONRPCRequest) and message.method == "tools/call":
                        self._calls.add(message.id)
                    child.write(message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await child.drain()
        except OSError:  # it lives and does not listen: for the session, it is gone
            incoming.close()


async def watch(child: ChildTransport, reading: "asyncio.Task[None]") -> None:
    """Let nobody wait for a dead server because something that it started holds its standard streams."""
    await asyncio.wait([child.exit])
    await asyncio.wait([reading], timeout=GRACE)
    reading.cancel()


def parsed(line: bytearray) -> Any:
    """A line as a message. Raises ValueError."""
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return jsonrpc_message_adapter.validate_json(mended(line), by_name=False)


def mended(line: bytearray) -> str:
    """JSON without half characters: bytes that are no UTF-8, and escapes of what JavaScript has cut in two. Raises
    ValueError."""
    try:
        text = json.dumps(json.loads(line.decode(errors="replace")), ensure_ascii=False)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Line:
    """A line as it comes in: in memory while it may be a message, then in a file."""

    def __init__(self, limit: int, folder: Callable[[], Path | None]) -> None:
        self.limit = limit
        """Bytes of one that is not too long."""
        self.folder = folder
        """Gives where one that is too long is kept; None keeps none."""
        self.begun = bytearray()
        """The whole, or the beginning of one that is too long."""
        self.size = 0
        """Bytes that have come."""
        self._end = b""
        """The last bytes of one that is too long."""
        self._file: BinaryIO | None = None
        self._path = ""
        self._escape = b""
        """A backslash that came without what it stands before."""

    @property
    def too_long(self) -> bool:
        return self.size > self.limit

    async def add(self, piece: bytes) -> None:
        """Take what comes next; the first piece too much opens a file, if the line seems to be an answer."""
        fits, self.size = not self.too_long, self.size + len(piece)
        if not self.too_long:
            self.begun += piece
            return
        if fits:
            piece = bytes(self.begun) + piece
        try:
            if fits and BEGIN.match(self.begun) and (place := self.folder()) is not None:
                opened, self._path = tempfile.mkstemp(".txt", "answer-", place)
                self._file = os.fdopen(opened, "wb")
            if self._file is not None:
                await asyncio.to_thread(self._write, self._file, piece)
        except OSError:  # the disk is full: the answer's edges have to do
            self.discard()
        del self.begun[EDGE:]
        self._end = (self._end + piece)[-EDGE:]

    def _write(self, file: BinaryIO, piece: bytes) -> None:
        piece = self._escape + piece
        cut = len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2
        self._escape = piece[cut:]
        file.write(readable(piece[:cut])[: FILE_LIMIT - file.tell()])
        file.flush()

    def instead(self, calls: set[int | str]) -> JSONRPCResponse | JSONRPCError | None:
        """What takes the place of a line that is too long, or no message: the short form of an answer to one of these
        calls, an error for any other request, nothing where it answers none."""
        if (id := self.answers()) is not None and id in calls and self.too_long:
            calls.discard(id)
            return JSONRPCResponse(jsonrpc="2.0", id=id, result=self.result())
        self.discard()
        if id is None:
            return None
        what = f"its answer of {self.size:,} bytes is too long" if self.too_long else "its answer is not valid"
        return JSONRPCError(jsonrpc="2.0", id=id, error=ErrorData(code=INTERNAL_ERROR, message=what))

    def answers(self) -> int | str | None:
        """The id of the request that it answers, as far as can be told."""
        found = BEGIN.match(self.begun)
        if found and not found["id"]:
            found = END.search(self._end or self.begun)
        return None if found is None else json.loads(found["id"])

    def result(self) -> dict[str, Any]:
        """What stands for a tool's answer that is too long to be read."""
        where = "it was not kept"
        if self._file is not None:
            kept = self._file.tell()
            self._file.close()
            self._file = None
            what = f"the first {kept:,} bytes are" if kept >= FILE_LIMIT else "the whole is"
            where = f"{what} in {self._path}, as JSON whose line breaks are real ones"
        note = f"[{self.size - 2 * EDGE:,} of {self.size:,} bytes left out; {where}]".encode()
        edges = [readable(bytes(self.begun[:EDGE])), note, readable(self._end)]
        failed = re.search(rb'"isError"\s*:\s*true', self._end[-200:]) is not None
        content = [{"type": "text", "text": b"\n\n".join(edges).decode(errors="replace")}]
        return {"content": content, "isError": failed, "resultType": "complete"}

    def discard(self) -> None:
        """Forget what was kept."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                os.unlink(self._path)
                file.close()


def readable(text: bytes) -> bytes:
    """A piece of JSON with its strings as they are meant, but for what stands in hexadecimal."""
    return ESCAPE.sub(lambda found: ESCAPED.get(found[1], found[0]), text)
