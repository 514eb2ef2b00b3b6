"""The commands of the tool `file_editor` on one file."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NotRequired, TypeVar

from anyio import from_thread
from mcp_types import ImageContent
from typing_extensions import TypedDict

from crow_mcp_server.files import disk, formats, office
from crow_mcp_server.files.disk import FileContent, ResolvedPath
from crow_mcp_server.files.document import Document, decode, reconcile
from crow_mcp_server.files.edit_history import EditHistory, UndoStep
from crow_mcp_server.files.edits import (
    DocumentEdit,
    TextReplacement,
    cut_line,
    find_changed_lines,
    insert_after,
    make_diff,
    number_lines,
    replace_text,
    replace_texts,
)
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.workspace import Files

T = TypeVar("T")
EditorCommand = Literal["view", "create", "str_replace", "insert", "undo_edit"]
MAX_VIEW_CHARACTERS = 30_000


class FileChange(TypedDict):
    path: str
    old: str | None
    """The text before, without a byte order mark; None for a file that did not exist."""
    new: str | None
    """The text after; None for a file that was removed."""
    before: str | None
    """SHA-256 of the file's bytes before, in hexadecimal."""
    after: str | None
    """SHA-256 of the file's bytes after, in hexadecimal."""
    encoding: NotRequired[str]
    """The Python codec that encodes `old`; present if the file was not UTF-8 without a byte order mark."""
    mark: NotRequired[bool]
    """True if the file began with a byte order mark; present with `encoding`."""


@dataclass(frozen=True)
class EditorAnswer:
    """The answer to a command: the text for the model, and data that a client can show."""

    text: str
    path: str
    line: int = 1
    """The first line that is shown or was changed, from 1."""
    changes: list[FileChange] = field(default_factory=list[FileChange])
    diff: str = ""
    """The changes as a unified diff."""
    image: ImageContent | None = None


@dataclass(frozen=True)
class LoadedFile:
    """A document and the state of its file on the disk."""

    document: Document
    stamp: tuple[int, ...] | None
    """See FileContent."""
    is_hidden: bool
    """True if the host shows files but not this one; such a file is written to the disk."""


@dataclass(frozen=True)
class EditorArguments:
    """The arguments of a tool call."""

    command: EditorCommand
    path: str
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    replace_all: bool = False
    edits: list[TextReplacement] | None = None
    insert_line: int | None = None
    view_range: list[int] | None = None


