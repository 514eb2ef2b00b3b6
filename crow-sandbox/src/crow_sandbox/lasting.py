"""A view that lasts over several looks, for the sessions of a terminal: each look tells what is new since the last one.

The programs of a session run on while crow asks and applies. So nothing is moved out of their layer. Each look copies
new files into a layer of its own; crow asks about it and applies it like a command's. The files that crow has seen tell
the next look which are new, and who has changed a file: the session or somebody else.

The kernel does not say what programs see when the folder below a view changes. Therefore crow writes such changes into
the view, as a program there would; and the kernel forgets what it has looked up of all other files.
"""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from crow_sandbox import layers
from crow_sandbox.applying import AppliedChange, apply_changes, is_unfinished
from crow_sandbox.bubblewrap import INFO_FILE
from crow_sandbox.changes import LayerChange, OwnTimes, is_whiteout, read_changes, read_own_times, write_own_times
from crow_sandbox.layer_files import (
    open_folder,
    open_layer_folder,
    open_parent_at,
    read_attributes,
    read_status,
    walk,
)
from crow_sandbox.layers import Layer
from crow_sandbox.policy import Policy, SandboxError
from crow_sandbox.sandbox import SandboxRun
from crow_sandbox.view_files import (
    GONE,
    MOVED,
    Mark,
    copy_entry,
    find_status,
    make_folder,
    make_parents,
    make_whiteout,
    read_layer_mark,
    read_mark,
    set_attribute,
    to_mark,
)

RENEWER = Path(__file__).with_name("view_renewer.py")
ATTEMPTS = 5
"""The most times that a look begins again when files are moved while they are copied."""
WRITTEN_BYTES = 5_000_000
"""The largest file that is written into a view only so that programs are told of its change."""


@dataclass(frozen=True)
class Seen:
    """A file as it was when the layer and the root were the same, or crow had decided about it."""

    view: Mark | None
    real: Mark | None


@dataclass
class LastingLayer:
    """The layer of one root over several looks."""

    layer: Layer
    start_ns: int
    """The `st_ctime_ns` of the root's file system when crow looked last."""
    seen: dict[str, Seen] = field(default_factory=dict[str, Seen])
    own_times: dict[int, int] = field(default_factory=dict[int, int])
    """As `OwnTimes.by_inode`."""
    opaque: set[str] = field(default_factory=set[str])
    """The seen folders that hide those of the root with their names."""
    view: int = -1
    """The open root of the view; -1 where it cannot be opened."""


@dataclass(frozen=True)
class LookedLayer:
    """The new files in a layer: the copy, and the marks of the copied files; None for a file that is gone."""

    layer: Layer
    next_start_ns: int
    marks: dict[str, Mark | None] = field(default_factory=dict[str, Mark | None])
    opaque: set[str] = field(default_factory=set[str])


class Look:
    """The changes in a session since the last look, until they are applied or discarded."""

    def __init__(self, lasting: "LastingRun", folder: Path, lock: int) -> None:
        self.lasting = lasting
        self.folder = folder
        self.parts: list[LookedLayer] = []
        self._lock: int | None = lock

    @property
    def policy(self) -> Policy:
        return self.lasting.run.policy

    def read_changes(self) -> Sequence[LayerChange]:
        """List what is new."""
        return [change for part in self.parts for change in read_changes(part.layer)]

    def apply(self, changes: Sequence[LayerChange]) -> Sequence[AppliedChange]:
        """Apply changes; what is not among them is not told of again. Raises SandboxError, then the next look tells."""
        applied = apply_changes(changes, self.folder)
        with suppress(OSError):  # they are applied: the next look finds that both sides are the same
            self.lasting.keep(self, applied)
        return applied

    @property
    def is_unfinished(self) -> bool:
        """As of a run."""
        return is_unfinished(self.folder)

    def remove(self) -> None:
        """Remove the copies. Those of a look that is unfinished stay; the next process tries again."""
        if self._lock is None:
            return
        if not self.is_unfinished:
            layers.remove_run(self.folder)
        os.close(self._lock)
        self._lock = None


