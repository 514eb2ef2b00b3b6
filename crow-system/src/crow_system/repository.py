"""Find the work trees of a git repository by its files, without running git (gitrepository-layout, git-worktree).

A folder of a linked work tree corresponds to the one with the same path below the main work tree. So data of a folder
is found in all work trees of its repository.
"""

import os
from collections.abc import Iterator
from contextlib import suppress

WORKTREES = ".worktrees"
"""The suffix of the folder that holds the linked work trees of crow, next to the main work tree."""


def find_main_folder(folder: str) -> str:
    """Return the folder of the main work tree that a folder corresponds to; the folder itself outside of a linked one.

    The repository has to name the linked work tree, too: a folder that only claims to belong to a repository does not.
    """
    top = find_top(folder)
    if top is None or not (main := find_main_tree(top)):
        return folder
    return join(main, os.path.relpath(os.path.realpath(folder), top))


def find_top(folder: str) -> str | None:
    """Return the top folder of the work tree that a folder is in, links resolved; None if it is in none."""
    here = os.path.realpath(folder)
    while not os.path.lexists(os.path.join(here, ".git")):
        if here == (here := os.path.dirname(here)):
            return None
    return here


def find_main_tree(top: str) -> str:
    """Return the main work tree of a linked one, given by its top folder; "" for any other folder."""
    common = "" if os.path.isdir(os.path.join(top, ".git")) else read_common_folder(top)
    return os.path.dirname(common) if os.path.basename(common) == ".git" else ""


def find_common_folder(folder: str) -> str:
    """Return the folder of git's files that all work trees of a folder's repository share; "" outside of a repository.

    Of a submodule, and of a folder that only claims to belong to a repository, it is the top folder.
    """
    if (top := find_top(folder)) is None:
        return ""
    own = os.path.join(top, ".git")
    return os.path.realpath(own) if os.path.isdir(own) else read_common_folder(top) or top


def read_common_folder(top: str) -> str:
    """Return the folder that a linked work tree shares with others; "" if the repository does not name this one."""
    own = os.path.join(top, ".git")
    try:
        git = os.path.realpath(os.path.join(top, read_line(own).removeprefix("gitdir:").strip()))
        common = os.path.realpath(os.path.join(git, read_line(os.path.join(git, "commondir"))))
        named = os.path.realpath(os.path.join(git, read_line(os.path.join(git, "gitdir"))))
    except OSError:
        return ""
    return common if os.path.dirname(git) == os.path.join(common, "worktrees") and named == own else ""


def list_same_folders(folder: str) -> list[str]:
    """List the folders that correspond to a folder in all work trees of its repository, the main one first.

    Only the folder itself if it is in no repository, or in one without a main work tree.
    """
    main = find_main_folder(folder)
    top = find_top(main)
    if top is None or not os.path.isdir(os.path.join(top, ".git")):
        return [folder]
    below = os.path.relpath(os.path.realpath(main), top)
    return list(dict.fromkeys([main, folder, *(join(each, below) for each in list_linked_trees(top))]))


def list_linked_trees(top: str) -> Iterator[str]:
    """Yield the top folders of the linked work trees of a main one; some may be gone."""
    names: list[str] = []
    with suppress(OSError):
        names = sorted(os.listdir(os.path.join(top, ".git", "worktrees")))
    for name in names:
        with suppress(OSError):
            git = os.path.join(top, ".git", "worktrees", name)
            yield os.path.dirname(os.path.realpath(os.path.join(git, read_line(os.path.join(git, "gitdir")))))


def find_folder_to_continue(stored: str, here: str) -> str:
    """Return the folder in which a stored session continues: its own if it is in another work tree of the same
    repository as `here`; else `here`."""
    is_other = stored != here and os.path.isdir(stored)
    return stored if is_other and find_main_folder(stored) == find_main_folder(here) else here


def read_line(path: str) -> str:
    """Return the first line of a small file of git. Raises OSError."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read(4096).partition("\n")[0].strip()


def join(top: str, below: str) -> str:
    """Join a top folder and a relative path, which may be `.`."""
    return os.path.normpath(os.path.join(top, below))
