"""Who has a session open: one process at a time, for as long as its heart beats, by the database's clock: those of
machines differ."""

import os
import socket
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from secrets import token_hex
from time import time
from typing import Any

from crow_core.errors import SessionBusy
from sqlalchemy import BigInteger, Connection, Row, select, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from crow_persistence.tables import sessions

STALE = 20_000
"""Milliseconds after the last beat from which an owner counts as gone."""


def now() -> int:
    """Milliseconds since 1970."""
    return int(time() * 1000)


class Clock(FunctionElement[int]):
    """The same by the database's clock, in a statement."""

    inherit_cache = True
    type = BigInteger()


@compiles(Clock, "sqlite")
def _(element: Clock, compiler: Any, **_: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


@compiles(Clock, "postgresql")
def _(element: Clock, compiler: Any, **_: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"


def new_owner() -> str:
    """A name for somebody in this process who opens sessions, unlike any other."""
    pid = os.getpid()
    return f"{machine()}:{pid}:{started(pid) or ''}:{token_hex(4)}"


@cache
def machine() -> str:
    """What tells this machine, since its last start, and this container of processes from others."""
    known = [socket.gethostname()]
    with suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        known.append(os.readlink("/proc/self/ns/pid").strip("pid:[]"))
    return "/".join(known)


def started(pid: int) -> str | None:
    """When a process of this machine started, in the kernel's ticks: none other has its id and this. None for one that
    has ended; "" where nobody can say."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass  # it runs, as somebody else
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return None if state in "ZX" else fields[18]  # a zombie has ended, too


def is_gone(owner: str) -> bool:
    """Whether an owner has surely ended: a process of this machine that runs no more."""
    there, pid, start = f"{owner}:::".split(":")[:3]
    return there == machine() and pid.isdecimal() and started(int(pid)) not in (start, "")


def in_words(owner: str) -> str:
    """An owner for a person."""
    there, pid = f"{owner}::".split(":")[:2]
    host = there.partition("/")[0]
    return f"process {pid}" if there == machine() else f"process {pid} on {host}"


def is_free(connection: Connection, session: "Row[Any]", owner: str) -> bool:
    """Whether no one but this owner has a session open."""
    if session.owner is None or session.owner == owner or is_gone(session.owner):
        return True
    return connection.execute(select(Clock())).scalar_one() - (session.beat or 0) >= STALE


def take(connection: Connection, session: "Row[Any]", owner: str) -> None:
    """Open a session, whose row was selected for update, as this owner. Raises SessionBusy."""
    if not is_free(connection, session, owner):
        holder = in_words(session.owner)
        raise SessionBusy(f"Session {session.id} is open in {holder}. Close it there, or fork it to go on in a copy.")
    its = sessions.c.number == session.number
    connection.execute(update(sessions).where(its).values(owner=owner, beat=Clock()))


def release(connection: Connection, owner: str, id: str) -> None:
    """Let others open a session."""
    its = (sessions.c.id == id) & (sessions.c.owner == owner)
    connection.execute(update(sessions).where(its).values(owner=None, beat=None))


def beat(connection: Connection, owner: str, ids: Collection[str]) -> None:
    """Tell that the owner of these sessions lives."""
    its = sessions.c.id.in_(ids) & (sessions.c.owner == owner)
    connection.execute(update(sessions).where(its).values(beat=Clock()))
