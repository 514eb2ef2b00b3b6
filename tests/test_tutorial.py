"""Each step of docs/start.md runs, in the order of the page and in one empty home, and prints what the page shows."""

import asyncio
import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from crow_core.testing import Reply, ScriptedServer

pytestmark = pytest.mark.posix("the commands are for a POSIX shell")

PAGE = (Path(__file__).parents[1] / "docs" / "start.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S)
COVERED = {"uv run crow demo": "crow demo", "uv tool install .": "true", "crow setup": "true"}
"""Commands that other tests run: `test_install.py` and `crow-cli/tests/test_setup.py`."""
TOTAL = """import collections

totals = collections.Counter()
for line in open("seen.csv"):
    bird, number = line.split(",")
    totals[bird] += int(number)
for bird, number in totals.most_common():
    print(bird, number)
"""


def edit(**arguments: str) -> Reply:
    return Reply(tool_calls=[{"name": "file_editor", "arguments": arguments}])


def find_missing(expected: str, printed: str) -> list[str]:
    """Return the lines of a page that the output has not, in their order; `…` stands for any text or lines."""
    lines = iter(printed.splitlines())
    return [
        line
        for line in expected.splitlines()
        if line.strip() != "…" and not any(fnmatch.fnmatchcase(one, line.replace("…", "*")) for one in lines)
    ]


@pytest.mark.slow
@pytest.mark.anyio
async def test_every_step_prints_what_the_page_shows(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "work"
    folder.mkdir()
    birds = folder / "my birds"
    replies = [
        *(edit(command="view", path=str(birds / "seen.csv")), Reply("The crow, five times.")),
        *(edit(command="create", path=str(birds / "total.py"), file_text=TOTAL), Reply("It prints a line a bird.")),
        *(Reply("Owl."), Reply("6")),
    ]
    async with ScriptedServer(replies) as server:
        env = {"HOME": str(tmp_path), "CROW_HOME": str(home), "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "key"}
        env |= {"CROW_MODEL": "scripted", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        printed = ""
        for language, code in BLOCKS:
            if language == "sh":
                code = "\n".join(COVERED.get(line, line) for line in code.splitlines())
                process = await asyncio.create_subprocess_exec(
                    *("bash", "-ec", code),
                    cwd=birds if birds.exists() else folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                out, _ = await process.communicate()
                printed = out.decode()
                assert process.returncode == 0, f"{code}\n{printed}"
            elif language == "python":
                name, _, code = code.removeprefix("# ").partition("\n")
                file = (home if name.startswith("extensions/") else birds) / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(code)
            else:
                assert find_missing(code, printed) == [], printed
    assert len(server.requests) == len(replies)
    assert not (birds / "total.py").exists()
    assert "Answer in one word." in server.requests[4]["messages"][0]["content"]


def test_a_line_that_was_not_printed_is_noticed() -> None:
    assert find_missing("one…\n…\nfour", "one, two\nthree\nfour\n") == []
    assert find_missing("one\nfour\nthree", "one\nthree\nfour\n") == ["three"]
