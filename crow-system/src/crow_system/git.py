"""git in a folder whose files may be hostile: switch off the programs that its settings would run, or find them.

A repository's settings and files can make almost every git command run a program. Such are hooks, a file system
monitor, filters, drivers for diffs and merges, aliases, and signing programs (git-config, gitattributes, githooks).
`make_git_environment` switches off hooks and programs whose settings have a fixed name. `find_foreign_settings` lists
all other settings of a repository that are not known to be harmless: git has no setting that ignores those.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

TIMEOUT = 10.0
"""Seconds that git may take to list the settings of a repository."""
SUBMODULES_LIMIT = 50
"""Submodules whose settings are read."""

SWITCHED_OFF = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "log.showSignature": "false",
    "protocol.ext.allow": "never",
    "safe.bareRepository": "explicit",
}
"""Settings that a command is given; they have priority over those of the repository."""
VARIABLES = {
    "GIT_PAGER": "cat",
    "GIT_EDITOR": "false",
    "GIT_SEQUENCE_EDITOR": "false",
    "GIT_PROXY_COMMAND": "",
    "GIT_NO_LAZY_FETCH": "1",
}
"""Variables that have priority over settings: `core.pager` and `pager.*`, `core.editor`, `sequence.editor`,
`core.gitProxy`. The last one keeps a partial clone from asking its remote for objects."""

KNOWN_SETTINGS = """
    core.abbrev core.attributesfile core.autocrlf core.bare core.bigfilethreshold core.checkstat core.commentchar
    core.commitgraph core.compression core.editor core.eol core.excludesfile core.filemode core.fscache core.fsmonitor
    core.gitproxy core.hookspath core.ignorecase core.logallrefupdates core.longpaths core.multipackindex core.pager
    core.precomposeunicode core.preloadindex core.protecthfs core.protectntfs core.quotepath
    core.repositoryformatversion core.safecrlf core.sharedrepository core.sparsecheckout core.sparsecheckoutcone
    core.splitindex core.symlinks core.trustctime core.untrackedcache core.whitespace core.worktree advice.* apply.*
    branch.autosetupmerge branch.autosetuprebase branch.sort branch.*.description branch.*.gh-merge-base
    branch.*.merge branch.*.pushremote branch.*.rebase branch.*.remote branch.*.vscode-merge-base checkout.* clean.*
    clone.* color.* column.* commit.cleanup commit.gpgsign commit.status commit.verbose diff.algorithm diff.colormoved
    diff.colormovedws diff.context diff.dirstat diff.ignoresubmodules diff.indentheuristic diff.interhunkcontext
    diff.mnemonicprefix diff.noprefix diff.relative diff.renamelimit diff.renames diff.submodule
    diff.suppressblankempty diff.wserrorhighlight extensions.* feature.* fetch.* gc.auto gc.autodetach
    gc.autopacklimit gc.pruneexpire gc.reflogexpire gc.reflogexpireunreachable gc.worktreepruneexpire grep.* gui.*
    http.*extraheader http.postbuffer http.version i18n.* include.path includeif.*.path index.* init.defaultbranch
    lfs.*.access lfs.*.locksverify lfs.repositoryformatversion log.* maintenance.* merge.autostash merge.conflictstyle
    merge.ff merge.log merge.renamelimit merge.renames merge.stat pack.* pager.* protocol.*.allow pull.* push.*
    rebase.* receive.denycurrentbranch receive.denydeletes receive.denynonfastforwards remote.*.fetch
    remote.*.gh-resolved remote.*.mirror remote.*.partialclonefilter remote.*.promisor remote.*.prune remote.*.push
    remote.*.pushurl remote.*.tagopt remote.*.url remote.pushdefault rerere.* safe.* sequence.editor stash.* status.*
    submodule.active submodule.fetchjobs submodule.recurse submodule.*.active submodule.*.branch submodule.*.ignore
    submodule.*.url tag.gpgsign tag.sort transfer.* user.email user.name user.signingkey versionsort.* worktree.*
"""
"""Patterns of settings that name no program, or one that is switched off. All others of a repository are foreign."""
FILES_OF_USER = ("HOME", "XDG_CONFIG_HOME")
"""Variables that lead to the user's own settings."""
HARMLESS_OPTIONS = ("--no-pager", "--version", "--help")


def make_git_environment() -> dict[str, str]:
    """Make the variables that switch off the hooks of a repository, and the programs of SWITCHED_OFF and VARIABLES."""
    count = os.environ.get("GIT_CONFIG_COUNT", "")
    first = int(count) if count.isdecimal() else 0  # the user's own settings in variables stay
    variables = {**VARIABLES, "GIT_CONFIG_COUNT": str(first + len(SWITCHED_OFF))}
    for index, (key, value) in enumerate(SWITCHED_OFF.items(), first):
        variables |= {f"GIT_CONFIG_KEY_{index}": key, f"GIT_CONFIG_VALUE_{index}": value}
    return variables


