"""The sandbox of a session: begins runs, each of one command, on the level that this machine was proven to hold."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from crow_system.files import make_private_folder

from crow_sandbox import bubblewrap, hidden, layers
from crow_sandbox.applying import AppliedChange, apply_changes, is_unfinished
from crow_sandbox.bubblewrap import Bubblewrap, Mount, make_mount
from crow_sandbox.changes import LayerChange, read_changes
from crow_sandbox.hosts import HostRules
from crow_sandbox.layers import Layer
from crow_sandbox.network import CommandNetwork, Network
from crow_sandbox.policy import Level, Policy, SandboxError

TEMPORARY = ("/tmp", "/var/tmp")
"""Folders for temporary files; each session has its own."""
RUNTIME = ("/run", "/var/run")
"""Folders with the sockets of the machine's services."""
MODE_OF_TEMPORARY = 0o1777

HOME, HIDDEN, CACHE, ROOT, OWN, SHOWN = range(6)
"""The order of what lies at the same path."""


@dataclass(frozen=True)
class Standing:
    """The protections of this machine."""

    level: Level
    """The level that commands get: the wanted one, or the highest below it that was proven."""
    says: str
    """A sentence for a person: by which program, or why not."""


@dataclass(frozen=True)
class Proof:
    """The findings of running a command: a program for each group of levels, and a sentence."""

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
        self.places: dict[tuple[str, int], bool] = {}
        """For each root and its device with a view: True if the layer lies next to it."""
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
        self.session = session
        self.proof = proof
        self.network: CommandNetwork | None = None
        """The way out, if there is a proxy."""
        self._lock: int | None = lock
        self._caches: Path | None = None

    def wrap(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        folders: Sequence[str],
        readable: Sequence[str] = (),
        *,
        in_terminal: bool = False,
    ) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and the environment that start a command in the sandbox, in the folder `cwd`.

        `arguments` begins with the absolute path of the program. `folders` are temporary folders of the caller, which
        the command may write, `readable` those that it may only read. Variables that the caller adds to the environment
        reach the command. With `in_terminal`, it keeps the terminal in which it starts, which must be its own. Raises
        SandboxError if the command cannot see `cwd`.
        """
        if self.policy.level == "off":
            return list(arguments), dict(env)
        program = self.proof.overlay if self.policy.level == "review" else self.proof.binding
        if program is None:
            raise SandboxError(self.proof.says)
        roots = find_roots(self.policy, self.layers)
        private = (*self.policy.hidden, *map(escape, self.policy.private))
        around = hidden.find_surroundings(env, private, self.policy.exposed, roots)
        try:
            mounts = [*self._make_mounts(around, roots, folders), *make_readable(readable)]
            place = find_cwd(cwd, mounts)
        except OSError as error:
            raise SandboxError(f"The sandbox cannot be made: {error}.") from error
        variables = hidden.remove_variables(env, self.policy.exposed)
        variables |= {**bubblewrap.find_environment(variables), **self._redirect_caches(variables)}
        enter: Sequence[str] = ()
        share: Sequence[str] = ("--share-net",) if self.policy.hosts is None else ()
        if self.network is not None:
            enter, share = self.network.enter, self.network.bubblewrap_arguments
            variables |= self.network.environment
        inner = {name: value for name, value in variables.items() if bubblewrap.LOADING.match(name)}
        options = bubblewrap.make_options(
            mounts, inner, place, network=share, with_filter=self.session.with_filter, in_terminal=in_terminal
        )
        wrapped = bubblewrap.make_command([*enter, program.program], options, self.folder, self.session.filter)
        return [*wrapped, *arguments], {name: value for name, value in variables.items() if name not in inner}

    def _redirect_caches(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return variables that lead programs to temporary files of the session where a cache is not there."""
        temporary = os.path.realpath(self.session.temporary[0])
        return hidden.redirect_caches(variables, os.path.join(temporary, ".caches"))

    def _make_mounts(
        self, around: hidden.Surroundings, roots: Sequence[str], folders: Iterable[str]
    ) -> Iterator[Mount]:
        """Yield what lies over the files of the machine, which are read-only.

        Hidden paths in a folder that is hidden or empty as a whole are left out: they do not exist there.
        """
        own = sorted({os.path.realpath(path) for path in (*self.policy.writable, *folders) if os.path.isdir(path)})
        temporary = [path for path in find_folders(self.session.temporary) if path not in roots]
        runtime = find_folders(RUNTIME)
        data = os.path.realpath(self.session.path.parent)
        private = [*temporary, *runtime]
        homes = self._find_views(path for path in around.homes if not is_covered(path, private, ()))
        listening = (path for path in around.listening if not is_covered(path, homes, ()))
        places = [data, *(path for path in (*around.hidden, *listening) if path not in (*roots, *own))]
        shown = [*roots, *own]
        for path in temporary:
            yield make_mount(path, HIDDEN, "--bind", str(self.session.make_temporary(path)))
        for path in runtime:
            yield make_mount(path, HIDDEN, "--tmpfs")
        for path in self._list_beside():
            yield make_mount(path, HIDDEN, "--tmpfs")
        for path in drop_inner(places):
            if not is_covered(path, private, shown):
                yield make_mount(path, SHOWN, *bubblewrap.hide(path, self.session.empty))
        for number, (path, text) in enumerate(sorted(around.texts.items())):
            if not is_covered(path, [*private, *places], shown):
                yield make_mount(path, SHOWN, "--ro-bind", str(self._write_text(number, text)))
        for path in (*around.sockets, *around.needed):
            yield make_mount(path, SHOWN, "--ro-bind-try", path)
        yield from self._make_root_mounts(roots)
        for path in own:
            yield make_mount(path, OWN, "--bind", path)
        for path in homes:
            yield make_mount(path, HOME, *bubblewrap.make_closed_view(path), "--remount-ro")
        caches = (path for path in drop_inner(around.caches) if not is_covered(path, [*private, *places], ()))
        yield from self._make_cache_mounts(
            path for path in caches if not any(layers.is_in(path, each) for each in shown)
        )

    def _find_views(self, folders: Iterable[str]) -> list[str]:
        """Return those of the folders that can be below a view: on the session's own file system, where one was made.

        In a view, no socket or pipe leads outside.
        """
        if self.proof.overlay is None:
            return []
        device, mounts = os.stat(self.folder).st_dev, layers.read_mounts()
        return [
            path for path in folders if os.stat(path).st_dev == device and not layers.find_inner_mount(path, mounts)
        ]

    def _make_root_mounts(self, roots: Sequence[str]) -> Iterator[Mount]:
        """Yield the roots, by the level."""
        for layer in self.layers:
            yield make_overlay(str(layer.root), layer.upper, layer.work, ROOT)
        if self.policy.level != "review":
            kind = "--bind" if self.policy.level == "workspace" else "--ro-bind"
            yield from (make_mount(path, ROOT, kind, path) for path in roots)

    def _make_cache_mounts(self, caches: Iterable[str]) -> Iterator[Mount]:
        """Yield the caches, each with a layer of the session's."""
        self._caches = self._caches or self.session.take_caches()
        for path in self._find_views(caches):
            place = self._caches / path.strip("/").replace("/", "-")
            for name in ("upper", "work"):
                (place / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            yield make_overlay(path, place / "upper", place / "work", CACHE)

    def _list_beside(self) -> Iterator[str]:
        """Yield the folders with layers, next to the roots."""
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

    @property
    def is_removed(self) -> bool:
        """True if the folder of the run was removed."""
        return self._lock is None

    @property
    def is_unfinished(self) -> bool:
        """True if some changes were applied, and could be neither completed nor taken back."""
        return is_unfinished(self.folder)

    def remove(self) -> None:
        """Remove the folder of the run with all that was not applied. One that is unfinished stays, with the earlier
        files in it; the next process tries again."""
        if self._lock is None:
            return
        if self.network is not None:
            self.network.end()
        if not self.is_unfinished:
            layers.remove_run(self.folder)
        os.close(self._lock)
        self._lock = None
        if self._caches is not None:
            self.session.free.append(self._caches)


class Sandbox:
    """Begins the runs of one session."""

    def __init__(self, folder: Path, temporary: Sequence[str] = ()) -> None:
        """`folder` holds the runs; it is in crow's data. `temporary` are the folders that the session has for itself:
        those of the system, if none is given."""
        self.folder = folder
        self._temporary = temporary or (*TEMPORARY, tempfile.gettempdir())
        self.network: Network | None = None
        """The network of the session's commands, from the first one on."""
        self._opening = asyncio.Lock()
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

    async def prove_network(self) -> str:
        """Say which network commands have, as a sentence for a person, by making one."""
        proof, network = await asyncio.to_thread(prove, self.folder), Network()
        if proof.binding:
            await network.open(proof.binding.program)
            await network.close()
        return network.says

    async def begin(self, policy: Policy) -> SandboxRun:
        """Begin a run. Raises SandboxError if the policy cannot be applied here."""
        run = await asyncio.to_thread(self._begin, policy)
        # A program that is not reviewed, and may reach no host, needs no proxy that says what it asked for.
        if policy.hosts or (policy.hosts is not None and policy.level == "review"):
            try:
                run.network = await self._begin_network(run, HostRules(policy.hosts, policy.denied, policy.addresses))
            except BaseException:
                run.remove()
                raise
        self._runs = [each for each in (*self._runs, run) if not each.is_removed]
        return run

    async def _begin_network(self, run: SandboxRun, rules: HostRules) -> CommandNetwork | None:
        """Return the network of a command. Raises SandboxError."""
        if run.proof.binding is None or run.policy.level == "off":
            return None
        async with self._opening:
            if self.network is None:
                self.network = Network()
                await self.network.open(run.proof.binding.program)
        return await self.network.begin(rules)

    def _begin(self, policy: Policy) -> SandboxRun:
        proof = prove(self.folder)
        if policy.level != "off" and not (proof.overlay if policy.level == "review" else proof.binding):
            raise SandboxError(proof.says)
        try:
            self._session = self._session or SessionFolder(self.folder, self._temporary)
            roots = [os.path.realpath(root) for root in policy.roots]
            if policy.level in ("review", "workspace"):
                roots += layers.find_repositories(roots)
            roots = layers.check_roots(roots, self.folder) if policy.level != "off" else []
            folder, lock = layers.make_run_folder(self.folder, "run-")
        except OSError as error:
            raise SandboxError(f"The sandbox cannot be made in {self.folder}: {error.strerror}.") from error
        run = SandboxRun(policy, folder, [], self._session, proof, lock)
        try:
            if policy.level == "review":
                run.layers = [self._make_layer(Path(root), number, run) for number, root in enumerate(roots)]
        except SandboxError:
            run.remove()
            raise
        return run

    def _make_layer(self, root: Path, number: int, run: SandboxRun) -> Layer:
        """Make the layer of a root where a copy-on-write view of it was made before, or is. Raises SandboxError."""
        session, program = run.session, run.proof.overlay
        assert program is not None
        if inner := layers.find_inner_mount(str(root), layers.read_mounts()):
            raise SandboxError(
                f"There is no copy-on-write view of {layers.show(root)}, because another file system is mounted in it: "
                f"{layers.show(inner)}."
            )
        key, reason = (str(root), os.stat(root).st_dev), ""
        for beside in [session.places[key]] if key in session.places else layers.find_places(root, run.folder):
            try:
                layer = layers.make_layer(root, run.folder, number, beside=beside)
            except OSError as error:
                reason = error.strerror or str(error)
                continue
            if key not in session.places:
                view = make_overlay(str(root), layer.upper, layer.work, ROOT).arguments
                done = bubblewrap.run(
                    [program.program, *bubblewrap.NAMESPACES, *bubblewrap.VIEW, *view, program.program, "--version"]
                )
                if isinstance(done, str):
                    reason = done
                    continue
                session.places[key] = beside
            return layer
        kind = layers.read_file_system(str(root)) or "a file system that is not known"
        raise SandboxError(f"There is no copy-on-write view of {layers.show(root)}, which is on {kind}: {reason}.")

    async def close(self) -> None:
        """End the session's network, and remove its runs."""
        if self.network is not None:
            await self.network.close()
            self.network = None
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
        make_private_folder(folder)
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


def make_readable(paths: Iterable[str]) -> list[Mount]:
    """Make the mounts of folders that a command may only read, also where they lie in a folder that is hidden."""
    return [make_mount(path, OWN, "--ro-bind", path) for path in map(os.path.realpath, paths)]


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
