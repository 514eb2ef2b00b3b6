"""The pages that show sessions in a browser, which a process of its own serves as long as the terminal runs."""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import urlsplit

from crow_core.acp.transports import CHUNK_BYTES, ByteSource, ChildTransport, Transport, spawn

TIMEOUT = 30.0
"""Seconds in which the process has to print its address."""


class NoPage(Exception):
    """The page cannot be shown; the message is a sentence for the user."""


class PageServer:
    """The process, which is started when a page is opened for the first time."""

    def __init__(self, command: Sequence[str], serve: Callable[[Transport], Coroutine[Any, Any, None]]) -> None:
        """`command` serves the pages. It takes the id of a session as its last word, prints the address first, and ends
        with its standard input. `serve` is called with its standard streams, over which it speaks ACP then."""
        self._command = command
        self._serve = serve
        self._process: ChildTransport | None = None
        self._address = ""
        self._serving: asyncio.Task[None] | None = None
        self._complaints: asyncio.Task[bytes] | None = None
        """Reads what it says on standard error, which would block it otherwise."""

    async def open(self, session: str, cwd: str) -> str:
        """Open the page of a session in a browser, and return its address. Raises NoPage."""
        if not self._address or self._process is None or self._process.exit.done():
            self._address = await self._start(session, cwd)
        place = urlsplit(self._address)
        folder = place.path.rpartition("/")[0]
        address = place._replace(path=f"{folder}/{session}").geturl()
        # Without TERM, only browsers with a window of their own are used.
        env = {name: value for name, value in os.environ.items() if name != "TERM"}
        words = (sys.executable, "-m", "webbrowser", address)
        await asyncio.create_subprocess_exec(
            *words, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, env=env, start_new_session=True
        )
        return address

    async def _start(self, session: str, cwd: str) -> str:
        program, *words = (*self._command, session)
        try:
            self._process = process = await spawn(program, words, cwd=cwd, stderr=PIPE)
        except OSError as error:
            raise NoPage(f"{program} cannot be started: {error.strerror}.") from error
        assert process.errors
        self._complaints = complaints = asyncio.ensure_future(read_all(process.errors))
        try:
            async with asyncio.timeout(TIMEOUT):
                if line := (await process.readline()).decode().strip():
                    self._serving = asyncio.ensure_future(self._serve(process))
                    return line
                said = (await complaints).decode(errors="replace").strip().removeprefix("crow: ")
        except TimeoutError:
            said = f"The page was not there within {TIMEOUT:g} seconds."
        await self.end()
        raise NoPage(said or "The page cannot be shown.")

    async def end(self) -> None:
        if self._process:
            await self._process.close()
        for task in filter(None, (self._serving, self._complaints)):
            task.cancel()
        self._process = None


async def read_all(source: ByteSource) -> bytes:
    """Read a stream to its end."""
    data = b""
    while chunk := await source.read(CHUNK_BYTES):
        data += chunk
    return data
