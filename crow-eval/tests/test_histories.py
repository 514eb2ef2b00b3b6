"""Histories that other agents have written are imported; `histories/README.md` says how they were recorded."""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from crow_core.messages.message import marker_kind
from crow_eval.histories import claude_code, codex, goose, kimi_code, pi, vibe, zed
from crow_eval.histories.history import ForeignSession
from crow_eval.histories.importing import READERS, import_history
from crow_persistence.checks import check
from crow_persistence.database import Database
from crow_persistence.loader import find_session, load_session
from crow_persistence.search import search
from crow_persistence.sql_store import BlockingStore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

RECORDED = Path(__file__).parent / "histories"
QUESTION = "What do the notes say?"
ANSWER = "The notes say: buy milk."


@pytest.fixture
def store(database: Database) -> Iterator[BlockingStore]:
    store = BlockingStore(database.url.render_as_string(hide_password=False), database.folder)
    yield store
    store.database.close()


def place(agent: str, folder: Path) -> Path:
    """Return the recorded history of an agent; a database is made of its dump."""
    if (dump := RECORDED / f"{agent}.sql").exists():
        file = folder / {"opencode": "opencode.db", "llm": "logs.db"}[agent]
        with closing(sqlite3.connect(file)) as database:
            database.executescript(dump.read_text())
        return file
    return RECORDED / f"{agent}.jsonl"


def read_messages(store: BlockingStore, id: str) -> list[Any]:
    with store.database.begin_read() as connection:
        return [entry for entry in load_session(connection, find_session(connection, id)).log if "role" in entry]


@pytest.mark.parametrize(
    ("agent", "tool", "times"),
    [
        ("claude-code", "Read", (1795466571, 1795466571)),
        ("codex", "exec_command", (1795466570, 1795466571)),
        ("opencode", "read", (1795466573, 1795466575)),
        ("pi", "read", (1795466570, 1795466570)),
    ],
)
def test_recorded_session_is_imported_once_with_its_call_and_its_times(
    store: BlockingStore, agent: str, tool: str, times: tuple[int, int], tmp_path: Path
) -> None:
    path = place(agent, tmp_path)
    found = import_history(store, agent, path)
    (id,) = found.sessions
    user, call, result, last = read_messages(store, id)
    assert QUESTION in user["content"]
    (use,) = call["tool_calls"]
    assert use["function"]["name"] == tool
    assert "notes.txt" in use["function"]["arguments"]
    assert (result["tool_call_id"], "buy milk" in result["content"]) == (use["id"], True)
    assert last["content"] == ANSWER
    with store.database.begin_read() as connection:
        row = find_session(connection, id)
        assert (row.cwd, row.created // 1000, row.updated // 1000) == ("/home/me/notes", *times)
        log = load_session(connection, row).log
        assert marker_kind(log[0]) == "imported"
        notes = log[0].get("crow", {})
        assert (notes["agent"], notes["file"], notes["left_out"]) == (agent, str(path), dict(found.left_out))
        assert id in {hit.session for hit in search(connection, "milk")}
        assert row.title, "the agent's, or the first words of the prompt"
    assert list(check(store.database)) == []
    again = import_history(store, agent, path)
    assert (again.sessions, again.known, again.messages) == ([], 1, 0)


def test_conversations_of_llm_are_imported(store: BlockingStore, tmp_path: Path) -> None:
    place("llm", tmp_path)
    found = import_history(store, "llm", tmp_path)
    first, second = (read_messages(store, id) for id in found.sessions)
    assert [(message["role"], message["content"]) for message in first] == [
        ("user", "What is the capital of France?"),
        ("assistant", "Paris."),
        ("user", "How many people live there?"),
        ("assistant", "It has about two million people."),
    ]
    assert [message["role"] for message in second] == ["user", "assistant", "tool", "assistant"]
    assert second[1]["tool_calls"][0]["function"] == {"name": "llm_version", "arguments": "{}"}
    assert found.left_out == {"system prompts": 1}


def test_earlier_tables_of_llm_are_read(store: BlockingStore, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "logs.db")) as database:
        database.executescript(
            "CREATE TABLE conversations (id, name, model); INSERT INTO conversations VALUES ('c', 'Hi', 'm');"
            "CREATE TABLE responses (id, prompt, system, response, conversation_id, datetime_utc);"
            "INSERT INTO responses VALUES ('r', 'Hi there.', NULL, 'Hello.', 'c', '2024-01-02T03:04:05');"
        )
    (id,) = import_history(store, "llm", tmp_path).sessions
    assert [message["content"] for message in read_messages(store, id)] == ["Hi there.", "Hello."]


