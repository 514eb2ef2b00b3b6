"""The changes that a command made: the upper folder of a layer, as a list."""

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

import msgspec

from crow_sandbox.layer_files import (
    open_file,
    open_folder,
    open_layer_file,
    open_layer_folder,
    open_parent,
    read_attributes,
    read_status,
    walk,
    walk_files,
)
from crow_sandbox.layers import Layer
from crow_sandbox.policy import SandboxError

Kind = Literal["added", "changed", "removed"]
Type = Literal["file", "folder", "link", "other"]

Identity: TypeAlias = tuple[int, int, int, int]
"""Inode, mode, size and modification time of a file, which all stay the same if it is moved."""

COUNT_LIMIT = 1000
"""The most files of a folder that are counted. A folder that was removed and made anew is listed file by file up to
this many; a larger one is one change."""
OWN_TIMES = "own-times"
CHUNK = 1 << 17
"""Bytes to read of two files at once, to compare them."""


@dataclass(frozen=True)
class LayerChange:
    """One change that a command made: to a file, a link, or a folder that is new or gone as a whole."""

    layer: Layer
    path: str
    """The path from the layer's root; bytes that are not UTF-8 as os.fsdecode gives them."""
    kind: Kind
    type: Type
    """The kind afterwards, or the former kind if it is removed. `other` is a device, socket or pipe, which is never
    applied."""
    files: int = 1
    """For a new, replaced or removed folder: the number of files in it, counted up to COUNT_LIMIT."""
    conflicts: bool = False
    """True if somebody else has changed, made or removed the real file since the command started."""
    mode_only: bool = False
    """True if only permissions or times differ."""
    times_only: bool = False
    """True if only the time of the last change differs."""
    real: Identity | None = None
    """The real file as it was when the changes were read; None if there was none."""


@dataclass(frozen=True)
class OwnTimes:
    """Tells changes from outside from those that crow made in the root itself, as it applied or took back."""

    start_ns: int
    by_inode: dict[int, int]
    """The time at which crow changed files and folders of the root, by their inodes."""

    def is_later(self, status: os.stat_result) -> bool:
        """Tell if somebody else has changed a file or folder since the command started."""
        return status.st_ctime_ns > self.start_ns and status.st_ctime_ns != self.by_inode.get(status.st_ino)


def read_own_times(layer: Layer) -> OwnTimes:
    """Read what crow changed in the root of a layer. Raises OSError."""
    try:
        by_inode = msgspec.msgpack.decode((layer.upper.parent / OWN_TIMES).read_bytes(), type=dict[int, int])
    except (FileNotFoundError, msgspec.DecodeError):  # a file that was cut off makes more conflicts
        by_inode = {}
    return OwnTimes(layer.start_ns, by_inode)


def write_own_times(layer: Layer, times: OwnTimes) -> None:
    (layer.upper.parent / OWN_TIMES).write_bytes(msgspec.msgpack.encode(times.by_inode))


def read_changes(layer: Layer) -> Sequence[LayerChange]:
    """List what differs between the root and its layer, in the order of the paths.

    It takes as long as there are changes, whatever the size of the root. A file that the kernel copied up with the
    same bytes, permissions and times is not listed, nor is a folder for its times alone. A new folder is one change.
    Raises SandboxError for a layer that cannot be read.
    """
    try:
        with open_folder(os.fspath(layer.upper)) as upper, open_folder(os.fspath(layer.root)) as root:
            return list(_compare_folders(layer, read_own_times(layer), "", upper, root, opaque=False))
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else layer.root
        raise SandboxError(
            f"What the command changed in {layer.root} cannot be read: {name}: {error.strerror}."
        ) from error
    except RecursionError as error:
        raise SandboxError(
            f"What the command changed in {layer.root} cannot be read: its folders are too deep."
        ) from error


def list_files(change: LayerChange) -> Iterator[str]:
    """Yield the path of every file in a folder that is new, from the layer's root; for a file, its path.

    Raises SandboxError for a folder that cannot be read.
    """
    if change.type != "folder" or change.mode_only:
        yield change.path
        return
    base = change.layer.root if change.kind == "removed" else change.layer.upper
    try:
        with open_parent(os.fspath(base), change.path) as (parent, name):
            for found in walk_files(parent, name, in_layer=change.kind != "removed"):
                yield change.path + found
    except OSError as error:
        raise SandboxError(f"{change.path} cannot be read: {error.strerror}") from error


def is_compiled(path: str) -> bool:
    """Tell if Python writes a file by itself, and loads it in place of its source; such a file is never applied."""
    return "__pycache__" in path.split("/") or path.endswith(".pyc")


def read_file(base: str | os.PathLike[str], path: str, limit: int) -> bytes | None:
    """Read the first bytes of a file below `base`, or where a link points, without following links."""
    with suppress(OSError), open_parent(os.fspath(base), path) as (parent, name):
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            return os.fsencode(os.readlink(name, dir_fd=parent))[:limit]
        if stat.S_ISREG(status.st_mode):
            with open_file(name, parent) as descriptor, open(descriptor, "rb", closefd=False) as file:
                return file.read(limit)
    return None


