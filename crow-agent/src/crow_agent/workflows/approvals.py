"""The answer of a person to what a workflow asked with `approve`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Approval:
    """An answer; it is true if it approves."""

    approved: bool
    note: str = ""
    """The person's note; empty if there is none, or if no answer came in time."""

    def __bool__(self) -> bool:
        return self.approved
