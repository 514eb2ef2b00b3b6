"""What a full-screen program shows, as lines of text."""

import re
from typing import TYPE_CHECKING

from crow_mcp_server.terminal.output import CONTROLS

if TYPE_CHECKING:
    from bittty import Board  # pyright: ignore[reportMissingTypeStubs]

ROWS, COLUMNS = 40, 120
SCREEN_SWITCH = re.compile(rb"\x1b\[\?(?:1049|1047|47)([hl])")
"""How a program asks for the alternate screen, which editors and pagers draw on, and leaves it."""
PARTIAL_SWITCH = re.compile(rb"\x1b(?:\[(?:\?\d{0,4})?)?\Z")
"""What may be the beginning of it."""


class TerminalScreen:
    """Tells apart what a terminal is sent: lines, and what a program draws on the alternate screen."""

    def __init__(self) -> None:
        self._board: Board | None = None
        """The screen as it stands, while a program draws on it."""
        self._rest = b""

    def split(self, data: bytes) -> bytes:
        """Draw what is to be drawn; gives the lines."""
        data = self._rest + data
        begun = PARTIAL_SWITCH.search(data)
        self._rest = data[begun.start() :] if begun else b""
        lines, start = bytearray(), 0
        for switch in SCREEN_SWITCH.finditer(data := data[: len(data) - len(self._rest)]):
            self._put(data[start : switch.start()], lines)
            self._board = _make_board() if switch[1] == b"h" else None
            start = switch.end()
        self._put(data[start:], lines)
        return bytes(lines)

    @property
    def is_active(self) -> bool:
        """Whether a program draws on the alternate screen."""
        return self._board is not None

    def get_text(self) -> str:
        """What is on the alternate screen."""
        return CONTROLS.sub("", self._board.capture_text()) if self._board else ""

    def _put(self, data: bytes, lines: bytearray) -> None:
        if self._board:
            self._board.feed_host_data(data)
        else:
            lines += data


def _make_board() -> "Board":
    # not at the top: a tenth of a second, for the few who start an editor
    from bittty import Board  # pyright: ignore[reportMissingTypeStubs]

    return Board(width=COLUMNS, height=ROWS)
