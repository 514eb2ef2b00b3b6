"""A terminal in which `crow` runs, for tests."""

import asyncio
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

assert sys.platform != "win32"

COLOURS = re.compile(rb"\x1b\[[0-9;]*m")


class Screen:
    """A person at a terminal in which `crow` runs."""

    def __init__(self, main: int) -> None:
        self.main = main
        self.seen = bytearray()
        """All that was written to it, without colours."""
        self._changed = asyncio.Event()

    def read(self) -> None:
        try:
            self.seen[:] = COLOURS.sub(b"", self.seen + os.read(self.main, 65536))
        except OSError:
            asyncio.get_running_loop().remove_reader(self.main)
        self._changed.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text.encode() not in self.seen:
                await self.change()

    async def change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    async def type_until(self, text: str, shown: str) -> None:
        """Type a text again and again: a question takes keys after a pause, and says so of one that came too early."""
        async with asyncio.timeout(60):
            while shown.encode() not in self.seen:
                begun = len(self.seen)
                self.type(text)
                with suppress(TimeoutError):
                    async with asyncio.timeout(10) as patience:
                        while shown.encode() not in self.seen:
                            await self.change()
                            if b"stop typing" in self.seen[begun:]:  # the program has the key
                                patience.reschedule(min(patience.when() or 0, asyncio.get_running_loop().time() + 2))


@asynccontextmanager
async def open_screen(machine: "Machine", *args: str, term: str = "xterm-256color") -> AsyncGenerator[Screen]:
    """Start `crow` in a terminal of 80 columns; at the end, leave it by its keys, unless it has ended."""
    machine.env["TERM"] = term
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = await machine.start_on(terminal, *args)
    screen = Screen(main)
    asyncio.get_running_loop().add_reader(main, screen.read)
    try:
        yield screen
        with suppress(OSError):
            screen.type("\x03\x03")
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        assert b"Traceback" not in screen.seen
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(main)
        os.close(main)
