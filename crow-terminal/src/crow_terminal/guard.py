"""A small process that waits for the end of crow, and makes the terminal usable if crow was killed."""

import os
import shutil
import subprocess
from contextlib import suppress

SCRIPT = r"""
while read -r line; do rows=$line; done
[ "$rows" = end ] && exit
printf '\033[?2026l\033[?7h\033[?25h\033[?2004l\033[0m\033[23;2t'
[ "$rows" -gt 0 ] && printf '\033[%sB' "$rows"
printf '\r\n'
"""
"""Shows the cursor, in a new line below the last frame, when its input ends without the word `end`.

Each other line of its input is how many rows of the frame are below the cursor.
"""
WAIT = 1.0
"""Seconds to wait for its end."""


class Guard:
    """The process, which is a shell in a session of its own. There is none where there is no `sh`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._rows = -1

    def start(self, terminal: int) -> None:
        """Start the process. `terminal` is the descriptor that it writes to."""
        if os.name == "posix" and (shell := shutil.which("sh")):
            with suppress(OSError):
                self._process = subprocess.Popen(
                    [shell, "-c", SCRIPT],
                    stdin=subprocess.PIPE,
                    stdout=terminal,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._write(f"{max(self._rows, 0)}\n")

    def tell(self, rows: int) -> None:
        """Tell it how many rows of the frame are below the cursor."""
        if rows != self._rows:
            self._rows = rows
            self._write(f"{rows}\n")

    def end(self) -> None:
        """End the process without an effect."""
        if self._process is None:
            return
        self._write("end\n")
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=WAIT)
        self._process = None

    def _write(self, text: str) -> None:
        if self._process and self._process.stdin:
            with suppress(OSError):  # somebody has killed it
                os.write(self._process.stdin.fileno(), text.encode())
