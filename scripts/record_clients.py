"""Draw other clients with crow as SVG images in docs/images, each a real program with a scripted model.

    uv run scripts/record_clients.py toad=PATH/bin/toad
    uv run scripts/record_clients.py neovim=PATH/bin/nvim:PLUGINS    # a folder with codecompanion.nvim and plenary.nvim
    uv run scripts/record_clients.py acpx=$PWD/tests/node/node_modules/.bin

Each is configured as `crow acp --print-config` says. The project and the model are those of `record_terminal.py`.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import terminal_recorder
from crow_core.testing import ScriptedServer
from record_terminal import TASK, make_project, make_replies, write
from screen_drawing import DARK, draw_still
from terminal_recorder import Recorder

terminal_recorder.PATIENCE = 90.0  # these programs take their time

COLUMNS, ROWS = 120, 32
CROW = Path(sys.executable).parent
Record = Callable[[str, Path, dict[str, str]], Awaitable[None]]


def print_settings(client: str, env: dict[str, str]) -> str:
    """Return the output of `crow acp --print-config`."""
    command = [CROW / "crow", "acp", "--print-config", client]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


async def record_toad(place: str, project: Path, env: dict[str, str]) -> None:
    """Draw Toad while it asks about a change."""
    words = [place, "acp", "crow acp", ".", "--title", "crow"]
    with closing(Recorder(words, project, env, COLUMNS, ROWS)) as toad:
        await toad.until("Ask")
        await toad.type(TASK)
        toad.press("\r")
        await toad.until("Approval request")
        await toad.settle(2)
        write("toad", draw_still(toad.look(), "Toad shows a change that crow asks about", DARK))


def write_init(plugins: str, file: Path, env: dict[str, str]) -> Path:
    """Write the file with which Neovim starts, with the plugins of a folder."""
    paths = "".join(f"vim.opt.rtp:append({str(path)!r})\n" for path in Path(plugins).iterdir() if path.is_dir())
    file.write_text(paths + print_settings("codecompanion", env))
    return file


async def record_neovim(place: str, project: Path, env: dict[str, str]) -> None:
    """Draw a chat of codecompanion.nvim, after the first answers."""
    nvim, _, plugins = place.partition(":")
    start = write_init(plugins, project.parent / "init.lua", env)
    with closing(Recorder([nvim, "-u", str(start), "-n", "pancakes.py"], project, env, COLUMNS, ROWS)) as editor:
        await editor.until("SERVES")
        editor.press(":CodeCompanionChat\r")
        await editor.until("## Me")
        editor.press(f"i{TASK}\x1b")
        await editor.until("Find the bug")
        editor.press("\r")
        await editor.until("people / SERVES")
        await editor.settle(2)
        write("neovim", draw_still(editor.look(), "Neovim with codecompanion.nvim and crow", DARK))


async def record_acpx(place: str, project: Path, env: dict[str, str]) -> None:
    """Draw the output of one prompt in a shell."""
    (settings := project.parent / ".acpx").mkdir()
    (settings / "config.json").write_text(print_settings("acpx", env))
    env |= {"PATH": f"{place}:{env['PATH']}"}
    with closing(Recorder(["bash"], project, env, COLUMNS, ROWS)) as shell:
        await shell.until("$")
        await shell.type(f"acpx --approve-all crow exec '{TASK}'")
        shell.press("\r")
        await shell.until("all 4 pass")
        await shell.settle(2)
        write("acpx", draw_still(shell.look(), "acpx runs one prompt with crow", DARK))


CLIENTS: dict[str, Record] = {"toad": record_toad, "neovim": record_neovim, "acpx": record_acpx}


async def record(client: str, place: str, home: Path) -> None:
    project = make_project(home)
    async with ScriptedServer(make_replies()) as server:
        env = {
            "PATH": f"{CROW}:{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8", "TERM": "xterm-256color",
            "COLORTERM": "truecolor", "PYTHONDONTWRITEBYTECODE": "1",
            "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "none", "CROW_MODEL": "scripted",
        }  # fmt: skip
        await CLIENTS[client](place, project, env)


def main() -> None:
    for word in sys.argv[1:]:
        client, _, place = word.partition("=")
        home = Path(tempfile.mkdtemp(prefix="crow-client-"))
        try:
            asyncio.run(record(client, place, home))
        finally:
            shutil.rmtree(home, ignore_errors=True)  # a killed client may still write there


if __name__ == "__main__":
    main()
