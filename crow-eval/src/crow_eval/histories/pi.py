"""pi: a file of JSON lines for each session, `~/.pi/agent/sessions/FOLDER/TIME_ID.jsonl`.

The first line is the session, the others form a tree by `parentId`. The path to the last line is read; the branches
that the user has left are counted.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crow_eval.histories.history import (
    LEFT,
    ForeignSession,
    find_path,
    get_dict,
    get_list,
    make_reply,
    make_use,
    read_files,
    read_lines,
    to_time,
)

DEFAULT = ".pi/agent/sessions"
"""The place below the home folder where pi keeps its sessions."""


def read(path: Path) -> Iterator[ForeignSession]:
    """Read the sessions of a file, or of all files below a folder. Raises OSError."""
    yield from read_files(path, "*.jsonl", read_file)


def read_file(file: Path) -> Iterator[ForeignSession]:
    """Read a file. Raises OSError."""
    session = ForeignSession("pi", file.stem, file)
    lines: list[Mapping[str, Any]] = []
    for line in read_lines(file, session.left_out):
        if line.get("type") == "session":
            session.id, session.cwd = str(line.get("id") or session.id), str(line.get("cwd") or "")
        else:
            lines.append(line)
    for line in select_path(lines, session):
        message, at = get_dict(line, "message"), to_time(line.get("timestamp"))
        match line.get("type"), message.get("role"):
            case "message", "user":
                session.add_prompt(at, message.get("content"))
            case "message", "assistant":
                session.model = session.model or str(message.get("model") or "")
                add_reply(session, at, message)
            case "message", "toolResult":
                failed = bool(message.get("isError"))
                session.add_result(at, str(message.get("toolCallId")), message.get("content"), failed=failed)
            case "session_info", _:
                session.title = str(line.get("name") or session.title)
            case "message", role:
                session.left_out[f"messages of {role}"] += 1
            case kind, _:
                session.left_out[f"lines of type {kind}"] += 1
    yield session


def select_path(lines: list[Mapping[str, Any]], session: ForeignSession) -> list[Mapping[str, Any]]:
    """Return the lines from the first to the last one; all of them where they form no tree, as in earlier files."""
    if not any(isinstance(line.get("id"), str) for line in lines):
        return lines
    path = find_path(lines, len(lines) - 1, lambda at: lines[at].get("id"), lambda at: lines[at].get("parentId", ""))
    if left := sum(line.get("type") == "message" for at, line in enumerate(lines) if at not in path):
        session.left_out[LEFT] += left
    return [lines[at] for at in sorted(path)]


def add_reply(session: ForeignSession, at: int, message: Mapping[str, Any]) -> None:
    text, reasoning, uses = list[str](), list[str](), list[Any]()
    for part in get_list(message, "content"):
        match part:
            case {"type": "text", "text": str(said)}:
                text.append(said)
            case {"type": "thinking", "thinking": str(thought)}:
                reasoning.append(thought)
            case {"type": "toolCall", "id": id, "name": name}:
                uses.append(make_use(id, name, part.get("arguments")))
            case _:
                session.left_out["parts of messages"] += 1
    if text or reasoning or uses:
        session.add(at, make_reply("".join(text), "".join(reasoning), uses))
