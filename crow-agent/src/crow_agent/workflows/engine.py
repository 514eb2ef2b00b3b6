"""The port to DBOS, which keeps the progress of workflows in SQLite or PostgreSQL. No other module imports it.

Imported when the first workflow starts.
"""

import asyncio
import copy
import json
import logging
import sqlite3
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast
from zlib import crc32

import sqlalchemy as sa
import sqlalchemy.event
from crow_core.retries import attempt_again
from dbos import (
    DBOS,
    DBOSClient,
    Serializer,
    SetEnqueueOptions,
    SetWorkflowAttributes,
    SetWorkflowID,
    StepReservation,
    WorkflowHandleAsync,
)
from dbos import WorkflowStatus as StoredWorkflow
from dbos import (
    _sys_db as system_database,  # pyright: ignore[reportPrivateUsage]
)
from dbos import error as dbos_errors
from dbos._context import (
    DBOSContext,
    _set_local_dbos_context,  # pyright: ignore[reportPrivateUsage]
    assert_current_dbos_context,
    get_local_dbos_context,
)
from dbos._utils import INTERNAL_QUEUE_NAME
from sqlalchemy.exc import DBAPIError

from crow_agent.durable import outside_workflows
from crow_agent.workflows.errors import (
    WorkflowCancelled,
    WorkflowChanged,
    WorkflowConflict,
    WorkflowError,
    WorkflowFailed,
    WorkflowNotFound,
)
from crow_agent.workflows.executors import ExecutorLocks
from crow_agent.workflows.queues import WorkflowQueue
from crow_agent.workflows.takeover import IDLE_LIMIT, Executor
from crow_agent.workflows.values import dump_json, load_json

if TYPE_CHECKING:
    from crow_agent.session import AgentSession

T = TypeVar("T")
logger = logging.getLogger("crow_agent")
APP = "crow"
"""The name under which all workflows are stored."""
UNFINISHED = ["PENDING", "ENQUEUED", "DELAYED"]
RECOVERIES = 1_000_000
"""A workflow may be interrupted this often; DBOS would give it up after 100 times."""
BRANCH_STEPS, BRANCHES = 1 << 16, 1 << 14
"""The most steps of a branch, and the most branches with exact numbers, of the 2**31 numbers of a workflow."""


STORE_INTERVAL = 5.0
"""Seconds between two attempts to go on with workflows whose progress could not be stored."""
PROGRESS_TABLES = ("operation_outputs", "workflow_status", "workflow_events", "notifications")
"""The tables of DBOS that a running workflow writes."""


class StoredJson(Serializer):
    """Stores values as JSON, never as pickles."""

    def name(self) -> str:
        return "crow_json"

    def serialize(self, data: Any) -> str:
        return dump_json(data)

    def deserialize(self, serialized_data: str) -> Any:
        return load_json(serialized_data)


@dataclass
class Fork:
    """The past of a forked run."""

    origins: list[str] = field(default_factory=list[str])
    """The run that it was forked from, then the one that this one was forked from, and so on; empty for no fork."""
    step: int = 0
    """Its first step of its own."""
    labels: list[str] = field(default_factory=list[str])
    """The steps that it has taken over."""


@dataclass
class WorkflowRun:
    """The execution of a workflow in this process."""

    id: str
    task: "asyncio.Task[Any]"
    sessions: "list[AgentSession]" = field(default_factory=list["AgentSession"])
    """The sessions that it has opened."""
    branches: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Its branches, by the first of their numbers."""
    fork: Fork | None = None
    """Its past; None until it is looked up."""
    is_suspended: bool = False
    is_replaced: bool = False
    """Whether the workflow has been started again in this process: nobody puts this execution back into its queue."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its function has ended, and its sessions are closed."""

    def suspend(self, why: str) -> asyncio.CancelledError:
        """Stop here without a result: whoever runs the workflow next goes on. Return the error to raise."""
        if not self.is_suspended:
            logger.info("Workflow %s is suspended: %s", self.id, why)
        self.is_suspended = True
        self.task.cancel()
        return asyncio.CancelledError(why)


