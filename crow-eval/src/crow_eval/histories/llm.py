"""llm: the SQLite file `logs.db`, whose place `llm logs path` prints."""

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crow_core.text import decode_json

from crow_eval.histories.history import ForeignSession, make_reply, make_use, open_database, to_line, to_time

DEFAULT = ".config/io.datasette.llm/logs.db"
"""The place below the home folder where llm keeps its sessions."""


MAX_CHAIN = 100_000
"""Messages of a thread that are read at most: a damaged file may have a circle."""


def read(path: Path) -> Iterator[ForeignSession]:
    """Read the conversations of a database, or of the one in a folder. Raises OSError."""
    file = path / "logs.db" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}")
    with open_database(file, "llm") as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "threads" in tables:  # of later versions
            yield from read_threads(database, file)
        if "conversations" not in tables:
            return
        for row in database.execute("SELECT id, name, model FROM conversations ORDER BY id").fetchall():
            session = ForeignSession(
                "llm", str(row["id"]), file, title=to_line(row["name"]), model=to_line(row["model"])
            )
            add_responses(database, tables, row["id"], session)
            if session.entries:
                yield session


def read_threads(database: sqlite3.Connection, file: Path) -> Iterator[ForeignSession]:
    """Read the threads: each is a chain of messages from its last one back, and a message has parts."""
    for row in database.execute("SELECT id, name, tip_message_hash FROM threads ORDER BY id").fetchall():
        session = ForeignSession("llm", str(row["id"]), file, title=to_line(row["name"]))
        turns = database.execute("SELECT * FROM turns WHERE thread_id = ? ORDER BY id", (row["id"],)).fetchall()
        session.model = next(filter(None, (to_line(turn["model"]) for turn in turns)), "")
        times = {turn["tip_message_hash"]: to_time(turn["datetime_utc"]) for turn in turns}
        chain: list[sqlite3.Row] = []
        hash = row["tip_message_hash"]
        while (
            hash
            and len(chain) < MAX_CHAIN
            and (message := database.execute("SELECT * FROM messages WHERE hash = ?", (hash,)).fetchone())
        ):
            chain.append(message)
            hash = message["parent_hash"]
        at = times.get(chain[-1]["hash"], 0) if chain else 0
        at = at or min(filter(None, times.values()), default=0)
        for message in reversed(chain):
            at = times.get(message["hash"], at)
            parts = database.execute(
                "SELECT * FROM parts WHERE message_hash = ? ORDER BY position", (message["hash"],)
            ).fetchall()
            add_message(session, at, message["role"], parts)
        if session.entries:
            yield session


def add_message(session: ForeignSession, at: int, role: str, parts: Sequence[sqlite3.Row]) -> None:
    """Add a message of a thread by its parts."""
    texts, uses = list[str](), list[Any]()
    for part in parts:
        try:
            payload = decode_json(part["payload"] or "{}")
        except (ValueError, TypeError):
            session.left_out["broken rows"] += 1
            continue
        match part["type"], payload:
            case "text", _:
                texts.append(to_line(part["text"]))
            case "tool_call", {"tool_call_id": id}:
                uses.append(make_use(id, payload.get("name"), payload.get("arguments")))
            case "tool_result", {"tool_call_id": id}:
                session.add_result(at, str(id), payload.get("output"))
            case kind, _:
                session.left_out[f"parts of type {kind}"] += 1
    if role == "system":
        session.left_out["system prompts"] += 1
    elif role == "assistant" and (texts or uses):
        session.add(at, make_reply("".join(texts), "", uses))
    else:
        session.add_text(at, "user", "".join(texts))


def add_responses(database: sqlite3.Connection, tables: set[str], id: Any, session: ForeignSession) -> None:
    """Add the responses of a conversation, with their tool calls and results."""
    rows = database.execute("SELECT * FROM responses WHERE conversation_id IS ? ORDER BY id", (id,)).fetchall()
    for row in rows:
        at = to_time(row["datetime_utc"])
        if row["system"]:
            session.left_out["system prompts"] += 1
        for result in find(database, tables, "tool_results", row["id"]):
            session.add_result(at, str(result["tool_call_id"]), result["output"])
        session.add_text(at, "user", to_line(row["prompt"]))
        if "prompt_attachments" in tables:
            session.left_out["attachments"] += database.execute(
                "SELECT count(*) FROM prompt_attachments WHERE response_id = ?", (row["id"],)
            ).fetchone()[0]
        calls = find(database, tables, "tool_calls", row["id"])
        uses = [make_use(call["tool_call_id"], call["name"], call["arguments"]) for call in calls]
        if (text := to_line(row["response"])) or uses:
            session.add(at, make_reply(text, "", uses))
    session.left_out = +session.left_out


def find(database: sqlite3.Connection, tables: set[str], table: str, response: Any) -> list[sqlite3.Row]:
    """Return the rows of a table that belong to a response; none where there is no such table, as in earlier files."""
    if table not in tables:
        return []
    return database.execute(f"SELECT * FROM {table} WHERE response_id = ? ORDER BY id", (response,)).fetchall()
