"""The progress of storing an open session."""

from dataclasses import dataclass, field

from crow_core.models.model_call import ModelCall
from sqlalchemy import Engine

from crow_persistence.audit import AuditRow
from crow_persistence.requests import RequestEncoder


@dataclass
class Progress:
    """The rows of an open session and of its log's entries."""

    owner: str = ""
    """Owner whose lease the session is written under; see `leases`."""
    number: int = 0
    """Number of the `sessions` row; 0 until there is one."""
    head: int | None = None
    """The `messages` row that the next entry follows."""
    rows: list[int] = field(default_factory=list[int])
    """The `messages` rows of the first entries of the log, in order. Later entries are not stored yet."""
    options: dict[str, str] = field(default_factory=dict[str, str])
    """The options as stored in the `sessions` row."""
    cwd: str = ""
    """The working folder as stored in the `sessions` row."""
    decisions: dict[str, AuditRow] = field(default_factory=dict[str, AuditRow])
    """The decisions on tool calls whose results are not stored yet, by tool call id."""
    is_archived: bool = False
    """True if lists leave the session out."""
    engine: Engine | None = None
    """Engine of the database that holds these rows. None after a write failed: `writer.resync` must run first."""
    is_copy: bool = False
    """True if the session was stored before, in a database that is gone."""
    has_draft: bool = True
    """True if `drafts` may have a row of the session."""
    draft_ends: dict[str, str] | None = None
    """The last characters of each text of the draft, in which a secret may begin; None if they must be read first."""
    model_calls: list[ModelCall] = field(default_factory=list[ModelCall])
    """Model calls that wait for the session's first message, as a session without one is not stored."""
    lost_calls: set[str] = field(default_factory=set[str])
    """Ids of model calls that could not be stored."""
    encoder: RequestEncoder | None = None
    """Encoder of the session's model requests; None until the first one."""
