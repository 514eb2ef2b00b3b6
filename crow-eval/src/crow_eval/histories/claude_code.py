"""Claude Code: a file of JSON lines for each session, `~/.claude/projects/FOLDER/SESSION.jsonl`.

A line is a message of the Messages API with notes around it; the blocks of one reply are several lines with one id.
The lines form a tree by `parentUuid`. The branch of the last message is read; lines that the user has left are counted.
Lines of sub-agents (`isSidechain`) become sessions of their own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from crow_core.messages.message import Message

from crow_eval.histories.history import (
    LEFT,
    ForeignSession,
    find_image,
    find_path,
    get_dict,
    get_list,
    make_reply,
    make_use,
    read_files,
    read_lines,
    to_line,
    to_text,
    to_time,
)

DEFAULT = ".claude/projects"
"""The place below the home folder where Claude Code keeps its sessions."""


def read(path: Path) -> Iterator[ForeignSession]:
    """Read the sessions of a file, or of all files below a folder. Raises OSError."""
    yield from read_files(path, "*.jsonl", read_file)


def read_file(file: Path) -> Iterator[ForeignSession]:
    """Read a file: its session, and one for its sub-agents if their lines are in it. Raises OSError."""
    main = ForeignSession("claude-code", file.stem, file)
    side = ForeignSession("claude-code", f"{file.stem}/sub-agents", file, title="Sub-agents")
    lines = list(read_lines(file, main.left_out))
    add_lines(main, select_path([line for line in lines if not line.get("isSidechain")], main))
    add_lines(side, [line for line in lines if line.get("isSidechain")])
    if main.entries or not side.entries:
        yield main
    if side.entries:
        yield side


def add_lines(session: ForeignSession, lines: Iterable[Mapping[str, Any]]) -> None:
    replies: dict[str, Message] = {}
    for line in lines:
        session.cwd = session.cwd or to_line(line.get("cwd"))
        at, message = to_time(line.get("timestamp")), get_dict(line, "message")
        match line.get("type"):
            case "user" if line.get("isMeta") or line.get("isCompactSummary"):
                session.left_out["notes of the program"] += 1
            case "user":
                add_user(session, at, message.get("content"))
            case "assistant":
                session.model = session.model or to_line(message.get("model"))
                add_reply(session, at, message, replies)
            case "summary" | "custom-title" | "ai-title":
                text = line.get("summary") or line.get("customTitle") or line.get("title") or line.get("aiTitle")
                session.title = to_line(text) or session.title
            case kind:
                session.left_out[f"lines of type {kind}"] += 1


def select_path(lines: Sequence[Mapping[str, Any]], session: ForeignSession) -> list[Mapping[str, Any]]:
    """Return the lines that lead to the last message, and those outside of the tree.

    The lines of one reply, and the results of its calls, may be on several branches of the tree; all of them belong to
    it. A summary of what was before follows the line before it.
    """
    tree = [line for line in lines if isinstance(line.get("uuid"), str)]
    ends = [at for at, line in enumerate(tree) if line.get("type") in ("user", "assistant")]
    if not ends:
        return list(lines)

    def get_parent(at: int) -> Any:
        line = tree[at]
        parent = line.get("parentUuid", "") or line.get("logicalParentUuid")
        begins_again = line.get("isCompactSummary") or line.get("subtype") == "compact_boundary"
        return "" if parent is None and begins_again else parent

    path = find_path(tree, ends[-1], lambda at: tree[at]["uuid"], get_parent)
    ids = [get_dict(tree[at], "message").get("id") for at in path if tree[at].get("type") == "assistant"]
    replies = {id for id in ids if isinstance(id, str)}
    path |= {at for at, line in enumerate(tree) if to_line(get_dict(line, "message").get("id")) in replies}
    calls = {id for at in path for id in list_ids(tree[at], "tool_use", "id")}
    calls -= {id for at in path for id in list_ids(tree[at], "tool_result", "tool_use_id")}
    path |= {at for at, line in enumerate(tree) if not calls.isdisjoint(list_ids(line, "tool_result", "tool_use_id"))}
    chosen = {tree[at]["uuid"] for at in path}
    kept = [line for line in lines if not isinstance(line.get("uuid"), str) or line["uuid"] in chosen]
    left = [line for line in tree if line["uuid"] not in chosen and line.get("type") in ("user", "assistant")]
    if left:
        session.left_out[LEFT] += len(left)
    return kept


def list_ids(line: Mapping[str, Any], kind: str, key: str) -> list[str]:
    """List the ids in the blocks of a kind of a line's message."""
    blocks = [block for block in get_list(get_dict(line, "message"), "content") if get_dict({"": block}, "")]
    return [to_line(block.get(key)) for block in blocks if block.get("type") == kind]


def add_user(session: ForeignSession, at: int, content: Any) -> None:
    """Add a line of the user: words, images, or the results of tool calls."""
    if not isinstance(content, list):
        session.add_prompt(at, content)
        return
    parts: list[Any] = []
    for block in cast("list[Any]", content):
        match block:
            case {"type": "tool_result", "tool_use_id": id}:
                session.add_result(at, str(id), block.get("content"), failed=bool(block.get("is_error")))
            case {"type": "text"}:
                parts.append(block)
            case {"type": "image"} if find_image(block):
                parts.append(block)
            case _:
                session.left_out["parts of messages"] += 1
    session.add_prompt(at, parts)


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
