"""Zed: the threads of its own agent, in the SQLite file `threads/threads.db` of its data. Each is JSON, compressed by
Zstandard.

Written after its source, crates/agent/src/db.rs and thread.rs. Threads of other agents are not in there.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from crow_core.text import decode_json

from crow_eval.histories.history import (
    ForeignSession,
    find_image,
    get_dict,
    get_list,
    make_reply,
    make_use,
    open_database,
    to_line,
    to_text,
    to_time,
)

DEFAULT = f"{'Library/Application Support/Zed' if sys.platform == 'darwin' else '.local/share/zed'}/threads"
"""The place below the home folder where Zed keeps its sessions."""
MAX_BYTES = 200_000_000
"""Bytes that a thread may have when it is not compressed any more."""


def read(path: Path) -> Iterator[ForeignSession]:
    """Read the threads of a database, or of the one in a folder. Raises OSError."""
    file = path / "threads.db" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"There is no {file}")
    with open_database(file, "Zed") as database:
        for row in database.execute("SELECT * FROM threads ORDER BY updated_at, id").fetchall():
            stored: dict[str, Any] = dict(row)
            session = ForeignSession("zed", str(row["id"]), file, title=to_line(stored.get("summary")))
            session.cwd = to_line(stored.get("folder_paths")).partition("\n")[0]
            thread = read_thread(row["data"], row["data_type"], session)
            session.model = to_line(get_dict(thread, "model").get("model"))
            at = to_time(stored.get("created_at")) or to_time(stored.get("updated_at"))
            add_thread(session, at, thread)
            yield session


def read_thread(stored: Any, kind: Any, session: ForeignSession) -> dict[str, Any]:
    """Read the JSON of a thread, which is compressed if its kind is `zstd`; empty, and counted, if it is broken."""
    try:
        import zstandard  # imported here because only this history needs it
    except ModuleNotFoundError:
        raise OSError("Zed compresses its threads; install crow-eval[zed], or zstandard, to read them") from None
    try:
        data = stored.encode() if isinstance(stored, str) else stored
        if kind == "zstd":
            with zstandard.ZstdDecompressor().stream_reader(data) as reader:
                data = reader.read(MAX_BYTES)
        value = decode_json(data)
    except (ValueError, AttributeError, zstandard.ZstdError):
        value = None
    if not isinstance(value, dict):
        session.left_out["broken rows"] += 1
        return {}
    return cast("dict[str, Any]", value)


def add_thread(session: ForeignSession, at: int, thread: Mapping[str, Any]) -> None:
    """Add the messages of a thread. They have no times."""
    for message in get_list(thread, "messages"):
        match message:
            case {"User": {"content": list()}}:
                session.add_prompt(
                    at, [read_prompt_part(session, part) for part in get_list(message["User"], "content")]
                )
            case {"Agent": {"content": list()}}:
                add_reply(session, at, message["Agent"])
            case {"role": str(role)}:  # before version 0.3.0
                add_earlier(session, at, role, message)
            case "Resume":
                session.add_text(at, "user", "Continue where you left off")  # the words that Zed sends then
            case _:
                session.left_out["messages of an unknown form"] += 1


def read_prompt_part(session: ForeignSession, part: Any) -> Any:
    """Convert a part of the user's message to text, or to an image as other histories write it."""
    match part:
        case {"Text": str(text)}:
            return text
        case {"Mention": {"uri": {**uri}}}:
            session.left_out["contents of mentions"] += 1
            target = [get_dict(uri, kind) for kind in uri]
            return next((f"@{path}" for each in target if (path := each.get("abs_path") or each.get("url"))), "@")
        case _:
            return read_content(part)


def read_content(part: Any) -> Any:
    """Convert a part of a result, in one of the forms that Zed reads, to text or an image."""
    match part:
        case {"Text": str(text)} | {"text": str(text)}:
            return text
        case {"Image": {"source": str(data)}} | {"image": {"source": str(data)}} | {"source": str(data)}:
            image = {"type": "image", "mimeType": "image/png", "data": data}
            return image if find_image(image) else "[image]"
        case _:
            return to_text(part)


def add_reply(session: ForeignSession, at: int, reply: Any) -> None:
    """Add a reply and the results of its calls."""
    text, reasoning, uses = list[str](), list[str](), list[Any]()
    for part in get_list(reply, "content"):
        match part:
            case {"Text": str(words)}:
                text.append(words)
            case {"Thinking": {"text": str(thought)}}:
                reasoning.append(thought)
            case {"ToolUse": {"id": id, "name": name}}:
                use = get_dict(part, "ToolUse")
                uses.append(make_use(id, name, use["input"] if use.get("input") is not None else use.get("raw_input")))
            case _:
                session.left_out["parts of messages"] += 1
    if text or reasoning or uses:
        session.add(at, make_reply("".join(text), "".join(reasoning), uses))
    for id, result in get_dict(reply, "tool_results").items():
        add_result(session, at, id, result)


def add_result(session: ForeignSession, at: int, id: str, result: Any) -> None:
    content = get_dict({"result": result}, "result").get("content")
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    failed = get_dict({"result": result}, "result").get("is_error") is True
    session.add_result(at, id, [read_content(part) for part in parts], failed=failed)


def add_earlier(session: ForeignSession, at: int, role: str, message: Mapping[str, Any]) -> None:
    """Add a message as versions before 0.3.0 wrote it: segments, calls and results of one role."""
    segments = get_list(message, "segments")
    text = [to_line(get_dict({"it": each}, "it").get("text")) for each in segments]
    thoughts = [get_dict({"it": each}, "it").get("type") == "thinking" for each in segments]
    said = "".join(words for words, thought in zip(text, thoughts, strict=True) if not thought)
    if role == "user":
        session.add_prompt(at, said)
    elif role == "assistant":
        reasoning = "".join(words for words, thought in zip(text, thoughts, strict=True) if thought)
        calls = [get_dict({"it": each}, "it") for each in get_list(message, "tool_uses")]
        uses = [make_use(call.get("id"), call.get("name"), call.get("input")) for call in calls]
        if said or reasoning or uses:
            session.add(at, make_reply(said, reasoning, uses))
        for result in get_list(message, "tool_results"):
            add_result(session, at, str(get_dict({"it": result}, "it").get("tool_use_id")), result)
    else:
        session.left_out[f"messages of {role}"] += 1
