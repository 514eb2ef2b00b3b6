"""`workflow`, `step`, `sleep` and `approve`: programs that go on where they were after their process has ended."""

import asyncio
import functools
import importlib
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from crow_agent.durable import PLACE
from crow_agent.workflows.answers import Ask, answer, refuse_below_crow, show_waiting
from crow_agent.workflows.approvals import Approval
from crow_agent.workflows.errors import (
    WorkflowConflict,
    WorkflowError,
    WorkflowNotFound,
)
from crow_agent.workflows.location import find_url
from crow_agent.workflows.queues import WorkflowQueue
from crow_agent.workflows.steps import find_first_to_fork
from crow_agent.workflows.values import bind, from_plain, get_hints, to_plain, to_seconds, to_time, unbind

if TYPE_CHECKING:
    from crow_agent.workflows.engine import Engine
    from crow_agent.workflows.place import Place

P = ParamSpec("P")
T = TypeVar("T")
WORKFLOWS: dict[str, "Workflow[Any, Any]"] = {}
"""The workflows of this program, by name."""
STATES = {
    "PENDING": "running",
    "ENQUEUED": "queued",
    "DELAYED": "queued",
    "SUCCESS": "done",
    "ERROR": "failed",
    "CANCELLED": "cancelled",
    "MAX_RECOVERY_ATTEMPTS_EXCEEDED": "failed",
}


