"""Take secrets, private data and what names a person out of the texts of lessons, as `crow sessions share` does."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from crow_cli.shared_session import (
    PLACEHOLDERS,
    PROJECT,
    Names,
    find_own_names,
    find_owners,
    find_values,
    hide,
    list_texts,
    names_private_data,
)
from crow_core.masking import MIN_SECRET_LENGTH, mask
from crow_core.messages.message import Message, get_id, marker_kind
from crow_core.redaction import holds_secret, redact_text
from crow_core.text import to_line
from crow_persistence.recent_logs import RecentLog, load_recent_logs
from sqlalchemy import Connection

MARKS = tuple(mark for marks in PLACEHOLDERS.values() for mark in marks)
"""The texts that stand for the removed ones."""
WORD = re.compile(rf"[^\s\"'`,;()]{{{MIN_SECRET_LENGTH},}}")
"""A word of a quotation that may be a secret."""


@dataclass
class SessionTexts:
    """The results of a session's tool calls, and what must not be quoted of them."""

    names: Names
    results: dict[str, Message] = field(default_factory=dict[str, Message])
    """The results by the ids of their entries."""
    private: set[str] = field(default_factory=set[str])
    """The ids of those with private data: the taint list or a marker of `taint` names their calls."""


class Cleaner:
    """Cleans texts of sessions; it reads each once."""

    def __init__(self, connection: Connection, secrets: Collection[str]) -> None:
        self._connection = connection
        self._secrets = secrets
        self._own_names = find_own_names()
        self._sessions: dict[str, SessionTexts] = {}

    def is_private(self, session: str, entry: str) -> bool:
        """Return whether an entry is the result of a tool call with private data."""
        found = self._get(session)
        result = found.results.get(entry)
        return entry in found.private or (result is not None and any(map(holds_secret, list_texts(result))))

    def clean(self, session: str, text: str) -> str:
        """Return a text of a session without secrets, private data, absolute paths, addresses and names."""
        found = self._get(session)
        values = set(find_private_values(text, found))
        names = Names({*found.names.secrets, *values}, found.names.names, found.names.roots)
        return hide(redact_text(mask(text, names.secrets)), names)

    def clean_line(self, session: str, line: str) -> str:
        """Return a line of instructions with paths of the project relative to it; "" if something was taken out."""
        cleaned = to_line(self.clean(session, line)).replace(f"{PROJECT}/", "")
        return "" if any(mark in cleaned for mark in MARKS) else cleaned

    def _get(self, session: str) -> SessionTexts:
        if session not in self._sessions:
            log = next(load_recent_logs(self._connection, ids=[session]), RecentLog(session, "", ""))
            roots = [log.cwd] if log.cwd.strip("/") else []
            names = Names(self._secrets, {*self._own_names, *find_owners(roots)}, roots)
            calls = set(find_named_calls(log))
            results = {get_id(entry): entry for entry in log.entries if entry.get("role") == "tool"}
            private = {id for id, entry in results.items() if entry.get("tool_call_id") in calls}
            self._sessions[session] = SessionTexts(names, results, private)
        return self._sessions[session]


def find_named_calls(log: RecentLog) -> Iterator[str]:
    """Yield the ids of the calls that read private data, by the markers of `taint` and their arguments."""
    for entry in log.entries:
        if marker_kind(entry) == "private":
            yield str(entry.get("crow", {}).get("call", ""))
        yield from (call["id"] for call in entry.get("tool_calls", []) if names_private_data(call, log.cwd))


def find_private_values(text: str, session: SessionTexts) -> Iterator[str]:
    """Yield the words of a text that are values in results with private data, and the secrets in other results."""
    words = WORD.findall(text)
    if not words:
        return
    value = re.compile(rf"[=:][ \t]*[\"']?({'|'.join(map(re.escape, words))})")
    for id, result in session.results.items():
        found = {match[1] for part in list_texts(result) for match in value.finditer(part)}
        if found and id in session.private:
            yield from found
        elif found and any(map(holds_secret, list_texts(result))):
            yield from find_values(result)
