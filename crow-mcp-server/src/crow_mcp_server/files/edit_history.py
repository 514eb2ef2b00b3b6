"""The files that each session has seen, and its edits for undoing, in memory and optionally on the disk."""

import hashlib
import json
import os
import shutil
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from crow_system.files import make_private_folder

from crow_mcp_server.files.document import BYTE_ORDER_MARKS, Document

MAX_SESSIONS = 100
MAX_SEEN_FILES = 2_000  # of a session
MAX_STEPS = 500  # of a session
MAX_STEP_CHARACTERS = 4_000_000  # of the texts before all steps of a session
BOM_BY_ENCODING = {encoding: mark for mark, encoding in BYTE_ORDER_MARKS}


@dataclass(frozen=True, eq=False)  # equal edits are still different steps
class UndoStep:
    """One edit that can be undone."""

    path: str
    before: Document | None
    """The file before the edit; None when the edit created it."""
    after: str
    """Digest of the file after the edit."""
    file_name: str = field(default_factory=lambda: f"{time.time_ns():020}-{os.getpid()}.json")
    """Name of the step's file in the journal; names sort in the order of the edits."""


class UndoJournal:
    """Stores one session's steps in files that only their owner can read, so that they survive a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load_steps(self) -> list[UndoStep]:
        """Return all steps in order. A file that cannot be read is skipped."""
        steps: list[UndoStep] = []
        for file in sorted(self._folder.glob("*.json")):
            with suppress(OSError, ValueError, TypeError, KeyError):
                stored = json.loads(file.read_bytes())
                before = stored["before"] and Document(
                    stored["before"]["text"], stored["before"]["encoding"], bytes.fromhex(stored["before"]["mark"])
                )
                steps.append(UndoStep(stored["path"], before, stored["after"], file.name))
        return steps

    def add_step(self, step: UndoStep) -> None:
        """Write a step to its file."""
        before = step.before and {
            "text": step.before.text,
            "encoding": step.before.encoding,
            "mark": step.before.bom.hex(),
        }
        with suppress(OSError):  # for instance a full disk: the edit can then be undone only until a restart
            make_private_folder(self._folder)
            opened = os.open(self._folder / step.file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(opened, "w", encoding="utf-8", errors="surrogatepass") as file:
                json.dump({"path": step.path, "before": before, "after": step.after}, file)

    def remove_step(self, step: UndoStep) -> None:
        """Remove a step's file."""
        with suppress(OSError):
            (self._folder / step.file_name).unlink()


def parse_changes(changes: Iterable[Mapping[str, Any]]) -> list[UndoStep]:
    """Convert the `crow/changes` of results to the steps that can still be undone.

    An edit and its undoing cancel each other. A change whose text does not match its digest is skipped.
    """
    kept: list[Mapping[str, Any]] = []
    for change in changes:
        last = next((other for other in reversed(kept) if other["path"] == change["path"]), None)
        if last and (last["before"], last["after"]) == (change["after"], change["before"]):
            kept.remove(last)
        else:
            kept.append(change)
    steps: list[UndoStep] = []
    for change in kept[-MAX_STEPS:]:
        with suppress(LookupError, UnicodeEncodeError):  # for instance in a log that was tampered with
            before = None if change["old"] is None else _to_document(change)
            if change["after"] and (before and before.digest) == change["before"]:
                steps.append(UndoStep(change["path"], before, change["after"]))
    return steps


def _to_document(change: Mapping[str, Any]) -> Document:
    encoding = change.get("encoding", "utf-8")
    return Document(change["old"], encoding, BOM_BY_ENCODING[encoding] if change.get("mark") else b"")


class EditHistory:
    """The seen files and the steps of one session. It may be used from several threads."""

    def __init__(self, journal: UndoJournal | None, steps: Iterable[UndoStep]) -> None:
        """`steps` are the earlier ones; `journal` stores further steps, if given."""
        self._lock = Lock()
        self._seen: OrderedDict[str, str] = OrderedDict()
        self._journal = journal
        self._steps = deque(steps)

    def record_seen(self, path: str, digest: str) -> None:
        """Record the digest of a file that the model has seen."""
        with self._lock:
            self._seen[path] = digest
            self._seen.move_to_end(path)
            if len(self._seen) > MAX_SEEN_FILES:
                self._seen.popitem(last=False)

    def get_seen(self, path: str) -> str | None:
        """Return the digest of the file when the model last saw it; None if it never did."""
        with self._lock:
            return self._seen.get(path)

    def forget_seen(self, path: str) -> None:
        """Forget that the model has seen a file, after it was removed."""
        with self._lock:
            self._seen.pop(path, None)

    def record_step(self, step: UndoStep) -> None:
        """Add a step, and discard the oldest ones beyond the limits."""
        if step.before and len(step.before.text) > MAX_STEP_CHARACTERS:
            return  # it would displace all others
        with self._lock:
            self._steps.append(step)
            if self._journal:
                self._journal.add_step(step)
            while len(self._steps) > MAX_STEPS or self._count_characters() > MAX_STEP_CHARACTERS:
                self._discard(self._steps[0])

    def find_last_step(self, path: str) -> UndoStep | None:
        """Return the last step of a file; None if there is none."""
        with self._lock:
            return next((step for step in reversed(self._steps) if step.path == path), None)

    def is_known(self, path: str, digest: str) -> bool:
        """Return whether a file is as the session last saw it, or as before one of its edits, which was taken back."""
        seen = self.get_seen(path)
        with self._lock:
            return seen in (None, digest) or any(
                step.path == path and step.before is not None and step.before.digest == digest for step in self._steps
            )

    def remove_step(self, step: UndoStep) -> None:
        """Remove a step that was undone."""
        with self._lock, suppress(ValueError):  # it was discarded meanwhile as one of the oldest
            self._discard(step)

    def _discard(self, step: UndoStep) -> None:
        self._steps.remove(step)
        if self._journal:
            self._journal.remove_step(step)

    def _count_characters(self) -> int:
        return sum(len(step.before.text) for step in self._steps if step.before)


class EditHistories:
    """The histories of the MAX_SESSIONS sessions that were used last."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` holds the journals; None keeps the steps in memory only."""
        self._folder = folder
        self._histories: OrderedDict[str, EditHistory] = OrderedDict()
        self._lock = Lock()

    def get(self, session: str, changes: Callable[[], Iterable[Mapping[str, Any]]] | None = None) -> EditHistory:
        """Return the history of a session.

        `changes` returns the session's earlier `crow/changes`; if given, it is used instead of a journal.
        """
        with self._lock:
            if session not in self._histories:
                journal = None if changes else self._open_journal(session)
                steps = parse_changes(changes()) if changes else journal.load_steps() if journal else ()
                self._histories[session] = EditHistory(journal, steps)
            self._histories.move_to_end(session)
            if len(self._histories) > MAX_SESSIONS:
                self._histories.popitem(last=False)
            return self._histories[session]

    def _open_journal(self, session: str) -> UndoJournal | None:
        if self._folder is None:
            return None
        ours = self._folder / hashlib.sha256(session.encode(errors="surrogatepass")).hexdigest()[:32]
        with suppress(OSError):
            folders = sorted(self._folder.iterdir(), key=lambda folder: folder.stat().st_mtime)
            for old in folders[: -MAX_SESSIONS or None]:
                if old != ours:
                    shutil.rmtree(old, ignore_errors=True)
        return UndoJournal(ours)
