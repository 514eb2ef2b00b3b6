"""The steps of an applying, done forward or taken back: each looks at what is there and does what is left of it."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

from crow_sandbox.apply_journal import JOURNAL, ApplyJournal, ApplyStep, replace_journal, write_new_journal
from crow_sandbox.changes import Identity, to_identity
from crow_sandbox.layer_files import open_parent_at, read_status
from crow_sandbox.moving import UNLESS_GONE, Mover
from crow_sandbox.policy import SandboxError
from crow_sandbox.staging import copy_new, keep_earlier, remove_stages

P = ParamSpec("P")


class ApplySteps:
    """All steps of one run."""

    def __init__(self, run: Path, journal: ApplyJournal, mover: Mover) -> None:
        self.run = run
        self.journal = journal
        self.mover = mover

    def write_journal(self) -> None:
        self.mover.call(replace_journal, self.mover.call(write_new_journal, self.run, self.journal))

    def open(self, use: str, step: ApplyStep) -> tuple[int, bytes]:
        """Open the folder of the real, the earlier (`kept`), the new, or the command's (`layer`) file of a step."""
        layer = self.journal.layers[step.layer]
        if use == "kept" or (use == "new" and layer.staged):
            return self.mover.open(use, layer.kept, step.name if use == "kept" else b"new-" + step.name)
        return self.mover.open(use, layer.root if use == "real" else layer.upper, step.path)

    def show(self, step: ApplyStep) -> None:
        self.mover.path = self.journal.layers[step.layer].root, step.path

    def go_forward(self) -> None:
        """Do what is left of all steps. Raises OSError, and SandboxError for a file that somebody else has changed."""
        if self.journal.state == "copying":
            copy_new(self.journal, self.mover)
            self.journal.state = "moving"
            self.write_journal()
        for folder, mode in self.journal.locked:
            self.mover.set_folder_mode(folder, mode | 0o700)
        for step in self.journal.steps:
            if step.kind != "mode":
                self.show(step)
                self.do(step)
        for step in self.journal.steps:
            self.tidy(step)
        self.restore_modes()
        for step in self.journal.steps:
            if step.kind == "mode":
                self.set_folder_mode(step, step.mode)
        keep_earlier(self.run, self.journal, self.mover)
        self.journal.state = "applied"
        self.write_journal()
        self.mover.close()

    def do(self, step: ApplyStep) -> None:
        """Move the real file away and the new one into its place, as far as that is not done."""
        real, name = self.open("real", step)
        if step.real:
            kept, kept_name = self.open("kept", step)
            if read_status(kept_name, kept) is None:
                self.check(step.real, name, real)
                self.mover.move(real, name, kept, kept_name, step.real[1])
                self.check(step.real, kept_name, kept)
        if step.kind != "move":
            return
        new, new_name = self.open("new", step)
        if step.special:
            self.mover.unlock(new, new_name, step.marked)
        for below in step.special:
            self.mover.remove(new, new_name + below)
        try:
            self.mover.move(new, new_name, real, name, step.mode)
        except FileNotFoundError:  # it was moved before this process began
            return
        except FileExistsError as error:
            if read_status(new_name, new) is not None:
                raise self.mover.to_conflict() from error

    def check(self, real: Identity, name: bytes, parent: int) -> None:
        status = read_status(name, parent)
        found = to_identity(status) if status else None
        if found and stat.S_ISDIR(found[1]) and stat.S_ISDIR(real[1]):
            found = found[0], real[1], *found[2:]  # its permissions may have been changed to move it
        if found != real:
            raise self.mover.to_conflict()

    def tidy(self, step: ApplyStep) -> None:
        """Remove what overlayfs wrote about the new files, and set permissions that were changed to move a folder."""
        if step.real and stat.S_ISDIR(step.real[1]) and step.kind != "mode":
            kept = os.path.join(self.journal.layers[step.layer].kept, step.name)
            self.mover.set_folder_mode(kept, step.real[1])
        if step.kind == "move" and (step.marked or stat.S_ISDIR(step.mode)):
            self.show(step)
            parent, name = self.open("real", step)
            self.mover.unlock(parent, name, step.marked)
            self.mover.set_marks(parent, name, step.marked, present=False)
            if stat.S_ISDIR(step.mode):
                self.set_folder_mode(step, step.mode)

    def set_folder_mode(self, step: ApplyStep, mode: int) -> None:
        self.mover.set_folder_mode(os.path.join(self.journal.layers[step.layer].root, step.path), mode)

    def restore_modes(self) -> None:
        for folder, mode in reversed(self.journal.locked):
            self.mover.set_folder_mode(folder, mode)

    def take_back(self) -> None:
        """Undo all steps, the last first. Raises SandboxError where somebody else has made a file meanwhile."""
        failures: list[Exception] = []

        def attempt(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except (OSError, SandboxError) as error:
                failures.append(error)

        for folder, mode in self.journal.locked:
            attempt(self.mover.set_folder_mode, folder, mode | 0o700)
        for step in reversed(self.journal.steps):
            self.show(step)
            if step.kind != "mode" and self.journal.state != "copying":
                attempt(self.undo, step)
            if step.kind == "move":
                attempt(self.restore_new, step)
        attempt(self.restore_modes)
        for step in self.journal.steps:
            if step.kind == "mode" and step.real:
                attempt(self.set_folder_mode, step, step.real[1])
        if not failures:
            attempt(remove_stages, self.journal, self.mover)
            attempt(self.mover.call, (self.run / JOURNAL).unlink, missing_ok=True)
        self.mover.close()
        if failures:
            error = self.mover.to_error(failures[0])
            raise SandboxError(f"{error} Earlier files are kept in {self.run}.") from failures[0]

    def undo(self, step: ApplyStep) -> None:
        real, name = self.open("real", step)
        if step.kind == "move":
            new, new_name = self.open("new", step)
            if read_status(new_name, new) is None and read_status(name, real) is not None:
                self.mover.move(real, name, new, new_name, step.mode)
        if step.real:
            kept, kept_name = self.open("kept", step)
            if read_status(kept_name, kept) is not None:
                self.mover.move(kept, kept_name, real, name, step.real[1])
            status = read_status(name, real)
            if status and stat.S_ISDIR(step.real[1]) and status.st_ino == step.real[0]:
                self.set_folder_mode(step, step.real[1])

    def restore_new(self, step: ApplyStep) -> None:
        """Give the command's files the attributes and permissions that they had."""
        parent, name = self.open("layer", step)
        self.mover.unlock(parent, name, step.marked)
        self.mover.set_marks(parent, name, step.marked, present=True)
        with UNLESS_GONE, open_parent_at(parent, os.fsdecode(name)) as (holder, last):
            self.mover.set_mode(holder, last, step.mode)
