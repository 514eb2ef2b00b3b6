"""Record what a client and an agent write to each other, without changing it."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from errno import ENOTSUP
from pathlib import Path
from typing import NoReturn

from crow_acp_tools.recording.file import Side, create_file, encode_entry, encode_line

CHUNK = 1 << 16
MAX_BUFFERED_BYTES = 16 * 1024 * 1024
"""Bytes of an unfinished line that are kept in memory; a longer line is recorded in parts."""


def record(command: tuple[str, ...], file: Path) -> NoReturn:
    """Replace this process by the agent, with a recorder on its standard input and output. Raises OSError.

    Signals, exit code and process group are thus the agent's own. The recorder is a separate process, which ends when
    the agent has closed its output and its input. If the file exists, the new one gets a number.
    """
    if sys.platform == "win32":
        raise OSError(ENOTSUP, "recording needs the processes of Linux or macOS")
    recording = create_file(file)
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    header = {"recording": 1, "started": started, "command": list(command), "cwd": os.getcwd()}
    os.write(recording, encode_entry(header))
    agent_reads, we_write = os.pipe()
    we_read, agent_writes = os.pipe()
    if (child := os.fork()) == 0:
        if os.fork() == 0:  # forked twice, so that the recorder is no child of the agent
            os.close(agent_reads)
            os.close(agent_writes)
            run_recorder(RecordingWriter(recording), we_read, we_write)
        os._exit(0)
    os.waitpid(child, 0)
    os.dup2(agent_reads, 0)
    os.dup2(agent_writes, 1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and the agent would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)


def run_recorder(writer: "RecordingWriter", from_agent: int, to_agent: int) -> NoReturn:
    """Forward bytes in both directions until the agent has ended, then end this process."""
    assert sys.platform != "win32"
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)  # the agent handles these
        input_thread = threading.Thread(target=forward, args=(writer, "client", 0, to_agent), daemon=True)
        input_thread.start()
        forward(writer, "agent", from_agent, 1)
        input_closed = select.poll()
        input_closed.register(to_agent, 0)
        while input_thread.is_alive() and not input_closed.poll(100):  # the agent may read after it closed its output
            pass
    finally:
        os._exit(0)


def forward(writer: "RecordingWriter", side: Side, source: int, sink: int) -> None:
    """Forward what one side writes, at once and after recording it. When one end closes, close the other."""
    begun = bytearray()
    with suppress(OSError):
        while chunk := os.read(source, CHUNK):
            begun += chunk
            if b"\n" in chunk:
                *whole, begun = begun.split(b"\n")
                writer.add(side, whole)
            elif len(begun) > MAX_BUFFERED_BYTES:
                writer.add(side, [begun], is_open=True)
                begun = bytearray()
            while chunk:
                chunk = chunk[os.write(sink, chunk) :]
    if begun:
        writer.add(side, [begun], is_open=True)
    writer.end(side)
    os.close(sink)
    os.close(source)


class RecordingWriter:
    """Writes the file of a recording, from two threads."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def add(self, side: Side, lines: Sequence[bytearray], *, is_open: bool = False) -> None:
        """Record lines; `is_open` means that no newline followed."""
        more = {"open": True} if is_open else {}
        with self._lock:
            at = round(time.monotonic() - self._began, 6)
            self._write(b"".join(encode_entry({"at": at, "from": side, **encode_line(line), **more}) for line in lines))

    def end(self, side: Side) -> None:
        with self._lock:
            self._write(encode_entry({"at": round(time.monotonic() - self._began, 6), "from": side, "end": True}))

    def _write(self, lines: bytes) -> None:
        try:
            while lines and self._file >= 0:
                lines = lines[os.write(self._file, lines) :]
        except OSError as error:  # the conversation goes on without its recording
            self._file = -1
            with suppress(OSError):
                os.write(2, f"crow: the recording ends here: {error.strerror}.\n".encode())


# Reading
