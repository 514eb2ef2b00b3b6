"""How far an open session is stored."""

from dataclasses import dataclass, field

from sqlalchemy import Engine

from crow_persistence.requests import Trail


@dataclass
class Track:
    """How far a session is written down."""

    owner: str = ""
    """Whose lease it is written under; see `leases`."""
    number: int = 0
    """Of the `sessions` row; 0 until there is one."""
    head: int | None = None
    """The `messages` row behind which the next entry goes."""
    rows: list[int] = field(default_factory=list[int])
    """The `messages` rows of the log's first entries, in order; what follows in the log is still to be written."""
    options: dict[str, str] = field(default_factory=dict[str, str])
    engine: Engine | None = None
    """Of the database in which these rows are; None when a write failed, and what it left must be looked at first."""
    trail: Trail | None = None
