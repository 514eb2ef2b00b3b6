"""Every block of code in a page is valid in its language, and what it imports from crow exists.

Other tests run the blocks: `test_docs.py`, `test_extension_guide.py`, `test_tutorial.py`, `test_commands_in_docs.py`,
and the tests of each package for its README.
"""

import ast
import importlib
import json
import re
import textwrap
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [
    file
    for pattern in ("*.md", "docs/*.md", "docs/decisions/*.md", "crow-*/*.md")
    for file in sorted(ROOT.glob(pattern))
    if file.name not in ("loop.md", "python.md")
]
"""All pages but the two that show parts of code, which are compared with the code."""
LANGUAGES = {"", "js", "json", "lisp", "lua", "py", "python", "sh", "text", "toml", "yaml"}


def find_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the code of each block."""
    found = re.findall(r"^ *```([^`\n]*)\n(.*?)^ *```", text, re.M | re.S)
    return [(info.partition(" ")[0], textwrap.dedent(code)) for info, code in found]


def check_block(language: str, code: str) -> None:
    """Raise an error of the language's parser, or AssertionError for a name that a package of crow lacks."""
    match language:
        case "json":
            json.loads(code)
        case "toml":
            tomllib.loads(code)
        case "yaml":
            yaml.safe_load(code)
        case "python" | "py":
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and re.match("crow_(?!glossary$)", node.module or ""):
                    module = importlib.import_module(node.module or "")
                    assert [one.name for one in node.names if not hasattr(module, one.name)] == []
        case _:
            assert language in LANGUAGES, f"no test knows the language {language}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```" in page.read_text("utf-8")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_blocks_of_a_page_are_valid(page: Path) -> None:
    for language, code in find_blocks(page.read_text("utf-8")):
        check_block(language, code)


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("json", "{"),
        ("toml", "a ="),
        ("yaml", "a: b: c"),
        ("python", "def"),
        ("py", "from crow_core import Nothing"),
        ("cobol", "STOP RUN."),
    ],
)
def test_a_broken_block_is_noticed(language: str, code: str) -> None:
    with pytest.raises((AssertionError, SyntaxError, ValueError, yaml.YAMLError)):
        check_block(language, code)
