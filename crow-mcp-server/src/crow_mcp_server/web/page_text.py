"""What a model reads of something from the web.

HTML, PDF and feeds are read in a process of their own (`python -m crow_mcp_server.web.page_text`), as anyone can write them so
that reading takes hours or gigabytes: it is killed then.
"""

# lxml and feedparser come without types:
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

Kind = Literal["html", "pdf", "feed", "json", "text", "image", "binary"]

MAX_CHARACTERS = 5_000_000  # of text taken from a page
MAX_MEMORY = 2 * 1024**3  # bytes of address space for reading one
MAX_JSON = 1_000_000  # characters of JSON that is laid out
SEVERAL = 200  # characters of main text below which the whole page is taken
SNIFFED = 2048  # bytes
IMAGES = {"image/png", "image/jpeg", "image/gif", "image/webp"}
APART: tuple[Kind, ...] = ("html", "pdf", "feed")
FEED = re.compile(rb"<(rss|feed|rdf:RDF)[\s>]")
HTML = re.compile(rb"\s*(?:(?><!--.*?-->)\s*+)*+<(!doctype html|html|head|body)[\s>]", re.IGNORECASE | re.DOTALL)
CONTROLS = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")  # lxml takes none of them
NO_LINKS = "//a[starts-with(@href, '#') or starts-with(@href, 'javascript:') or ancestor::pre or ancestor::code]"
"""Links that are dropped, and their text kept: those to the page itself, and those in code."""
NO_TEXT = "(no text: perhaps a scan)"
META_CHARSET = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([\w:.-]+)""", re.IGNORECASE)


class Unreadable(Exception):
    """Nothing can be made of the page; the reason is a sentence's end."""


def kind_of(body: bytes, type: str) -> Kind:
    """What a page is, by the media type its server gives and by how it begins."""
    start = body[:SNIFFED].removeprefix(codecs.BOM_UTF8)
    if type == "application/pdf" or start.startswith(b"%PDF-"):
        return "pdf"
    if type in IMAGES:
        return "image"
    if type == "application/json" or type.endswith("+json"):
        return "json"
    if type in ("application/rss+xml", "application/atom+xml", "application/rdf+xml"):
        return "feed"
    if type.endswith("xml") and type != "application/xhtml+xml" and FEED.search(start):
        return "feed"
    if type in ("text/html", "application/xhtml+xml") or (not type and HTML.match(start)):
        return "html"
    if type.startswith("text/") or type.endswith(("xml", "javascript", "yaml", "toml", "ndjson", "jsonlines", "sql")):
        return "text"
    return "binary" if b"\0" in start or type.startswith(("image/", "audio/", "video/", "font/")) else "text"


def decode(body: bytes, charset: str | None, *, html: bool) -> str:
    """Text of bytes: by their mark, by what the server says, by what the page says, or as they look."""
    import webencodings  # not at the top: a server may never fetch

    found = META_CHARSET.search(body, 0, SNIFFED) if html else None
    for label in (charset, found and found[1].decode("ascii", "replace")):
        if label and (known := webencodings.lookup(label)):
            return webencodings.decode(body, known)[0]
    with suppress(UnicodeDecodeError):
        return body.decode("utf-8-sig")
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return webencodings.decode(body, "utf-16")[0]
    import charset_normalizer  # not at the top, as above

    best = charset_normalizer.from_bytes(body[:65536]).best()
    return body.decode(best.encoding if best else "utf-8", "replace")


async def read(body: bytes, kind: Kind, charset: str | None, url: str) -> str:
    """What a model reads of a page, as Markdown where it has a structure. Raises Unreadable; cancelling is safe."""
    if kind not in APART:
        return await anyio.to_thread.run_sync(_read, body, kind, charset, url)
    command = [sys.executable, "-P", "-m", "crow_mcp_server.web.page_text", kind, charset or "", url]
    names = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT")  # no keys for who reads the web
    env = {name: os.environ[name] for name in names if name in os.environ}
    with TemporaryFile() as file:  # no pipe: it would break when the process ends early
        file.write(body)
        file.seek(0)
        done = await anyio.run_process(command, stdin=file, env=env, check=False)
    if done.returncode == 0:
        return done.stdout.decode()
    reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise Unreadable(reason or "reading it took too much time or memory")


