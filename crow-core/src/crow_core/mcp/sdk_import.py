"""The import of FastMCP: it takes about a second, so a thread does it when the first server is connected."""

import asyncio
import atexit
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from crow_core.mcp.running_calls import RUNNING_CALL

T = TypeVar("T")

EXIT_LIMIT = 5.0
"""Seconds that the end of the process waits at most for a thread that imports a module."""
SERVER_LOG = logging.getLogger("fastmcp.server.server")
"""Gets an error with its traceback from FastMCP for each tool that fails, in a server in this process."""


class ImportThread(threading.Thread):
    """A daemon thread that imports modules.

    Python ends a daemon thread in a way that aborts the process if the thread is in a function written in C++ or Rust.
    The process therefore stops the thread's imports at exit, and waits for the thread.
    """

    def start(self) -> None:
        atexit.register(self._end)
        super().start()

    def run(self) -> None:
        super().run()
        atexit.unregister(self._end)

    def _end(self) -> None:
        sys.meta_path.insert(0, cast("Any", self))
        self.join(EXIT_LIMIT)

    def find_spec(self, *_: object) -> None:
        """Raise SystemExit if this thread looks for another module: a method of the finders in `sys.meta_path`."""
        if threading.current_thread() is self:
            raise SystemExit


async def run_in_thread(function: Callable[[], T]) -> T:
    """Run a slow import in a thread, so that the process can exit while it runs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(value)  # pyright: ignore[reportArgumentType]

    def work() -> None:
        try:
            outcome = function(), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, *outcome)

    ImportThread(target=work, daemon=True, name="crow-import").start()
    return await future


def import_sdk() -> None:
    """Import the module `sdk`, and FastMCP with it. Blocks for about a second the first time."""
    importlib.import_module("crow_core.mcp.sdk")
    SERVER_LOG.addFilter(demote)


def demote(record: logging.LogRecord) -> bool:
    """Let a log line about a failed call of crow's have the level DEBUG, as the model reads the error."""
    if RUNNING_CALL.get() is None or record.levelno <= logging.INFO:
        return True
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return SERVER_LOG.isEnabledFor(logging.DEBUG)