def _compare_folders(
    layer: Layer, times: OwnTimes, prefix: str, upper: int, root: int, *, opaque: bool
) -> Iterator[LayerChange]:
    """List the changes below two open folders. Files that an opaque folder lacks are removed."""
    with os.scandir(upper) as entries:
        names = {entry.name for entry in entries}
    for name in sorted(names | set(os.listdir(root)) if opaque else names):
        new, old = read_status(name, upper), read_status(name, root)
        attributes = read_attributes(upper, name) if new else {}
        path = prefix + name
        if new is None or is_whiteout(new, attributes):
            if old:
                yield _removal(layer, times, path, root, name, old)
        elif stat.S_ISDIR(new.st_mode) and old and stat.S_ISDIR(old.st_mode):
            replaced = opaque or attributes.get("opaque") == b"y"
            if replaced and count_files(upper, name, in_layer=True) + count_files(root, name) >= COUNT_LIMIT:
                conflicts = is_later(times, root, name, old)
                files = count_files(upper, name, in_layer=True)
                yield LayerChange(layer, path, "changed", "folder", files, conflicts, real=to_identity(old))
                continue
            if stat.S_IMODE(new.st_mode) != stat.S_IMODE(old.st_mode):
                yield LayerChange(layer, path, "changed", "folder", mode_only=True)
            with open_layer_folder(name, upper) as below_upper, open_folder(name, root) as below_root:
                yield from _compare_folders(layer, times, path + "/", below_upper, below_root, opaque=replaced)
        elif change := _compare_files(layer, times, path, upper, root, name, new, old):
            yield change


def _removal(layer: Layer, times: OwnTimes, path: str, root: int, name: str, old: os.stat_result) -> LayerChange:
    conflicts = is_later(times, root, name, old)
    return LayerChange(layer, path, "removed", to_type(old), count_files(root, name), conflicts, real=to_identity(old))


def _compare_files(
    layer: Layer,
    times: OwnTimes,
    path: str,
    upper: int,
    root: int,
    name: str,
    new: os.stat_result,
    old: os.stat_result | None,
) -> LayerChange | None:
    """Compare the command's file with the real one; at least one of them is not a folder."""
    real, kind = to_identity(old) if old else None, to_type(new)
    if old is None or not is_same(upper, root, name, new, old):
        files = count_files(upper, name, in_layer=True) if kind == "folder" else 1
        conflicts = is_later(times, root, name, old) if old else is_gone(times, upper, root, name, new)
        return LayerChange(layer, path, "changed" if old else "added", kind, files, conflicts, real=real)
    if kind == "link":
        return None
    if stat.S_IMODE(new.st_mode) != stat.S_IMODE(old.st_mode):
        return LayerChange(layer, path, "changed", kind, mode_only=True, real=real)
    if new.st_mtime_ns != old.st_mtime_ns:
        return LayerChange(layer, path, "changed", kind, mode_only=True, times_only=True, real=real)
    return None


def is_gone(times: OwnTimes, upper: int, root: int, name: str, new: os.stat_result) -> bool:
    """Tell if the kernel copied a real file that somebody else has removed since.

    A file with the kernel's mark may have been moved here by the command. A folder cannot: the kernel refuses to move
    one that is in both layers.
    """
    if not stat.S_ISDIR(new.st_mode) and not times.is_later(os.stat(root)):
        return False
    return "origin" in read_attributes(upper, name)


def is_later(times: OwnTimes, parent: int, name: str, status: os.stat_result) -> bool:
    """Tell if somebody else has changed a file, or anything in a folder, since the command started."""
    if not stat.S_ISDIR(status.st_mode):
        return times.is_later(status)
    return any(times.is_later(found) for _, found in walk(parent, name))


def is_same(upper: int, root: int, name: str, new: os.stat_result, old: os.stat_result) -> bool:
    """Tell if two files have the same type and content."""
    if stat.S_IFMT(new.st_mode) != stat.S_IFMT(old.st_mode):
        return False
    if stat.S_ISLNK(new.st_mode):
        return os.readlink(name, dir_fd=upper) == os.readlink(name, dir_fd=root)
    if not stat.S_ISREG(new.st_mode):
        return not stat.S_ISDIR(new.st_mode)
    if new.st_size != old.st_size:
        return False
    with suppress(PermissionError), open_file(name, root) as second, open_layer_file(name, upper) as first:
        size = min(CHUNK, new.st_size + 1)  # the end of a small file is seen at once
        while (data := os.read(first, size)) == os.read(second, size):
            if len(data) < size:
                return True
    return False


def is_whiteout(status: os.stat_result, attributes: dict[str, bytes]) -> bool:
    """Tell if overlayfs made this file to mark one that is removed."""
    if sys.platform == "win32":
        return False
    return (stat.S_ISCHR(status.st_mode) and status.st_rdev == 0) or "whiteout" in attributes


def to_type(status: os.stat_result) -> Type:
    mode = status.st_mode
    return (
        "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "other"
    )


def to_identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns


def count_files(parent: int, name: str, *, in_layer: bool = False) -> int:
    """Count the files in a folder, up to COUNT_LIMIT."""
    return sum(1 for _ in islice(walk_files(parent, name, in_layer=in_layer), COUNT_LIMIT))