class Numbering:
    """The numbers of the steps in one task of a workflow, which do not depend on the other tasks.

    The first call in a task that the workflow has started takes a number of the task that started it; all calls of the
    new task are numbered below that one.
    """

    def __init__(self, run: WorkflowRun, context: DBOSContext, path: tuple[int, ...], base: int) -> None:
        self.run = run
        self.path = path
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self._context = context
        self._base = base

    def reserve(self) -> tuple[StepReservation, str]:
        """Take the next number for a step; return it with its label, such as 3, or 4.1 in a branch."""
        step = StepReservation(self._context.snapshot_step_ctx())
        return step, ".".join(map(str, (*self.path, step.step_id - self._base)))

    def make_branch(self, make: Callable[[WorkflowRun, DBOSContext, tuple[int, ...], int], T]) -> T:
        """Take the next number for a branch. Raises WorkflowError if there are too many."""
        self._context.function_id += 1
        path = (*self.path, self._context.function_id - self._base)
        if len(path) == 1 and path[0] < BRANCHES:
            base = path[0] * BRANCH_STEPS
        else:
            base = (1 << 30) + crc32(repr(path).encode()) % (1 << 20) * (1 << 10)
        if self.run.branches.setdefault(base, path) != path:
            raise WorkflowError(
                f"Workflow {self.run.id} does too much at the same time. Let a workflow of its own do a part of it."
            )
        context = copy.copy(self._context)
        context.function_id = base
        return make(self.run, context, path, base)

    def enter_task(self) -> None:
        """Number the calls of the running task from now on."""
        self.task = asyncio.current_task()
        _set_local_dbos_context(self._context)

    @contextmanager
    def numbering(self) -> Generator[None]:
        """Number the calls in the block."""
        before = get_local_dbos_context()
        self.enter_task()
        try:
            yield
        finally:
            _set_local_dbos_context(before)


async def run_step(step: StepReservation, label: str, name: str, function: Callable[[str], Awaitable[T]]) -> T:
    """Run a function as a step, with the step's label, or return its stored result. Raises WorkflowChanged."""

    async def run() -> T:
        with outside_workflows():
            return await function(label)

    try:
        return await step.run_async({"name": name, "preemptible": True}, run)
    except dbos_errors.DBOSUnexpectedStepError as error:
        raise explain_change(error) from None


def explain_change(error: dbos_errors.DBOSUnexpectedStepError) -> WorkflowChanged:
    """Convert the error for a step that is not the one that was stored."""
    id, number, expected, recorded = error.inputs
    return WorkflowChanged(
        f"The code of workflow {id} has changed: its step {number} was {recorded!r} and is now {expected!r}. "
        "Run it with the code that began it, or give the changed code another version."
    )


async def retry(
    function: Callable[[], Awaitable[T]],
    may_pass: Callable[[Exception], bool],
    *,
    attempts: int | None = None,
    timeout: float | None = None,
    first: float = 0.5,
    longest: float = 60.0,
) -> T:
    """Call a function until it does not raise an error that may pass, with a wait that grows."""
    async for attempt in attempt_again(
        may_pass, attempts, timeout=timeout, wait_initial=first, wait_max=longest, wait_jitter=first / 2
    ):
        with attempt:
            return await function()
    raise AssertionError  # unreachable: the last attempt raises


@dataclass
class Registration:
    """A workflow that the engine can run."""

    name: str
    version: str
    run: Callable[[WorkflowRun, DBOSContext, dict[str, Any]], Awaitable[Any]]
    queue: str = ""
    schedule: str = ""