def restore_variables(changed: Iterable[str]) -> dict[str, str | None]:
    """Return those among these variables that choose a repository, settings or programs for git, as crow has them.

    None stands for one that crow does not have: the command must not have it, either.
    """
    return {name: os.environ.get(name) for name in changed if name.startswith("GIT_") or name in FILES_OF_USER}


def find_git_options(words: list[str]) -> str | None:
    """Return the first option between `git` and its subcommand in a command of plain words; None if git is not run.

    Such options choose another repository, other settings or other programs. Returns "" if there are none.
    """
    names = [os.path.basename(word) for word in words]
    at = next((index for index, name in enumerate(names) if name == "git" or name.startswith("git-")), None)
    if at is None:
        return None
    following = [word for word in words[at + 1 :] if word not in HARMLESS_OPTIONS]
    return following[0] if following and following[0].startswith("-") else ""


def is_same_repository(folder: str, cwd: str) -> bool:
    """Test whether git uses the same repository in a folder without links as in `cwd`, which is above it."""
    top = os.path.realpath(cwd)
    while folder != top:
        if not Path(folder).is_relative_to(top) or any(
            os.path.lexists(os.path.join(folder, name)) for name in (".git", "HEAD")
        ):
            return False
        folder = os.path.dirname(folder)
    return True


def find_foreign_settings(folder: str) -> list[str]:
    """List the settings of a folder's repository, and of its submodules, that may name a program.

    Raises OSError if git cannot tell.
    """
    git = shutil.which("git")
    if git is None:
        return []
    environment, folders = {**os.environ, **make_git_environment()}, [folder]
    foreign: list[str] = []
    for each in folders:
        foreign += list_foreign_settings(git, each, environment)
        folders += [path for path in find_submodules(git, each, environment) if path not in folders]
        if len(folders) > SUBMODULES_LIMIT:
            raise OSError(f"it has more than {SUBMODULES_LIMIT} submodules")
    return list(dict.fromkeys(foreign))


def list_foreign_settings(git: str, folder: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings of one repository that may name a program. Raises OSError."""
    listing = run_git([git, "config", "--list", "--show-scope", "--name-only", "-z"], folder, environment)
    fields = listing.split("\0")
    settings = list(zip(fields[::2], fields[1::2], strict=False))
    if ("command", "core.fsmonitor") not in settings:  # before 2.31, git does not read the variables
        raise OSError("this version of git is too old")
    for scope, name in settings:
        if scope in ("local", "worktree") and not any(fnmatchcase(name, known) for known in KNOWN_SETTINGS.split()):
            yield name


def find_submodules(git: str, folder: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the folders of a repository's submodules that hold a repository."""
    try:
        files = run_git([git, "ls-files", "--stage", "-z"], folder, environment)
    except OSError:  # no repository, or one that git refuses to use
        return
    for file in files.split("\0"):
        path = os.path.join(folder, file.partition("\t")[2])
        if file.startswith("160000 ") and os.path.lexists(os.path.join(path, ".git")):
            yield path


def run_git(
    arguments: list[str],
    folder: str,
    environment: Mapping[str, str],
    timeout: float = TIMEOUT,
    descriptors: Collection[int] = (),
) -> str:
    """Return what git prints within `timeout` seconds; it inherits these descriptors. Raises OSError."""
    try:
        done = subprocess.run(
            arguments,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            pass_fds=descriptors,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"git did not answer within {timeout:g} s") from None
    if done.returncode:
        raise OSError(os.fsdecode(done.stderr.strip()))
    return os.fsdecode(done.stdout)


def read_head(folder: str) -> tuple[str, str]:
    """Return the top folder of the repository that a folder is in, and its present commit; empty if there is none."""
    environment = {**os.environ, **make_git_environment()}
    try:
        top, head, *_ = run_git(["git", "rev-parse", "--show-toplevel", "HEAD"], folder, environment).split("\n")
    except (OSError, ValueError):
        return "", ""
    return top, head


def may_fetch_objects(folder: str) -> bool:
    """Test whether the settings of a folder's repository let any git command ask a remote for missing objects.

    They do in a partial clone. Settings that are included from elsewhere are not read, and may do so.
    """
    while not os.path.lexists(git := os.path.join(folder, ".git")):
        if folder == (folder := os.path.dirname(folder)):
            return False
    try:
        if os.path.isfile(git):  # of a work tree or a submodule
            with open(git, encoding="utf-8", errors="replace") as file:
                git = os.path.join(folder, file.read().removeprefix("gitdir:").strip())
        if os.path.isfile(common := os.path.join(git, "commondir")):
            with open(common, encoding="utf-8", errors="replace") as file:
                git = os.path.join(git, file.read().strip())
        with open(os.path.join(git, "config"), encoding="utf-8", errors="replace") as file:
            return re.search(r"promisor|partialclone|\[\s*include", file.read(), re.IGNORECASE) is not None
    except OSError:
        return True
