"""Histories of vibe, Kimi Code, goose and Zed are imported; `histories/README.md` says which were recorded."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import zstandard
from crow_eval.histories.importing import import_history
from crow_persistence.checks import check
from crow_persistence.database import Database
from crow_persistence.loader import find_session, load_session
from crow_persistence.sql_store import BlockingStore

RECORDED = Path(__file__).parent / "histories"
KIMI = "kimi-code/sessions/wd_notes_9308ffa82148/session_4f824360-f9f1-482e-b835-05e1b0336145"
VIBE = "vibe/unified/fe39ca6b-5ff7-c414-dfeb-1c501ba19338"
IMAGE = "iVBORw0KGgo="
GOOSE = """
CREATE TABLE sessions (id TEXT PRIMARY KEY, name TEXT NOT NULL DEFAULT '', description TEXT NOT NULL DEFAULT '',
 working_dir TEXT NOT NULL, created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP);
CREATE TABLE messages (id INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL, role TEXT NOT NULL,
 content_json TEXT NOT NULL, created_timestamp INTEGER NOT NULL, metadata_json TEXT);
INSERT INTO sessions (id, name, working_dir) VALUES ('20251114_1', 'Notes', '/home/me/notes');
"""
"""The tables as `create` in crates/goose/src/session/session_manager.rs makes them, without the columns of tokens."""


@pytest.fixture
def store(database: Database) -> Iterator[BlockingStore]:
    store = BlockingStore(database.url.render_as_string(hide_password=False), database.folder)
    yield store
    store.database.close()


def read_session(store: BlockingStore, id: str) -> tuple[Any, list[Any]]:
    """Return the row of a session and its messages."""
    with store.database.begin_read() as connection:
        row = find_session(connection, id)
        return row, [entry for entry in load_session(connection, row).log if "role" in entry]


def write_goose(folder: Path, *messages: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> Path:
    with closing(sqlite3.connect(folder / "sessions.db")) as database:
        database.executescript(GOOSE)
        rows = [
            ("20251114_1", role, json.dumps(parts), 1_763_000_000, json.dumps(meta)) for role, parts, meta in messages
        ]
        database.executemany(
            "INSERT INTO messages (session_id, role, content_json, created_timestamp, metadata_json)"
            " VALUES (?, ?, ?, ?, ?)",
            rows,
        )
        database.commit()
    return folder


def write_zed(folder: Path, *messages: Any, version: str = "0.3.0", compressed: bool = True) -> Path:
    thread: dict[str, Any] = {
        "title": "Notes",
        "messages": messages,
        "updated_at": "2025-11-14T10:00:00Z",
        "version": version,
    }
    thread["model"] = {"provider": "zed.dev", "model": "claude-sonnet-4"}
    data: Any = json.dumps(thread).encode()
    with closing(sqlite3.connect(folder / "threads.db")) as database:
        database.execute(
            "CREATE TABLE threads (id TEXT PRIMARY KEY, summary TEXT NOT NULL, updated_at TEXT NOT NULL,"
            " data_type TEXT NOT NULL, data BLOB NOT NULL, folder_paths TEXT, created_at TEXT)"
        )
        data = zstandard.ZstdCompressor().compress(data) if compressed else data.decode()
        row = ("t1", "Notes", "2025-11-14T10:00:00Z", "zstd" if compressed else "json", data, "/home/me/notes", None)
        database.execute("INSERT INTO threads VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        database.commit()
    return folder


@pytest.mark.parametrize(
    ("agent", "folder", "tool", "said"),
    [
        ("vibe", "vibe/unified", "file_system.read_file", "buy milk"),
        ("vibe", "vibe/session_20261127_204914_a83bae07", "read_file", "tool_error"),
        ("kimi-code", "kimi-code", "Read", "buy milk"),
        ("kimi-code", "kimi-cli", "ReadFile", "buy milk"),
    ],
)
def test_recorded_session_of_a_folder_is_imported_once(
    store: BlockingStore, agent: str, folder: str, tool: str, said: str
) -> None:
    found = import_history(store, agent, RECORDED / folder)
    (id,) = found.sessions
    row, (user, call, result, last) = read_session(store, id)
    (use,) = call["tool_calls"]
    assert (row.cwd, row.created // 1_000_000) == ("/home/me/notes", 1_795_812)
    assert user["content"] == row.title == "What do the notes say?"
    assert (call["content"], call["reasoning_content"]) == ("I look.", "Notes are in a file.")
    assert (use["function"]["name"], json.loads(use["function"]["arguments"])) == (tool, {"path": "notes.txt"})
    assert result["tool_call_id"] == use["id"]
    assert said in result["content"]
    assert last["content"] == "The notes say: buy milk."
    assert list(check(store.database)) == []
    again = import_history(store, agent, RECORDED / folder)
    assert (again.sessions, again.known, again.messages) == ([], 1, 0)


def test_what_the_journal_of_vibe_adds_after_the_snapshot_is_read(store: BlockingStore, tmp_path: Path) -> None:
    copytree(RECORDED / VIBE, tmp_path / "s")
    message = {"type": "message", "role": "assistant", "id": "a2", "content": [{"type": "text", "text": "It is cold."}]}
    effect: Any = {
        "type": "effect",
        "id": "e1",
        "detail": {"toolName": "bash", "input": {}},
        "state": {"status": "running"},
    }
    changes: list[Any] = [
        {"op": "append_entry", "entry": {**message, "id": "u2", "role": "user"}},
        {"op": "append_entry", "entry": message},
        {"op": "append_entry", "entry": effect},
        {"op": "replace_entry", "id": "a2", "entry": {**message, "content": [{"type": "text", "text": "It is warm."}]}},
        {"op": "remove_entry", "id": "e1"},
        {"op": "set_envelope", "state": {}},
    ]
    record = {"type": "projection_delta", "payload": {"delta": changes}}
    (tmp_path / "s" / "journal" / "0000000000000022.jsonl").write_text(json.dumps(record) + '\n{"torn": ')
    found = import_history(store, "vibe", tmp_path)
    _, messages = read_session(store, found.sessions[0])
    assert [message["content"] for message in messages[-2:]] == ["It is cold.", "It is warm."]
    assert found.left_out == {"broken lines": 1}


def test_vibe_with_missing_files_keeps_what_is_there(store: BlockingStore, tmp_path: Path) -> None:
    copytree(RECORDED / VIBE, tmp_path / "s")
    (next((tmp_path / "s" / "chunks").iterdir())).unlink()
    (tmp_path / "s" / "CURRENT").write_text('{"generation": "../../../../etc"}')
    found = import_history(store, "vibe", tmp_path)
    assert found.sessions == []
    assert found.left_out == {"broken files": 2, "sessions without messages": 1}


def test_turns_that_were_undone_in_kimi_code_are_left_out(store: BlockingStore, tmp_path: Path) -> None:
    copytree(RECORDED / KIMI, tmp_path / "s")
    said = {"role": "user", "content": [{"type": "text", "text": "Sell it."}], "origin": {"kind": "user"}}
    lines = [
        {"type": "context.append_message", "message": said, "time": 1_795_812_913_000},
        {"type": "context.undo", "count": 1},
    ]
    with (tmp_path / "s/agents/main/wire.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "s/agents/agent-1").mkdir()
    (tmp_path / "s/agents/agent-1/wire.jsonl").write_text(json.dumps(lines[0]) + "\n")
    found = import_history(store, "kimi-code", tmp_path)
    (id,) = found.sessions
    assert len(read_session(store, id)[1]) == 4
    assert found.left_out["messages of branches that were left"] == 1


def test_goose_is_imported_by_its_parts(store: BlockingStore, tmp_path: Path) -> None:
    call = {"status": "success", "value": {"name": "developer__shell", "arguments": {"command": "cat notes.txt"}}}
    text, image = {"type": "text", "text": "buy milk"}, {"type": "image", "data": IMAGE, "mimeType": "image/png"}
    value = {"content": [text], "isError": False}
    folder = write_goose(
        tmp_path,
        ("user", [{"type": "text", "text": "What do the notes say?"}, image], {"userVisible": True}),
        (
            "assistant",
            [
                {"type": "thinking", "thinking": "A file.", "signature": "x"},
                {"type": "text", "text": "I look."},
                *({"type": "toolRequest", "id": id, "toolCall": call} for id in ("c1", "c2", "c3")),
            ],
            {},
        ),
        (
            "user",
            [
                {"type": "toolResponse", "id": "c1", "toolResult": {"status": "success", "value": value}},
                {"type": "toolResponse", "id": "c2", "toolResult": {"status": "success", "value": [text]}},
                {"type": "toolResponse", "id": "c3", "toolResult": {"status": "error", "error": "No such tool"}},
            ],
            {},
        ),
        ("user", [{"type": "text", "text": "A summary."}], {"userVisible": False, "agentVisible": True}),
        ("assistant", [{"type": "text", "text": "Buy milk."}, {"type": "redactedThinking", "data": "x"}], {}),
    )
    found = import_history(store, "goose", folder)
    row, (user, call, one, two, three, last) = read_session(store, found.sessions[0])
    assert (row.cwd, row.title, row.created) == ("/home/me/notes", "Notes", 1_763_000_000_000)
    assert user["content"][1]["image_url"]["url"].endswith(IMAGE)
    assert (call["content"], call["reasoning_content"], len(call["tool_calls"])) == ("I look.", "A file.", 3)
    assert [each["content"] for each in (one, two, three, last)] == [
        "buy milk",
        "buy milk",
        "No such tool",
        "Buy milk.",
    ]
    assert [each["crow"].get("failed") for each in (one, two, three)] == [None, None, True]
    assert found.left_out == {"notes of the program": 1, "parts of type redactedThinking": 1}


@pytest.mark.parametrize("compressed", [True, False])
def test_threads_of_zed_are_imported(store: BlockingStore, tmp_path: Path, compressed: bool) -> None:
    mention = {"Mention": {"uri": {"File": {"abs_path": "/home/me/notes/a.txt"}}, "content": "milk"}}
    use = {
        "id": "c1",
        "name": "read_file",
        "raw_input": '{"path": "a"}',
        "input": {"path": "a"},
        "is_input_complete": True,
    }
    old = {
        "tool_use_id": "c1",
        "tool_name": "read_file",
        "is_error": False,
        "content": {"Text": "buy milk"},
        "output": None,
    }
    new = {**old, "tool_use_id": "c2", "is_error": True, "content": [{"Text": "gone"}, {"Image": {"source": IMAGE}}]}
    parts = [{"Thinking": {"text": "A file.", "signature": None}}, {"Text": "I look."}]
    calls = [{"ToolUse": use}, {"ToolUse": {**use, "id": "c2"}}, {"RedactedThinking": "x"}]
    folder = write_zed(
        tmp_path,
        {"User": {"id": "u", "content": [{"Text": "Look at "}, mention, {"Image": {"source": IMAGE, "size": None}}]}},
        {"Agent": {"content": [*parts, *calls], "tool_results": {"c1": old, "c2": new}}},
        "Resume",
        {"Agent": {"content": [{"Text": "Buy milk."}], "tool_results": {}}},
        compressed=compressed,
    )
    found = import_history(store, "zed", folder)
    row, (user, call, one, two, resumed, last) = read_session(store, found.sessions[0])
    assert (row.cwd, row.title, row.created) == ("/home/me/notes", "Notes", 1_763_114_400_000)
    assert [part.get("text") for part in user["content"][:2]] == ["Look at ", "@/home/me/notes/a.txt"]
    assert (call["content"], call["reasoning_content"]) == ("I look.", "A file.")
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"path": "a"}
    assert (one["content"], two["crow"]["failed"]) == ("buy milk", True)
    assert (resumed["role"], last["content"]) == ("user", "Buy milk.")
    assert found.left_out == {"contents of mentions": 1, "parts of messages": 1}


def test_earlier_threads_of_zed_are_imported(store: BlockingStore, tmp_path: Path) -> None:
    folder = write_zed(
        tmp_path,
        {"id": 0, "role": "user", "segments": [{"type": "text", "text": "What do the notes say?"}]},
        {
            "id": 1,
            "role": "assistant",
            "segments": [{"type": "thinking", "text": "A file."}, {"type": "text", "text": "I look."}],
            "tool_uses": [{"id": "c1", "name": "read_file", "input": {"path": "a"}}],
            "tool_results": [{"tool_use_id": "c1", "is_error": False, "content": "buy milk"}],
        },
        {"id": 2, "role": "system", "segments": []},
        version="0.2.0",
    )
    found = import_history(store, "zed", folder)
    _, messages = read_session(store, found.sessions[0])
    assert [message["content"] for message in messages] == ["What do the notes say?", "I look.", "buy milk"]
    assert found.left_out == {"messages of system": 1}


def test_a_thread_of_zed_that_is_broken_is_counted(store: BlockingStore, tmp_path: Path) -> None:
    folder = write_zed(tmp_path, "Resume")
    with closing(sqlite3.connect(folder / "threads.db")) as database:
        database.execute("UPDATE threads SET data = x'00'")
        database.commit()
    assert import_history(store, "zed", folder).left_out == {"broken rows": 1, "sessions without messages": 1}


@pytest.mark.parametrize(("agent", "name"), [("goose", "sessions.db"), ("zed", "threads.db")])
def test_a_file_that_is_no_database_is_an_error(store: BlockingStore, tmp_path: Path, agent: str, name: str) -> None:
    (tmp_path / name).write_text("no database")
    with pytest.raises(OSError, match="cannot be read as a database"):
        import_history(store, agent, tmp_path)
    with pytest.raises(FileNotFoundError):
        import_history(store, agent, tmp_path / "none")
