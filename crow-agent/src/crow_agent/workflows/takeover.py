"""Processes that share the workflows of a PostgreSQL database: each tells the others that it lives. If one dies,
another takes over its work.

A process holds an advisory lock on its id as an executor. The server releases the lock when the process has ended. It
also does so when the process is frozen or cut off, as the lock's session ends after IDLE_LIMIT without a query. The
process that gets the lock of another executor breaks its leases and recovers its workflows.
"""

import asyncio
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from secrets import token_hex
from threading import Event, Thread
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from crow_core.models.retries import attempt_again
from crow_persistence import leases
from crow_persistence.database_urls import complete_url
from crow_persistence.tables import sessions
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from crow_agent.workflows.errors import WorkflowError, WorkflowServerDown

T = TypeVar("T")

logger = logging.getLogger("crow_agent")
HEARTBEAT_INTERVAL = 2.0
"""Seconds between the queries on the connection that holds the lock."""
IDLE_LIMIT = 5.0
"""Seconds without a query after which the server ends the session of the lock."""
LOOK_INTERVAL = 1.0
"""Seconds between two looks for executors that have died."""
SESSION_LIMITS = {
    "idle_session_timeout": f"{IDLE_LIMIT:.0f}s",
    "idle_in_transaction_session_timeout": f"{IDLE_LIMIT:.0f}s",
    "statement_timeout": f"{IDLE_LIMIT:.0f}s",
    "tcp_keepalives_idle": "2",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": f"{IDLE_LIMIT:.0f}s",
}
"""Settings of the server for the sessions of the locks."""
CLIENT_LIMITS = {
    "connect_timeout": "5",
    "keepalives_idle": "2",
    "keepalives_interval": "1",
    "keepalives_count": "3",
    "tcp_user_timeout": f"{IDLE_LIMIT * 1000:.0f}",
}
"""The same for this side of the connection."""
CANNOT_CONNECT = ("08", "53", "57P")
"""Beginnings of the SQLSTATE of errors after which the server may take a connection again."""
SET_LIMIT = sa.text("SELECT set_config(:name, :value, false)")
KEY = "hashtextextended('crow executor ' || :id, 0)"
TRY_LOCK = sa.text(f"SELECT pg_try_advisory_lock({KEY})")
UNLOCK = sa.text(f"SELECT pg_advisory_unlock({KEY})")
HEARTBEAT = sa.text("SELECT 1")


class ExecutorWork(Protocol):
    """The workflows of a process, as its executor uses them. All but the coroutines run in threads of the executor."""

    def list_executors(self) -> Iterable[str]:
        """List the executors that have unfinished workflows."""
        ...

    def recover_from(self, executor: str) -> Sequence[str]:
        """Go on with the workflows of an executor that has died. Return their ids."""
        ...

    async def suspend(self) -> None:
        """Suspend all workflows that run, and those that are about to start."""
        ...

    def go_on(self) -> None:
        """Start workflows again."""
        ...

    def put_back(self) -> None:
        """Put the workflows back into their queues that were suspended here and taken over by nobody."""
        ...


