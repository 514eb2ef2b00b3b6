"""Draw a gallery of the terminal: 25 scenes of the real program at four sizes, as SVG, and compare their texts.

Each scene shows one feature. A scripted model answers; the rest is crow. `--folder` gets the pictures, `--check`
compares the text of each scene with the stored one in tests/gallery, `--update` stores it. What differs between two
runs is replaced in the text: seconds, dates, identifiers, and the position of the last row.
"""

import argparse
import asyncio
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from crow_core.testing import Failure, Reply, ScriptedServer
from crow_terminal.live import SPINNER
from screen_drawing import DARK, LIGHT, draw_still
from terminal_recorder import Recorder

SIZES = ("80x24", "100x30", "40x20", "160x45")
STORED = Path(__file__).parents[1] / "tests" / "gallery"
SETTLED = 0.25
"""Seconds without a change after which a screen is kept."""
KEYS = {"Esc": "\x1b", "Enter": "\r", "Shift-Tab": "\x1b[Z", "Alt-M": "\x1bm", "Down": "\x1b[B", "PgDn": "\x1b[6~"}
SETTINGS = """\
model = "maple-30b"

[models.maple-30b]
base_url = "{url}"
model = "maple-30b"
window = 32768
prices = {{ input = 0.25, output = 2.0, cached = 0.025 }}

[models.oak-70b]
base_url = "{url}"
model = "oak-70b"
window = 32768
"""
RECIPE = """\
# Pancakes for six

Whisk the **eggs**, then fold in the *flour*; the [recipe](https://example.org/pancakes) says why. `amounts(6)` returns:

| ingredient | four | six |
|---|---:|---:|
| flour (g) | 200 | 300 |
| eggs | 2 | **3** |
| Mehl, 小麦粉, دقيق 🥞 | 1 | 2 |

1. Rest the batter
   - ten minutes, *at least*
2. Bake it

```python
def amounts(people: int) -> dict[str, float]:
    return {name: amount * (people / SERVES) for name, amount in RECIPE.items() if amount > 0}
```

> Six people got the eggs of four.
"""
THOUGHT = "The user asks for six people. SERVES is 4, so the factor is 1.5, and two eggs become three."
HEREDOC = "\n".join(
    ["cat > menu.txt <<'EOF'", *(f"{n:2}. pancakes with topping number {n}" for n in range(1, 31)), "EOF"]
)
COUNT = """\
for n in $(seq 40); do echo "egg $n of 40"; done
while [ ! -e .go ]; do sleep 0.05; done
"""
EDIT = {"command": "str_replace", "path": "pancakes.py", "old_str": "people // SERVES", "new_str": "people / SERVES"}
STEPS = ("See which test fails", "Fix the code", "Run the tests again")


def call(tool: str, **arguments: Any) -> Any:
    return {"name": tool, "arguments": arguments}


def plan(done: int) -> Any:
    states = ["completed"] * done + ["in_progress"] + ["pending"] * len(STEPS)
    return call(
        "plan", entries=[{"content": step, "status": state} for step, state in zip(STEPS, states, strict=False)]
    )


class Model:
    """Answers each request with the next reply; `hold` makes the requests wait until `release`."""

    def __init__(self) -> None:
        self._replies: deque[Reply | Failure] = deque()
        self._free = asyncio.Event()
        self._free.set()

    def say(self, *replies: Reply | Failure) -> None:
        self._replies.extend(replies)

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    async def answer(self, request: dict[str, Any]) -> Reply | Failure:
        reply = self._replies.popleft() if self._replies else Reply("That is all.")
        await self._free.wait()
        return reply


