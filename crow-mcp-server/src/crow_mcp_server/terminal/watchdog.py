"""A watchdog process that kills running commands when this process dies without having ended them."""

import os
import subprocess
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from threading import Lock

MARK_VARIABLE = "CROW_COMMAND"
"""An environment variable that is set for all processes of a command, to find those that leave its group, and to tell
them from processes that the user has started."""

SCRIPT = r"""
running=
while read -r what one; do
    kept=
    for other in $running; do
        [ "$other" = "$one" ] || kept="$kept $other"
    done
    running=$kept
    [ "$what" = start ] && running="$running $one"
done
for one in $running; do
    kill -KILL -- "-${one%%:*}"
    for file in $(grep -lsF -- "${one#*:}" /proc/[0-9]*/environ); do
        pid=${file#/proc/}
        kill -KILL "${pid%/environ}"
    done
done
rm -rf -- "$@"
"""
"""Reads lines `start GROUP:MARK` and `end GROUP:MARK` until its input closes. Then it kills the process groups that
have started and not ended, and the processes with their marks, and removes the folders in its arguments."""


class CommandWatchdog:
    """A shell that runs SCRIPT. Its input closes when this process ends."""

    def __init__(self, *folders: str) -> None:
        """`folders` are removed when this process ends."""
        shell = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "watchdog", *folders],
            env={"PATH": os.defpath},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert shell.stdin
        weakref.finalize(self, _end, shell)
        self._lock = Lock()
        self._stdin = shell.stdin.fileno()

    @contextmanager
    def watch(self, group: int | str, mark: str) -> Generator[None]:
        """Context manager: have processes killed if this process ends inside the block.

        These are the group ("" for none), and the processes that have the mark in their environment.
        """
        self._write(f"start {group}:{mark}\n")
        try:
            yield
        finally:
            self._write(f"end {group}:{mark}\n")

    def _write(self, line: str) -> None:
        with self._lock, suppress(BrokenPipeError):  # the watchdog was killed: commands run without it
            os.write(self._stdin, line.encode())


def _end(shell: subprocess.Popen[bytes]) -> None:
    assert shell.stdin
    shell.stdin.close()
    shell.wait()
