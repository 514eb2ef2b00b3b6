"""Completion of `/` commands and of files behind `@`."""

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from crow_terminal.command_menu import GROUP_END, list_commands, list_values, rank_commands
from crow_terminal.state import State

MENTION = re.compile(r"""(?:^|(?<=\s))@(?:"([^"\n]*)|'([^'\n]*)|((?:[^\s@"'][^\s@]*)?))$""")
MAX_FILES = 50_000
"""Files that are listed."""
MAX_SHOWN = 50
"""Completions that are offered."""
LIST_SECONDS = 5.0
"""Seconds that git may take to list the files."""
FRESH = 10.0
"""Seconds for which a list of files is used again."""
SKIPPED = {".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", "venv", ".tox", "target", "dist", "build"}
"""Folders that are left out where git does not say what to leave out."""


def list_files(folder: str) -> list[str]:
    """List the files of a folder, relative to it: those that git does not ignore, or those outside of SKIPPED."""
    # A repository's own file system monitor is a program: it is not run.
    command = ["git", "-C", folder, "-c", "core.fsmonitor=false", "ls-files", "-coz", "--exclude-standard"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=LIST_SECONDS, stdin=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            names = done.stdout.decode(errors="surrogateescape").split("\0")
            return [name for name in names[:MAX_FILES] if name and name.isprintable()]
    return list(walk(folder))


def walk(folder: str) -> Iterable[str]:
    """Iterate over the files below a folder."""
    count = 0
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if each not in SKIPPED and not each.startswith("."))
        for name in sorted(files):
            path = os.path.relpath(os.path.join(root, name), folder)
            if path.isprintable():
                count += 1
                yield path
            if count >= MAX_FILES:
                return


def find_files(files: Sequence[str], words: str) -> list[str]:
    """Find the files that fit what was typed, the best first: a folder counts as a file."""
    typed = words.lower()
    if not typed:
        return sorted({name.split("/")[0] + "/" if "/" in name else name for name in files})[:MAX_SHOWN]
    pattern = re.compile(".*?".join(map(re.escape, typed)))
    ranked: list[tuple[int, int, str]] = []
    for name in files:
        lower = name.lower()
        base = lower.rpartition("/")[2]
        rank = (
            0 if lower.startswith(typed)
            else 1 if base.startswith(typed)
            else 2 if typed in lower
            else 3 if pattern.search(lower)
            else None
        )  # fmt: skip
        if rank is not None:
            ranked.append((rank, len(name), name))
    return [name for _, _, name in sorted(ranked)[:MAX_SHOWN]]


def quote_name(name: str) -> str:
    """Put quotes around the name of a file that would end too early without, such as one with blanks."""
    if re.fullmatch(r"[^\s\"'`@]+", name):
        return name
    return f"'{name}'" if '"' in name else f'"{name}"'


class ChatCompleter(Completer):
    """Completes commands at the start, and files anywhere."""

    def __init__(self, state: State, get_past: Callable[[], Sequence[str]] = tuple[str]) -> None:
        """`get_past` returns the earlier prompts, oldest first."""
        self._state, self._get_past = state, get_past
        self._files: list[str] = []
        self._folder = ""
        self._listed = -FRESH

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if text.startswith("/") and "\n" not in text:
            yield from self.complete_command(text)

    async def get_completions_async(
        self, document: Document, complete_event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        for completion in self.get_completions(document, complete_event):
            yield completion
        if found := MENTION.search(document.text_before_cursor):
            files = await self.get_files()
            typed = next((group for group in found.groups() if group is not None), "")
            for name in await asyncio.to_thread(find_files, files, typed):
                yield Completion(f"@{quote_name(name)}", -len(found[0].lstrip()), display=f"@{name}")

    def complete_command(self, text: str) -> Iterable[Completion]:
        """Complete the name of a command, or what it takes."""
        typed, space, words = text[1:].partition(" ")
        if space:
            yield from self.complete_argument(typed, words)
            return
        for one in rank_commands(self._state, typed, self._get_past()):
            yield Completion(
                f"/{one.name} " if one.hint else f"/{one.name}",
                -len(text),
                display=f"/{one.name}" + (f" {one.hint}" if one.hint else ""),
                display_meta=one.description if typed else f"{one.group}{GROUP_END}{one.description}",
            )

    def complete_argument(self, name: str, words: str) -> Iterable[Completion]:
        """Complete the values that a command takes; for any other, show what it takes."""
        command = next((one for one in list_commands(self._state) if one.name == name), None)
        if command is None or " " in words:
            return
        rows = list_values(self._state, command)
        for row in rows:
            value = str(row.value)
            if words.lower() in f"{value} {row.label}".lower() and not re.search(r"\s", value):
                label = f"{row.label} " if row.label != value else ""
                yield Completion(value, -len(words), display=value, display_meta=f"{label}{row.detail}".strip())
        if command.hint and not (rows or words):
            yield Completion("", 0, display=command.hint, display_meta=command.description)

    async def get_files(self) -> list[str]:
        """Return the files of the session's folder, listed anew from time to time, in a thread."""
        now = asyncio.get_running_loop().time()
        if self._folder != self._state.folder or now - self._listed > FRESH:
            self._listed, self._folder = now, self._state.folder
            self._files = await asyncio.to_thread(list_files, self._folder)
        return self._files
