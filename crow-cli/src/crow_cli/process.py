"""Run a command's coroutine to its end: signals, exit codes, and the message of a failure."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, NoReturn

from crow_core.text import clean_lines


class SafeFormatter(logging.Formatter):
    """Formats records without the control characters in texts of models, servers and files."""

    def format(self, record: logging.LogRecord) -> str:
        return clean_lines(super().format(record))


def log_to_stderr() -> None:
    """Print warnings and errors of the log on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter("crow: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def run_to_end(coroutine: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine and return its exit code; after SIGTERM or SIGHUP return 128 plus the signal's number.

    The first of these signals cancels the coroutine, so that it cleans up; the second ends the process at once.
    Raises KeyboardInterrupt.
    """
    logging.getLogger("stamina").setLevel(logging.ERROR)  # the user is told of every retry by a notice
    if logging.lastResort:  # prints warnings where no handler is configured
        logging.lastResort.setFormatter(SafeFormatter())
    sys.setswitchinterval(0.0005)  # with the default, each thread that writes or imports delays the event loop by 5 ms
    try:
        return asyncio.run(run_with_signals(coroutine))
    finally:
        gc.freeze()  # without this, the interpreter spends half a second on garbage collection at exit


async def run_with_signals(coroutine: Coroutine[Any, Any, int]) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(coroutine)
    received: list[int] = []

    def cancel(number: int) -> None:
        loop.remove_signal_handler(number)
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP; it stays ignored
            with suppress(NotImplementedError):  # on this platform
                loop.add_signal_handler(number, cancel, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


def fail(sentence: str) -> NoReturn:
    """Print a message about wrong usage or configuration, and exit with code 2."""
    import click  # imported here because `crow acp` imports this module and does not need click

    from crow_cli.console import escape_controls  # it imports click

    click.secho(f"crow: {escape_controls(sentence)}", fg="red", err=True)
    sys.exit(2)
