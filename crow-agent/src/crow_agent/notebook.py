"""The live display of a stream in a notebook. IPython is not imported anywhere else than in one."""

import asyncio
import sys
from collections.abc import Callable
from contextvars import Context
from importlib import import_module
from typing import Any

from crow_core.acp.record import TurnRecord
from crow_core.acp.schema import SessionUpdate

INTERVAL = 0.1
"""Seconds between two updates of a display; only the latest text is shown."""
MARKS = {"completed": "✓", "failed": "✗"}


def find_display() -> Callable[..., Any] | None:
    """Return the function `display` of IPython if this program runs in a notebook, else None."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    module: Any = import_module("IPython.display")  # loaded already
    return module.display


class LiveDisplay:
    """A place in the output of a cell that shows a turn while it runs. Make it in the cell's own thread."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._handle = display({"text/markdown": ""}, raw=True, display_id=True)
        self._record = TurnRecord()
        self._waiting: asyncio.TimerHandle | None = None

    def add(self, update: SessionUpdate) -> None:
        """Take in an update; the display follows a little later."""
        self._record.add(update)
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().call_later(INTERVAL, self._refresh)

    def finish(self, markdown: str) -> None:
        """Show the result of the turn, or its error."""
        if self._waiting is not None:
            self._waiting.cancel()
        self._show(markdown)

    def _refresh(self) -> None:
        self._waiting = None
        calls = [f"- {MARKS.get(call.status or '', '…')} {call.title}" for call in self._record.calls.values()]
        self._show("\n".join([*calls, "", self._record.text]))

    def _show(self, markdown: str) -> None:
        # Outside of the context of the display's own cell, the message belongs to the cell that runs now. Programs that
        # execute notebooks drop messages of cells that have ended.
        Context().run(self._handle.update, {"text/markdown": markdown}, raw=True)
