"""`crow lessons` finds planted faults of stored and imported sessions, and little else."""

from pathlib import Path

import pytest
from crow_eval.lessons.corrections import find_correction
from crow_eval.lessons.lessons import make_lessons, read_sessions
from crow_persistence.database import Database

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