class Engine:
    """DBOS, launched in this process, which can have one."""

    def __init__(self, url: str, executor: str, registrations: Sequence[Registration]) -> None:
        self.url = url
        self.executor = executor
        self.registrations = {each.name: each for each in registrations}
        self.version = describe_program(registrations)
        self.loop = asyncio.get_running_loop()
        self._functions: dict[str, Any] = {}
        self._engine: sa.Engine | None = None
        self._locks: ExecutorLocks | None = None
        self.instance: Any = None
        self._member: Executor | None = None
        """This process among those that share a PostgreSQL database."""
        self._is_fenced = False
        """True if no workflow may run here for now."""
        self._is_closing = False
        self._unstored: set[str] = set()
        """Workflows that wait until their progress can be stored."""
        self._storing: asyncio.Task[None] | None = None
        self._suspended: set[str] = set()
        """Workflows that were suspended here."""
        self._runs: dict[str, WorkflowRun] = {}
        """The last execution of each workflow that runs here."""
        self._dead: set[str] = set()
        """Executors that had died when this one looked."""

    @property
    def is_alive(self) -> bool:
        """Whether workflows run here: it is not fenced off."""
        return not self._is_fenced

    @property
    def running(self) -> int:
        """The number of workflows that run here."""
        return len(self.instance._workflow_tasks) if self.instance else 0

    async def launch(
        self, queues: Sequence[WorkflowQueue], listen: Sequence[str] | None, synchronous: str = "normal"
    ) -> None:
        """Start the engine, and go on with what this executor has left undone."""
        logging.getLogger("dbos").addHandler(logging.NullHandler())  # else DBOS adds one that prints
        if self.url.startswith("sqlite"):
            self._engine = make_sqlite_engine(self.url, synchronous)
            self._locks = ExecutorLocks(f"{self._engine.url.database}.executors")
            self.executor = self._locks.claim(self.executor)
        else:
            self._member = Executor(self.url, self, self.executor)
            self.executor = self._member.id
            await asyncio.to_thread(self._member.start)
        config: Any = {
            "name": APP,
            "system_database_url": self.url if self._engine is not None else limit_idle_time(self.url),
            "system_database_engine": self._engine,
            "executor_id": self.executor or "local",
            "application_version": self.version,
            "serializer": StoredJson(),
            "log_level": "CRITICAL",
            "notification_listener_polling_interval_sec": 0.2,
        }
        system_database.time = CLOCK  # pyright: ignore
        self.instance = DBOS(config=config)
        for registration in self.registrations.values():
            self._functions[registration.name] = self._register(registration)
        if listen is not None:
            DBOS.listen_queues([*listen])
        DBOS.launch()
        for queue in queues:
            await DBOS.register_queue_async(
                queue.name,
                worker_concurrency=None if queue.per_tenant else queue.concurrency,
                global_concurrency=queue.total,
                partition_concurrency=queue.per_tenant,
                limiter={"limit": queue.rate[0], "period": queue.rate[1]} if queue.rate else None,
                polling_interval_sec=0.2,
                # a program that names a queue and no limits leaves those that others have set
                on_conflict="never_update" if queue == WorkflowQueue(queue.name) else "always_update",
            )
        scheduled: Any = [
            {
                "schedule_name": each.name,
                "workflow_fn": self._functions[each.name],
                "schedule": each.schedule,
                "queue_name": each.queue or None,
                "context": {"version": each.version, "queue": each.queue},
            }
            for each in self.registrations.values()
            if each.schedule
        ]
        if scheduled:
            await DBOS.apply_schedules_async(scheduled)
        await asyncio.to_thread(self._adopt)
        if self._locks is not None:
            await asyncio.to_thread(self._recover_dead, self._locks)
        if self._member is not None:
            self._member.watch()

    def _register(self, registration: Registration) -> Any:
        """Make a workflow known to DBOS."""

        async def run(arguments: Any, context: Any = None) -> Any:
            task = asyncio.current_task()
            assert task is not None
            if not isinstance(arguments, dict):  # the time of a schedule
                arguments = {"$scheduled": arguments}
            current = assert_current_dbos_context()
            execution = WorkflowRun(current.workflow_id, task)
            try:
                await self._replace(execution)
                if self._is_fenced:
                    raise execution.suspend("this process takes no work.")
                value = await registration.run(execution, current, cast("dict[str, Any]", arguments))
            except asyncio.CancelledError:
                self._note_suspended(execution)
                raise
            except dbos_errors.DBOSUnexpectedStepError as error:
                raise explain_change(error) from None
            except DBAPIError as error:
                if not is_about_progress(error):
                    raise
                self._wait_for_store(execution.id, error)
                raise asyncio.CancelledError from None
            finally:
                execution.ended.set()
                if self._runs.get(execution.id) is execution:
                    del self._runs[execution.id]
            if execution.is_suspended:
                self._note_suspended(execution)
                raise asyncio.CancelledError
            return value

        run.__qualname__ = registration.name
        return DBOS.workflow(name=registration.name, max_recovery_attempts=RECOVERIES)(run)

    async def _replace(self, execution: WorkflowRun) -> None:
        """End an earlier execution of the same workflow in this process, and wait until it has closed its sessions.

        DBOS starts a workflow again that was taken over by another process and back, or put back into its queue; it
        lets the earlier execution run until it writes, and that may wait for a model for a day.
        """
        self._suspended.discard(execution.id)
        earlier, self._runs[execution.id] = self._runs.get(execution.id), execution
        if earlier is not None:
            earlier.is_replaced = True
            earlier.task.cancel()
            try:
                await earlier.ended.wait()
            except asyncio.CancelledError:
                await earlier.ended.wait()  # the next execution waits for this one alone
                raise

    def _note_suspended(self, execution: WorkflowRun) -> None:
        """Note that a workflow is to be put back into its queue, unless it has been started again."""
        if not execution.is_replaced:
            self._suspended.add(execution.id)

    def _wait_for_store(self, id: str, error: DBAPIError) -> None:
        """Run a workflow again when its progress can be stored."""
        why = " ".join(str(error.orig).split())
        logger.warning("Workflow %s waits, as its progress cannot be stored (%s). It goes on by itself.", id, why)
        self._unstored.add(id)
        if self._storing is None or self._storing.done():
            self._storing = asyncio.ensure_future(self._store_again())

    async def _store_again(self) -> None:
        while self._unstored:
            await asyncio.sleep(STORE_INTERVAL)
            for id in [*self._unstored]:
                with suppress(DBAPIError):
                    await asyncio.to_thread(self._forget_failed_step, id)
                    await asyncio.to_thread(self._put_back, id)
                    self._unstored.discard(id)

    def _forget_failed_step(self, id: str) -> None:
        """Delete the last step of a workflow if it has failed: DBOS stores an error where it cannot store a result."""
        system: Any = self.instance._sys_db
        steps = system.tables.operation_outputs
        with system.engine.begin() as connection:
            its = sa.select(steps.c.function_id, steps.c.error).where(steps.c.workflow_uuid == id)
            last = connection.execute(its.order_by(steps.c.function_id.desc()).limit(1)).one_or_none()
            if last is not None and last.error is not None:
                where = (steps.c.workflow_uuid == id, steps.c.function_id == last.function_id)
                connection.execute(sa.delete(steps).where(*where))

    def _put_back(self, id: str) -> None:
        self.instance._sys_db.reenqueue_for_recovery(id, [self.executor], INTERNAL_QUEUE_NAME)

    def recover(self, executors: Sequence[str]) -> list[str]:
        """Go on with the unfinished workflows of these executors, which have ended. Return their ids."""
        handles = DBOS._recover_pending_workflows([*executors])  # pyright: ignore[reportPrivateUsage]
        return [handle.get_workflow_id() for handle in handles]

    def list_executors(self) -> list[str]:
        """List the executors that have unfinished workflows."""
        system: Any = self.instance._sys_db
        table = system.tables.workflow_status
        with system.engine.begin() as connection:
            found = connection.execute(sa.select(table.c.executor_id).distinct().where(table.c.status == "PENDING"))
            return [str(row.executor_id) for row in found if row.executor_id]

    def recover_from(self, executor: str) -> list[str]:
        """Go on with the unfinished workflows of an executor that has died, also of another program. Return their
        ids."""
        if executor not in self._dead:
            self._dead.add(executor)
            self._adopt()
        return self.recover([executor])

    async def suspend(self) -> None:
        """Suspend all workflows that run here, and those that are about to start."""
        self._is_fenced = True
        running: set[asyncio.Task[Any]] = self.instance._workflow_tasks if self.instance else set()
        tasks = [*running]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def go_on(self) -> None:
        """Start workflows again, unless the engine is being closed."""
        self._is_fenced = self._is_closing
        self.put_back()

    def put_back(self) -> None:
        """Put the workflows back into their queues that were suspended here and taken over by nobody."""
        if self._is_fenced:
            return
        for id in [*self._suspended]:
            self._suspended.discard(id)
            self._put_back(id)

    def _recover_dead(self, locks: ExecutorLocks) -> None:
        """Go on with the unfinished workflows of other executors whose process has ended."""
        for executor in self.list_executors():
            if executor != self.executor and locks.lock(executor):
                self.recover([executor])
                locks.release(executor)

    def _adopt(self) -> None:
        """Take over unfinished workflows of other programs that have the same workflow in the same version.

        Warns of those in a version that this program does not have.
        """
        system: Any = self.instance._sys_db
        table = system.tables.workflow_status
        with system.engine.begin() as connection:
            columns = (
                table.c[name] for name in ("workflow_uuid", "name", "attributes", "inputs", *("status", "executor_id"))
            )
            rows = connection.execute(
                sa.select(*columns).where(table.c.status.in_(UNFINISHED), table.c.application_version != self.version)
            ).all()
        unknown = [row.workflow_uuid for row in rows if not read_version(row.attributes)]
        runs = DBOS.list_workflows(workflow_ids=unknown) if unknown else []
        scheduled = {run.workflow_id: read_scheduled_version(run.input) for run in runs}
        interrupted: list[str] = []
        with system.engine.begin() as connection:
            for row in rows:
                ours = self.registrations.get(row.name)
                if ours is None:
                    continue
                if (version := read_version(row.attributes) or scheduled[row.workflow_uuid]) == ours.version:
                    its = (table.c.workflow_uuid == row.workflow_uuid, table.c.status.in_(UNFINISHED))
                    connection.execute(sa.update(table).where(*its).values(application_version=self.version))
                    if (row.status, row.executor_id) == ("PENDING", self.executor):
                        interrupted.append(row.workflow_uuid)
                else:
                    logger.warning(
                        "Workflow %s runs version %s of %s, and this program has version %s: let a program of the old "
                        "version finish it, or move it with `crow workflows fork`.",
                        *(row.workflow_uuid, version or "?", row.name, ours.version),
                    )
        for id in interrupted:
            system.reenqueue_for_recovery(id, [self.executor], INTERNAL_QUEUE_NAME)

    async def start(
        self, name: str, arguments: dict[str, Any], *, id: str, priority: int | None, tenant: str
    ) -> "WorkflowHandleAsync[Any]":
        """Start a workflow, or put it into its queue. Raises WorkflowConflict if its id is that of another."""
        registration = self.registrations[name]
        attributes = {"version": registration.version, "queue": registration.queue}
        try:
            with SetWorkflowAttributes(attributes), set_id(id):
                if not registration.queue:
                    return await DBOS.start_workflow_async(self._functions[name], arguments)
                with SetEnqueueOptions(priority=priority, queue_partition_key=tenant or None):
                    return await DBOS.enqueue_workflow_async(registration.queue, self._functions[name], arguments)
        except dbos_errors.DBOSConflictingWorkflowError as error:
            raise WorkflowConflict(
                f"The id {error.workflow_id!r} belongs to a run of another workflow. Start {name} with another id."
            ) from None

    async def close(self, drain: float = 0) -> None:
        """Stop the engine. What runs is suspended, after at most `drain` seconds in which it may end."""
        self._is_closing = self._is_fenced = True
        if self._storing is not None:
            self._storing.cancel()
        running: set[asyncio.Task[Any]] = self.instance._workflow_tasks if self.instance else set()
        if running and drain:
            await asyncio.wait([*running], timeout=drain)
        await self.suspend()
        self.loop.set_default_executor(ThreadPoolExecutor())  # DBOS's, which it has put there, ends now
        await asyncio.to_thread(self.destroy)

    def destroy(self) -> None:
        """Release all that the engine holds, at last the lock for which other processes wait."""
        DBOS.destroy(destroy_registry=True)
        if self._engine is not None:
            self._engine.dispose()
        if self._locks is not None:
            self._locks.close()
        if self._member is not None:
            self._member.stop()


