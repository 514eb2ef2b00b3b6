from pathlib import Path

START = Path(__file__).parent / "files" / "CHANGELOG.md"


def changes_belong_to_the_release(workspace: Path, answer: str) -> None:
    sections = read_sections(workspace / "CHANGELOG.md")
    old = read_sections(START)
    assert list(sections) == ["# Changelog", "## Unreleased", "## 1.4.0 - 2026-03-14", *list(old)[2:]], (
        f"the headings are {list(sections)}"
    )
    assert sections["## Unreleased"] == [], "there are unreleased changes"
    assert sections["## 1.4.0 - 2026-03-14"] == old["## Unreleased"], "the changes of 1.4.0 are others"
    for heading in ["# Changelog", *list(old)[2:]]:
        assert sections[heading] == old[heading], f"{heading} has changed"


def read_sections(path: Path) -> dict[str, list[str]]:
    """Return the lines below each heading, without blank ones."""
    sections: dict[str, list[str]] = {}
    for line in read(path).splitlines():
        if line.startswith(("# ", "## ")):
            assert line.rstrip() not in sections, f"{line} is there twice"
            sections[line.rstrip()] = []
        elif line.strip():
            assert sections, f"{line} is above all headings"
            sections[list(sections)[-1]].append(line.rstrip())
    return sections


def read(path: Path) -> str:
    """Read a file of the workspace; raise AssertionError where it is absent, or is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise AssertionError(f"{path.name} cannot be read: {error}") from None
