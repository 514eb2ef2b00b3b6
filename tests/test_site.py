"""The documentation site is built without a network; dead links, orphans and files of other hosts are refused."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def site(load_script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    script = load_script("build_docs")
    monkeypatch.setattr(script, "STAGE", tmp_path / "docs")
    monkeypatch.setattr(script, "SITE", tmp_path / "site")
    return script


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("zensical"), reason="zensical is not installed; `uv sync --group docs` installs it")
def test_the_site_has_every_page_and_no_dead_link(site: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    site.main()
    pages = (site.SITE / "llms.txt").read_text("utf-8").count("\n- [")
    assert pages == len(list(site.STAGE.rglob("*.md"))) >= 80
    assert (site.SITE / "start" / "index.html").exists()
    assert (site.SITE / "start.md").exists(), "llms.txt names the Markdown of each page"


def test_every_page_is_in_the_navigation_once(site: ModuleType):
    pages = site.stage()
    assert sorted(site.write_config()) == sorted(pages)


def test_links_to_files_that_the_site_lacks_lead_to_the_repository(site: ModuleType):
    pages = site.find_pages()
    text = (
        "[a](../crow-core/src/crow_core/react.py) [b](../SECURITY.md#reports) [c](models.md) [d](https://a.example/b)"
    )
    rewritten = site.rewrite_links(f"{text}\n```text\n[e](nowhere.md)\n```\n", "docs/terminal.md", "terminal.md", pages)
    assert "[a](https://github.com/odellus/crow/blob/main/crow-core/src/crow_core/react.py)" in rewritten
    assert "[b](SECURITY.md#reports) [c](models.md) [d](https://a.example/b)" in rewritten
    assert "[e](nowhere.md)" in rewritten


def test_links_of_a_package_lead_to_pages(site: ModuleType):
    pages = site.find_pages()
    text = "[a](https://github.com/odellus/crow/blob/main/docs/hooks.md#the-hooks)"
    assert (
        site.rewrite_links(text, "crow-core/README.md", "packages/crow-core.md", pages) == "[a](../hooks.md#the-hooks)"
    )


def test_a_link_to_no_file_stops_the_build(site: ModuleType):
    with pytest.raises(SystemExit, match=r"docs/a\.md: the link b\.md leads to no file"):
        site.rewrite_links("[b](b.md)", "docs/a.md", "a.md", {})


def test_dead_links_missing_headings_and_other_hosts_are_found(site: ModuleType, tmp_path: Path):
    links = '<a href="b/">1</a> <a href="c/">2</a> <a href="b/#x">3</a> <a href="b/#y">4</a> <a href="https://a.example/">5</a>'
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text(f'<script src="https://a.example/x.js"></script>{links}')
    (tmp_path / "b" / "index.html").write_text('<h1 id="x">B</h1>')
    assert site.find_faults(tmp_path) == [
        "index.html loads https://a.example/x.js",
        "index.html: b/#y names no heading",
        "index.html: c/ leads nowhere",
    ]


def test_a_block_of_a_list_keeps_its_indentation(site: ModuleType):
    text = "3. Put it in:\n\n   ```lua\n   a = {\n     b = 1,\n   }\n   ```\n"
    assert site.adapt(text) == "3. Put it in:\n\n    ```lua\n    a = {\n      b = 1,\n    }\n    ```\n"