class LastingRun:
    """A run of the level `review` whose changes are looked at several times. Any thread may call its methods."""

    def __init__(self, run: SandboxRun) -> None:
        self.run = run
        self.layers = [LastingLayer(layer, layer.start_ns) for layer in run.layers]
        self._renewer: subprocess.Popen[bytes] | None = None
        self._is_opened = False
        self._lock = threading.RLock()

    def look(self) -> Look:
        """Copy what is new. Raises SandboxError if it cannot be read, or is being moved all the time."""
        with self._lock:
            self.renew()
            for _ in range(ATTEMPTS):
                folder, lock = layers.make_run_folder(self.run.folder.parent, "run-")
                look = Look(self, folder, lock)
                try:
                    look.parts += [self._copy(each, number, folder) for number, each in enumerate(self.layers)]
                    return look
                except OSError as error:
                    look.remove()
                    if error.errno not in MOVED:
                        raise SandboxError(f"What the session changed cannot be read: {error.strerror}.") from error
                except BaseException:
                    look.remove()
                    raise
            raise SandboxError("What the session changed cannot be read, as its programs move files all the time.")

    def _copy(self, lasting: LastingLayer, number: int, folder: Path) -> LookedLayer:
        """Copy what is new in a layer. Raises OSError."""
        beside = lasting.layer.upper.parent.parent != self.run.folder
        made = layers.make_layer(lasting.layer.root, folder, number, beside=beside)
        part = LookedLayer(replace(made, start_ns=lasting.start_ns), made.start_ns)
        write_own_times(part.layer, OwnTimes(lasting.start_ns, lasting.own_times))
        with open_folder(os.fspath(lasting.layer.upper)) as upper, open_folder(os.fspath(made.upper)) as copy:
            copy_new(lasting, part, "", upper, copy)
            note_gone(lasting, part, upper, copy)
        return part

    def keep(self, look: Look, applied: Sequence[AppliedChange] = ()) -> None:
        """Remember what a look has told, so that the next one tells only what is new. `applied` are the applied
        changes."""
        with self._lock:
            for lasting, part in zip(self.layers, look.parts, strict=True):
                if applied:
                    with suppress(OSError):
                        lasting.own_times |= read_own_times(part.layer).by_inode
                with open_folder(os.fspath(lasting.layer.root)) as root:
                    for path, mark in part.marks.items():
                        if mark is None:
                            forget(lasting, path)
                        else:
                            lasting.seen[path] = Seen(mark, read_mark(root, path))
                    for each in applied:
                        if each.change.layer is part.layer:
                            note_applied(lasting, root, each.change.path, part.marks)
                lasting.opaque |= part.opaque
                lasting.start_ns = part.next_start_ns

    def renew(self, paths: Iterable[str] = ()) -> None:
        """Let programs of the session see what others have changed in the roots since.

        `paths` are absolute ones of files that are known to have changed; programs that watch them are told.
        """
        with self._lock:
            if not self._open_views():
                return
            self._forget_names()
            given = [os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path) for path in paths]
            for lasting in self.layers:
                root = str(lasting.layer.root)
                inside = [path[len(root) + 1 :] for path in given if path.startswith(f"{root}/")]
                with suppress(OSError), ExitStack() as stack:
                    real = stack.enter_context(open_folder(root))
                    upper = stack.enter_context(open_folder(os.fspath(lasting.layer.upper)))
                    self._renew_layer(lasting, real, upper, inside)

    def _renew_layer(self, lasting: LastingLayer, root: int, upper: int, paths: Iterable[str]) -> None:
        changed = [path for path, seen in lasting.seen.items() if read_mark(root, path) != seen.real]
        mine = {path for path in changed if read_layer_mark(upper, path) != lasting.seen[path].view}
        found = {path for path in changed if path not in mine}
        for folder in lasting.opaque & lasting.seen.keys():
            added = list_additions(folder, root, upper) if folder not in mine else ()
            found.update(path for path in added if path not in lasting.seen)  # the session has removed the others
        for path in paths:
            status = find_status(root, path)
            is_new = path not in lasting.seen and read_layer_mark(upper, path) is None
            if is_new and (status is None or status.st_size <= WRITTEN_BYTES):
                found.add(path)
        gone = {path for path in found if find_status(root, path) is None}
        for path in (*sorted(found - gone), *sorted(gone, reverse=True)):
            if os.path.join(lasting.layer.root, path) not in self.run.policy.private:
                with suppress(OSError):
                    write_into_view(lasting, path, root, upper)

    def _open_views(self) -> bool:
        """Open the roots of the view in the session's own namespace once; return whether they are open."""
        if self._is_opened:
            return all(each.view >= 0 for each in self.layers)
        try:
            pid = find_process(self.run.folder / INFO_FILE)
            for each in self.layers:
                each.view = open_view(pid, each.layer.root)
            arguments = [
                sys.executable,
                "-I",
                "-S",
                str(RENEWER),
                str(pid),
                *(str(each.layer.root) for each in self.layers),
            ]
            pipe = subprocess.PIPE
            self._renewer = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        except SandboxError:  # it has not started, or has ended
            self._close_views()
            return False
        self._is_opened = True
        return True

    def _forget_names(self) -> None:
        """Let the kernel forget which names it has looked up in the view."""
        if self._renewer and self._renewer.stdin and self._renewer.stdout:
            try:
                self._renewer.stdin.write(b"\n")
                self._renewer.stdin.flush()
                if self._renewer.stdout.read(1):
                    return
            except OSError:
                pass
            self._end_renewer()  # this kernel does not allow it: names that were looked up stay

    def _end_renewer(self) -> None:
        if self._renewer:
            self._renewer.kill()
            self._renewer.communicate()
            self._renewer = None

    def _close_views(self) -> None:
        for each in self.layers:
            if each.view >= 0:
                os.close(each.view)
            each.view = -1

    def close(self) -> None:
        """Close the view. It does not end the session, nor remove the run."""
        with self._lock:
            self._end_renewer()
            self._close_views()
            self._is_opened = True


