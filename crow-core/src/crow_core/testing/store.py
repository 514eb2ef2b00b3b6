"""A store of sessions in memory."""

from dataclasses import asdict, replace
from time import time

from crow_core.messages.message import Message, marker_kind
from crow_core.session.session import Session
from crow_core.session.store import ArchiveFilter, Page, Record, SessionChange, Summary


class MemoryStore:
    """A store that ends with the process: for tests, and the smallest example of a `Store`."""

    def __init__(self, *records: Record) -> None:
        self.records: dict[str, Record] = {}
        """The stored sessions, by id."""
        self.summaries: dict[str, Summary] = {}
        """The same sessions, as a list shows them."""
        for record in records:
            self._keep(record, "/", ["/"])

    def _keep(self, record: Record, cwd: str, roots: list[str]) -> None:
        now = int(time() * 1000)
        old = self.summaries.get(record.id) or Summary(record.id, cwd, roots, record.title, now, now)
        self.records[record.id] = record
        self.summaries[record.id] = replace(old, cwd=cwd, roots=roots, title=record.title, updated=now)

    async def load(self, id: str) -> Record | None:
        return self.records.get(id)

    async def fork(self, id: str, new_id: str, at: str) -> Record | None:
        if (record := self.records.get(id)) is None:
            return None
        ids = [entry.get("crow", {}).get("id") for entry in record.log]
        fork = replace(record, id=new_id, log=record.log[: ids.index(at) + 1] if at in ids else [*record.log])
        self._keep(fork, self.summaries[id].cwd, [*self.summaries[id].roots])
        return fork

    async def list_sessions(self, cwd: str, cursor: str, limit: int, archived: ArchiveFilter) -> Page:
        begin = int(cursor or 0)
        wanted = {"exclude": [False], "include": [False, True], "only": [True]}[archived]
        found = [one for one in self.summaries.values() if one.archived in wanted and cwd in ("", one.cwd)]
        found.sort(key=lambda one: one.updated, reverse=True)
        end = begin + limit
        return Page(found[begin:end], str(end) if end < len(found) else None)

    async def find(self, id: str) -> Summary | None:
        return self.summaries.get(id)

    async def change(self, id: str, change: SessionChange) -> Summary | None:
        if (summary := self.summaries.get(id)) is None:
            return None
        changes = {name: value for name, value in asdict(change).items() if value is not None}
        self.summaries[id] = summary = replace(summary, **changes)
        self.records[id].title = summary.title
        return summary

    async def delete(self, id: str) -> None:
        self.records.pop(id, None)
        self.summaries.pop(id, None)

    async def write_draft(self, session: Session, reply: Message) -> None:
        """Write nothing: what a killed process would lose, this store loses, too."""

    async def flush(self, session: Session) -> None:
        log = [*session.view.entries()]
        if any("role" in entry or marker_kind(entry) == "opened" for entry in log):
            chosen = [entry.get("crow", {}) for entry in session.view.find_kind("option")]
            options = {notes.get("option", ""): notes.get("value", "") for notes in chosen}
            system, tools = session.prompts.system, session.toolbox.sent
            record = Record(session.id, log, session.log.title, options, system, tools)
            self._keep(record, session.cwd, session.folders.roots)