class Workflow(Generic[P, T]):
    """A function whose progress is stored. `start` runs it; a call runs it as a plain function."""

    def __init__(
        self, function: Callable[P, Awaitable[T]], name: str, version: str, queue: str | WorkflowQueue, schedule: str
    ) -> None:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"{function!r} cannot be a workflow: it is no `async def`.")
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name or function.__qualname__.rpartition("<locals>.")[2]
        self.version = version
        self.queue = queue
        self.schedule = schedule
        WORKFLOWS[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        return self.function(*args, **kwargs)

    @property
    def queue_name(self) -> str:
        """The name of its queue; "" if it has none."""
        return self.queue if isinstance(self.queue, str) else self.queue.name

    async def start(
        self, *args: Any, id: str = "", priority: int | None = None, tenant: str = "", **kwargs: Any
    ) -> "WorkflowHandle[T]":
        """Start a run with an id, or return the one that has this id.

        `priority`: 1 comes first in the queue, and what has none before it. `tenant`: whose run it is, in a queue with
        limits for each tenant. Raises WorkflowConflict for an id that has other arguments.
        """
        arguments = bind(self.function, args, kwargs)
        engine = await get_engine()
        if self.name not in engine.registrations:
            raise WorkflowError(
                f"Workflow {self.name} was not known when the engine started. Import its module before, or open the "
                "workflows with it."
            )
        find_place()
        stored = await engine.start(self.name, arguments, id=id, priority=priority, tenant=tenant)
        handle = WorkflowHandle[T](stored.get_workflow_id(), engine.url, get_hints(self.function).get("return"))
        if id and PLACE.get() is None:
            await handle.check(self.name, arguments)
        return handle

    def retrieve(self, id: str, *, env: Mapping[str, str] | None = None) -> "WorkflowHandle[T]":
        """Return the handle of a run by its id."""
        from crow_agent.workflows import engine

        url = engine.ENGINE.url if engine.ENGINE is not None else find_url(env)[0]
        return WorkflowHandle[T](id, url, get_hints(self.function).get("return"))


@dataclass
class WorkflowStatus:
    """The state of a run."""

    id: str
    name: str
    state: str
    """`queued`, `running`, `done`, `failed` or `cancelled`."""
    version: str = ""
    queue: str = ""
    arguments: Any = None
    error: str = ""
    executor: str = ""
    """The id of the process that runs it, or ran it last."""
    is_stranded: bool = False
    """True if it is unfinished, and this program has another version of it."""
    created: datetime | None = None
    updated: datetime | None = None
    parent: str = ""
    """The id of the run that started it."""
    forked_from: str = ""
    result: Any = None
    """The result of a run that is done, as JSON values."""


class WorkflowHandle(Generic[T]):
    """A run of a workflow."""

    def __init__(self, id: str, url: str, hint: Any = None) -> None:
        self.id = id
        self._url = url
        self._hint = hint

    def __repr__(self) -> str:
        return f"<WorkflowHandle {self.id}>"

    async def result(self) -> T:
        """Wait for the end, and return the result. Raises WorkflowFailed, WorkflowCancelled, WorkflowNotFound."""
        from crow_agent.workflows import stored_runs

        find_place()
        value = await stored_runs.wait_for_result(self._url, self.id)
        return from_plain(value, self._hint)

    async def status(self) -> WorkflowStatus:
        """Return its state. Raises WorkflowNotFound."""
        from crow_agent.workflows import stored_runs

        find_place()
        async with stored_runs.open_store(self._url) as store:
            found = await store.list_workflows_async(workflow_ids=[self.id], load_output=True)
        if not found:
            raise WorkflowNotFound(self.id)
        return to_status(found[0])

    async def check(self, name: str, arguments: dict[str, Any]) -> None:
        """Raise WorkflowConflict if it is a run of another workflow, or with other arguments."""
        status = await self.status()
        if status.name != name or status.arguments != arguments:
            raise WorkflowConflict(
                f"The id {self.id!r} belongs to a run of {status.name} with other arguments: {status.arguments}. "
                "Give this run another id."
            )

    async def cancel(self) -> None:
        """Cancel it: the step that runs is interrupted, and nothing runs after it."""
        await cancel(self.id, url=self._url)

    async def approve(self, approved: bool = True, note: str = "") -> None:
        """Answer what it waits for. Raises WorkflowError if it waits for nothing."""
        await answer(self.id, approved, note, url=self._url)


def to_status(stored: Any) -> WorkflowStatus:
    """Convert a stored run."""
    from crow_agent.workflows import dbos_database

    given: Any = stored.input["args"][0] if stored.input and stored.input["args"] else None
    version = dbos_database.read_version(stored.attributes) or dbos_database.read_scheduled_version(stored.input)
    ours = WORKFLOWS.get(stored.name)
    return WorkflowStatus(
        stored.workflow_id,
        stored.name,
        STATES[stored.status],
        version,
        stored.queue_name or "",
        given,
        str(stored.error) if stored.error is not None else "",
        stored.executor_id or "",
        stored.status in dbos_database.UNFINISHED and ours is not None and ours.version != version,
        to_time(stored.created_at),
        to_time(stored.updated_at),
        stored.parent_workflow_id or "",
        stored.forked_from or "",
        stored.output,
    )


async def list_workflows(
    *, states: Sequence[str] = (), limit: int | None = None, url: str = "", env: Mapping[str, str] | None = None
) -> list[WorkflowStatus]:
    """List runs, the newest first; `states` are those of `WorkflowStatus`. It needs no running engine."""
    from crow_agent.workflows import stored_runs

    wanted = [stored for stored, state in STATES.items() if state in states] or None
    async with stored_runs.open_store(url or find_url(env)[0]) as store:
        found = await store.list_workflows_async(status=wanted, limit=limit, sort_desc=True)
    return [to_status(stored) for stored in found]


async def cancel(workflow_id: str, *, url: str = "", env: Mapping[str, str] | None = None) -> None:
    """Cancel a run from any process. It needs no running engine."""
    refuse_below_crow(env)
    from crow_agent.workflows import stored_runs

    async with stored_runs.open_store(url or find_url(env)[0]) as store:
        await store.cancel_workflow_async(workflow_id)


async def resume(workflow_id: str, *, url: str = "", env: Mapping[str, str] | None = None) -> None:
    """Continue a cancelled or failed run from the step that failed; it waits in its queue again.

    A process that knows the workflow does the work. Raises WorkflowError for a run that is under way or done.
    """
    refuse_below_crow(env)
    from crow_agent.workflows import stored_runs

    url = url or find_url(env)[0]
    status = await WorkflowHandle[Any](workflow_id, url).status()
    if status.state not in ("cancelled", "failed"):
        raise WorkflowError(f"Workflow {workflow_id} is {status.state}: only what was cancelled or has failed goes on.")
    step = None
    if status.state == "failed":
        async with stored_runs.open_store(url) as store:
            steps = await store.list_workflow_steps_async(workflow_id)
        failed = [each["function_id"] for each in steps if each["error"] is not None]
        last = max((each["function_id"] for each in steps), default=0)
        step = last if last in failed else last + 1
    await stored_runs.put_into_queue(url, workflow_id, step)


async def fork(
    workflow_id: str,
    *,
    step: int | None = None,
    id: str = "",
    version: str = "",
    url: str = "",
    env: Mapping[str, str] | None = None,
) -> "WorkflowHandle[Any]":
    """Start a new run that has the results and the sessions of another one, up to a step, and goes on by itself.

    It waits in the same queue. `step`: the number of the first step that is done again, as in `list_steps`; by default
    the one after the last. `version`: that of the workflow in the programs that shall do it, by default the same.
    Raises WorkflowNotFound, and WorkflowError for a step that the run does not have.
    """
    refuse_below_crow(env)
    from crow_agent.workflows import stored_runs

    url = url or find_url(env)[0]
    async with stored_runs.open_store(url) as store:
        await stored_runs.find_run(store, workflow_id)
        stored = await store.list_workflow_steps_async(workflow_id)
    first = find_first_to_fork(workflow_id, stored, step)
    return WorkflowHandle[Any](await stored_runs.fork(url, workflow_id, first, id, version), url)


@overload
def workflow(function: Callable[P, Awaitable[T]], /) -> Workflow[P, T]: ...


@overload
def workflow(
    *, name: str = "", version: str = "1", queue: str | WorkflowQueue = "", schedule: str = ""
) -> Callable[[Callable[P, Awaitable[T]]], Workflow[P, T]]: ...


def workflow(
    function: Any = None, /, *, name: str = "", version: str = "1", queue: str | WorkflowQueue = "", schedule: str = ""
) -> Any:
    """Make an `async def` a workflow: `start` runs it, and what it has done is stored.

    `name`: by default that of the function. `version`: change it when changed code no longer fits runs that are under
    way; these stay with programs of the old version. `queue`: runs wait there until a process is free. `schedule`: a
    cron expression in UTC; the function gets no argument, or the time.
    """

    def make(function: Callable[..., Awaitable[Any]]) -> Workflow[..., Any]:
        return Workflow(function, name, version, queue, schedule)

    return make if function is None else make(function)


@overload
def step(function: Callable[P, Awaitable[T]], /) -> Callable[P, Awaitable[T]]: ...


@overload
def step(function: Callable[P, T], /) -> Callable[P, Awaitable[T]]: ...


@overload
def step(
    *, name: str = "", retries: int = 0, delay: float = 1.0, retry_on: tuple[type[Exception], ...] = (Exception,)
) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]: ...


