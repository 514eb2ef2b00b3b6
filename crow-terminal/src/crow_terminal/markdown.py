"""Split Markdown that arrives in pieces into blocks that cannot change any more, and an open rest.

Each line is looked at once, when it is complete. A block is as small as it can be rendered alone: a paragraph, a list
item, a heading, some lines of code. A table is a block, as its columns depend on all rows.
"""

import re

from msgspec import Struct

FENCE = re.compile(r"(`{3,}|~{3,})\s*([^\s`]*)[^`]*$")
ITEM = re.compile(r"([-*+]|\d{1,9}[.)])([ \t]+|$)")
HEADING = re.compile(r"#{1,6}([ \t]|$)")
RULE = re.compile(r"([-*_])[ \t]*(?:\1[ \t]*){2,}$")
UNDERLINE = re.compile(r"(=+|-+)[ \t]*$")
TABLE_RULE = re.compile(r"(?=.*-)(?=.*[|:])\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$")

MAX_LINES = 40
"""Lines of a paragraph, list item or quote after which it is split."""
MAX_ROWS = 200
"""Rows of a table after which a new one begins, with the same head."""
MAX_LINE = 8_000
"""Characters of a line after which it is split."""
OPEN_LENGTH = 1_500
"""Characters of a long paragraph that are shown while it is open: the last ones."""
CONTEXT_LINES = 80
"""Lines of code before a piece that its colours may depend on."""


class Prose(Struct, frozen=True):
    """Some Markdown that can be rendered alone."""

    text: str
    indent: int = 0
    """Columns to indent it by, as it belongs to a list item."""
    joined: bool = False
    """True if it follows the block before without an empty line."""
    thought: bool = False
    """True if it is a thought of the model, not a part of its answer."""


class CodeLines(Struct, frozen=True):
    """Some lines of a code block."""

    lines: tuple[str, ...]
    language: str = ""
    before: tuple[str, ...] = ()
    """The last lines of the same code block before these."""
    indent: int = 0
    joined: bool = False
    thought: bool = False


