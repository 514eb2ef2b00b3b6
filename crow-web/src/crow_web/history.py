"""A stored session as its log shows it, also while another process has it open."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from crow_core.acp.schema import ToolCallUpdate
from crow_core.content import replay
from crow_core.messages.message import Message, marker_kind
from crow_persistence import leases, loader
from crow_persistence.database import Database
from crow_persistence.tables import draft_parts, messages
from sqlalchemy import Connection, Row, func, select

from crow_web.live import Source
from crow_web.log import BlockRenderer, Log

STEP = 200
"""Updates by which the beginning of a long log is left out."""
MOST = 600
"""Updates of a log that are shown at most: the last ones."""
BLOCKS = 10
"""Numbers of blocks that are kept free for each update that is left out."""


@dataclass
class History:
    """The parts of a stored session that a chat shows."""

    id: str
    folder: str
    title: str
    holder: str
    """The process that has the session open; empty for none."""
    version: tuple[Any, ...]
    """Changes whenever the session does."""
    log: Log | None = None
    """The log; None if it is as before."""
    blocks: dict[str, str] = field(default_factory=dict[str, str])
    sent: frozenset[str] = frozenset()
    """The names that pages gave to the prompts of the session."""
    is_whole: bool = True
    """False if the beginning is left out."""


def read_history(
    database: Database,
    renderer: BlockRenderer,
    id: str,
    known: tuple[Any, ...] = (),
    *,
    is_ours: bool = False,
    before: int = 0,
    apps: Mapping[str, str] = MappingProxyType({}),
) -> History:
    """Read a session by its id or the beginning of it. Raises StoreError if there is none.

    With `is_ours`, this page has it open, and no turn runs. With `before`, a time in milliseconds since 1970, the turn
    that began then is left out. `apps` has the HTML of those that are shown, by the ids of their tool calls.
    """
    with database.begin_read() as connection:
        row = loader.find_session(connection, id)
        holder = "" if leases.is_free(connection, row, "") else leases.describe_owner(str(row.owner))
        version = (holder, row.updated, *find_version(connection, row.number))
        history = History(row.id, row.cwd, row.title or "", holder, version)
        entries = load_log(connection, row, before) if version != known else None
    if entries is not None:
        history.sent = frozenset(sent for entry in entries if (sent := entry.get("crow", {}).get("sent")))
        history.log, history.blocks, history.is_whole = show_log(
            entries, row.cwd, renderer, apps, is_running=bool(holder) and not is_ours
        )
    return history


def load_log(connection: Connection, row: "Row[Any]", before: int) -> list[Message]:
    """Load the log of a session, without the turn that began at `before`."""
    record, progress = loader.load_with_progress(connection, row)
    if before:
        first = select(func.min(messages.c.id)).where(
            messages.c.session == row.number, messages.c.at >= before, messages.c.kind == "user"
        )
        if (prompt := connection.scalar(first)) in progress.rows:
            return record.log[: progress.rows.index(prompt)]
    return record.log


def find_version(connection: Connection, number: int) -> tuple[Any, ...]:
    last = select(func.max(messages.c.id)).where(messages.c.session == number)
    parts = select(func.count()).select_from(draft_parts).where(draft_parts.c.session == number)
    return connection.scalar(last), connection.scalar(parts)


def show_log(
    entries: list[Message], cwd: str, renderer: BlockRenderer, apps: Mapping[str, str], *, is_running: bool
) -> tuple[Log, dict[str, str], bool]:
    """Return the log of a session, its blocks by their ids, and whether it is whole.

    Without an answer, a tool call counts as interrupted, unless the session `is_running` elsewhere.
    """
    updates = list(replay(entries, cwd, compactions=True))
    if is_running:
        answered = {entry.get("tool_call_id") for entry in entries if entry.get("role") == "tool"}
        updates = [each for each in updates if not isinstance(each, ToolCallUpdate) or each.tool_call_id in answered]
        last = str(getattr(updates[-1], "message_id", "")) if updates else ""
        updates = updates[:-1] if last.endswith("-cut") else updates
    start = max(0, -((MOST - len(updates)) // STEP) * STEP)
    sources: dict[str, Source] = {}
    log = Log(renderer, sources.__setitem__, start * BLOCKS)
    offered = find_apps(entries)
    for update in updates[start:]:
        log.add(update, 0.0)
        if isinstance(update, ToolCallUpdate) and (server := offered.get(call := update.tool_call_id)):
            block = log.take_id()
            log.put(block, apps.get(call) or renderer.render("offer", server, call, block))
    if not is_running:
        log.end_turn(0.0)
    made = {id: source() if callable(source) else source for id, source in sources.items()}
    return log, {id: html for id, html in made.items() if html is not None}, start == 0


def find_apps(entries: list[Message]) -> dict[str, str]:
    """Return the names of the servers that have an app for a tool call, by the ids of the calls."""
    notes = [cast("dict[str, Any]", entry.get("crow", {})) for entry in entries if marker_kind(entry) == "app"]
    return {str(each.get("call")): str(each.get("server")) for each in notes}
