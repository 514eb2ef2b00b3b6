"""The pages that show sessions in a browser, which a process of its own serves as long as the terminal runs."""

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from urllib.parse import urlsplit

import crow_system as system

TIMEOUT = 30.0
"""Seconds in which the process has to print its address."""
KEEPER = """
exec 3<&0
"$@" 3<&- & server=$!
exec >/dev/null 2>&1
{ read -r _ <&3; kill "$server"; } &
wait "$server"
kill "$!"
"""
"""Runs the process until it ends, or until the input closes, also because crow was killed."""


class NoPage(Exception):
    """The page cannot be shown; the message is a sentence for the user."""


class PageServer:
    """The process, which is started when a page is opened for the first time."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command` serves the pages. It takes the id of a session as its last word, and prints the address first."""
        self._command = command
        self._process: Process | None = None
        self._address = ""
        self._complaints: asyncio.Task[bytes] | None = None
        """Reads what it says on standard error, which would block it otherwise."""

    async def open(self, session: str, cwd: str) -> str:
        """Open the page of a session in a browser, and return its address. Raises NoPage."""
        if not self._address or self._process is None or self._process.returncode is not None:
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
        shell = None if system.WINDOWS else shutil.which("sh")
        words = [*((shell, "-c", KEEPER, "crow") if shell else ()), *self._command, session]
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *words, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=cwd, start_new_session=True
            )
        except OSError as error:
            raise NoPage(f"{words[0]} cannot be started: {error.strerror}.") from error
        assert process.stdout
        assert process.stderr
        self._complaints = complaints = asyncio.ensure_future(process.stderr.read())
        try:
            async with asyncio.timeout(TIMEOUT):
                if line := (await process.stdout.readline()).decode().strip():
                    return line
                said = (await complaints).decode(errors="replace").strip().removeprefix("crow: ")
        except TimeoutError:
            said = f"The page was not there within {TIMEOUT:g} seconds."
        self.end()
        raise NoPage(said or "The page cannot be shown.")

    def end(self) -> None:
        """End the process."""
        if self._complaints:
            self._complaints.cancel()
        if self._process and self._process.returncode is None:
            assert self._process.stdin
            self._process.stdin.close()
            if system.WINDOWS:
                self._process.terminate()
        self._process = None