def set_id(id: str) -> AbstractContextManager[Any]:
    """Give the next workflow an id; one of DBOS's for an empty one."""

    @contextmanager
    def keep() -> Generator[None]:
        yield

    return SetWorkflowID(id) if id else keep()


def describe_program(registrations: Sequence[Registration]) -> str:
    """Return the workflows of a program with their versions: DBOS gives work only to programs with the same ones."""
    return ",".join(sorted(f"{each.name}={each.version}" for each in registrations))


def read_version(attributes: Any) -> str:
    """Return the version of a workflow from its stored attributes; "" if there is none."""
    return str(read_attributes(attributes).get("version", ""))


def read_scheduled_version(arguments: Any) -> str:
    """Return the version of a workflow that a schedule has started from its arguments; "" for another one."""
    match arguments:
        case {"args": [_, {"version": str(version)}]}:
            return version
        case _:
            return ""


def find_queue(stored: StoredWorkflow) -> str | None:
    """Return the queue of a run, also of a cancelled one, which DBOS takes out of its queue; None if it has none."""
    if stored.queue_name and stored.queue_name != INTERNAL_QUEUE_NAME:
        return stored.queue_name
    match stored.input:
        case {"args": [_, {"queue": str(queue)}]} if queue:
            return queue
        case _:
            return read_attributes(stored.attributes).get("queue") or None


