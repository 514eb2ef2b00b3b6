"""Applying changes: move what a command changed into the real folders, all or nothing, also across a kill.

A journal in the run's folder names every step before the first one begins. Each step looks at what is there and does
what is left of it, so that the steps can be done again after a kill. A real file moves into the folder `before` beside
the layer, the command's file into its place. Where the layer is on another file system than the root, the command's
files are first copied into a hidden folder of the root.
"""

import ctypes
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from errno import EEXIST, EINVAL, ELOOP, ENOSYS, ENOTDIR
from functools import cache
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import msgspec

from crow_sandbox import layers
from crow_sandbox.changes import (
    FOLDER_FLAGS,
    OVERLAY,
    Identity,
    LayerChange,
    open_folder,
    open_parent,
    open_parent_at,
    read_file,
    read_status,
    to_identity,
    to_type,
    walk,
)
from crow_sandbox.layers import Layer
from crow_sandbox.policy import SandboxError

JOURNAL = "journal"
PATH_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | FOLDER_FLAGS
NO_REPLACE = 1
"""RENAME_NOREPLACE of Linux's renameat2."""


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class AppliedChange:
    """A change that was applied, with where the earlier file is kept."""

    change: LayerChange
    before: Path | None
    """What was there, moved here; None if nothing was. It stays until the run is removed."""


class ApplyStep(msgspec.Struct, array_like=True):
    """What to do for one change. Paths are bytes as the system has them."""

    kind: Literal["move", "remove", "mode"]
    root: bytes
    path: bytes
    source: bytes
    """The folder that holds the new file, and its path there."""
    source_path: bytes
    kept: bytes
    """The folder that holds the earlier file, and its name there."""
    kept_name: bytes
    real: Identity | None
    """The real file before: inode, mode, size and time of the last change."""
    mode: int
    """The permissions afterwards."""
    is_folder: bool = False
    """True if a folder is moved into place."""
    marked: list[tuple[bytes, int]] = []
    """What overlayfs marked, or its owner may not read, from the new file on, and its permissions."""
    special: list[bytes] = []
    """Devices, sockets and pipes in a new folder, which are not applied."""


class StagedCopy(msgspec.Struct, array_like=True):
    """A new file that is first copied to the file system of its root."""

    upper: bytes
    stage: bytes
    name: bytes


class ApplyJournal(msgspec.Struct):
    """All steps of one run, and how far they are."""

    steps: list[ApplyStep]
    state: Literal["copying", "moving", "applied"] = "moving"
    locked: list[tuple[bytes, int]] = []
    """OpenFolders that their owner may not write, with their permissions, which are changed meanwhile."""
    copies: list[StagedCopy] = []
    stages: list[bytes] = []
    """Hidden folders of roots whose layer is on another file system."""


def apply_changes(
    changes: Sequence[LayerChange], run: Path, before_step: Callable[[], object] = lambda: None
) -> Sequence[AppliedChange]:
    """Apply changes of one run, whose folder is `run`: write the journal, then move.

    A file that conflicts is applied only if its change is among `changes`: the caller has asked. Devices, sockets and
    pipes are left out. `before_step` is called before each change of the file system. Raises SandboxError, after taking
    back what was done, if somebody else has changed a file since the changes were read, the disk is full, or a folder
    cannot be written.
    """
    applying = Applying(run, before_step)
    try:
        planned = applying.plan(changes)
        applying.write_journal()
    except (OSError, SandboxError) as error:
        with suppress(OSError):
            applying.restore_modes()
        raise applying.to_error(error) from error
    try:
        applying.go_forward()
    except BaseException as error:
        applying.take_back()
        if isinstance(error, OSError):
            raise applying.to_error(error) from error
        raise
    with suppress(OSError):  # what stays is removed with the run
        applying.remove_stages()
    return [AppliedChange(change, applying.find_before(step)) for change, step in planned]


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
    applying = Applying(run, before_step)
    sentence = None
    try:
        if applying.read_journal() and applying.journal.state != "applied":
            try:
                applying.go_forward()
            except (OSError, SandboxError) as error:
                applying.take_back()
                return (
                    f"crow was ended while it applied a command's changes to {applying.roots}, and has taken them back"
                    f" now: {applying.to_error(error)} They are kept in {run}."
                )
            sentence = f"crow was ended while it applied a command's changes to {applying.roots}; they are applied now."
        applying.remove_stages()
        layers.remove_run(run)
    except (OSError, msgspec.DecodeError, SandboxError) as error:
        return f"{run} cannot be finished: {error}"
    return sentence


