"""The workspace of a tool call: its folders, and protocols by which a host supplies its own files and terminals."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol, TypedDict

Watch = Callable[[str], Awaitable[None]]
"""Receives the last lines of a running command's output, at intervals."""

Launch = Callable[
    [Sequence[str], Mapping[str, str], str, Sequence[str], Sequence[str]], tuple[list[str], dict[str, str]]
]
"""Returns the arguments and the environment with which a command starts instead. It receives the program's absolute
path with its arguments, the folder in which it starts, its own folders to write, and further folders to read. Raises
LaunchError."""


class LaunchError(Exception):
    """A command cannot start as the host wants it to; the text is a sentence for the model."""


class Files(Protocol):
    """A host's view of text files, for instance an editor's buffers with unsaved changes.

    It serves only UTF-8 files without a byte order mark. All others are read from and written to the disk. A file that
    the disk does not have exists if the host shows text for it, as for one that was never saved. Paths are absolute: a
    root as it was given, followed by a path without symbolic links. An OSError that a method raises becomes the tool's
    error.
    """

    @property
    def reads(self) -> bool:
        """True if the host reads files; if not, the disk is read."""
        ...

    @property
    def writes(self) -> bool:
        """True if the host writes files; if not, the disk is written."""
        ...

    async def read_text(self, path: str) -> str | None:
        """Return the text that the host shows for a file; None if only the disk has the file."""
        ...

    async def write_text(self, path: str, text: str) -> None:
        """Write the whole file. Its folder exists."""
        ...


class CommandOutcome(TypedDict):
    """The end of a command and its output."""

    exit_code: int | None
    """None when a signal ended the command, or when the code is unknown."""
    signal: str | None
    """A name such as "SIGSEGV"; None when the command exited by itself."""
    output: str
    """Standard output and standard error in order of arrival. A note marks the place where output was cut."""
    timed_out: NotRequired[bool]
    background: NotRequired[Sequence[int]]
    """Ids of processes that the command left running."""
    terminal: NotRequired[str]
    """The host's id of the terminal in which the command ran."""
    refusal: NotRequired[str]
    """Why the host did not start the command."""
    may_run_here: NotRequired[bool]
    """With `refusal`: True if the command may run as a process of this machine instead."""


class Terminals(Protocol):
    """A host's terminals, in which commands run."""

    async def run(
        self, command: str, *, script: str, cwd: str, env: Mapping[str, str], timeout: float, output_limit: int
    ) -> CommandOutcome:
        """Run a shell command to its end.

        `script` is the path of a file that the shell reads before the command, "" for none. `env` is added to the
        environment that the host gives to commands. After `timeout` seconds the command is killed, and the outcome has
        `timed_out`. `output_limit` is in characters. Cancelling kills the command. An OSError that this raises becomes
        the tool's error.
        """
        ...


class Running(Protocol):
    """A command of this machine that a tool call waits for. It may go on after the call, in a session."""

    kind: str
    title: str
    """The command."""
    name: str
    """The session in which it goes on; "" while it has none."""
    over: asyncio.Event
    """Set when it has ended."""
    end: str
    """The way in which it has ended, such as "exit code 1"; "" before."""
    exit: Mapping[str, int | str]
    """The `exitCode` or the `signal` with which it has ended; empty before."""
    is_told: bool
    """True if the result of a tool call has told its end."""

    def answer(self) -> None:
        """Let the tool call that waits be answered now. The command goes on."""
        ...

    def get_last_line(self, limit: int) -> str:
        """Return the last line of its output, in at most `limit` characters."""
        ...

    def read_output(self, start: int, limit: int) -> tuple[str, int]:
        """Return its output from a position on, as far as no tool call has told it, and the position of its end.

        0 is its beginning. A long output lacks its beginning: there are about `limit` characters. While it runs, an
        unfinished line is left out.
        """
        ...

    async def kill(self) -> None:
        """End the command. Its output stays for the next call that names the session."""
        ...


def wait_alone(running: Running) -> AbstractContextManager[object]:
    """Wait for a command without a host that could send it to the background."""
    return nullcontext()


@dataclass(frozen=True)
class Workspace:
    """The session, folders and host services of one tool call."""

    session: str
    """Id of the session; seen files, edits and terminals belong to a session."""
    cwd: str
    """Absolute path of the working folder; relative paths start there."""
    roots: tuple[str, ...]
    """Absolute paths of the folders that the file tools may read and change."""
    readable: tuple[str, ...] = ()
    """Absolute paths of further folders that the file tools may only read."""
    files: Files | None = None
    """The host's files; None for the disk."""
    terminals: Terminals | None = None
    """The host's terminals; None for processes of this machine."""
    watch: Watch | None = None
    """Receives the output of commands that run on this machine."""
    waits: Callable[[Running], AbstractContextManager[object]] = wait_alone
    """Returns the context in which a call waits for a command of this machine. If it still runs at the end of the
    context, and nothing was raised, it goes on after the call."""
    folder: str = ""
    """The folder in which a command starts; "" for the one in which the session's last command ended."""
    call: str = ""
    """Id of the tool call. A result about a session with a `launch` names the call that opened it. The result that
    reports the end of a command or session with a `launch` names the call that started it."""
    launch: Launch | None = None
    """Starts the command or the session, which does not run in the host's terminal then; None for an ordinary
    process."""
    opened_by: str | None = None
    """Id of the tool call that opened the session for which the host has judged this one. A command or input is refused
    if another call has opened the session, or if it has ended. None: that does not matter."""
    env: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """Variables for the command, with priority over those that commands have set; None takes one away."""
    path: str = ""
    """The file or folder for which the host allowed the call, absolute and without links. The call is refused if its
    path leads elsewhere now. "" if that does not matter."""
    environment: str | None = None
    """The `environment` of the last `crow/shell` that the host knew when it allowed the command; the command is refused
    if variables have changed since. None: that does not matter."""
    changes: Callable[[], Iterable[Mapping[str, Any]]] | None = None
    """Returns the `crow/changes` of all results of the session, oldest first, so that a new server can undo its edits.
    None: the server keeps the undo history itself, in ToolOptions.state."""
    shell: Callable[[], Mapping[str, Any]] | None = None
    """Returns the last `crow/shell` of the session's results, empty for none, so that a new server starts in the same
    folder and tells the model what it does not have. None: the host does not keep it."""
    at_end: Callable[[Callable[[], Awaitable[None]]], None] | None = None
    """Takes a function to call when the session ends; it ends the session's processes. None: they end with the
    server."""


def local_workspace(meta: dict[str, Any], bounds: Sequence[str] = ()) -> Workspace:
    """Return the workspace that a tool call's `_meta` describes.

    The keys are `crow/session`, `crow/cwd`, `crow/roots`, `crow/readable`, `crow/folder`, `crow/path`, `crow/env`
    and `crow/environment`; the default is the process's working folder. `bounds` replace the roots that `_meta` names.
    Raises ValueError for a folder that is not absolute.
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
    given_env = dict(meta.get("crow/env") or {})
    env = {str(name): None if value is None else str(value) for name, value in given_env.items()}
    environment = meta.get("crow/environment")
    return Workspace(
        session=session,
        cwd=cwd,
        roots=roots,
        readable=readable,
        folder=start,
        env=env,
        call=str(meta.get("crow/call") or ""),
        path=str(meta.get("crow/path") or ""),
        environment=None if environment is None else str(environment),
    )
