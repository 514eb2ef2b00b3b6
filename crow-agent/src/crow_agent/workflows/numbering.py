"""The steps of a running workflow, and their numbers."""

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from zlib import crc32

from dbos import StepReservation
from dbos import error as dbos_errors
from dbos._context import (
    DBOSContext,
    _set_local_dbos_context,  # pyright: ignore[reportPrivateUsage]
    get_local_dbos_context,
)

from crow_agent.durable import DurableSession, outside_workflows
from crow_agent.workflows.errors import WorkflowChanged, WorkflowError

T = TypeVar("T")
logger = logging.getLogger("crow_agent")
BRANCH_STEPS, BRANCHES = 1 << 16, 1 << 14
"""The most steps of a branch, and the most branches with exact numbers, of the 2**31 numbers of a workflow."""


@dataclass
class Fork:
    """The past of a forked run."""

    origins: list[str] = field(default_factory=list[str])
    """The run that it was forked from, then the one that this one was forked from, and so on; empty for no fork."""
    step: int = 0
    """Its first step of its own."""
    labels: list[str] = field(default_factory=list[str])
    """The steps that it has taken over."""


@dataclass
class WorkflowRun:
    """The execution of a workflow in this process."""

    id: str
    task: "asyncio.Task[Any]"
    sessions: list[DurableSession] = field(default_factory=list[DurableSession])
    """The sessions that it has opened."""
    branches: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Its branches, by the first of their numbers."""
    fork: Fork | None = None
    """Its past; None until it is looked up."""
    is_suspended: bool = False
    is_replaced: bool = False
    """True if the workflow has been started again in this process; this execution is not put back into its queue."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its function has ended, and its sessions are closed."""

    def suspend(self, why: str) -> asyncio.CancelledError:
        """Stop here without a result: whoever runs the workflow next goes on. Return the error to raise."""
        if not self.is_suspended:
            logger.info("Workflow %s is suspended: %s", self.id, why)
        self.is_suspended = True
        self.task.cancel()
        return asyncio.CancelledError(why)


class Numbering:
    """The numbers of the steps in one task of a workflow, which do not depend on the other tasks.

    The first call in a task of the workflow takes a number from the task that started it. All calls of the new task are
    numbered below that one.
    """

    def __init__(self, run: WorkflowRun, context: DBOSContext, path: tuple[int, ...], base: int) -> None:
        self.run = run
        self.path = path
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self._context = context
        self._base = base

    def reserve(self) -> tuple[StepReservation, str]:
        """Take the next number for a step; return it with its label, such as 3, or 4.1 in a branch."""
        step = StepReservation(self._context.snapshot_step_ctx())
        return step, ".".join(map(str, (*self.path, step.step_id - self._base)))

    def make_branch(self, make: Callable[[WorkflowRun, DBOSContext, tuple[int, ...], int], T]) -> T:
        """Take the next number for a branch. Raises WorkflowError if there are too many."""
        self._context.function_id += 1
        path = (*self.path, self._context.function_id - self._base)
        if len(path) == 1 and path[0] < BRANCHES:
            base = path[0] * BRANCH_STEPS
        else:
            base = (1 << 30) + crc32(repr(path).encode()) % (1 << 20) * (1 << 10)
        if self.run.branches.setdefault(base, path) != path:
            raise WorkflowError(
                f"Workflow {self.run.id} does too much at the same time. Let a workflow of its own do a part of it."
            )
        context = copy.copy(self._context)
        context.function_id = base
        return make(self.run, context, path, base)

    def enter_task(self) -> None:
        """Number the calls of the running task from now on."""
        self.task = asyncio.current_task()
        _set_local_dbos_context(self._context)

    @contextmanager
    def numbering(self) -> Generator[None]:
        """Number the calls in the block."""
        before = get_local_dbos_context()
        self.enter_task()
        try:
            yield
        finally:
            _set_local_dbos_context(before)


async def run_step(step: StepReservation, label: str, name: str, function: Callable[[str], Awaitable[T]]) -> T:
    """Run a function as a step, with the step's label, or return its stored result. Raises WorkflowChanged."""

    async def run() -> T:
        with outside_workflows():
            return await function(label)

    try:
        return await step.run_async({"name": name, "preemptible": True}, run)
    except dbos_errors.DBOSUnexpectedStepError as error:
        raise explain_change(error) from None


def explain_change(error: dbos_errors.DBOSUnexpectedStepError) -> WorkflowChanged:
    """Convert the error for a step that is not the one that was stored."""
    id, number, expected, recorded = error.inputs
    return WorkflowChanged(
        f"The code of workflow {id} has changed: its step {number} was {recorded!r} and is now {expected!r}. "
        "Run it with the code that began it, or give the changed code another version."
    )