class Executor:
    """This process among those that share a database."""

    def __init__(self, url: str, work: ExecutorWork, name: str = "") -> None:
        """Give the process an id that no other one ever has; it begins with `name`, by default the machine's."""
        machine = re.sub(r"[^A-Za-z0-9.-]+", "-", name or socket.gethostname())[:80]
        self.id = f"{machine}-{os.getpid()}-{token_hex(4)}"
        self.is_alive = False
        """True if the lock is held, as far as this process knows."""
        self._url = complete_url(url)
        self._work = work
        self._engine = sa.create_engine(
            self._url.set(query={**self._url.query, **CLIENT_LIMITS}),
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,
        )
        self._lock: sa.Connection | None = None
        self._loop = asyncio.get_running_loop()
        self._stop = Event()
        self._threads = [
            Thread(target=run, name=f"crow-executor-{run.__name__}", daemon=True)
            for run in (self._hold_lock, self._look_for_dead)
        ]

    def start(self) -> None:
        """Take the lock. Raises WorkflowError."""
        try:
            self._lock = self._connect()
            held = self._lock.scalar(TRY_LOCK, {"id": self.id})
        except DBAPIError as error:
            self.stop()
            raise to_workflow_error(error, self._url) from error
        assert held, "the id is new"
        self.is_alive = True
        leases.EXECUTOR[:] = [self.id]

    def watch(self) -> None:
        """Begin to hold the lock, and to look for executors that have died."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Release the lock, so that others take over at once."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        if [self.id] == leases.EXECUTOR:
            leases.EXECUTOR.clear()
        self._disconnect()
        self._engine.dispose()

    def _connect(self) -> sa.Connection:
        """Connect with limits after which the server ends the session of a process that does not answer."""
        connection = self._engine.connect()
        try:
            for name, value in SESSION_LIMITS.items():
                connection.execute(SET_LIMIT, {"name": name, "value": value})
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        self.is_alive = False
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(SQLAlchemyError):
                lock.close()

    def _hold_lock(self) -> None:
        """Send heartbeats. After the lock was lost, suspend the work until it is held again."""
        while not self._stop.wait(HEARTBEAT_INTERVAL):
            if self._lock is not None:
                self._lock = keep_alive(self._lock)
            if self._lock is not None:
                continue
            logger.warning("Executor %s was cut off or frozen and lost its lock: its workflows are suspended.", self.id)
            self._disconnect()
            self._call(self._work.suspend())
            if self._lock_again():
                logger.warning("Executor %s has its lock again and goes on.", self.id)
                try:
                    self._work.go_on()
                except Exception as error:  # of the engine's database: the next look puts the workflows back
                    logger.debug("Executor %s cannot put its workflows back: %s", self.id, error)

    def _lock_again(self) -> bool:
        """Try to get the lock again until it is held or the executor stops; return whether it is held."""
        while not self._stop.is_set():
            try:
                self._lock = self._connect()
                if self._lock.scalar(TRY_LOCK, {"id": self.id}):
                    self.is_alive = True
                    return True
            except SQLAlchemyError as error:
                logger.debug("Executor %s cannot get its lock: %s", self.id, error)
            self._disconnect()
            self._stop.wait(LOOK_INTERVAL)
        return False

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the event loop, and wait for its end, or for the end of the executor."""
        try:
            running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop has ended
            coroutine.close()
            return
        ended = Event()
        running.add_done_callback(lambda _: ended.set())
        while not ended.wait(0.1):
            if self._stop.is_set():
                return

    def _look_for_dead(self) -> None:
        """Take over from executors that have died, as long as this one lives."""
        connection: sa.Connection | None = None
        while not self._stop.wait(LOOK_INTERVAL):
            if not self.is_alive:
                continue
            try:
                self._work.put_back()
                others = {*self._work.list_executors()} - {self.id}
                if others and connection is None:
                    connection = self._connect()
                for other in sorted(others):
                    assert connection is not None
                    take_over(connection, other, self._work.recover_from)
            except Exception as error:  # also of the engine: the next look tries again
                logger.debug("Executor %s cannot look for others: %s", self.id, error)
                if connection is not None:
                    with suppress(SQLAlchemyError):
                        connection.close()
                    connection = None
            if connection is not None:
                connection = keep_alive(connection)
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.close()


def keep_alive(connection: sa.Connection) -> sa.Connection | None:
    """Send a query, so that the server does not end the session. Return None where it has ended."""
    try:
        connection.execute(HEARTBEAT)
    except SQLAlchemyError as error:
        logger.debug("A connection of the executor has ended: %s", error)
        with suppress(SQLAlchemyError):
            connection.close()
        return None
    return connection


def take_over(connection: sa.Connection, executor: str, recover: Callable[[str], Sequence[str]]) -> None:
    """Take over from an executor if nobody holds its lock: break its leases, then recover its workflows.

    It may be alive and get its lock again, so this is not an end. Workflows that only other programs have are left
    there.
    """
    if not connection.scalar(TRY_LOCK, {"id": executor}):
        return
    try:
        if sa.inspect(connection).has_table(sessions.name):
            leases.break_leases(connection, executor)
        if ids := recover(executor):
            logger.warning("Executor %s has ended, and its workflows are taken over: %s.", executor, ", ".join(ids))
    finally:
        connection.execute(UNLOCK, {"id": executor})


def to_workflow_error(error: DBAPIError, url: sa.URL) -> WorkflowError:
    """Convert an error that the start of the workflows met in the database."""
    why, shown = " ".join(str(error.orig).split()), url.set(query={})
    state = getattr(error.orig, "sqlstate", None)
    if isinstance(error, OperationalError) and (state is None or state.startswith(CANNOT_CONNECT)):
        return WorkflowServerDown(
            f"The database {shown!r} of the workflows cannot be reached: {why}. Start it, or correct [database] url."
        )
    if "set_config" in (error.statement or ""):
        return WorkflowError(
            f"The workflows need a connection of their own to {shown!r}, with settings that "
            f"{', '.join(SESSION_LIMITS)} have: {why}. Name PostgreSQL 14 or newer, and no pooler before it."
        )
    return WorkflowError(f"The database {shown!r} of the workflows cannot be used: {why}. Correct [database] url.")


async def wait_for_server(start: Callable[[], Awaitable[T]]) -> T:
    """Call a function that starts the workflows until the database's server answers; warn once, with the reason."""
    is_waiting = False

    def may_pass(error: Exception) -> bool:
        nonlocal is_waiting
        if isinstance(error, WorkflowServerDown) and not is_waiting:
            is_waiting = True
            logger.warning("Waiting for PostgreSQL. %s", error)
        return isinstance(error, WorkflowServerDown)

    async for attempt in attempt_again(may_pass, None, timeout=None, wait_initial=0.2, wait_max=5.0):
        with attempt:
            started = await start()
            if is_waiting:
                logger.warning("PostgreSQL can be reached now.")
            return started
    raise AssertionError  # unreachable: it tries until it starts
