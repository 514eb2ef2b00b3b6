"""Git worktrees for sessions of their own: make, measure, merge and remove them.

A worktree is the folder `REPOSITORY.worktrees/NAME` with the branch NAME. git's own files say which exist: nothing else
is stored. It is locked, as git calls it, until it is complete, and no session works in it before. So one that is found
locked with this reason was left half made by a process that was killed, and is made again.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import crow_system as system
from crow_extensions.folder_state import FOREIGN_VARIABLES
from crow_system.git import make_git_environment, run_git
from crow_system.repository import WORKTREES, read_line
from crow_system.shortening import format_count

GIT_TIMEOUT = 600.0
"""Seconds that git may take, such as for the files of a large repository."""
MAKING = "crow is making it"
"""The reason with which a worktree is locked until it is complete."""
RECORD = ("gitdir", "commondir", "HEAD")
"""The files of a worktree's record in the repository without which git does not work."""
NAME_LENGTH = 40
"""Characters of a name that is made of the words of a prompt."""


class NoWorktree(Exception):
    """A worktree cannot be made, merged or removed; the text is a sentence for a person."""


@dataclass(frozen=True)
class LinkedTree:
    """A worktree of a repository."""

    folder: str
    branch: str = ""
    """Empty if it is at no branch (detached HEAD)."""
    commit: str = ""
    locked: str | None = None
    """The reason why git keeps it; None if it does not."""
    is_bare: bool = False
    """True for the repository itself if it has no main work tree."""

    @property
    def git(self) -> str:
        """The folder of a linked worktree in the repository. Raises OSError."""
        return os.path.join(self.folder, read_line(os.path.join(self.folder, ".git")).removeprefix("gitdir:").strip())


@dataclass(frozen=True)
class Repository:
    """A repository, seen from one of its folders."""

    top: str
    """The top folder of the work tree in which the folder is."""
    below: str
    """The folder's path below `top`."""
    common: str
    """git's folder for all work trees."""
    trees: list[LinkedTree] = field(default_factory=list[LinkedTree])
    """The main work tree, then the linked ones."""

    @property
    def main(self) -> LinkedTree:
        return self.trees[0]

    @property
    def folder(self) -> str:
        """The folder that holds the worktrees that crow makes."""
        return (self.top if self.main.is_bare else self.main.folder) + WORKTREES

    def find(self, name: str) -> LinkedTree | None:
        """Find a worktree that crow has made by its name."""
        folder = self.make_path(name)
        return next((tree for tree in self.trees[1:] if os.path.realpath(tree.folder) == folder), None)

    def list_made(self) -> list[LinkedTree]:
        """List the worktrees that crow has made."""
        above = os.path.realpath(self.folder)
        return [tree for tree in self.trees[1:] if os.path.dirname(os.path.realpath(tree.folder)) == above]

    def make_path(self, name: str) -> str:
        """Make the path of a worktree; a branch such as `fix/parser` has no folder of its own for `fix`."""
        return os.path.join(os.path.realpath(self.folder), name.replace("/", "-"))


@dataclass(frozen=True)
class TreeChanges:
    """The work in a worktree that the main one does not have."""

    ahead: int
    """Commits that the branch of the main work tree does not have."""
    own: int
    """Commits that no other branch, tag or remote has."""
    files: int
    """Changed and new files that are not committed."""
    size: str
    """The size of the diff, as git says it; empty if there is none."""
    start: str
    """The commit that the diff is against."""

    def describe(self) -> str:
        """Describe the changes in words."""
        parts = [format_count(self.ahead, "commit")] if self.ahead else []
        parts += [f"{format_count(self.files, 'file')} not committed"] if self.files else []
        return " and ".join(parts) + (f": {self.size}" if self.size else "")


def ask_git(
    arguments: Sequence[str], folder: str, more: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
) -> str:
    """Return what git prints, without the last line end; its hooks do not run. Raises NoWorktree with what it says."""
    own = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    environment = {**own, **make_git_environment(), "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", **(more or {})}
    try:
        return run_git(["git", *arguments], folder, environment, GIT_TIMEOUT, descriptors).removesuffix("\n")
    except FileNotFoundError:
        raise NoWorktree("A worktree needs git, which is not installed.") from None
    except OSError as error:
        raise NoWorktree(describe_error(error)) from error


