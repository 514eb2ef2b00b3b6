"""Convert pages from the web, and files that are not text, to text for a model.

HTML, PDF, feeds and Office files are converted in a process of their own (`python -m crow_mcp_server.web.page_text`),
which is killed when a malicious page takes too much time or memory.
"""

# lxml and feedparser have no types:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import codecs
import json
import os
import re
import sys
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Literal

import anyio
from crow_system import limit_memory
from crow_system.shortening import leave_out

from crow_mcp_server.charset import guess_encoding
from crow_mcp_server.files import office

PageKind = Literal["html", "pdf", "feed", "json", "text", "image", "binary", "docx", "xlsx", "pptx"]

MAX_CHARACTERS = 5_000_000  # of a page's text
MAX_MEMORY_BYTES = 2 * 1024**3  # of address space for converting a page
MAX_JSON_CHARACTERS = 1_000_000  # longer JSON is not indented
MIN_MAIN_CHARACTERS = 200  # with less main text, the whole page is converted
SHORT_PAGE, SHORT_NOTE = 100, 500  # characters of a page without JavaScript, and of one that asks for it
SNIFFED_BYTES = 2048  # of the beginning, to detect the kind and the charset
IMAGE_TYPES = {"image/png", "image/jpeg", "image/gif", "image/webp"}
SEPARATE_KINDS: tuple[PageKind, ...] = ("html", "pdf", "feed", "docx", "xlsx", "pptx")  # in a process of their own
SOURCE_KINDS: tuple[PageKind, ...] = ("html", "feed", "json")  # whose source is text
FEED_START = re.compile(rb"<(rss|feed|rdf:RDF)[\s>]")
HTML_START = re.compile(rb"\s*(?:(?><!--.*?-->)\s*+)*+<(!doctype html|html|head|body)[\s>]", re.IGNORECASE | re.DOTALL)
CONTROLS = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")  # lxml rejects them
DROPPED_LINKS = "//a[starts-with(@href, '#') or starts-with(@href, 'javascript:') or ancestor::pre or ancestor::code]"
"""Links that are replaced by their text: links to the page itself, and links in code."""
NO_TEXT = "(no text: perhaps a scan)"
XML_CHARSET = re.compile(rb"""<\?xml[^>]+encoding\s*=\s*["']([\w:.-]+)""")
LARGER_ENCODINGS = {"shift_jis": "cp932", "euc-kr": "cp949", "gbk": "gb18030", "big5": "big5hkscs"}
META_CHARSET = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w:.-]+)""", re.IGNORECASE)


class UnreadablePage(Exception):
    """The page cannot be converted. The message is a clause such as "it is not a valid PDF"."""


def detect_kind(body: bytes, media_type: str) -> PageKind:
    """Detect the kind of a page by its media type and its first bytes."""
    start = body[:SNIFFED_BYTES].removeprefix(codecs.BOM_UTF8)
    if media_type == "application/pdf" or start.startswith(b"%PDF-"):
        return "pdf"
    if media_type in IMAGE_TYPES:
        return "image"
    if media_type == "application/json" or media_type.endswith("+json"):
        return "json"
    if media_type in ("application/rss+xml", "application/atom+xml", "application/rdf+xml"):
        return "feed"
    if media_type.endswith("xml") and media_type != "application/xhtml+xml" and FEED_START.search(start):
        return "feed"
    if media_type in ("text/html", "application/xhtml+xml") or (not media_type and HTML_START.match(start)):
        return "html"
    if media_type.startswith("text/") or media_type.endswith(
        ("xml", "javascript", "yaml", "toml", "ndjson", "jsonlines", "sql")
    ):
        return "text"
    return "binary" if b"\0" in start or media_type.startswith(("image/", "audio/", "video/", "font/")) else "text"


def needs_javascript(body: bytes, text: str) -> bool:
    """Return whether an HTML page with this text probably shows more in a browser that runs its scripts."""
    if b"<script" not in body.lower():
        return False
    words = re.sub(r"\A# .*", "", text).strip()
    return len(words) < SHORT_PAGE or (len(words) < SHORT_NOTE and "javascript" in words.lower())


def decode_text(body: bytes, charset: str | None, *, html: bool) -> str:
    """Decode a page.

    The encoding follows from a byte order mark, the server's `charset` or the HTML, in this order. Without these it is
    UTF-8 if the body is valid UTF-8, else it is guessed.
    """
    import webencodings  # not at the top: a server may never fetch

    declared = XML_CHARSET.match(body) or (META_CHARSET.search(body, 0, SNIFFED_BYTES) if html else None)
    for label in (charset, declared and declared[1].decode("ascii", "replace")):
        if label and webencodings.lookup(label):
            return _decode_as(body, label)
    if b"\x1b$" in body and body.isascii():
        return _decode_as(body, "iso-2022-jp")
    with suppress(UnicodeDecodeError):
        return body.decode("utf-8-sig")
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return webencodings.decode(body, "utf-16")[0]
    return _decode_as(body, guess_encoding(body))


def _decode_as(body: bytes, encoding: str) -> str:
    """Decode a page as browsers do: they read some encodings as larger ones that contain them."""
    import webencodings  # not at the top, as above

    known = webencodings.lookup(encoding)
    if known and (larger := LARGER_ENCODINGS.get(known.name)):
        return body.decode(larger, "replace")
    return webencodings.decode(body, known)[0] if known else body.decode(encoding, "replace")


async def to_text(body: bytes, kind: PageKind, charset: str | None, url: str) -> str:
    """Convert a page to text, HTML to Markdown. Raises UnreadablePage. Cancelling kills the converting process."""
    if kind not in SEPARATE_KINDS:
        return await anyio.to_thread.run_sync(_convert, body, kind, charset, url)
    command = [sys.executable, "-P", "-m", "crow_mcp_server.web.page_text", kind, charset or "", url]
    names = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT")  # no secrets for code that reads foreign pages
    env = {name: os.environ[name] for name in names if name in os.environ}
    with TemporaryFile() as page, TemporaryFile() as text, TemporaryFile() as errors:  # pipes break when it ends early
        page.write(body)
        page.seek(0)
        process = None
        with anyio.CancelScope(shield=True):  # asyncio leaves a process behind whose start is cancelled
            process = await anyio.open_process(command, stdin=page, stdout=text, stderr=errors, env=env)
        assert process
        async with process:
            code = await process.wait()
        text.seek(0)
        errors.seek(0)
        if code == 0:
            return text.read().decode()
        reason = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    raise UnreadablePage(reason or "reading it took too much time or memory")


def _convert(body: bytes, kind: PageKind, charset: str | None, url: str) -> str:
    match kind:
        case "html":
            return convert_html(decode_text(body, charset, html=True), url)
        case "pdf":
            return convert_pdf(body)
        case "feed":
            return convert_feed(body)
        case "json":
            return convert_json(decode_text(body, charset, html=False))
        case "docx" | "xlsx" | "pptx":
            return office.convert(body, kind)
        case _:
            return decode_text(body, charset, html=False)


def convert_html(html: str, url: str) -> str:
    """Convert the main text of an HTML page to Markdown, with its title on top; without main text, the whole page."""
    import lxml.etree
    import lxml.html
    import trafilatura

    try:
        source = CONTROLS.sub("", html).encode(errors="replace")
        tree = lxml.html.fromstring(source, parser=lxml.html.HTMLParser(encoding="utf-8"))
    except lxml.etree.ParserError:  # the page is empty
        return ""
    title = " ".join((tree.findtext(".//title") or "").split())
    for link in tree.xpath(DROPPED_LINKS):
        link.drop_tag()
    with suppress(ValueError):  # the base is not a URL: links stay relative
        tree.make_links_absolute(url, handle_failures="discard")
    text = trafilatura.extract(tree, url=url, output_format="markdown", include_links=True) or ""
    if len(text) < MIN_MAIN_CHARACTERS:
        import html_to_markdown

        options = html_to_markdown.ConversionOptions(heading_style="atx", skip_images=True)
        whole = html_to_markdown.convert(str(lxml.html.tostring(tree, encoding="unicode")), options).content or ""
        text = max(text, whole.strip(), key=len)
    return f"# {title}\n\n{text}" if title and not text.startswith(f"# {title}\n") else text


def convert_pdf(body: bytes) -> str:
    """Return the text of a PDF, page by page. Raises UnreadablePage."""
    import io

    import pypdf
    from pypdf.errors import PyPdfError

    try:
        reader = pypdf.PdfReader(io.BytesIO(body))
        pages: list[str] = []
        length = 0
        for number, page in enumerate(reader.pages, 1):
            text = page.extract_text().strip() or NO_TEXT
            pages.append(f"[page {number} of {len(reader.pages)}]\n{text}")
            length += len(pages[-1])
            if length > MAX_CHARACTERS:
                break
    except PyPdfError as error:
        raise UnreadablePage(f"it is not a valid PDF: {error}") from error
    if body.isascii() and all(page.endswith(NO_TEXT) for page in pages):
        return body.decode()  # probably written by hand and not quite valid: its source says more
    return "\n\n".join(pages)


def convert_feed(body: bytes) -> str:
    """Return the entries of an RSS or Atom feed, in the feed's order. Raises UnreadablePage."""
    import feedparser

    feed = feedparser.parse(body, sanitize_html=False)
    if feed.bozo and not feed.entries:
        raise UnreadablePage(f"it is not a valid feed: {feed.bozo_exception}")
    lines = [f"# {feed.feed.get('title', 'Feed')}"]
    for entry in feed.entries:
        date = entry.get("published") or entry.get("updated") or ""
        summary = _strip_tags(entry.get("summary", ""))
        lines += ["", f"## {entry.get('title', '(no title)')}", *filter(None, (entry.get("link"), date, summary))]
    return "\n".join(lines)