def test_files_of_earlier_opencode_are_read(store: BlockingStore, tmp_path: Path) -> None:
    def write(path: str, value: Any) -> None:
        file = tmp_path / "storage" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))

    write("session/p/s1.json", {"id": "s1", "directory": "/gone", "title": "Old"})
    write("message/s1/m1.json", {"id": "m1", "role": "user", "time": {"created": 1_700_000_000_000}})
    write("part/m1/p1.json", {"type": "text", "text": QUESTION})
    write("message/s1/m2.json", {"id": "m2", "role": "assistant"})
    write(
        "part/m2/p1.json", {"type": "tool", "callID": "c", "tool": "read", "state": {"status": "error", "error": "No."}}
    )
    write("part/m2/p2.json", {"type": "step-start"})
    write("part/m2/p3.json", {"type": "text", "text": ANSWER})
    (tmp_path / "storage" / "part" / "m2" / "p4.json").write_text("{broken")
    found = import_history(store, "opencode", tmp_path)
    roles = [message["role"] for message in read_messages(store, found.sessions[0])]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert found.left_out["broken files"] == 1


def test_sub_agents_of_claude_code_get_a_session_of_their_own(store: BlockingStore, tmp_path: Path) -> None:
    lines = (RECORDED / "claude-code.jsonl").read_text().splitlines()
    side = [json.dumps({**json.loads(line), "isSidechain": True}) for line in lines]
    (tmp_path / "both.jsonl").write_text("\n".join([*lines, *side]))
    found = import_history(store, "claude-code", tmp_path)
    assert [len(read_messages(store, id)) for id in found.sessions] == [4, 4]


def test_history_that_is_no_database_is_named(store: BlockingStore, tmp_path: Path) -> None:
    (tmp_path / "logs.db").write_text("no database at all, but text")
    with pytest.raises(OSError, match="cannot be read as a database of llm"):
        import_history(store, "llm", tmp_path)


def test_what_is_no_session_is_counted_and_the_rest_is_imported(store: BlockingStore, tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "broken.jsonl").write_text("no JSON\n")
    (tmp_path / "good.jsonl").write_text((RECORDED / "pi.jsonl").read_text())
    found = import_history(store, "pi", tmp_path)
    assert len(found.sessions) == 1
    assert (found.left_out["broken lines"], found.left_out["sessions without messages"]) == (1, 1)


@pytest.mark.parametrize("columns", ["id", "id, name, tip_message_hash"])
def test_database_with_other_columns_is_named(store: BlockingStore, columns: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "logs.db")) as database:
        database.executescript(f"CREATE TABLE threads ({columns}); CREATE TABLE turns (thread_id);")
        database.execute(f"INSERT INTO threads VALUES ({', '.join('1' for _ in columns.split(','))})")
        database.execute("INSERT INTO turns VALUES (1)")
        database.commit()
    with pytest.raises(OSError, match="cannot be read as a database of llm"):
        import_history(store, "llm", tmp_path)


def read_vibe_messages(file: Path) -> Iterator[ForeignSession]:
    session = ForeignSession("vibe", "s", file)
    vibe.add_messages(session, file, 0)
    yield session