@dataclass(frozen=True)
class FileCommand:
    """One command on one file. It runs in a worker thread and calls the host's files in the event loop."""

    target: ResolvedPath
    files: Files | None
    history: EditHistory
    dry_run: bool

    def run(self, arguments: EditorArguments) -> EditorAnswer:
        """Run the command that the arguments name. Raises ToolRefusal and OSError."""
        match arguments.command:
            case "view":
                return self.view(arguments.view_range)
            case "create":
                text = arguments.new_str if arguments.file_text is None else arguments.file_text
                return self.create(_require("file_text", text, arguments))
            case "str_replace" if arguments.edits or (arguments.edits is not None and not arguments.old_str):
                if arguments.old_str:
                    raise ToolRefusal("Give either old_str and new_str, or edits. Nothing was changed.")
                return self.replace_texts(arguments.edits)
            case "str_replace":
                old = _require("old_str", arguments.old_str, arguments)
                return self.replace_text(TextReplacement(old, arguments.new_str or "", arguments.replace_all))
            case "insert":
                line = _require("insert_line", arguments.insert_line, arguments)
                text = arguments.file_text if arguments.new_str is None else arguments.new_str
                return self.insert(line, _require("new_str", text, arguments))
            case "undo_edit":
                return self.undo_edit()

    def view(self, view_range: list[int] | None) -> EditorAnswer:
        path = self.target.path
        try:
            content = self._read_content()
        except IsADirectoryError:
            entries = disk.list_folder(self.target)
            return EditorAnswer("\n".join([f"{path}/", *(f"  {entry}" for entry in entries)]), path)
        if kind := formats.detect_image_format(content.data):
            image = formats.to_image_block(path, content.data, kind)
            return EditorAnswer(f"{path} ({kind}, {len(content.data):,} bytes)", path, image=image)
        if content.data.startswith(b"%PDF-"):
            document, about = Document(from_thread.run(formats.read_pdf, path, content.data)), "the text of a PDF"
        elif office_kind := office.detect_kind(content.data):
            document = Document(from_thread.run(formats.read_office, path, content.data, office_kind))
            about = f"the text of {office.NAMES[office_kind]}"
        else:
            document = self._to_loaded_file(content).document
            about = _describe(document)
            if not self.dry_run:
                self.history.record_seen(path, document.digest)
            if path.endswith(".ipynb") and (cells := formats.format_notebook(document.text)):
                document, about = Document(cells), "cells of a notebook; the file itself is JSON"
        lines = document.lines
        first, last = _resolve_range(path, view_range, len(lines))
        numbered, end = _number_page(lines[first - 1 : last], first)
        rest = f"\n[lines {first}-{end} of {len(lines)}; view_range [{end + 1}, -1] shows more]" if end < last else ""
        return EditorAnswer(f"{path} ({about})\n{numbered}{rest}".rstrip("\n"), path, first)

    def create(self, file_text: str) -> EditorAnswer:
        path = self.target.path
        loaded = self._load()
        if loaded is None:
            if kind := office.get_named_kind(path):
                raise ToolRefusal(
                    f"This tool writes text, and a text is not {office.NAMES[kind]}. Nothing was written. "
                    f"Make {path} with a program in the terminal, such as Python with {office.WRITERS[kind]}."
                )
            after = Document(file_text)
            return self._apply(
                None, DocumentEdit(after, 1, 1), lambda edit: f"Created {path} ({_describe(edit.document)})."
            )
        before = loaded.document
        if before.text and self.history.get_seen(path) is None:
            raise ToolRefusal(
                f"{path} exists, and has not been viewed since this session was opened. Nothing was written. "
                "View it first; after that, create overwrites it and str_replace changes parts of it."
            )
        self._refuse_stale(before)
        text = file_text if "\r" in file_text else file_text.replace("\n", before.newline)
        after = before.with_text(text)
        if after == before:
            return EditorAnswer(f"{path} holds exactly this text already; nothing was written.", path)
        first, last = find_changed_lines(before, after)
        edit = DocumentEdit(after, first, last)
        return self._apply(loaded, edit, lambda edit: f"Overwrote {path} ({_describe(edit.document)}).")

    def replace_text(self, replacement: TextReplacement) -> EditorAnswer:
        loaded = self._load_existing()
        self._refuse_stale(loaded.document)
        return self._apply(loaded, replace_text(self.target.path, loaded.document, replacement), self._describe_edit)

    def replace_texts(self, replacements: list[TextReplacement]) -> EditorAnswer:
        loaded = self._load_existing()
        self._refuse_stale(loaded.document)
        return self._apply(loaded, replace_texts(self.target.path, loaded.document, replacements), self._describe_edit)

    def insert(self, line: int, text: str) -> EditorAnswer:
        loaded = self._load_existing()
        self._refuse_stale(loaded.document)
        return self._apply(loaded, insert_after(self.target.path, loaded.document, line, text), self._describe_edit)

    def _describe_edit(self, edit: DocumentEdit) -> str:
        return "\n".join(filter(None, [f"Edited {self.target.path}:", edit.note, edit.format_snippet()]))

    def undo_edit(self) -> EditorAnswer:
        path = self.target.path
        step = self.history.find_last_step(path)
        if step is None:
            raise ToolRefusal(f"There is no edit of {path} in this session to take back.")
        loaded = self._load_existing()
        if loaded.document.digest != step.after:
            raise ToolRefusal(
                f"{path} changed after your last edit, so taking that back would lose the change. "
                "Nothing was written. View the file and edit it instead."
            )
        if step.before is None:
            return self._remove(loaded, step)
        edit = DocumentEdit(step.before, *find_changed_lines(loaded.document, step.before))
        return self._apply(
            loaded, edit, lambda edit: f"Took back the last edit of {path}:\n{edit.format_snippet()}", undone=step
        )

    def _apply(
        self,
        before: LoadedFile | None,
        edit: DocumentEdit,
        describe: Callable[[DocumentEdit], str],
        *,
        undone: UndoStep | None = None,
    ) -> EditorAnswer:
        """Write an edit and record it, or the step that it undoes; `describe` gives the text of the answer."""
        path, old, note = self.target.path, before.document if before else None, ""
        data = self._encode(edit.document)
        if not self.dry_run:
            after = self._store(before, edit.document, data)
            self.history.record_seen(path, after.digest)
            if undone:
                self.history.remove_step(undone)
            else:
                self.history.record_step(UndoStep(path, old, after.digest))
            if after != edit.document:
                edit = DocumentEdit(after, *find_changed_lines(old or Document(""), after), edit.note)
                note = "\n[the editor changed the text when it saved it; this is how it is now]"
        return self._make_answer(describe(edit) + note, old, edit.document, edit.first)

    def _remove(self, loaded: LoadedFile, step: UndoStep) -> EditorAnswer:
        path = self.target.path
        if not self.dry_run:
            disk.remove_file(self.target)
            self.history.forget_seen(path)
            self.history.remove_step(step)
        return self._make_answer(f"Took back the creation of {path}: the file is gone.", loaded.document, None, 1)

    def _make_answer(self, text: str, old: Document | None, new: Document | None, line: int) -> EditorAnswer:
        path = self.target.path
        text = f"Dry run, nothing was written. {text}" if self.dry_run else text
        return EditorAnswer(text, path, line, [_to_file_change(path, old, new)], make_diff(old, new))

    def _refuse_stale(self, document: Document) -> None:
        if not self.history.is_known(self.target.path, document.digest):
            raise ToolRefusal(
                f"{self.target.path} changed since you last saw it in this session (by a command, the user or another "
                "program). Nothing was written. View it again, then repeat the edit if it still fits."
            )

    def _read_content(self) -> FileContent:
        if (content := self._find_content()) is None:
            near = disk.suggest_paths(self.target)
            hint = (
                f"Did you mean {' or '.join(near)}?" if near else "View its folder for the right name, or use create."
            )
            raise ToolRefusal(f"{self.target.path} does not exist. {hint}")
        return content

    def _load_existing(self) -> LoadedFile:
        return self._to_loaded_file(self._read_content())

    def _load(self) -> LoadedFile | None:
        """Load the file as the host shows it; return None when it does not exist."""
        content = self._find_content()
        return content and self._to_loaded_file(content)

    def _find_content(self) -> FileContent | None:
        """Read the file from the disk, or what the host has of a file that was never saved; None if neither has it."""
        if (content := disk.read_file(self.target)) is not None or not (self.files and self.files.reads):
            return content
        unsaved = None
        with suppress(FileNotFoundError):
            unsaved = from_thread.run(self.files.read_text, self.target.as_given)  # "" from some hosts for any path
        return FileContent(unsaved.encode(errors="replace"), None) if unsaved else None

    def _to_loaded_file(self, content: FileContent) -> LoadedFile:
        """Return a file with the text that the host shows of it. Raises ToolRefusal for a binary file."""
        document = decode(content.data)
        if document is None:
            if kind := office.detect_kind(content.data):
                raise ToolRefusal(
                    f"{self.target.path} is {office.NAMES[kind]}: this tool shows its text and cannot change it. "
                    "Nothing was changed. Change it with a program in the terminal, such as Python with "
                    f"{office.WRITERS[kind]}."
                )
            if sentence := office.describe_binary(self.target.path, content.data):
                raise ToolRefusal(sentence)
            raise ToolRefusal(
                f"{self.target.path} is a binary file of {len(content.data):,} bytes, which this tool does not open. "
                "Look into it in the terminal (file, xxd, strings)."
            )
        if not (self.files and self.files.reads and document.is_plain_utf8):
            return LoadedFile(document, content.stamp, is_hidden=False)
        shown = from_thread.run(self.files.read_text, self.target.as_given)
        if shown is None or (not shown and document.text):  # some hosts return "" for a file they cannot read
            return LoadedFile(document, content.stamp, is_hidden=True)
        return LoadedFile(reconcile(document, shown), content.stamp, is_hidden=False)

    def _encode(self, document: Document) -> bytes:
        try:
            data = document.encode()
        except UnicodeEncodeError as error:
            raise ToolRefusal(
                f"{self.target.path} is written in {document.encoding}, which has no "
                f"{error.object[error.start : error.end]!r}. Nothing was changed. "
                "Use characters it has, or convert the file first (iconv)."
            ) from None
        if decode(data) is None:
            raise ToolRefusal(f"With a NUL in it, {self.target.path} would not be text any more. Nothing was written.")
        return data

    def _store(self, before: LoadedFile | None, after: Document, data: bytes) -> Document:
        """Write the file and return its document afterwards; a host may format what it saves."""
        if not (self.files and self.files.writes and after.is_plain_utf8) or (before and before.is_hidden):
            disk.write_file(self.target, data, before.stamp if before else None)
            return after
        with disk.create_parents(self.target):
            if os.path.realpath(self.target.as_given) != self.target.path:
                raise ToolRefusal(f"{self.target.path} was replaced at this very moment. Nothing was written.")
            try:
                from_thread.run(self.files.write_text, self.target.as_given, after.text)
                written = self._load()
            except OSError as error:
                raise ToolRefusal(
                    f"It is not known whether {self.target.path} was written: {error}. "
                    "View it before you edit it again."
                ) from None
        if written is None:
            raise ToolRefusal(f"The editor reported that it wrote {self.target.path}, but there is no such file.")
        return written.document


