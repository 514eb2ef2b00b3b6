"""The notes on a repository, in a Markdown file that a person can read and edit.

All work trees of a repository share one file; a folder outside of a repository has one of its own. Each note is a line
that ends with the session that it came from and the date.
"""

import hashlib
import os
import re
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from crow_core.masking import MASK, mask
from crow_core.redaction import holds_secret
from crow_core.text import show_invisible, to_line
from crow_system.files import lock_folder, write_atomically
from crow_system.repository import find_common_folder

PAGE = 4_000
"""Characters that all notes may have together."""
BY_HAND = "by hand"
HEADING = """# Notes on {}

<!-- crow reads these notes at the start of each session in this repository. Each line is a note. -->

"""
LINE = re.compile(r"(?P<text>.+?)(?: \*\((?P<source>session \w+|by hand), (?P<day>\d{4}-\d\d-\d\d)\)\*)?")
MARKS = re.compile(r"<!--.*?-->|^#[^\n]*", re.MULTILINE | re.DOTALL)


class NoteRefused(Exception):
    """A note cannot be kept. The text is a sentence for a person or the model."""


@dataclass(frozen=True)
class RepositoryNote:
    """A note on a repository."""

    text: str
    """One line."""
    source: str
    """`session ID`, or BY_HAND."""
    day: str
    """The date in ISO format."""

    def __str__(self) -> str:
        return f"- {self.text} *({self.source}, {self.day})*"


def make_note(text: str, source: str = BY_HAND) -> RepositoryNote:
    """Make a note of today, on one line and without invisible characters."""
    line = " ".join(show_invisible(to_line(text)).split()).replace("<!--", "<! --")
    return RepositoryNote(line, source, date.today().isoformat())


def parse_notes(text: str) -> list[RepositoryNote]:
    """Parse the notes of a file: all lines but headings and comments. One without a source was written by hand."""
    notes: list[RepositoryNote] = []
    for line in MARKS.sub("", text).splitlines():
        if found := LINE.fullmatch(re.sub(r"^\s*[-*] ", "", line).strip()):
            made = make_note(found["text"], found["source"] or BY_HAND)
            notes.append(RepositoryNote(made.text, made.source, found["day"] or made.day))
    return notes


class RepositoryMemory:
    """The notes on the repository that a folder belongs to. Several processes may change them at the same time."""

    def __init__(self, folder: Path, cwd: str) -> None:
        """`folder` has the files of all repositories."""
        common = find_common_folder(cwd) or os.path.realpath(cwd)
        self.repository = os.path.dirname(common) if os.path.basename(common) == ".git" else common
        name = re.sub(r"[^\w.-]", "_", os.path.basename(self.repository))[:60]
        self.file = folder / f"{name}-{hashlib.sha256(os.fsencode(common)).hexdigest()[:8]}.md"

    def read(self) -> list[RepositoryNote]:
        """Read the notes. Raises NoteRefused."""
        try:
            return parse_notes(self.file.read_text("utf-8-sig", "replace"))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise NoteRefused(f"{self.file} cannot be read ({error.strerror}).") from error

    def to_text(self, notes: Sequence[RepositoryNote]) -> str:
        """Convert notes to the text of the file."""
        return HEADING.format(to_line(self.repository)) + "".join(f"{note}\n" for note in notes)

    def add(self, note: RepositoryNote, secrets: Collection[str] = ()) -> None:
        """Add a note; one of the same words is replaced. Raises NoteRefused."""
        with self.change() as notes:
            notes[:] = add_note(notes, note, secrets)

    def forget(self, unwanted: Collection[RepositoryNote]) -> None:
        """Remove notes. Raises NoteRefused."""
        with self.change() as notes:
            notes[:] = [note for note in notes if note not in unwanted]

    def merge(
        self, before: Sequence[RepositoryNote], edited: Sequence[RepositoryNote], secrets: Collection[str]
    ) -> None:
        """Write edited notes; what others have added or removed since `before` stays so. Raises NoteRefused."""
        with self.change() as notes:
            removed, added = {*before} - {*notes}, [note for note in notes if note not in before]
            notes[:] = [note for note in edited if note not in removed] + added
            check_notes(notes, secrets)

    @contextmanager
    def change(self) -> Generator[list[RepositoryNote]]:
        """Give the notes to the block, which changes them; then write them. Only one process does so at a time."""
        try:
            with lock_folder(self.file.parent):
                notes = self.read()
                yield notes
                write_atomically(self.file, self.to_text(notes).encode())
        except OSError as error:
            raise NoteRefused(f"{self.file} cannot be written ({error.strerror}).") from error


def add_note(
    notes: Sequence[RepositoryNote], note: RepositoryNote, secrets: Collection[str] = ()
) -> list[RepositoryNote]:
    """Return notes with one more, in place of one of the same words. Raises NoteRefused."""
    if not note.text:
        raise NoteRefused("A note without words is not kept.")
    added = [*(one for one in notes if one.text != note.text), note]
    check_notes(added, secrets)
    return added


def check_notes(notes: Sequence[RepositoryNote], secrets: Collection[str]) -> None:
    """Raise NoteRefused if notes hold a secret, or are longer than a page."""
    for note in notes:
        if MASK in mask(note.text, secrets) or holds_secret(note.text):
            raise NoteRefused(
                f"Note {notes.index(note) + 1} holds what looks like a secret, which is never kept. Leave it out."
            )
    if (length := sum(len(note.text) for note in notes)) > PAGE:
        raise NoteRefused(
            f"The notes would have {length:,} characters, and a page is {PAGE:,}. Remove some: crow memory forget."
        )
