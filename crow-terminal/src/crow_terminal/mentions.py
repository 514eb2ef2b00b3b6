"""Files that a prompt mentions after `@`: listing them, matching the typed text, and quoting a name."""

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress

MENTION = re.compile(r"""(?:^|(?<=\s))@(?:"([^"\n]*)|'([^'\n]*)|((?:[^\s@"'][^\s@]*)?))$""")
"""A mention that is being typed: at the end of the text before the cursor."""
MAX_FILES = 50_000
"""Files that are listed."""
MAX_SHOWN = 50
"""Completions that are offered."""
LIST_SECONDS = 5.0
"""Seconds that git may take to list the files."""
SKIPPED = {".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", "venv", ".tox", "target", "dist", "build"}
"""Folders that are left out where git does not say what to leave out."""


def list_files(folder: str) -> list[str]:
    """List the files of a folder, relative to it: those that git does not ignore, or those outside of SKIPPED."""
    # A repository's own file system monitor is a program: it is not run.
    command = ["git", "-C", folder, "-c", "core.fsmonitor=false", "ls-files", "-coz", "--exclude-standard"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=LIST_SECONDS, stdin=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            names = done.stdout.decode(errors="surrogateescape").split("\0")
            return [name for name in names[:MAX_FILES] if name and name.isprintable()]
    return list(walk(folder))


def walk(folder: str) -> Iterable[str]:
    """Iterate over the files below a folder."""
    count = 0
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if each not in SKIPPED and not each.startswith("."))
        for name in sorted(files):
            path = os.path.relpath(os.path.join(root, name), folder)
            if path.isprintable():
                count += 1
                yield path
            if count >= MAX_FILES:
                return


def find_files(files: Sequence[str], words: str) -> list[str]:
    """Find the files that match the typed text, the best first: a folder counts as a file."""
    typed = words.lower()
    if not typed:
        return sorted({name.split("/")[0] + "/" if "/" in name else name for name in files})[:MAX_SHOWN]
    pattern = re.compile(".*?".join(map(re.escape, typed)))
    ranked: list[tuple[int, int, str]] = []
    for name in files:
        lower = name.lower()
        base = lower.rpartition("/")[2]
        rank = (
            0 if lower.startswith(typed)
            else 1 if base.startswith(typed)
            else 2 if typed in lower
            else 3 if pattern.search(lower)
            else None
        )  # fmt: skip
        if rank is not None:
            ranked.append((rank, len(name), name))
    return [name for _, _, name in sorted(ranked)[:MAX_SHOWN]]


def quote_name(name: str) -> str:
    """Put quotes around the name of a file that would end too early without, such as one with blanks."""
    if re.fullmatch(r"[^\s\"'`@]+", name):
        return name
    return f"'{name}'" if '"' in name else f'"{name}"'
