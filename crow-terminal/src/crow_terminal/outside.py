"""Programs that take the place of the terminal's rows until they end: the user's own editor, and a log-in."""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import crow_system as system
from prompt_toolkit.application import in_terminal

DEFAULT_EDITOR = "notepad" if system.WINDOWS else "vi"


async def edit(text: str) -> str | None:
    """Open the editor that VISUAL or EDITOR names, and return the new text; None if that fails."""
    command = system.split_command(os.environ.get("VISUAL") or os.environ.get("EDITOR") or DEFAULT_EDITOR)
    with tempfile.TemporaryDirectory(prefix="crow-prompt-") as folder:
        path = Path(folder, "prompt.md")
        await asyncio.to_thread(path.write_text, text, "utf-8")
        async with in_terminal():
            try:
                done = await asyncio.to_thread(subprocess.run, [*command, str(path)], check=False)
            except OSError:
                return None
        if done.returncode != 0:
            return None
        return (await asyncio.to_thread(path.read_text, "utf-8", "replace")).rstrip("\n")


def ignore_signal(number: int, frame: object) -> None:
    """Ignore a signal. A program would inherit SIG_IGN."""


async def run(command: Sequence[str], folder: str, env: Mapping[str, str]) -> None:
    """Run a program that asks the user. Ctrl-C is for the program alone."""
    async with in_terminal():
        former = signal.signal(signal.SIGINT, ignore_signal)
        try:
            with suppress(OSError):  # what is missing then is told once more
                await asyncio.to_thread(subprocess.run, command, cwd=folder, env=env, check=False)
        finally:
            signal.signal(signal.SIGINT, former)
