"""Whose files and terminals a tool call works on: the protocols a host may implement, and the local default."""

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict

Watch = Callable[[str], Awaitable[None]]
"""Is shown the last lines that a command has printed so far, now and then while it runs."""


class Files(Protocol):
    """A host's own view of text files, for instance an editor's buffers with changes not saved yet.

    Only existing or new UTF-8 files without a byte order mark go through it; everything else stays on the disk, which
    also says whether there is a file. Paths are absolute: a root as it was given, and below it no symbolic link. An
    OSError that it raises becomes the tool's error.
    """

    @property
    def reads(self) -> bool:
        """Whether it shows files; else they are read from the disk."""
        ...

    @property
    def writes(self) -> bool:
        """Whether it writes files; else they are written to the disk."""
        ...

    async def read_text(self, path: str) -> str | None:
        """What the host shows for a file; None when it does not show it, and the disk has it alone."""
        ...

    async def write_text(self, path: str, text: str) -> None:
        """Write the whole file, in a folder that exists."""
        ...


class CommandOutcome(TypedDict):
    """How a command ended and what it printed."""

    exit_code: int | None
    """None when a signal ended it, or when nobody knows."""
    signal: str | None
    """Such as "SIGSEGV"; None when it exited by itself."""
    output: str
    """Standard output and standard error in the order they came; when cut, it says where."""
    timed_out: NotRequired[bool]
    background: NotRequired[Sequence[int]]
    """Process ids it left running."""
    terminal: NotRequired[str]
    """The host's own name for where it ran, which the host can show."""


class Terminals(Protocol):
    """Where commands run."""

    async def run(
        self, command: str, *, cwd: str, env: Mapping[str, str], timeout: float, output_limit: int
    ) -> CommandOutcome:
        """Run a shell command to its end and return what it printed.

        `env` is laid over the environment commands have anyway; `timeout` is in seconds, and running into it is an
        outcome, not an exception; `output_limit` is in characters. Cancelling the call kills the command. An OSError
        that it raises becomes the tool's error.
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
    readable: tuple[str, ...] = ()
    """Absolute folders that they may look into besides, and not change."""
    files: Files | None = None
    """None: the disk."""
    terminals: Terminals | None = None
    """None: processes of this machine."""
    watch: Watch | None = None
    """Told of processes of this machine."""
    folder: str = ""
    """Where a command begins; "": where the session's last one ended."""
    changes: Callable[[], Iterable[Mapping[str, Any]]] | None = None
    """All that the session's edits changed so far, oldest first, as `crow/changes` told it: the way back for a server
    that has seen none of it. None: that is in the server's own `state`, if it has any."""
    at_end: Callable[[Callable[[], Awaitable[None]]], None] | None = None
    """Is given what ends all that the session has running; None: that ends with the server."""


def local_workspace(meta: dict[str, Any], bounds: Sequence[str] = ()) -> Workspace:
    """The workspace a call's `_meta` describes (`crow/session`, `crow/cwd`, `crow/roots`, `crow/readable`,
    `crow/folder`), else the process's folder.

    `bounds` are roots that no `_meta` changes. Raises ValueError for a folder that is not absolute.
    """
    given = [str(root) for root in bounds or meta.get("crow/roots") or ()]
    cwd = str(meta.get("crow/cwd") or (given[0] if given else os.getcwd()))
    roots = tuple(given or [cwd])
    start = str(meta.get("crow/folder") or "")
    for folder in (cwd, *roots, start or cwd):
        if not os.path.isabs(folder):
            raise ValueError(f"crow/cwd, crow/roots and crow/folder must be absolute folders, not {folder!r}")
    readable = () if bounds else tuple(str(folder) for folder in meta.get("crow/readable") or ())
    session = str(meta.get("crow/session") or "")
    return Workspace(session=session, cwd=cwd, roots=roots, readable=readable, folder=start)
