"""Whose files and terminals a tool call works on: the protocols a host may implement, and the local default."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Files(Protocol):
    """A host's own view of text files, for instance an editor's buffers with changes not saved yet.

    Only existing or new UTF-8 files without a byte order mark go through it; everything else stays on the disk. Paths
    are absolute, with symbolic links resolved. Whatever it raises becomes the tool's error.
    """

    async def read_text(self, path: str) -> str: ...

    async def write_text(self, path: str, text: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    exit_code: int | None
    """None when a signal ended it."""
    signal: str | None
    """Such as "SIGSEGV"; None when it exited by itself."""
    output: str
    """Standard output and standard error in the order they came; when cut, it says where and how much."""
    truncated: bool = False
    timed_out: bool = False
    background: tuple[int, ...] = ()
    """Process ids it left running."""


class Terminals(Protocol):
    """Where commands run."""

    async def run(
        self, command: str, *, cwd: str, env: Mapping[str, str], timeout: float, output_limit: int
    ) -> Outcome:
        """Run a shell command to its end and return what it printed.

        `env` is laid over the environment commands have anyway; `timeout` is in seconds, and running into it is an
        outcome, not an exception; `output_limit` is in characters. Cancelling the call kills the command.
        """
        ...


@dataclass(frozen=True)
class Workspace:
    """The surroundings of one tool call."""

    session: str
    """What was seen and edited is remembered per session."""
    cwd: str
    """Absolute; relative paths start here."""
    roots: tuple[str, ...]
    """Absolute folders that bound the file tools."""
    files: Files | None = None
    """None: the disk."""
    terminals: Terminals | None = None
    """None: processes of this machine."""


def local_workspace(meta: dict[str, Any]) -> Workspace:
    """The workspace a call's `_meta` describes (`crow/session`, `crow/cwd`, `crow/roots`), else the process's folder.

    Raises ValueError for a folder that is not absolute.
    """
    cwd = str(meta.get("crow/cwd") or os.getcwd())
    roots = tuple(str(root) for root in meta.get("crow/roots") or (cwd,))
    for folder in (cwd, *roots):
        if not os.path.isabs(folder):
            raise ValueError(f"crow/cwd and crow/roots must be absolute folders, not {folder!r}")
    return Workspace(session=str(meta.get("crow/session") or ""), cwd=cwd, roots=roots)
