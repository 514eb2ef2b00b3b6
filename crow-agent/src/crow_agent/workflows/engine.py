"""The engine: DBOS, launched in this process, which keeps the progress of workflows in SQLite or PostgreSQL.

DBOS takes long to import, so this module and those that it imports are imported when the first workflow starts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import sqlalchemy as sa
from crow_core.models.retries import attempt_again
from dbos import DBOS, SetEnqueueOptions, SetWorkflowAttributes, SetWorkflowID, WorkflowHandleAsync
from dbos import (
    _sys_db as system_database,  # pyright: ignore[reportPrivateUsage]
)
from dbos import error as dbos_errors
from dbos._context import DBOSContext, assert_current_dbos_context
from dbos._utils import INTERNAL_QUEUE_NAME
from sqlalchemy.exc import DBAPIError

from crow_agent.workflows.clock import CLOCK
from crow_agent.workflows.dbos_database import (
    APP,
    UNFINISHED,
    StoredJson,
    is_about_progress,
    limit_idle_time,
    make_sqlite_engine,
    read_scheduled_version,
    read_version,
)
from crow_agent.workflows.errors import WorkflowConflict
from crow_agent.workflows.executors import ExecutorLocks
from crow_agent.workflows.numbering import T, WorkflowRun, explain_change
from crow_agent.workflows.queues import WorkflowQueue
from crow_agent.workflows.takeover import Executor, to_workflow_error

logger = logging.getLogger("crow_agent")
RECOVERIES = 1_000_000
"""A workflow may be interrupted this often; DBOS would give it up after 100 times."""
STORE_INTERVAL = 5.0
"""Seconds between two attempts to go on with workflows whose progress could not be stored."""


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
        """True if workflows run here: it is not fenced off."""
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

        DBOS starts a workflow again after another process took it over and back, or after it returned to its queue. The
        earlier execution runs until it writes, and may wait for a model for a day.
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
        """Stop the engine. Running workflows are suspended, after at most `drain` seconds in which they may end."""
        self._is_closing = self._is_fenced = True
        if self._storing is not None:
            self._storing.cancel()
        running: set[asyncio.Task[Any]] = self.instance._workflow_tasks if self.instance else set()
        if running and drain:
            await asyncio.wait([*running], timeout=drain)
        await self.suspend()
        await self.end()

    async def end(self) -> None:
        """Call `destroy` without blocking the event loop, which goes on."""
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


def explain_start(error: BaseException, url: str) -> BaseException:
    """Convert an error of the database that the start of the engine met; return any other unchanged."""
    return to_workflow_error(error, sa.make_url(url)) if isinstance(error, DBAPIError) else error


def set_id(id: str) -> AbstractContextManager[Any]:
    """Give the next workflow an id; one of DBOS's for an empty one."""

    @contextmanager
    def keep() -> Generator[None]:
        yield

    return SetWorkflowID(id) if id else keep()


def describe_program(registrations: Sequence[Registration]) -> str:
    """Return the workflows of a program with their versions: DBOS gives work only to programs with the same ones."""
    return ",".join(sorted(f"{each.name}={each.version}" for each in registrations))


async def set_event(key: str, value: Any) -> None:
    """Store a value of the running workflow that others can read."""
    await DBOS.set_event_async(key, value)


ENGINE: Engine | None = None
"""The engine of this process; None if it has not started."""
