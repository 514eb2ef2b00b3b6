"""Record the terminal of crow as SVG images in docs/images: an animation and three still screens.

Everything shown is the real program on a pseudo-terminal, fixing the bug of the demo's project; only the model is a
script. Keys are typed once the screen shows what they answer, and the times of the animation are given below, so that
two recordings differ little. Run it with `just record`.
"""

import asyncio
import fcntl
import hashlib
import os
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from html import escape
from importlib.resources import as_file, files
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyte
from crow_core.testing import Reply, ScriptedServer
from crow_terminal.live import SPINNER
from pyte.screens import Char

assert sys.platform != "win32"  # it opens a pseudo-terminal

IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLUMNS, ROWS = 88, 26
PATIENCE = 60.0
"""Seconds after which a screen that does not come is an error."""
PACE = 0.1
"""Seconds between the fragments of a reply: more than a frame of the terminal, so that each is seen."""
LONGEST = 0.4
"""Seconds that a frame is shown at most while the screen waits for the model or a command."""
END_OF_FRAME = b"\x1b[?2026l"

CELL, LINE, BASE, SIZE, MARGIN, BAR = 8.4, 18, 13, 14, 14, 30
"""The width, height and baseline of a cell, the size of the font, the margin and the height of the window's title, in
pixels."""
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
DARK = {
    "black": "#3b4252", "red": "#f07178", "green": "#a5d46a", "brown": "#ffcb6b",
    "blue": "#82aaff", "magenta": "#c792ea", "cyan": "#7fdbca", "white": "#d0d4de",
    "text": "#d6dae4", "ground": "#1b1e28", "bar": "#262a36", "brightblack": "#7a8194",
}  # fmt: skip
LIGHT = {
    "black": "#24292f", "red": "#c2262e", "green": "#1a7f37", "brown": "#8a5a00",
    "blue": "#0550ae", "magenta": "#8250df", "cyan": "#0b6e75", "white": "#57606a",
    "text": "#24292f", "ground": "#ffffff", "bar": "#eaeef2", "brightblack": "#6e7781",
}  # fmt: skip

TASK = "One of the tests fails. Find the bug and fix it."
FILE = "pancakes.py"
TESTS = "python -m unittest"
REPORT = """\
**Fixed.** `people // SERVES` threw the remainder away, so six people got the eggs of four.

| | before | now |
|---|---|---|
| eggs for six | 2 | **3** |
| tests | 1 fails | all 4 pass |
"""


def make_plan(done: int) -> dict[str, Any]:
    """Make the call of the tool `plan` when so many steps are done."""
    steps = ("See which test fails", "Fix the code", "Run the tests again")
    states = ["completed"] * done + ["in_progress"] + ["pending"] * len(steps)
    entries = [{"content": step, "status": state} for step, state in zip(steps, states, strict=False)]
    return {"name": "plan", "arguments": {"entries": entries}}


def make_call(tool: str, **arguments: str) -> dict[str, Any]:
    return {"name": tool, "arguments": arguments}


def make_replies() -> list[Reply]:
    """Make the script of the model."""
    edit = {"path": FILE, "old_str": "people // SERVES", "new_str": "people / SERVES"}
    steps: list[tuple[str, list[dict[str, Any]]]] = [
        ("I run the tests first.", [make_plan(0), make_call("terminal", command=TESTS)]),
        ("Six people get the eggs of four. I look at the code.", [make_call("file_editor", command="view", path=FILE)]),
        ("`//` counts whole recipes only.", [make_plan(1), make_call("file_editor", command="str_replace", **edit)]),
        ("Now the tests again.", [make_plan(2), make_call("terminal", command=TESTS)]),
        ("", [make_plan(3)]),
        (REPORT, []),
    ]  # fmt: skip
    return [Reply(words, tool_calls=cast(Any, calls), pace=PACE) for words, calls in steps]


