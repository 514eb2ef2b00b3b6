"""Begin a session in a git worktree of its own, and ask at its end what becomes of the worktree."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import crow_system as system
from crow_agent.settings.config import load_config, load_environment, load_project_config
from crow_agent.settings.home import Home
from crow_agent.settings.trust import TrustedFolders
from crow_core.text import escape_controls, to_line
from crow_system.git import find_foreign_settings
from crow_system.repository import find_main_folder
from crow_system.shortening import format_count

from crow_cli.console import print_diff, print_note
from crow_cli.menu import choose
from crow_cli.worktrees import (
    LinkedTree,
    NoWorktree,
    Repository,
    TreeChanges,
    check_name,
    choose_name,
    diff,
    hold,
    is_open_elsewhere,
    make_tree,
    measure,
    merge,
    read_repository,
    remove,
)

SETUP_TIMEOUT = 600.0
"""Seconds that the set-up command may take."""
SETUP_DONE = "crow-setup"
"""The file in git's folder of a worktree that says that its set-up command has succeeded."""
MAX_DIFF_LINES = 100
"""Lines of a diff that are printed; a longer one is shown in a pager."""
KEPT = "The worktree is kept. To be asked again: crow worktrees {}"


def begin_session(folder: str, name: str, words: str) -> str:
    """Make a worktree, or find the one of that name, and set it up; return the folder in it for a session. An empty
    name is made of `words`, or the date.

    Raises NoWorktree, ConfigError.
    """
    repository = read_repository(folder)
    check_settings(repository)
    name = name or choose_name(repository, words)
    check_name(name, repository.top)
    tree, sentences = make_tree(repository, name)
    for sentence in sentences:
        print_note(sentence)
    set_up(tree, repository)
    inside = os.path.normpath(os.path.join(tree.folder, repository.below))
    return inside if os.path.isdir(inside) else tree.folder


def check_settings(repository: Repository) -> None:
    """Raise NoWorktree if git would run a program that the settings of an untrusted repository name."""
    folder = repository.main.folder
    if TrustedFolders(Home.find(os.environ).data).is_trusted(Path(folder)):
        return
    with suppress(OSError):
        if foreign := find_foreign_settings(repository.top):
            raise NoWorktree(
                f"The settings of the repository in {folder} may name a program ({to_line(foreign[0])}), which git "
                f"would run: trust the folder first, by crow trust {folder}"
            )


def find_setup(repository: Repository) -> tuple[str, list[str]]:
    """Find the set-up command, and the variables that it does not inherit. That of a project counts if its folder is
    trusted. Raises ConfigError."""
    from crow_agent.app import find_key_variables  # imported here because the app is slow to load

    home = Home.find(os.environ)
    config, env = load_config(home, os.environ), load_environment(home, os.environ)
    command, trust = config.worktree.setup, TrustedFolders(home.data)
    for project in map(Path, dict.fromkeys((find_main_folder(repository.top), repository.top))):
        if trust.is_trusted(project) and (own := load_project_config(project, env).worktree.setup):
            command = own
            break
    return command, find_key_variables(env, config)


def set_up(tree: LinkedTree, repository: Repository) -> None:
    """Run the set-up command in a worktree where it has not succeeded yet, and show what it prints.

    Raises ConfigError.
    """
    command, hidden = find_setup(repository)
    with suppress(OSError):
        if not command or os.path.exists(done := os.path.join(tree.git, SETUP_DONE)):
            return
        print_note(f"Setting it up: {to_line(command)} (Ctrl-C skips it)")
        if fault := run_setup(command, tree.folder, hidden):
            again = f"crow -w {tree.branch or os.path.basename(tree.folder)} runs it again"
            print_note(f"The set-up command {fault}. The worktree can be used; {again}.")
        else:
            Path(done).touch()


