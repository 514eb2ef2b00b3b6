"""The layers of a copy-on-write view: one for each root, with what a command changed in it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layer:
    """The copy-on-write view of one root."""

    root: Path
    """The real folder, which the command does not change."""
    upper: Path
    """The folder in which the kernel keeps what the command changed, as overlayfs writes it with `userxattr`."""
    work: Path
    """The kernel's own folder, empty, on the same file system as `upper`."""
    start_ns: int
    """The `st_ctime_ns` that the file system of the root gave a file that was made just before the command started: a
    file of the root with a later one was changed by somebody else meanwhile."""