LINE_FILES = {
    **{agent: RECORDED / f"{agent}.jsonl" for agent in ("claude-code", "codex", "pi")},
    **{agent: next((RECORDED / agent).rglob("wire.jsonl")) for agent in ("kimi-code", "kimi-cli")},
    "vibe": next((RECORDED / "vibe").rglob("messages.jsonl")),
}
LINES = {agent: file.read_text().splitlines() for agent, file in LINE_FILES.items()}
LINE_READERS = {"claude-code": claude_code.read, "codex": codex.read, "pi": pi.read, "vibe": read_vibe_messages}
PARTS: dict[str, Any] = {
    "vibe": json.loads(next((RECORDED / "vibe").rglob("chunks/*.json")).read_text()),
    "goose": [
        {"type": "text", "text": "I look."},
        {"type": "toolRequest", "id": "c", "toolCall": {"status": "success", "value": {"name": "n", "arguments": {}}}},
        {"type": "toolResponse", "id": "c", "toolResult": {"status": "success", "value": {"content": [{"text": "x"}]}}},
    ],
    "zed": [
        {"User": {"content": [{"Text": "Hi"}, {"Mention": {"uri": {"File": {"abs_path": "a"}}, "content": "x"}}]}},
        {
            "Agent": {
                "content": [{"ToolUse": {"id": "c", "name": "n"}}],
                "tool_results": {"c": {"content": [{"Text": "x"}]}},
            }
        },
        {
            "role": "assistant",
            "segments": [{"text": "x"}],
            "tool_uses": [{"id": "c"}],
            "tool_results": [{"content": "x"}],
        },
    ],
}
"""What `add_entries`, `add_message` and `add_thread` of these agents read."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "id", "content"]), inner)
    ),
    max_leaves=5,
)


def replace_some(value: Any, draw: Any) -> Any:
    """Replace some values of a JSON value by others."""
    if draw(st.integers(0, 30)) == 0:
        return draw(VALUES)
    if isinstance(value, dict):
        return {key: replace_some(each, draw) for key, each in value.items()}  # pyright: ignore
    return [replace_some(each, draw) for each in value] if isinstance(value, list) else value  # pyright: ignore


@given(data=st.data(), agent=st.sampled_from([*LINES]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_any_broken_line_costs_at_most_its_message(data: st.DataObject, agent: str, tmp_path: Path) -> None:
    lines = [json.dumps(replace_some(json.loads(line), data.draw)) for line in LINES[agent]]
    cut = data.draw(st.integers(0, len(lines) - 1))
    lines[cut] = lines[cut][: data.draw(st.integers(0, len(lines[cut])))]
    file = tmp_path / "rollout-1.jsonl"
    file.write_text("\n".join(lines))
    for session in LINE_READERS.get(agent, kimi_code.read)(file):
        check_session(session)


@given(data=st.data(), agent=st.sampled_from([*PARTS]))
def test_any_broken_part_of_an_object_is_passed_over(data: st.DataObject, agent: str) -> None:
    session = ForeignSession(agent, "s", Path("/"))
    parts: Any = [replace_some(part, data.draw) for part in PARTS[agent]]
    match agent:
        case "vibe":
            vibe.add_entries(session, [part for part in parts if isinstance(part, dict)])
        case "goose":
            goose.add_message(session, 0, data.draw(st.sampled_from(["user", "assistant", None])), parts)
        case _:
            zed.add_thread(session, 0, {"messages": parts})
    check_session(session)


def check_session(session: ForeignSession) -> None:
    """Check that the messages of a session can be stored."""
    session.settle()
    assert isinstance(session.left_out, Counter)
    for at, message in session.entries:
        assert isinstance(at, int)
        assert message.get("role") in ("user", "assistant", "tool")
        assert isinstance(message.get("content"), (str, list, type(None)))
        json.dumps(message)


def test_every_agent_has_a_recorded_history() -> None:
    recorded = {file.stem for file in RECORDED.iterdir() if file.suffix in (".jsonl", ".sql")}
    assert recorded | {"vibe", "kimi-code", "goose", "zed"} == READERS.keys()  # these are in test_recorded_folders.py
