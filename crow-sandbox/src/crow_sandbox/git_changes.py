"""The changes that a command made in a git repository: the data of git in one line, and the files that run later
apart."""

import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from crow_system.shortening import format_count

from crow_sandbox.changes import LayerChange, list_files, read_file
from crow_sandbox.layers import Layer

DATA = re.compile(
    r"""
    objects/[0-9a-f]{2}/([0-9a-f]{38}|[0-9a-f]{62}|tmp_obj_\w+) | objects/pack/[\w.-]+
    | objects/info/(packs|commit-graph|commit-graphs/[\w.-]+)
    | (refs|logs/refs)(/(?!\.)[^/]+)+ | logs/HEAD | reftable/[\w.-]+ | rr-cache/[0-9a-f]+/(pre|post|this)image(\.\d+)?
    | packed-refs | index | sharedindex\.\w+ | HEAD | [A-Z]+_HEAD
    | (COMMIT_EDIT|MERGE_|SQUASH_|TAG_EDIT)MSG | (NOTES|MERGE|TAG|PULLREQ)_EDITMSG | MERGE_(MODE|RR) | AUTO_MERGE
    | BISECT_\w+ | description | shallow | gc\.(log|pid) | hooks/[\w-]+\.sample
    | info/(exclude|refs|sparse-checkout)
    | (rebase-merge|rebase-apply|sequencer)/(?!.*(todo|opts|strategy|opt$|script|/)).+
    """,
    re.VERBOSE,
)
"""The files of a git folder that git reads as data. All others, such as `config`, `hooks` and `info/attributes`, name
programs that run later, or may."""
DATA_FOLDERS = re.compile(
    r"objects(/([0-9a-f]{2}|pack|info|info/commit-graphs))?|(refs|logs)(/(?!\.)[^/]+)*|reftable|rr-cache(/[0-9a-f]+)?"
    r"|info|branches|rebase-merge|rebase-apply|sequencer"
)
"""The folders of a git folder that hold data."""
WORKTREE_DATA = re.compile(r"gitdir|locked|prunable")
RUN_LATER = {
    *("hooks", "config", "config.worktree", "attributes", "commondir", "alternates", "http-alternates", "grafts"),
    *("remotes", "git-rebase-todo", "todo"),
}
ESSENTIAL = {"HEAD", "objects", "refs"}
"""By these, git takes a folder for a repository."""
READ_LIMIT = 16 << 20
LINKS = {"commondir": re.compile(rb"\.\./\.\.\s*"), "gitdir": re.compile(rb"[^\n]+/\.git\n?")}
"""Lines that git writes into the files of a worktree that name other folders."""
NAMED_DATA = re.compile(rb"ref: [^\n]*\n?|([0-9a-f]{40,64}( [^\n]*)?(\n|\Z))*")
"""The content of refs and of their logs."""


@dataclass(frozen=True)
class RefChange:
    """A branch, tag or other name that a command moved, made (no `before`) or removed (no `after`)."""

    name: str
    before: str | None
    after: str | None


@dataclass
class GitChanges:
    """The changes in one repository that are data of git."""

    layer: Layer
    folder: str
    """The git folder, from the layer's root: `.git`, `lib/.git`, `.git/modules/lib`; empty if the root is one."""
    changes: list[LayerChange] = field(default_factory=list[LayerChange])
    refs: list[RefChange] = field(default_factory=list[RefChange])
    objects: int = 0
    """The number of new objects, loose and packed."""
    removed_objects: int = 0
    """The number of objects that are gone; those of removed packs are counted too."""
    index: bool = False
    """True if the index has changed."""

    def __str__(self) -> str:
        parts = [f"{shorten(ref.name)} {ref.before or 'new'} → {ref.after or 'removed'}" for ref in self.refs]
        parts += [f"{format_count(self.objects, 'object')} added"] if self.objects else []
        parts += [f"{format_count(self.removed_objects, 'object')} removed"] if self.removed_objects else []
        parts += ["index"] if self.index else []
        return f"{self.folder or self.layer.root}: {', '.join(parts) or 'data of git'}"


