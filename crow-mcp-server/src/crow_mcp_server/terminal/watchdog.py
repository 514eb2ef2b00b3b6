"""Ends the running commands when this process ends without having done so, killed for instance."""

import os
import subprocess
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from threading import Lock

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
"""Reads `start GROUP:MARK` and `end GROUP:MARK` until its input closes, then kills what has started and not ended, and
removes folders."""


class CommandWatchdog:
    """A small shell that listens to us: when we are gone, its input ends."""

    def __init__(self, *folders: str) -> None:
        """`folders` are removed in the end."""
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
        """Have a process group ("" for none), and those that carry the mark, killed if we end inside of this block."""
        self._write(f"start {group}:{mark}\n")
        try:
            yield
        finally:
            self._write(f"end {group}:{mark}\n")

    def _write(self, line: str) -> None:
        with self._lock, suppress(BrokenPipeError):  # somebody killed it: then commands run without
            os.write(self._stdin, line.encode())


def _end(shell: subprocess.Popen[bytes]) -> None:
    assert shell.stdin
    shell.stdin.close()
    shell.wait()
