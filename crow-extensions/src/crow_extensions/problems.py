"""Run commands that look for problems in files, such as linters, and compare what they print before and after an edit.

Positions do not count in the comparison, because an edit moves the lines below it.
"""

import asyncio
import json
import os
import re
import shlex
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from crow_core.masking import mask
from crow_core.text import to_line
from crow_system.shortening import shorten_line

from crow_extensions.diagnostic_settings import Diagnostics
from crow_extensions.shell import start_command

READY = {
    "ruff": "ruff check --output-format json --force-exclude -- {file}",
    "pyright": "pyright --outputjson",
    "tsc": "tsc --noEmit --pretty false",
    "eslint": "eslint --format json -- {file}",
    "cargo check": "cargo check --quiet --message-format short",
}
"""Commands by the names under which the settings may name them."""
OUTPUT_LIMIT = 2_000_000
"""Bytes that a command may print."""
SHOWN, LINE_LENGTH = 20, 300
"""New problems that the model is shown, and characters of each."""
POSITION = re.compile(r"(?<=\w)[:(]\d+(?:[:,]\d+)*\)?(?=[:\s]|$)")
"""Matches the line and the column in a line of a linter, such as `:3:14` or `(3,14)`."""
NOT_FOUND = (126, 127, 9009)
"""Exit codes of a shell that finds no such program."""

Problems = Mapping[str, list[str]]
"""Lines to show, by the same without positions."""


class NotChecked(Exception):
    """A command has no usable answer; the text is a sentence."""


class Checks:
    """The problems in a folder that are known in a turn."""

    def __init__(self, diagnostics: Diagnostics, cwd: str) -> None:
        self.settings, self.cwd = diagnostics, os.path.realpath(cwd)
        self.known: dict[str, Problems] = {}
        """The last problems of each command."""
        self.failed: dict[str, str] = {}
        """Sentences about the commands that this turn does without."""
        self.running = asyncio.Lock()

    def forget(self) -> None:
        """Forget what the commands found: something else than an edit may have changed files."""
        self.known.clear()

    async def look(self, path: str) -> None:
        """Find out which problems there are before an edit of a file."""
        async with self.running:
            wanted = {line: name for line, name in self.list_commands(path).items() if line not in self.known}
            self.known |= await self.run(wanted)

    async def compare(self, path: str, secrets: Collection[str]) -> str:
        """Describe the problems that are new since the last look, for the model; "" if there are none."""
        async with self.running:
            wanted = {line: name for line, name in self.list_commands(path).items() if line in self.known}
            texts: list[str] = []
            for line, found in (await self.run(wanted)).items():
                if new := list_new(self.known[line], found):
                    texts.append(describe(wanted[line], new))
                self.known[line] = found
        return mask("\n\n".join(texts), secrets)

    def list_commands(self, path: str) -> dict[str, str]:
        """List the command lines for a file, each with the command of the settings that it is made of."""
        file = os.path.relpath(os.path.realpath(os.path.join(self.cwd, path)), self.cwd).replace(os.sep, "/")
        if file.startswith("../"):
            return {}
        names = [
            command
            for pattern, commands in self.settings.commands.items()
            if fnmatchcase(file if "/" in pattern else Path(file).name, pattern)
            for command in commands
        ]
        argument = shlex.quote(f"./{file}" if file.startswith("-") else file)
        return {READY.get(name, name).replace("{file}", argument): name for name in names if name not in self.failed}

    async def run(self, wanted: Mapping[str, str]) -> dict[str, Problems]:
        """Run commands at the same time, and return what they found. One that fails is noted."""
        found: dict[str, Problems] = {}

        async def run_one(line: str, name: str) -> None:
            try:
                found[line] = read_problems(*await self.get_output(line), self.cwd)
            except (NotChecked, OSError) as error:
                said = shorten_line(to_line(str(error)), LINE_LENGTH)
                self.failed[name] = f"[diagnostics] `{to_line(name)}` {said}. This turn goes on without it."

        async with asyncio.TaskGroup() as group:
            for line, name in wanted.items():
                group.create_task(run_one(line, name))
        return found

    async def get_output(self, line: str) -> tuple[int, str]:
        """Run a command line; return its exit code and what it printed. Raises NotChecked and OSError."""
        settings, printed = self.settings, bytearray()
        more = {"PATH": os.pathsep.join([*settings.programs, os.environ.get("PATH", os.defpath)])}
        try:
            async with (
                asyncio.timeout(settings.timeout),
                start_command(line, self.cwd, PIPE, hidden=settings.hidden, more=more, limit=settings.limit) as process,
            ):
                assert process.stdout
                while chunk := await process.stdout.read(1 << 16):
                    printed += chunk
                    if len(printed) > OUTPUT_LIMIT:
                        raise NotChecked(f"printed more than {OUTPUT_LIMIT:,} bytes")
                return await process.wait(), printed.decode(errors="replace")
        except TimeoutError:
            raise NotChecked(f"took more than {settings.timeout:g} seconds") from None


