"""What a command leaves to the next one: the folder it ended in, and the environment."""

import os
import resource
import shlex
import sys
from contextlib import suppress

SPARE_PROCESSES = 2_048  # how many more than there are now a command may start, where the system lets that be limited
SHELL_VARIABLES = frozenset(("PWD", "SHLVL", "_", "BASH_ENV", "PS1", "PS2", "PROMPT_COMMAND"))
"""Variables that each shell sets for itself."""


class ShellState:
    """Where the next command begins."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.changes: dict[str, str | None] = {}
        """What commands have exported, by name; None: unset. Functions are not kept: a word goes on meaning what it
        meant."""

    def apply_to(self, environment: dict[str, str]) -> dict[str, str]:
        """An environment with the changes made to it."""
        changed = environment | {name: value for name, value in self.changes.items() if value is not None}
        return {name: value for name, value in changed.items() if self.changes.get(name, "") is not None}

    def make_script(self, path: str, before: str, *, env_is_unknown: bool) -> str:
        """What a shell reads before a command, so that it tells in files beside `path` how things are in the end.

        `before` is the file it would have read without us, "" for none.
        `env_is_unknown`: in an environment that is not known, so it tells that in the beginning, too, and unsets for itself.
        """
        lines = [
            f'trap "exec 2>/dev/null; command -p env -0 > {shlex.quote(path + ".after")}" EXIT',
            format_process_limit(),
        ]
        if env_is_unknown:
            gone = [name for name, value in self.changes.items() if value is None and name.isidentifier()]
            lines += [f"unset {' '.join(gone)}"] if gone else []
            lines += [f"command -p env -0 > {shlex.quote(path + '.before')}"]
        first = f"export BASH_ENV={shlex.quote(before)}; . {shlex.quote(before)}" if before else "unset BASH_ENV"
        return "\n".join([first, *lines, ""])

    def update(self, path: str, environment: dict[str, str] | None, start: str) -> None:
        """Take over what a command that began in the folder `start` told; `environment` is what it was given, None when
        it was to tell that itself. One that told nothing, being killed for instance, changes nothing."""
        after, before = _read(path + ".after"), environment or _read(path + ".before")
        if not after or not before:
            return
        folder = after.get("PWD", "")
        if os.path.isabs(folder) and (folder != start or not os.path.isdir(self.folder)):
            self.folder = folder
        names = {name for name in {*before, *after} - SHELL_VARIABLES if not name.startswith("BASH_FUNC_")}
        self.changes |= {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def format_process_limit() -> str:
    """A shell's command that keeps a fork bomb from taking all processes that there are. Root is not limited by it."""
    if sys.platform != "linux":  # macOS has a limit of its own
        return ":"
    with open("/proc/loadavg", encoding="ascii") as file:
        limit = int(file.read().split("/")[1].split()[0]) + SPARE_PROCESSES
    now, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return ":" if 0 <= now <= limit else f"{{ ulimit -S -u {limit} || ulimit -S -p {limit}; }} 2>/dev/null"


def _read(path: str) -> dict[str, str]:
    with suppress(OSError), open(path, "rb") as file:
        data = file.read()
        os.unlink(path)
        if data.endswith(b"\0"):
            parts = [item.partition("=") for item in os.fsdecode(data).split("\0")]
            return {name: value for name, equals, value in parts if equals}
    return {}
