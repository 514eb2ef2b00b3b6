"""Runs a program on a pseudo-terminal, and keeps what its screen shows."""

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyte
from crow_terminal.live import SPINNER
from pyte.screens import Char

PATIENCE = 180.0
"""Seconds after which a screen that does not come is an error."""
LONGEST = 0.4
"""Seconds that a frame is shown at most while the screen waits for the model or a command."""
END_OF_FRAME = b"\x1b[?2026l"
HISTORY = 10_000
"""Rows that are kept above the screen."""
SPINNING = re.compile(f"^[{SPINNER}].*$", re.M)


class Screen(pyte.HistoryScreen):
    """A screen that keeps the attribute *dim* too, in place of *blink*, which crow does not use."""

    def select_graphic_rendition(self, *attrs: int) -> None:
        kept, rest = list[int](), list(attrs)
        while rest:
            if rest[0] in (38, 48):  # a colour: 5 and its number, or 2 and its parts
                size = 5 if rest[1:2] == [2] else 3
                kept, rest = kept + rest[:size], rest[size:]
            else:
                kept += {2: (5,), 22: (22, 25)}.get(rest[0], (rest[0],))
                rest = rest[1:]
        super().select_graphic_rendition(*kept)


Row = tuple[Char, ...]


class Frame(NamedTuple):
    """A screen of the recording, and how long it is shown."""

    rows: tuple[Row, ...]
    cursor: tuple[int, int] | None
    """Its column and row; None while it is hidden."""
    seconds: float


def is_spinner(row: Row) -> bool:
    return row[0].data in SPINNER


def open_terminal(columns: int, rows: int) -> tuple[int, int]:
    """Open a pseudo-terminal of this size, and return both its ends."""
    assert sys.platform != "win32"  # it has none of this kind
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    return main, terminal


class Recorder:
    """A program on a pseudo-terminal, whose screens are kept."""

    def __init__(self, command: Sequence[str], folder: Path, env: dict[str, str], columns: int, rows: int) -> None:
        self.screen = Screen(columns, rows, history=HISTORY, ratio=0.001)
        self.stream = pyte.ByteStream(self.screen)
        self.frames: list[Frame] = []
        self._buffer = b""
        self._main, terminal = open_terminal(columns, rows)
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=env, start_new_session=True
        )
        os.close(terminal)
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._main, self._read)
        self._step = 0.0

    def _read(self) -> None:
        try:
            self._buffer += os.read(self._main, 65536)
        except OSError:
            asyncio.get_running_loop().remove_reader(self._main)
        while END_OF_FRAME in self._buffer:
            frame, _, self._buffer = self._buffer.partition(END_OF_FRAME)
            self.stream.feed(frame)
            if self._step:
                self.keep(self._step)
        if b"\x1b[?2026h" not in self._buffer:
            self.stream.feed(self._buffer)
            self._buffer = b""
        self._changed.set()

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def look(self) -> Frame:
        """Return the screen as it is now."""
        screen = self.screen
        rows = tuple(tuple(screen.buffer[y][x] for x in range(screen.columns)) for y in range(screen.lines))
        return Frame(rows, None if screen.cursor.hidden else (screen.cursor.x, screen.cursor.y), 0.0)

    def keep(self, seconds: float) -> None:
        """Keep the screen as it is now; if only the spinner has moved, the last frame is shown longer instead."""
        rows, cursor, _ = self.look()
        last = self.frames[-1] if self.frames else None
        if last and all(
            one == other or (is_spinner(one) and is_spinner(other)) for one, other in zip(last.rows, rows, strict=True)
        ):
            self.frames[-1] = Frame(rows, cursor, min(last.seconds + seconds, max(last.seconds, seconds, LONGEST)))
        else:
            self.frames.append(Frame(rows, cursor, seconds))

    async def until(
        self, condition: str | Callable[[str], bool], *, hold: float = 0.0, step: float = 0.0, name: str = ""
    ) -> None:
        """Wait until the screen shows a text, and keep it for `hold` seconds; frames before it for `step` seconds.

        `name` says in an error what the condition is.
        """
        self._step = step
        try:
            async with asyncio.timeout(PATIENCE):
                while not (condition in self.text if isinstance(condition, str) else condition(self.text)):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"The screen never showed {name or condition!r}. It shows:\n{self.text}") from None
        finally:
            self._step = 0.0
        if hold:
            self.keep(hold)

    async def settle(self, seconds: float) -> None:
        """Wait until nothing has changed for some seconds, but for the spinner."""
        shown = ""
        while shown != (shown := SPINNING.sub("", self.text)):
            await asyncio.sleep(seconds)

    async def type(self, text: str, seconds: float = 0.05) -> None:
        """Type a text, a character each time the screen shows the one before it."""
        typed = ""
        for letter in text:
            self.press(letter)
            typed += letter
            await self.until(lambda shown, typed=typed: typed.rstrip() in shown, hold=seconds)

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    async def answer(self, keys: str, step: float = 0.0) -> None:
        """Press keys once the question that is shown takes them, and wait until it is answered."""
        await self.until(" or ↑↓ Enter", step=step)
        self.press(keys)
        await self.until(lambda shown: " or ↑↓ Enter" not in shown, step=step)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._main)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)