def read_problems(code: int, output: str, cwd: str) -> Problems:
    """Read what a command printed: the JSON of ruff, pyright and eslint, or lines with positions. Raises NotChecked."""
    problems: dict[str, list[str]] = {}
    for line in list_problems(output):
        shown = line.replace(f"{cwd}{os.sep}", "")
        problems.setdefault(POSITION.sub("", shown), []).append(shown)
    if code in NOT_FOUND:
        raise NotChecked("is not installed, or cannot be run")
    if code and not problems:
        said = output.strip().rpartition("\n")[2]
        raise NotChecked(f"failed with exit code {code}{f': {said}' if said else ''}")
    return problems


def list_problems(output: str) -> Iterator[str]:
    """Yield a line for each problem that a command printed."""
    if begin := re.search(r"^[\[{]", output, re.MULTILINE):
        try:
            data, _ = json.JSONDecoder().raw_decode(output, begin.start())
        except (ValueError, RecursionError):
            pass
        else:
            yield from walk_json(data, "")
            return
    for line in map(str.strip, output.splitlines()):
        if POSITION.search(line):
            yield line


def walk_json(data: Any, file: str) -> Iterator[str]:
    """Yield a line for each problem in JSON."""
    match data:
        case {"message": str(message), "filename": str(file), "location": {"row": row, "column": column}}:  # ruff
            yield f"{file}:{row}:{column}: {data.get('code') or 'error'} {message}"
        case {"message": str(message), "file": str(file), "range": {"start": {"line": int(line)}}}:  # pyright
            rule = f" ({rule})" if (rule := data.get("rule")) else ""
            yield f"{file}:{line + 1}: {data.get('severity', 'error')}: {message}{rule}"
        case {"message": str(message), "line": line} if file:  # eslint
            yield f"{file}:{line}: {message} ({data.get('ruleId')})"
        case {"filePath": str(path), "messages": list()}:
            yield from walk_json(data["messages"], path)
        case {"generalDiagnostics": list()}:
            yield from walk_json(data["generalDiagnostics"], "")
        case list():
            for one in cast(list[Any], data):
                yield from walk_json(one, file)
        case _:
            pass


def list_new(before: Problems, after: Problems) -> list[str]:
    """List the problems that occur more often than before."""
    counts = Counter({key: len(lines) for key, lines in before.items()})
    return [line for key, lines in after.items() for line in lines[counts[key] :]]


def describe(command: str, new: list[str]) -> str:
    """Describe new problems to the model."""
    lines = [shorten_line(to_line(line), LINE_LENGTH) for line in new[:SHOWN]]
    more = [f"… and {len(new) - SHOWN:,} more"] if len(new) > SHOWN else []
    return "\n".join([f"New since this edit, says `{to_line(command)}`:", *(f"- {line}" for line in lines), *more])
