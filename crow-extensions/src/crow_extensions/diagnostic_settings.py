"""The commands that look for problems after an edit, as the configuration hands them to `diagnostics`."""

from collections.abc import Collection, Mapping, Sequence

from crow_core.mcp.limit import Limit
from msgspec import Struct

TIMEOUT = 20.0
"""Seconds that a command may take by default."""


class Diagnostics(Struct, frozen=True):
    """The commands that look for problems in a folder."""

    commands: Mapping[str, Sequence[str]]
    """By the pattern of the files for which they run. A command is one of READY in `problems`, or a shell command."""
    timeout: float = TIMEOUT
    """Seconds that a command may take."""
    programs: Sequence[str] = ()
    """Folders in which programs are looked up first."""
    limit: Limit | None = None
    """Starts the commands in a sandbox."""
    hidden: Collection[str] = ()
    """Environment variables that they do not inherit."""