def step(
    function: Any = None,
    /,
    *,
    name: str = "",
    retries: int = 0,
    delay: float = 1.0,
    retry_on: tuple[type[Exception], ...] = (Exception,),
) -> Any:
    """Make a function a step: inside a workflow its result is stored, and it does not run again once it has ended.

    It is called with `await`; a plain function runs in a thread. A step that was interrupted runs again. `retries`: how
    often it is tried again after one of the errors `retry_on`, first after `delay` seconds, then after longer waits.
    Outside of a workflow it is the plain function.
    """

    def make(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        if not inspect.iscoroutinefunction(function):
            function = functools.wraps(function)(functools.partial(asyncio.to_thread, function))
        title = name or function.__qualname__.rpartition("<locals>.")[2]

        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            if (place := find_place()) is None:
                return await function(*args, **kwargs)
            return await place.call(
                title,
                lambda: function(*args, **kwargs),
                get_hints(function).get("return"),
                retries=retries,
                delay=delay,
                may_retry=lambda error: isinstance(error, retry_on),
            )

        return run

    return make if function is None else make(function)


def find_place() -> "Place | None":
    """Return the place of the running code in a workflow; None outside."""
    if PLACE.get() is None:
        return None
    from crow_agent.workflows.place import get_place

    return get_place("A step").find()


async def sleep(duration: str | float | timedelta) -> None:
    """Sleep for seconds, "90s", "2h", "3d" or a timedelta; inside a workflow, also while no process runs."""
    if (place := find_place()) is None:
        await asyncio.sleep(to_seconds(duration))
    else:
        await place.sleep(duration)


async def approve(value: Any, *, timeout: str | float | timedelta | None = None) -> Approval:
    """Wait for a person's answer to a value: true if it is approved, false if not, or if no answer comes in time.

    Its `note` is what the person has written. The answer comes by `handle.approve()` or `answer()`, from any process.
    Raises WorkflowError outside of a workflow.
    """
    from crow_agent.workflows.place import get_place

    return await get_place("approve").approve(value, timeout)


@asynccontextmanager
async def open_workflows(
    workflows: Sequence[Workflow[..., Any]] | None = None,
    *,
    url: str = "",
    executor: str = "",
    queues: Sequence[WorkflowQueue] = (),
    listen: Sequence[str] | None = None,
    drain: float = 0,
    ask: Ask | None = None,
    env: Mapping[str, str] | None = None,
) -> "AsyncGenerator[Engine]":
    """Start the engine of workflows, and stop it at the end of the block; what still runs then is suspended.

    `workflows`: by default all that were defined. `url`: the database, by default PostgreSQL as configured for
    sessions, else a file of SQLite in crow's folder. `executor`: an id of this process among those that share the
    database; on SQLite, a process gets a free one by default. `queues`: limits of queues. `listen`: the queues to take
    work from, by default all. `drain`: the most seconds to wait at the end for what runs. `ask`: is called with what
    workflows wait for, and returns the answer; see `show_waiting`.
    """
    engine = await launch(workflows, url=url, executor=executor, queues=queues, listen=listen, env=env)
    showing = asyncio.ensure_future(show_waiting(ask, url=engine.url, env=env)) if ask else None
    try:
        yield engine
    finally:
        if showing is not None:
            showing.cancel()
            await asyncio.wait([showing])
        from crow_agent.workflows import engine as port

        port.ENGINE = None
        await engine.close(drain)


async def launch(
    workflows: Sequence[Workflow[..., Any]] | None = None,
    *,
    url: str = "",
    executor: str = "",
    queues: Sequence[WorkflowQueue] = (),
    listen: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> "Engine":
    """Start the engine of this process, which it keeps until its end. The arguments are those of `open_workflows`."""
    import_engine()
    from crow_agent.workflows import engine as port
    from crow_agent.workflows import numbering
    from crow_agent.workflows.place import Place

    if port.ENGINE is not None:
        raise WorkflowError("The workflows of this process are open already. A process opens them once.")
    wanted = list(WORKFLOWS.values()) if workflows is None else list(workflows)
    found = ("", "") if url else find_url(env)

    def register(workflow: Workflow[..., Any]) -> "port.Registration":
        async def run(execution: numbering.WorkflowRun, context: Any, arguments: dict[str, Any]) -> Any:
            place = Place.make(execution, context)
            PLACE.set(place)
            try:
                if "$scheduled" in arguments:
                    times = [datetime.fromisoformat(arguments["$scheduled"])]
                    parameters = inspect.signature(workflow.function).parameters
                    return to_plain(await workflow.function(*times[: len(parameters)]))
                positional, named = unbind(workflow.function, arguments)
                return to_plain(await workflow.function(*positional, **named))
            finally:
                await place.close()

        return port.Registration(workflow.name, workflow.version, run, workflow.queue_name, workflow.schedule)

    limits = {each.queue_name: WorkflowQueue(each.queue_name) for each in wanted if each.queue_name}
    limits |= {each.queue_name: each.queue for each in wanted if isinstance(each.queue, WorkflowQueue)}
    limits |= {each.name: each for each in queues}
    engine = port.Engine(url or found[0], executor, [register(each) for each in wanted])
    port.ENGINE = engine
    try:
        await engine.launch([*limits.values()], listen, found[1] or "normal")
    except BaseException as error:
        port.ENGINE = None
        await engine.end()
        raise port.explain_start(error, engine.url) from error
    return engine


async def get_engine() -> "Engine":
    """Return the engine of this process, started if need be."""
    import_engine()
    from crow_agent.workflows import engine as port

    if port.ENGINE is not None and port.ENGINE.loop.is_closed():
        gone, port.ENGINE = port.ENGINE, None
        await asyncio.to_thread(gone.destroy)
    return port.ENGINE or await launch()


def import_engine() -> None:
    """Import the engine, which takes long. Raises WorkflowError without the extra that it needs."""
    try:
        importlib.import_module("crow_agent.workflows.engine")
    except ModuleNotFoundError as error:
        raise WorkflowError("Durable workflows need DBOS: install crow-agent[workflows].") from error