def describe_error(error: OSError) -> str:
    """Return the line of git's error that says what is wrong, as a sentence."""
    lines = str(error.strerror or error).strip().splitlines() or ["git failed"]
    said = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[-1])
    said = re.sub(r"^(fatal|error): ", "", said).strip().rstrip(".:")
    return f"git says: {said}."


def read_repository(folder: str) -> Repository:
    """Read the repository of a folder. Raises NoWorktree if it can have no worktree from here."""
    try:
        places = ask_git(["rev-parse", "--path-format=absolute", "--show-toplevel", "--git-common-dir"], folder)
        top, common = places.split("\n")
    except NoWorktree as error:
        if "work tree" in str(error) or "bare repository" in str(error):
            raise NoWorktree(f"{folder} is a bare repository: start crow in one of its work trees.") from None
        if "not a git repository" in str(error):
            raise NoWorktree(f"{folder} is in no git repository, which `git init` makes.") from None
        raise
    if above := ask_git(["rev-parse", "--show-superproject-working-tree"], folder):
        raise NoWorktree(f"{top} is a submodule, and a worktree of it would not belong to {above}: start crow there.")
    drop_incomplete(common)
    below = os.path.relpath(os.path.realpath(folder), os.path.realpath(top))
    return Repository(top, below, common, list(read_trees(folder)))


def drop_incomplete(common: str) -> None:
    """Remove the records of worktrees that a killed git has begun to write: with them, git can list none."""
    begun: list[Path] = []
    with suppress(OSError):
        begun = [git for git in Path(common, "worktrees").iterdir() if is_incomplete(git)]
    if begun:
        with suppress(OSError), hold_lock(common):
            for git in filter(is_incomplete, begun):
                shutil.rmtree(git)


def is_incomplete(git: Path) -> bool:
    """Test whether the record of a worktree was begun by crow, and lacks a file or the content of one."""
    try:
        if (git / "locked").read_text().strip() not in ("", MAKING):
            return False
    except OSError:
        return False
    return not all(os.path.exists(git / name) and os.path.getsize(git / name) for name in RECORD)


def read_trees(folder: str) -> Iterator[LinkedTree]:
    """Yield the work trees of a repository, the main one first. Raises NoWorktree."""
    for lines in ask_git(["worktree", "list", "--porcelain"], folder).split("\n\n"):
        facts = {name: value for name, _, value in (line.partition(" ") for line in lines.splitlines())}
        if path := facts.get("worktree"):
            branch = facts.get("branch", "").removeprefix("refs/heads/")
            yield LinkedTree(path, branch, facts.get("HEAD", ""), facts.get("locked"), "bare" in facts)


def make_tree(repository: Repository, name: str) -> tuple[LinkedTree, list[str]]:
    """Make the worktree of this name, or find the one that exists. Return it, and sentences about it.

    Raises NoWorktree. It begins with the commit of the work tree that the repository was read from.
    """
    try:
        with hold_lock(repository.common) as lock:
            return make_locked(repository, name, lock)
    except OSError as error:
        where = error.filename or repository.common
        raise NoWorktree(f"{where} cannot be written ({error.strerror}), so no worktree was made.") from error


