"""The alternate screen of a terminal, on which full-screen programs draw, as text."""

import re
from typing import TYPE_CHECKING

from crow_mcp_server.terminal.command_output import CONTROLS

if TYPE_CHECKING:
    from bittty import Board  # pyright: ignore[reportMissingTypeStubs]

ROWS, COLUMNS = 40, 120
CONTROL = re.compile(rb"\x1b\[(\??)([\d;]*)([hlHfdJ])")
"""Sequences that set ("h") and reset ("l") modes, move the cursor to a position (H, f, d), and erase (J)."""
PARTIAL_CONTROL = re.compile(rb"\x1b(?:\[\??[\d;]{0,20})?\Z")
"""A possible beginning of such a sequence at the end of the data."""
ALTERNATE_SCREEN = {b"1049", b"1047", b"47"}
APPLICATION_KEYS, SHOWN_CURSOR = b"1", b"25"
WHOLE_SCREEN = {b"2", b"3"}


class TerminalScreen:
    """Separates a terminal's output into lines and drawing.

    A program draws while it uses the alternate screen. It also draws after it has hidden the cursor or requested
    application keys, as `top` does. Drawing starts when it moves the cursor to a position or erases the screen, and
    ends when both are undone.
    """

    def __init__(self) -> None:
        self._board: Board | None = None
        """The screen; None while no program draws."""
        self._is_alternate = False
        self._modes: set[bytes] = set()
        """Those of APPLICATION_KEYS and SHOWN_CURSOR that differ from their default."""
        self._rest = b""

    def split(self, data: bytes) -> bytes:
        """Draw what belongs on the screen, and return the rest of the data."""
        data = self._rest + data
        partial = PARTIAL_CONTROL.search(data)
        self._rest = data[partial.start() :] if partial else b""
        lines, start = bytearray(), 0
        for control in CONTROL.finditer(data := data[: len(data) - len(self._rest)]):
            values, is_set = set(control[2].split(b";")), control[3] == b"h"
            if control[1] and control[3] in b"hl":
                self._put(data[start : control.end()], lines)
                start = control.end()
                self._modes |= values & ({APPLICATION_KEYS} if is_set else {SHOWN_CURSOR})
                self._modes -= values & ({SHOWN_CURSOR} if is_set else {APPLICATION_KEYS})
                if values & ALTERNATE_SCREEN:
                    lines += self._leave()
                    self._board, self._is_alternate = (_make_board() if is_set else None), is_set
                elif not self._modes and not self._is_alternate:
                    lines += self._leave()
            elif not control[1] and self._modes and not self._board and (control[3] != b"J" or values & WHOLE_SCREEN):
                self._put(data[start : control.start()], lines)
                start = control.start()
                self._board = _make_board()
        self._put(data[start:], lines)
        return bytes(lines)

    def reset(self) -> bytes:
        """End the drawing, because the program has ended; return what stays on the terminal as lines."""
        lines = self._leave()
        self._modes, self._rest = set(), b""
        return lines

    @property
    def is_active(self) -> bool:
        """True while a program draws."""
        return self._board is not None

    @property
    def wants_application_keys(self) -> bool:
        """True if cursor keys shall send the sequences of application mode."""
        return APPLICATION_KEYS in self._modes

    def get_text(self) -> str:
        return CONTROLS.sub("", self._board.capture_text()) if self._board else ""

    def _leave(self) -> bytes:
        """Stop drawing; return the text on the screen, unless it is the alternate one, as lines."""
        text = "" if self._is_alternate else self.get_text().rstrip()
        self._board, self._is_alternate = None, False
        return text.replace("\n", "\r\n").encode() + b"\r\n" if text else b""

    def _put(self, data: bytes, lines: bytearray) -> None:
        if self._board:
            self._board.feed_host_data(data)
        else:
            lines += data


def _make_board() -> "Board":
    # not at the top: it takes 0.1 seconds, and only full-screen programs need it
    from bittty import Board  # pyright: ignore[reportMissingTypeStubs]

    return Board(width=COLUMNS, height=ROWS)
