"""The alternate screen of a terminal, on which full-screen programs draw, as text."""

import re
from typing import TYPE_CHECKING

from crow_mcp_server.terminal.output import CONTROLS

if TYPE_CHECKING:
    from bittty import Board  # pyright: ignore[reportMissingTypeStubs]

ROWS, COLUMNS = 40, 120
SCREEN_SWITCH = re.compile(rb"\x1b\[\?(?:1049|1047|47)([hl])")
"""The sequences by which a program enters ("h") and leaves ("l") the alternate screen."""
PARTIAL_SWITCH = re.compile(rb"\x1b(?:\[(?:\?\d{0,4})?)?\Z")
"""A possible beginning of such a sequence at the end of the data."""


class TerminalScreen:
    """Separates a terminal's output into lines and drawing on the alternate screen."""

    def __init__(self) -> None:
        self._board: Board | None = None
        """The alternate screen; None while no program uses it."""
        self._rest = b""

    def split(self, data: bytes) -> bytes:
        """Draw on the alternate screen what belongs there, and return the rest of the data."""
        data = self._rest + data
        partial = PARTIAL_SWITCH.search(data)
        self._rest = data[partial.start() :] if partial else b""
        lines, start = bytearray(), 0
        for switch in SCREEN_SWITCH.finditer(data := data[: len(data) - len(self._rest)]):
            self._put(data[start : switch.start()], lines)
            self._board = _make_board() if switch[1] == b"h" else None
            start = switch.end()
        self._put(data[start:], lines)
        return bytes(lines)

    @property
    def is_active(self) -> bool:
        """True while a program uses the alternate screen."""
        return self._board is not None

    def get_text(self) -> str:
        """Return the text on the alternate screen."""
        return CONTROLS.sub("", self._board.capture_text()) if self._board else ""

    def _put(self, data: bytes, lines: bytearray) -> None:
        if self._board:
            self._board.feed_host_data(data)
        else:
            lines += data


def _make_board() -> "Board":
    # not at the top: it takes 0.1 seconds, and only full-screen programs need it
    from bittty import Board  # pyright: ignore[reportMissingTypeStubs]

    return Board(width=COLUMNS, height=ROWS)
