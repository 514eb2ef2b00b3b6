"""Run a command's coroutine to its end: signals, exit codes, and the message of a failure."""

import gc
import logging
import os
import shutil
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from crow_core.text import clean_lines, escape_controls
from crow_system.signals import run_until_signal

PR_SET_DUMPABLE = 4
"""The operation of prctl(2) that says whether a process can be traced and its memory read."""


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
    try:
        return run_until_signal(coroutine)
    finally:
        gc.freeze()  # without this, the interpreter spends half a second on garbage collection at exit


class UsageFailure(SystemExit):
    """Ends the process after wrong usage or configuration."""

    def __init__(self, sentence: str) -> None:
        super().__init__(2)
        self.sentence = sentence


NO_FOLDER = "the working folder does not exist any more, or you may not enter it. Go to another folder."


def fail(sentence: str) -> NoReturn:
    """Print a message about wrong usage or configuration, and exit with code 2."""
    import click  # imported here because `crow acp` imports this module and does not need click

    click.secho(f"crow: {escape_controls(sentence)}", fg="red", err=True)
    raise UsageFailure(sentence)