def run_setup(command: str, folder: str, hidden: list[str]) -> str:
    """Run a set-up command; return "", or why it did not succeed."""
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    try:
        process = subprocess.Popen(
            system.make_shell_command(command),
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            creationflags=system.NEW_GROUP,
        )
    except OSError as error:
        return f"could not be started ({error.strerror})"
    fault = ""
    try:
        code = process.wait(SETUP_TIMEOUT)
        return f"failed (exit code {code})" if code else ""
    except subprocess.TimeoutExpired:
        fault = f"took more than {SETUP_TIMEOUT:g} seconds and was stopped"
    except KeyboardInterrupt:
        fault = "was stopped"
    finally:
        if process.returncode is None:
            system.kill_group(process.pid)
            process.wait()
    return fault


class OpenTree:
    """The worktree of the session that is open in the terminal."""

    def __init__(self, folder: str) -> None:
        self.folder, self._mark = folder, -1
        with suppress(NoWorktree, OSError):
            if (found := find_tree(folder)) is not None:
                self._mark = hold(found[0])

    def end(self, *, ask: bool) -> None:
        """Ask what becomes of the worktree, if crow has made it; one without changes is removed."""
        if self._mark != -1:
            os.close(self._mark)
        try:
            if (found := find_tree(self.folder)) is not None and ask:
                end_tree(*found)
        except NoWorktree as error:
            print_note(str(error))


def find_tree(folder: str) -> tuple[LinkedTree, Repository] | None:
    """Find the worktree of crow that a folder is in. Raises NoWorktree."""
    repository = read_repository(folder)
    top = os.path.realpath(repository.top)
    tree = next((each for each in repository.list_made() if os.path.realpath(each.folder) == top), None)
    return (tree, repository) if tree else None


def end_tree(tree: LinkedTree, repository: Repository) -> None:
    """Ask whether to merge, keep or remove a worktree, and do it. Raises NoWorktree; nothing is lost then."""
    name, changes = os.path.basename(tree.folder), measure(tree, repository.main)
    if is_open_elsewhere(tree):
        print_note(f"The worktree {name} is open in another terminal, so it is kept.")
    elif not (changes.ahead or changes.own or changes.files):
        print_note(f"Nothing was changed in the worktree {name}. {remove(tree, repository, changes)}")
    elif not (sys.stdin.isatty() and sys.stdout.isatty()):
        print_note(f"{name} has {changes.describe()}. {KEPT.format(name)}")
    else:
        ask_end(tree, repository, changes)


def ask_end(tree: LinkedTree, repository: Repository, changes: TreeChanges) -> None:
    """Ask until the user has an answer other than to see the diff. Raises NoWorktree."""
    name, main = os.path.basename(tree.folder), repository.main
    options: list[tuple[Callable[[], str] | None, str]] = [(lambda: KEPT.format(name), "Keep it")]
    if tree.branch and main.branch and not main.is_bare:
        first = "commit what is left, " if changes.files else ""
        label = f"Merge it: {first}merge into {main.branch} in {main.folder}, remove the worktree"
        options.append((lambda: end_by_merging(tree, repository), label))
    options += [
        (lambda: end_by_removing(tree, repository, changes), "Remove it, and lose this"),
        (None, "Show the diff"),
    ]
    print_note(f"The worktree {name} has {changes.describe()}.")
    try:
        while (act := choose("What becomes of it?", options)) is None:
            show_diff(diff(tree, changes.start))
        print_note(act())
    except (KeyboardInterrupt, EOFError, click.Abort):
        print_note(KEPT.format(name))


def end_by_merging(tree: LinkedTree, repository: Repository) -> str:
    merged = merge(tree, repository)
    return f"{merged} {remove(tree, repository, measure(tree, read_repository(repository.main.folder).main))}"


def end_by_removing(tree: LinkedTree, repository: Repository, changes: TreeChanges) -> str:
    """Remove a worktree; ask once more if something would be lost."""
    lost = [f"{format_count(changes.own, 'commit')} of no other branch"] if changes.own else []
    lost += [f"{format_count(changes.files, 'file')} not committed"] if changes.files else []
    if lost and not click.confirm(f"Lose {' and '.join(lost)}?", default=False):
        return KEPT.format(os.path.basename(tree.folder))
    return remove(tree, repository, changes)


def show_diff(text: str) -> None:
    """Print a diff; page a long one."""
    if text.count("\n") > MAX_DIFF_LINES:
        click.echo_via_pager(escape_controls(text))
    else:
        print_diff(text)
