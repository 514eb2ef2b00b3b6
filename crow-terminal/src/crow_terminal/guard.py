"""A small process that waits for the end of crow, and makes the terminal usable if crow was killed.

The user's shell may print its prompt before this process writes, or after. So the sequences suit both: they insert rows
above the row of the cursor, erase what is below it, and leave the cursor in its text.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO

SCRIPT = r"""
exec 3>&1
mode=$(stty -g <&3)
read -r word <&2
[ "$word" = end ] && exit
cat
sleep 1
[ "$(stty -g <&3)" = "$mode" ] && stty icanon echo isig iexten icrnl ixon <&3
"""
"""Writes its input to the terminal when the pipe ends without the word `end`.

A shell that edits lines then sets its own mode. If the mode is still that of crow later, nobody else sets it back.
"""
MODES = "\x1b[?2026l\x1b[?7h\x1b[?25h\x1b[?2004l\x1b[0m\x1b[23;2t"
"""Shows the cursor, and ends what crow has switched on."""
WAIT = 1.0
"""Seconds to wait for its end."""
TAKEN_BACK = 2.0
"""Seconds within which a shell takes the terminal back from a program that was killed."""


class Guard:
    """The process, which is a shell in a session of its own. There is none where there is no `sh`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._file: IO[bytes] | None = None
        """The file with what the process writes if crow is killed now."""
        self._text = b""
        self._watch: asyncio.Task[None] | None = None
        self._terminal = -1
        self._launcher = 0
        """The id of the process that started crow, until it was killed; 0 where nothing tells."""

    def start(self, terminal: int) -> None:
        """Start the process. `terminal` is the descriptor that it writes to."""
        if os.name != "posix" or not (shell := shutil.which("sh")):
            return
        with suppress(OSError):
            self._file = TemporaryFile(buffering=0)  # noqa: SIM115 # it lives as long as the process
            reading, self._pipe = os.pipe()
            try:
                self._process = subprocess.Popen(
                    [shell, "-c", SCRIPT], stdin=self._file, stdout=terminal, stderr=reading, start_new_session=True
                )
            finally:
                os.close(reading)
            self._store()
            self._terminal, self._launcher = terminal, os.getppid() if sys.platform == "linux" else 0
            self._watch = asyncio.ensure_future(end_with_launcher(terminal))

    def prepare(self, rows: Sequence[str]) -> None:
        """Prepare for a kill: these rows are kept above the cursor, and nothing below it."""
        text = compose_end(rows).encode(errors="replace")
        if text != self._text:
            self._text = text
            self._store()

    def check_launcher(self) -> None:
        """End crow if its launcher was killed. Call it before each write, which would erase the prompt of the shell."""
        if self._launcher and os.getppid() != self._launcher:
            self._launcher = 0
            end_without_launcher(self._terminal)

    def end(self) -> None:
        """End the process without an effect."""
        if self._watch:
            self._watch.cancel()
        if self._process is None:
            return
        with suppress(OSError):  # somebody has killed it
            os.write(self._pipe, b"end\n")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=WAIT)
        os.close(self._pipe)
        if self._file:
            self._file.close()
        self._process = self._file = None

    def _store(self) -> None:
        if self._file and sys.platform != "win32":
            with suppress(OSError):
                os.pwrite(self._file.fileno(), self._text, 0)  # the process reads from the same position
                os.ftruncate(self._file.fileno(), len(self._text))


async def end_with_launcher(terminal: int) -> None:
    """End crow when the program that started it, such as `uv run`, was killed, and a shell has the terminal again.

    Two programs would read its keys otherwise.
    """
    if sys.platform != "linux":
        return  # elsewhere, nothing tells a process that its parent has ended
    try:
        launcher = os.pidfd_open(os.getppid())
    except OSError:  # it is outside this container, or the kernel is older than 5.3
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(launcher, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(launcher)
        os.close(launcher)
    end_without_launcher(terminal)


def end_without_launcher(terminal: int) -> None:
    """End this process as by `kill -9`, so that the guard does its work, once a shell has the terminal again."""
    if sys.platform != "linux":
        return
    end = time.monotonic() + TAKEN_BACK
    while time.monotonic() < end:
        if os.tcgetpgrp(terminal) != os.getpgrp():
            os._exit(1)
        time.sleep(0.002)  # nothing else runs meanwhile: another frame would erase the prompt of the shell


def compose_end(rows: Sequence[str]) -> str:
    """Compose the sequences that insert rows above the row of the cursor, which stays in its text.

    >>> compose_end(["a"]).removeprefix(MODES)
    '\\x1bD\\x1b[1A\\x1b7\\r\\x1b[1La\\x1b[0m\\x1b8\\x1b[1B\\x1b[J'
    """
    count = len(rows)
    if not rows:
        return f"{MODES}\x1b[J"
    scroll = "\x1bD" * count  # makes room at the end of the screen, and keeps the column
    shown = "\r\x1b[1B".join(f"{row}\x1b[0m" for row in rows)
    return f"{MODES}{scroll}\x1b[{count}A\x1b7\r\x1b[{count}L{shown}\x1b8\x1b[{count}B\x1b[J"
