"""A store of sessions, and the values that an app exchanges with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from msgspec import UNSET

from crow_core.acp.schema import SessionInfo
from crow_core.messages.message import Message
from crow_core.session.folders import find_shell
from crow_core.session.session import Session
from crow_core.session_state import SessionState

ArchiveFilter = Literal["exclude", "include", "only"]
"""Place of archived sessions in a list: left out, included, or alone."""


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
    """True if lists leave it out unless they are asked for it."""


@dataclass(frozen=True)
class SessionChange:
    """A change to a stored session that is not an entry of its log; None leaves things as they are."""

    title: str | None = None
    archived: bool | None = None


@dataclass(frozen=True)
class Page:
    """One page of the list of sessions, latest first."""

    sessions: Sequence[Summary]
    cursor: str | None = None
    """Cursor of the next page; None at the end."""


def to_session_info(found: Summary, *, archived: bool) -> SessionInfo:
    """Convert a stored session to an item of ACP's list; `archived` says whether to tell if it is archived."""
    return SessionInfo(
        session_id=found.id,
        cwd=found.cwd,
        additional_directories=list(found.roots[1:]) or UNSET,
        title=found.title or UNSET,
        updated_at=datetime.fromtimestamp(found.updated / 1000, UTC).isoformat(timespec="milliseconds"),
        archived=found.archived if archived else UNSET,
    )


def restore(session: Session, record: Record) -> None:
    """Let a new session continue a stored one."""
    session.log.entries += record.log
    session.log.title, session.log.damage = record.title, record.damage
    session.prompts.system = record.system
    session.toolbox.restore(record.tools)
    session.state.update(record.state)
    session.folders.current = find_shell(record.log).get("folder", "")
    session.stream.used_ids |= {use["id"] for entry in record.log for use in entry.get("tool_calls", ())}


class Store(Protocol):
    """Keeps the sessions of an app: `crow.store = MyStore()`. `crow_core.testing.MemoryStore` is the smallest one.

    The entries are those of `session.log`. A store that gathers what it writes hears of each by the hooks `message` and
    `model_call`. Every method may raise StoreError.
    """

    async def load(self, id: str) -> Record | None:
        """Return the stored session with this id, which belongs to this process from now on; None if there is none.

        Raises SessionBusy if another process has the session open.
        """
        ...

    async def fork(self, id: str, new_id: str, at: str) -> Record | None:
        """Return a new session that continues a stored one at the entry with the id `at`, or at the end for "".

        None if there is no such session.
        """
        ...

    async def list_sessions(self, cwd: str, cursor: str, limit: int, archived: ArchiveFilter) -> Page:
        """Return a page of stored sessions, of one folder or of all for "". The cursor "" is the start.

        Raises ValueError for an unknown cursor.
        """
        ...

    async def find(self, id: str) -> Summary | None:
        """Return a stored session as a list shows it; None if there is none."""
        ...

    async def change(self, id: str, change: SessionChange) -> Summary | None:
        """Change a stored session's title or whether it is archived. Return it; None if there is none.

        Raises SessionBusy if it cannot be archived, or brought back, because another process has it open.
        """
        ...

    async def delete(self, id: str) -> None:
        """Delete a stored session; do nothing for an unknown id."""
        ...

    async def write_draft(self, session: Session, reply: Message) -> None:
        """Write the text of a streaming reply that has arrived since the last call, under the id of the reply.

        Called at most once in `crow_core.session.log.DRAFT_INTERVAL` seconds, so that a killed process loses little.
        `reply["crow"]["part"]` counts the calls for a reply: 0 replaces all earlier parts, any other continues them.
        """
        ...

    async def flush(self, session: Session) -> None:
        """Return when the log, the drafts and the model calls of a session are stored.

        Called before the client is shown what follows from them, and at the end of a turn.
        """
        ...