async def find_run(store: "type[DBOS] | DBOSClient", id: str) -> StoredWorkflow:
    """Find a stored run by its id. Raises WorkflowNotFound."""
    found = await store.list_workflows_async(workflow_ids=[id])
    if not found:
        raise WorkflowNotFound(id)
    return found[0]


async def put_into_queue(url: str, id: str, step: int | None) -> None:
    """Let a run that has ended go on in its queue: from a step, or where it is for None."""
    async with open_store(url) as store:
        stored = await find_run(store, id)
        queue = find_queue(stored)
        if step is None:
            await store.resume_workflow_async(id, queue_name=queue)
        else:
            key = stored.queue_partition_key
            await store.rewind_workflow_async(id, start_step=step, queue_name=queue, queue_partition_key=key)


def is_about_progress(error: DBAPIError) -> bool:
    """Test whether an error comes from a table of DBOS, and not from the program's own database."""
    return any(name in (error.statement or "") for name in PROGRESS_TABLES)


def read_attributes(attributes: Any) -> dict[str, Any]:
    """Return the attributes of a workflow; empty if it has none."""
    if isinstance(attributes, str):
        attributes = json.loads(attributes)
    return cast("dict[str, Any]", attributes) if isinstance(attributes, dict) else {}


def limit_idle_time(url: str) -> str:
    """Make a process that is frozen within a transaction lose its locks after IDLE_LIMIT seconds."""
    parsed = sa.make_url(url)
    given = parsed.query.get("options", "")
    options = f"{given} -c idle_in_transaction_session_timeout={IDLE_LIMIT:.0f}s".strip()
    return parsed.update_query_dict({"options": options}).render_as_string(hide_password=False)


