"""The queue of processes that want to write one SQLite file.

SQLite lets each waiting writer look again from time to time, so that one may wait for long while others succeed. Here a
writer first locks a file next to the database. The system grants this lock about in the order of arrival, and the file
names the process that holds it.
"""

import os
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import monotonic_ns

import crow_system as system

from crow_persistence import leases

HOLDER_LENGTH = 200
"""Bytes of the file, so that one write replaces all of them."""


class QueueStuck(Exception):
    """Another process has held the lock for too long. Its argument describes the process."""


@contextmanager
def wait_in_queue(file: Path, timeout: float) -> Generator[None]:
    """Hold the lock of a file while the block runs.

    Waits as long as the processes before are served one after the other. Raises QueueStuck if one of them holds the
    lock for longer than `timeout` seconds, OSError if the file cannot be written.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        system.lock(lock, wait=False)
    except BlockingIOError:
        wait_for_lock(lock, timeout)
    except BaseException:
        os.close(lock)
        raise
    try:
        system.write_start(lock, f"{monotonic_ns()} {leases.machine_id()}:{os.getpid()}:".encode().ljust(HOLDER_LENGTH))
        yield
    finally:
        os.close(lock)


def wait_for_lock(lock: int, timeout: float) -> None:
    """Wait for the lock in a thread, as the system's call has no time limit. Closes `lock` if it raises."""
    acquired: Future[None] = Future()

    def wait() -> None:
        try:
            system.lock(lock, wait=True)
        except OSError as error:
            acquired.set_exception(error)
            return
        if acquired.set_running_or_notify_cancel():
            acquired.set_result(None)
        else:  # nobody waits any more
            os.close(lock)

    holder = read_holder(lock)
    Thread(target=wait, name="crow-queue", daemon=True).start()
    while True:
        try:
            return acquired.result(timeout)
        except TimeoutError:
            before, holder = holder, read_holder(lock)
            if holder == before and acquired.cancel():
                _, _, owner = holder.partition(" ")
                raise QueueStuck(leases.describe_owner(owner) if owner else "another process") from None
        except BaseException:
            if acquired.cancel():
                raise
            os.close(lock)
            raise


def read_holder(lock: int) -> str:
    """Return what the process that holds the lock has written to the file; it changes with each holder."""
    return system.read_start(lock, HOLDER_LENGTH).decode(errors="replace")
