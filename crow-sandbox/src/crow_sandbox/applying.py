"""Applying changes: move what a command changed into the real folders, all or nothing, also across a kill.

A journal in the run's folder names every step before the first one begins. Each step looks at what is there and does
what is left of it, so that the steps can be done again after a kill. A real file moves into the folder `before` next to
the layer, the command's file into its place. If the layer is on another file system than the root, the command's files
are first copied into a hidden folder of the root.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from crow_sandbox import layers
from crow_sandbox.apply_journal import read_journal
from crow_sandbox.apply_plan import ApplyPlan, find_before
from crow_sandbox.apply_steps import ApplySteps
from crow_sandbox.changes import LayerChange, read_file
from crow_sandbox.layer_files import open_parent, walk
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


def read_before_after(applied: AppliedChange, limit: int) -> Iterator[tuple[str, bytes | None, bytes | None]]:
    """Yield the path, from the layer's root, and the bytes before and now, up to `limit` each, of every applied file.

    The target of a link is its content. None stands for no file and for what cannot be read. Of a folder, that is
    every file that it held or holds. Raises SandboxError for a folder that cannot be read.
    """
    change = applied.change
    root, kept = change.layer.root, applied.before
    paths = {change.path: None, **dict.fromkeys(list_below(os.fspath(root), change.path))}
    if kept:
        paths |= {change.path + found: None for found in list_below(os.fspath(kept.parent), kept.name, relative=True)}
    for path in sorted(paths):
        before = read_file(kept.parent, kept.name + path.removeprefix(change.path), limit) if kept else None
        after = read_file(root, path, limit)
        if before is not None or after is not None:
            yield path, before, after


def list_below(base: str, path: str, *, relative: bool = False) -> list[str]:
    """List the files below a path, which is left out if `relative`; an empty list if there is nothing."""
    try:
        with open_parent(base, path) as (parent, name):
            found = [below for below, status in walk(parent, name) if not stat.S_ISDIR(status.st_mode)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SandboxError(f"{os.path.join(base, path)} cannot be read: {error.strerror}.") from error
    return found if relative else [path + below for below in found]


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
