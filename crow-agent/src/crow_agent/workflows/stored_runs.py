"""The stored workflows, read and changed from any process, also from one in which no engine runs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import sqlalchemy as sa
from dbos import DBOS, DBOSClient
from dbos import WorkflowStatus as StoredWorkflow
from dbos import error as dbos_errors
from dbos._context import (
    _set_local_dbos_context,  # pyright: ignore[reportPrivateUsage]
    get_local_dbos_context,
)
from sqlalchemy.exc import OperationalError

from crow_agent.workflows import engine
from crow_agent.workflows.dbos_database import (
    APP,
    StoredJson,
    find_queue,
    make_sqlite_engine,
    read_attributes,
    read_version,
)
from crow_agent.workflows.engine import retry, set_id
from crow_agent.workflows.errors import WorkflowCancelled, WorkflowError, WorkflowFailed, WorkflowNotFound
from crow_agent.workflows.numbering import BRANCH_STEPS, Fork
from crow_agent.workflows.values import load_json


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


@asynccontextmanager
async def open_store(url: str, *, is_step: bool = False) -> "AsyncGenerator[type[DBOS] | DBOSClient]":
    """Open the stored workflows: through the engine of this process, if it runs, else by themselves.

    `is_step`: whether the running workflow, if any, stores what it does with them.
    """
    if engine.ENGINE is not None and engine.ENGINE.url == url:
        before = get_local_dbos_context()
        if not is_step:
            _set_local_dbos_context(None)
        try:
            yield DBOS
        finally:
            _set_local_dbos_context(before)
        return
    database = make_sqlite_engine(url, "normal") if url.startswith("sqlite") else None

    def connect() -> DBOSClient:
        return DBOSClient(
            system_database_url=url,
            system_database_engine=database,
            serializer=StoredJson(),
            application_name=APP,
        )

    client = await asyncio.to_thread(connect)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.destroy)
        if database is not None:
            database.dispose()


def get_system(store: "type[DBOS] | DBOSClient") -> Any:
    """Return DBOS's own access to its database."""
    instance: Any = store if isinstance(store, DBOSClient) else engine.ENGINE and engine.ENGINE.instance
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
    """Find the past of a run; wait while the database cannot be reached, as DBOS does for its own queries."""
    assert engine.ENGINE is not None
    system = get_system(DBOS)

    async def read() -> Fork:
        return await asyncio.to_thread(read_fork, system, id)

    return await retry(read, lambda error: isinstance(error, OperationalError), longest=5.0)


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
