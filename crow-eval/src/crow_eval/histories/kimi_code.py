"""Kimi Code: a folder for each session, `~/.kimi-code/sessions/FOLDER/ID`, with `state.json` and
`agents/main/wire.jsonl`.

kimi-cli, its predecessor, has `wire.jsonl` next to `state.json`, in `~/.kimi/sessions/HASH/ID`. HASH is that of the
path of the working folder, and `~/.kimi/kimi.json` lists these paths. Sub-agents are left out.
"""

from collections.abc import Iterator, Mapping
from hashlib import md5
from pathlib import Path
from typing import Any

from crow_eval.histories.history import (
    ForeignSession,
    ReplyParts,
    get_dict,
    get_list,
    make_use,
    read_files,
    read_lines,
    read_object,
    to_line,
    to_time,
)

DEFAULT = ".kimi-code/sessions"
"""The place below the home folder where Kimi Code keeps its sessions."""
SILENT = (
    *("TurnEnd", "StepBegin", "StepInterrupted", "StatusUpdate", "ApprovalRequest", "ApprovalResponse"),
    *("MCPLoadingBegin", "MCPLoadingEnd", "HookTriggered", "HookResolved"),
)
"""Types of lines of kimi-cli that say nothing to the model."""


def read(path: Path) -> Iterator[ForeignSession]:
    """Read the sessions of a file, or of all files below a folder. Raises OSError."""
    yield from read_files(path, "wire.jsonl", read_file)


def read_file(file: Path) -> Iterator[ForeignSession]:
    """Read a session. Raises OSError."""
    is_nested = file.parent.parent.name == "agents"
    if is_nested and file.parent.name != "main":
        return
    folder = file.parents[2] if is_nested else file.parent
    session = ForeignSession("kimi-code", folder.name, file)
    stored = folder / "state.json"
    state: Mapping[str, Any] = read_object(stored, session.left_out) if stored.is_file() else {}
    session.title = to_line(state.get("custom_title")) or to_line(state.get("title"))
    session.cwd = to_line(state.get("cwd")) or find_folder(folder.parent, session)
    reply = ReplyParts(session)
    for line in read_lines(file, session.left_out):
        if "type" in line:
            add_record(session, reply, to_time(line.get("time")), line)
        elif message := get_dict(line, "message"):
            add_line(session, reply, to_time(line.get("timestamp")), message.get("type"), get_dict(message, "payload"))
    reply.flush()
    yield session


def add_record(session: ForeignSession, reply: ReplyParts, at: int, line: Mapping[str, Any]) -> None:
    """Add what a line of Kimi Code says to the model. The other lines repeat it, or are notes of the program."""
    match line.get("type"):
        case "profile.bind":
            session.model = to_line(line.get("modelAlias")) or session.model
        case "context.append_message":
            message = get_dict(line, "message")
            reply.flush()
            if message.get("role") == "user" and get_dict(message, "origin").get("kind", "user") == "user":
                session.add_prompt(at, message.get("content"))
            else:
                session.left_out["notes of the program"] += 1
        case "context.append_loop_event":
            add_event(reply, at, get_dict(line, "event"))
        case "context.undo":
            reply.flush()
            session.drop_turns(line.get("count"))
        case _:
            pass


def add_event(reply: ReplyParts, at: int, event: Mapping[str, Any]) -> None:
    """Add an event of the loop of Kimi Code: a part of a reply, a call or a result."""
    part, result = get_dict(event, "part"), get_dict(event, "result")
    match event.get("type"), part.get("type"):
        case "content.part", "think":
            reply.add_reasoning(at, to_line(part.get("think")))
        case "content.part", "text":
            reply.add_text(at, to_line(part.get("text")))
        case "tool.call", _:
            reply.add_call(at, make_use(event.get("toolCallId"), event.get("name"), event.get("args")))
        case "tool.result", _:
            id = str(event.get("toolCallId"))
            reply.results.append((at, id, result.get("output"), result.get("isError") is True))
        case _:
            pass


def find_folder(sessions: Path, session: ForeignSession) -> str:
    """Find the path of the working folder whose hash is the name of a folder of sessions; "" if it is not listed."""
    listed = sessions.parent.parent / "kimi.json"
    folders = get_list(read_object(listed, session.left_out), "work_dirs") if listed.is_file() else []
    paths = [to_line(get_dict({"folder": each}, "folder").get("path")) for each in folders]
    own = sessions.name.rpartition("_")[2]
    return next((path for path in paths if md5(path.encode(), usedforsecurity=False).hexdigest() == own), "")


def add_line(session: ForeignSession, reply: ReplyParts, at: int, kind: Any, payload: Mapping[str, Any]) -> None:
    """Add what a line of kimi-cli says."""
    match kind, payload:
        case "TurnBegin" | "SteerInput", _:
            reply.flush()
            session.add_prompt(at, payload.get("user_input"))
        case "ContentPart", {"type": "think", "think": str(thought)}:
            reply.add_reasoning(at, thought)
        case "ContentPart", {"type": "text", "text": str(text)}:
            reply.add_text(at, text)
        case "ToolCall", {"id": id}:
            call = get_dict(payload, "function")
            reply.add_call(at, make_use(id, call.get("name"), call.get("arguments")))
        case "ToolResult", {"tool_call_id": id}:
            value = get_dict(payload, "return_value")
            content = [to_line(value.get("message")), value.get("output")]
            reply.results.append((at, str(id), list(filter(None, content)), bool(value.get("is_error"))))
        case _ if kind not in SILENT:
            session.left_out[f"lines of type {kind}"] += 1
        case _:
            pass
