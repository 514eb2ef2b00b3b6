"""Transport for an MCP server that is a command, also one that prints junk, answers with 100 MB, or does not end.

It replaces FastMCP's own transport, which takes minutes for such an answer and copies it
several times. That transport also waits for a dead server as long as a process of it is alive. Importing this module
imports FastMCP.
"""

import asyncio
import json
import os
import re
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import anyio
import crow_system as system
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from crow_system.shortening import describe_left_out
from mcp import ClientSession
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter
from typing_extensions import Unpack

from crow_core.acp.transports import CHUNK_BYTES, ByteSource, ChildTransport, spawn
from crow_core.mcp.limit import Limit
from crow_core.mcp.sdk import ClientTransport, SessionKwargs, TransportOptions

LINE_LIMIT = 8 * 1024 * 1024
"""Bytes of a message. A longer one is written to a file and replaced by its beginning and end."""
FILE_LIMIT = 64 * 1024 * 1024
"""Bytes of a long message that are written to the file."""
EDGE_LIMIT = 2_000
"""Bytes of the beginning, and of the end, that replace a long message."""
OUTPUT_LIMIT = 4096
"""Bytes of the output outside of the protocol that are kept."""
GRACE = 0.5
"""Seconds a server may take to end after the end of its input, and again after SIGTERM; also the seconds for which the
output of a dead server is read."""

ID = rb'"id"\s*:\s*(?P<%b>\d{1,18}|"[^"\\]{1,99}")'
VERSION = rb'"jsonrpc"\s*:\s*"2\.0"'
FIELD = rb"(?:%b\s*,\s*)?"
ANSWER_START = re.compile(
    rb"(?:data:)?\s*\{\s*" + FIELD % VERSION + FIELD % (ID % b"id") + FIELD % VERSION + rb'"(?:result|error)"'
)
ANSWER_END = re.compile(rb",\s*%b\s*(?:,\s*%b\s*)?\}\s*$" % (ID % b"id", VERSION))
"""Match the beginning and the end of an answer. JavaScript's servers write the id after the result, others before."""
ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
ESCAPES = {b"n": b"\n", b"r": b"", b"t": b"\t", b'"': b'"', b"\\": b"\\", b"/": b"/"}