def copy_new(lasting: LastingLayer, part: LookedLayer, prefix: str, upper: int, copy: int) -> None:
    """Copy what is new below an open folder of a layer. Raises OSError, also if it is moved meanwhile."""
    for name in sorted(os.listdir(upper)):
        path, status = prefix + name, os.stat(name, dir_fd=upper, follow_symlinks=False)
        attributes = read_attributes(upper, name)
        mark = GONE if is_whiteout(status, attributes) else to_mark(status)
        seen = lasting.seen.get(path)
        is_known = seen is not None and seen.view == mark
        if mark != GONE and stat.S_ISDIR(status.st_mode):
            part.marks[path] = mark
            is_opaque = attributes.get("opaque") == b"y"
            part.opaque.update([path] if is_opaque else ())
            os.mkdir(name, 0o700, dir_fd=copy)
            if is_opaque and not is_known:
                set_attribute(copy, name, "opaque", b"y")
            with open_layer_folder(name, upper) as inner, open_folder(name, copy) as made:
                copy_new(lasting, part, path + "/", inner, made)
                is_empty = is_known and not os.listdir(made)
            if is_empty:
                os.rmdir(name, dir_fd=copy)
            else:
                os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=copy)
        elif not is_known:
            if mark == GONE:
                make_whiteout(copy, name)
            part.marks[path] = mark if mark == GONE else copy_entry(upper, copy, name, status)


def note_gone(lasting: LastingLayer, part: LookedLayer, upper: int, copy: int) -> None:
    """Mark files as removed that were in a folder of the session's own and about which the layer says nothing any
    more."""
    gone = [
        path
        for path, seen in sorted(lasting.seen.items())
        if seen.view not in (None, GONE) and read_layer_mark(upper, path) is None
    ]
    for path in gone:
        part.marks[path] = None
        folder = os.path.dirname(path)
        above = read_layer_mark(upper, folder) if folder else GONE
        if folder and (above is None or not stat.S_ISDIR(above[1])):  # that is told of the folder
            continue
        with make_parents(copy, path, upper) as (parent, name):
            make_whiteout(parent, name)


