"""Applying changes: move what a command changed into the real folders, all or nothing, also across a kill.

A journal in the run's folder names every step before the first one begins. Each step looks at what is there and does
what is left of it, so that the steps can be done again after a kill. A real file moves into the folder `before` next to
the layer, the command's file into its place. If the layer is on another file system than the root, the command's files
are first copied into a hidden folder of the root.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from crow_sandbox import layers
from crow_sandbox.apply_journal import read_journal
from crow_sandbox.apply_plan import ApplyPlan, find_before
from crow_sandbox.apply_steps import ApplySteps
from crow_sandbox.changes import LayerChange
from crow_sandbox.moving import Mover
from crow_sandbox.policy import SandboxError
from crow_sandbox.staging import remove_stages


@dataclass(frozen=True)
class AppliedChange:
    """A change that was applied, with where the earlier file is kept."""

    change: LayerChange
    before: Path | None
    """The earlier file, moved here; None if there was none. It stays until the run is removed."""


def apply_changes(
    changes: Sequence[LayerChange], run: Path, before_step: Callable[[], object] = lambda: None
) -> Sequence[AppliedChange]:
    """Apply the changes in one run, whose folder is `run`: write the journal, then move.

    A file that conflicts is applied only if its change is among `changes`: the caller has asked. Devices, sockets and
    pipes are left out. `before_step` is called before each step in the file system. Raises SandboxError, after taking
    back what was done, if somebody else has changed a file since the changes were read, the disk is full, or a folder
    cannot be written. The changes can be read and applied again then.
    """
    mover = Mover(before_step)
    plan = ApplyPlan(mover)
    steps = ApplySteps(run, plan.journal, mover)
    try:
        plan.make(changes)
        steps.write_journal()
        steps.go_forward()
    except BaseException as error:
        reason = mover.to_error(error) if isinstance(error, Exception) else error
        steps.take_back()
        raise reason from error
    finally:
        with suppress(OSError):  # a conflict too many is reported then
            plan.keep_times()
    with suppress(OSError):  # what stays is removed with the run
        remove_stages(steps.journal, mover)
    return [AppliedChange(change, find_before(run, plan.journal, step)) for change, step in plan.planned]


def is_unfinished(run: Path) -> bool:
    """Return True if a run is applied in part."""
    try:
        journal = read_journal(run)
    except (OSError, msgspec.DecodeError):
        return True
    return journal is not None and journal.state != "applied"


def finish_applying(folder: Path, before_step: Callable[[], object] = lambda: None) -> Sequence[str]:
    """Complete what a killed process had begun to apply, in all runs below `folder` whose process is gone, and remove
    their folders. Return a sentence for each."""
    sentences: list[str] = []
    for run in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not run.is_dir() or run.is_symlink():
            continue
        with layers.lock_folder(folder):  # a folder that is made now has no lock yet
            descriptor = layers.try_lock(run)
        if descriptor is None:
            continue
        try:
            if sentence := _finish_run(run, before_step):
                sentences.append(sentence)
        finally:
            os.close(descriptor)
    return sentences


def _finish_run(run: Path, before_step: Callable[[], object]) -> str | None:
    sentence = None
    try:
        if journal := read_journal(run):
            mover = Mover(before_step)
            if journal.state != "applied":
                steps = ApplySteps(run, journal, mover)
                try:
                    steps.go_forward()
                except (OSError, SandboxError) as error:
                    sentence = mover.to_error(error)
                    steps.take_back()
                    return (
                        f"crow was ended while it applied a command's changes to {journal.roots}, and has taken them"
                        f" back now: {sentence} They are kept in {run}."
                    )
                sentence = (
                    f"crow was ended while it applied a command's changes to {journal.roots}; they are applied now."
                )
            remove_stages(journal, mover)
        layers.remove_run(run)
    except (OSError, msgspec.DecodeError, SandboxError) as error:
        return f"{run} cannot be finished: {error}"
    return sentence
