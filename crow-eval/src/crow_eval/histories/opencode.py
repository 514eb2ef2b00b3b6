"""opencode: the files of `~/.local/share/opencode/storage`, or the SQLite file `opencode.db` next to it.

Sessions, messages and parts of messages are JSON objects, each in a file of its own, or in a row.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from crow_core.text import decode_json

from crow_eval.histories.history import (
    LEFT,
    ForeignSession,
    ReplyParts,
    find_image,
    get_dict,
    get_list,
    make_use,
    open_database,
    read_object,
    to_line,
    to_text,
    to_time,
)

DEFAULT = ".local/share/opencode"
"""The place below the home folder where opencode keeps its sessions."""

Object = Mapping[str, Any]
Stored = tuple[str, Object, Sequence[Object]]
"""The id of a message, the message, and its parts."""


def read(path: Path) -> Iterator[ForeignSession]:
    """Read the sessions of a database, or of a folder that has one or the files. Raises OSError."""
    database = path if path.is_file() else path / "opencode.db"
    if database.is_file():
        yield from read_database(database)
    storage = path / "storage" if (path / "storage").is_dir() else path
    if (storage / "session").is_dir():
        for file in sorted((storage / "session").rglob("*.json")):
            yield from read_session(storage, file)


def read_session(storage: Path, file: Path) -> Iterator[ForeignSession]:
    """Read the files of a session. Raises OSError."""
    left_out = Counter[str]()
    stored = read_object(file, left_out)
    id = str(stored.get("id") or file.stem)
    messages: list[Stored] = []
    for each in sorted((storage / "message" / id).glob("*.json")):
        message = read_object(each, left_out)
        name = str(message.get("id") or each.stem)
        parts = sorted((storage / "part" / name).glob("*.json"))
        messages.append((name, message, [read_object(part, left_out) for part in parts]))
    yield from make_session(stored, id, messages, file, left_out)


def read_database(file: Path) -> Iterator[ForeignSession]:
    """Read a database. Raises OSError."""
    with open_database(file, "opencode") as database:
        for row in database.execute("SELECT * FROM session ORDER BY id").fetchall():
            left_out = Counter[str]()
            stored: dict[str, Any] = dict(row)
            stored["revert"] = parse(stored.get("revert") or "{}", left_out)
            rows = database.execute("SELECT id, data FROM message WHERE session_id = ? ORDER BY id", (row["id"],))
            messages: list[Stored] = []
            for id, data in rows.fetchall():
                parts = database.execute("SELECT data FROM part WHERE message_id = ? ORDER BY id", (id,))
                found = [parse(part, left_out) for (part,) in parts.fetchall()]
                messages.append((str(id), parse(data, left_out), found))
            yield from make_session(stored, str(row["id"]), messages, file, left_out)


def parse(data: Any, left_out: Counter[str]) -> Object:
    """Parse a JSON object of a row; empty, and counted, if it is broken."""
    try:
        value = decode_json(data)
    except (ValueError, TypeError):
        value = None
    if not isinstance(value, dict):
        left_out["broken rows"] += 1
        return {}
    return cast("dict[str, Any]", value)


def make_session(
    stored: Object, id: str, messages: Sequence[Stored], source: Path, left_out: Counter[str]
) -> Iterator[ForeignSession]:
    """Make a session of its messages with their parts; none if they are empty."""
    session = ForeignSession("opencode", id, source, left_out=left_out)
    session.cwd, session.title = to_line(stored.get("directory")), to_line(stored.get("title"))
    undone = to_line(get_dict(stored, "revert").get("messageID"))
    for id, message, parts in messages:
        if undone and id >= undone:  # ids ascend; the messages are deleted with the next prompt
            session.left_out[LEFT] += 1
            continue
        at = to_time(get_dict(message, "time").get("created"))
        if message.get("role") == "user":
            own = [part for part in parts if not part.get("synthetic")]
            said = [part for part in own if part.get("type") == "text" or find_image(part)]
            session.left_out["files of the user"] += sum(part.get("type") == "file" for part in own if part not in said)
            session.left_out["notes of the program"] += len(parts) - len(own)
            session.add_prompt(at, said)
        elif message.get("role") == "assistant":
            model = message.get("modelID") or get_dict(message, "model").get("modelID")
            session.model = session.model or to_line(model)
            add_steps(session, at, parts)
        else:
            session.left_out["messages of nobody"] += 1
    session.left_out = +session.left_out
    if session.entries:
        yield session


def add_steps(session: ForeignSession, at: int, parts: Sequence[Object]) -> None:
    """Add the replies of a turn, one for each step, and the results of their calls."""
    reply = ReplyParts(session, at)
    for part in parts:
        match part.get("type"):
            case "text":
                reply.texts.append(to_text(part))
            case "reasoning":
                reply.reasoning.append(to_text(part))
            case "tool":
                state, id = get_dict(part, "state"), str(part.get("callID") or part.get("id"))
                reply.uses.append(make_use(id, part.get("tool"), state.get("input")))
                if state.get("status") in ("completed", "error"):
                    failed = state["status"] == "error"
                    output = state.get("error" if failed else "output")
                    images = [part for part in get_list(state, "attachments") if find_image(part)]
                    reply.results.append((at, id, [output, *images] if images else output, failed))
            case "step-start":
                reply.flush()
                reply.at = at
            case "step-finish":
                pass
            case kind:
                session.left_out[f"parts of type {kind}"] += 1
    reply.flush()
