"""The end of a stored turn: what it changed, which tests passed, and the checks of a task that follow from these."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from crow_core.messages.message import Message, find_turns, list_edits
from crow_core.messages.passes import drop_rewound

from crow_eval.lessons.call_signals import Use, add_result, get_text, make_use

TEST_COMMAND = re.compile(
    r"(?:uv run |poetry run |npx |pnpm |yarn |bun |bundle exec |python3? -m )?"
    r"(?:pytest|unittest|tox|nox|ruff|mypy|pyright|jest|vitest|eslint|tsc|rspec|ctest|(?:run )?(?:test|lint|check)\b"
    r"|npm (?:run )?(?:test|lint)|cargo (?:test|clippy|check)|go (?:test|vet)|(?:make|just) (?:test|check|lint)"
    r"|mvn test|gradle test|\./gradlew test)"
)
"""The beginning of a command that tests the work."""
SHELL_SYNTAX = re.compile(r"[;|&<>$`\n\\]")
"""Parts that a proposed command must not have: it would do more than run a test."""
CHANGE_FOLDER = re.compile(r"cd (?P<folder>\"[^\"]+\"|'[^']+'|[^\s;&|]+) *&& *")
MAX_COMMANDS = 3
MIN_LINE_LENGTH = 8
"""Characters of a line that a check looks for."""


@dataclass
class SessionEnd:
    """The state that a turn left behind. Paths are relative to the workspace of the task."""

    before: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    """The texts of the changed files at the start; None for a file that was not there."""
    after: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    """Their texts at the end; None for a file that was removed."""
    changed: list[str] = field(default_factory=list[str])
    """The files that the turn itself has changed."""
    commands: list[str] = field(default_factory=list[str])
    """The tests that passed last, as they run in the workspace."""
    answer: str = ""
    left_out: list[str] = field(default_factory=list[str])
    """Changed files whose texts are not stored, or that are outside of the workspace."""


def find_end(log: Sequence[Message], turn: int, root: str, folder: str) -> SessionEnd:
    """Return the end of a turn, by its number from 1.

    `root` is the folder that the workspace is a copy of, `folder` the one in it in which commands run, relative to it.
    """
    entries = drop_rewound(log)
    turns = [*find_turns(entries), len(entries)]
    end = SessionEnd()
    for at, entry in enumerate(entries[: turns[turn]]):
        for edit in list_edits(entry):
            path = os.path.relpath(str(edit.get("path", "")), os.path.realpath(root))
            if path.startswith("..") or "new" not in edit or "old" not in edit:
                end.left_out.append(str(edit.get("path", "")))
                continue
            path = PurePath(path).as_posix()
            end.before.setdefault(path, edit["old"])
            end.after[path] = edit["new"]
            if at >= turns[turn - 1] and path not in end.changed:
                end.changed.append(path)
    last = entries[turns[turn - 1] : turns[turn]]
    end.commands = find_test_commands(last, root, folder)
    answers = [entry for entry in last if entry.get("role") == "assistant" and not entry.get("tool_calls")]
    end.answer = get_text(answers[-1]) if answers else ""
    return end


def find_test_commands(entries: Sequence[Message], root: str, folder: str) -> list[str]:
    """List the tests that passed when they were run last, as they run in the workspace."""
    uses: dict[str, Use] = {}
    passed: dict[str, bool] = {}
    for entry in entries:
        uses |= {call["id"]: make_use(call) for call in entry.get("tool_calls", [])}
        if (use := uses.get(entry.get("tool_call_id", ""))) and use.command:
            add_result(use, entry)
            if command := to_workspace_command(use.command, root, folder):
                passed.pop(command, None)
                passed[command] = not use.failed
    return [command for command, has_passed in passed.items() if has_passed][-MAX_COMMANDS:]


def to_workspace_command(command: str, root: str, folder: str) -> str:
    """Convert a command line to one that runs in the workspace; "" if it is not a single test, or names the folder."""
    if found := CHANGE_FOLDER.match(command):
        folder = os.path.relpath(os.path.join(root, folder, *shlex.split(found["folder"])), root)
        command = command[found.end() :]
    if folder.startswith("..") or SHELL_SYNTAX.search(command) or root in command or not TEST_COMMAND.match(command):
        return ""
    return command if folder in ("", ".") else f"cd {shlex.quote(PurePath(folder).as_posix())} && {command}"


def propose_checks(end: SessionEnd) -> Iterator[dict[str, Any]]:
    """Yield the checks that follow from an end: its tests, and its files."""
    for command in end.commands:
        yield {"kind": "command", "run": command}
    for path in end.changed:
        before, after = end.before[path], end.after[path]
        if after is None:
            yield {"kind": "file", "path": path, "absent": True}
        elif before is None:
            yield {"kind": "file", "path": path, "exists": True}
        elif line := find_new_line(before, after):
            yield {"kind": "file", "path": path, "contains": line}


def find_new_line(before: str, after: str) -> str:
    """Return the longest line that a text has and an earlier one has not; "" if it is short."""
    lines = {line.strip() for line in after.splitlines()} - {line.strip() for line in before.splitlines()}
    longest = max(lines, key=lambda line: (len(line), line), default="")
    return longest if len(longest) >= MIN_LINE_LENGTH else ""


def write_end(end: SessionEnd, folder: Path, *, has_start: bool) -> None:
    """Write the end of a turn as the reference solution of a task, and the start of its files unless the task has one.
    Raises OSError."""
    write_texts(end.after, folder / "solution")
    removed = [path for path, text in end.after.items() if text is None]
    if removed:
        (folder / "solution").mkdir(exist_ok=True)
        lines = [f"rm -f -- {shlex.quote(path)}\n" for path in removed]
        (folder / "solution" / "run.sh").write_text("".join(lines), "utf-8")
    if end.answer and (folder / "solution").is_dir():
        (folder / "solution" / "answer.txt").write_text(end.answer, "utf-8")
    if not has_start:
        write_texts(end.before, folder / "files")


def write_texts(texts: dict[str, str | None], folder: Path) -> None:
    """Write the texts of files below a folder, which is made for the first one."""
    for path, text in texts.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(text.encode("utf-8", "surrogatepass"))


def write_check(check: dict[str, Any]) -> str:
    """Write a check as a table of TOML."""
    return "\n".join(["[[checks]]", *(f"{key} = {json.dumps(value)}" for key, value in check.items())]) + "\n"