def forget(lasting: LastingLayer, path: str) -> None:
    """Forget a file, or a folder with all in it."""
    for each in [each for each in lasting.seen if each == path or each.startswith(f"{path}/")]:
        del lasting.seen[each]
    lasting.opaque = {each for each in lasting.opaque if each != path and not each.startswith(f"{path}/")}


def note_applied(lasting: LastingLayer, root: int, path: str, marks: dict[str, Mark | None]) -> None:
    """Remember that crow made a file or folder of the root, unless somebody else has changed it since."""
    with suppress(OSError), open_parent_at(root, path) as (parent, name):
        for below, status in walk(parent, name):
            mark = marks.get(path + below)
            is_own = mark is not None and mark[2:4] == (status.st_size, status.st_mtime_ns)
            if is_own or stat.S_ISDIR(status.st_mode):
                lasting.own_times[status.st_ino] = status.st_ctime_ns


def list_additions(folder: str, root: int, upper: int) -> Iterable[str]:
    """List the files of a root's folder that its layer hides without naming them."""
    with suppress(OSError), ExitStack() as stack:
        real, name = stack.enter_context(open_parent_at(root, folder))
        names = os.listdir(stack.enter_context(open_folder(name, real)))
        layer, name = stack.enter_context(open_parent_at(upper, folder))
        own = os.listdir(stack.enter_context(open_layer_folder(name, layer)))
        return [f"{folder}/{name}" for name in {*names} - {*own}]
    return []


def write_into_view(lasting: LastingLayer, path: str, root: int, upper: int) -> None:
    """Make a file, link or folder of the view as in the root, as a program of the session would. Raises OSError."""
    status = find_status(root, path)
    with make_parents(lasting.view, path, root) as (parent, name):
        there = read_status(name, parent)
        if status is None:
            if there is not None:
                (os.rmdir if stat.S_ISDIR(there.st_mode) else os.unlink)(name, dir_fd=parent)
        elif stat.S_ISDIR(status.st_mode):
            if there is None:
                make_folder(parent, name, stat.S_IMODE(status.st_mode))
        else:
            temporary = f".crow-{os.urandom(8).hex()}"
            with open_parent_at(root, path) as (source, old):
                try:
                    copy_entry(source, parent, old, status, temporary, in_layer=False)
                    os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
                except OSError:
                    with suppress(OSError):
                        os.unlink(temporary, dir_fd=parent)
                    raise
    lasting.seen[path] = Seen(read_layer_mark(upper, path), to_mark(status) if status else None)
    if status:
        lasting.own_times[status.st_ino] = status.st_ctime_ns


def find_process(info: Path) -> int:
    """Find a process of a sandbox by what bubblewrap told. Raises SandboxError if it has ended."""
    try:
        told = msgspec.json.decode(info.read_bytes(), type=dict[str, int])
        first = told["child-pid"]
        pid = int(Path(f"/proc/{first}/task/{first}/children").read_text(encoding="ascii").split()[0])
        if os.stat(f"/proc/{pid}/ns/mnt").st_ino == told["mnt-namespace"]:
            return pid
    except (OSError, ValueError, IndexError, KeyError, msgspec.DecodeError):
        pass
    raise SandboxError("The session has ended.")


def open_view(pid: int, root: Path) -> int:
    """Open a root as a process in the sandbox sees it. Raises SandboxError if that is not a view."""
    try:
        opened = os.open(f"/proc/{pid}/root{root}", os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError as error:
        raise SandboxError(f"The view of {root} cannot be opened: {error.strerror}.") from error
    if os.fstat(opened).st_dev == os.stat(root).st_dev:
        os.close(opened)
        raise SandboxError(f"There is no view of {root}.")
    return opened