def make_sqlite_engine(url: str, synchronous: str) -> sa.Engine:
    """Make the connections to an embedded database, with a write-ahead log."""
    engine = sa.create_engine(url)

    @sqlalchemy.event.listens_for(engine, "connect")  # pyright: ignore[reportUntypedFunctionDecorator, reportUnknownMemberType]
    def set_up(connection: Any, _: Any) -> None:
        connection.isolation_level = "IMMEDIATE"
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if synchronous == 'full' else 'NORMAL'}")
        connection.execute("PRAGMA busy_timeout=30000")
        connection.execute("PRAGMA foreign_keys=ON")
        if sqlite3.sqlite_version_info < (3, 42):  # DBOS calls unixepoch('subsec'), which is NULL there
            connection.create_function("unixepoch", 1, get_time)

    return engine


def get_time(_: str) -> float:
    """Return the seconds since 1970, as SQLite's `unixepoch('subsec')` does."""
    return time.time()


class WaitingClock:
    """DBOS's `time`: while a task waits for a message, its clock does not jump.

    DBOS compares the deadline with the clock again and again: one that is set forward would end the wait.
    """

    def __init__(self) -> None:
        self._offset: ContextVar[float | None] = ContextVar("offset", default=None)
        """Seconds between the clock and the steady time when the wait began; None in a task that does not wait."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        """Return the seconds since 1970."""
        offset = self._offset.get()
        return time.time() if offset is None else offset + read_steady_time()

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Let the clock go on without jumps in the block."""
        token = self._offset.set(time.time() - read_steady_time())
        try:
            yield
        finally:
            self._offset.reset(token)


