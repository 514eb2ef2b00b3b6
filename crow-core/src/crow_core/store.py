"""What an app asks of whoever remembers its sessions, and what it is given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crow_core.messages import Message


@dataclass
class Record:
    """A session as it was stored."""

    id: str
    log: list[Message]
    """The entries on the path to its tip, oldest first; not what was rewound."""
    title: str = ""
    options: dict[str, str] = field(default_factory=dict[str, str])
    """What was chosen: option id to value."""
    system: str | None = None
    """The system prompt it was begun with; None when the model was never asked."""
    tools: list[dict[str, Any]] | None = None
    """The tool list that was last sent, in the shape of chat completions."""
    damage: str = ""
    """What could not be restored, as a sentence for a person: "341 of 343 messages …"."""
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the store wants to find in `session.state`."""


@dataclass(frozen=True)
class Summary:
    """A session as a list shows it. Times are milliseconds since 1970."""

    id: str
    cwd: str
    roots: Sequence[str]
    title: str
    created: int
    updated: int


@dataclass(frozen=True)
class Page:
    """A part of the list of sessions, the latest first."""

    sessions: Sequence[Summary]
    cursor: str | None = None
    """Where the next part begins; None at the end."""
