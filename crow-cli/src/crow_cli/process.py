"""Run a command's coroutine to its end: signals, exit codes, and the message of a failure."""

import asyncio
import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, NoReturn

import crow_core.system as system
from crow_core.text import clean_lines

PR_SET_DUMPABLE = 4
"""The operation of prctl(2) that says whether a process can be traced and its memory read."""
EXIT_LIMIT = 40.0
"""Seconds after SIGTERM or SIGHUP by which the process ends, whatever does not answer. The wait for a locked database
is shorter."""


RECEIVED: ContextVar[Sequence[int]] = ContextVar("received", default=())
"""The signals that have cancelled the coroutine of `run_to_end`, in order."""


class SafeFormatter(logging.Formatter):
    """Formats records without the control characters in texts of models, servers and files."""

    def format(self, record: logging.LogRecord) -> str:
        return clean_lines(super().format(record))


def log_to_stderr() -> None:
    """Print warnings and errors of the log on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter("crow: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def hide_memory() -> None:
    """Keep other processes, such as the commands of a model, from reading this one's memory and environment.

    Both hold keys. Does not hold back root, and does nothing where there is no prctl(2).
    """
    import ctypes  # imported here because `initialize` is answered before this is needed

    with suppress(OSError, AttributeError, TypeError):  # TypeError: Windows
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def find_command(argv0: str, executable: str) -> list[str]:
    """Return a command line that starts this crow from any folder: the script's absolute path, or `python -m`.

    Links are not resolved: a link that `uv tool` makes stays valid after an upgrade, its target may not.
    """
    script = shutil.which(argv0) if Path(argv0).suffix != ".py" else None
    return [os.path.abspath(script)] if script else [executable, "-m", "crow_cli"]


def run_to_end(coroutine: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine and return its exit code; after SIGTERM or SIGHUP return 128 plus the signal's number.

    The first of these signals cancels the coroutine, so that it cleans up; the second ends the process at once, and so
    does EXIT_LIMIT. Raises KeyboardInterrupt.
    """
    if logging.lastResort:  # prints warnings where no handler is configured
        logging.lastResort.setFormatter(SafeFormatter())
    sys.setswitchinterval(0.0005)  # with the default, each thread that writes or imports delays the event loop by 5 ms
    timers: list[Timer] = []
    try:
        return asyncio.run(run_with_signals(coroutine, timers))
    finally:
        for timer in timers:
            timer.cancel()
        gc.freeze()  # without this, the interpreter spends half a second on garbage collection at exit


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


class UsageFailure(SystemExit):
    """Ends the process after wrong usage or configuration."""

    def __init__(self, sentence: str) -> None:
        super().__init__(2)
        self.sentence = sentence


def fail(sentence: str) -> NoReturn:
    """Print a message about wrong usage or configuration, and exit with code 2."""
    import click  # imported here because `crow acp` imports this module and does not need click

    from crow_cli.console import escape_controls  # it imports click

    click.secho(f"crow: {escape_controls(sentence)}", fg="red", err=True)
    raise UsageFailure(sentence)