def convert_json(text: str) -> str:
    """Indent JSON. Invalid and long JSON is returned unchanged."""
    if len(text) > MAX_JSON_CHARACTERS:
        return text
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, indent=2)
    except (ValueError, RecursionError):
        return text


def _strip_tags(html: str) -> str:
    if "<" not in html:
        return html.strip()
    import lxml.html

    return " ".join(lxml.html.fromstring(f"<div>{html}</div>").text_content().split())


def _limit_memory() -> None:
    with suppress(ValueError, OSError):  # macOS has no such limit
        limit_memory(MAX_MEMORY_BYTES)


def main() -> None:
    """Convert a page from standard input to text on standard output. An error is one line on standard error."""
    _, kind, charset, url = sys.argv
    _limit_memory()
    try:
        text = _convert(sys.stdin.buffer.read(), kind, charset or None, url)  # pyright: ignore[reportArgumentType]
    except MemoryError:
        sys.exit("reading it took too much memory")
    except (UnreadablePage, office.UnreadableOffice) as error:
        sys.exit(str(error))
    except Exception as error:  # a library may raise anything for a malformed page
        sys.exit(f"it cannot be read ({type(error).__name__}: {error})")
    sys.stdout.buffer.write(leave_out(text, MAX_CHARACTERS).encode(errors="replace"))


if __name__ == "__main__":
    main()
