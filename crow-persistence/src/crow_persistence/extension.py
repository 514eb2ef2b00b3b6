"""The extension `crow.use(persistence, url=...)`: stores every session as it happens, and loads it again."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from crow_core.acp.connection import RpcError
from crow_core.acp.schema import INTERNAL_ERROR, INVALID_PARAMS
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.log import new_id
from crow_core.messages import Message
from crow_core.models.chat import ModelCall
from crow_core.session import Command, Session
from crow_core.store import Page, Record

from crow_persistence import search_tool

if TYPE_CHECKING:
    from crow_persistence.database import Database
    from crow_persistence.store import Store

T = TypeVar("T")

log = logging.getLogger("crow")

HEARTBEAT_INTERVAL = 5.0
"""Seconds between heartbeats for the open sessions; see `leases`."""
SUFFIXES = {"markdown": ".md", "jsonl": ".jsonl", "html": ".html", "atif": ".json"}
"""Suffixes of the files that /export writes, by format."""
OPEN_DELAY = 0.1
"""Seconds from the first message until the database is opened: the model request is sent first."""


def persistence(
    crow: Crow,
    *,
    url: str,
    folder: Path | None = None,
    secrets: Callable[[Session], Collection[str]] = lambda session: session.secrets,
) -> None:
    """Store sessions in a database: SQLite (`sqlite:////folder/file.db`) or PostgreSQL (`postgresql+psycopg://…`).

    `folder` is crow's data folder; the default is the folder of the SQLite file. The strings that `secrets` returns are
    masked in everything written. Adds the commands /fork and /export, the tool `search_sessions`, and the client method
    `_crow/search` with the parameters `words`, `everywhere` and `limit`.
    """
    threads = StoreThreads(url, folder)
    crow.servers.append(search_tool.make_server(threads.get_database))

    @crow.before_prompt
    async def wait_for_writes(message: Message, session: Session) -> None:
        if len(crow.sessions) > 1:  # a single session need not wait for the database to open
            with suppress(StoreError):  # the next write raises it again
                async with threads.first_write:
                    await threads.write(lambda store: None)

    @crow.message
    async def write_message(session: Session, entry: Message) -> None:
        if not threads.store_future:
            await asyncio.sleep(OPEN_DELAY)
        await threads.write(lambda store: store.write_entries(session, secrets(session)))
        threads.start_heartbeat()

    @crow.draft
    async def write_draft(session: Session, reply: Message) -> None:
        await threads.write(lambda store: store.write_draft(session, reply, secrets(session)))

    @crow.model_call
    async def write_model_call(session: Session, model_call: ModelCall) -> None:
        await threads.write(lambda store: store.write_model_call(session, model_call, secrets(session)))

    @crow.load_session
    async def load_session(id: str) -> Record | None:
        if (row := await threads.acquire(lambda store: store.acquire(id), id)) is None:
            return None
        try:
            threads.start_heartbeat()
            return await threads.read(lambda store: store.load(row))
        except BaseException:
            await threads.write(lambda store: store.release(id))
            raise

    @crow.fork_session
    async def fork_session(id: str, new_id: str, at: str) -> Record | None:
        record = await threads.acquire(lambda store: store.fork(id, new_id, at), new_id)
        threads.start_heartbeat()
        return record

    @crow.list_sessions
    async def list_sessions(cwd: str, cursor: str, limit: int) -> Page:
        return await threads.read(lambda store: store.list_sessions(cwd, cursor, limit))

    @crow.delete_session
    async def delete_session(id: str) -> None:
        await threads.write(lambda store: store.delete(id))

    async def search_messages(session: Session, params: dict[str, Any]) -> dict[str, Any]:
        words, everywhere, limit = params.get("words"), params.get("everywhere", False), params.get("limit", 20)
        if not isinstance(words, str) or type(everywhere) is not bool or type(limit) is not int:
            details = "words is a text, everywhere is true or false, limit is a whole number."
            raise RpcError(INVALID_PARAMS, "Invalid params", details=details)
        try:
            hits = await threads.read(lambda store: store.search(words, "" if everywhere else session.cwd, limit))
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
        ]

    async def fork_command(session: Session, words: str) -> str:
        await session.log.written()
        id = new_id()
        if not await threads.write(lambda store: store.fork_without_lease(session.id, id)):
            return "There is nothing to fork yet."
        return f"Session {id} is a fork of this one. Open it from the list of sessions, or by its id."

    async def export_command(session: Session, words: str) -> str:
        if (format := words or "markdown") not in SUFFIXES:
            return f"There is no format {format!r}. Choose one of: {', '.join(SUFFIXES)}."
        await session.log.written()
        path = Path(session.cwd, f"crow-{session.id[:8]}{SUFFIXES[format]}")
        try:
            masked = await threads.read(lambda store: store.export(session.id, format, path))
        except OSError as error:
            return f"{path} cannot be written: {error.strerror}."
        if masked is None:
            return "There is nothing to export yet."
        return f"Written to {path}. Likely secrets masked: {masked}. Read the file before you share it."

    @crow.session_end
    async def close_session(session: Session) -> None:
        await session.log.flush()
        if threads.store_future is None:
            return
        try:
            await threads.write(lambda store: store.close_session(session, secrets(session)))
        except StoreError as error:
            log.warning("%s", error)

    @crow.app_end
    async def close() -> None:
        await threads.close()


class StoreThreads:
    """The threads in which the store runs: one writes in order, one reads. Both start on first use."""

    def __init__(self, url: str, folder: Path | None) -> None:
        self.url, self.folder = url, folder
        self.writer = ThreadPoolExecutor(1, "crow-writes")
        self.reader = ThreadPoolExecutor(1, "crow-reads")
        self.store_future: asyncio.Future[Store] | None = None
        self.heartbeat: asyncio.Task[None] | None = None
        self.first_write = asyncio.Lock()
        """Serialises the first write of concurrent prompts, so that many new prompts do not delay sessions that are
        already streaming."""

    async def write(self, task: "Callable[[Store], T]") -> T:
        """Run a task in the writer thread, after all earlier ones."""
        store = await self.get_store()
        return await asyncio.get_running_loop().run_in_executor(self.writer, task, store)

    async def acquire(self, task: "Callable[[Store], T]", id: str) -> T:
        """Run a task that opens the session `id`. If the caller is cancelled, the session is released again."""
        writing = asyncio.ensure_future(self.write(task))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            if writing.exception() is None:
                await self.write(lambda store: store.release(id))
            raise

    async def read(self, task: "Callable[[Store], T]") -> T:
        """Run a task in the reader thread, concurrently with writes."""
        store = await self.get_store()
        return await asyncio.get_running_loop().run_in_executor(self.reader, task, store)

    async def get_store(self) -> "Store":
        """Return the store; the first call opens it."""
        if self.store_future is None:
            self.store_future = asyncio.get_running_loop().run_in_executor(
                self.writer, open_store, self.url, self.folder
            )
        return await asyncio.shield(self.store_future)

    def get_database(self) -> "Database":
        """Return the database. The store must have been opened."""
        assert self.store_future is not None
        return self.store_future.result().database

    def start_heartbeat(self) -> None:
        """Start sending heartbeats, unless started already."""
        if self.heartbeat is None:
            self.heartbeat = asyncio.ensure_future(self.send_heartbeats())

    async def send_heartbeats(self) -> None:
        """Send a heartbeat every HEARTBEAT_INTERVAL seconds."""
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            with suppress(StoreError):  # the next write raises it again
                await self.write(lambda store: store.send_heartbeat())

    async def close(self) -> None:
        """Finish all writes, then end the threads."""
        if self.heartbeat is not None:
            self.heartbeat.cancel()
        if self.store_future is not None:
            with suppress(StoreError):  # the database could not be opened
                await self.write(lambda store: store.database.close())
        self.writer.shutdown()
        self.reader.shutdown()


def open_store(url: str, folder: Path | None) -> "Store":
    """Open the store, in the writer thread."""
    from crow_persistence.store import Store  # imports SQLAlchemy, which is slow

    return Store(url, folder)
