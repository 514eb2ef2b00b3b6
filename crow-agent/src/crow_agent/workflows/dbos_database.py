"""The database of DBOS: opening it, and reading its rows."""

import json
import sqlite3
import time
from typing import Any, cast

import sqlalchemy as sa
import sqlalchemy.event
from dbos import Serializer
from dbos import WorkflowStatus as StoredWorkflow
from dbos._utils import INTERNAL_QUEUE_NAME
from sqlalchemy.exc import DBAPIError

from crow_agent.workflows.takeover import IDLE_LIMIT
from crow_agent.workflows.values import dump_json, load_json

APP = "crow"
"""The name under which all workflows are stored."""
UNFINISHED = ["PENDING", "ENQUEUED", "DELAYED"]
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