class Screen(pyte.Screen):
    """A screen that keeps the attribute *dim* too, in place of *blink*, which crow does not use."""

    def select_graphic_rendition(self, *attrs: int) -> None:
        if attrs[:1] and attrs[0] not in (38, 48):
            attrs = tuple(each for one in attrs for each in {2: (5,), 22: (22, 25)}.get(one, (one,)))
        super().select_graphic_rendition(*attrs)


Row = tuple[Char, ...]


class Frame(NamedTuple):
    """A screen of the recording, and how long it is shown."""

    rows: tuple[Row, ...]
    cursor: tuple[int, int] | None
    """Its column and row; None while it is hidden."""
    seconds: float


def is_spinner(row: Row) -> bool:
    return row[0].data in SPINNER


class Recorder:
    """A program on a pseudo-terminal, whose screens are kept."""

    def __init__(self, command: Sequence[str], folder: Path, env: dict[str, str]) -> None:
        self.screen = Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.frames: list[Frame] = []
        self._buffer = b""
        self._main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=env, start_new_session=True
        )
        os.close(terminal)
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._main, self._read)
        self._step = 0.0

    def _read(self) -> None:
        try:
            self._buffer += os.read(self._main, 65536)
        except OSError:
            asyncio.get_running_loop().remove_reader(self._main)
        while END_OF_FRAME in self._buffer:
            frame, _, self._buffer = self._buffer.partition(END_OF_FRAME)
            self.stream.feed(frame)
            if self._step:
                self.keep(self._step)
        if b"\x1b[?2026h" not in self._buffer:
            self.stream.feed(self._buffer)
            self._buffer = b""
        self._changed.set()

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def keep(self, seconds: float) -> None:
        """Keep the screen as it is now; if only the spinner has moved, the last frame is shown longer instead."""
        screen = self.screen
        rows = tuple(tuple(screen.buffer[y][x] for x in range(COLUMNS)) for y in range(ROWS))
        cursor = None if screen.cursor.hidden else (screen.cursor.x, screen.cursor.y)
        last = self.frames[-1] if self.frames else None
        if last and all(
            one == other or (is_spinner(one) and is_spinner(other)) for one, other in zip(last.rows, rows, strict=True)
        ):
            self.frames[-1] = Frame(rows, cursor, min(last.seconds + seconds, max(last.seconds, seconds, LONGEST)))
        else:
            self.frames.append(Frame(rows, cursor, seconds))

    async def until(self, condition: str | Callable[[str], bool], *, hold: float = 0.0, step: float = 0.0) -> None:
        """Wait until the screen shows a text, and keep it for `hold` seconds; frames before it for `step` seconds."""
        self._step = step
        try:
            async with asyncio.timeout(PATIENCE):
                while not (condition in self.text if isinstance(condition, str) else condition(self.text)):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            sys.exit(f"The screen never showed {condition!r}. It shows:\n{self.text}")
        finally:
            self._step = 0.0
        if hold:
            self.keep(hold)

    async def type(self, text: str, seconds: float = 0.05) -> None:
        """Type a text, a character each time the screen shows the one before it."""
        typed = ""
        for letter in text:
            self.press(letter)
            typed += letter
            await self.until(lambda shown, typed=typed: typed.rstrip() in shown, hold=seconds)

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    async def answer(self, keys: str, step: float = 0.0) -> None:
        """Press keys once the question that is shown takes them, and wait until it is answered."""
        await self.until(" or ↑↓ Enter", step=step)
        self.press(keys)
        await self.until(lambda shown: " or ↑↓ Enter" not in shown, step=step)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._main)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)


# SVG


def get_style(cell: Char, colours: dict[str, str]) -> tuple[str, str, str]:
    """Return the colour of a character, that of its ground (empty for none), and its other properties in CSS."""

    def find(name: str, default: str) -> str:
        return (
            default
            if name == "default"
            else colours.get(name) or colours.get(name.removeprefix("bright")) or f"#{name}"
        )

    front, back = find(cell.fg, colours["text"]), find(cell.bg, "")
    if cell.reverse:
        front, back = back or colours["ground"], front
    css = "font-weight:bold;" * cell.bold + "font-style:italic;" * cell.italics + "opacity:.6;" * cell.blink
    css += "text-decoration:underline;" * cell.underscore
    return front, back, css


