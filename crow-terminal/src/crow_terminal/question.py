"""A question for permission: what it is about in words, its answers, and what of it is shown. Pure."""

import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from crow_core.acp.schema import RequestPermissionRequest, ToolCall
from crow_core.text import show_invisible
from crow_system.shortening import format_count
from msgspec import Struct
from msgspec.structs import replace

from crow_terminal.blocks import AnsweredQuestion, StyledLine, find_diffs, find_output
from crow_terminal.dialogs import Effects, Row
from crow_terminal.paint import compare
from crow_terminal.permission import Answer, clean, list_answers, show_path
from crow_terminal.printable_text import escape

SHORT = 3
"""Lines of a remark that comes first, as a warning; a longer one follows the command."""
VERBS = {"edit": "Edit", "delete": "Delete", "move": "Move", "read": "Read", "search": "Search", "fetch": "Fetch"}
"""The verb of the title by the kind of the tool call."""
DELETES = r"""(?mx) (?: ^ | [;&|({`] | \b(?:sudo|xargs|env|time|nohup|then|do|exec) ) [ \t]{0,20} (?: [\w./-]{0,200}/ )?
    (?: (?:rm|rmdir|unlink|shred|dd|wipefs|truncate|mkfs[\w.]{0,9}) (?=\s|$)
      | git [ \t]{1,20} (?: clean | restore | checkout [ \t]{1,20} -- | reset [ \t] (?:\S{1,99}[ \t]{1,9}){0,9} --hard
                          | push [ \t] [^\n]{0,200}? (?:--force|-f\b|--delete) | branch [ \t]{1,9} -D ) )
    | \b find [ \t] [^;|&\n]{0,300} [ \t] -delete \b"""
"""Finds commands that delete, to mark the question, in linear time. Nothing else depends on it."""


class Question(Struct):
    """A question for permission that is shown."""

    title: str
    lines: Sequence[StyledLine]
    """Its subject, whole."""
    rows: Sequence[Row]
    lasting: Sequence[Row]
    """The answers of the second step."""
    choose: Callable[[Row, float], Effects]
    """Called with an answer and the time."""
    danger: str = ""
    """Why it deserves a second look; empty for no reason."""
    is_about_lasting: bool = False
    """True in the second step."""
    selected: int = 0
    start: int = 0
    """The number of its first line that changes a file."""
    top: int = -1
    """The first row of what it is about that is shown; -1 for that of the line `start`."""
    page: int = 1
    """The number of its rows on the screen."""
    height: int = 1
    """The number of its rows at the width of the screen."""
    width: int = 0
    folded: Sequence[tuple[int, StyledLine]] = ()
    """The rows at this width, each with the number of its line."""

    @property
    def shown_rows(self) -> Sequence[Row]:
        """The answers of the step that is shown."""
        return self.lasting if self.is_about_lasting else self.rows

    def find(self, letter: str) -> Row | None:
        """Return the row with this letter; `N` is `n` without a reason. None if there is none."""
        for row in self.shown_rows:
            if row.letter and row.letter == letter.lower():
                if letter == "N" and row.value:
                    return Row(row.value.name, value=Answer(row.value.id, row.value.name, row.value.allows))
                return row
        return None

    def can_answer(self, letters: str) -> bool:
        """Return whether a letter answers the step that is shown, or two letters both steps."""
        row = self.find(letters[0])
        if row is None or len(letters) == 1:
            return row is not None
        return row.value is None and letters[1:] in [one.letter for one in self.lasting]

    def move(self, delta: int) -> None:
        """Mark another answer."""
        self.selected = (self.selected + delta) % len(self.shown_rows) if self.shown_rows else 0

    def scroll(self, rows: int) -> None:
        """Show what is some rows below, or above."""
        self.top = max(0, min(max(0, self.top) + rows, self.height - self.page))

    def enter_step(self, *, lasting: bool) -> None:
        """Show the answers of the second step, or of the first."""
        self.is_about_lasting = lasting
        self.selected = 0 if lasting else next((n for n, row in enumerate(self.rows) if row.value is None), 0)

    def record(self, answer: str, text: str = "") -> AnsweredQuestion:
        """Make the block that is printed when it is answered; `text` is what the user wrote."""
        return AnsweredQuestion(self.title, tuple(self.lines), answer, escape(text))


def make_question(
    request: RequestPermissionRequest,
    call: ToolCall,
    folder: str,
    takes: Sequence[str],
    choose: Callable[[Row, float], Effects],
) -> Question:
    """Make the question for a request, which is about a tool call that is known from its updates as well."""
    rows, lasting = list_answers(request, folder, takes)
    text = find_output(replace(call, content=request.tool_call.content or []))  # not what it has printed so far
    title = describe_call(call, request, folder)
    remarks, given = list_remarks(text), list_input(call, title)
    has_run = bool(find_count(request))
    given_first = len(remarks) > SHORT or (has_run and len(given) <= SHORT)
    parts = [given, remarks] if given_first else [remarks, given]
    lines: list[StyledLine] = []
    for part in (*parts, list_changes(call, folder, skips_empty=has_run)):
        lines += [StyledLine(""), *part] if lines and part else part
    start = next((n for n, line in enumerate(lines, 1) if line.style in ("added", "removed")), 0)
    danger = find_danger(call, text)
    return Question(title, lines, rows, lasting, choose, danger, start=start if call.kind == "edit" and not text else 0)


