"""The parts of a dataset for a search: tasks to learn from, to choose by, and to report on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from crow_core.errors import ConfigError

from crow_eval.tasks import AnswerCheck, FileCheck, Task

LEAST_TASKS = 12
"""Six for the report, the fewest pairs for which McNemar's exact test can reach 0.05, and three for each other part."""
LEAST_ANSWER = 4
"""Characters of an expected text that is looked for: a shorter one is anywhere."""


@dataclass(frozen=True)
class TaskParts:
    """The ids of the tasks of each part."""

    train: list[str]
    validation: list[str]
    test: list[str]


def split_tasks(tasks: Sequence[Task], seed: int, max_runs: int) -> TaskParts:
    """Split tasks by chance: half for the report, up to a quarter to choose by, and the others to learn from.

    Each candidate that goes on is run on all tasks to choose by, so these are at most a tenth of `max_runs`.
    Tasks with the same prompt and files stay together, so that the report has none that the search saw.
    Raises ConfigError if there are too few.
    """
    groups: dict[object, list[str]] = {}
    for task in tasks:
        groups.setdefault(find_content(task), []).append(task.id)
    if len(groups) < LEAST_TASKS:
        different = " different" if len(groups) < len(tasks) else ""
        raise ConfigError(
            f"There are {len(groups):,}{different} tasks that tell something, and a search needs {LEAST_TASKS}: 3 "
            "to learn from, 3 to choose by, and 6 that it never sees. With fewer, no difference could be shown."
        )
    shuffled = [*groups.values()]
    Random(seed).shuffle(shuffled)
    half = len(shuffled) // 2
    end = half + min(len(shuffled) // 4, max(3, max_runs // 10))
    parts = shuffled[:half], shuffled[half:end], shuffled[end:]
    test, validation, train = ([id for group in part for id in group] for part in parts)
    return TaskParts(train, validation, test)


def find_content(task: Task) -> object:
    """Return a key that is equal for tasks that ask the same of the same files."""
    if task.has_folder and task.folder.is_dir():
        files = tuple(
            (str(path.relative_to(task.folder)), path.read_bytes())
            for path in sorted((task.folder / "files").rglob("*"))
            if path.is_file()
        )
    else:
        files = tuple(sorted(task.files.items()))
    return " ".join(task.prompt.split()).casefold(), files, task.settings.commit


def find_leaks(tasks: Sequence[Task]) -> list[str]:
    """List the tasks whose prompt holds the text that a check expects."""
    return [task.id for task in tasks if any(text in task.prompt for text in list_expected(task))]


def find_quoted(tasks: Sequence[Task], text: str, before: str) -> list[str]:
    """List the tasks whose expected texts a candidate holds, and the prompt before the search does not."""
    return [task.id for task in tasks if any(each in text and each not in before for each in list_expected(task))]


def list_expected(task: Task) -> Iterator[str]:
    """Yield the texts that the checks of a task expect word for word."""
    for check in task.checks:
        if isinstance(check, AnswerCheck | FileCheck):
            expected = [check.contains, check.equals if isinstance(check, FileCheck) else None]
            yield from (each.strip() for each in expected if each and len(each.strip()) >= LEAST_ANSWER)
