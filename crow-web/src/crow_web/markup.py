"""Texts of models, tools and files as HTML. Whatever is in them, nothing of it becomes markup that runs or loads."""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import nh3
from crow_persistence.export.html import replace_invalid
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from markupsafe import Markup, escape
from pygments import formatters, highlight, lexers
from rich.color import ColorSystem
from rich.style import Style
from rich.text import Text

MAX_COLOURED = 200_000
"""Characters of a block of code above which it is shown without colours."""
TAGS = {
    *("p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em"),
    *("strong", "s", "table", "thead", "tbody", "tr", "th", "td", "a", "span"),
}
OTHER_SEQUENCES = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-9;?]*[A-Za-ln-z]")
"""Escape sequences other than colours: links, titles, movements."""
FORMATTERS: Any = formatters
LEXERS: Any = lexers
"""Pygments, whose types are not complete."""


def to_markdown(text: str) -> Markup:
    """Render Markdown. HTML in it is shown as text; an image becomes a link, as nothing is loaded from elsewhere."""
    return Markup(make_cleaner().clean(make_parser().render(replace_invalid(text))))


@cache
def make_parser() -> MarkdownIt:
    parser = MarkdownIt("js-default", {"html": False, "linkify": False, "highlight": colour})
    parser.add_render_rule("image", show_image_as_link)
    return parser


@cache
def make_cleaner() -> nh3.Cleaner:
    return nh3.Cleaner(
        tags=TAGS,
        attributes={"a": {"href"}, "span": {"class"}, "code": {"class"}, "ol": {"start"}},
        url_schemes={"http", "https", "mailto"},
        link_rel="noopener noreferrer nofollow",
    )


def show_image_as_link(
    renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: dict[str, Any]
) -> str:
    token = tokens[index]
    address = str(token.attrs.get("src", ""))
    return f'<a href="{escape(address)}">{escape(token.content or address)}</a>'


def colour(text: str, language: str, attributes: str = "") -> str:
    """Return code as HTML with a class for each kind of word."""
    if language.lower() in list_languages() and len(text) <= MAX_COLOURED:
        return str(highlight(text, LEXERS.get_lexer_by_name(language, stripnl=False), make_formatter()))
    return str(escape(text))


@cache
def list_languages() -> frozenset[str]:
    """Return the names of languages that Pygments itself colours.

    For another name, such as half of one in a stream, it would look through all installed packages each time.
    """
    return frozenset(alias for _, aliases, *_ in LEXERS.get_all_lexers(plugins=False) for alias in aliases)


@cache
def make_formatter(style: str = "default") -> Any:
    return FORMATTERS.get_formatter_by_name("html", nowrap=True, classprefix="k-", style=style)


def to_json(value: Any) -> Markup:
    """Return a value as indented and coloured JSON."""
    return Markup(colour(replace_invalid(json.dumps(value, indent=2, ensure_ascii=False)), "json"))


def to_arguments(text: str) -> Markup:
    """Return the arguments of a tool call as indented and coloured JSON; unchanged, if they are not JSON."""
    try:
        return to_json(json.loads(text))
    except ValueError:
        return escape(replace_invalid(text))


def colour_json(text: str) -> Markup:
    """Return JSON with colours."""
    return Markup(colour(replace_invalid(text), "json"))


def to_output(text: str) -> Markup:
    """Return the output of a command, with the colours that its escape sequences name."""
    if "\x1b" not in text:
        return escape(replace_invalid(text))
    coloured = Text.from_ansi(replace_invalid(OTHER_SEQUENCES.sub("", text)))
    plain, pieces, at = coloured.plain, list[str](), 0
    for span in sorted(coloured.spans, key=lambda span: (span.start, span.end)):
        names = list_classes(span.style) if isinstance(span.style, Style) else ""
        if span.start >= at and names:
            inside = escape(plain[span.start : span.end])
            pieces += [escape(plain[at : span.start]), Markup('<span class="{}">{}</span>').format(names, inside)]
            at = span.end
    return Markup("").join([*pieces, escape(plain[at:])])


def list_classes(style: Style) -> str:
    """Return the classes of a style: one of the 16 colours that terminals name, bold, dim."""
    color = style.color.downgrade(ColorSystem.STANDARD).number if style.color else None
    names = [f"a{color % 8}"] if color is not None else []
    return " ".join(names + ["bold"] * bool(style.bold) + ["soft"] * bool(style.dim))


def to_diff(diff: str) -> Markup:
    """Return the lines of a unified diff, each with a class for its kind, without the two that name the file."""
    kinds = {"+": "added", "-": "removed", "@": "place"}
    rows = (
        Markup('<span class="{}">{}</span>').format(kinds.get(line[:1], "same"), line or " ")
        for line in replace_invalid(diff).splitlines()[2:]
    )
    return Markup("").join(rows)


def to_link(address: str) -> Markup:
    """Return a link to an address of the web; the address alone if it is another one."""
    if not address.lower().startswith(("https://", "http://")):
        return escape(address)
    return Markup('<a href="{0}" target="_blank" rel="noopener noreferrer nofollow">{0}</a>').format(address)


def make_code_style() -> str:
    """Return the style sheet of coloured code, for light and dark pages."""
    light, dark = map(list_styles, ("default", "github-dark"))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def list_styles(name: str) -> str:
    """Return the rules of a style for the kinds of words, without those for the whole block."""
    rules = str(make_formatter(name).get_style_defs("pre")).splitlines()
    return "\n".join(rule for rule in rules if rule.startswith("pre ."))
