"""goose: the SQLite file `sessions.db` in `~/.local/share/goose/sessions`, a row for each message.

Written after its source, crates/goose/src/session and crates/goose/src/conversation.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crow_core.text import decode_json

from crow_eval.histories.history import (
    ForeignSession,
    get_dict,
    make_reply,
    make_use,
    open_database,
    to_line,
    to_text,
    to_time,
)

DEFAULT = ".local/share/goose/sessions"
"""The place below the home folder where goose keeps its sessions."""


def read(path: Path) -> Iterator[ForeignSession]:
    """Read the sessions of a database, or of the one in a folder. Raises OSError."""
    file = path / "sessions.db" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}")
    with open_database(file, "goose") as database:
        for row in database.execute("SELECT * FROM sessions ORDER BY created_at, id").fetchall():
            stored: dict[str, Any] = dict(row)
            session = ForeignSession("goose", str(row["id"]), file, cwd=to_line(row["working_dir"]))
            session.title = to_line(stored.get("name")) or to_line(stored.get("description"))
            rows = database.execute("SELECT * FROM messages WHERE session_id = ? ORDER BY id", (row["id"],))
            for message in rows.fetchall():
                add_row(session, dict(message))
            if session.entries:
                yield session


def add_row(session: ForeignSession, row: dict[str, Any]) -> None:
    """Add a message. A summary that replaces others for the model, and was not shown, is left out."""
    try:
        parts, metadata = decode_json(row["content_json"]), decode_json(row.get("metadata_json") or "{}")
    except (ValueError, TypeError):
        session.left_out["broken rows"] += 1
        return
    if not isinstance(parts, list):
        session.left_out["broken rows"] += 1
    elif isinstance(metadata, dict) and metadata.get("userVisible") is False:  # pyright: ignore[reportUnknownMemberType]
        session.left_out["notes of the program"] += 1
    else:
        add_message(session, to_time(row.get("created_timestamp")), row.get("role"), parts)  # pyright: ignore[reportUnknownArgumentType]


def add_message(session: ForeignSession, at: int, role: Any, parts: list[Any]) -> None:
    """Add a message by its parts. Results of tools are parts of the user's messages."""
    said, text, reasoning, uses = list[Any](), list[str](), list[str](), list[Any]()
    for part in parts:
        call = get_dict(get_dict(part, "toolCall"), "value")
        match part:
            case {"type": "text" | "image"} if role == "user":
                said.append(part)
            case {"type": "text", "text": str(words)}:
                text.append(words)
            case {"type": "thinking", "thinking": str(thought)}:
                reasoning.append(thought)
            case {"type": "toolRequest" | "frontendToolRequest", "id": id} if "name" in call:
                uses.append(make_use(id, call["name"], call.get("arguments")))
            case {"type": "toolResponse", "id": id}:
                content, failed = read_result(get_dict(part, "toolResult"))
                session.add_result(at, str(id), content, failed=failed)
            case _:
                kind = get_dict({"part": part}, "part").get("type")
                session.left_out[f"parts of type {kind}"] += 1
    if said:
        session.add_prompt(at, said)
    if text or reasoning or uses:
        session.add(at, make_reply("".join(text), "".join(reasoning), uses))


def read_result(result: dict[str, Any]) -> tuple[Any, bool]:
    """Return the content of a tool's result, and True if it failed. Earlier versions have the content itself."""
    match result:
        case {"status": "success", "value": {"content": content}}:
            return content, get_dict(result, "value").get("isError") is True
        case {"status": "success", "value": content}:
            return content, False
        case _:
            return to_text(result.get("error")), True
