"""The layers of a copy-on-write view: one for each root, with what a command changed in it."""

import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from crow_system.files import make_private_folder

from crow_sandbox.policy import SandboxError

BESIDE = "beside"
"""The name of the file in a run's folder that lists the folders which the run has elsewhere, each ended by a zero."""
LENGTH_REMOVED = 200
"""The length of the path in a folder from which on inner folders are moved up before it is removed. Longer paths cannot
be named, and deeper trees cannot be walked."""
FOREIGN_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "fuse.sshfs", "fuse.rclone"}
)
"""File systems on other machines, which change unseen and cannot be below a copy-on-write view reliably."""


@dataclass(frozen=True)
class Layer:
    """The copy-on-write view of one root."""

    root: Path
    """The real folder, which the command does not change."""
    upper: Path
    """The folder in which the kernel keeps what the command changed, as overlayfs writes it with `userxattr`."""
    work: Path
    """The kernel's own folder, empty, on the same file system as `upper`."""
    start_ns: int
    """The `st_ctime_ns` that the file system of the root gave a file that was made just before the command started. A
    file of the root with a later one was changed by somebody else meanwhile."""


@contextmanager
def lock_folder(folder: Path) -> Generator[None]:
    """Keep others from making, or looking for, the folders of runs in a folder."""
    descriptor = try_lock(folder, wait=True)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def try_lock(folder: Path, *, wait: bool = False) -> int | None:
    """Lock a folder until the descriptor that is returned is closed; None if another process has locked it.

    Raises OSError. The system unlocks it when the process ends.
    """
    if sys.platform == "win32":
        raise SandboxError("There is no sandbox on Windows.")
    import fcntl  # not on Windows

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def make_run_folder(folder: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder for a run or a session in the folder of the sandbox; return it with its lock."""
    make_private_folder(folder)
    with lock_folder(folder):
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        descriptor = try_lock(made)
    assert descriptor is not None
    return made, descriptor


def remove_run(run: Path) -> None:
    """Remove the folder of a run, and its layers next to the roots."""
    with suppress(OSError):
        for path in (run / BESIDE).read_bytes().split(b"\0")[:-1]:
            remove_tree(Path(os.fsdecode(path)))
    remove_tree(run)


def remove_tree(folder: Path) -> None:
    """Remove a folder, whatever the permissions in it and however deep it is; what cannot be removed stays."""
    pending = [os.fspath(folder)]
    with suppress(OSError):
        os.chmod(folder, 0o700)
    while pending:
        top = pending.pop()
        for path, folders, _ in os.walk(top):
            is_deep = len(path) - len(top) > LENGTH_REMOVED
            for inner in (os.path.join(path, name) for name in folders):
                with suppress(OSError):
                    if os.path.islink(inner):
                        continue
                    os.chmod(inner, 0o700)
                    if is_deep:
                        pending.append(os.path.join(folder, f".{os.urandom(8).hex()}"))
                        os.rename(inner, pending[-1])
            if is_deep:
                folders.clear()
    shutil.rmtree(folder, ignore_errors=True)


def make_layer(root: Path, run: Path, number: int, *, beside: bool) -> Layer:
    """Make the empty layer of a root in the folder of its run, or `beside` the root. Raises OSError."""
    place = make_folder_beside(root, run) if beside else run / f"layer-{number}"
    for name in ("upper", "work"):
        (place / name).mkdir(mode=0o700, parents=True)
    os.chmod(place / "upper", os.stat(root).st_mode & 0o7777)  # the view's folder has the permissions of this one
    marker = place / "start"
    marker.touch()
    return Layer(root, place / "upper", place / "work", marker.stat().st_ctime_ns)


def find_places(root: Path, run: Path) -> tuple[bool, ...]:
    """List the places for the layer of a root, the better one first: next to it or not.

    Changes are moved from there, which is fast only in one file system.
    """
    of_root = os.stat(root).st_dev
    if os.stat(run).st_dev == of_root:
        return (False,)
    is_possible = os.stat(root.parent).st_dev == of_root and os.access(root.parent, os.W_OK)
    return (True, False) if is_possible else (False,)


def make_folder_beside(root: Path, run: Path) -> Path:
    """Make a hidden folder next to a root, and note it in the run. Raises OSError."""
    made = Path(tempfile.mkdtemp(prefix=".crow-sandbox-", dir=root.parent))
    with open(run / BESIDE, "ab") as file:
        file.write(os.fsencode(made) + b"\0")
    return made


def check_roots(roots: Iterable[str], folder: Path) -> list[str]:
    """Return the roots without links and without those inside of others; `folder` is that of the sandbox.

    Raises SandboxError for one that cannot be the root of a sandbox.
    """
    found: set[str] = set()
    for root in roots:
        path = os.path.realpath(root)
        if reason := find_reason(path, folder):
            raise SandboxError(f"A command cannot run in the sandbox, because its folder {show(path)} {reason}.")
        found.add(path)
    return sorted(path for path in found if not any(path != other and is_in(path, other) for other in found))


def find_reason(path: str, folder: Path) -> str:
    """Say why a folder cannot be the root of a sandbox; "" if it can."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return "does not exist"
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    home = os.path.realpath(os.path.expanduser("~"))
    if not os.path.isdir(path):
        return "is a file"
    if path == "/" or is_in(home, path):
        return "holds the files of the whole machine" if path == "/" else "holds the user's home folder"
    if is_in(os.path.realpath(folder), path):
        return f"holds crow's own data ({show(folder)})"
    if is_in(path, os.path.realpath(folder)):
        return f"is in crow's own data ({show(folder)})"
    if is_root() and status.st_uid != 0:
        return f"belongs to another user (number {status.st_uid}) and crow runs as root: start crow as that user"
    if (kind := read_file_system(path)) in FOREIGN_FILE_SYSTEMS:
        return f"is on a network share ({kind})"
    return ""


def is_root() -> bool:
    """Test whether crow runs as root."""
    if sys.platform == "win32":
        return False
    return os.geteuid() == 0


def is_in(path: str, folder: str) -> bool:
    """Test whether an absolute path without links is a folder or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def read_mounts() -> list[tuple[str, str]]:
    """Return the path and the file system of each mount, in their order; none where the system does not tell."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split(" ") for line in file]
    except OSError:
        return []
    return [(unescape(fields[4]), fields[fields.index("-") + 1]) for fields in lines]


def find_inner_mount(folder: str, mounts: Iterable[tuple[str, str]]) -> str:
    """Return the path of a file system that is mounted in a folder; "" if there is none.

    The kernel makes no view of such a folder for this user, as it would show what the mount hides.
    """
    return next((path for path, _ in mounts if path != folder and is_in(path, folder)), "")


def unescape(path: str) -> str:
    """Decode a path of mountinfo, in which blanks are octal numbers."""
    for code in ("\\040", "\\011", "\\012", "\\134"):
        path = path.replace(code, chr(int(code[1:], 8)))
    return path


def read_file_system(path: str) -> str:
    """Return the name of the file system that a path without links is on; "" if it is not known."""
    return next((kind for mount, kind in sorted(read_mounts(), reverse=True) if is_in(path, mount)), "")


def find_repositories(roots: Iterable[str]) -> Iterator[str]:
    """Yield the folders outside of the roots that git writes for them: a repository whose work tree a root is in.

    A `.git` file may name any folder; it counts only if that one names the work tree, too.
    """
    roots = list(roots)
    for root in roots:
        top = next((path for path in (Path(root), *Path(root).parents) if os.path.lexists(path / ".git")), None)
        if top is None:
            continue
        git = top / ".git"
        with suppress(OSError, ValueError):
            found = os.path.realpath(git if git.is_dir() else read_repository(git))
            if not any(is_in(found, each) for each in roots):
                yield found


def read_repository(git: Path) -> Path:
    """Return the repository of a work tree or a submodule by its `.git` file. Raises OSError or ValueError."""
    own = git.parent / read_line(git).removeprefix("gitdir: ")
    if (own / "commondir").is_file():
        if os.path.realpath(own / read_line(own / "gitdir")) != os.path.realpath(git):
            raise ValueError("it belongs to another work tree")
        own = own / read_line(own / "commondir")
    elif not any(
        os.path.realpath(own / line.partition("=")[2].strip().strip('"')) == os.path.realpath(git.parent)
        for line in (own / "config").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        if line.strip().lower().startswith("worktree")
    ):
        raise ValueError("it belongs to another work tree")
    if not all((own / name).exists() for name in ("HEAD", "objects", "refs")):
        raise ValueError("it is no repository")
    return own


def read_line(file: Path) -> str:
    """Return the text of a file of one line. Raises OSError."""
    return file.read_text(encoding="utf-8", errors="surrogateescape").rstrip("\n")


def show(path: str | Path) -> str:
    """Spell a path for a person."""
    return os.fsencode(path).decode(errors="replace")
