"""The file of a recording: JSON Lines, one for each line that a client or an agent wrote.

The first line describes the recording. Every other line is `{"at": seconds, "from": side, "line": text}`, where the
side is `client` or `agent`. `bytes` (base64) replaces `line` where the text is not UTF-8, and `"open": true` is added
where no newline followed. `{"at", "from", "end": true}` marks the end of what one side wrote.
"""

import base64
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

Side = Literal["client", "agent"]
OTHER_SIDE: dict[Side, Side] = {"client": "agent", "agent": "client"}
Message = dict[str, Any]


class FileEntry(msgspec.Struct, rename={"side": "from"}):
    """One line of the file after the first."""

    side: Side
    at: float = 0.0
    line: str | None = None
    bytes: str | None = None
    open: bool = False
    end: bool = False


@dataclass(eq=False)
class RecordedLine:
    """One line of a recording, without its newline."""

    at: float
    """Seconds since the start of the recording."""
    side: Side
    raw: bytes
    message: Message | None
    """None if the line is not a JSON-RPC message."""


def create_file(file: Path) -> int:
    """Create a file and return its descriptor. If the file exists, add a number to the name of the new one."""
    names = chain([file], (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in count(2)))
    for name in names:
        with suppress(FileExistsError):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    raise AssertionError


def encode_entry(entry: dict[str, Any]) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def encode_line(line: bytearray) -> dict[str, str]:
    """Return the part of an entry that holds the text of a line."""
    try:
        return {"line": line.decode()}
    except UnicodeDecodeError:
        return {"bytes": base64.b64encode(line).decode()}


def read_recording(file: Path) -> Iterator[RecordedLine]:
    """Yield the lines of a recording. Raises OSError, and ValueError for a file that is not a recording.

    The last line of the file may be incomplete, as after the recorder was killed; it is skipped.
    """
    begun: dict[Side, bytes] = {"client": b"", "agent": b""}
    with file.open("rb") as lines:
        header = lines.readline()
        if b'"recording"' not in header:
            raise ValueError("it does not begin as a recording does")
        for number, text in enumerate(lines, 2):
            try:
                entry = msgspec.json.decode(text, type=FileEntry)
                raw = base64.b64decode(entry.bytes) if entry.bytes is not None else (entry.line or "").encode()
            except (ValueError, RecursionError) as error:
                if not text.endswith(b"\n"):
                    return
                raise ValueError(f"line {number}: {error}") from error
            begun[entry.side] += raw
            if entry.open or (entry.end and not begun[entry.side]):
                continue
            raw, begun[entry.side] = begun[entry.side], b""
            yield RecordedLine(entry.at, entry.side, raw, parse_message(raw))


def parse_message(raw: bytes) -> Message | None:
    """Parse a JSON-RPC message; return None for anything else."""
    try:
        message: Any = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return None
    return cast("Message", message) if isinstance(message, dict) and "jsonrpc" in message else None
