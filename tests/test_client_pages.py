"""The pages on clients show the settings that crow prints; the page on extensions of ACP has those of the code."""

import ast
import re
import textwrap
from pathlib import Path

import pytest
from crow_cli.acp import METHODS
from crow_cli.client_config import CLIENTS
from crow_core.agent.acp_agent import AcpAgent
from crow_core.trace import TRACE_KEYS

ROOT = Path(__file__).parents[1]
PAGES = {"zed": "zed", "jetbrains": "jetbrains", "neovim": "codecompanion", "emacs": "agent-shell", "toad": "toad"}
WIRE = ("crow-core/src/crow_core/agent", "crow-core/src/crow_core/acp")
FILES = [
    *(file for folder in WIRE for file in (ROOT / folder).glob("*.py")),
    *(ROOT / "crow-core/src/crow_core" / name for name in ("content.py", "session/user.py")),
    *(
        ROOT / "crow-cli/src/crow_cli/run.py",
        ROOT / "crow-permissions/src/crow_permissions/change_decisions.py",
        ROOT / "crow-permissions/src/crow_permissions/review.py",
        ROOT / "crow-terminal/src/crow_terminal/question.py",
    ),
]
"""The files that read and write `_meta` of ACP."""


def read_page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize(("page", "client"), PAGES.items())
def test_a_page_shows_the_settings_that_crow_prints(page: str, client: str):
    text = read_page(page)
    shown = [textwrap.dedent(code).strip() for code in re.findall(r"^ *```\w+\n(.*?)^ *```", text, re.M | re.S)]
    assert shown == [f"crow acp --print-config {client}", CLIENTS[client][0](["/path/to/crow", "acp"], {})]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_a_picture_or_says_that_nothing_was_run(page: str):
    text = read_page(page)
    pictures = re.findall(r"!\[[^]]+\]\((images/[^)]+)\)", text)
    assert all((ROOT / "docs" / picture).exists() for picture in pictures)
    assert bool(pictures) != ("Not run here" in text)


def find_notes() -> set[str]:
    """Return the keys of `_meta.crow` that the code reads or writes, from its dicts and patterns."""
    found: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.Dict(keys=[ast.Constant("crow")], values=[ast.Dict(keys=keys)]):
                    names = {str(key.value) for key in keys if isinstance(key, ast.Constant)}
                    found |= names if "kind" not in names else set()  # an entry of the log is written alike
                case ast.MatchMapping(keys=[ast.Constant("crow")], patterns=[ast.MatchMapping(keys=keys)]):
                    found |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
                case _:
                    pass
    return found


def test_the_page_on_extensions_of_acp_has_all_that_the_code_has():
    text = read_page("acp-extensions")
    methods = {*re.findall(r"^\| `(_\w+/\w+)` \|", text, re.M)}
    assert methods == {*METHODS}
    abilities = [
        node.value
        for node in ast.walk(ast.parse((ROOT / "crow-core/src/crow_core/agent/acp_agent.py").read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == AcpAgent.list_own_abilities.__name__
        for node in ast.walk(node)
        if isinstance(node, ast.Constant) and re.fullmatch(r"[a-z]+([A-Z][a-z]+)*", str(node.value))
    ]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
    assert {*abilities, *TRACE_KEYS} <= named
    assert len(notes := find_notes()) >= 6
    assert notes <= named
