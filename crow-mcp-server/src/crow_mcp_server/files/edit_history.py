"""What the sessions of a server have seen and done: in memory, and the way back also on the disk."""

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

from crow_mcp_server.files.document import BYTE_ORDER_MARKS, Document

MAX_SESSIONS = 100
MAX_SEEN_FILES = 2_000  # files a session remembers
MAX_STEPS = 500  # edits a session can take back
MAX_STEP_CHARACTERS = 4_000_000  # of all the texts it can go back to
BOM_BY_ENCODING = {encoding: mark for mark, encoding in BYTE_ORDER_MARKS}


@dataclass(frozen=True, eq=False)  # two edits may be alike, and are still two
class UndoStep:
    """One edit that can be taken back."""

    path: str
    before: Document | None
    """None when the edit made the file."""
    after: str
    """Digest of the file after the edit."""
    file_name: str = field(default_factory=lambda: f"{time.time_ns():020}-{os.getpid()}.json")
    """Of its file in the journal; names sort as the edits came."""


class UndoJournal:
    """The steps of one session as files in a folder that only its owner reads, so that a restart does not lose them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load_steps(self) -> list[UndoStep]:
        """All steps, in their order; a file that cannot be read is no step."""
        steps: list[UndoStep] = []
        for file in sorted(self._folder.glob("*.json")):
            with suppress(OSError, ValueError, TypeError, KeyError):
                told = json.loads(file.read_bytes())
                before = told["before"] and Document(
                    told["before"]["text"], told["before"]["encoding"], bytes.fromhex(told["before"]["mark"])
                )
                steps.append(UndoStep(told["path"], before, told["after"], file.name))
        return steps

    def add_step(self, step: UndoStep) -> None:
        before = step.before and {
            "text": step.before.text,
            "encoding": step.before.encoding,
            "mark": step.before.bom.hex(),
        }
        with suppress(OSError):  # a full disk: the edit is made, and can be taken back until the restart
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = os.open(self._folder / step.file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(opened, "w", encoding="utf-8", errors="surrogatepass") as file:
                json.dump({"path": step.path, "before": before, "after": step.after}, file)

    def remove_step(self, step: UndoStep) -> None:
        with suppress(OSError):
            (self._folder / step.file_name).unlink()


def parse_changes(changes: Iterable[Mapping[str, Any]]) -> list[UndoStep]:
    """The edits that results told of as `crow/changes`, but for those taken back, and those whose text is not whole."""
    kept: list[Mapping[str, Any]] = []
    for change in changes:
        last = next((other for other in reversed(kept) if other["path"] == change["path"]), None)
        if last and (last["before"], last["after"]) == (change["after"], change["before"]):
            kept.remove(last)
        else:
            kept.append(change)
    steps: list[UndoStep] = []
    for change in kept[-MAX_STEPS:]:
        with suppress(LookupError, UnicodeEncodeError):  # a log that was tampered with
            before = None if change["old"] is None else _to_document(change)
            if change["after"] and (before and before.digest) == change["before"]:
                steps.append(UndoStep(change["path"], before, change["after"]))
    return steps


def _to_document(change: Mapping[str, Any]) -> Document:
    encoding = change.get("encoding", "utf-8")
    return Document(change["old"], encoding, BOM_BY_ENCODING[encoding] if change.get("mark") else b"")


class EditHistory:
    """What one session has seen and done. Calls on several files use it from several threads."""

    def __init__(self, journal: UndoJournal | None, steps: Iterable[UndoStep]) -> None:
        """`journal` is where steps are kept, `steps` what is known of them."""
        self._lock = Lock()
        self._seen: OrderedDict[str, str] = OrderedDict()
        self._journal = journal
        self._steps = deque(steps)

    def record_seen(self, path: str, digest: str) -> None:
        with self._lock:
            self._seen[path] = digest
            self._seen.move_to_end(path)
            if len(self._seen) > MAX_SEEN_FILES:
                self._seen.popitem(last=False)

    def get_seen(self, path: str) -> str | None:
        """Digest of what the session saw last."""
        with self._lock:
            return self._seen.get(path)

    def forget_seen(self, path: str) -> None:
        with self._lock:
            self._seen.pop(path, None)

    def record_step(self, step: UndoStep) -> None:
        if step.before and len(step.before.text) > MAX_STEP_CHARACTERS:
            return  # all others would have to give way to it
        with self._lock:
            self._steps.append(step)
            if self._journal:
                self._journal.add_step(step)
            while len(self._steps) > MAX_STEPS or self._count_characters() > MAX_STEP_CHARACTERS:
                self._discard(self._steps[0])

    def find_last_step(self, path: str) -> UndoStep | None:
        with self._lock:
            return next((step for step in reversed(self._steps) if step.path == path), None)

    def remove_step(self, step: UndoStep) -> None:
        with self._lock, suppress(ValueError):  # so old that it was dropped meanwhile
            self._discard(step)

    def _discard(self, step: UndoStep) -> None:
        self._steps.remove(step)
        if self._journal:
            self._journal.remove_step(step)

    def _count_characters(self) -> int:
        return sum(len(step.before.text) for step in self._steps if step.before)


class EditHistories:
    """Those of all sessions; the one used longest ago goes when there are too many."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` keeps the way back beyond the end of the process; None: it ends with it."""
        self._folder = folder
        self._histories: OrderedDict[str, EditHistory] = OrderedDict()
        self._lock = Lock()

    def get(self, session: str, changes: Callable[[], Iterable[Mapping[str, Any]]] | None = None) -> EditHistory:
        """That of a session; `changes` tells what it did before, where not the journal but the host knows it."""
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
