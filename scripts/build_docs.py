"""Build the documentation site in `build/site`, without a network, and check it.

    uv run --group docs scripts/build_docs.py

Links of the pages lead to files of the repository. Those that the site does not have lead to GitHub instead. The build
fails at a link that leads nowhere, at a page that the navigation lacks, and at a file that a page loads from elsewhere.
"""

import posixpath
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urldefrag

import yaml

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
REPOSITORY = "https://github.com/odellus/crow"
TOP = ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
SLUGS = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"
"""Makes the anchors of headings as GitHub does, so that links work in both places."""
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def find_pages() -> dict[str, str]:
    """Return the path in the site of each file of the repository that is a page or a picture."""
    docs = ROOT / "docs"
    pages = {
        f"docs/{file.relative_to(docs)}": str(file.relative_to(docs)) for file in docs.rglob("*") if file.is_file()
    }
    pages |= {
        f"{file.parent.name}/README.md": f"packages/{file.parent.name}.md" for file in ROOT.glob("crow-*/README.md")
    }
    return pages | {"README.md": "index.md"} | {name: name for name in TOP}


def rewrite_links(text: str, source: str, page: str, pages: dict[str, str]) -> str:
    """Return the text of a page with links that work in the site.

    Args:
        source: The path of the file in the repository.
        page: Its path in the site.
        pages: The path in the site of each path in the repository.
    """

    def rewrite(match: re.Match[str]) -> str:
        target, fragment = urldefrag(match[1])
        own = re.match(rf"{REPOSITORY}/(?:blob|tree)/main/(.*)", target)
        if not target or (re.match(r"[a-z]+:", target) and not own):
            return match[1]
        path = own[1] if own else posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        here = next((pages[one] for one in (path, f"{path}/README.md") if one in pages), None)
        if path == "docs/decisions":
            here = "decisions/index.md"
        suffix = f"#{fragment}" if fragment else ""
        if here:
            return posixpath.relpath(here, posixpath.dirname(page) or ".") + suffix
        if not (ROOT / path).exists():
            sys.exit(f"{source}: the link {match[1]} leads to no file")
        return f"{REPOSITORY}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{suffix}"

    return "".join(part if is_fence(part) else LINK.sub(rewrite, part) for part in split_fences(text))


def split_fences(text: str) -> list[str]:
    """Split a page into its prose and its code blocks, in their order."""
    return re.split(r"(^ *```.*?^ *```)", text, flags=re.M | re.S)


def is_fence(part: str) -> bool:
    return part.lstrip(" ").startswith("```")


def adapt(text: str) -> str:
    """Return Markdown of GitHub as Python-Markdown reads it: four blanks in lists, one word after a fence."""
    parts = split_fences(re.sub(r"^( *```\w+) [^`\n]*$", r"\1", text, flags=re.M))
    return "".join(
        indent_fence(part) if is_fence(part) else re.sub(r"^ {2,3}(?=\S)", "    ", part, flags=re.M) for part in parts
    )


def indent_fence(block: str) -> str:
    """Return a block of a list with the four blanks that its item has, and its own indentation."""
    blanks = len(block) - len(block.lstrip(" "))
    return block if blanks in (0, 4) else re.sub(rf"^ {{{blanks}}}", "    ", block, flags=re.M)


def stage() -> list[str]:
    """Copy all pages into one folder, and return their paths there."""
    shutil.rmtree(STAGE, ignore_errors=True)
    pages = find_pages()
    for source, page in pages.items():
        (STAGE / page).parent.mkdir(parents=True, exist_ok=True)
        if page.endswith(".md"):
            text = (ROOT / source).read_text("utf-8")
            (STAGE / page).write_text(rewrite_links(adapt(text), source, page, pages), "utf-8")
        else:
            shutil.copy2(ROOT / source, STAGE / page)
    (STAGE / "decisions" / "index.md").write_text(list_decisions(), "utf-8")
    return [str(file.relative_to(STAGE)) for file in STAGE.rglob("*.md")]


