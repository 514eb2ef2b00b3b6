"""`crow worktrees`: list the git worktrees that sessions of their own work in, and ask what becomes of one."""

import os
from typing import TYPE_CHECKING

import click

from crow_cli.console import AS_JSON, print_json, print_note, print_table, shorten_path
from crow_cli.process import fail

if TYPE_CHECKING:
    from crow_cli.worktrees import LinkedTree, TreeChanges


@click.command()
@click.argument("name", required=False)
@AS_JSON
def worktrees(name: str | None, as_json: bool) -> None:
    """List the worktrees of this repository that `crow -w` has made. With NAME, merge, keep or remove it."""
    from crow_cli.worktree_session import end_tree  # imported here because the other commands do not need it
    from crow_cli.worktrees import NoWorktree, measure, read_repository

    try:
        repository = read_repository(os.getcwd())
        if name is None:
            found = [tree for tree in repository.list_made() if os.path.isdir(tree.folder)]
            print_trees([(tree, measure(tree, repository.main)) for tree in found], as_json=as_json)
        elif tree := repository.find(name):
            end_tree(tree, repository)
        else:
            fail(f"there is no worktree {name!r}. `crow worktrees` lists them, `crow -w {name}` makes one.")
    except NoWorktree as error:
        fail(str(error))


def print_trees(measured: "list[tuple[LinkedTree, TreeChanges]]", *, as_json: bool) -> None:
    """Print worktrees with the size of the work in them."""
    if as_json:
        print_json([{"folder": tree.folder, "branch": tree.branch, **to_row(changes)} for tree, changes in measured])
    elif measured:
        rows = [
            (os.path.basename(tree.folder), changes.describe() or "no changes", shorten_path(tree.folder, 40))
            for tree, changes in measured
        ]
        print_table(("NAME", "CHANGES", "FOLDER"), rows)
    else:
        print_note("crow has made no worktree of this repository: crow -w NAME opens a session in one.")


def to_row(changes: "TreeChanges") -> dict[str, int | str]:
    """Convert the changes in a worktree to a row of JSON."""
    return {"commits": changes.ahead, "uncommitted_files": changes.files, "size": changes.size}
