"""A text file as the tools see it, and its way from bytes and back without losing one."""

import codecs
import hashlib
import re
from dataclasses import dataclass, replace
from functools import cached_property

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark is its beginning
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
BINARY_CONTROLS = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f]")  # control bytes that no 8-bit text holds
C1_CONTROLS = re.compile(r"[\x80-\x9f]")  # in Latin-1 controls, in Windows-1252 quotes and dashes
NON_ASCII_RUN = re.compile(
    rb"[\x80-\xff]{6}"
)  # more letters beyond ASCII in a row than words of Western languages have
WESTERN_ENCODINGS = ["cp1252", "latin_1"]
OTHER_ENCODINGS = ["cp1251", "koi8_r", "gb18030", "big5", "cp932", "euc_jp", "cp949", "cp1253", "cp1255", "cp1256"]


@dataclass(frozen=True)
class Document:
    """The text of a file and how it is written down."""

    text: str
    """Without the byte order mark, with the line endings of the file."""
    encoding: str = "utf-8"
    """A codec that gives back exactly the bytes it was read from."""
    bom: bytes = b""
    """The byte order mark."""

    @property
    def is_plain_utf8(self) -> bool:
        """UTF-8 without a mark: what an editor on the other side of a protocol can be trusted with."""
        return self.encoding == "utf-8" and not self.bom

    @property
    def newline(self) -> str:
        """The line ending most lines have."""
        return "\r\n" if self.text.count("\r\n") * 2 > self.text.count("\n") else "\n"

    @property
    def lf_text(self) -> str:
        """The text as a model reads and writes it: every line ends in a line feed."""
        return self.text.replace("\r\n", "\n")

    @property
    def lines(self) -> list[str]:
        """The lines without their endings; the end of the last line starts no new one."""
        lines = self.lf_text.split("\n")
        return lines[:-1] if lines[-1] == "" else lines

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes of the file, in hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    def encode(self) -> bytes:
        """The bytes of the file. Raises UnicodeEncodeError when the encoding lacks a character."""
        return self.bom + self.text.encode(self.encoding)

    def with_text(self, text: str) -> "Document":
        return replace(self, text=text)


def decode(data: bytes) -> Document | None:
    """The document some bytes hold, or None when they are no text. `decode(data).encode() == data`, always."""
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
    if encoding := _guess_encoding(data):
        text = _try_decode(data, encoding)
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


def _guess_encoding(data: bytes) -> str | None:
    """The encoding of a text that is plainly not in a Western one."""
    if not NON_ASCII_RUN.search(data):
        return None
    from charset_normalizer import from_bytes  # not at the top: few files need it

    first, second, *lines = [*data.split(b"\n"), b""]  # where an encoding may be declared
    telling = b"\n".join([first, second, *(line for line in lines if not line.isascii())])
    if from_bytes(telling, cp_isolation=WESTERN_ENCODINGS).best():
        return None
    best = from_bytes(telling, cp_isolation=OTHER_ENCODINGS).best()
    return best and best.encoding


def reconcile(disk: Document, text: str) -> Document:
    """The document when an editor shows `text` for a file: some editors turn every line ending into a line feed."""
    shown = disk.with_text(text)
    if shown.lf_text == disk.lf_text:
        return disk
    return disk.with_text(text.replace("\n", disk.newline)) if "\r" not in text else shown