def read_steady_time() -> float:
    """Return seconds that go on, whatever the clock is set to; on Linux also while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


CLOCK = WaitingClock()


async def sleep(seconds: float) -> None:
    """Sleep durably."""
    await DBOS.sleep_async(seconds)


async def receive(topic: str, seconds: float) -> Any:
    """Wait durably for a message; None if none comes in time."""
    with CLOCK.waiting():
        return await DBOS.recv_async(topic, timeout_seconds=seconds)


async def set_event(key: str, value: Any) -> None:
    """Store a value of the running workflow that others can read."""
    await DBOS.set_event_async(key, value)


@asynccontextmanager
async def open_store(url: str, *, is_step: bool = False) -> "AsyncGenerator[type[DBOS] | DBOSClient]":
    """Open the stored workflows: through the engine of this process, if it runs, else by themselves.

    `is_step`: whether the running workflow, if any, stores what it does with them.
    """
    if ENGINE is not None and ENGINE.url == url:
        before = get_local_dbos_context()
        if not is_step:
            _set_local_dbos_context(None)
        try:
            yield DBOS
        finally:
            _set_local_dbos_context(before)
        return
    engine = make_sqlite_engine(url, "normal") if url.startswith("sqlite") else None

    def connect() -> DBOSClient:
        return DBOSClient(
            system_database_url=url,
            system_database_engine=engine,
            serializer=StoredJson(),
            application_name=APP,
        )

    client = await asyncio.to_thread(connect)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.destroy)
        if engine is not None:
            engine.dispose()


def get_system(store: "type[DBOS] | DBOSClient") -> Any:
    """Return DBOS's own access to its database."""
    instance: Any = store if isinstance(store, DBOSClient) else ENGINE and ENGINE.instance
    return instance._sys_db


async def fork(url: str, id: str, step: int, new_id: str, version: str) -> str:
    """Start a new run that has the results of another one up to a step. Return its id."""
    async with open_store(url) as store:
        stored = await find_run(store, id)
        with set_id(new_id):  # no program has the version "-", so it does not start yet
            handle: Any = await store.fork_workflow_async(
                id,
                step,
                application_version="-",
                queue_name=find_queue(stored),
                queue_partition_key=stored.queue_partition_key,
            )
        system = get_system(store)
        await asyncio.to_thread(complete_fork, system, id, handle.get_workflow_id(), step, version)
    return str(handle.get_workflow_id())