def classify_git_path(layer: Layer, path: str, *, is_folder: bool = False) -> Literal["data", "runs-later"] | None:
    """Tell if a path, from the layer's root, is data of git, or runs later or may; None if it is in no git folder.

    A `.git` that is a file counts as running later, as it names the folder whose configuration holds. So does a new
    repository without a work tree, and in an earlier one what names programs.
    """
    parts = to_git_path(layer, path).split("/")
    if ".git" not in parts:
        return "runs-later" if is_bare_repository(layer, path) else None
    folder, rest = split_git_path(layer, path)
    if folder is None or not rest:
        return "runs-later"
    inside = parts[parts.index(".git") + 1 :]
    # The name of a submodule may hold slashes and the names of git's own files.
    modules = inside[2:] if inside[0] == "worktrees" else inside
    if modules[:1] == ["modules"] and RUN_LATER & {*modules[1:]} and not re.search(r"/hooks/[\w-]+\.sample$", path):
        return "runs-later"
    is_worktree = inside[: -1 - rest.count("/")][-2:-1] == ["worktrees"]
    if (DATA_FOLDERS if is_folder else DATA).fullmatch(rest) or (is_worktree and WORKTREE_DATA.fullmatch(rest)):
        return "data"
    return "runs-later"


def is_bare_repository(layer: Layer, path: str) -> bool:
    """Tell if a path makes a repository of a folder that is not called `.git`, or changes what one runs later."""
    parts = path.split("/")
    if ESSENTIAL.isdisjoint(parts) and RUN_LATER.isdisjoint(parts):
        return False
    for end in range(len(parts)):
        folder, rest = "/".join(parts[:end]), {*parts[end:]}
        before = {name for name in ESSENTIAL if os.path.lexists(layer.root / folder / name)}
        if before == ESSENTIAL:
            if rest & RUN_LATER:
                return True
        elif all(os.path.lexists(layer.upper / folder / name) for name in ESSENTIAL - before):
            return True
    return False


def to_git_path(layer: Layer, path: str) -> str:
    """Return a path that holds `.git` if the file is in a git folder, also where the root is that folder or in it."""
    if ".git" in path.split("/"):
        return path
    parts = layer.root.parts
    if ".git" in parts:
        return "/".join((*parts[parts.index(".git") :], path))
    if all(os.path.lexists(layer.root / name) for name in ("HEAD", "objects", "refs", "config")):  # without a work tree
        return f".git/{path}"
    return path


def split_git_path(layer: Layer, path: str) -> tuple[str | None, str]:
    """Split a path into the git folder, which may be that of a submodule or a worktree, and the path in it.

    The folder is a path from the layer's root. It is empty if the root is the git folder or lies in it, and None for a
    path outside of git folders.
    """
    whole = to_git_path(layer, path)
    parts = whole.split("/")
    if ".git" not in parts:
        return None, path
    start = parts.index(".git") + 1
    while start < len(parts):
        if parts[start] == "worktrees" and len(parts) > start + 2:
            start += 2
        elif parts[start] == "modules":
            ends = [at for at in range(start + 2, len(parts)) if is_git_name(parts[at])]
            if not ends:
                break
            start = ends[0]
        else:
            break
    rest = "/".join(parts[start:])
    if len(rest) > len(path):  # the root is a folder in a git folder
        return "", rest
    return path.removesuffix(rest).rstrip("/"), rest


def is_git_name(name: str) -> bool:
    names = {*RUN_LATER, "info", "modules", "worktrees"}
    return name in names or any(pattern.fullmatch(name) for pattern in (DATA, DATA_FOLDERS))


def split_git_changes(changes: Sequence[LayerChange]) -> tuple[list[GitChanges], list[LayerChange]]:
    """Split the data of git, by repository, from the changes that a person is shown.

    A folder is data if all files in it are: a new `.git` with its `config` is not, and counts in both.
    Raises SandboxError for a folder that cannot be read.
    """
    found: dict[tuple[Layer, str], GitChanges] = {}
    files: dict[tuple[Layer, str], list[tuple[str, LayerChange]]] = defaultdict(list)
    shown: list[LayerChange] = []
    for change in changes:
        if not may_hold_git(change):
            shown.append(change)
            continue
        paths = [path for path in list_files(change) if ".git" in to_git_path(change.layer, path).split("/")]
        data = [path for path in paths if is_data(change, path)]
        for path in data:
            folder, rest = split_git_path(change.layer, path)
            if folder is not None and rest:
                found.setdefault((change.layer, folder), GitChanges(change.layer, folder))
                files[change.layer, folder].append((rest, change))
        folder, rest = split_git_path(change.layer, change.path)
        is_gone = change.kind == "removed" and rest in ESSENTIAL
        if folder is not None and not is_gone and len(data) == len(paths) and (paths or is_data(change, change.path)):
            key = change.layer, folder
            found.setdefault(key, GitChanges(*key)).changes.append(change)
        else:
            shown.append(change)
    for key, git in found.items():
        summarize(git, files[key])
    return list(found.values()), shown