def _read(body: bytes, kind: Kind, charset: str | None, url: str) -> str:
    match kind:
        case "html":
            return from_html(decode(body, charset, html=True), url)
        case "pdf":
            return from_pdf(body)
        case "feed":
            return from_feed(body)
        case "json":
            return from_json(decode(body, charset, html=False))
        case _:
            return decode(body, charset, html=False)


def from_html(html: str, url: str) -> str:
    """The main text of a page as Markdown, with its title on top; of a page without a main text, the whole."""
    import lxml.etree
    import lxml.html
    import trafilatura

    try:
        source = CONTROLS.sub("", html).encode(errors="replace")
        tree = lxml.html.fromstring(source, parser=lxml.html.HTMLParser(encoding="utf-8"))
    except lxml.etree.ParserError:  # there is nothing in it
        return ""
    title = " ".join((tree.findtext(".//title") or "").split())
    for link in tree.xpath(NO_LINKS):
        link.drop_tag()
    with suppress(ValueError):  # a base that is no URL: links stay as they are
        tree.make_links_absolute(url, handle_failures="discard")
    text = trafilatura.extract(tree, url=url, output_format="markdown", include_links=True) or ""
    if len(text) < SEVERAL:
        import html_to_markdown

        options = html_to_markdown.ConversionOptions(heading_style="atx", skip_images=True)
        whole = html_to_markdown.convert(str(lxml.html.tostring(tree, encoding="unicode")), options).content or ""
        text = max(text, whole.strip(), key=len)
    return f"# {title}\n\n{text}" if title and not text.startswith(f"# {title}\n") else text


def from_pdf(body: bytes) -> str:
    """The text of a PDF, page by page."""
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
        raise Unreadable(f"it is no sound PDF: {error}") from error
    if body.isascii() and all(page.endswith(NO_TEXT) for page in pages):
        return body.decode()  # written by hand, and not quite right: its source says more
    return "\n\n".join(pages)


def from_feed(body: bytes) -> str:
    """The entries of an RSS or Atom feed, the newest as the feed has them."""
    import feedparser

    feed = feedparser.parse(body, sanitize_html=False)
    if feed.bozo and not feed.entries:
        raise Unreadable(f"it is no sound feed: {feed.bozo_exception}")
    lines = [f"# {feed.feed.get('title', 'Feed')}"]
    for entry in feed.entries:
        date = entry.get("published") or entry.get("updated") or ""
        summary = _plain(entry.get("summary", ""))
        lines += ["", f"## {entry.get('title', '(no title)')}", *filter(None, (entry.get("link"), date, summary))]
    return "\n".join(lines)


def from_json(text: str) -> str:
    """JSON with a line for each value; what cannot be parsed, or is long, stays as it is."""
    if len(text) > MAX_JSON:
        return text
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, indent=2)
    except (ValueError, RecursionError):
        return text


def _plain(html: str) -> str:
    if "<" not in html:
        return html.strip()
    import lxml.html

    return " ".join(lxml.html.fromstring(f"<div>{html}</div>").text_content().split())


def _bound() -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource  # there is none on Windows

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def main() -> None:
    """Read a page from standard input and write what a model reads of it to standard output."""
    _, kind, charset, url = sys.argv
    _bound()
    try:
        text = _read(sys.stdin.buffer.read(), kind, charset or None, url)  # pyright: ignore[reportArgumentType]
    except MemoryError:
        sys.exit("reading it took too much memory")
    except Unreadable as error:
        sys.exit(str(error))
    except Exception as error:  # whatever a stranger's page brings about in a library
        sys.exit(f"it cannot be read ({type(error).__name__}: {error})")
    sys.stdout.buffer.write(text[:MAX_CHARACTERS].encode(errors="replace"))


if __name__ == "__main__":
    main()
