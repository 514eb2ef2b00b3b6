"""Durable waits, and the clock of DBOS, which does not jump while a task waits."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dbos import DBOS


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
