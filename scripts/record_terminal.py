"""Record the terminal of crow as SVG images in docs/images: an animation and three still screens.

Everything shown is the real program on a pseudo-terminal, fixing the bug of the demo's project; only the model is a
script. Keys are typed once the screen shows what they answer, and the times of the animation are given below, so that
two recordings differ little. Run it with `just record`.
"""

import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, cast

from crow_core.testing import Reply, ScriptedServer
from screen_drawing import CELL, DARK, LIGHT, SIZE, Drawing, draw_still
from terminal_recorder import Frame, Recorder

IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLUMNS, ROWS = 88, 26
PACE = 0.1
"""Seconds between the fragments of a reply: more than a frame of the terminal, so that each is seen."""

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
    return drawing.frame_window(title, f'<g class="f">\n{film}\n</g>', (COLUMNS, ROWS), css)


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
        with closing(Recorder(["bash"], project, env, COLUMNS, ROWS)) as shell:
            await fix_the_bug(shell)
            write("terminal", draw_animation(shell.frames, "A recording of crow: it fixes the bug of its demo"))
            await look_back(shell)
            await leave(shell)


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
    await asyncio.sleep(1)  # the question takes keys after a pause
    await shell.answer("\r", step=0.1)
    await shell.until(lambda text: "all 4 pass" in text and "Working" not in text, step=0.1, hold=5.0)


async def look_back(shell: Recorder) -> None:
    """Ask crow, in light colours, what it has sent to the model."""
    shell.press("/theme light\r")
    shell.press("/calls\r")
    await shell.until("/calls last or", hold=1.0)
    write("calls", draw_still(shell.frames[-1], "crow lists the requests to the model", LIGHT))


async def leave(shell: Recorder) -> None:
    """Leave crow, and wait for its end: the folder that it writes to is deleted then."""
    shell.press("\x03\x03")
    await shell.until("Continue with")
    await shell.until(lambda text: text.rstrip().endswith("$"))


def write(name: str, image: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    path = IMAGES / f"{name}.svg"
    path.write_text(image, encoding="utf-8")
    print(f"{path.relative_to(IMAGES.parents[1])}: {len(image.encode()) // 1000} kB")


def main() -> None:
    assert sys.platform != "win32"  # it has no pseudo-terminals
    home = Path(tempfile.gettempdir(), "crow-demo")  # the same each time, as it is shown
    with open(f"{home}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another recording uses the same folder
        shutil.rmtree(home, ignore_errors=True)  # of a run that failed
        home.mkdir(mode=0o700)
        try:
            asyncio.run(record(home))
        finally:
            shutil.rmtree(home, ignore_errors=True)  # after a failure, crow may still write


if __name__ == "__main__":
    main()
