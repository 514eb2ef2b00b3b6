"""Leases: one process owns an open session as long as it sends heartbeats.

Heartbeats are timed by the database's clock, because the clocks of machines differ.
"""

import os
import socket
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from secrets import token_hex
from time import time
from typing import Any

import crow_system as system
from crow_core.errors import SessionBusy
from sqlalchemy import BigInteger, Connection, Row, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from crow_persistence.tables import sessions

LEASE_TIMEOUT = 20_000
"""Milliseconds after the last heartbeat at which a lease expires."""


def now() -> int:
    """Return the time of this machine in milliseconds since 1970."""
    return int(time() * 1000)


class DatabaseClock(FunctionElement[int]):
    """SQL expression for the database's current time in milliseconds since 1970."""

    inherit_cache = True
    type = BigInteger()


@compiles(DatabaseClock, "sqlite")
def _(element: DatabaseClock, compiler: Any, **_: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


@compiles(DatabaseClock, "postgresql")
def _(element: DatabaseClock, compiler: Any, **_: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"


EXECUTOR: list[str] = []
"""Has the id of this process among those that run workflows; empty if it is none of them."""


def make_owner() -> str:
    """Return a new, unique name for an owner of leases in this process, with the process's id as an executor."""
    pid = os.getpid()
    return f"{machine_id()}:{pid}:{system.read_start_time(pid) or ''}:{token_hex(4)}:{''.join(EXECUTOR)}"


@cache
def machine_id() -> str:
    """Return a string that identifies this machine since its last start, and the process namespace of its container."""
    known = [socket.gethostname()]
    with suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        known.append(os.readlink("/proc/self/ns/pid").strip("pid:[]"))
    return "/".join(known)


def has_ended(owner: str) -> bool:
    """Test whether an owner has certainly ended: its process ran on this machine and is gone."""
    there, pid, start = f"{owner}:::".split(":")[:3]
    return there == machine_id() and pid.isdecimal() and system.read_start_time(int(pid)) not in (start, "")


def describe_owner(owner: str) -> str:
    """Return a description of an owner for the user: "process 12 on host"."""
    there, pid = f"{owner}::".split(":")[:2]
    host = there.partition("/")[0]
    return f"process {pid}" if there == machine_id() else f"process {pid} on {host}"


def is_free(connection: Connection, session: "Row[Any]", owner: str) -> bool:
    """Test whether a session is not open for another owner than this one."""
    if session.owner is None or session.owner == owner or has_ended(session.owner):
        return True
    return connection.execute(select(DatabaseClock())).scalar_one() - (session.beat or 0) >= LEASE_TIMEOUT


def acquire(connection: Connection, session: "Row[Any]", owner: str) -> None:
    """Open a session for an owner; its row must have been selected for update. Raises SessionBusy."""
    if not is_free(connection, session, owner):
        holder = describe_owner(session.owner)
        raise SessionBusy(f"Session {session.id} is open in {holder}. Close it there, or fork it to go on in a copy.")
    its = sessions.c.number == session.number
    connection.execute(update(sessions).where(its).values(owner=owner, beat=DatabaseClock()))


def release(connection: Connection, owner: str, ids: Collection[str]) -> None:
    """Release an owner's leases of these sessions."""
    its = sessions.c.id.in_(ids) & (sessions.c.owner == owner)
    connection.execute(update(sessions).where(its).values(owner=None, beat=None))


def break_leases(connection: Connection, executor: str) -> int:
    """Release all leases of an executor that has ended, and return their number. If it wakes up, it cannot write."""
    its = sessions.c.owner.endswith(f":{executor}", autoescape=True)
    return connection.execute(update(sessions).where(its).values(owner=None, beat=None)).rowcount


def send_heartbeat(connection: Connection, owner: str, ids: Collection[str]) -> None:
    """Renew the owner's leases of these sessions."""
    its = sessions.c.id.in_(ids) & (sessions.c.owner == owner)
    connection.execute(update(sessions).where(its).values(beat=DatabaseClock()))