def make_locked(repository: Repository, name: str, lock: int) -> tuple[LinkedTree, list[str]]:
    """Make a worktree. git holds the lock, too, and so goes on undisturbed if this process is killed."""
    top, path, said = repository.top, repository.make_path(name), list[str]()
    repository = replace(repository, trees=list(read_trees(top)))
    exists = has_branch(top, name)
    if found := repository.find(name):
        if found.locked == MAKING:
            said.append(f"The worktree {name} was left half made, and is made again.")
            drop_half_made(found, repository, name)
        elif os.path.isdir(found.folder):
            return found, [f"The session goes on in the worktree {name}."]
        else:
            said.append(f"The folder of the worktree {name} was gone, and is made again.")
            ask_git(["worktree", "prune"], top)
    elif exists:
        raise NoWorktree(f"There is a branch {name} already, without a worktree of crow: give another name.")
    if os.path.isdir(path) and os.listdir(path) == [".git"]:
        shutil.rmtree(path)  # git was killed before it wrote a file there
    elif os.path.isdir(path) and os.listdir(path):
        raise NoWorktree(f"{path} exists, and is no worktree of this repository: give another name.")
    if not ask_git(["rev-list", "--max-count=1", "--all"], top):
        raise NoWorktree(f"{repository.main.folder} has no commit yet, and a worktree begins with one.")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    words, held = [path, name] if exists else ["--detach", path], [] if system.WINDOWS else [lock]
    ask_git(["worktree", "add", "--quiet", "--lock", f"--reason={MAKING}", *words], top, descriptors=held)
    if not exists:
        ask_git(["checkout", "--quiet", "-b", name], path, descriptors=held)
    ask_git(["worktree", "unlock", path], top)
    commit = ask_git(["rev-parse", "HEAD"], path)
    start = ask_git(["rev-parse", "--abbrev-ref", "HEAD"], top)
    said.append(f"Worktree {path}, branch {name}, from {commit[:8] if start == 'HEAD' else start}.")
    if files := count_changed(top):
        said.append(f"It does not have the {format_count(files, 'file')} that {top} has not committed.")
    if os.path.exists(os.path.join(path, ".gitmodules")):
        said.append("Its submodules are empty: `git submodule update --init` fills them.")
    return LinkedTree(path, name, commit), said


def drop_half_made(tree: LinkedTree, repository: Repository, name: str) -> None:
    """Remove what a killed `git worktree add` has left, also the lock of its branch. Raises NoWorktree, OSError."""
    if os.path.lexists(tree.folder):
        shutil.rmtree(tree.folder)
    Path(repository.common, "refs", "heads", f"{name}.lock").unlink(missing_ok=True)
    for git in Path(repository.common, "worktrees").iterdir():
        with suppress(OSError):
            if os.path.dirname(read_line(str(git / "gitdir"))) == tree.folder:
                (git / "locked").unlink()
    ask_git(["worktree", "prune"], repository.top)


def check_name(name: str, folder: str) -> None:
    """Raise NoWorktree if a worktree cannot have this name, as a branch of git cannot."""
    try:
        if name.startswith("-") or name in ("HEAD", "@"):
            raise NoWorktree("")
        ask_git(["check-ref-format", f"refs/heads/{name}"], folder)
    except NoWorktree:
        usable = to_name(name)
        hint = f": {usable}, for example" if usable else ""
        raise NoWorktree(f"{name!r} cannot be the name of a branch, which has no spaces{hint}.") from None


def to_name(words: str) -> str:
    """Make a name of the first words of a text; empty if it has no letters or digits."""
    name = ""
    for word in re.findall(r"[a-z0-9]+", words.lower()):
        if len(name) + len(word) >= NAME_LENGTH:
            break
        name += f"-{word}" if name else word
    return name


def choose_name(repository: Repository, words: str) -> str:
    """Make a name that no worktree and no branch has, of the words of a prompt or of the date."""
    name = to_name(words) or f"{date.today():%Y-%m-%d}"
    names = [name, *(f"{name}-{number}" for number in range(2, 1000))]
    return next(
        each
        for each in names
        if not has_branch(repository.top, each) and not os.path.lexists(repository.make_path(each))
    )


def has_branch(folder: str, name: str) -> bool:
    with suppress(NoWorktree):
        ask_git(["show-ref", "--verify", "--quiet", f"refs/heads/{name}"], folder)
        return True
    return False


def count_changed(folder: str) -> int:
    """Count the changed and new files of a work tree that are not committed. Raises NoWorktree."""
    return len(ask_git(["status", "--porcelain", "--no-renames", "--untracked-files=all"], folder).splitlines())


def measure(tree: LinkedTree, main: LinkedTree) -> TreeChanges:
    """Measure the work in a worktree. Raises NoWorktree."""
    others = [f"--exclude={tree.branch}", "--branches", "--tags", "--remotes"]
    own = int(ask_git(["rev-list", "--count", "HEAD", "--not", *others], tree.folder))
    ahead, start = own, "HEAD"
    with suppress(NoWorktree):  # the main work tree may have no commit, and no history in common
        start = ask_git(["merge-base", main.commit, "HEAD"], tree.folder) if not main.is_bare else start
        ahead = int(ask_git(["rev-list", "--count", f"{start}..HEAD"], tree.folder)) if start != "HEAD" else own
    size = diff(tree, start, "--shortstat").strip()
    return TreeChanges(ahead, own, count_changed(tree.folder), size, start)