def describe_call(call: ToolCall, request: RequestPermissionRequest, folder: str) -> str:
    """Describe in words what a tool call does, with paths from the folder."""
    paths = list_paths(call, folder)
    match call.kind:
        case "execute":
            ran = find_count(request)
            changed = ran or len(paths)
            files = format_count(changed, "file")
            if ran:
                return f"Apply what a command changed: {files}"
            return f"Run a command: it changes {files}" if changed and find_diffs(call) else "Run a command"
        case "fetch" if host := find_host(call.raw_input):
            return f"Fetch {host}"
        case kind if (verb := VERBS.get(str(kind))) and paths:
            new = all(not diff.old_text for diff in find_diffs(call)) and find_diffs(call)
            verb = "Write" if new else verb
            return f"{verb} {paths[0]}" if len(paths) == 1 else f"{verb} {len(paths)} files"
        case _:
            return clean(str(call.title or call.name or "a tool call"))


def find_count(request: RequestPermissionRequest) -> int:
    """Find how many files a command has changed, as crow says; 0 if it does not."""
    match request.tool_call.meta:
        case {"crow": {"changed": int(count)}}:
            return count
        case _:
            return 0


def find_host(arguments: Any) -> str:
    """Find the host of the address that is fetched; empty if there is none."""
    match arguments:
        case {"url": str(url)}:
            try:
                return clean(urlsplit(url).netloc)
            except ValueError:
                return ""
        case _:
            return ""


def list_paths(call: ToolCall, folder: str) -> list[str]:
    """List the paths that a tool call is about: those of its changes, or else those that it names."""
    paths = [diff.path for diff in find_diffs(call)]
    if not paths and call.kind != "execute" and isinstance(call.locations, list):
        paths = [location.path for location in call.locations]
    return [*dict.fromkeys(show_path(path, folder) for path in paths)]


def split(text: str, style: str = "plain") -> list[StyledLine]:
    return [StyledLine(line, style) for line in show_invisible(escape(text)).split("\n")]


def list_remarks(text: str) -> list[StyledLine]:
    """List what the agent says about the question; a short one is a warning."""
    lines = split(text.strip("\n")) if text.strip() else []
    return [StyledLine(line.text, "warning") for line in lines] if len(lines) <= SHORT else lines


def list_input(call: ToolCall, title: str) -> list[StyledLine]:
    """List what a tool is given: the command, or the arguments by name if no changes tell them."""
    arguments: Any = call.raw_input
    name = str(call.title or call.name or "")
    match arguments:
        case {"command": str(command)} if call.kind == "execute" and command.strip():
            return split(command.strip("\n"))
        case {"command": [*words]} if call.kind == "execute":
            return split(" ".join(map(str, words)))
        case {**named} if named and not find_diffs(call):
            is_said = clean(name) == title or any(isinstance(value, str) and value in name for value in named.values())
            lines = [] if is_said else split(name)
            for key, value in named.items():
                first, *rest = split(value if isinstance(value, str) else repr(value))
                lines += [
                    StyledLine(f"{clean(str(key))}: {first.text}"),
                    *(StyledLine(f"  {one.text}") for one in rest),
                ]
            return lines
        case _:
            return split(name) if not find_diffs(call) and (clean(name) != title or call.kind == "execute") else []


def list_changes(call: ToolCall, folder: str, *, skips_empty: bool = False) -> list[StyledLine]:
    """List the edits to files as lines with their numbers; `skips_empty` leaves out files without lines."""
    lines: list[StyledLine] = []
    diffs = [diff for diff in find_diffs(call) if diff.old_text or diff.new_text or not skips_empty]
    for diff in diffs:
        if len(diffs) > 1 or call.kind == "execute":
            lines.append(StyledLine(show_path(diff.path, folder), "prompt"))
        changes = list(compare(diff.old_text or "", diff.new_text))
        digits = len(str(max((number for _, number, _ in changes), default=0)))
        for mark, number, text in changes:
            style = {"+": "added", "-": "removed"}.get(mark, "dim")
            shown = show_invisible(escape(text))
            label = f"{str(number) if number else '':>{digits}} {mark} "
            lines.append(StyledLine(f"{label}{shown}".rstrip(), style, len(label)))
        if not changes:
            lines.append(StyledLine("an empty file", "dim"))
    return lines


def find_danger(call: ToolCall, remark: str) -> str:
    """Find why a question deserves a second look; empty for no reason."""
    match call.raw_input:
        case {"command": str(command)} if call.kind == "execute" and re.search(DELETES, command):
            return "deletes"
        case _ if call.kind == "delete":
            return "deletes"
        case _:
            pass
    if "⚠" in remark or (remark and call.kind == "edit"):
        return "look twice"
    return ""
