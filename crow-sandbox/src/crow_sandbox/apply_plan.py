"""The plan of an applying: the steps that a command's changes need, and checks that they may be done."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from crow_sandbox.apply_journal import ApplyJournal, ApplyStep, JournalLayer, MarkedFile
from crow_sandbox.changes import (
    LayerChange,
    OwnTimes,
    is_compiled,
    read_own_times,
    to_identity,
    to_type,
    write_own_times,
)
from crow_sandbox.layer_files import list_marks, open_parent_at, read_attribute, read_status, walk
from crow_sandbox.layers import Layer
from crow_sandbox.moving import Mover, is_locked, is_writable
from crow_sandbox.policy import SandboxError


class ApplyPlan:
    """Writes down the steps for changes. Folders of the layer become searchable, so that their files can be read."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.journal = ApplyJournal()
        self.planned: list[tuple[LayerChange, ApplyStep]] = []
        self.token = os.urandom(4).hex()
        self.numbers: dict[Layer, int] = {}
        self.times: dict[Layer, OwnTimes] = {}
        self.quiet: dict[str, Layer] = {}
        """The folders that nobody else has changed since the command started."""

    def make(self, changes: Sequence[LayerChange]) -> None:
        """Raises OSError, and SandboxError for a change that cannot be applied."""
        last: tuple[Layer, str] | None = None
        for change in sorted(changes, key=is_folder_mode, reverse=True):
            if change.type == "other" and change.kind != "removed":
                continue
            layer, (folder, _, _) = change.layer, change.path.rpartition("/")
            self.mover.path = os.fsencode(layer.root), os.fsencode(change.path)
            if {"", ".", ".."} & {*change.path.split("/")}:
                raise SandboxError(f"{os.path.join(layer.root, change.path)} is not a path in {layer.root}.")
            if layer not in self.numbers:
                self.add_layer(layer)
            if last is None or last[1] != folder or last[0] is not layer:
                self.enter(layer, folder)
                last = layer, folder
            if step := self.make_step(change):
                self.journal.steps.append(step)
                self.planned.append((change, step))
        if not self.journal.stages:
            self.journal.state = "moving"

    def add_layer(self, layer: Layer) -> None:
        kept, staged = layer.upper.parent / "before", os.stat(layer.upper).st_dev != os.stat(layer.root).st_dev
        self.numbers[layer], self.times[layer] = len(self.numbers), read_own_times(layer)
        if staged:
            kept = layer.root / f".crow-{self.token}"
            self.note_quiet(layer, "", os.stat(layer.root))
        else:
            kept.mkdir(mode=0o700, exist_ok=True)
        root, upper = os.fsencode(layer.root), os.fsencode(layer.upper)
        self.journal.layers.append(JournalLayer(root, upper, os.fsencode(kept), staged))

    def enter(self, layer: Layer, folder: str) -> None:
        """Check a folder of changes, and note permissions that have to be changed meanwhile."""
        path = os.path.join(layer.root, folder)
        real, _ = self.mover.open("real", os.fsencode(layer.root), os.fsencode(f"{folder}/x" if folder else "x"))
        status = os.stat(real)
        if status.st_dev != os.stat(layer.root).st_dev:
            raise SandboxError(f"{path} is on another file system than {layer.root}; changes in it are not applied.")
        self.note_quiet(layer, folder, status)
        self.note_locked(os.fsencode(path.rstrip("/")), status)
        parts = folder.split("/") if folder else []
        for depth in range(len(parts)):
            below = os.fsencode("/".join(parts[: depth + 1]))
            parent, name = self.mover.open("layer", os.fsencode(layer.upper), below)
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if self.note_locked(os.path.join(os.fsencode(layer.upper), below), status):
                os.chmod(name, stat.S_IMODE(status.st_mode) | 0o700, dir_fd=parent)

    def note_locked(self, path: bytes, status: os.stat_result) -> bool:
        entry = path, stat.S_IMODE(status.st_mode)
        if is_writable(status) or entry in self.journal.locked:
            return False
        self.journal.locked.append(entry)
        return True

    def note_quiet(self, layer: Layer, folder: str, status: os.stat_result) -> None:
        if not self.times[layer].is_later(status):
            self.quiet[os.path.join(layer.root, folder)] = layer

    def make_step(self, change: LayerChange) -> ApplyStep | None:
        number, path = self.numbers[change.layer], os.fsencode(change.path)
        layer = self.journal.layers[number]
        real_parent, name = self.mover.open("real", layer.root, path)
        old = read_status(name, real_parent)
        self.check(change, real_parent, name, old)
        if change.kind == "removed" and old is None:
            return None
        step = ApplyStep("remove", number, path, b"", to_identity(old) if old else None)
        step.name = os.fsencode(f"{self.token}-{len(self.planned)}")
        if change.kind == "removed":
            return step
        parent, _ = self.mover.open("new", layer.upper, path)
        new = read_status(name, parent)
        if new is None:
            path = os.path.join(change.layer.root, change.path)
            raise SandboxError(f"{path} is not applied, as the command's file is gone.")
        step.mode = new.st_mode
        step.kind = "mode" if is_folder_mode(change) else "move"
        if step.kind == "move":
            self.add_marked(step, parent, os.fsdecode(name), new)
        return step

    def add_marked(self, step: ApplyStep, parent: int, name: str, status: os.stat_result) -> None:
        below = walk(parent, name, in_layer=True) if stat.S_ISDIR(status.st_mode) else [("", status)]
        left: list[bytes] = []
        for found, each in below:
            if to_type(each) == "other" or (found and is_compiled(found)):
                left.append(os.fsencode(found))
                if not stat.S_ISDIR(each.st_mode):
                    continue
            if (marks := list_marks(parent, name + found)) or is_locked(each):
                with open_parent_at(parent, name + found) as (holder, last):
                    values = [(mark, read_attribute(holder, last, mark)) for mark in marks]
                step.marked.append(MarkedFile(os.fsencode(found), stat.S_IMODE(each.st_mode), values))
        step.special = left[::-1]  # a folder comes after what it holds

    def check(self, change: LayerChange, parent: int, name: bytes, old: os.stat_result | None) -> None:
        """Raise SandboxError if the real file has changed since the changes were read."""
        if is_folder_mode(change):
            same = old is not None and stat.S_ISDIR(old.st_mode)
        else:
            same = (to_identity(old) if old else None) == change.real
            if same and old and stat.S_ISDIR(old.st_mode) and not change.conflicts:
                is_later = self.times[change.layer].is_later
                same = not any(found and is_later(status) for found, status in walk(parent, os.fsdecode(name)))
        if not same:
            raise self.mover.to_conflict()

    def keep_times(self) -> None:
        """Remember that crow changed these files and folders, so that this is not taken for a conflict later."""
        paths: list[tuple[Layer, str, ApplyStep | None]] = [(layer, path, None) for path, layer in self.quiet.items()]
        paths += [
            (change.layer, os.path.join(change.layer.root, change.path), step)
            for change, step in self.planned
            if step.real and not change.conflicts
        ]
        for layer, path, step in paths:
            status = os.lstat(path) if os.path.lexists(path) else None
            if status and (step is None or to_identity(status) == step.real):
                self.times[layer].by_inode[status.st_ino] = status.st_ctime_ns
        for layer, times in self.times.items():
            write_own_times(layer, times)


def is_folder_mode(change: LayerChange) -> bool:
    """Tell if a change is one of a folder's permissions alone."""
    return change.mode_only and change.type == "folder"


def find_before(run: Path, journal: ApplyJournal, step: ApplyStep) -> Path | None:
    """Return where the earlier file of a step is kept, after all of them."""
    if not step.real or step.kind == "mode":
        return None
    layer = journal.layers[step.layer]
    folder = run / "before" if layer.staged else Path(os.fsdecode(layer.kept))
    return folder / os.fsdecode(step.name)
