"""vibe: a folder for each session in `~/.vibe/logs/session`.

From version 3 on, `unified/ID` has `meta.json`, and what the user saw in files that `CURRENT` leads to: a manifest,
chunks of entries, and a journal with what came later. Before, `session_TIME_ID` has `meta.json` and `messages.jsonl`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crow_core.text import decode_json

from crow_eval.histories.history import (
    ForeignSession,
    ReplyParts,
    get_dict,
    get_list,
    make_reply,
    make_use,
    read_lines,
    read_object,
    to_line,
    to_text,
    to_time,
)

DEFAULT = ".vibe/logs/session"
"""The place below the home folder where vibe keeps its sessions."""


def read(path: Path) -> Iterator[ForeignSession]:
    """Read the session of a folder, or of all folders below it. Raises OSError."""
    for file in sorted(path.rglob("meta.json")) if path.is_dir() else [path]:
        folder = file.parent
        session = ForeignSession("vibe", folder.name, folder)
        meta = read_object(folder / "meta.json", session.left_out)
        session.id = to_line(meta.get("session_id")) or session.id
        session.cwd = to_line(get_dict(meta, "environment").get("working_directory"))
        session.title = to_line(meta.get("title"))
        session.model = to_line(get_dict(meta, "config").get("active_model"))
        if (folder / "CURRENT").is_file():
            add_entries(session, list_entries(folder, session))
            yield session
        elif (folder / "messages.jsonl").is_file():
            add_messages(session, folder / "messages.jsonl", to_time(meta.get("start_time")))
            yield session


def add_messages(session: ForeignSession, file: Path, at: int) -> None:
    """Add the messages of a file. They have no times. Raises OSError."""
    for line in read_lines(file, session.left_out):
        match line.get("role"):
            case "user" if line.get("injected"):
                session.left_out["notes of the program"] += 1
            case "user":
                session.add_prompt(at, line.get("content"))
            case "assistant":
                calls = [(call.get("id"), get_dict(call, "function")) for call in get_list(line, "tool_calls")]
                uses = [make_use(id, call.get("name"), call.get("arguments")) for id, call in calls]
                text, reasoning = to_text(line.get("content")), to_line(line.get("reasoning_content"))
                if text or reasoning or uses:
                    session.add(at, make_reply(text, reasoning, uses))
            case "tool":
                content = line.get("content")
                failed = to_text(content).startswith("<tool_error>")
                session.add_result(at, str(line.get("tool_call_id")), content, failed=failed)
            case role:
                session.left_out[f"messages of {role}"] += 1


def list_entries(folder: Path, session: ForeignSession) -> list[Mapping[str, Any]]:
    """List the entries that the user saw: the snapshot's, as the journal changed them since. Raises OSError."""
    generation = to_line(get_dict(read_part(folder / "CURRENT", session), "value").get("generation"))
    snapshot = folder / "generations" / Path(generation).name
    manifest = get_dict(read_part(snapshot / "manifest.json", session), "value")
    entries = [
        entry
        for name in get_list(get_dict(manifest, "projection_state"), "chunks")
        for entry in get_list(read_part(folder / "chunks" / f"{Path(str(name)).name}.json", session), "value")
    ]
    state = get_dict(read_part(snapshot / "projection-state.json", session), "value")
    entries += get_list(get_dict(get_dict(state, "snapshot"), "history"), "entries")
    segment = to_line(get_dict(manifest, "recovery_journal_segment").get("path"))
    journal = folder / "journal" / Path(segment).name
    for record in read_lines(journal, session.left_out) if segment and journal.is_file() else ():
        for change in get_list(get_dict(record, "payload"), "delta"):
            entries = apply_change(entries, change)
    return [entry for entry in entries if isinstance(entry, dict)]


def read_part(file: Path, session: ForeignSession) -> dict[str, Any]:
    """Return what a file has as `value`: an object or a list. Empty, and counted, if it is broken or missing."""
    try:
        return {"value": decode_json(file.read_bytes())}
    except (ValueError, OSError):
        session.left_out["broken files"] += 1
        return {}


def apply_change(entries: list[Any], change: Any) -> list[Any]:
    """Return the entries after one step of the journal."""
    entry, id = get_dict(change, "entry"), get_dict({"change": change}, "change").get("id")
    match change:
        case {"op": "append_entry"}:
            return [*entries, entry]
        case {"op": "replace_entry"}:
            return [entry if each.get("id") == id else each for each in entries]
        case {"op": "remove_entry"}:
            return [each for each in entries if each.get("id") != id]
        case {"op": "set_history_entries", "entries": list()}:
            return get_list(change, "entries")
        case _:
            return entries


def add_entries(session: ForeignSession, entries: list[Mapping[str, Any]]) -> None:
    """Add the messages of a session. Reasoning, text and calls that follow each other are one reply."""
    reply = ReplyParts(session)
    for entry in entries:
        at, detail, state = to_time(entry.get("createdAt")), get_dict(entry, "detail"), get_dict(entry, "state")
        match entry.get("type"), entry.get("role"):
            case "message", "user":
                reply.flush()
                session.add_prompt(at, entry.get("content"))
            case "message", _:
                reply.add_text(at, to_text(entry.get("content")))
            case "reasoning", _:
                reply.add_reasoning(at, to_line(entry.get("text")))
            case "effect", _ if "toolName" in detail:
                id, status, ended = str(entry.get("id")), state.get("status"), to_time(entry.get("updatedAt"))
                reply.add_call(at, make_use(id, detail["toolName"], detail.get("input")))
                if status != "running":
                    reply.results.append((ended, id, get_output(state), status != "completed"))
            case kind, _:
                session.left_out[f"entries of type {kind}"] += 1
    reply.flush()


def get_output(state: Mapping[str, Any]) -> Any:
    """Return the result of a tool from the state of its entry."""
    output = get_dict(state, "output")
    return (
        get_list(output, "content") or output.get("structured_content") or state.get("outputText") or state.get("error")
    )
