"""The sandbox of a session: begins runs, each of one command, on the level that this machine was proven to hold."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crow_sandbox import bubblewrap, hidden, layers
from crow_sandbox.applying import AppliedChange, apply_changes
from crow_sandbox.bubblewrap import Bubblewrap, Mount, make_mount
from crow_sandbox.changes import LayerChange, read_changes
from crow_sandbox.layers import Layer
from crow_sandbox.policy import Level, Policy, SandboxError

TEMPORARY = ("/tmp", "/var/tmp")
"""Folders for temporary files, of which each session has its own."""
RUNTIME = ("/run", "/var/run")
"""Folders with the sockets of the machine's services."""
MODE_OF_TEMPORARY = 0o1777

ROOT, OWN, CACHE, SHOWN, HIDDEN = 3, 4, 2, 5, 1
"""The order of what lies at the same path."""


@dataclass(frozen=True)
class Standing:
    """What holds on this machine."""

    level: Level
    """The level that commands get: what was wanted, or the highest below it that was proven."""
    says: str
    """A sentence for a person: by which program, or why not."""


@dataclass(frozen=True)
class Proof:
    """What was found by running a command: a program for each group of levels, and a sentence."""

    overlay: Bubblewrap | None
    binding: Bubblewrap | None
    says: str


proofs: dict[str, Proof] = {}
"""For each file system of a sandbox's folder, what was found in this process."""


class SessionFolder:
    """The folder of a session's own: its temporary files, and the layers of caches, which last until it closes."""

    def __init__(self, folder: Path, temporary: Sequence[str]) -> None:
        self.path, self.lock = layers.make_run_folder(folder, "session-")
        self.temporary = temporary
        self.empty = self.path / "empty"
        self.empty.touch(mode=0o444)
        self.filter = self.path / "filter"
        self.with_filter = self.filter.write_bytes(bubblewrap.make_filter()) > 0
        self.proven: set[tuple[str, int]] = set()
        self.free: list[Path] = []
        self.made = 0

    def make_temporary(self, path: str) -> Path:
        """Return the session's own folder for one of the temporary folders."""
        own = self.path / "temporary" / path.strip("/").replace("/", "-")
        if not own.exists():
            own.mkdir(parents=True)
            own.chmod(MODE_OF_TEMPORARY)
        return own

    def take_caches(self) -> Path:
        """Return a folder for the layers of caches, which no other run uses until it is given back.

        The kernel forbids to mount one upper folder twice.
        """
        if self.free:
            return self.free.pop()
        self.made += 1
        return self.path / "caches" / str(self.made)

    def close(self) -> None:
        """Remove the folder."""
        layers.remove_tree(self.path)
        os.close(self.lock)


