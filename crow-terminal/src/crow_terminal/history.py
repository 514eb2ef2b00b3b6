"""The earlier prompts, in a file that may be missing."""

import os
from collections.abc import Callable
from contextlib import suppress

from prompt_toolkit.history import FileHistory


class SafeHistory(FileHistory):
    """A history that does without its file if that cannot be found, read or written."""

    def __init__(self, find: Callable[[], str | None]) -> None:
        """`find` returns the file; it is called after the first frame, in a thread."""
        super().__init__("")
        self._find = find

    def load_history_strings(self) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with suppress(OSError, ValueError):
            self.filename = self._find() or ""
            return [*super().load_history_strings()]
        return []

    def store_string(self, string: str) -> None:
        if not self.filename:
            return
        with suppress(OSError, ValueError):
            os.close(os.open(self.filename, os.O_CREAT | os.O_WRONLY, 0o600))  # nobody else reads it
            super().store_string(string.encode(errors="replace").decode())