class CommandTransport(ClientTransport):
    """Runs a command while a client is connected, and exchanges messages over its standard streams."""

    def __init__(
        self,
        command: str,
        args: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        folder: Callable[[], Path | None],
        limit: Limit | None = None,
    ) -> None:
        self.command = command
        self.args = args
        self.env = env
        """Variables in addition to the few that every server gets."""
        self.cwd = cwd
        self.folder = folder
        """Returns the folder for answers that are too long; None discards them."""
        self.limit = limit
        """Runs it in a sandbox; None runs it as it is."""
        self.recent_output = b""
        """The end of its standard error and of the lines on its standard output that are not messages."""
        self._calls: set[int | str] = set()
        """The ids of the tool calls that are not answered yet."""

    @asynccontextmanager
    async def connect_session(
        self, *, transport_options: TransportOptions | None = None, **session_kwargs: Unpack[SessionKwargs]
    ) -> AsyncGenerator[ClientSession]:
        options = transport_options or TransportOptions()
        env = get_default_environment() | dict(self.env)
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        block = AsyncExitStack()
        starting = asyncio.create_task(self._spawn(env, block))
        tasks: list[asyncio.Task[None]] = []
        try:
            child = await asyncio.shield(starting)
            reading_errors = asyncio.create_task(self._read_errors(child))
            reading = asyncio.create_task(self._read_messages(child.source, incoming))
            writing = asyncio.create_task(self._write_messages(child, outgoing, incoming))
            tasks += [reading_errors, reading, writing, asyncio.create_task(stop_reading_after_exit(child, reading))]
            async with options.session_class(read, write, **session_kwargs) as session:
                yield session
        finally:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([starting])
                if not starting.exception():
                    pid = starting.result().process.pid
                    started = await asyncio.to_thread(system.find_descendants, pid)
                    await starting.result().close()
                    await asyncio.to_thread(system.kill_all, started)
                if tasks:
                    await asyncio.wait(tasks[:1], timeout=GRACE)  # the end of its standard error
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
                if not starting.exception() and (errors := starting.result().errors):
                    errors.close()
                for stream in (incoming, read, write, outgoing):
                    stream.close()
                await block.aclose()

    async def _spawn(self, env: Mapping[str, str], block: AsyncExitStack) -> ChildTransport:
        arguments, setup = [self.command, *self.args], system.make_child_setup()
        if self.limit is not None:
            arguments, env = await block.enter_async_context(self.limit(arguments, env, self.cwd))
        return await spawn(arguments[0], arguments[1:], env, self.cwd, subprocess.PIPE, GRACE, setup)

    async def _read_errors(self, child: ChildTransport) -> None:
        assert child.errors is not None
        while output := await child.errors.read(CHUNK_BYTES):
            self._remember(output)

    def _remember(self, output: bytes) -> None:
        self.recent_output = (self.recent_output + output)[-OUTPUT_LIMIT:]

    async def _read_messages(
        self, source: ByteSource, incoming: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        line = IncomingLine(LINE_LIMIT, self.folder)
        try:
            async with incoming:
                while chunk := await source.read(CHUNK_BYTES):
                    *ends, rest = chunk.split(b"\n")
                    for end in ends:
                        await line.add(end)
                        message, line = self._to_message(line), IncomingLine(LINE_LIMIT, self.folder)
                        if message is not None:
                            await incoming.send(message)
                    await line.add(rest)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):  # the session is closed
            with suppress(OSError):
                while await source.read(CHUNK_BYTES):  # a full pipe would keep the server from ending
                    pass
        except OSError:  # a reset connection is the end of the input
            pass
        finally:
            line.discard()

    def _to_message(self, line: "IncomingLine") -> SessionMessage | Exception | None:
        """Convert a line to a message, or to an exception for the session's log; None for a line to ignore.

        An answer that is too long or invalid becomes its replacement.
        """
        if not line.start.strip():
            return None
        invalid = None
        if not line.is_too_long:
            try:
                message = parse_message(line.start)
            except ValueError as error:
                self._remember(bytes(line.start) + b"\n")
                invalid = error
            else:
                if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
                    self._calls.discard(message.id)
                return SessionMessage(message)
        replacement = line.to_replacement(self._calls)
        return invalid if replacement is None else SessionMessage(replacement)

    async def _write_messages(
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
        except OSError:  # it has closed its input: end the session
            incoming.close()


async def stop_reading_after_exit(child: ChildTransport, reading: "asyncio.Task[None]") -> None:
    """Cancel `reading` soon after the process has exited: its children may hold its standard output open."""
    await asyncio.wait([child.exit])
    await asyncio.wait([reading], timeout=GRACE)
    reading.cancel()


def parse_message(line: bytearray) -> Any:
    """Parse a line as a message; repair its text if necessary. Raises ValueError.

    The adapter is given objects, because it takes six times the memory for the text: it tries each kind of message.
    """
    try:
        return jsonrpc_message_adapter.validate_python(msgspec.json.decode(line), by_name=False)
    except (ValueError, RecursionError):
        return jsonrpc_message_adapter.validate_json(repair_json(line), by_name=False)


def repair_json(line: bytearray) -> str:
    """Replace invalid UTF-8 and unpaired surrogates in a line of JSON. Raises ValueError.

    JavaScript leaves unpaired surrogates where it cuts a text.
    """
    try:
        text = json.dumps(json.loads(line.decode(errors="replace")), ensure_ascii=False)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class IncomingLine:
    """A line that is being received. It is kept in memory up to a limit; beyond it, an answer is written to a file."""

    def __init__(self, limit: int, folder: Callable[[], Path | None]) -> None:
        self.limit = limit
        """Bytes of a line; one with more is too long."""
        self.folder = folder
        """Returns the folder for a line that is too long; None discards it."""
        self.start = bytearray()
        """The whole line, or the beginning of one that is too long."""
        self.size = 0
        """Bytes received."""
        self._end = b""
        """The last bytes of one that is too long."""
        self._file: BinaryIO | None = None
        self._path = ""
        self._escape = b""
        """A backslash at the end of the last piece, whose next byte has not been received."""

    @property
    def is_too_long(self) -> bool:
        return self.size > self.limit

    async def add(self, piece: bytes) -> None:
        """Append a piece. The piece that makes the line too long opens a file if the line looks like an answer."""
        fitted, self.size = not self.is_too_long, self.size + len(piece)
        if not self.is_too_long:
            self.start += piece
            return
        if fitted:
            piece = bytes(self.start) + piece
        try:
            if fitted and ANSWER_START.match(self.start) and (folder := self.folder()) is not None:
                opened, self._path = tempfile.mkstemp(".txt", "answer-", folder)
                self._file = os.fdopen(opened, "wb")
            if self._file is not None:
                await asyncio.to_thread(self._write, self._file, piece)
        except OSError:  # the disk is full: keep only the beginning and the end
            self.discard()
        del self.start[EDGE_LIMIT:]
        self._end = (self._end + piece)[-EDGE_LIMIT:]

    def _write(self, file: BinaryIO, piece: bytes) -> None:
        piece = self._escape + piece
        cut = len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2
        self._escape = piece[cut:]
        file.write(unescape_json(piece[:cut])[: FILE_LIMIT - file.tell()])
        file.flush()

    def to_replacement(self, calls: set[int | str]) -> JSONRPCResponse | JSONRPCError | None:
        """Return the message that replaces a line that is too long or invalid.

        That is a short result for an answer to one of `calls`, an error for an answer to another request, and None for
        any other line.
        """
        if (id := self.find_request_id()) is not None and id in calls and self.is_too_long:
            calls.discard(id)
            return JSONRPCResponse(jsonrpc="2.0", id=id, result=self.to_result())
        self.discard()
        if id is None:
            return None
        what = f"its answer of {self.size:,} bytes is too long" if self.is_too_long else "its answer is not valid"
        return JSONRPCError(jsonrpc="2.0", id=id, error=ErrorData(code=INTERNAL_ERROR, message=what))

    def find_request_id(self) -> int | str | None:
        """Return the id of the request that the line answers, or None if it is not an answer."""
        match = ANSWER_START.match(self.start)
        if match and not match["id"]:
            match = ANSWER_END.search(self._end or self.start)
        return None if match is None else json.loads(match["id"])

    def to_result(self) -> dict[str, Any]:
        """Return the tool result that replaces a long one: its beginning, a note that names the file, and its end."""
        where = "it was not saved"
        if self._file is not None:
            written = self._file.tell()
            self._file.close()
            self._file = None
            what = f"the first {written:,} bytes are" if written >= FILE_LIMIT else "the whole is"
            where = f"{what} in {self._path}, as JSON whose line breaks are real ones"
        note = describe_left_out(self.size - 2 * EDGE_LIMIT, self.size, where, "bytes").encode()
        edges = [unescape_json(bytes(self.start[:EDGE_LIMIT])), note, unescape_json(self._end)]
        failed = re.search(rb'"isError"\s*:\s*true', self._end[-200:]) is not None
        content = [{"type": "text", "text": b"\n\n".join(edges).decode(errors="replace")}]
        return {"content": content, "isError": failed, "resultType": "complete"}

    def discard(self) -> None:
        """Delete the file."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                os.unlink(self._path)
                file.close()


def unescape_json(text: bytes) -> bytes:
    """Replace the escape sequences of JSON in a piece of it, except hexadecimal ones."""
    return ESCAPE.sub(lambda match: ESCAPES.get(match[1], match[0]), text)
