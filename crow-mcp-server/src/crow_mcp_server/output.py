"""What a command printed, kept small while it runs and made readable after."""

import codecs
import re

KEPT = 512 * 1024  # bytes kept of each end while a command runs
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # all bytes of a UTF-8 character but its first

ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC: titles, links, clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]"  # the short ones
)
OVERTYPED = re.compile(r"[^\n\x08]\x08")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LEFT_OUT = "\n[… {:,} characters left out here; narrow the output with grep, head or tail, or write it to a file …]\n"


class Capture:
    """The beginning and the end of a stream of bytes, and a count of what lay between."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0  # characters

    def feed(self, data: bytes) -> None:
        room = KEPT - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * KEPT:
            self._drop(len(self._tail) - KEPT)

    def text(self, limit: int) -> str:
        """What was printed, clean, in at most `limit` characters."""
        if not self._dropped:
            return shorten(clean((self._head + self._tail).decode("utf-8", "replace")), limit)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        head = decoder.decode(self._head)
        cut = 1 if decoder.getstate()[0] else 0  # a character whose end was dropped
        tail = self._tail.lstrip(CONTINUATION_BYTES).decode("utf-8", "replace")
        return _join(clean(head), clean(tail), self._dropped + cut, limit)

    def end(self, limit: int) -> str:
        """The last lines, clean, in at most `limit` characters; meant for another thread than the one that feeds."""
        data = (self._head[-4 * limit :] + self._tail[-4 * limit :])[-4 * limit :]
        text = clean(data.decode("utf-8", "replace"))
        if len(data) < 4 * limit and len(text) <= limit:
            return text
        return "…\n" + text[2 - limit :].partition("\n")[2]  # no part of a line: who masks secrets needs them whole

    def _drop(self, size: int) -> None:
        self._dropped += len(self._tail[:size].translate(None, CONTINUATION_BYTES))
        del self._tail[:size]


def clean(text: str) -> str:
    """Text as it would stand on a terminal in the end: no escape sequences, only the last state of a progress bar."""
    text = ESCAPES.sub("", text).replace("\r\n", "\n")
    for _ in range(8):  # bold by overtyping and spinners are one or a few deep
        if "\b" not in text:
            break
        text = OVERTYPED.sub("", text)
    if "\r" in text:
        text = "\n".join(_last_written(line) for line in text.split("\n"))
    return CONTROLS.sub("", text)


def shorten(text: str, limit: int) -> str:
    """The beginning and the end of a text that is too long."""
    return text if len(text) <= limit else _join(text, "", 0, limit)


def _join(head: str, tail: str, dropped: int, limit: int) -> str:
    half = (limit - len(LEFT_OUT) - 10) // 2
    if not dropped:
        head, tail = head[: len(head) // 2], head[len(head) // 2 :]
    left_out = dropped + max(len(head) - half, 0) + max(len(tail) - half, 0)
    return head[:half] + LEFT_OUT.format(left_out) + tail[-half:]


def _last_written(line: str) -> str:
    """The last thing a line was overwritten with."""
    return next((part for part in reversed(line.split("\r")) if part.strip()), "")
