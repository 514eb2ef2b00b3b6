"""Edit the prompt in the user's own editor."""

import asyncio
import os
import subprocess
import tempfile
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
