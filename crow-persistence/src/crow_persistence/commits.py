"""Group commit: gather what all sessions of a process have to write, and commit it together."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, TypeVar

from crow_core.acp.connection import ConnectionClosed
from crow_core.errors import StoreError
from crow_core.session.session import Session

from crow_persistence.writes import SessionWrite, is_stored

if TYPE_CHECKING:
    from crow_persistence.database import Database
    from crow_persistence.sql_store import BlockingStore

T = TypeVar("T")

HEARTBEAT_INTERVAL = 5.0
"""Seconds between heartbeats for the open sessions; see `leases`."""
COMMIT_DELAY = 0.1
"""Seconds after which gathered writes are committed, if nobody waits for them before."""
OPEN_DELAY = 0.2
"""Seconds without much work after which the database is opened."""
OPEN_LIMIT = 1.0
"""Seconds by which that is postponed at most as long as the database is not open and the process is busy. SQLAlchemy,
which is slow to import, would delay the first request to a model."""


class GroupCommit:
    """The writer of a process: it commits what all sessions have to write in one transaction at a time.

    While a commit runs, the next one gathers. A session waits for its own part with `flush`, and a fault of its part
    fails that session alone. One thread writes, another one reads; both start on first use.
    """

    def __init__(self, url: str, folder: Path | None, get_secrets: Callable[[Session], Collection[str]]) -> None:
        self.url, self.folder = url, folder
        self.writer = ThreadPoolExecutor(1, "crow-writes")
        self.reader = ThreadPoolExecutor(1, "crow-reads")
        self.store_future: asyncio.Future[BlockingStore] | None = None
        self.heartbeat: asyncio.Task[None] | None = None
        self._get_secrets = get_secrets
        self._gathered: dict[str, SessionWrite] = {}
        """The writes of the next commit, by session id."""
        self._running: dict[str, SessionWrite] = {}
        """The writes of the commit that runs now."""
        self._errors: dict[str, Exception] = {}
        """Faults of sessions that nobody waited for; the next `flush` of such a session raises its own."""
        self._failing: set[str] = set()
        """Sessions with a write that failed since their last prompt. Their turn is ending: further writes wait only
        briefly for locks."""
        self._closed = deque[str]()
        """Closed sessions whose leases are still to be released."""
        self._commits: asyncio.Task[None] | None = None
        """Commits as long as somebody waits."""
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.TimerHandle | None = None
        """Opens the store when the process is idle."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: set[str] = set()
        """Sessions whose first message was written, or is about to be."""
        self._is_urgent = False
        """True if the next commit follows the one that runs at once."""

    def open_soon(self) -> None:
        """Open the store in the background once this process has little else to do, so that a first prompt that a
        person types is written when its request is sent."""
        if self.store_future is None and self._opening is None:
            self._opening = asyncio.get_running_loop().call_later(OPEN_DELAY, self._open_if_idle, process_time())

    def _open_if_idle(self, before: float) -> None:
        self._opening = None
        if process_time() - before > OPEN_DELAY / 10:
            self.open_soon()
        elif self.store_future is None:
            self._tasks.add(task := asyncio.ensure_future(self._open()))
            task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        with suppress(StoreError):  # the next write raises it again
            await self.read(lambda store: store.open())

    @property
    def is_open(self) -> bool:
        """True if the store is open."""
        return self.store_future is not None and self.store_future.done()

    def add(self, session: Session) -> SessionWrite:
        """Return what the next commit writes of a session. It runs after COMMIT_DELAY, or when somebody waits; that of
        a session's first message at once, if the database is open."""
        if self.is_open and session.id not in self._begun and is_stored(session.log):
            self._begun.add(session.id)
            self._commit_soon()
        elif self._timer is None and self._has_news(session):
            self._start_timer(asyncio.get_running_loop().time() + OPEN_LIMIT)
        return self._gathered.setdefault(session.id, SessionWrite(session))

    def begin_turn(self, session: Session) -> None:
        """Wait for locks in full again, even if the writes of the last turn failed."""
        self._failing.discard(session.id)

    async def flush(self, session: Session) -> None:
        """Wait until all that was added for a session is committed. Raises StoreError."""
        write = self._gathered.get(session.id)
        if write is not None:
            if not self._has_news(session):
                return
            self._commit_soon()
        elif (write := self._running.get(session.id)) is None:
            if error := self._errors.pop(session.id, None):
                raise error
            return
        write.done = write.done or asyncio.get_running_loop().create_future()
        await asyncio.shield(write.done)

    def _has_news(self, session: Session) -> bool:
        """Test whether a write may have to be stored. A session is not stored before its first message, so that the
        choice of a mode or a model does not open the database, unless its id was chosen."""
        return self.store_future is not None or is_stored(session.log)

    def _start_timer(self, limit: float) -> None:
        """Commit after COMMIT_DELAY; later, but not after `limit` by the loop's clock, if the database is not open."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(COMMIT_DELAY, self._commit_if_idle, limit, process_time())

    def _commit_if_idle(self, limit: float, before: float) -> None:
        is_busy = process_time() - before > COMMIT_DELAY / 2
        if self.store_future is None and is_busy and asyncio.get_running_loop().time() < limit:
            self._start_timer(limit)
        else:
            self._commit_soon()

    def _commit_soon(self) -> None:
        """Commit the gathered writes: now, or after the commit that runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_urgent = True
        if self._commits is None:
            self._commits = asyncio.ensure_future(self._run_commits())

    async def _run_commits(self) -> None:
        try:
            while self._is_urgent and self._gathered:
                self._is_urgent = False
                self._running, self._gathered = self._gathered, {}
                for write in self._running.values():
                    write.secrets, write.entries = self._get_secrets(write.session), len(write.session.log)
                errors = await self._commit(list(self._running.values()))
                writes, self._running = self._running, {}
                for write in writes.values():
                    self._end(write, errors.get(write.session.id))
        finally:
            self._commits = None

    async def _commit(self, writes: list[SessionWrite]) -> dict[str, Exception]:
        """Commit writes; return the errors by session id."""
        try:
            briefly = all(write.session.id in self._failing for write in writes)
            errors = await self.write(lambda store: store.write_sessions(writes, briefly=briefly))
        except StoreError as error:  # each waiter raises one of its own
            return {write.session.id: StoreError(*error.args) for write in writes}
        except Exception as error:  # a fault of ours: nobody may wait for ever
            return {write.session.id: error for write in writes}
        self.start_heartbeat()
        return errors

    def _end(self, write: SessionWrite, error: Exception | None) -> None:
        """Tell those who wait that a write has ended; keep what failed for the next write of the session."""
        id = write.session.id
        if error is None:
            self._errors.pop(id, None)
        else:
            self._failing.add(id)
            if write.model_calls or write.parts:
                self._gathered.setdefault(id, SessionWrite(write.session)).take_over(write)
            if write.done is None:
                self._errors[id] = error
        for call, reason in write.lost_calls.items():
            text = f"The model call {call[:8]} is not stored, and the session goes on without it. {reason}"
            self._tasks.add(task := asyncio.ensure_future(tell(write.session, text)))
            task.add_done_callback(self._tasks.discard)
        if write.is_copy and error is None:
            text = "The database is a new file. This session is stored there again, without its earlier model calls."
            self._tasks.add(task := asyncio.ensure_future(tell(write.session, text)))
            task.add_done_callback(self._tasks.discard)
        if write.done is not None and not write.done.done():
            if error is None:
                write.done.set_result(None)
            else:
                write.done.set_exception(error)
                write.done.exception()  # retrieved, even if the waiter was cancelled

    async def close_session(self, session: Session) -> None:
        """Write the rest of a session, then release its lease. Raises StoreError."""
        if self.store_future is None:  # it had no message
            self._gathered.pop(session.id, None)
            return
        try:
            self.begin_turn(session)  # this is the last chance to write the rest
            self.add(session)
            await self.flush(session)
        finally:
            self._gathered.pop(session.id, None)
            self._errors.pop(session.id, None)
            self._failing.discard(session.id)
            self._begun.discard(session.id)
            self._closed.append(session.id)
            await self.write(self._release)

    def _release(self, store: "BlockingStore") -> None:
        """Release the leases of all sessions that were closed until now, in the writer thread: the first of several
        such tasks, in one transaction, for the others too. A lease that cannot be released expires."""
        store.release([self._closed.popleft() for _ in range(len(self._closed))])

    async def write(self, task: "Callable[[BlockingStore], T]") -> T:
        """Run a task in the writer thread, after all earlier ones."""
        store = await self.get_store()
        return await asyncio.get_running_loop().run_in_executor(self.writer, task, store)

    async def read(self, task: "Callable[[BlockingStore], T]") -> T:
        """Run a task in the reader thread, concurrently with writes."""
        store = await self.get_store()
        return await asyncio.get_running_loop().run_in_executor(self.reader, task, store)

    async def get_store(self) -> "BlockingStore":
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
        for timer in filter(None, (self._timer, self._opening)):
            timer.cancel()
        if self._commits is not None:
            await asyncio.wait([self._commits])
        await asyncio.to_thread(self.reader.shutdown)  # a read that ended later would leave its connection open
        if self.store_future is not None:
            with suppress(StoreError):  # the database could not be opened
                await self.write(lambda store: store.database.close())
        self.writer.shutdown()


async def tell(session: Session, text: str) -> None:
    """Show the user a warning, if the client is still there."""
    with suppress(ConnectionClosed):
        await session.notice(text, "warning")


def open_store(url: str, folder: Path | None) -> "BlockingStore":
    """Open the store, in the writer thread."""
    from crow_persistence.sql_store import BlockingStore  # imports SQLAlchemy, which is slow

    return BlockingStore(url, folder)
