"""The extension `crow.use(persistence, url=...)`: stores every session as it happens, and loads it again."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crow_core.acp.connection import RpcError
from crow_core.acp.schema import INTERNAL_ERROR, INVALID_PARAMS
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.messages.message import Message
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.session.log import new_id
from crow_core.session.session import Command, Session
from crow_core.session.store import ArchiveFilter, Page, Record, SessionChange, Summary

from crow_persistence import search_tool
from crow_persistence.commits import GroupCommit
from crow_persistence.store_commands import make_commands

if TYPE_CHECKING:
    from crow_persistence.sql_store import BlockingStore

log = logging.getLogger("crow")

SUFFIXES = {"markdown": ".md", "jsonl": ".jsonl", "html": ".html", "atif": ".json"}
"""Suffixes of the files that /export writes, by format."""


class SqlStore:
    """The store of an app: runs the operations of `BlockingStore` in the threads of a `GroupCommit`."""

    def __init__(self, commits: GroupCommit, sessions: Mapping[str, Session]) -> None:
        self.commits = commits
        self.sessions = sessions
        """The open sessions of the app, by id."""
        self.releasing: set[asyncio.Task[None]] = set()
        """Releases of leases that nobody waits for."""
        self._openings = Counter[str]()
        """The number of tasks that are opening each session, by its id."""

    async def load(self, id: str) -> Record | None:
        return await self._open(id, self._load(id))

    async def _load(self, id: str) -> Record | None:
        row = await self.commits.write(lambda store: store.acquire(id))
        return None if row is None else await self.commits.read(lambda store: store.load(row))

    async def fork(self, id: str, new_id: str, at: str) -> Record | None:
        return await self._open(new_id, self.commits.write(lambda store: store.fork(id, new_id, at)))

    async def _open(self, id: str, opening: Coroutine[Any, Any, Record | None]) -> Record | None:
        """Wait until a session is opened. If that fails, or the caller is cancelled, its lease is released again,
        however often the caller is cancelled, unless it is opened for another caller."""
        self._openings[id] += 1
        task = asyncio.ensure_future(opening)
        try:
            record = await asyncio.shield(task)
        except BaseException:
            self.releasing.add(releasing := asyncio.ensure_future(self._release(id, task)))
            releasing.add_done_callback(self.releasing.discard)
            await asyncio.shield(releasing)
            raise
        self._openings -= Counter([id])
        self.commits.start_heartbeat()
        return record

    async def _release(self, id: str, opening: "asyncio.Task[Record | None]") -> None:
        await asyncio.wait([opening])
        self._openings -= Counter([id])
        opening.exception()  # retrieved: the caller may be gone
        if not (self._openings[id] or id in self.sessions):
            with suppress(StoreError):  # such a lease expires
                await self.commits.write(lambda store: store.release([id]))

    async def list_sessions(self, cwd: str, cursor: str, limit: int, archived: ArchiveFilter) -> Page:
        return await self.commits.read(lambda store: store.list_sessions(cwd, cursor, limit, archived))

    async def find(self, id: str) -> Summary | None:
        return await self.commits.read(lambda store: store.find_session(id))

    async def change(self, id: str, change: SessionChange) -> Summary | None:
        session = self.sessions.get(id)

        def run(store: "BlockingStore") -> Summary | None:
            return store.change_session(id, change, store.get_progress(session) if session else None)

        return await self.commits.write(run)

    async def delete(self, id: str) -> None:
        await self.commits.write(lambda store: store.delete(id))

    async def write_draft(self, session: Session, reply: Message) -> None:
        self.commits.add(session).parts.append(reply)

    async def flush(self, session: Session) -> None:
        await self.commits.flush(session)


def persistence(
    crow: Crow,
    *,
    url: str,
    folder: Path | None = None,
    secrets: Callable[[Session], Collection[str]] = lambda session: session.secrets,
) -> None:
    """Store sessions in a database: SQLite (`sqlite:////folder/file.db`) or PostgreSQL (`postgresql+psycopg://…`).

    `folder` is crow's data folder; the default is the folder of the SQLite file. The strings that `secrets` returns are
    masked in everything written. Adds the commands /fork, /export, /calls, /audit, /search, /prompts, /good and
    /bad, the tool `search_sessions`, and the client method `_crow/search` with the parameters `words`, `everywhere` and
    `limit`.
    """
    commits = GroupCommit(url, folder, secrets)
    crow.store = store = SqlStore(commits, crow.sessions)
    crow.servers.append(search_tool.make_server(commits.get_database))

    @crow.session_start
    def open_soon(session: Session) -> None:
        commits.open_soon()

    @crow.before_prompt
    async def begin_turn(message: Message, session: Session) -> None:
        commits.begin_turn(session)
        if len(crow.sessions) > 1:  # the first request of a single session does not wait for the database
            with suppress(StoreError):  # the next write raises it again
                await commits.get_store()

    @crow.before_model
    async def write_first_prompt(request: ModelRequest, session: Session) -> ModelRequest:
        if commits.is_open and not any(entry.get("role") == "assistant" for entry in session.log):
            await session.log.written()
        return request

    @crow.turn_resume
    def resume_turn(session: Session, entries: Sequence[Message]) -> None:
        commits.begin_turn(session)

    @crow.message
    def write_message(session: Session, entry: Message) -> None:
        commits.add(session)

    @crow.model_call
    def write_model_call(session: Session, model_call: ModelCall) -> None:
        commits.add(session).model_calls.append(model_call)

    async def search_messages(session: Session, params: dict[str, Any]) -> dict[str, Any]:
        words, everywhere, limit = params.get("words"), params.get("everywhere", False), params.get("limit", 20)
        if not isinstance(words, str) or type(everywhere) is not bool or type(limit) is not int:
            details = "words is a text, everywhere is true or false, limit is a whole number."
            raise RpcError(INVALID_PARAMS, "Invalid params", details=details)
        try:
            hits = await commits.read(lambda store: store.search(words, "" if everywhere else session.cwd, limit))
        except StoreError as error:
            raise RpcError(INTERNAL_ERROR, "The stored sessions cannot be used", details=str(error)) from error
        return {"hits": hits}

    crow.methods["_crow/search"] = search_messages

    @crow.commands
    def list_commands(session: Session) -> Sequence[Command]:
        return [
            Command("fork", "Fork this session at its end", fork_command),
            Command(
                "export",
                "Export this session to a file, with likely secrets masked",
                export_command,
                hint="[markdown|jsonl|html|atif]",
            ),
            *make_commands(commits),
        ]

    async def fork_command(session: Session, words: str) -> str:
        await session.log.written()
        id = new_id()
        if not await commits.write(lambda store: store.fork_without_lease(session.id, id)):
            return "There is nothing to fork yet."
        return f"Session {id} is a fork of this one. Open it from the list of sessions, or by its id."

    async def export_command(session: Session, words: str) -> str:
        if (format := words or "markdown") not in SUFFIXES:
            return f"There is no format {format!r}. Choose one of: {', '.join(SUFFIXES)}."
        await session.log.written()
        path = Path(session.cwd, f"crow-{session.id[:8]}{SUFFIXES[format]}")
        try:
            masked = await commits.read(lambda store: store.export(session.id, format, path))
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}."
        if masked is None:
            return "There is nothing to export yet."
        return f"Written to `{path}`. Likely secrets masked: {masked}. Read the file before you share it."

    @crow.session_end
    async def close_session(session: Session) -> None:
        await session.log.finish()
        try:
            await commits.close_session(session)
        except StoreError as error:
            log.warning("%s", error)

    @crow.app_end
    async def close() -> None:
        await asyncio.gather(*store.releasing)
        await commits.close()
