"""The shell state that one command passes on to the next: the working folder and the environment."""

import os
import shlex
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress

import crow_system as system
from crow_system import count_processes, get_process_limit

SPARE_PROCESSES = 2_048  # that a command may start, where the system can limit that
MAX_STATE_BYTES = 8_000_000  # of an environment that is taken over
SHELL_VARIABLES = frozenset(("PWD", "SHLVL", "_", "BASH_ENV", "PS1", "PS2", "PROMPT_COMMAND"))
"""Variables that every shell sets for itself; they are not passed on."""


class ShellState:
    """The state in which the next command starts."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.changes: dict[str, str | None] = {}
        """The variables that commands have changed; None for an unset one. Exported functions are not passed on, so
        that they do not change what later commands mean."""
        self.environment = ""
        """A random name of the variables as they are, new after each change; "" if commands have changed none."""

    def apply_to(self, environment: dict[str, str]) -> dict[str, str]:
        """Return an environment with the changes applied."""
        changed = environment | {name: value for name, value in self.changes.items() if value is not None}
        return {name: value for name, value in changed.items() if self.changes.get(name, "") is not None}

    def make_script(
        self,
        path: str,
        before: str,
        *,
        env_is_unknown: bool,
        given: Mapping[str, str | None],
        lists_processes: bool = False,
    ) -> str:
        """Return a script that a shell reads before a command; it saves the environment at the end of the command.

        The environment is saved in `path` + ".after". `before` is the file named by the command's own BASH_ENV, "" for
        none. With `env_is_unknown`, the script also repeats what earlier commands set and unset, except for the
        variables in `given`; it unsets those that are None there. It also saves the first environment in `path` +
        ".before". With `lists_processes`, it saves that, too, and the processes that the shell sees at the end in
        `path` + ".left".
        """
        left = f"echo $$ /proc/[0-9]* > {shlex.quote(path + '.left')}; " if lists_processes else ""
        lines = [
            f'trap "exec 2>/dev/null; {left}command -p env -0 > {shlex.quote(path + ".after")}" EXIT',
            format_process_limit(),
        ]
        if env_is_unknown:
            changes = {name: value for name, value in self.changes.items() if name not in given}
            changes |= {name: None for name, value in given.items() if value is None}
            for name, value in changes.items():
                if name.isidentifier():
                    lines.append(
                        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)} 2>/dev/null"
                    )
            lines += [f"command -p env -0 > {shlex.quote(path + '.before')}"]
            return "\n".join([*lines, ""])
        first = f"export BASH_ENV={shlex.quote(before)}; . {shlex.quote(before)}" if before else "unset BASH_ENV"
        if lists_processes:
            lines.append(f"command -p env -0 > {shlex.quote(path + '.before')}")
        return "\n".join([first, *lines, ""])

    def update(self, path: str, environment: dict[str, str] | None, start: str) -> None:
        """Take over the state that a command's script saved.

        `environment` is the one the command started with, None if the script saved that too; `start` is the folder the
        command started in. Nothing changes if the script saved nothing, for instance because the command was killed.
        """
        after, before = _read_env(path + ".after"), environment or _read_env(path + ".before")
        if not after or not before:
            return
        folder = after.get("PWD", "")
        if os.path.isabs(folder) and (folder != start or not os.path.isdir(self.folder)):
            self.folder = folder
        names = {name for name in {*before, *after} - SHELL_VARIABLES if not name.startswith("BASH_FUNC_")}
        changes = {name: after.get(name) for name in names if before.get(name) != after.get(name)}
        self.changes |= changes
        if changes.keys() - {"OLDPWD"}:
            self.environment = uuid.uuid4().hex


def has_left_processes(path: str) -> bool:
    """Return whether a script that lists processes saw others than its shell and the first one, of a command with
    process ids of its own; and remove the list."""
    shell, *found = _take_file(path + ".left").decode("utf-8", "replace").split() or [""]
    return bool({each.removeprefix("/proc/") for each in found} - {"1", shell, "[0-9]*"})


def format_process_limit() -> str:
    """Return a shell command that limits the number of processes, against fork bombs. It does not limit root."""
    now = count_processes()
    if now is None:
        return ":"
    limit = now + SPARE_PROCESSES
    return (
        ":" if 0 <= get_process_limit() <= limit else f"{{ ulimit -S -u {limit} || ulimit -S -p {limit}; }} 2>/dev/null"
    )


def _read_env(path: str) -> dict[str, str]:
    """Read an environment that a script saved, and remove the file; empty if there is none or it is incomplete."""
    data = _take_file(path)
    if not data.endswith(b"\0"):
        return {}
    parts = [item.partition("=") for item in os.fsdecode(data).split("\0")]
    return {name: value for name, equals, value in parts if equals}


def _take_file(path: str) -> bytes:
    """Read a file and remove it; empty if there is none, or if a command has made something else of it."""
    data = b""
    with suppress(OSError):
        flags = os.O_RDONLY | system.NO_LINKS | system.NO_WAIT | system.BINARY
        with open(os.open(path, flags), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                data = file.read(MAX_STATE_BYTES)
    with suppress(OSError):
        os.unlink(path)
    return data
