"""The one module that uses the inside of prompt_toolkit: an editor at the bottom, and lines printed above it once.

There is no alternate screen, and nothing above the rows of the editor is ever drawn again. A frame is written at once,
as a synchronized update. The version of prompt_toolkit is pinned, because private parts are used here:
`Renderer._cursor_pos`, `Renderer._last_screen`, `Application._redraw`, `Application._on_resize`,
`Application._running_in_terminal`, `Vt100_Output._buffer`.
"""

# pyright: reportPrivateUsage=false

import asyncio
import base64
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import cast

from prompt_toolkit.application import Application
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import Completer
from prompt_toolkit.data_structures import Point
from prompt_toolkit.enums import EditingMode
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples, to_formatted_text
from prompt_toolkit.history import History, InMemoryHistory, ThreadedHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindingsBase, merge_key_bindings
from prompt_toolkit.key_binding.defaults import load_key_bindings
from prompt_toolkit.key_binding.key_processor import KeyProcessor
from prompt_toolkit.layout import (
    BufferControl,
    ConditionalContainer,
    Dimension,
    FormattedTextControl,
    HSplit,
    Layout,
    Window,
)
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments
from prompt_toolkit.output import ColorDepth
from prompt_toolkit.output.vt100 import Vt100_Output

from crow_terminal.guard import Guard
from crow_terminal.history import SafeHistory
from crow_terminal.lost_output import discard_output
from crow_terminal.printable_text import clip, escape_line

FRAME = 0.09
"""Seconds between two frames."""
KEEP_TITLE = "\x1b[22;2t"
RESTORE_TITLE = "\x1b[23;2t"
TITLE_WIDTH = 60
"""Columns of the window's title."""
EDITOR_ROWS = 10
"""Rows that the editor may take."""


def breaks_rows_anew(env: Mapping[str, str]) -> bool:
    """Return whether the terminal breaks the rows on its screen anew when it becomes narrower.

    xterm cuts them instead. tmux breaks them wherever it runs, and passes on the variables of the terminal around it.
    """
    return "TMUX" in env or ("XTERM_VERSION" not in env and env.get("TERM") not in ("linux", "vt100"))


class FrameOutput(Vt100_Output):
    """Writes each frame at once, between the marks of a synchronized update."""

    holding = False
    """True if the output belongs to a frame that has not ended."""
    hides_cursor = False
    """True if the cursor of the terminal is hidden, as it is elsewhere."""
    before_write: Callable[[], None] = staticmethod(lambda: None)

    @contextmanager
    def hold(self) -> Generator[None]:
        """Write nothing inside the block, and all of it at the end."""
        outermost, self.holding = not self.holding, True
        try:
            yield
        finally:
            if outermost:
                self.holding = False
                self.flush()

    def show_cursor(self) -> None:
        if not (self.hides_cursor and self.holding):  # outside a frame, a shell or an editor is about to take over
            super().show_cursor()

    @property
    def responds_to_cpr(self) -> bool:
        return False  # else the position of the cursor is asked for again and again, and answers come among the keys

    def flush(self) -> None:
        if self._buffer and not self.holding:
            self._buffer = ["\x1b[?2026h", *self._buffer, "\x1b[?2026l"]
            self.before_write()
            try:
                super().flush()
            except OSError:  # the terminal is gone; then its input ends, too, and with it the application
                discard_output()

    def disable_bracketed_paste(self) -> None:
        if not self.holding:
            super().disable_bracketed_paste()

    def erase_down(self) -> None:
        # tmux moves the screen into its history at ESC[J in the upper left corner, so begin one row below.
        self.write_raw("\x1b[K\x1b7\x1b[1B\r\x1b[J\x1b8")