def _to_file_change(path: str, old: Document | None, new: Document | None) -> FileChange:
    """Return a change with all that is needed to restore the file's bytes before it."""
    change = FileChange(
        path=path,
        old=old.text if old else None,
        new=new.text if new else None,
        before=old.digest if old else None,
        after=new.digest if new else None,
    )
    if old and not old.is_plain_utf8:
        change["encoding"], change["mark"] = old.encoding, bool(old.bom)
    return change


def _require(name: str, value: T | None, arguments: EditorArguments) -> T:
    if value is None:
        raise ToolRefusal(f"The command {arguments.command} needs {name}. Call it again with {name}.")
    return value


def _resolve_range(path: str, view_range: list[int] | None, count: int) -> tuple[int, int]:
    """Return the numbers of the first and last line to show. Raises ToolRefusal when they are not in the file."""
    if view_range is None:
        return 1, count
    if len(view_range) != 2:
        raise ToolRefusal("view_range has two numbers: the first and the last line, such as [1, 50].")
    first, last = view_range
    first = max(count + 1 + first, 1) if first < 0 else first
    last = count + 1 + last if last < 0 else min(last, count)
    if not 1 <= first <= last and (first, count) != (1, 0):
        raise ToolRefusal(
            f"view_range {view_range} does not fit {path}, whose lines are 1 to {count}. "
            "Negative numbers count from the end, which is -1."
        )
    return first, last


def _number_page(lines: list[str], first: int) -> tuple[str, int]:
    """Number the lines, at most MAX_VIEW_CHARACTERS of them; return the text and the number of its last line."""
    size = 0
    for count, line in enumerate(lines):
        size += len(cut_line(line)) + 8
        if size > MAX_VIEW_CHARACTERS and count:
            return number_lines(lines[:count], first), first + count - 1
    return number_lines(lines, first), first + len(lines) - 1


def _describe(document: Document) -> str:
    """Return the number of lines, and the file's line endings, encoding and byte order mark where they are unusual."""
    count = len(document.lines)
    size = "empty" if not document.text else f"{count} line{'' if count == 1 else 's'}"
    endings = ", CRLF" if document.newline == "\r\n" else ""
    encoding = "" if document.encoding == "utf-8" else f", {document.encoding}"
    return size + endings + encoding + (", byte order mark" if document.bom else "")
