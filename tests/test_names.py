"""Names of distributions: none is another program's, and no document installs by name what is not published."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TAKEN = {"crow", "crow-ai", "crow-cli", "crow-client", "crow-kit", "crow-mcp", "crow-memory"}
"""Distributions of other programs on the Python Package Index in November 2026."""
OURS = {
    tomllib.loads(path.read_text("utf-8"))["project"]["name"]
    for path in (ROOT / "pyproject.toml", *ROOT.glob("crow-*/pyproject.toml"))
}
INSTALL = re.compile(r"\b(?:uv tool install|uvx|uv pip install|uv add|pip install|pipx install|pipx run)\b([^\n`|#&]*)")
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "crow-*/*.md", "crow-*/src/**/*.md", "crow-*/src/**/*.py")
    for path in ROOT.glob(pattern)
    if path.name != "0020-names-on-the-package-index.md"
)


def test_no_distribution_has_the_name_of_another_program():
    assert len(OURS) == 1 + len(list(ROOT.glob("crow-*/pyproject.toml")))
    assert not OURS & TAKEN


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_install_our_distributions_from_a_clone_only(path: Path):
    words = [word for command in INSTALL.findall(path.read_text("utf-8")) for word in re.findall(r"[\w./~-]+", command)]
    assert not {word for word in words if word in OURS | TAKEN}


def test_install_commands_are_found():
    found = [INSTALL.search(f"{text} crow-core`") for text in ("uvx", "pip install", "run `uv tool install")]
    assert all(match and "crow-core" in match[1] for match in found)