class SandboxRun:
    """One command in the sandbox, from its start until its changes are applied or discarded."""

    def __init__(
        self, policy: Policy, folder: Path, layers: Sequence[Layer], session: SessionFolder, proof: Proof, lock: int
    ) -> None:
        self.policy = policy
        self.folder = folder
        """Holds the layers, the journal and the earlier files of this run."""
        self.layers = layers
        self._session = session
        self._proof = proof
        self._lock: int | None = lock
        self._caches: Path | None = None

    def wrap(
        self, arguments: Sequence[str], env: Mapping[str, str], cwd: str, folders: Sequence[str]
    ) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and the environment that start a command in the sandbox, in the folder `cwd`.

        `arguments` begins with the absolute path of the program. `folders` are temporary folders of the caller, which
        the command may write. The environment is that of the sandbox's own program: what the caller adds to it reaches
        the command. Raises SandboxError if the command cannot see `cwd`.
        """
        if self.policy.level == "off":
            return list(arguments), dict(env)
        program = self._proof.overlay if self.policy.level == "review" else self._proof.binding
        if program is None:
            raise SandboxError(self._proof.says)
        roots = find_roots(self.policy, self.layers)
        around = hidden.find_surroundings(env, self.policy.hidden, self.policy.exposed, roots)
        try:
            mounts = list(self._make_mounts(around, roots, folders))
            place = find_cwd(cwd, mounts)
        except OSError as error:
            raise SandboxError(f"The sandbox cannot be made: {error}.") from error
        variables = hidden.remove_variables(env, self.policy.exposed)
        options = bubblewrap.make_options(
            mounts,
            {**variables, **bubblewrap.find_environment(variables)},
            place,
            share_network=self.policy.hosts is None,
            with_filter=self._session.with_filter,
        )
        wrapped = bubblewrap.make_command(program, options, self.folder, self._session.filter)
        return [*wrapped, *arguments], dict(bubblewrap.VARIABLES)

    def _make_mounts(
        self, around: hidden.Surroundings, roots: Sequence[str], folders: Iterable[str]
    ) -> Iterator[Mount]:
        """Yield what lies over the files of the machine, which are read-only.

        What is hidden in a folder that is hidden or empty as a whole is left out: it is not there.
        """
        own = sorted({os.path.realpath(path) for path in (*self.policy.writable, *folders) if os.path.isdir(path)})
        temporary = [path for path in find_folders(self._session.temporary) if path not in roots]
        runtime = find_folders(RUNTIME)
        data = os.path.realpath(self._session.path.parent)
        private = [*temporary, *runtime]
        places = [data, *(path for path in around.hidden if path not in (*roots, *own))]
        shown = [*roots, *own]
        for path in temporary:
            yield make_mount(path, HIDDEN, "--bind", str(self._session.make_temporary(path)))
        for path in runtime:
            yield make_mount(path, HIDDEN, "--tmpfs")
        for path in self._list_beside():
            yield make_mount(path, HIDDEN, "--tmpfs")
        for path in drop_inner(places):
            if not is_covered(path, private, shown):
                yield make_mount(path, SHOWN, *bubblewrap.hide(path, self._session.empty))
        for number, (path, text) in enumerate(sorted(around.texts.items())):
            if not is_covered(path, [*private, *places], shown):
                yield make_mount(path, SHOWN, "--ro-bind", str(self._write_text(number, text)))
        for path in (*around.sockets, *around.needed):
            yield make_mount(path, SHOWN, "--ro-bind-try", path)
        yield from self._make_root_mounts(roots)
        for path in own:
            yield make_mount(path, OWN, "--bind", path)
        if self._proof.overlay is not None:
            yield from self._make_cache_mounts(
                [path for path in drop_inner(around.caches) if not is_covered(path, [*private, *places], ())], shown
            )

    def _make_root_mounts(self, roots: Sequence[str]) -> Iterator[Mount]:
        """Yield the roots by the level, and what other file systems lie in them, which stay read-only."""
        for layer in self.layers:
            yield make_overlay(str(layer.root), layer.upper, layer.work, ROOT)
        if self.policy.level != "review":
            kind = "--bind" if self.policy.level == "workspace" else "--ro-bind"
            yield from (make_mount(path, ROOT, kind, path) for path in roots)
        for path, _ in layers.read_mounts():
            if any(path != root and layers.is_in(path, root) for root in roots) and os.path.exists(path):
                yield make_mount(path, CACHE, "--ro-bind", path)

    def _make_cache_mounts(self, caches: Iterable[str], shown: Sequence[str]) -> Iterator[Mount]:
        """Yield the caches, each with a layer of the session's."""
        self._caches = self._caches or self._session.take_caches()
        for path in caches:
            if not any(layers.is_in(path, each) for each in shown):
                place = self._caches / path.strip("/").replace("/", "-")
                for name in ("upper", "work"):
                    (place / name).mkdir(mode=0o700, parents=True, exist_ok=True)
                yield make_overlay(path, place / "upper", place / "work", CACHE)

    def _list_beside(self) -> Iterator[str]:
        """Yield the folders beside the roots that hold layers."""
        for layer in self.layers:
            place = layer.upper.parent
            if place.parent != self.folder:
                yield str(place)

    def _write_text(self, number: int, text: bytes) -> Path:
        """Write the lines of a file of settings that the command may see."""
        file = self.folder / f"text-{number}"
        file.write_bytes(text)
        return file

    def read_changes(self) -> Sequence[LayerChange]:
        """List what the command, which has ended, changed."""
        return [change for layer in self.layers for change in read_changes(layer)]

    def apply(self, changes: Sequence[LayerChange]) -> Sequence[AppliedChange]:
        """Apply changes; what is not among them is discarded with the run."""
        return apply_changes(changes, self.folder)

    def remove(self) -> None:
        """Remove the folder of the run with all that was not applied."""
        if self._lock is None:
            return
        layers.remove_run(self.folder)
        os.close(self._lock)
        self._lock = None
        if self._caches is not None:
            self._session.free.append(self._caches)


