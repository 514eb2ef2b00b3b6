"""Applying changes: move what a command changed into the real folders, all or nothing, also across a kill."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crow_sandbox.changes import LayerChange


@dataclass(frozen=True)
class AppliedChange:
    """A change that was applied, with where the earlier file is kept."""

    change: LayerChange
    before: Path | None
    """What was there, moved here; None if nothing was. It stays until the run is removed."""


def apply_changes(changes: Sequence[LayerChange], run: Path) -> Sequence[AppliedChange]:
    """Apply changes of one run, whose folder is `run`: write the journal, then move.

    A file that conflicts is applied only if its change is among `changes`: the caller has asked. Raises SandboxError,
    after taking back what was done, if the disk is full or a folder cannot be written.
    """
    raise NotImplementedError


def finish_applying(folder: Path) -> Sequence[str]:
    """Complete what a killed process had begun to apply, in all runs below `folder` whose process is gone, and remove
    their folders. Return a sentence for each."""
    raise NotImplementedError