def read_title(page: Path) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", page.read_text("utf-8"), re.M)
    return re.sub(r"[`*]", "", found[1]) if found else page.stem


def find_decisions() -> list[Path]:
    return sorted((STAGE / "decisions").glob("0*.md"))


def list_decisions() -> str:
    rows = [f"- [{read_title(file)}]({file.name})\n" for file in find_decisions()]
    return (
        f"# Decisions\n\nWhy crow is as it is: a page for each question that a newcomer would ask.\n\n{''.join(rows)}"
    )


def write_config() -> list[str]:
    """Write the configuration of the site, and return the pages of its navigation."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    decisions = [{read_title(file): f"decisions/{file.name}"} for file in find_decisions()]
    config["nav"] = [
        {"Decisions": ["decisions/index.md", *decisions]} if "Decisions" in part else part for part in config["nav"]
    ]
    config |= {"docs_dir": STAGE.name, "site_dir": SITE.name}
    text = yaml.safe_dump(config, sort_keys=False).replace("slugify: github", f"slugify: {SLUGS}")
    (STAGE.parent / "mkdocs.yml").write_text(text, "utf-8")
    return list(walk_nav(config["nav"]))


def walk_nav(nav: list[Any]) -> list[str]:
    """Return the pages of a navigation: each entry is a page, or one title with a page or with entries."""
    found: list[str] = []
    for entry in nav:
        (value,) = cast("dict[str, Any]", entry).values() if isinstance(entry, dict) else (entry,)
        found += [value] if isinstance(value, str) else walk_nav(value)
    return found


class Page(HTMLParser):
    """The anchors, the links and the loaded files of a built page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "a" and (href := values.get("href")):
            self.links.append(href)
        if tag in ("img", "script") and (src := values.get("src")):
            self.loaded.append(src)
        if tag == "link" and values.get("rel") in ("stylesheet", "icon") and (href := values.get("href")):
            self.loaded.append(href)


def find_faults(site: Path) -> list[str]:
    """Return each link that leads nowhere, and each file that a page loads from another host."""
    pages = {file: Page(file) for file in site.rglob("*.html")}
    faults: list[str] = []
    for file, page in pages.items():
        place = file.relative_to(site)
        faults += [f"{place} loads {one}" for one in page.loaded if re.match(r"(https?:)?//", one)]
        for link in [*page.links, *page.loaded]:
            target, fragment = urldefrag(link)
            if re.match(r"([a-z]+:|//|/)", target) or place.name == "404.html":
                continue
            path = (file.parent / unquote(target)).resolve() if target else file
            path = path / "index.html" if path.is_dir() else path
            if not path.exists():
                faults.append(f"{place}: {link} leads nowhere")
            elif fragment and path in pages and unquote(fragment) not in pages[path].anchors:
                faults.append(f"{place}: {link} names no heading")
    return sorted({*faults})


def write_llms_txt(nav: list[str]) -> None:
    """Write `llms.txt`, the list of all pages for models, with the Markdown of each page beside its HTML."""
    lines = ["# crow", "", "> A coding agent in Python: ACP outside, MCP inside, every request in SQL.", ""]
    for page in nav:
        lines.append(f"- [{read_title(STAGE / page)}]({page})")
        (SITE / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(STAGE / page, SITE / page)
    (SITE / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    pages = stage()
    nav = write_config()
    if orphans := {*pages} - {*nav}:
        sys.exit(f"The navigation in mkdocs.yml lacks {', '.join(sorted(orphans))}")
    shutil.rmtree(SITE, ignore_errors=True)
    command = ["zensical", "build", "--clean", "--strict", "--config-file", STAGE.parent / "mkdocs.yml"]
    if subprocess.run(command, check=False).returncode:
        sys.exit("zensical refused the pages; it said why, above")
    if faults := find_faults(SITE):
        sys.exit("\n".join(faults))
    write_llms_txt(nav)
    print(f"{len(nav)} pages in {SITE}")


if __name__ == "__main__":
    main()