class Applying:
    """The steps of one run, forward or back. Every change of the file system goes through `call`."""

    def __init__(self, run: Path, before_step: Callable[[], object]) -> None:
        self.run = run
        self.before_step = before_step
        self.journal = ApplyJournal([])
        self.folders = OpenFolders()
        self.path = os.fspath(run)
        """The file at hand, for an error."""

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.before_step()
        return function(*args, **kwargs)

    @property
    def roots(self) -> str:
        return ", ".join(sorted({os.fsdecode(step.root) for step in self.journal.steps}))

    def to_error(self, error: Exception) -> SandboxError:
        if isinstance(error, SandboxError):
            return error
        if isinstance(error, OSError) and error.errno in (ELOOP, ENOTDIR):
            return SandboxError(f"{self.path} cannot be changed, as a folder of its path is a link or a file now.")
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return SandboxError(f"{self.path} cannot be changed: {reason}.")

    # The journal

    def plan(self, changes: Sequence[LayerChange]) -> list[tuple[LayerChange, ApplyStep]]:
        """Write down the steps. OpenFolders of the layer become searchable, so that their files can be looked at."""
        token = os.urandom(4).hex()
        kept: dict[Layer, tuple[str, bool]] = {}
        planned: list[tuple[LayerChange, ApplyStep]] = []
        for number, change in enumerate(sorted(changes, key=is_folder_mode, reverse=True)):
            self.path = os.path.join(change.layer.root, change.path)
            if change.type == "other" and change.kind != "removed":
                continue
            if {"", ".", ".."} & {*change.path.split("/")}:
                raise SandboxError(f"{self.path} is not a path in {change.layer.root}.")
            if change.layer not in kept:
                kept[change.layer] = self.choose_kept(change.layer, token)
            if step := self.plan_step(change, *kept[change.layer], f"{token}-{number}"):
                planned.append((change, step))
        self.journal.steps = [step for _, step in planned]
        if self.journal.copies:
            self.journal.state = "copying"
        return planned

    def choose_kept(self, layer: Layer, token: str) -> tuple[str, bool]:
        """Return the folder for earlier files, and whether it is a stage: a hidden folder of the root."""
        if os.stat(layer.upper).st_dev == os.stat(layer.root).st_dev:
            kept = os.fspath(layer.upper.parent / "before")
            os.makedirs(kept, mode=0o700, exist_ok=True)
            return kept, False
        stage = os.path.join(layer.root, f".crow-{token}")
        self.journal.stages.append(os.fsencode(stage))
        return stage, True

    def plan_step(self, change: LayerChange, kept: str, staged: bool, name: str) -> ApplyStep | None:
        layer, path = change.layer, change.path
        root, upper = os.fspath(layer.root), os.fspath(layer.upper)
        is_new_folder = self.folders.get("real") != os.path.dirname(self.path)
        real_parent, last = self.folders.open("real", root, path)
        if is_new_folder and os.stat(real_parent).st_dev != os.stat(layer.root).st_dev:
            raise SandboxError(f"{self.path} is on another file system than {root}, and is not applied.")
        if is_new_folder:
            self.unlock(root, path, real_parent)
            self.unlock_layer(upper, path)
        old = read_status(last, real_parent)
        real = to_identity(old) if old else None
        names = [os.fsencode(each) for each in (root, path, upper, path, kept, name)]
        step = ApplyStep("remove", names[0], names[1], names[2], names[3], names[4], names[5], real, 0)
        layer_parent, _ = self.folders.open("new", upper, path)
        new = read_status(last, layer_parent)
        self.check_change(change, real_parent, last, old)
        if change.kind == "removed":
            return step if old else None
        if new is None:
            raise SandboxError(f"{self.path} is not applied, as the command's file is gone.")
        step.mode = stat.S_IMODE(new.st_mode)
        step.is_folder = stat.S_ISDIR(new.st_mode)
        if is_folder_mode(change):
            step.kind = "mode"
            return step
        step.kind = "move"
        for found, status in walk(layer_parent, last, in_layer=True):
            below = os.fsencode(found)
            if to_type(status) == "other":
                step.special.append(below)
            elif is_locked(status) or has_marks(layer_parent, last + found):
                step.marked.append((below, stat.S_IMODE(status.st_mode)))
        if staged:
            self.journal.copies.append(StagedCopy(step.source, step.kept, step.kept_name))
            step.source, step.source_path = step.kept, b"new-" + step.kept_name
        return step

    def check_change(self, change: LayerChange, parent: int, name: str, old: os.stat_result | None) -> None:
        """Raise SandboxError if the real file has changed since the changes were read."""
        if is_folder_mode(change):
            same = old is not None and stat.S_ISDIR(old.st_mode)
        else:
            same = (to_identity(old) if old else None) == change.real
        if same and old and stat.S_ISDIR(old.st_mode) and not change.mode_only and not change.conflicts:
            below = (status for found, status in walk(parent, name) if found)
            same = all(status.st_ctime_ns <= change.layer.start_ns for status in below)
        if not same:
            raise SandboxError(f"Somebody else has changed {self.path} meanwhile; nothing was applied.")

    def unlock(self, root: str, path: str, parent: int) -> None:
        """Note a folder that its owner may not write."""
        status = os.stat(parent)
        entry = (os.fsencode(os.path.join(root, os.path.dirname(path))), stat.S_IMODE(status.st_mode))
        if not is_writable(status) and entry not in self.journal.locked:
            self.journal.locked.append(entry)

    def unlock_layer(self, upper: str, path: str) -> None:
        """Let the owner search and write the folders of a path in a layer."""
        folders = path.split("/")[:-1]
        for depth in range(len(folders)):
            below = "/".join(folders[: depth + 1])
            parent, name = self.folders.open("layer", upper, below)
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not is_writable(status):
                self.journal.locked.append((os.fsencode(os.path.join(upper, below)), stat.S_IMODE(status.st_mode)))
                os.chmod(name, stat.S_IMODE(status.st_mode) | 0o700, dir_fd=parent)

    def write_journal(self) -> None:
        """Write the journal, and wait until the disk has it."""
        path = self.run / JOURNAL
        new = path.with_name(f"{JOURNAL}.new")
        self.before_step()
        with new.open("wb") as file:
            file.write(msgspec.msgpack.encode(self.journal))
            file.flush()
            os.fsync(file.fileno())
        self.call(new.rename, path)
        with open_folder(os.fspath(self.run)) as folder:
            os.fsync(folder)

    def read_journal(self) -> bool:
        """Read the journal; False if there is none."""
        try:
            data = (self.run / JOURNAL).read_bytes()
        except FileNotFoundError:
            return False
        self.journal = msgspec.msgpack.decode(data, type=ApplyJournal)
        return True

    # Forward

    def go_forward(self) -> None:
        """Do what is left of all steps. Raises OSError, and SandboxError for a file that somebody else has changed."""
        if self.journal.state == "copying":
            self.copy()
            self.journal.state = "moving"
            self.write_journal()
        for folder, mode in self.journal.locked:
            self.set_mode(folder, mode | 0o700)
        for step in self.journal.steps:
            self.path = os.fsdecode(os.path.join(step.root, step.path))
            self.do(step)
        for step in self.journal.steps:
            self.path = os.fsdecode(os.path.join(step.root, step.path))
            self.tidy(step)
        self.restore_modes()
        for step in self.journal.steps:
            if step.kind == "mode":
                self.set_mode(os.path.join(step.root, step.path), step.mode)
        self.keep_copies()
        self.journal.state = "applied"
        self.write_journal()
        self.folders.close()

    def do(self, step: ApplyStep) -> None:
        """Move the real file away and the new one into its place, as far as that is not done."""
        if step.kind == "mode":
            return
        real, name = self.folders.open("real", step.root, step.path)
        kept, kept_name = self.folders.open("kept", step.kept, step.kept_name)
        moved = read_status(kept_name, kept) is not None
        source, source_name = None, ""
        if step.kind == "move":
            source, source_name = self.folders.open("new", step.source, step.source_path)
            if read_status(source_name, source) is None:
                return
        elif moved:
            return
        if not moved:
            self.check(step, name, real)
            if step.real:
                self.move(real, name, kept, kept_name)
                self.check(step, kept_name, kept)
        if source is not None:
            for below in step.special:
                self.remove_special(source, source_name + os.fsdecode(below))
            self.move(source, source_name, real, name)

    def check(self, step: ApplyStep, name: str, parent: int) -> None:
        status = read_status(name, parent)
        found = to_identity(status) if status else None
        if found and step.real and stat.S_ISDIR(found[1]) and stat.S_ISDIR(step.real[1]):
            found = found[0], step.real[1], *found[2:]  # its permissions may have been changed to move it
        if found != step.real:
            raise SandboxError(f"Somebody else has changed {self.path} meanwhile; nothing was applied.")

    def move(self, parent: int, name: str, target: int, target_name: str) -> None:
        """Rename a file or folder to a name that is free. Raises FileExistsError."""
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        locked = stat.S_ISDIR(status.st_mode) and not is_writable(status)  # its `..` could not be changed
        if locked:
            self.call(chmod_folder, parent, name, stat.S_IMODE(status.st_mode) | 0o700)
        self.call(rename, parent, name, target, target_name)
        if locked:
            self.call(chmod_folder, target, target_name, stat.S_IMODE(status.st_mode))

    def remove_special(self, parent: int, path: str) -> None:
        with suppress(FileNotFoundError), ExitStack() as stack:
            holder, name = stack.enter_context(open_parent_at(parent, path))
            self.call(os.unlink, name, dir_fd=holder)

    def tidy(self, step: ApplyStep) -> None:
        """Remove what overlayfs wrote about the new files, and set permissions that were changed to move a folder."""
        if step.real and stat.S_ISDIR(step.real[1]) and step.kind != "mode":
            self.set_mode(os.path.join(step.kept, step.kept_name), stat.S_IMODE(step.real[1]))
        if step.kind != "move" or not (step.marked or step.is_folder):
            return
        parent, name = self.folders.open("real", step.root, step.path)
        if not (status := read_status(name, parent)):
            return
        self.unlock_files(step, parent, name)
        for below, mode in reversed(step.marked):
            with suppress(FileNotFoundError, NotADirectoryError), ExitStack() as stack:
                holder, last = stack.enter_context(open_parent_at(parent, name + os.fsdecode(below)))
                self.remove_marks(holder, last, mode)
        if stat.S_ISDIR(status.st_mode):
            self.set_mode(os.path.join(step.root, step.path), step.mode)

    def unlock_files(self, step: ApplyStep, parent: int, name: str) -> None:
        """Let the owner read and change the new files."""
        for below, mode in step.marked:
            with suppress(FileNotFoundError, NotADirectoryError), ExitStack() as stack:
                holder, last = stack.enter_context(open_parent_at(parent, name + os.fsdecode(below)))
                status = os.stat(last, dir_fd=holder, follow_symlinks=False)
                if is_locked(status):
                    self.call(os.chmod, last, mode | 0o700, dir_fd=holder)

    def remove_marks(self, parent: int, name: str, mode: int) -> None:
        if sys.platform != "linux":
            return
        path = f"/proc/self/fd/{parent}/{name}"
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            return
        marks = [each for each in os.listxattr(path, follow_symlinks=False) if each.startswith(OVERLAY)]
        if locked := bool(marks) and not status.st_mode & 0o200:
            self.call(os.chmod, name, mode | 0o600, dir_fd=parent)
        for attribute in marks:
            self.call(os.removexattr, path, attribute, follow_symlinks=False)
        if locked or stat.S_IMODE(status.st_mode) != mode:
            self.call(os.chmod, name, mode, dir_fd=parent)

    def set_mode(self, path: bytes, mode: int) -> None:
        """Set the permissions of a folder, if it is there and has others."""
        parent, name = self.folders.open("mode", b"/", path.lstrip(b"/"))
        status = read_status(name, parent)
        if status and stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) != mode:
            self.call(chmod_folder, parent, name, mode)

    def restore_modes(self) -> None:
        for folder, mode in reversed(self.journal.locked):
            self.set_mode(folder, mode)

    # Another file system

    def copy(self) -> None:
        """StagedCopy the new files to the file system of their root, from the beginning if that was cut off."""
        self.remove_stages()
        for stage in self.journal.stages:
            self.call(os.mkdir, stage, 0o700)
        for step, copy in self.list_copies():
            self.path = os.fsdecode(os.path.join(step.root, step.path))
            parent, name = self.folders.open("layer", copy.upper, step.path)
            for below in step.special:
                self.remove_special(parent, name + os.fsdecode(below))
            self.unlock_files(step, parent, name)
            source = os.path.join(copy.upper, step.path)
            self.call(copy_tree, source, os.path.join(step.source, step.source_path))

    def list_copies(self) -> Iterator[tuple[ApplyStep, StagedCopy]]:
        return zip([step for step in self.journal.steps if step.source == step.kept], self.journal.copies, strict=True)

    def keep_copies(self) -> None:
        """StagedCopy the earlier files out of the hidden folders of their roots."""
        if not self.journal.stages:
            return
        before = self.run / "before"
        before.mkdir(mode=0o700, exist_ok=True)
        for step in self.journal.steps:
            kept = os.path.join(step.kept, step.kept_name)
            if step.kept in self.journal.stages and os.path.lexists(kept):
                self.call(copy_tree, kept, os.fsencode(before / os.fsdecode(step.kept_name)))

    def remove_stages(self) -> None:
        self.folders.close()
        for stage in self.journal.stages:
            if os.path.lexists(stage):
                self.call(layers.remove_tree, Path(os.fsdecode(stage)))

    def find_before(self, step: ApplyStep) -> Path | None:
        """Return where the earlier file of a step is kept, after all of them."""
        if not step.real or step.kind == "mode":
            return None
        folder = self.run / "before" if step.kept in self.journal.stages else Path(os.fsdecode(step.kept))
        return folder / os.fsdecode(step.kept_name)

    # Back

    def take_back(self) -> None:
        """Undo all steps, the last first. Raises SandboxError where somebody else has made a file meanwhile."""
        failures: list[Exception] = []
        for folder, mode in self.journal.locked:
            self.attempt(failures, self.set_mode, folder, mode | 0o700)
        for step in reversed(self.journal.steps):
            self.attempt(failures, self.undo, step)
        for step, copy in self.list_copies():
            self.attempt(failures, self.restore_copied, step, copy)
        self.attempt(failures, self.restore_modes)
        for step in self.journal.steps:
            if step.kind == "mode" and step.real:
                path = os.path.join(step.root, step.path)
                self.attempt(failures, self.set_mode, path, stat.S_IMODE(step.real[1]))
        if not failures:
            self.attempt(failures, self.remove_stages)
            self.attempt(failures, self.remove_journal)
        self.folders.close()
        if failures:
            raise SandboxError(f"{self.to_error(failures[0])} Earlier files are kept in {self.run}.") from failures[0]

    def attempt(
        self, failures: list[Exception], function: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        try:
            function(*args, **kwargs)
        except (OSError, SandboxError) as error:
            failures.append(error)

    def undo(self, step: ApplyStep) -> None:
        if step.kind == "mode" or self.journal.state == "copying":
            return
        self.path = os.fsdecode(os.path.join(step.root, step.path))
        real, name = self.folders.open("real", step.root, step.path)
        kept, kept_name = self.folders.open("kept", step.kept, step.kept_name)
        if step.kind == "move":
            source, source_name = self.folders.open("new", step.source, step.source_path)
            if read_status(source_name, source) is None and read_status(name, real) is not None:
                self.move(real, name, source, source_name)
            self.restore_source(step, source, source_name)
        if read_status(kept_name, kept) is not None:
            self.move(kept, kept_name, real, name)
        status = read_status(name, real)
        if status and step.real and stat.S_ISDIR(step.real[1]) and status.st_ino == step.real[0]:
            self.set_mode(os.path.join(step.root, step.path), stat.S_IMODE(step.real[1]))

    def restore_copied(self, step: ApplyStep, copy: StagedCopy) -> None:
        self.restore_source(step, *self.folders.open("layer", copy.upper, step.path))

    def restore_source(self, step: ApplyStep, parent: int, name: str) -> None:
        """Set the permissions of the command's files that were changed to move them."""
        for below, mode in [*reversed(step.marked), (b"", step.mode)]:
            with suppress(FileNotFoundError), ExitStack() as stack:
                holder, last = stack.enter_context(open_parent_at(parent, name + os.fsdecode(below)))
                status = os.stat(last, dir_fd=holder, follow_symlinks=False)
                if not stat.S_ISLNK(status.st_mode) and stat.S_IMODE(status.st_mode) != mode:
                    self.call(os.chmod, last, mode, dir_fd=holder)

    def remove_journal(self) -> None:
        with suppress(FileNotFoundError):
            self.call((self.run / JOURNAL).unlink)


class OpenFolders:
    """The open folders that files are moved from and to: the last one for each use. Links are not followed."""

    def __init__(self) -> None:
        self.opened: dict[str, tuple[str, int]] = {}

    def open(self, use: str, base: str | bytes, path: str | bytes) -> tuple[int, str]:
        """Return the folder of a path below `base`, and its last name. Raises OSError."""
        holder, _, name = os.path.join(os.fsdecode(base), os.fsdecode(path)).rpartition("/")
        last, descriptor = self.opened.get(use, ("", -1))
        if last != holder or descriptor < 0:
            opened = open_path(holder)
            if descriptor >= 0:
                os.close(descriptor)
            self.opened[use] = (holder, opened)
        return self.opened[use][1], name

    def get(self, use: str) -> str:
        """Return the path of the folder that is open for a use; an empty one if there is none."""
        return self.opened.get(use, ("", -1))[0]

    def close(self) -> None:
        for _, descriptor in self.opened.values():
            os.close(descriptor)
        self.opened.clear()


def open_path(path: str) -> int:
    """Open a folder by its absolute path, which must not lead over links. Raises OSError."""
    descriptor = os.open("/", PATH_FLAGS)
    for name in filter(None, path.split("/")):
        try:
            below = os.open(name, PATH_FLAGS, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


@cache
def load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def rename(parent: int, name: str, target: int, target_name: str) -> None:
    """Rename a file to a name that is free, in one step where the system can. Raises FileExistsError."""
    if hasattr(libc := load_libc(), "renameat2"):
        if not libc.renameat2(parent, os.fsencode(name), target, os.fsencode(target_name), NO_REPLACE):
            return
        number = ctypes.get_errno()
        if number not in (EINVAL, ENOSYS):
            raise OSError(number, os.strerror(number), name)
    if read_status(target_name, target) is not None:
        raise FileExistsError(EEXIST, os.strerror(EEXIST), target_name)
    os.rename(name, target_name, src_dir_fd=parent, dst_dir_fd=target)


def chmod_folder(parent: int, name: str, mode: int) -> None:
    """Set the permissions of a folder, but not of what a link names."""
    descriptor = os.open(name, PATH_FLAGS, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", mode)
    finally:
        os.close(descriptor)


def copy_tree(source: bytes, target: bytes) -> None:
    """StagedCopy a file, link or folder, with modes and times, in place of a copy that was cut off."""
    first, second = os.fsdecode(source), os.fsdecode(target)
    if os.path.islink(second) or os.path.isfile(second):
        os.unlink(second)
    layers.remove_tree(Path(second))
    if os.path.isdir(first) and not os.path.islink(first):
        shutil.copytree(first, second, symlinks=True)
    else:
        shutil.copy2(first, second, follow_symlinks=False)


def is_writable(status: os.stat_result) -> bool:
    """Tell if the owner of a folder may change what it holds; True for a folder of another owner."""
    return status.st_mode & 0o300 == 0o300 or status.st_uid != os.geteuid()


def is_locked(status: os.stat_result) -> bool:
    """Tell if the owner may not read a file, or not list and search a folder."""
    wanted = 0o700 if stat.S_ISDIR(status.st_mode) else 0o400
    return not stat.S_ISLNK(status.st_mode) and status.st_mode & wanted != wanted


def is_folder_mode(change: LayerChange) -> bool:
    """Tell if a change is one of a folder's permissions alone."""
    return change.mode_only and change.type == "folder"


def has_marks(parent: int, path: str) -> bool:
    """Tell if overlayfs has written something about a file."""
    if sys.platform != "linux":
        return False
    return any(
        name.startswith(OVERLAY) for name in os.listxattr(f"/proc/self/fd/{parent}/{path}", follow_symlinks=False)
    )
