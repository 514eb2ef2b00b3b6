"""Texts before and after an edit, as a patch in the format of git."""

from collections.abc import Iterator
from difflib import unified_diff

PATCH_LIMIT = 400_000
"""Characters of both texts above which no patch is made, since it takes too long."""


def make_git_patch(path: str, old: str | None, new: str | None) -> str:
    """Make a patch that git can read; None stands for a file that does not exist.

    Empty for texts that are too long or equal, and for a path that git would quote.
    """
    before, after = old or "", new or ""
    if len(before) + len(after) > PATCH_LIMIT or before == after or not path.isprintable() or '"' in path:
        return ""
    mode = "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    tab = "\t" if " " in path else ""
    old_name, new_name = ("/dev/null" if text is None else f"{path}{tab}" for text in (old, new))
    lines = unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), old_name, new_name)
    return f"diff --git {path} {path}\n{mode}{''.join(end_lines(lines))}"


def end_lines(lines: Iterator[str]) -> Iterator[str]:
    """Mark the lines that have no newline at the end of their file, as git does."""
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
