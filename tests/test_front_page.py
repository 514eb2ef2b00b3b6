"""The README is a front page: short, with commands, code, output, figures and comparisons that are true."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from crow_core import Crow, Server
from crow_core.testing import Reply, ScriptedModel, ScriptedServer, connect
from fastmcp import FastMCP

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "README.md").read_text("utf-8")
HOME = "/home/me/birds"
COMPARISON = (ROOT / "docs" / "comparison.md").read_text("utf-8")


def find_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def test_the_page_is_short_and_its_links_exist():
    text = re.sub(r"^```.*?^```|\||---", "", PAGE, flags=re.M | re.S)
    assert len(text.split()) <= 850
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_the_core_has_as_many_files_as_the_page_says():
    files = (ROOT / "AGENTS.md").read_text("utf-8").partition("in an afternoon: ")[2].partition(". ")[0]
    assert "[nine files](AGENTS.md)" in PAGE
    assert files.count(".py`") == 9


def test_the_first_code_is_the_two_commands_of_the_demo():
    first = re.findall(r"^```\w+\n(.*?)^```", PAGE, re.M | re.S)[0]
    assert [line.partition("  ")[0] for line in first.splitlines()] == ["pip install uv", "uv run crow demo"]


@pytest.mark.anyio
async def test_the_agent_of_the_page_answers_with_a_typed_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    call = {"name": "population", "arguments": {"city": "Rome"}}
    async with ScriptedServer([Reply(tool_calls=[call]), Reply("2750000")]) as server:
        for name, value in (("CROW_HOME", str(tmp_path)), ("OPENAI_BASE_URL", server.url), ("OPENAI_API_KEY", "key")):
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        names: dict[str, Any] = {"__name__": "readme"}
        exec(compile(find_blocks("python")[0], "README.md", "exec"), names)
        await names["main"]()
    assert capsys.readouterr().out == "2750000\n"


@pytest.mark.anyio
async def test_the_extension_of_the_page_refuses_what_does_more_than_read(tmp_path: Path):
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(find_blocks("python")[1], "README.md", "exec"), names)
    model = ScriptedModel([Reply(tool_calls=[{"name": "tools_write", "arguments": {}}]), Reply("Refused.")])
    tools = FastMCP("tools")
    tools.tool(lambda: "written", name="write")
    crow = Crow(model, servers=[Server("tools", lambda: tools, shared=True)]).use(names["read_only"], reason="No.")
    async with connect(crow) as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "Write.")
        (opened,) = crow.sessions.values()
        assert [entry["content"] for entry in opened.log if entry.get("role") == "tool"] == ["No."]


def hide_what_varies(text: str, folder: str) -> str:
    """Replace the folder, IDs, dates and seconds of an output."""
    text = text.replace(folder, HOME)
    text = re.sub(r"^[0-9a-f]{8}  \d\d-\d\d \d\d:\d\d", "ID  DATE", text, flags=re.M)
    return re.sub(r" \d+\.\d  ", " SECONDS  ", text)


@pytest.mark.slow
@pytest.mark.posix("the commands are for a POSIX shell")
@pytest.mark.anyio
async def test_the_commands_of_five_minutes_print_what_the_page_shows(tmp_path: Path):
    (folder := tmp_path / "birds").mkdir()
    (folder / "seen.csv").write_text("crow,3\nowl,1\ncrow,2\n")
    view: Any = {"name": "file_editor", "arguments": {"command": "view", "path": str(folder / "seen.csv")}}
    usage = {"prompt_tokens": 1912, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 1840}}
    replies = [
        Reply(tool_calls=[view], usage={"prompt_tokens": 1840, "completion_tokens": 38}),
        Reply("The crow, five times.", usage=usage),
    ]
    printed = ""
    async with ScriptedServer(replies) as server:
        env = {"HOME": str(tmp_path), "CROW_HOME": str(tmp_path / "home"), "OPENAI_BASE_URL": server.url}
        env |= {"OPENAI_API_KEY": "key", "CROW_MODEL": "qwen3-coder"}
        env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for line in "".join(find_blocks("sh")).splitlines():
            if re.match(r"crow (run|calls|perms)", line):
                process = await asyncio.create_subprocess_shell(
                    line,
                    cwd=folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                printed += (await process.communicate())[0].decode()
                assert process.returncode == 0, line
    found = [line for line in hide_what_varies(printed, str(folder)).splitlines() if line.strip()]
    shown = [line for line in hide_what_varies("".join(find_blocks("text")), HOME).splitlines() if line.strip()]
    assert len(found) >= len(shown) > 10
    for line, wanted in zip(found, shown, strict=False):
        start, cut, _ = wanted.partition("…")
        assert line.startswith(start) if cut else line == wanted


def find_rows(text: str, header: str) -> list[list[str]]:
    """Return the cells of a table's rows, without links."""
    table = text.split(header, 1)[1].split("\n\n", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [[re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell) for cell in row] for row in rows]


def test_the_facts_about_other_agents_have_sources():
    header = "| | crow | Claude Code | Codex CLI | OpenCode | pi |\n"
    rows = find_rows(PAGE, header)
    assert len(rows) >= 5
    assert rows == find_rows(COMPARISON, header)
    table = COMPARISON.split(header, 1)[1].split("\n\n", 1)[0]
    for line in table.splitlines()[1:]:
        assert line.count("](https://") >= 4, line


def test_what_the_comparison_says_of_crow_is_tested():
    named = re.findall(r"`(crow-[\w/-]+/test_\w+\.py)`", COMPARISON)
    assert len(named) >= 3
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_each_promise_has_a_figure_from_a_test_or_a_benchmark():
    table = PAGE.split("| you want |", 1)[1].split("\n\n", 1)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 8
    for row in rows:
        assert re.search(r"\]\([\w/-]*(tests/test_|benchmarks/)\w+\.py\)", row), row
    for file, figure in {
        "crow-persistence/tests/test_kill.py": "KILLS = SOAK or 20",
        "crow-agent/tests/test_budget.py": "(Budget(money=0.7), 7)",
        "tests/test_llama_cpp.py": '> 0.9 * before["input"]',
        "crow-extensions/tests/test_undo.py": "min_size=1, max_size=4",
        "benchmarks/search.py": "words and phrases take 1 to 64 ms",
        "benchmarks/chat.py": "first frame 154 to 202 ms",
    }.items():
        assert figure in (ROOT / file).read_text("utf-8"), f"README.md has a figure of {file} that changed"


def test_the_images_of_the_page_are_drawings_that_load_nothing_and_run_nothing():
    names = re.findall(r"\]\(([^)]+\.svg)\)", PAGE)
    assert len(names) >= 4
    drawn = {"svg", "title", "style", "defs", "g", "use", "rect", "path", "circle", "text"}
    for name in names:
        text = (ROOT / name).read_text("utf-8")
        assert len(text) < 300_000, f"{name} is large; see scripts/record_terminal.py"
        for element in ElementTree.fromstring(text).iter():
            assert element.tag.rpartition("}")[2] in drawn
            assert not [key for key in element.attrib if key.startswith("on")]
            assert element.get("href", "#").startswith("#")
        assert "url(" not in text
        assert "@import" not in text
