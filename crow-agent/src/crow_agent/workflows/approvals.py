"""A question that a workflow asks a person with `approve`, and the answer."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Approval:
    """An answer; it is true if it approves."""

    approved: bool
    note: str = ""
    """The person's note; empty if there is none, or if no answer came in time."""

    def __bool__(self) -> bool:
        return self.approved


@dataclass
class WaitingApproval:
    """A run that waits for a person."""

    workflow_id: str
    label: str
    """The step."""
    value: Any
    """The value to approve, as JSON values."""
    seconds: float
    """The seconds for which it waits."""
    answer: Approval | None = None
    """The answer that was given, and that no program has taken yet; None if it waits for one."""