class InlineApplication(Application[None]):
    """An application that finds its first row again after the terminal was resized."""

    drawn_size = (0, 0)
    """The rows and columns of the terminal at the last frame."""
    output: FrameOutput
    compose: Callable[[], list[str]]
    """Called before each frame. Returns its rows above the editor."""
    is_moving: Callable[[], bool]
    guard: Guard

    def _redraw(self, render_as_done: bool = False) -> None:
        with self.output.hold():
            self.follow_resize()
            above = self.compose()
            self.output.hides_cursor = self.is_moving()
            super()._redraw(render_as_done)
            if self.output.hides_cursor and not render_as_done:
                self._park_cursor()
        if not render_as_done:  # a parked cursor is above these rows, any other below them
            self.guard.prepare(above if self.output.hides_cursor else [])

    def _park_cursor(self) -> None:
        """Move the cursor to the first row. A terminal that is resized keeps it there, so that no row is miscounted.

        Without this, a frame that is on its way while the terminal is resized would be counted as broken anew.
        """
        if self.renderer._cursor_pos.y:
            self.output.cursor_up(self.renderer._cursor_pos.y)
        self.output.write_raw("\r")
        self.renderer._cursor_pos = Point(x=0, y=0)

    def _on_resize(self) -> None:
        self._redraw()

    def follow_resize(self) -> None:
        """If the size has changed, count the rows above the cursor as the terminal has broken them."""
        rows, columns = self.output.get_size()
        known, self.drawn_size = self.drawn_size, (rows, columns)
        renderer = self.renderer
        screen, cursor = renderer._last_screen, renderer._cursor_pos
        if screen is None or known == self.drawn_size:
            return
        above = cursor.y
        if breaks_rows_anew(os.environ):
            for y in range(cursor.y):
                row = screen.data_buffer[y]
                used = max((x + cell.width for x, cell in row.items() if cell.char.strip()), default=0)
                above += max(0, -(-used // columns) - 1)
            above += cursor.x // columns
        renderer._cursor_pos = Point(x=0, y=min(above, rows - 1))
        self.output.write_raw("\r")


class CursorMark(Processor):
    """Shows where the cursor is in the editor, while the cursor of the terminal is elsewhere."""

    def __init__(self, is_needed: Callable[[], bool]) -> None:
        self._is_needed = is_needed

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        fragments = transformation_input.fragments
        document = transformation_input.document
        if not self._is_needed() or transformation_input.lineno != document.cursor_position_row:
            return Transformation(fragments)
        letters = [*explode_text_fragments(fragments), ("", " ")]
        column = document.cursor_position_col
        letters[column] = ("reverse", letters[column][1])
        return Transformation(letters)


class Terminal:
    """The editor and the rows around it."""

    def __init__(
        self,
        *,
        above: Callable[[int, int], list[str]],
        below: Callable[[int], list[str]],
        label: Callable[[], str],
        shows_editor: Callable[[], bool],
        editor_rows: Callable[[], int],
        note_key: Callable[[], None],
        take: Callable[[int], list[str]],
        is_moving: Callable[[], bool],
        keys: KeyBindingsBase,
        completer: Completer | None = None,
        history: Callable[[], str | None] | None = None,
        no_color: bool = False,
        end_key: Callable[[], None] = lambda: None,
    ) -> None:
        """`above` returns the rows above the editor at a width and a height, `below` those below it at a width.

        `editor_rows` returns how many rows the editor may take; `note_key` is called at each key, before what it does.
        `take` returns the next lines to print at a width; it is asked again while it returns some. `is_moving` says
        whether the rows change with time. `end_key` is called after each key.
        """
        self._take, self._is_moving, self._on_key = take, is_moving, note_key
        self._timer: asyncio.TimerHandle | None = None
        self._last_frame = 0.0
        self._rows_drawn = 0
        self._title = ""
        past: History = ThreadedHistory(SafeHistory(history)) if history else InMemoryHistory()
        self.editor = Buffer(
            multiline=True,
            history=past,
            completer=completer,
            complete_while_typing=True,
            enable_history_search=False,
        )
        shown = Condition(shows_editor)
        depth = ColorDepth.MONOCHROME if no_color else None
        made = FrameOutput.from_pty(sys.stdout, term=os.environ.get("TERM"), default_color_depth=depth)
        self.output = cast(FrameOutput, made)
        control = BufferControl(self.editor, input_processors=[CursorMark(lambda: self.output.hides_cursor)])

        def prefix(line: int, piece: int) -> str:
            """Return what stands before a row of the editor: the label, or as many blanks."""
            return label() if line == piece == 0 else " " * len(label())

        def rows(make: Callable[[], list[str]]) -> Window:
            return Window(FormattedTextControl(lambda: to_fragments(make())), dont_extend_height=True, wrap_lines=False)

        def rule() -> list[str]:
            return ["\x1b[2m" + "─" * self.columns + "\x1b[0m"]

        self._lines_above: list[str] = []
        self._lines_below: list[str] = []

        def compose() -> list[str]:
            self._lines_above = above(self.columns, self.output.get_size().rows)
            self._lines_below = below(self.columns)
            return self._lines_above

        self._compose = compose
        layout = HSplit(
            [
                ConditionalContainer(rows(lambda: self._lines_above), Condition(lambda: bool(self._lines_above))),
                ConditionalContainer(rows(rule), shown),
                ConditionalContainer(
                    Window(
                        control,
                        wrap_lines=True,
                        get_line_prefix=prefix,
                        height=lambda: Dimension(min=1, max=editor_rows()),
                        dont_extend_height=True,
                    ),
                    shown,
                ),
                ConditionalContainer(rows(rule), shown),
                rows(lambda: self._lines_below),
            ]
        )
        self.application = InlineApplication(
            layout=Layout(layout, focused_element=control),
            key_bindings=merge_key_bindings([load_key_bindings(), keys]),
            output=self.output,
            input=create_input(sys.stdin),
            erase_when_done=True,
            editing_mode=EditingMode.EMACS,
            enable_page_navigation_bindings=False,
            mouse_support=False,
        )

        self.application.key_processor.after_key_press.add_handler(lambda _: end_key())
        self.application.compose, self.application.is_moving = compose, is_moving
        self.application.guard = self._guard = Guard()
        self.output.before_write = self._guard.check_launcher
        self.application.key_processor.before_key_press.add_handler(self._note_key)
        self.application.ttimeoutlen = 0.05
        self.application.timeoutlen = 0.15

    @property
    def columns(self) -> int:
        """The width for rows: the last column stays empty, as terminals differ on what follows it."""
        return max(self.output.get_size().columns - 1, 4)

    async def run(self, started: Callable[[], None]) -> None:
        """Show the editor until `exit` is called. `started` is called when the first frame is on its way."""

        def schedule() -> None:
            asyncio.get_running_loop().call_soon(started)
            asyncio.get_running_loop().call_soon(self._start_guard)

        try:
            await self.application.run_async(pre_run=schedule, handle_sigint=False)
        finally:
            if self._timer:
                self._timer.cancel()
            self._guard.end()
            if self._title:
                self.write(RESTORE_TITLE)

    def _start_guard(self) -> None:
        with suppress(OSError, ValueError):  # the output is no file
            self._guard.start(self.output.fileno())

    def exit(self) -> None:
        """End `run`, after what is left has been printed."""
        if self.application.is_running and not self.application.is_done:
            self._print_all()
            self.application.exit()

    def update(self) -> None:
        """Draw a frame soon, as something has changed."""
        if self._timer is None and self.application.is_running:
            loop = asyncio.get_running_loop()
            wait = max(0.0, self._last_frame + FRAME - loop.time())
            self._timer = loop.call_later(wait, self._draw_frame)

    def set_text(self, text: str) -> None:
        """Replace the text of the editor."""
        self.editor.reset()
        self.editor.text = text
        self.editor.cursor_position = len(text)

    def ring(self, sentence: str) -> None:
        """Ring the bell and show a notification (OSC 9)."""
        self.write(f"\x1b]9;{escape_line(sentence)[:200]}\x07\x07")

    def copy(self, text: str) -> None:
        """Copy a text to the clipboard of the terminal (OSC 52)."""
        self.write(f"\x1b]52;c;{base64.b64encode(text.encode(errors='replace')).decode()}\x07")

    def set_title(self, title: str) -> None:
        """Set the title of the window (OSC 2). The first time, the terminal keeps the former one."""
        if title != self._title and self.application.is_running:
            shown = clip(escape_line(title), TITLE_WIDTH)
            self.write(f"{'' if self._title else KEEP_TITLE}\x1b]2;{shown}\x07")
            self._title = title

    def write(self, sequence: str) -> None:
        """Write an escape sequence that shows nothing."""
        self.output.write_raw(sequence)
        self.output.flush()

    def _note_key(self, _: KeyProcessor) -> None:
        self._on_key()

    def _draw_frame(self) -> None:
        self._timer = None
        application = self.application
        if not application.is_running or application.is_done or application._running_in_terminal:
            return
        lines = self._take(self.columns)
        height = self._measure_height()
        if lines or height < self._rows_drawn:
            self._print(lines)
        else:
            application._redraw()
        self._rows_drawn = self._measure_height()
        self._last_frame = asyncio.get_running_loop().time()
        if lines or self._is_moving():
            self.update()

    def _measure_height(self) -> int:
        self._compose()
        size = self.output.get_size()
        return min(self.application.layout.container.preferred_height(size.columns, size.rows).preferred, size.rows)

    def _print_all(self) -> None:
        while lines := self._take(self.columns):
            self._print(lines)

    def _print(self, lines: Sequence[str]) -> None:
        """Print lines above the editor: over the rows of the last frame, which is drawn again below."""
        output, renderer = self.output, self.application.renderer
        self.application.follow_resize()
        with output.hold():
            if renderer._cursor_pos.y:
                output.cursor_up(renderer._cursor_pos.y)
            output.write_raw("\r\x1b[0m\x1b[?7h")
            for line in lines:
                output.write_raw(f"{line}\x1b[K\r\n")
            marks_pastes = renderer._bracketed_paste_enabled
            renderer.reset()
            renderer._bracketed_paste_enabled = marks_pastes  # it was not switched off
            self.application._redraw()


def to_fragments(lines: Sequence[str]) -> StyleAndTextTuples:
    """Convert lines with escape sequences of styles to fragments."""
    return to_formatted_text(ANSI("\n".join(lines)))


def restore() -> None:
    """Leave the terminal as it was found, also after a failure."""
    with suppress(OSError, ValueError):
        sys.stdout.write("\x1b[?2026l\x1b[?7h\x1b[?25h\x1b[?2004l\x1b[0m")
        sys.stdout.flush()
