"""Reads the branch of a folder from the files of git: the footer shows it, and no program has to start."""

import os
from contextlib import suppress

from crow_terminal.printable_text import escape_line


def read_branch(folder: str) -> str:
    """Read the branch that is checked out in a folder; empty outside of a repository."""
    while True:
        path = os.path.join(folder, ".git")
        with suppress(OSError, UnicodeDecodeError):
            if os.path.isfile(path):  # a worktree
                with open(path, encoding="utf-8") as file:
                    path = os.path.join(folder, file.read(4096).partition("gitdir:")[2].strip())
            with open(os.path.join(path, "HEAD"), encoding="utf-8") as file:
                head = file.read(4096).strip()
            return escape_line(head.removeprefix("ref: refs/heads/") if head.startswith("ref:") else head[:8])
        if (parent := os.path.dirname(folder)) == folder:
            return ""
        folder = parent
