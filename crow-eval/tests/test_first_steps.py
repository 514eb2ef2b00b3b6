"""The suite `first-steps`: the checks of each task fail on its start, and pass on its solution."""

from pathlib import Path

import pytest
from crow_eval import runs
from crow_eval.tasks import find_dataset, load_dataset

pytestmark = pytest.mark.anyio

TASKS = load_dataset("first-steps")


def test_the_suite_has_twenty_tasks_of_one_to_four_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps = [task.settings.description.partition(" ")[0] for task in TASKS]
    assert {step: steps.count(step) for step in steps} == {"One": 9, "Two": 7, "Three": 3, "Four": 1}
    monkeypatch.chdir(tmp_path)
    assert find_dataset("first-steps") == "first-steps"


async def test_checks_fail_on_each_start_and_pass_on_each_solution():
    assert await runs.validate(TASKS, 2, ()) == []