def may_hold_git(change: LayerChange) -> bool:
    return change.type == "folder" or ".git" in to_git_path(change.layer, change.path).split("/")


def is_data(change: LayerChange, path: str) -> bool:
    """Tell if a file that a change makes or removes is data of git, by its name, its type and what it says.

    Any is if only its time differs. A link and a program are not, and nothing that takes the place of a folder.
    """
    if change.times_only:
        return True
    is_folder = change.type == "folder" and path == change.path
    whole = to_git_path(change.layer, path)
    name = re.search(r"(?:^|/)worktrees/[^/]+/(commondir|gitdir)$", whole)
    if name is None and classify_git_path(change.layer, path, is_folder=is_folder) != "data":
        return False
    if change.kind == "removed":
        return True
    if change.real is not None and stat.S_ISDIR(change.real[1]) and not change.mode_only:
        return False
    if is_folder:
        return True
    try:
        mode = os.lstat(change.layer.upper / path).st_mode
    except OSError:
        return False
    is_sample = path.endswith(".sample")
    if not stat.S_ISREG(mode) or (mode & 0o111 and not is_sample):
        return False
    if name:
        is_new = name[1] == "commondir" or not os.path.lexists(change.layer.root / path)
        return is_new and LINKS[name[1]].fullmatch(read_file(change.layer.upper, path, 5000) or b"") is not None
    if is_sample or RUN_LATER.isdisjoint(whole.split("/")):
        return True
    return NAMED_DATA.fullmatch(read_file(change.layer.upper, path, READ_LIMIT) or b"") is not None


def summarize(git: GitChanges, files: Sequence[tuple[str, LayerChange]]) -> None:
    """Count the objects, and find the refs that differ."""
    layer, loose, removed = git.layer, set[str](), set[str]()
    for path, change in files:
        gone = change.kind == "removed"
        count = 0
        if re.fullmatch(r"objects/[0-9a-f]{2}/[0-9a-f]+", path):
            count = 1
        elif re.fullmatch(r"objects/pack/[\w-]+\.pack", path):
            count = read_pack_count(layer, os.path.join(git.folder, path), gone)
        elif path.startswith("refs/") or path == "HEAD":
            loose.add(path)
            removed |= {path} if gone else set()
        git.index |= path == "index"
        if gone:
            git.removed_objects += count
        elif change.kind == "added" or change.type == "folder":
            git.objects += count
    packed = any(path == "packed-refs" for path, _ in files)
    before = read_packed(layer, git.folder, new=False)
    after = read_packed(layer, git.folder, new=True) if packed else before
    for name in sorted(loose | {name for name in {*before, *after} if before.get(name) != after.get(name)}):
        path = os.path.join(git.folder, name)
        old = read_ref(layer.root, path)
        new = None if name in removed else read_ref(layer.upper, path) if name in loose else old
        first, second = old or before.get(name), new or after.get(name)
        if first != second:
            git.refs.append(RefChange(name, abbreviate(first), abbreviate(second)))


def read_pack_count(layer: Layer, path: str, gone: bool) -> int:
    """Read the number of objects from the header of a pack; 0 if it has none."""
    head = read_file(layer.root if gone else layer.upper, path, 12) or b""
    return int.from_bytes(head[8:12], "big") if head.startswith(b"PACK") else 0


def read_packed(layer: Layer, folder: str, *, new: bool) -> dict[str, str]:
    path = os.path.join(folder, "packed-refs")
    data = read_file(layer.upper, path, READ_LIMIT) if new else read_file(layer.root, path, READ_LIMIT)
    return dict(parse_packed((data or b"").splitlines()))


def parse_packed(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    for line in lines:
        value, _, name = line.partition(b" ")
        if re.fullmatch(rb"[0-9a-f]{40,64}", value):
            yield os.fsdecode(name), value.decode()


def read_ref(base: str | os.PathLike[str], path: str) -> str | None:
    text = (read_file(base, path, 1000) or b"").decode("utf-8", "replace").strip()
    return text or None


def abbreviate(value: str | None) -> str | None:
    if value is None:
        return None
    return value.removeprefix("ref: refs/heads/") if value.startswith("ref: ") else value[:7]


def shorten(name: str) -> str:
    return re.sub(r"^refs/(heads|tags|remotes)/", "", name)