class Sandbox:
    """Begins the runs of one session."""

    def __init__(self, folder: Path, temporary: Sequence[str] = ()) -> None:
        """`folder` holds the runs; it is in crow's data. `temporary` are the folders of which the session has its own:
        those of the system, if none is given."""
        self.folder = folder
        self._temporary = temporary or (*TEMPORARY, tempfile.gettempdir())
        self._session: SessionFolder | None = None
        self._runs: list[SandboxRun] = []

    async def prove(self, level: Level) -> Standing:
        """Find the level that holds, by running a command; the answer is kept for this process."""
        if level == "off":
            return Standing("off", "Commands are not limited.")
        proof = await asyncio.to_thread(prove, self.folder)
        if level == "review" and proof.overlay:
            return Standing("review", proof.says)
        if proof.binding:
            return Standing("workspace" if level == "review" else level, proof.says)
        return Standing("off", proof.says)

    async def begin(self, policy: Policy) -> SandboxRun:
        """Begin a run. Raises SandboxError if the policy cannot be applied here."""
        return await asyncio.to_thread(self._begin, policy)

    def _begin(self, policy: Policy) -> SandboxRun:
        proof = prove(self.folder)
        if policy.level != "off" and not (proof.overlay if policy.level == "review" else proof.binding):
            raise SandboxError(proof.says)
        try:
            self._session = self._session or SessionFolder(self.folder, self._temporary)
            roots = layers.check_roots(policy.roots, self.folder) if policy.level != "off" else []
            if policy.level in ("review", "workspace"):
                roots = layers.check_roots([*roots, *layers.find_repositories(roots)], self.folder)
            folder, lock = layers.make_run_folder(self.folder, "run-")
        except OSError as error:
            raise SandboxError(f"The sandbox cannot be made in {self.folder}: {error.strerror}.") from error
        run = SandboxRun(policy, folder, [], self._session, proof, lock)
        try:
            if policy.level == "review":
                run.layers = layers.make_layers(roots, folder)
                for layer in run.layers:
                    self._prove_root(layer, proof, self._session)
        except SandboxError:
            run.remove()
            raise
        self._runs.append(run)
        return run

    def _prove_root(self, layer: Layer, proof: Proof, session: SessionFolder) -> None:
        """Prove once that a root can be below a copy-on-write view. Raises SandboxError."""
        key = (str(layer.root), os.stat(layer.root).st_dev)
        if key in session.proven or proof.overlay is None:
            return
        program = proof.overlay.program
        view = make_overlay(str(layer.root), layer.upper, layer.work, ROOT).arguments
        done = bubblewrap.run([program, *bubblewrap.NAMESPACES, *bubblewrap.VIEW, *view, program, "--version"])
        if isinstance(done, str):
            kind = layers.read_file_system(str(layer.root))
            raise SandboxError(
                f"There is no copy-on-write view of {layers.show(layer.root)}, which is on {kind or 'another system'}: "
                f"{program} says: {done}."
            )
        session.proven.add(key)

    async def close(self) -> None:
        """End the session's network, and remove its runs."""
        for run in self._runs:
            run.remove()
        self._runs.clear()
        if self._session is not None:
            self._session.close()
            self._session = None


def prove(folder: Path) -> Proof:
    """Find what holds on this machine for a sandbox whose folder is this one, once in this process."""
    if sys.platform != "linux":
        return Proof(None, None, "There is a sandbox only on Linux.")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = str(os.stat(folder).st_dev)
        if key not in proofs:
            place, lock = layers.make_run_folder(folder, "proof-")
            try:
                overlay, says = bubblewrap.prove_overlay(place)
                binding, says = (overlay, says) if overlay else bubblewrap.prove_binding(says)
                proofs[key] = Proof(overlay, binding, says)
            finally:
                layers.remove_run(place)
                os.close(lock)
        return proofs[key]
    except OSError as error:
        return Proof(None, None, f"The sandbox cannot be tried in {folder}: {error.strerror}.")


def make_overlay(root: str, upper: Path, work: Path, order: int) -> Mount:
    """Make the mount of a copy-on-write view."""
    return make_mount(root, order, "--overlay-src", root, "--overlay", str(upper), str(work))


def find_roots(policy: Policy, found: Sequence[Layer]) -> list[str]:
    """Return the roots of a run, without links."""
    return [str(layer.root) for layer in found] or sorted({os.path.realpath(root) for root in policy.roots})


def find_folders(paths: Iterable[str]) -> list[str]:
    """Return those of the paths that are folders, without links and without what is in others."""
    return drop_inner(os.path.realpath(path) for path in paths if os.path.isdir(path))


def drop_inner(paths: Iterable[str]) -> list[str]:
    """Return the paths without those that are in another one."""
    found: list[str] = []
    for path in sorted(set(paths), key=lambda path: path.rstrip("/") + "/"):
        if not found or not layers.is_in(path, found[-1]):
            found.append(path)
    return found


def is_covered(path: str, covering: Iterable[str], shown: Iterable[str]) -> bool:
    """Test whether a path is in a folder that is hidden, and not in one that is shown on top of it."""
    over = max((len(each) for each in covering if each != path and layers.is_in(path, each)), default=-1)
    return over > max((len(each) for each in shown if layers.is_in(path, each)), default=-1)


def find_cwd(cwd: str, mounts: Sequence[Mount]) -> str:
    """Return the folder of a command without links. Raises SandboxError if the command cannot see it."""
    path = os.path.realpath(cwd)
    if not os.path.isdir(path):
        raise SandboxError(f"The folder {layers.show(cwd)} does not exist.")
    over = [mount for mount in mounts if layers.is_in(path, mount.arguments[-1])]
    last = max(over, default=None)
    if last is not None and (
        last.arguments[0] == "--tmpfs" or (last.arguments[0] == "--bind" and last.arguments[1] != last.arguments[2])
    ):
        raise SandboxError(f"The folder {layers.show(cwd)} is hidden from commands in the sandbox.")
    return path
