"""The journal of an applying: all its steps, written before the first one begins, so that a kill loses nothing."""

import os
from pathlib import Path
from typing import Literal

import msgspec

from crow_sandbox.changes import Identity
from crow_sandbox.layer_files import open_folder

JOURNAL = "journal"


class JournalLayer(msgspec.Struct, array_like=True):
    """A layer whose changes are applied. Paths are bytes as the system has them."""

    root: bytes
    upper: bytes
    kept: bytes
    """The folder that earlier files move to: next to the layer, or in the stage."""
    staged: bool
    """True if the layer is on another file system than its root. The command's files are then first copied into the
    stage, a hidden folder of the root."""


class MarkedFile(msgspec.Struct, array_like=True):
    """A new file that overlayfs wrote attributes about, or that its owner may not read."""

    path: bytes
    """The path from the step's file; empty or with a slash first."""
    mode: int
    marks: list[tuple[str, bytes]]


class ApplyStep(msgspec.Struct, array_like=True):
    """The steps for one change."""

    kind: Literal["move", "remove", "mode"]
    layer: int
    path: bytes
    name: bytes
    """The name of the earlier file in `kept`; in a stage, `new-` and this name is the new one."""
    real: Identity | None
    """The real file before: inode, mode, size and time of the last change."""
    mode: int = 0
    """The file type and permissions of the new file."""
    marked: list[MarkedFile] = []
    special: list[bytes] = []
    """The parts of a new folder that are not applied: devices, sockets, pipes and compiled files; a folder after its
    content."""


class ApplyJournal(msgspec.Struct):
    """All steps of one run, and how far they are."""

    layers: list[JournalLayer] = []
    steps: list[ApplyStep] = []
    state: Literal["copying", "moving", "applied"] = "copying"
    locked: list[tuple[bytes, int]] = []
    """Folders that their owner may not write, with their permissions, which are changed meanwhile."""

    @property
    def stages(self) -> list[bytes]:
        return [layer.kept for layer in self.layers if layer.staged]

    @property
    def roots(self) -> str:
        return ", ".join(sorted(os.fsdecode(layer.root) for layer in self.layers))


def read_journal(run: Path) -> ApplyJournal | None:
    """Read the journal of a run; None if there is none. Raises OSError and msgspec.DecodeError."""
    try:
        return msgspec.msgpack.decode((run / JOURNAL).read_bytes(), type=ApplyJournal)
    except FileNotFoundError:
        return None


def write_new_journal(run: Path, journal: ApplyJournal) -> Path:
    """Write a journal next to the one that holds, and wait until the disk has it."""
    path = run / f"{JOURNAL}.new"
    with path.open("wb") as file:
        file.write(msgspec.msgpack.encode(journal))
        file.flush()
        os.fsync(file.fileno())
    return path


def replace_journal(new: Path) -> None:
    """Let a journal that was written hold."""
    new.rename(new.with_name(JOURNAL))
    with open_folder(os.fspath(new.parent)) as folder:
        os.fsync(folder)
