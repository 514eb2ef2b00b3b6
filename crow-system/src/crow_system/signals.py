"""Run a coroutine that signals end in order."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from threading import Timer
from typing import Any, NoReturn

import crow_system as system

EXIT_LIMIT = 40.0
"""Seconds after SIGTERM or SIGHUP by which the process ends, whatever does not answer. The wait for a locked database
is shorter."""


RECEIVED: ContextVar[Sequence[int]] = ContextVar("received", default=())
"""The signals that have cancelled the coroutine of `run_to_end`, in order."""


def run_until_signal(coroutine: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine and return its exit code; after SIGTERM or SIGHUP return 128 plus the signal's number.

    The first of these signals cancels the coroutine, so that it cleans up; the second ends the process at once, and so
    does EXIT_LIMIT. Raises KeyboardInterrupt.
    """
    timers: list[Timer] = []
    try:
        return asyncio.run(run_with_signals(coroutine, timers))
    finally:
        for timer in timers:
            timer.cancel()


async def run_with_signals(coroutine: Coroutine[Any, Any, int], timers: list[Timer]) -> int:
    """Run a coroutine that signals cancel. Add the timers that end the process afterwards."""
    received: list[int] = []
    RECEIVED.set(received)
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(coroutine)

    def cancel(number: int) -> None:
        system.stop_signal(loop, number)
        received.append(number)
        timers.append(timer := Timer(EXIT_LIMIT, end_at_once, (128 + number,)))  # the event loop may be blocked
        timer.daemon = True
        timer.start()
        task.cancel()

    for number in system.END_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP; it stays ignored
            system.on_signal(loop, number, partial(cancel, number))
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


def end_at_once(code: int) -> NoReturn:
    """End the process, although something has not been stored or has not ended."""
    why = "a disk, the database or a server does not answer. What was not stored yet is lost; look at that one first"
    with suppress(OSError):
        os.write(2, f"crow: Ended {EXIT_LIMIT:.0f} s after the signal, as {why}.\n".encode())
    os._exit(code)