class Walk:
    """A person who sees all scenes on a screen of one size."""

    def __init__(self, home: Path, size: str, server: ScriptedServer, model: Model, crow: Recorder) -> None:
        self.home, self.size, self.server, self.model, self.crow = home, size, server, model, crow
        self.project = home / "pancakes"
        self.texts: dict[str, str] = {}
        self.pictures: dict[str, str] = {}

    async def keep(self, name: str, colours: Mapping[str, str] = DARK) -> None:
        """Keep the screen as the scene of this name."""
        await self.crow.settle(SETTLED)
        self.texts[name] = f"{self.crow.screen.title}\n{self.read()}\n"
        self.pictures[name] = draw_still(self.crow.look(), f"{name}, {self.size}", dict(colours))

    def read(self) -> str:
        """Read the last rows, without what differs between two runs."""
        text = self.read_all().rstrip().replace(str(self.home), HOME)
        for pattern, steady in STEADY:
            text = re.sub(pattern, steady, text, flags=re.M)
        return "\n".join(text.split("\n")[-self.crow.screen.lines :])

    def read_all(self) -> str:
        """Read the screen and what has left it."""
        screen = self.crow.screen
        above = ["".join(row[x].data for x in range(screen.columns)).rstrip() for row in screen.history.top]
        return "\n".join([*above, *(line.rstrip() for line in screen.display)])

    def press(self, *keys: str) -> None:
        """Press keys, each a name of KEYS or a text."""
        for key in keys:
            self.crow.press(KEYS.get(key, key))

    async def see(self, text: str) -> None:
        """Wait until the screen shows a text, wherever rows end."""
        words = "".join(text.split())
        await self.crow.until(lambda shown: words in "".join(shown.split()).replace("│", ""), name=text)

    async def miss(self, text: str) -> None:
        """Wait until the screen does not show a text."""
        await self.crow.until(lambda shown: text not in shown, name=f"no more {text!r}")

    async def answer(self, key: str, mark: str = "╰ ") -> None:
        """Answer the question, once it takes keys."""
        await self.see("or ↑↓ Enter")
        self.press(key)
        await self.miss(mark)

    async def command(self, text: str, shown: str) -> None:
        """Give a command of one line."""
        self.press(text)
        await self.see(f"❯ {text}")
        self.press("Enter")
        await self.see(shown)


HOME = "/tmp/gallery-12345678"
"""Takes the place of the home, which is as long."""
STEADY: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"127\.0\.0\.1:\d{5}", "127.0.0.1:12345"),
    (r"^(. sh eggs.sh)  [\d.]+s", r"\1"),
    (r"(?<=crow-)(?:[0-9a-f]\n?){8}(?=\.md)", lambda found: re.sub(r"\w", "0", found[0])),
    (r"\d+\.\ds|\b\d+s\b(?!\w)|\dm \d\ds", "1s"),
    (rf"^[{SPINNER}]", "⠋"),
    (r"\n\n  Took 1s\.$", ""),
    (r"just now|\d+ minutes? ago", "just now"),
    (r"\b[0-9a-f]{8}\b", "01234567"),
    (r"about\s\d,\d{3} to \d,\d{3}", "about 3,700 to 3,600"),
    (r"\$0\.00\d\d", "$0.0050"),
)
"""The parts of a screen that differ between two runs, and what takes their place."""


async def walk(size: str) -> Walk:
    """See all scenes at one size, such as `80x24`."""
    columns, rows = map(int, size.split("x"))
    model = Model()
    home = Path(tempfile.mkdtemp(prefix="gallery-"))
    try:
        async with ScriptedServer(model.answer) as server:
            env = prepare(home, server.url)
            command = [sys.executable, "-m", "crow_cli"]
            with closing(Recorder(command, home / "pancakes", env, columns, rows)) as crow:
                one = Walk(home, size, server, model, crow)
                for scene in SCENES:
                    await scene(one)
    finally:
        shutil.rmtree(home, ignore_errors=True)  # crow may write while it ends
    return one


