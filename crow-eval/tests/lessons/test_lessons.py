"""`crow lessons` finds planted faults of stored and imported sessions, and little else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crow_eval.histories.importing import import_history
from crow_eval.lessons.corrections import find_correction
from crow_eval.lessons.instruction_files import find_instruction_file
from crow_eval.lessons.lessons import make_lessons, read_sessions
from crow_persistence.database import Database
from crow_persistence.sql_store import BlockingStore

pytestmark = pytest.mark.anyio
Planted = set[tuple[str, str, str]]
"""The session, the kind and the words of each planted fault."""
TEXTS = Path(__file__).parent / "corrections"


def count_hits(planted: Planted, found: Planted) -> tuple[float, float]:
    """Return the precision and the recall: found is a fault of the session and the kind whose quote has the words."""

    def fits(one: tuple[str, str, str], other: tuple[str, str, str]) -> bool:
        words, quote = (" ".join(each.split()).rstrip(".") for each in (one[2], other[2]))
        return one[:2] == other[:2] and (words in quote or quote in words)

    right = sum(any(fits(one, other) for one in planted) for other in found)
    recalled = sum(any(fits(one, other) for other in found) for one in planted)
    return right / len(found), recalled / len(planted)


async def test_planted_faults_are_found_with_texts_that_no_pattern_was_made_for(
    planted: Planted, stored: Database, tmp_path: Path
) -> None:
    with stored.begin_read() as connection:
        reading = read_sessions(connection, 0, "", ())
        lessons = make_lessons(connection, reading.signals, tmp_path, (), 1_000)
    assert reading.sessions == 30
    found = {(one.session, lesson.kind, one.quote) for lesson in lessons for one in lesson.evidence}
    precision, recall = count_hits(planted, found)
    assert (precision >= 0.9, recall >= 0.8) == (True, True), (precision, recall, found ^ planted)
    assert {lesson.kind for lesson in lessons} >= {"correction", "rejection", "undone", "failure", "detour", "loop"}
    assert next(lesson for lesson in lessons if lesson.kind == "detour").line.startswith(
        "Run `echo site.conf`, not `cat"
    )


def test_patterns_know_the_texts_that_they_were_made_for() -> None:
    lines = (TEXTS / "tuned.txt").read_text("utf-8").splitlines()
    assert [line for line in lines if line[0] in "+-" and (line[0] == "+") != bool(find_correction(line[2:]))] == []


def test_messages_for_a_model_are_read_and_cleaned_while_sessions_are_read(database: Database, tmp_path: Path) -> None:
    store = BlockingStore(database.url.render_as_string(hide_password=False), database.folder)
    said = ["Begin.", f"Look at {tmp_path}/notes.", "The key is sk-abcdefghij0123456789klmnop."]
    for number in range(3):
        lines = [{"type": "user", "cwd": str(tmp_path), "message": {"content": text}} for text in said]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        import_history(store, "claude-code", tmp_path / f"{number}.jsonl")
    store.database.close()
    with database.begin_read() as connection:
        reading = read_sessions(connection, 0, str(tmp_path), (), for_model=True)
    texts = [(one.text, one.is_first) for one in reading.said]
    assert texts == [("Begin.", True), ("Look at [project]/notes.", False), ("The key is [redacted].", False)] * 3


def test_skill_that_all_turns_used_gets_the_line(tmp_path: Path) -> None:
    (skill := tmp_path / "skills" / "deploy").mkdir(parents=True)
    assert find_instruction_file({str(tmp_path)}, {str(skill)}, tmp_path) == tmp_path / "AGENTS.md"
    (skill / "SKILL.md").write_text("Deploy.\n")
    assert find_instruction_file({str(tmp_path)}, {str(skill)}, tmp_path) == skill / "SKILL.md"
    assert find_instruction_file({str(tmp_path)}, {str(skill), ""}, tmp_path) == tmp_path / "AGENTS.md"


def test_line_of_a_folder_in_a_repository_is_for_its_nearest_file(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (inner := tmp_path / "a" / "b").mkdir(parents=True)
    assert find_instruction_file({str(inner)}, {""}, tmp_path) == tmp_path / "AGENTS.md"
    (tmp_path / "a" / "CLAUDE.md").write_text("x\n")
    assert find_instruction_file({str(inner)}, {""}, tmp_path) == tmp_path / "a" / "CLAUDE.md"


@pytest.fixture
def imported(tmp_path: Path) -> Iterator[BlockingStore]:
    store = BlockingStore(f"sqlite:///{tmp_path / 'crow.db'}", tmp_path)
    yield store
    store.database.close()


def test_histories_that_other_agents_wrote_without_faults_have_no_lessons(
    imported: BlockingStore, tmp_path: Path
) -> None:
    recorded = Path(__file__).parents[1] / "histories"
    for agent in ("claude-code", "codex", "pi"):
        import_history(imported, agent, recorded / f"{agent}.jsonl")
    with imported.database.begin_read() as connection:
        reading = read_sessions(connection, 0, "", ())
        assert (reading.sessions, make_lessons(connection, reading.signals, tmp_path, (), 10)) == (3, [])


def test_rejections_loops_and_refused_arguments_of_claude_code_are_lessons(
    imported: BlockingStore, tmp_path: Path
) -> None:
    rejected = (
        "The user doesn't want to proceed with this tool use. The tool use was rejected. "
        "To tell you how to proceed, the user said:\nput it into fixtures/"
    )
    refused = "<tool_use_error>InputValidationError: path is missing</tool_use_error>"
    results = [("Edit", {"a": 1}, rejected), *[("Edit", {"b": 2}, refused)] * 2, *[("Read", {"c": 3}, "same")] * 3]
    lines: list[dict[str, Any]] = [{"type": "user", "cwd": str(tmp_path), "message": {"content": "Begin."}}]
    for number, (name, given, text) in enumerate(results):
        use = {"type": "tool_use", "id": f"t{number}", "name": name, "input": given}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": text, "is_error": text != "same"}
        lines += [
            {"type": "assistant", "message": {"content": [use]}},
            {"type": "user", "message": {"content": [result]}},
        ]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)))
    import_history(imported, "claude-code", tmp_path / "talk.jsonl")
    with imported.database.begin_read() as connection:
        lessons = make_lessons(connection, read_sessions(connection, 0, "", ()).signals, tmp_path, (), 10)
    found = {lesson.kind: (lesson.times, lesson.line) for lesson in lessons}
    assert found.keys() == {"rejection", "refused", "loop"}
    assert found["rejection"] == (1, "")
    assert found["refused"][0] == 2
    assert [one.quote for lesson in lessons for one in lesson.evidence if lesson.kind == "rejection"] == [
        "put it into fixtures/"
    ]
