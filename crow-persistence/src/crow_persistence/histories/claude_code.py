"""Claude Code: a file of JSON lines for each session, `~/.claude/projects/FOLDER/SESSION.jsonl`.

A line is a message of the Messages API with notes around it; the blocks of one reply are several lines with one id.
Lines of sub-agents (`isSidechain`) become sessions of their own.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from crow_core.messages import Message

from crow_persistence.histories.history import (
    ForeignSession,
    get_dict,
    list_files,
    make_reply,
    make_use,
    read_lines,
    to_text,
    to_time,
)

DEFAULT = ".claude/projects"
"""Where it keeps them, in the home folder."""


def read(path: Path) -> Iterator[ForeignSession]:
    """Read the sessions of a file, or of all files below a folder. Raises OSError."""
    for file in list_files(path, "*.jsonl"):
        yield from read_file(file)


def read_file(file: Path) -> Iterator[ForeignSession]:
    """Read a file: its session, and one for its sub-agents if their lines are in it. Raises OSError."""
    main = ForeignSession("claude-code", file.stem, file)
    side = ForeignSession("claude-code", f"{file.stem}/sub-agents", file, title="Sub-agents")
    replies: dict[str, Message] = {}
    for line in read_lines(file, main.left_out):
        session = side if line.get("isSidechain") else main
        session.cwd = session.cwd or str(line.get("cwd") or "")
        at, message = to_time(line.get("timestamp")), get_dict(line, "message")
        match line.get("type"):
            case "user" if line.get("isMeta") or line.get("isCompactSummary"):
                session.left_out["notes of the program"] += 1
            case "user":
                add_user(session, at, message.get("content"))
            case "assistant":
                session.model = session.model or str(message.get("model") or "")
                add_reply(session, at, message, replies)
            case "summary" | "custom-title" | "ai-title":
                text = line.get("summary") or line.get("customTitle") or line.get("title") or line.get("aiTitle")
                session.title = str(text or session.title)
            case kind:
                session.left_out[f"lines of type {kind}"] += 1
    yield main
    if side.entries:
        yield side


def add_user(session: ForeignSession, at: int, content: Any) -> None:
    """Add a line of the user: words, images, or the results of tool calls."""
    if not isinstance(content, list):
        session.add_text(at, "user", to_text(content))
        return
    parts: list[dict[str, Any]] = []
    for block in cast("list[Any]", content):
        match block:
            case {"type": "tool_result", "tool_use_id": id}:
                content = block.get("content")
                session.add_result(at, str(id), content, failed=bool(block.get("is_error")))
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}:
                parts.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})
            case _:
                session.left_out["parts of messages"] += 1
    if any(part["type"] != "text" for part in parts):
        session.add(at, {"role": "user", "content": parts})
    else:
        session.add_text(at, "user", "\n\n".join(part["text"] for part in parts))


def add_reply(session: ForeignSession, at: int, message: Mapping[str, Any], replies: dict[str, Message]) -> None:
    """Add a line of the assistant to its reply."""
    content = message.get("content")
    blocks: list[Any] = cast("list[Any]", content) if isinstance(content, list) else [{"type": "text", "text": content}]
    text, reasoning, uses = list[str](), list[str](), list[Any]()
    for block in blocks:
        match block:
            case {"type": "text", "text": str(said)}:
                text.append(said)
            case {"type": "thinking", "thinking": str(thought)}:
                reasoning.append(thought)
            case {"type": "tool_use", "id": id, "name": name}:
                uses.append(make_use(id, name, block.get("input")))
            case _:
                session.left_out["parts of messages"] += 1
    if not (text or reasoning or uses):
        return
    more, id = make_reply("".join(text), "".join(reasoning), uses), str(message.get("id") or "")
    if id and (before := replies.get(id)) is not None and session.entries and session.entries[-1][1] is before:
        before["content"] = to_text(before.get("content")) + to_text(more.get("content")) or None
        if said := before.get("reasoning_content", "") + more.get("reasoning_content", ""):
            before["reasoning_content"] = said
        if called := [*before.get("tool_calls", []), *more.get("tool_calls", [])]:
            before["tool_calls"] = called
        return
    replies[id] = more
    session.add(at, more)
