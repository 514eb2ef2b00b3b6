"""Text files: decode their bytes, and encode them back to exactly the same bytes."""

import codecs
import hashlib
import re
from dataclasses import dataclass, replace
from functools import cached_property

from crow_mcp_server.charset import guess_encoding

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, because it begins with that one's mark
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
BINARY_CONTROLS = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")  # control bytes that do not occur in text
C1_CONTROLS = re.compile(r"[\x80-\x9f]")  # controls in Latin-1, quotes and dashes in Windows-1252


@dataclass(frozen=True)
class Document:
    """The text of a file and its encoding."""

    text: str
    """Without the byte order mark, with the line endings of the file."""
    encoding: str = "utf-8"
    """A Python codec that encodes the text to exactly the bytes that were read."""
    bom: bytes = b""
    """The byte order mark."""

    @property
    def is_plain_utf8(self) -> bool:
        """True for UTF-8 without a byte order mark; only such files pass through a host's editor unchanged."""
        return self.encoding == "utf-8" and not self.bom

    @property
    def newline(self) -> str:
        """The line ending of most lines."""
        return "\r\n" if self.text.count("\r\n") * 2 > self.text.count("\n") else "\n"

    @property
    def lf_text(self) -> str:
        """The text with line feeds as line endings, as a model reads and writes it."""
        return self.text.replace("\r\n", "\n")

    @property
    def lines(self) -> list[str]:
        """The lines without their endings. A line ending at the end of the text starts no further line."""
        lines = self.lf_text.split("\n")
        return lines[:-1] if lines[-1] == "" else lines

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes of the file, in hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    def encode(self) -> bytes:
        """Return the bytes of the file. Raises UnicodeEncodeError when the encoding lacks a character."""
        return self.bom + self.text.encode(self.encoding)

    def with_text(self, text: str) -> "Document":
        """Return a document with another text and the same encoding."""
        return replace(self, text=text)


def decode(data: bytes) -> Document | None:
    """Decode a file's bytes; return None when they are not text. `decode(data).encode() == data` always holds."""
    for mark, encoding in BYTE_ORDER_MARKS:
        if data.startswith(mark):
            text = _try_decode(data[len(mark) :], encoding)
            return None if text is None else Document(text, encoding, mark)
    if b"\0" in data:
        return None
    if (text := _try_decode(data, "utf-8")) is not None:
        return Document(text)
    if BINARY_CONTROLS.search(data):
        return None
    encoding = guess_encoding(data)
    text = None if encoding == "cp1252" else _try_decode(data, encoding)
    if text is not None and text.encode(encoding, "replace") == data:
        return Document(text, encoding)
    latin = data.decode("latin-1")
    if C1_CONTROLS.search(latin) and (text := _try_decode(data, "cp1252")) is not None:
        return Document(text, "cp1252")
    return Document(latin, "latin-1")


def _try_decode(data: bytes, encoding: str) -> str | None:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        return None


def reconcile(disk: Document, text: str) -> Document:
    """Return the document for the `text` that an editor shows of the file `disk`.

    Restore the file's line endings, because some editors convert them all to line feeds.
    """
    document = disk.with_text(text)
    if document.lf_text == disk.lf_text:
        return disk
    return disk.with_text(text.replace("\n", disk.newline)) if "\r" not in text else document
