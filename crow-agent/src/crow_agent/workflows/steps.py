"""The stored steps of a run, under the numbers that `fork` takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from crow_agent.workflows.errors import WorkflowError
from crow_agent.workflows.location import find_url
from crow_agent.workflows.values import to_time

ASKS = "DBOS.setEvent"
"""The stored name of the part of an approval that shows the question, and of the part that takes it back."""
ANSWER, APPROVAL = 2, 5
"""The numbers of an approval are its own, that of the question, that of the answer, and two more: five."""


@dataclass
class WorkflowStep:
    """A stored step of a run: a prompt, a function, an approval, a sleep."""

    number: int
    """The number that `fork` takes to do it again; in a branch that of the branch, and 0 in a branch of a branch."""
    label: str
    """The number, and for a step of a branch its number there: 4.1."""
    name: str
    state: str
    """`done`, `failed` or `waiting`."""
    result: Any = None
    """As JSON values."""
    error: str = ""
    started: datetime | None = None
    ended: datetime | None = None


async def list_steps(workflow_id: str, *, url: str = "", env: Mapping[str, str] | None = None) -> list[WorkflowStep]:
    """List the stored steps of a run, in the order of the program. It needs no running engine.

    Raises WorkflowNotFound.
    """
    from crow_agent.workflows import stored_runs

    async with stored_runs.open_store(url or find_url(env)[0]) as store:
        await stored_runs.find_run(store, workflow_id)
        return to_steps(await store.list_workflow_steps_async(workflow_id))


def to_steps(rows: Sequence[Mapping[str, Any]]) -> list[WorkflowStep]:
    """Convert stored steps; the parts of an approval become one step."""
    stored = {int(row["function_id"]): row for row in rows}
    approvals = find_approvals(stored)
    parts = {number for first in approvals for number in range(first + 1, first + APPROVAL)}
    found = {number: to_step(number, row) for number, row in stored.items() if number not in parts}
    found |= {first: to_approval(first, stored) for first in approvals}
    return [found[number] for number in sorted(found, key=split_number)]


def find_approvals(stored: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Find the numbers of the approvals among stored steps."""
    found: list[int] = []
    for number in sorted(stored):
        if stored[number]["function_name"] == ASKS and not (found and number < found[-1] + APPROVAL):
            found.append(number - 1)
    return found


def find_first_to_fork(workflow_id: str, rows: Sequence[Mapping[str, Any]], step: int | None) -> int:
    """Return the number at which a fork begins, for None the one after the last step.

    A number within an approval means what follows its answer, or the approval itself while it has none. Raises
    WorkflowError for a number that is less than 1, or greater than that after the last step.
    """
    stored = {int(row["function_id"]): row for row in rows}
    last = max((each.number for each in to_steps(rows)), default=0)

    def find(number: int) -> int:
        for first in find_approvals(stored):
            if first < number < first + APPROVAL:
                return first + APPROVAL if first + ANSWER in stored else first
        return number

    end = find(last + 1)
    found = end if step is None else find(step)
    if not 1 <= found <= end:
        raise WorkflowError(
            f"Workflow {workflow_id} has no step {step}{f': its last is {last}' if last else ''}. "
            f"`crow workflows show {workflow_id}` lists its steps."
        )
    return found


def split_number(number: int) -> tuple[int, int]:
    """Split a stored number into that of the workflow's own task and that in a branch, 0 for none."""
    from crow_agent.workflows.numbering import BRANCH_STEPS, BRANCHES

    first, second = divmod(number, BRANCH_STEPS)
    if first >= BRANCHES:  # of a branch within a branch, whose path is not stored
        return BRANCHES, number
    return (first, second) if first else (number, 0)


def to_step(number: int, row: Mapping[str, Any], name: str = "") -> WorkflowStep:
    """Convert a stored step."""
    from crow_agent.workflows.numbering import BRANCHES

    first, second = split_number(number)
    is_nested, error = first == BRANCHES, row["error"]
    return WorkflowStep(
        0 if is_nested else first,
        "" if is_nested else f"{first}.{second}" if second else str(first),
        name or str(row["function_name"]).removeprefix("DBOS."),
        "done" if error is None else "failed",
        row["output"],
        "" if error is None else str(error),
        to_time(row["started_at_epoch_ms"]),
        to_time(row["completed_at_epoch_ms"]),
    )


def to_approval(first: int, stored: Mapping[int, Mapping[str, Any]]) -> WorkflowStep:
    """Convert the parts of an approval."""
    step = to_step(first, stored[first + 1], "approve")
    answer = stored.get(first + ANSWER)
    if answer is None:
        step.state, step.ended = "waiting", None
        return step
    given = answer["output"] or {"approved": False, "note": ""}
    step.result = {name: given[name] for name in ("approved", "note", "by") if name in given}
    step.ended = to_step(first, answer).ended
    return step