def complete_fork(system: Any, id: str, new_id: str, step: int, version: str) -> None:
    """Copy the steps of branches, which have larger numbers, and let a program take the fork."""
    steps, runs, programs = (
        system.tables.operation_outputs,
        system.tables.workflow_status,
        system.tables.application_versions,
    )
    names = [column.name for column in steps.columns if column.name != "workflow_uuid"]
    its = (steps.c.workflow_uuid == id, steps.c.function_id.between(BRANCH_STEPS, step * BRANCH_STEPS - 1))
    with system.engine.begin() as connection:
        copied = sa.select(sa.literal(new_id), *(steps.c[name] for name in names)).where(*its)
        connection.execute(sa.insert(steps).from_select(["workflow_uuid", *names], copied))
        columns = (runs.c.name, runs.c.attributes, runs.c.priority)
        row = connection.execute(sa.select(*columns).where(runs.c.workflow_uuid == id)).one()
        attributes = read_attributes(row.attributes)
        version = version or read_version(attributes)
        newest = sa.select(programs.c.version_name).order_by(programs.c.version_timestamp.desc())
        fits = (name for name in connection.scalars(newest) if f"{row.name}={version}" in name.split(","))
        values = {
            "attributes": {**attributes, "version": version, "step": step},
            "application_version": next(fits, "-"),
            "priority": row.priority,
        }
        connection.execute(sa.update(runs).where(runs.c.workflow_uuid == new_id).values(**values))


async def find_fork(id: str) -> Fork:
    """Find the past of a run."""
    assert ENGINE is not None
    return await asyncio.to_thread(read_fork, get_system(DBOS), id)


def read_fork(system: Any, id: str) -> Fork:
    """Read the past of a run."""
    runs, steps = system.tables.workflow_status, system.tables.operation_outputs
    found = Fork()
    with system.engine.begin() as connection:
        columns = sa.select(runs.c.forked_from, runs.c.attributes)
        row = connection.execute(columns.where(runs.c.workflow_uuid == id)).one()
        if not row.forked_from:
            return found
        found.step = int(read_attributes(row.attributes).get("step", 0))
        while row is not None and row.forked_from:
            found.origins.append(str(row.forked_from))
            row = connection.execute(columns.where(runs.c.workflow_uuid == row.forked_from)).one_or_none()
        numbers = connection.scalars(sa.select(steps.c.function_id).where(steps.c.workflow_uuid == id)).all()
    for number in numbers:
        first, second = divmod(number, BRANCH_STEPS)
        if (first or number) < found.step and number < 1 << 30:
            found.labels.append(f"{first}.{second}" if first else str(number))
    return found


async def wait_for_result(url: str, id: str) -> Any:
    """Wait for the end of a workflow. Raises WorkflowFailed, WorkflowCancelled, WorkflowNotFound."""
    async with open_store(url, is_step=True) as store:
        try:
            is_running = get_local_dbos_context() is not None  # DBOS would store the state that it looks up
            if isinstance(store, DBOSClient):
                handle: Any = await store.retrieve_workflow_async(id)
            else:
                handle = await store.retrieve_workflow_async(id, existing_workflow=not is_running)
            return await handle.get_result(polling_interval_sec=0.1)
        except dbos_errors.DBOSNonExistentWorkflowError:
            raise WorkflowNotFound(id) from None
        except dbos_errors.DBOSAwaitedWorkflowCancelledError:
            raise WorkflowCancelled(f"Workflow {id} was cancelled.") from None
        except WorkflowError:
            raise
        except Exception as error:  # whatever the workflow raised
            raise WorkflowFailed(f"Workflow {id} failed: {error}") from error


async def read_waiting(store: "type[DBOS] | DBOSClient", stored: StoredWorkflow) -> dict[str, Any]:
    """Read the events of a workflow."""
    return await asyncio.to_thread(get_system(store).get_all_events, stored.workflow_id)


async def read_messages(store: "type[DBOS] | DBOSClient", id: str) -> dict[str, Any]:
    """Read the messages that a workflow was sent, taken or not, by topic, the oldest first."""
    system = get_system(store)
    table = system.tables.notifications

    def read() -> dict[str, Any]:
        its = sa.select(table.c.topic, table.c.message).where(table.c.destination_uuid == id)
        with system.engine.begin() as connection:
            rows = connection.execute(its.order_by(table.c.created_at_epoch_ms)).all()
        return {row.topic: load_json(row.message) for row in rows}

    return await asyncio.to_thread(read)


ENGINE: Engine | None = None
"""The engine of this process; None if it has not started."""
