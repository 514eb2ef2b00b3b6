"""The folders of a session, and where its commands start."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crow_core.messages.message import Message
from crow_core.messages.notes import ShellNotes
from crow_core.messages.passes import drop_rewound


@dataclass
class Folders:
    """The folders of a session, all absolute."""

    cwd: str
    """The working directory."""
    roots: list[str] = field(default_factory=list[str])
    """The file tools may read and change what is in these; the first is `cwd`."""
    readable: list[str] = field(default_factory=list[str])
    """The file tools may read what is in these."""
    current: str = ""
    """The folder in which the next command starts, if the last one changed its directory; empty for `cwd`."""
    starts: dict[str, str] = field(default_factory=dict[str, str])
    """The folders in which the commands of open tool calls start, by the calls' ids."""
    paths: dict[str, str] = field(default_factory=dict[str, str])
    """The files for which open tool calls are judged, absolute and without links, by the calls' ids."""
    environments: dict[str, Mapping[str, str | None]] = field(default_factory=dict[str, Mapping[str, str | None]])
    """Variables for the commands of open tool calls, by the calls' ids; None takes one away."""
    variables: Sequence[str] = ()
    """The names of the variables that commands have changed for those that follow."""
    environment: str = ""
    """The name of these variables as they are, new after each change; "" if there are none."""
    judged: dict[str, str] = field(default_factory=dict[str, str])
    """The `environment` for which rules or answers have allowed the commands of open tool calls, by the calls' ids."""
    _scratch: "tempfile.TemporaryDirectory[str] | None" = None

    def scratch(self) -> Path:
        """Return a temporary folder of the session, made at first use, for output that is too long for the model."""
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="crow-")
        return Path(self._scratch.name)

    def for_tools(self) -> list[str]:
        """List the folders in which the file tools may work: the roots, and the temporary folder."""
        return [*self.roots, self._scratch.name] if self._scratch else [*self.roots]

    def meta(self, id: str) -> dict[str, Any]:
        """Make the part about folders of the `_meta` of a request to a tool, for the tool call with this id."""
        return {
            "crow/cwd": self.cwd,
            "crow/roots": self.for_tools(),
            "crow/readable": self.readable,
            "crow/folder": self.starts.get(id, ""),
            "crow/path": self.paths.get(id, ""),
            "crow/env": self.environments.get(id, {}),
            "crow/environment": self.judged.get(id),
        }

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._scratch is not None:
            with suppress(OSError):
                self._scratch.cleanup()


def find_shell(log: Iterable[Message]) -> ShellNotes:
    """Find the state in which the last command of a session left its shell; empty if there was none.

    It has the keys that `crow/shell` has in the result of a tool call.
    """
    for entry in reversed(drop_rewound(log)):
        if shell := entry.get("crow", {}).get("shell"):
            return shell
    return {}
