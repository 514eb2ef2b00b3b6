"""Queues of workflows."""

from dataclasses import dataclass


@dataclass
class WorkflowQueue:
    """A queue with its limits; `workflow(queue="name")` has none."""

    name: str
    concurrency: int | None = None
    """The most workflows at the same time in each process."""
    total: int | None = None
    """The most workflows at the same time in all processes."""
    rate: tuple[int, float] | None = None
    """The most starts, and the seconds in which they may happen."""
    per_tenant: int | None = None
    """The most workflows of each tenant at the same time; every start names its tenant then."""
