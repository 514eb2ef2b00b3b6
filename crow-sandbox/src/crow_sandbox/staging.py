"""Copies for a layer that is on another file system than its root, where files cannot be moved."""

import os
import shutil
import stat
from pathlib import Path

from crow_sandbox import layers
from crow_sandbox.apply_journal import ApplyJournal
from crow_sandbox.moving import Mover


def copy_new(journal: ApplyJournal, mover: Mover) -> None:
    """Copy the command's files to the stage in their root, from the beginning if that was cut off."""
    remove_stages(journal, mover)
    for stage in journal.stages:
        mover.call(os.mkdir, stage, 0o700)
    for step in journal.steps:
        layer = journal.layers[step.layer]
        if step.kind == "move" and layer.staged:
            mover.path = layer.root, step.path
            parent, name = mover.open("layer", layer.upper, step.path)
            mover.unlock(parent, name, step.marked)
            for below in step.special:
                mover.remove(parent, name + below)
            mover.call(copy_tree, os.path.join(layer.upper, step.path), os.path.join(layer.kept, b"new-" + step.name))


def keep_earlier(run: Path, journal: ApplyJournal, mover: Mover) -> None:
    """Copy the earlier files out of the stages, which are removed, into the folder of the run."""
    before = run / "before"
    if journal.stages:
        before.mkdir(mode=0o700, exist_ok=True)
    for step in journal.steps:
        layer = journal.layers[step.layer]
        kept = os.path.join(layer.kept, step.name)
        if layer.staged and step.real and step.kind != "mode" and os.path.lexists(kept):
            mover.path = layer.root, step.path
            mover.call(copy_tree, kept, os.path.join(os.fsencode(before), step.name))


def remove_stages(journal: ApplyJournal, mover: Mover) -> None:
    mover.close()
    for stage in journal.stages:
        if os.path.lexists(stage):
            mover.call(layers.remove_tree, Path(os.fsdecode(stage)))


def copy_tree(source: bytes, target: bytes) -> None:
    """Copy a file, link or folder, with modes and times, in place of a copy that was cut off."""
    if os.path.lexists(target):
        if os.path.islink(target) or os.path.isfile(target):
            os.unlink(target)
        else:
            layers.remove_tree(Path(os.fsdecode(target)))
    if stat.S_ISDIR(os.lstat(source).st_mode):
        shutil.copytree(os.fsdecode(source), os.fsdecode(target), symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