def prepare(home: Path, url: str) -> dict[str, str]:
    """Make the project of the demo in a home, with settings, and return the environment."""
    project = home / "pancakes"
    with as_file(files("crow_cli.demo") / "project") as kit:
        shutil.copytree(kit, project, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "my notes.txt").write_text("Buy flour.\n")
    (project / "eggs.sh").write_text(COUNT)
    (project / "pancakes.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 100)
    for words in (
        ["init", "-q", "-b", "main"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", "-C", project, *words], check=True)
    settings = home / ".config" / "crow"
    settings.mkdir(parents=True)
    (settings / "config.toml").write_text(SETTINGS.format(url=url))
    editor = home / "editor"
    editor.write_text("#!/bin/sh\nprintf 'Explain the recipe,\\nline by line.\\n' > \"$1\"\n")
    editor.chmod(0o755)
    return {
        "PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "TERM": "xterm-256color",
        "PYTHONDONTWRITEBYTECODE": "1", "EDITOR": str(editor), "CROW_SANDBOX": "off",
    }  # fmt: skip


# The scenes


async def begin(one: Walk) -> None:
    await one.see("maple-30b ·")
    await one.see("chooses another model")
    await one.keep("00-first-run")
    one.press("Compare these:\x0a- the recipe\x0a- ")
    one.press("\x1b[200~" + "\r".join(f"row {n}" for n in range(60)) + "\x1b[201~")
    await one.see("[paste 1: 60 lines]")
    await one.keep("01-prompt")
    one.press("\x03")
    await one.miss("Compare these")


async def read_answer(one: Walk) -> None:
    one.model.say(Reply(RECIPE, reasoning=THOUGHT))
    await one.command("How much for six?", "Six people got the eggs of four.")
    await one.miss("· Esc stops")
    await one.keep("06-markdown")


async def wait_and_stop(one: Walk) -> None:
    one.model.hold()
    asked = len(one.server.requests)
    await one.command("Plan a brunch", "· Esc stops")
    await one.server.until(lambda: len(one.server.requests) > asked)  # from now on, words wait for the next step
    await one.keep("04-working")
    await one.command("use metric units", "» use metric units")
    await one.keep("10-steer")
    one.press("Esc")
    await one.see("Cancelled.")
    await one.keep("02-stopped")
    one.press("\x15")
    one.model.release()


async def answer_questions(one: Walk) -> None:
    one.model.say(
        Reply("I look at the tests first, then change the code.", tool_calls=[plan(1), call("file_editor", **EDIT)]),
        Reply("Then I write the menu.", tool_calls=[call("terminal", command=HEREDOC)]),
        Reply("Now the eggs.", tool_calls=[plan(2), call("terminal", command="sh eggs.sh")]),
        Reply("**Done.** All 40 eggs are counted."),
    )
    await one.command("Fix the bug", "letter, or")
    await one.keep("03-question")
    one.press("a")
    await one.see("number, or")
    await one.keep("03-lasting")
    one.press("Esc")
    await one.see("letter, or")
    await one.answer("y", "Edit pancakes.py ─")
    await one.see("letter, or")
    await one.keep("03-long-command")
    await one.answer("n", "letter, or")
    await one.see("Why, or what to do instead")
    one.press("too many toppings")
    await one.keep("18-reason")
    one.press("Enter")
    await one.see("Run a command")
    await one.see("letter, or")
    await one.answer("y")
    await one.see("egg 40 of 40")
    await one.keep("05-output")
    (one.project / ".go").touch()
    await one.see("All 40 eggs are counted.")
    await one.miss("· Esc stops")
    await one.keep("22-plan")
    one.press("\x0f")
    await one.crow.until(lambda _: "  └ egg 1 of 40" in one.read_all())
    await one.keep("17-unfolded")


async def look_back(one: Walk) -> None:
    await one.command("/diff", "people / SERVES")
    await one.keep("15-diff")
    await one.command("!git status --short", "M pancakes.py")
    await one.keep("16-shell")


async def complete(one: Walk) -> None:
    one.press("/")
    await one.see("/rewind")
    await one.keep("08-commands")
    one.press("ex")
    await one.see("/export")
    one.press("\x03")
    one.press("see @")
    await one.see("pancakes.png")
    await one.keep("09-files")
    one.press("my")
    await one.see("notes.txt")
    one.press("\t")
    await one.see('@"my notes.txt"')
    one.press("\x03")
    await one.miss("my notes")
    await one.command("/help", "says what each does")
    await one.keep("08-help")


async def choose(one: Walk) -> None:
    one.press("Alt-M")
    await one.see("oak-70b")
    await one.keep("13-models")
    one.press("oak", "Enter")
    await one.see("oak-70b ·")
    one.press("Shift-Tab")
    await one.see("Accept edits")
    await one.command("/mode", "Yolo")
    await one.keep("14-modes")
    one.press("Esc")


async def edit_outside(one: Walk) -> None:
    one.press("\x07")
    await one.see("line by line.")
    await one.keep("19-editor")
    one.press("\x03")
    await one.miss("line by line.")


async def copy(one: Walk) -> None:
    await one.command("/copy", "Copied.")
    await one.command("/export", "Written to")
    await one.keep("20-export")


async def compact(one: Walk) -> None:
    one.model.say(Reply("The bug was fixed; six people get three eggs."))
    await one.command("/compact keep the numbers", "compacted")
    await one.miss("· Esc stops")
    await one.keep("21-compacted")


async def paste_image(one: Walk) -> None:
    one.press("What is on ", f"\x1b[200~{one.project}/pancakes.png\x1b[201~")
    await one.see("[image 1]")
    one.press("?")
    await one.keep("23-image")
    one.press("\x03")
    await one.miss("[image")


async def ask_to_fetch(one: Walk) -> None:
    fetch = call("fetch", url="https://north.example/eggs")
    one.model.say(Reply("I look at the prices.", tool_calls=[fetch]))
    await one.command("Where are eggs cheapest?", "letter, or")
    await one.keep("24-attention")
    one.press("Esc")
    await one.see("Cancelled.")


async def fail(one: Walk) -> None:
    one.model.say(Failure(401, {"error": {"message": "Wrong key"}}))
    await one.command("And butter?", "Wrong key")
    await one.keep("26-error")


async def go_back(one: Walk) -> None:
    await one.command("/rewind", "Go back to before which message?")
    await one.keep("12-rewind")
    one.press("Fix", "Enter")
    await one.see("Take back 3 messages")
    await one.keep("12-confirm")
    one.press("n")
    await one.miss("Take back 3 messages")


async def resume(one: Walk) -> None:
    await one.command("/new", "New session")
    await one.see("oak-70b ·")
    await one.miss("Starting")
    await one.command("/resume", "Sessions")
    await one.keep("11-sessions")
    one.press("Enter")
    await one.crow.until(lambda _: "still in mode" in one.read_all().partition("── Session")[2], name="the session")
    await one.miss("Starting")
    await one.keep("11-resumed")


async def change_theme(one: Walk) -> None:
    one.model.say(Reply(RECIPE, reasoning=THOUGHT))
    one.press("/theme light", "Enter")
    await one.command("Once more", "Six people got the eggs of four.")
    await one.miss("· Esc stops")
    await one.keep("25-light", LIGHT)
    one.press("/theme mono", "Enter")
    one.model.say(Reply("", tool_calls=[call("terminal", command="rm -r build")]))
    await one.command("Clean up", "letter, or")
    await one.keep("25-mono")
    one.press("Esc")
    await one.see("Cancelled.")
    await one.keep("07-footer")


SCENES: tuple[Callable[[Walk], Awaitable[None]], ...] = (
    *(begin, read_answer, wait_and_stop, answer_questions, look_back, complete, choose, edit_outside, copy),
    *(compact, paste_image, ask_to_fetch, fail, go_back, resume, change_theme),
)


def store(walks: list[Walk]) -> None:
    STORED.mkdir(exist_ok=True)
    for path in STORED.glob("*.txt"):
        path.unlink()
    for one in walks:
        (STORED / f"{one.size}.txt").write_text(join(one.texts))


def join(texts: Mapping[str, str]) -> str:
    return "\n".join(f"=== {name}\n{text}" for name, text in sorted(texts.items()))


def compare(walks: list[Walk]) -> int:
    """Print what differs from the stored texts, and return the exit code."""
    code = 0
    for one in walks:
        path = STORED / f"{one.size}.txt"
        stored = path.read_text().splitlines() if path.exists() else []
        lines = difflib.unified_diff(
            stored, join(one.texts).splitlines(), f"stored {one.size}", "now", lineterm="", n=8
        )
        for line in lines:
            code = 1
            print(line)
    return code


def draw(walks: list[Walk], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for one in walks:
        for name, picture in one.pictures.items():
            (folder / f"{name}-{one.size}.svg").write_text(picture, encoding="utf-8")
    print(f"{sum(len(one.pictures) for one in walks)} pictures in {folder}")


async def walk_all(sizes: list[str]) -> list[Walk]:
    return list(await asyncio.gather(*map(walk, sizes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=SIZES, help="columns and rows, such as 80x24")
    parser.add_argument("--folder", type=Path, help="where to draw the pictures")
    parser.add_argument("--check", action="store_true", help="compare with the stored texts")
    parser.add_argument("--update", action="store_true", help="store the texts")
    options = parser.parse_args()
    try:
        walks = asyncio.run(walk_all(list(options.sizes)))
    except TimeoutError as error:
        sys.exit(str(error))
    if options.folder:
        draw(walks, options.folder)
    if options.update:
        store(walks)
    if options.check:
        sys.exit(compare(walks))


if __name__ == "__main__":
    main()
