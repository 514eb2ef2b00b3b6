"""The values that an app exchanges with a store of sessions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from crow_core.messages.message import Message
from crow_core.session_state import SessionState

ArchiveFilter = Literal["exclude", "include", "only"]
"""Whether archived sessions are left out of a list, or are in it, or alone in it."""


@dataclass
class Record:
    """A session as it was stored."""

    id: str
    log: list[Message]
    """The entries on the path to the session's head, oldest first, without rewound ones."""
    title: str = ""
    options: dict[str, str] = field(default_factory=dict[str, str])
    """The chosen options: option id to value."""
    system: str | None = None
    """The system prompt of the session; None when no request was made yet."""
    tools: list[dict[str, Any]] | None = None
    """The list of tools that was last sent, in the form of chat completions."""
    damage: str = ""
    """A sentence for the user about entries that could not be restored: "341 of 343 messages …". "" for none."""
    state: SessionState = field(default_factory=SessionState)
    """Values that the store adds to `session.state`."""


@dataclass(frozen=True)
class Summary:
    """A session in a list. Times are milliseconds since 1970."""

    id: str
    cwd: str
    roots: Sequence[str]
    title: str
    created: int
    updated: int
    archived: bool = False
    """Whether lists leave it out unless they are asked for it."""


@dataclass(frozen=True)
class SessionChange:
    """A change of a stored session that is not an entry of its log; None leaves things as they are."""

    title: str | None = None
    archived: bool | None = None


@dataclass(frozen=True)
class Page:
    """One page of the list of sessions, latest first."""

    sessions: Sequence[Summary]
    cursor: str | None = None
    """Cursor of the next page; None at the end."""


@dataclass
class KeyedOrigin:
    """A session that another one continues, up to some of its turns with a key."""

    session: str
    """Its id."""
    prefixes: tuple[str, ...]
    """The keys that begin so are those of turns to keep or to drop."""
    keys: frozenset[str]
    """The keys of the turns to keep, among these."""