class Drawing:
    """Draws screens; each row that occurs is defined once."""

    def __init__(self, colours: dict[str, str]) -> None:
        self.colours = colours
        self.rows: dict[str, str] = {}
        self.classes: dict[str, str] = {}

    def draw(self, frame: Frame) -> str:
        """Return the uses of the rows of a frame."""
        uses = list[str]()
        for y, row in enumerate(frame.rows):
            if drawn := self._draw_row(row):
                name = f"r{hashlib.sha1(drawn.encode()).hexdigest()[:6]}"
                self.rows[name] = drawn
                uses.append(f'<use href="#{name}" y="{y * LINE}"/>')
        if frame.cursor:
            x, y = frame.cursor
            uses.append(f'<rect class="c" x="{x * CELL:g}" y="{y * LINE}" width="{CELL}" height="{LINE}"/>')
        return "".join(uses)

    def _draw_row(self, row: Row) -> str:
        drawn = list[str]()
        at = 0
        for (front, back, css), cells in groupby(row, lambda cell: get_style(cell, self.colours)):
            text = [cell.data for cell in cells]
            if back:
                drawn.append(f'<rect x="{at * CELL:g}" width="{len(text) * CELL:g}" height="{LINE}" fill="{back}"/>')
            name = self.classes.setdefault(f"fill:{front};{css}", f"s{len(self.classes)}")
            for start, length, piece in split_cells(text):
                where = f'x="{(at + start) * CELL:g}" y="{BASE}" textLength="{length * CELL:g}"'
                drawn.append(f'<text class="{name}" {where}>{escape(piece, quote=False)}</text>')
            at += len(text)
        return "".join(drawn)

    def frame_window(self, title: str, content: str, css: str = "") -> str:
        """Return the image: a window with this content."""
        width, height = COLUMNS * CELL + 2 * MARGIN, ROWS * LINE + BAR + 2 * MARGIN
        colours = self.colours
        styles = [
            f"text{{font:{SIZE}px {FONTS};white-space:pre}}",
            f".c{{fill:{colours['text']};opacity:.7}}",
            *(f".{name}{{{style}}}" for style, name in self.classes.items()),
        ]
        lights = "".join(
            f'<circle cx="{20 + 20 * n}" cy="{BAR / 2:g}" r="6" fill="{colour}"/>'
            for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        )
        # A fixed baseline and length of each piece of text make the cells alike in every font.
        rows = "\n".join(f'<g id="{name}">{row}</g>' for name, row in sorted(self.rows.items()))
        return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">
<title>{escape(title)}</title>
<style>{"".join(styles)}{css}</style>
<defs>
{rows}
</defs>
<rect width="100%" height="100%" rx="9" fill="{colours["ground"]}"/>
<path d="M0 {BAR}V9a9 9 0 0 1 9-9H{width - 9:g}a9 9 0 0 1 9 9V{BAR}z" fill="{colours["bar"]}"/>
{lights}
<svg x="{MARGIN}" y="{BAR + MARGIN}" width="{COLUMNS * CELL:g}" height="{ROWS * LINE}">
{content}
</svg>
</svg>
"""


def split_cells(cells: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Split cells into pieces of text, each with its first column and its columns, without the blanks between them.

    A character beyond ASCII is a piece of its own, as it may come from another font, with another width; so are lines.
    """
    start = 0
    for kind, group in groupby(cells, key=lambda each: "ascii" if each.isascii() and each != "" else each or "wide"):
        piece = [*group]
        if kind == "ascii":
            text = "".join(piece)
            at = 0
            for part in text.split("  "):
                if part.strip():
                    lead = len(part) - len(part.lstrip())
                    yield start + at + lead, len(part.strip()), part.strip()
                at += len(part) + 2
        elif kind in "─━│":
            yield start, len(piece), "".join(piece)
        elif kind != "wide":
            for n, letter in enumerate(piece):
                after = start + n + 1
                yield start + n, 2 if after < len(cells) and cells[after] == "" else 1, letter
        start += len(piece)


