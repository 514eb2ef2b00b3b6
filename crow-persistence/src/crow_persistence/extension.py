"""`crow.use(persistence, url=...)`: every session is written down as it goes, and comes back."""

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

BEAT = 5.0
"""Seconds between two signs of life of the sessions that are open here; see `leases`."""
SUFFIXES = {"markdown": ".md", "jsonl": ".jsonl", "html": ".html", "atif": ".json"}
"""Of the files that /export writes, by their format."""
AFTER = 0.1
"""Seconds after a first message until the database is opened: by then the request is on its way."""


def persistence(
    crow: Crow,
    *,
    url: str,
    folder: Path | None = None,
    secrets: Callable[[Session], Collection[str]] = lambda session: session.secrets,
) -> None:
    """Keep sessions in a database: SQLite (`sqlite:////folder/file.db`) or PostgreSQL (`postgresql+psycopg://…`).

    `folder` is crow's data folder, if not the file's. What `secrets` names is masked in all that is written. Brings
    /fork, /export, and the tool `search_sessions`; for clients it is `_crow/search`, with `words`, `everywhere` and
    `limit`.
    """
    threads = Threads(url, folder)
    crow.servers.append(search_tool.server(threads.database))

    @crow.before_prompt
    async def line_up(message: Message, session: Session) -> None:
        if len(crow.sessions) > 1:  # one alone asks its model while the database opens
            with suppress(StoreError):  # who writes next hears of it
                async with threads.line:
                    await threads.write(lambda store: None)

    @crow.message
    async def write(session: Session, entry: Message) -> None:
        if not threads.opened:
            await asyncio.sleep(AFTER)
        await threads.write(lambda store: store.append(session, secrets(session)))
        threads.watch()

    @crow.draft
    async def draw(session: Session, reply: Message) -> None:
        await threads.write(lambda store: store.draft(session, reply, secrets(session)))

    @crow.model_call
    async def note(session: Session, model_call: ModelCall) -> None:
        await threads.write(lambda store: store.call(session, model_call, secrets(session)))

    @crow.load_session
    async def load(id: str) -> Record | None:
        if (row := await threads.take(lambda store: store.take(id), id)) is None:
            return None
        try:
            threads.watch()
            return await threads.read(lambda store: store.load(row))
        except BaseException:
            await threads.write(lambda store: store.release(id))
            raise

    @crow.fork_session
    async def fork(id: str, new_id: str, at: str) -> Record | None:
        record = await threads.take(lambda store: store.fork(id, new_id, at), new_id)
        threads.watch()
        return record

    @crow.list_sessions
    async def list(cwd: str, cursor: str, limit: int) -> Page:
        return await threads.read(lambda store: store.listing(cwd, cursor, limit))

    @crow.delete_session
    async def delete(id: str) -> None:
        await threads.write(lambda store: store.delete(id))

    async def search(session: Session, params: dict[str, Any]) -> dict[str, Any]:
        words, everywhere, limit = params.get("words"), params.get("everywhere", False), params.get("limit", 20)
        if not isinstance(words, str) or type(everywhere) is not bool or type(limit) is not int:
            details = "words is a text, everywhere is true or false, limit is a whole number."
            raise RpcError(INVALID_PARAMS, "Invalid params", details=details)
        try:
            hits = await threads.read(lambda store: store.search(words, "" if everywhere else session.cwd, limit))
        except StoreError as error:
            raise RpcError(INTERNAL_ERROR, "The stored sessions cannot be used", details=str(error)) from error
        return {"hits": hits}

    crow.methods["_crow/search"] = search

    @crow.commands
    def commands(session: Session) -> Sequence[Command]:
        return [
            Command("fork", "Begin a new session where this one stands", copy),
            Command(
                "export", "Write this session to a file, to be given away", give, hint="[markdown|jsonl|html|atif]"
            ),
        ]

    async def copy(session: Session, words: str) -> str:
        await session.log.written()
        id = new_id()
        if not await threads.write(lambda store: store.copy(session.id, id)):
            return "There is nothing to fork yet."
        return f"Session {id} goes on from here. Open it from the list of sessions, or by its id."

    async def give(session: Session, words: str) -> str:
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
        return f"Written to {path}. Masked {masked} times what looks like a secret: read it before you give it away."

    @crow.session_end
    async def end(session: Session) -> None:
        await session.log.flush()
        if threads.opened is None:
            return
        try:
            await threads.write(lambda store: store.end(session, secrets(session)))
        except StoreError as error:
            log.warning("%s", error)

    @crow.app_end
    async def close() -> None:
        await threads.close()


class Threads:
    """Where the store is at work: one thread writes, in order, one reads. Both begin at the first need."""

    def __init__(self, url: str, folder: Path | None) -> None:
        self.url, self.folder = url, folder
        self.writer = ThreadPoolExecutor(1, "crow-writes")
        self.reader = ThreadPoolExecutor(1, "crow-reads")
        self.opened: asyncio.Future[Store] | None = None
        self.beating: asyncio.Task[None] | None = None
        self.line = asyncio.Lock()
        """In which prompts of many sessions stand until what was asked for before is written. If all began at once,
        whoever streams would be shown late: behind what the others have to write."""

    async def write(self, what: "Callable[[Store], T]") -> T:
        """Have something written, behind all that was asked for before."""
        store = await self.store()
        return await asyncio.get_running_loop().run_in_executor(self.writer, what, store)

    async def take(self, what: "Callable[[Store], T]", id: str) -> T:
        """Have a session opened; where nobody waits for that any more, others may open it."""
        taking = asyncio.ensure_future(self.write(what))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait([taking])
            if taking.exception() is None:
                await self.write(lambda store: store.release(id))
            raise

    async def read(self, what: "Callable[[Store], T]") -> T:
        """Have something read, beside what is written."""
        store = await self.store()
        return await asyncio.get_running_loop().run_in_executor(self.reader, what, store)

    async def store(self) -> "Store":
        if self.opened is None:
            self.opened = asyncio.get_running_loop().run_in_executor(self.writer, open_store, self.url, self.folder)
        return await asyncio.shield(self.opened)

    def database(self) -> "Database":
        """The database, once it was needed."""
        assert self.opened is not None
        return self.opened.result().database

    def watch(self) -> None:
        """Let hearts beat from now on, if they do not yet."""
        if self.beating is None:
            self.beating = asyncio.ensure_future(self.beat())

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            with suppress(StoreError):  # who writes next hears of it
                await self.write(lambda store: store.beat())

    async def close(self) -> None:
        """Finish what is to be written, and end the threads."""
        if self.beating is not None:
            self.beating.cancel()
        if self.opened is not None:
            with suppress(StoreError):  # it could never be opened
                await self.write(lambda store: store.database.close())
        self.writer.shutdown()
        self.reader.shutdown()


def open_store(url: str, folder: Path | None) -> "Store":
    from crow_persistence.store import Store  # it brings SQLAlchemy, which takes a while

    return Store(url, folder)
