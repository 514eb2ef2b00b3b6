"""Take secrets, private data and what names a person out of the texts of lessons, as `crow sessions share` does."""

from collections.abc import Collection
from dataclasses import dataclass, field

from crow_cli.shared_session import PLACEHOLDERS, PROJECT, Names, find_names, find_private_calls, find_values, hide
from crow_core.masking import mask
from crow_core.messages.message import get_id
from crow_core.redaction import redact_text
from crow_persistence.recent_logs import RecentLog, load_recent_logs
from sqlalchemy import Connection

MARKS = tuple(mark for marks in PLACEHOLDERS.values() for mark in marks)
"""The texts that stand for what was taken out."""


@dataclass
class SessionNames:
    """What must not be quoted of a session."""

    names: Names
    private: set[str] = field(default_factory=set[str])
    """The ids of entries with private data."""


class Cleaner:
    """Cleans texts of sessions, each of which it reads once."""

    def __init__(self, connection: Connection, secrets: Collection[str]) -> None:
        self._connection = connection
        self._secrets = secrets
        self._sessions: dict[str, SessionNames] = {}

    def is_private(self, session: str, entry: str) -> bool:
        """Return whether an entry holds private data: that of a tool call which the taint list names."""
        return entry in self._get(session).private

    def clean(self, session: str, text: str) -> str:
        """Return a text of a session without secrets, private data, absolute paths, addresses and names."""
        names = self._get(session).names
        return hide(redact_text(mask(text, names.secrets)), names)

    def clean_line(self, session: str, line: str) -> str:
        """Return a line of instructions with paths of the project relative to it; "" if something was taken out."""
        cleaned = self.clean(session, line).replace(f"{PROJECT}/", "")
        return "" if any(mark in cleaned for mark in MARKS) else cleaned

    def _get(self, session: str) -> SessionNames:
        if session not in self._sessions:
            log = next(load_recent_logs(self._connection, ids=[session]), RecentLog(session, "", ""))
            self._sessions[session] = self._read(log)
        return self._sessions[session]

    def _read(self, log: RecentLog) -> SessionNames:
        calls = find_private_calls(log.entries, log.cwd)
        results = [entry for entry in log.entries if entry.get("tool_call_id") in calls]
        values = {value for entry in results for value in find_values(entry)}
        roots = [log.cwd] if log.cwd.strip("/") else []
        names = Names({*self._secrets, *values}, find_names(roots), roots)
        return SessionNames(names, {get_id(entry) for entry in results})
