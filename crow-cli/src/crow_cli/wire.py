"""The wire between any client and any agent: written down by `crow acp record`, shown and played by `crow acp replay`.

A recording is a text of JSON lines. The first says what was recorded; each other one is a line that was said, as
`{"at": seconds, "from": "client" or "agent", "line": its text}`, with `bytes` (base64) in place of `line` where it is
not UTF-8, and `"open": true` where no newline followed. `{"at", "from", "end": true}` is the end of what one side said.
"""

import base64
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import msgspec

Side = Literal["client", "agent"]
Message = dict[str, Any]

CHUNK = 1 << 16
LONGEST = 16 * 1024 * 1024
"""Bytes of a line that are held back; a longer one is written down in parts."""


# Recording


def record(command: tuple[str, ...], file: Path) -> NoReturn:
    """Become the agent, with a recorder on its standard input and output. Raises OSError.

    This process is the agent from here on, so that signals, exit code and process group are its own. The recorder is a
    process apart, and ends when the agent's output and input have. Where there is such a file, another gets a number.
    """
    log = create(file)
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    os.write(log, jot({"recording": 1, "started": started, "command": list(command), "cwd": os.getcwd()}))
    agent_reads, we_write = os.pipe()
    we_read, agent_writes = os.pipe()
    if (child := os.fork()) == 0:
        if os.fork() == 0:  # apart: nobody's child, in no group that is ended together
            os.close(agent_reads)
            os.close(agent_writes)
            run_recorder(Log(log), we_read, we_write)
        os._exit(0)
    os.waitpid(child, 0)
    os.dup2(agent_reads, 0)
    os.dup2(agent_writes, 1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and what is ignored stays so
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


def run_recorder(log: "Log", from_agent: int, to_agent: int) -> NoReturn:
    """Carry bytes both ways until the agent is done, and end this process."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # these are for the agent
        asking = threading.Thread(target=carry, args=(log, "client", 0, to_agent), daemon=True)
        asking.start()
        carry(log, "agent", from_agent, 1)
        gone = select.poll()
        gone.register(to_agent, 0)
        while asking.is_alive() and not gone.poll(100):  # the agent may listen when it no longer speaks
            pass
    finally:
        os._exit(0)


def carry(log: "Log", side: Side, source: int, sink: int) -> None:
    """Hand on what one side says, as it comes and after it is written down; where one end closes, so does the other."""
    begun = bytearray()
    with suppress(OSError):
        while chunk := os.read(source, CHUNK):
            begun += chunk
            if b"\n" in chunk:
                *whole, begun = begun.split(b"\n")
                log.add(side, whole)
            elif len(begun) > LONGEST:
                log.add(side, [begun], open=True)
                begun = bytearray()
            while chunk:
                chunk = chunk[os.write(sink, chunk) :]
    if begun:
        log.add(side, [begun], open=True)
    log.end(side)
    os.close(sink)
    os.close(source)


class Log:
    """The file of a recording, which two threads write."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def add(self, side: Side, lines: Sequence[bytearray], *, open: bool = False) -> None:
        more = {"open": True} if open else {}
        with self._lock:
            at = round(time.monotonic() - self._began, 6)
            self._write(b"".join(jot({"at": at, "from": side, **said(line), **more}) for line in lines))

    def end(self, side: Side) -> None:
        with self._lock:
            self._write(jot({"at": round(time.monotonic() - self._began, 6), "from": side, "end": True}))

    def _write(self, lines: bytes) -> None:
        try:
            while lines and self._file >= 0:
                lines = lines[os.write(self._file, lines) :]
        except OSError as error:  # the conversation matters more than its recording
            self._file = -1
            with suppress(OSError):
                os.write(2, f"crow: the recording ends here: {error.strerror}.\n".encode())


def jot(entry: dict[str, Any]) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def said(line: bytearray) -> dict[str, str]:
    try:
        return {"line": line.decode()}
    except UnicodeDecodeError:
        return {"bytes": base64.b64encode(line).decode()}


def create(file: Path) -> int:
    """A new file, open to be written; with a number behind its name if there is one of that name."""
    names = chain([file], (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in count(2)))
    for name in names:
        with suppress(FileExistsError):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    raise AssertionError


# Reading


@dataclass(eq=False)
class Said:
    """One line of a recording."""

    at: float
    side: Side
    raw: bytes
    message: Message | None
    """None: it is no JSON-RPC message."""


class Entry(msgspec.Struct, rename={"side": "from"}):
    """How a line stands in the file."""

    side: Side
    at: float = 0.0
    line: str | None = None
    bytes: str | None = None
    open: bool = False
    end: bool = False


def read(file: Path) -> Iterator[Said]:
    """The lines of a recording. Raises OSError, and ValueError for what is none.

    The last line of a file may be cut where its recorder was killed.
    """
    begun: dict[Side, bytes] = {"client": b"", "agent": b""}
    with file.open("rb") as lines:
        header = lines.readline()
        if b'"recording"' not in header:
            raise ValueError("it does not begin as a recording does")
        for number, text in enumerate(lines, 2):
            try:
                entry = msgspec.json.decode(text, type=Entry)
                raw = base64.b64decode(entry.bytes) if entry.bytes is not None else (entry.line or "").encode()
            except (ValueError, RecursionError) as error:
                if not text.endswith(b"\n"):
                    return
                raise ValueError(f"line {number}: {error}") from error
            begun[entry.side] += raw
            if entry.open or (entry.end and not begun[entry.side]):
                continue
            raw, begun[entry.side] = begun[entry.side], b""
            yield Said(entry.at, entry.side, raw, message_of(raw))


def message_of(raw: bytes) -> Message | None:
    try:
        message: Any = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return None
    return cast("Message", message) if isinstance(message, dict) and "jsonrpc" in message else None