def draw_still(frame: Frame, title: str, colours: dict[str, str]) -> str:
    drawing = Drawing(colours)
    return drawing.frame_window(title, drawing.draw(frame))


def draw_animation(frames: Sequence[Frame], title: str) -> str:
    """Draw the frames side by side, as on a film that moves by one frame at a time."""
    drawing = Drawing(DARK)
    width = COLUMNS * CELL + 2 * SIZE  # of a frame, with room beside it for what reaches out of the last cell
    total = sum(frame.seconds for frame in frames)
    content, moves, at = list[str](), list[str](), 0.0
    for n, frame in enumerate(frames):
        content.append(f'<g transform="translate({n * width:g})">{drawing.draw(frame)}</g>')
        moves.append(f"{at / total:.4%}{{transform:translateX({-n * width:g}px)}}")
        at += frame.seconds
    last = f"transform:translateX({-(len(frames) - 1) * width:g}px)"
    css = (
        f".f{{animation:film {total:.2f}s steps(1,end) infinite}}@keyframes film{{{''.join(moves)}}}"
        f"@media(prefers-reduced-motion:reduce){{.f{{animation:none;{last}}}}}"
    )
    film = "\n".join(content)
    return drawing.frame_window(title, f'<g class="f">\n{film}\n</g>', css)


# The recordings


def make_project(home: Path) -> Path:
    """Copy the project of the demo, as a repository of git."""
    project = home / "pancakes"
    with as_file(files("crow_cli.demo") / "project") as kit:
        shutil.copytree(kit, project, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q", "-b", "main", project], check=True)
    (home / ".bashrc").write_text("PS1='$ '\n")
    return project


async def record(home: Path) -> None:
    """Do the task of the demo in a shell, and write the images."""
    project = make_project(home)
    async with ScriptedServer(make_replies()) as server:
        env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home), "LANG": "C.UTF-8", "TERM": "xterm-256color", "PYTHONDONTWRITEBYTECODE": "1",
            "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none", "CROW_MODEL": "scripted",
        }  # fmt: skip
        with closing(Recorder(["bash"], project, env)) as shell:
            await fix_the_bug(shell)
            write("terminal", draw_animation(shell.frames, "A recording of crow: it fixes the bug of its demo"))
            await look_back(shell)


async def fix_the_bug(shell: Recorder) -> None:
    await shell.until("$", hold=0.8)
    await shell.type("crow")
    shell.press("\r")
    await shell.until("scripted ·", hold=1.0)
    await shell.type(TASK)
    shell.press("\r")
    await shell.until("letter, or", step=0.1, hold=1.5)
    write("diff", draw_still(shell.frames[-1], "crow shows a change and asks about it", DARK))
    shell.press("a")
    await shell.until("number, or", step=0.1, hold=2.5)
    write("permission", draw_still(shell.frames[-1], "crow asks for how long an answer holds", DARK))
    await shell.answer("\r", step=0.1)
    await shell.until(lambda text: "all 4 pass" in text and "Working" not in text, step=0.1, hold=5.0)


async def look_back(shell: Recorder) -> None:
    """Ask crow, in light colours, what it has sent to the model."""
    shell.press("/theme light\r")
    shell.press("/calls\r")
    await shell.until("/calls last or", hold=1.0)
    write("calls", draw_still(shell.frames[-1], "crow lists the requests to the model", LIGHT))


def write(name: str, image: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    path = IMAGES / f"{name}.svg"
    path.write_text(image, encoding="utf-8")
    print(f"{path.relative_to(IMAGES.parents[1])}: {len(image.encode()) // 1000} kB")


def main() -> None:
    home = Path(tempfile.gettempdir(), "crow-demo")  # the same each time, as it is shown
    home.mkdir(mode=0o700)
    try:
        asyncio.run(record(home))
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()
