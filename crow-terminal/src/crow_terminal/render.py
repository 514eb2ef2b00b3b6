"""Render Markdown and code as lines with ANSI styles, with Rich and Pygments, which are loaded with this module."""

import io
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import ClassVar

from markdown_it import MarkdownIt
from pygments.lexers import find_lexer_class_by_name
from pygments.util import ClassNotFound
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, HorizontalRule, ListItem, Markdown, MarkdownElement, TableElement
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme as RichTheme

from crow_terminal.markdown import CodeLines, Prose
from crow_terminal.printable_text import escape, find_breaks, hang
from crow_terminal.theme import Theme

PARSER = (
    MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table").disable(["reference", "image"])
)
"""Keeps HTML, addresses of images and definitions of references as text, so that nothing is left out."""
PADDING = re.compile(r"[ \t]+((?:\x1b\[0?m)*)$")
CODE_INDENT = 2
MAX_HIGHLIGHTED = 2_000
"""Characters of a line of code above which it has no colours."""

STYLES = {
    "markdown.h1": "bold underline",
    "markdown.h2": "bold",
    "markdown.h3": "bold",
    "markdown.h4": "bold dim",
    "markdown.h5": "dim",
    "markdown.h6": "dim",
    "markdown.item.bullet": "",
    "markdown.item.number": "",
    "markdown.hr": "dim",
    "markdown.block_quote": "dim",
    "markdown.link": "",
    "markdown.link_url": "dim underline",
    "markdown.table.border": "dim",
    "markdown.table.header": "bold",
}


class PlainHeading(Heading):
    """A heading at the left margin, without a frame."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class PlainCode(CodeBlock):
    """An indented code block, without a background."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in str(self.text).rstrip("\n").split("\n"):
            yield Text(" " * CODE_INDENT + line, overflow="fold")


class PlainRule(HorizontalRule):
    """A short line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("─" * min(options.max_width, 12), style="markdown.hr")


class PlainItem(ListItem):
    """A list item, indented as in its source."""

    def render_bullet(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.render_marked("• ", console, options)

    def render_number(self, console: Console, options: ConsoleOptions, number: int, last_number: int) -> RenderResult:
        yield from self.render_marked(f"{number}. ", console, options)

    def render_marked(self, mark: str, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the item behind a mark."""
        inner = options.update(width=max(options.max_width - len(mark), 4))
        lines = console.render_lines(self.elements, inner, style=self.style, pad=False)
        for n, line in enumerate(lines or [[]]):
            yield Segment(" " * len(mark) if n else mark)
            yield from line
            yield Segment.line()


class PlainTable(TableElement):
    """A table with one line, below its head."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            if isinstance(table, Table):
                table.box, table.show_edge = SIMPLE_HEAD, False
                for column in table.columns:
                    column.overflow = "fold"
            yield table


class AnswerMarkdown(Markdown):
    """Markdown of an answer."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": PlainHeading,
        "code_block": PlainCode,
        "fence": PlainCode,
        "hr": PlainRule,
        "list_item_open": PlainItem,
        "table_open": PlainTable,
    }

    def __init__(self, markup: str) -> None:
        # Not Rich's own: it makes a parser for each text, which takes longer than the rest.
        self.markup, self.parsed = markup, PARSER.parse(markup)
        self.hyperlinks, self.justify, self.style = False, "left", "none"
        self.code_theme = self.inline_code_theme = "default"
        self.inline_code_lexer = None


class Renderer:
    """Renders blocks in a theme."""

    def __init__(self, theme: Theme) -> None:
        self.theme = theme
        styles = STYLES | {"markdown.code": to_rich_style(theme.accent)}
        self._console = Console(
            file=io.StringIO(),
            force_terminal=True,
            color_system="256",
            legacy_windows=False,
            theme=RichTheme(styles),
            highlight=False,
            emoji=False,
        )

    def render(self, block: Prose | CodeLines, width: int) -> list[str]:
        indent = " " * min(block.indent, width // 2)
        if isinstance(block, CodeLines):
            margin = indent + " " * CODE_INDENT
            lines = [margin + line for line in self._highlight(block, width - len(margin))]
        else:
            style = Style(dim=True, italic=True) if block.thought else None
            markdown = AnswerMarkdown(escape(block.text))
            console = self._console
            options = console.options.update(width=max(width - len(indent), 8), height=None)
            rows = console.render_lines(markdown, options, style=style, pad=False)
            while rows and is_blank(rows[-1]):
                rows.pop()
            while rows and is_blank(rows[0]):
                del rows[0]
            lines = [indent + self._to_ansi(row) for row in rows]
        return [PADDING.sub(r"\1", line) for line in lines]

    def _to_ansi(self, row: Iterable[Segment]) -> str:
        """Convert segments to text with escape sequences."""
        system = self._console._color_system  # pyright: ignore[reportPrivateUsage] # Rich has no public name for it
        return "".join(
            style.render(text, color_system=system) if style and self.theme.code else text for text, style, _ in row
        )

    def _highlight(self, block: CodeLines, width: int) -> list[str]:
        """Return the rows of a code block in colours, which depend on the lines before."""
        lines = [escape(line) for line in block.lines]
        if block.thought or not self.theme.code or not block.language or not has_lexer(block.language):
            rows = [row for line in lines for row in hang(line, width)]
            return [self.theme.style("thought", row) for row in rows] if block.thought else rows
        if max(map(len, lines)) > MAX_HIGHLIGHTED:
            return [row for line in lines for row in hang(line, width)]
        before = [escape(line) for line in block.before]
        syntax = Syntax("", block.language, theme=self.theme.code)
        text = syntax.highlight("\n".join([*before, *lines]))
        coloured = text.split("\n", allow_blank=True)[len(before) : len(before) + len(lines)]
        if [line.plain for line in coloured] != lines:
            return [row for line in lines for row in hang(line, width)]
        return [self._to_ansi(row.render(self._console)) for line in coloured for row in hang_text(line, width)]


def hang_text(line: Text, width: int) -> list[Text]:
    """Break a line of code in colours like `hang`."""
    plain = line.plain
    indent = min(len(plain) - len(plain.lstrip(" ")), width // 2)
    if not (breaks := find_breaks(plain, width, width - indent)):
        return [line]
    first, *others = line.divide(breaks)
    return [first, *(Text(" " * indent) + piece for piece in others)]


def is_blank(row: list[Segment]) -> bool:
    """Return whether a row shows nothing."""
    return not any(segment.text.strip() for segment in row)


@lru_cache(64)
def has_lexer(language: str) -> bool:
    """Return whether Pygments knows a language."""
    try:
        return bool(find_lexer_class_by_name(language))
    except ClassNotFound:
        return False


def to_rich_style(codes: str) -> Style:
    """Convert parameters of SGR to a style of Rich."""
    return Text.from_ansi(f"\x1b[{codes}mx").get_style_at_offset(Console(), 0) if codes else Style()