def diff(tree: LinkedTree, start: str, *options: str) -> str:
    """Return the diff of a worktree against a commit, with what is not committed and with new files.

    Nothing changes: the files are added to a copy of the index. Raises NoWorktree.
    """
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": os.path.join(folder, "index")}
        with suppress(OSError):
            shutil.copyfile(os.path.join(tree.git, "index"), index["GIT_INDEX_FILE"])
        ask_git(["add", "--all"], tree.folder, index)
        return ask_git(["diff", "--cached", "--no-ext-diff", *options, start], tree.folder, index)


def merge(tree: LinkedTree, repository: Repository) -> str:
    """Commit what is left, merge the branch into that of the main work tree, and return a sentence.

    Raises NoWorktree; then nothing was merged, and nothing is lost.
    """
    main = repository.main
    if count_changed(tree.folder):
        ask_git(["add", "--all"], tree.folder)
        ask_git(["commit", "--quiet", "--message", f"Work of the session in {tree.branch}"], tree.folder)
    merging = os.path.join(ask_git(["rev-parse", "--path-format=absolute", "--git-dir"], main.folder), "MERGE_HEAD")
    if os.path.exists(merging):
        raise NoWorktree(f"A merge in {main.folder} is not finished, so nothing was merged.")
    try:
        ask_git(["merge", "--quiet", "--no-edit", tree.branch], main.folder)
    except NoWorktree as error:
        if not os.path.exists(merging):
            raise NoWorktree(f"Nothing was merged. {error}") from error
        files = ask_git(["diff", "--name-only", "--diff-filter=U"], main.folder).splitlines()
        ask_git(["merge", "--abort"], main.folder)
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        raise NoWorktree(
            f"{tree.branch} and {main.branch} both change {', '.join(files[:3])}{more}, so nothing was merged. "
            f"In the worktree, `git merge {main.branch}` shows the conflicts."
        ) from error
    return f"Merged {tree.branch} into {main.branch}."


def remove(tree: LinkedTree, repository: Repository, changes: TreeChanges) -> str:
    """Remove a worktree with its branch, and all that it holds. Return a sentence. Raises NoWorktree."""
    main = repository.main.folder
    commit = ask_git(["rev-parse", "HEAD"], tree.folder)
    ask_git(["worktree", "remove", "--force", tree.folder], main)
    if tree.branch:
        ask_git(["branch", "--quiet", "-D", tree.branch], main)
    with suppress(OSError):
        os.rmdir(os.path.dirname(tree.folder))  # if it was the last one
    back = f" `git branch {tree.branch} {commit[:12]}` brings its commits back." if changes.own and tree.branch else ""
    return f"Removed the worktree {os.path.basename(tree.folder)} with its branch.{back}"


def hold(tree: LinkedTree) -> int:
    """Mark a worktree as open in this process. Return the descriptor to close at the end. Raises OSError."""
    descriptor = os.open(os.path.join(tree.git, f"crow-open-{os.getpid()}"), os.O_RDWR | os.O_CREAT, 0o600)
    system.lock(descriptor, wait=False)
    return descriptor


def is_open_elsewhere(tree: LinkedTree) -> bool:
    """Test whether another process of crow has a worktree open."""
    with suppress(OSError):
        for mark in Path(tree.git).glob("crow-open-*"):
            if mark.name == f"crow-open-{os.getpid()}":
                continue
            descriptor = os.open(mark, os.O_RDWR)
            try:
                system.lock(descriptor, wait=False)
                mark.unlink()  # its process was killed
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
    return False


@contextmanager
def hold_lock(common: str) -> Generator[int]:
    """Context manager: wait for the lock with which one process at a time makes a worktree. Raises OSError."""
    descriptor = os.open(os.path.join(common, "crow-worktrees.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        system.lock(descriptor, wait=True)
        yield descriptor
    finally:
        os.close(descriptor)