class MarkdownSplitter:
    """Splits the Markdown of one message."""

    def __init__(self, *, thought: bool = False) -> None:
        self._thought = thought
        self._partial: list[str] = []
        """The pieces of the last line, which has no end yet."""
        self._partial_length = 0
        self._lines: list[str] = []
        """The lines of the open block."""
        self._kind = ""
        """The kind of the open block: `text`, `code`, `item`, `quote`, `table`; empty if there is none."""
        self._indent = 0
        self._joined = False
        """True if no empty line precedes the open block, or else the next one."""
        self._items: list[int] = []
        """The columns at which the contents of the open list items begin, outermost first."""
        self._fence = ""
        """The marks that opened the code block; empty outside of one."""
        self._fence_column = 0
        self._language = ""
        self._code: list[str] = []
        """Lines of code that are not returned yet."""
        self._code_before: tuple[str, ...] = ()
        self._continues_table = False
        """True if the head of the open table was returned already, with its first rows."""
        self._done: list[Prose | CodeLines] = []

    def feed(self, text: str) -> list[Prose | CodeLines]:
        """Take in a piece of text and return the blocks that are finished."""
        first, *others = text.split("\n")
        self._extend_line(first)
        for piece in others:
            self._end_line()
            self._extend_line(piece)
        return self._take_done()

    def end(self) -> list[Prose | CodeLines]:
        """Return the blocks of the rest, as no more text comes, and begin anew."""
        if self._partial_length:
            self._end_line()
        self._close()
        done = self._take_done()
        self.__init__(thought=self._thought)
        return done

    @property
    def open(self) -> Prose | CodeLines | None:
        """The end of the text, which may still change."""
        partial = "".join(self._partial)[-MAX_LINE:]
        if self._fence:
            return self._make_code([self._dedent(partial)]) if partial else None
        lines = self._lines
        if self._kind == "table" and len(lines) > 12:
            lines = [*lines[:2], *lines[-10:]]
        elif self._kind in ("", "text") and len(partial) > OPEN_LENGTH:
            partial = partial[partial.find(" ", len(partial) - OPEN_LENGTH) + 1 :]
            lines = []
        if partial.strip():
            lines = [*lines, partial.rstrip() if self._kind == "code" else partial.strip()]
        return self._make_prose(lines) if lines else None

    def _take_done(self) -> list[Prose | CodeLines]:
        self._flush_code()
        done, self._done = self._done, []
        return done

    def _extend_line(self, piece: str) -> None:
        if piece:
            self._partial.append(piece)
            self._partial_length += len(piece)
        while self._partial_length > MAX_LINE:
            text = "".join(self._partial)
            at = text.rfind(" ", MAX_LINE // 2, MAX_LINE) + 1 or MAX_LINE
            self._partial = [text[:at]]
            self._end_line()
            self._close()
            self._partial, self._partial_length = [text[at:]], len(text) - at

    def _end_line(self) -> None:
        line = "".join(self._partial).removesuffix("\r")
        self._partial, self._partial_length = [], 0
        if self._fence:
            self._add_code(line)
        else:
            self._add_line(line)

    def _dedent(self, line: str) -> str:
        """Remove the indentation of the code block from one of its lines."""
        return line[min(len(line) - len(line.lstrip(" ")), self._fence_column) :]

    def _add_code(self, line: str) -> None:
        text = self._dedent(line)
        marks = text.strip()
        if marks.startswith(self._fence) and not marks.strip(self._fence[0]) and not text.startswith("    "):
            self._flush_code()
            self._fence = ""
            self._joined = False
        else:
            self._code.append(text)

    def _open_fence(self, fence: re.Match[str], column: int) -> None:
        self._close()
        self._fence, self._language, self._fence_column = fence[1], fence[2], column
        self._indent = self._items[-1] if self._items else 0
        self._code_before = ()

    def _flush_code(self) -> None:
        if self._code:
            self._done.append(self._make_code(self._code))
            self._code_before = (*self._code_before, *self._code)[-CONTEXT_LINES:]
            self._code = []
            self._joined = True

    def _make_code(self, lines: list[str]) -> CodeLines:
        return CodeLines(tuple(lines), self._language, self._code_before, self._indent, self._joined, self._thought)

    def _add_line(self, line: str) -> None:
        text = line.lstrip(" \t")
        leading = len(line[: len(line) - len(text)].expandtabs(4))
        if not text:
            self._close()
            self._joined = False
        elif self._kind == "code" and leading >= self._indent + 4:
            self._lines.append(" " * (leading - self._indent) + text)
        elif not self._lines and leading >= self._find_margin(leading) + 4:
            self._start("code", " " * (leading - self._find_margin(leading)) + text, leading)
        elif fence := FENCE.match(text):
            self._leave_items(leading)
            self._open_fence(fence, leading)
        elif self._kind == "text" and len(text.rstrip()) > 1 and UNDERLINE.match(text):
            self._lines.append(text)
            self._close()
            self._joined = False
        elif HEADING.match(text) or RULE.match(text):
            self._joined = False
            self._start("text", text, leading)
            self._close()
            self._joined = False
        elif (item := ITEM.match(text)) and self._may_begin(item):
            self._start_item(item, text, leading)
        elif text.startswith(">") and self._kind != "quote":
            self._start("quote", text, leading)
        elif self._kind in ("text", "item") and "|" in self._lines[-1] and TABLE_RULE.match(text):
            self._start_table(text)
        elif not self._lines:
            self._start("text", text, leading)
        else:
            self._lines.append(text)
        self._limit()

    def _find_margin(self, leading: int) -> int:
        """Return the column at which the contents begin of the list item that this column belongs to."""
        return max((column for column in self._items if column <= leading), default=0)

    def _leave_items(self, leading: int) -> None:
        """Leave the list items whose contents begin to the right of this column."""
        while self._items and leading < self._items[-1]:
            self._items.pop()

    def _may_begin(self, item: re.Match[str]) -> bool:
        """Return whether a line with the marks of a list item begins one, and does not continue a paragraph."""
        return self._kind != "text" or bool(self._items) or (bool(item[2]) and item[1] in ("-", "*", "+", "1.", "1)"))

    def _start(self, kind: str, line: str, leading: int) -> None:
        self._close()
        self._leave_items(leading)
        self._kind, self._lines, self._indent = kind, [line], self._items[-1] if self._items else 0

    def _start_item(self, item: re.Match[str], text: str, leading: int) -> None:
        self._start("item", text, leading)
        width = len(item[0]) if item[2] and len(item[2]) <= 4 else len(item[1]) + 1
        self._items.append(max(leading, self._indent) + width)
        if fence := FENCE.match(text[len(item[0]) :]):
            self._lines = [item[1]]
            self._open_fence(fence, self._items[-1])

    def _start_table(self, rule: str) -> None:
        *others, head = self._lines
        self._lines, self._kind = others, "text"
        self._close()
        self._lines, self._kind, self._continues_table = [head, rule], "table", False

    def _limit(self) -> None:
        """Split a block that has become long."""
        if self._kind == "table" and len(self._lines) >= MAX_ROWS + 2:
            head = self._lines[:2]
            self._close()
            self._lines, self._kind, self._continues_table = head, "table", True
        elif self._kind != "table" and len(self._lines) >= MAX_LINES:
            self._close()

    def _close(self) -> None:
        """Finish the open block."""
        if len(self._lines) > (2 if self._kind == "table" and self._continues_table else 0):
            self._done.append(self._make_prose(self._lines))
            self._joined = True
        self._lines, self._kind, self._continues_table = [], "", False

    def _make_prose(self, lines: list[str]) -> Prose:
        return Prose("\n".join(lines), self._indent if self._lines else 0, self._joined, self._thought)
