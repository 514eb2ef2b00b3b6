"""The output of a command: keep its beginning and end, and make it readable."""

import codecs
import re
from typing import BinaryIO

from crow_system.shortening import describe_left_out

MAX_END_BYTES = 512 * 1024  # kept in memory of each end of the output
MAX_UNSAVED_BYTES = 30_000  # longer output is also written to a file
MAX_FILE_BYTES = 64 * 1024 * 1024
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # the bytes of a UTF-8 character after its first

ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x90-\x9f]*(?:\x07|\x1b\\|\x9c)"  # OSC: titles, links, clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x90-\x9f]*(?:\x1b\\|\x9c)"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]"  # short sequences
)
OVERTYPED = re.compile(r"[^\n\x08]\x08")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
UNSHOWN = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]|\r(?!\r*\n)")
"""The control characters of a plain command's output that cannot be shown: all but line ends and form feeds."""
UNSHOWN_NOTE = "[control characters such as NUL or a carriage return within a line are not shown; od -c shows them]"
NARROW_HINT = "narrow the output with grep, head or tail, or write it to a file"


class OutputCapture:
    """Keeps the beginning and the end of a stream of bytes, and counts the characters between them."""

    def __init__(self, path: str = "", *, from_terminal: bool = True) -> None:
        """`path` names the file for a long output, up to MAX_FILE_BYTES of it; "" for no file.

        With `from_terminal`, lines end with CR and LF, because a terminal adds the CR.
        """
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0  # characters
        self._lines = 0  # line ends so far
        self._fed = 0  # bytes so far, with those that were taken
        self._path = path
        self._from_terminal = from_terminal
        self._file: BinaryIO | None = None
        self._room = MAX_FILE_BYTES  # bytes
        self._last_taken = ""  # line

    def feed(self, data: bytes) -> None:
        self._lines += data.count(b"\n")
        self._fed += len(data)
        if self._file:
            self._write(data)
        room = MAX_END_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if not self._file and len(self._head) > MAX_UNSAVED_BYTES:
            self._open_file()
        if len(self._tail) > 2 * MAX_END_BYTES:
            self._drop(len(self._tail) - MAX_END_BYTES)

    def get_text(self, limit: int) -> str:
        """Return the output, cleaned, in at most `limit` characters."""
        if not self._dropped:
            text = self._clean((self._head + self._tail).decode("utf-8", "replace"))
            middle = len(text) // 2
            return text if len(text) <= limit else _join(text[:middle], text[middle:], 0, limit, self._hint())
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        head = decoder.decode(self._head)
        cut = 1 if decoder.getstate()[0] else 0  # one more character is incomplete because its end was dropped
        tail = self._tail.lstrip(CONTINUATION_BYTES).decode("utf-8", "replace")
        return _join(self._clean(head), self._clean(tail), self._dropped + cut, limit, self._hint())

    def describe_unshown(self) -> str:
        """Return a note if the output has characters that `get_text` does not show, apart from escape sequences."""
        text = (self._head + self._tail).decode("utf-8", "replace")
        return UNSHOWN_NOTE if UNSHOWN.search(_overtype(ESCAPES.sub("", text))) else ""

    def take_text(self, limit: int) -> str:
        """Return the output like `get_text`, and forget it: the next call returns only newer output.

        The file keeps all output.
        """
        text = self.get_text(limit)
        if not self._file:
            self._open_file()
        self._head, self._tail, self._dropped, self._lines = bytearray(), bytearray(), 0, 0
        self._last_taken = text.rstrip().rpartition("\n")[2] or self._last_taken
        return text

    def get_end(self, limit: int) -> str:
        """Return the last lines of the output, cleaned, in about `limit` characters, after the number of the others."""
        data = (self._head[-4 * limit :] + self._tail[-4 * limit :])[-4 * limit :]
        text = self._clean(data.decode("utf-8", "replace"))
        if len(data) < 4 * limit and len(text) <= limit:
            return text
        end = text[2 - limit :].partition("\n")[2]  # whole lines only, because crow masks secrets in them
        return f"… {max(self._lines - end.count(chr(10)), 1)} lines before\n{end}"

    def read_new(self, start: int, limit: int, *, whole_lines: bool) -> tuple[str, int]:
        """Return the output after its first `start` bytes, cleaned, in about `limit` characters, and where it ends.

        Nothing that was taken. With `whole_lines`, an unfinished line is left for the next time, because crow masks
        secrets in lines.
        """
        size = min(self._fed - start, len(self._head) + len(self._tail))
        data = (self._head + self._tail)[-size:] if size > 0 else bytearray()
        if whole_lines:
            del data[data.rfind(b"\n") + 1 :]
        end = self._fed - size + len(data)
        if len(data) > 4 * limit:
            del data[: data.find(b"\n", len(data) - 4 * limit) + 1]
        return self._clean(data.decode("utf-8", "replace")), end

    def get_last_line(self, limit: int) -> str:
        """Return the last line with text, cleaned, in at most `limit` characters; also one that was taken."""
        return (self.get_end(limit).rstrip().rpartition("\n")[2] or self._last_taken)[:limit]

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _clean(self, text: str) -> str:
        return clean(text, from_terminal=self._from_terminal)

    def _drop(self, size: int) -> None:
        self._dropped += len(self._tail[:size].translate(None, CONTINUATION_BYTES))
        del self._tail[:size]

    def _open_file(self) -> None:
        if self._path:
            try:
                self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - see close
            except OSError:  # for instance because the folder was removed
                self._path = ""
                return
            self._write(self._head)

    def _write(self, data: bytes | bytearray) -> None:
        assert self._file
        if self._room > 0:
            try:
                self._room -= self._file.write(data[: self._room])
            except OSError:  # for instance a full disk: the file stays incomplete
                self._room = 0

    def _hint(self) -> str:
        if not self._file:
            return NARROW_HINT
        whole = "all of it is" if self._room > 0 else "its beginning is"
        return f"{whole} in {self._path}: look there with grep, sed -n or tail"


def clean(text: str, *, from_terminal: bool = True) -> str:
    """Return text without escape sequences, overwritten parts (progress bars) and control characters.

    Line ends (LF, CR LF) and form feeds stay, but `from_terminal` the CR that a terminal adds to each LF is removed.
    """
    text = _overtype(ESCAPES.sub("", text))
    if from_terminal:
        text = text.replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_last_written(line) for line in text.split("\n"))
    return UNSHOWN.sub("", text)


def _join(head: str, tail: str, dropped: int, limit: int, hint: str) -> str:
    whole = len(head) + dropped + len(tail)
    half = (limit - len(describe_left_out(whole, whole, hint)) - 2) // 2
    left_out = dropped + max(len(head) - half, 0) + max(len(tail) - half, 0)
    return f"{head[:half]}\n{describe_left_out(left_out, whole, hint)}\n{tail[-half:]}"


def _overtype(text: str) -> str:
    """Apply backspaces: bold by overtyping and spinners delete one or a few characters in a row."""
    for _ in range(8):
        if "\b" not in text:
            break
        text = OVERTYPED.sub("", text)
    return text


def _last_written(line: str) -> str:
    """Return the last part of a line whose parts overwrite each other, with the CRs at its end."""
    body = line.rstrip("\r")
    parts = body.split("\r")
    return next((part for part in reversed(parts) if part.strip()), "") + line[len(body) :] if len(parts) > 1 else line
