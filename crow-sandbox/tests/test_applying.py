"""Commands run on a real overlay; their changes are read and applied."""

import os
import signal
import stat
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path

import pytest
from crow_sandbox.applying import apply_changes, finish_applying
from crow_sandbox.bubblewrap import find_programs
from crow_sandbox.changes import LayerChange, read_changes
from crow_sandbox.layers import Layer
from crow_sandbox.policy import SandboxError

BUBBLEWRAP = next(find_programs(), "")


@dataclass
class View:
    """A folder with a copy-on-write view."""

    layer: Layer
    run: Path

    @property
    def root(self) -> Path:
        return self.layer.root

    def sh(self, script: str) -> None:
        """Run a script on the view."""
        subprocess.run([*self.command(), "bash", "-ec", script], check=True, cwd=self.root)

    def command(self) -> list[str]:
        root, upper, work = map(os.fspath, (self.layer.root, self.layer.upper, self.layer.work))
        overlay = ["--overlay-src", root, "--overlay", upper, work, root]
        namespaces = ["--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        return [BUBBLEWRAP, *namespaces, *overlay, "--chdir", root]

    def run_on_copy(self, script: str) -> dict[str, object]:
        """Run a script on a copy of the folder, and return what that holds then."""
        copy = self.root.with_name("copy")
        subprocess.run(["cp", "-a", self.root, copy], check=True)
        subprocess.run(["bash", "-ec", script], check=True, cwd=copy)
        return snapshot(copy, self.layer.start_ns)

    def changes(self) -> list[LayerChange]:
        return list(read_changes(self.layer))

    def listed(self) -> list[tuple[str, str, str]]:
        return [(change.kind, change.type, change.path) for change in self.changes()]

    def apply(self) -> None:
        apply_changes(self.changes(), self.run)


def make_view(folder: Path, script: str = "", runs: Path | None = None) -> View:
    """Make a folder by a script, and a view of it."""
    root, run = folder / "root", (runs or folder / "runs") / "one"
    root.mkdir()
    subprocess.run(["bash", "-ec", script], check=True, cwd=root)
    for name in ("upper", "work"):
        (run / name).mkdir(parents=True)
    (run / "start").touch()
    return View(Layer(root, run / "upper", run / "work", (run / "start").stat().st_ctime_ns), run)


def snapshot(root: Path, now: int) -> dict[str, object]:
    """Read what a folder holds: permissions, contents, attributes, and the times of files that are before `now`."""
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            entry: list[object] = [stat.S_IFMT(status.st_mode)]
            if stat.S_ISLNK(status.st_mode):
                entry += [os.readlink(path)]
            else:
                entry += [stat.S_IMODE(status.st_mode)]
            if stat.S_ISREG(status.st_mode):
                entry += [Path(path).read_bytes(), min(status.st_mtime_ns, now)]
            found[os.path.relpath(path, root)] = (*entry, *os.listxattr(path, follow_symlinks=False))
    return found


def check(folder: Path, before: str, command: str) -> list[tuple[str, str, str]]:
    """Assert that a command leaves the same after its changes are applied as it does without a view."""
    view = make_view(folder, before)
    now = view.layer.start_ns
    earlier, after = snapshot(view.root, now), view.run_on_copy(command)
    view.sh(command)
    assert snapshot(view.root, now) == earlier
    listed = view.listed()
    view.apply()
    assert snapshot(view.root, now) == after
    assert finish_applying(view.run.parent) == []
    assert not view.run.exists()
    return listed


BEFORE = """
mkdir -p d/e moved/sub remade linked gone locked; echo x > d/e/x; echo y > d/y; echo t > type; echo q > remade/q
echo r > remade/r; echo m > moved/m; echo n > moved/sub/n; echo one > a; echo gone > b; echo same > same; echo p > mode
echo o > old; touch gone/x; echo t > times; echo l > locked/file; mkdir mode-of-folder locked/folder; ln -s a link
chmod 555 locked locked/folder; echo r > read-only; chmod 444 read-only
"""
COMMAND = """
echo two >> a; rm b; mv moved moved2; mv old new; rm -r remade; mkdir remade; echo new > remade/new; echo q > remade/q
rm type; mkdir type; echo in > type/in; rm -r linked; ln -s /etc linked; chmod 700 mode; : >> same; rm -r gone
mkdir -p nd/sub; echo 1 > nd/sub/1; touch -d 2001-01-01 times; mkdir e; mv d/e/x d/x2; rm -r d/e; mkdir d/e
mkdir -m 000 nd/locked; chmod 755 locked; echo 2 >> locked/file; rmdir locked/folder; chmod 555 locked
chmod 711 mode-of-folder
mv read-only nd; ln -sf missing link; mkdir -p locked-new/below; chmod 555 locked-new
"""
LISTED = """
changed file a
removed file b
removed file d/e/x
added file d/x2
added folder e
removed folder gone
changed link link
changed link linked
changed file locked/file
removed folder locked/folder
added folder locked-new
changed file mode
changed folder mode-of-folder
removed folder moved
added folder moved2
added folder nd
added file new
removed file old
removed file read-only
added file remade/new
changed file remade/q
removed file remade/r
changed file times
changed folder type
"""


def test_changes_of_every_kind_are_applied(tmp_path: Path) -> None:
    assert sorted(check(tmp_path, BEFORE, COMMAND)) == sorted(
        tuple(line.split()) for line in LISTED.split("\n") if line
    )


class Killed:
    """Counts steps, and kills this process before the step of a number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0

    def __call__(self) -> None:
        if self.count == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def run_in_child(function: Callable[[], object]) -> bool:
    """Run a function in a process of its own; False if that was killed."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == 0


@pytest.fixture(params=["one file system", "two file systems"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder for runs, on the file system of the roots or on another one."""
    if request.param == "one file system":
        yield tmp_path / "runs"
        return
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("/dev/shm is not another file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_kill_before_any_step_leaves_the_folder_before_or_after(tmp_path: Path, runs: Path) -> None:
    moments = 0
    while kill_at(tmp_path, runs, moments):
        moments += 1
    assert moments > 50


def kill_at(folder: Path, runs: Path, moment: int) -> bool:
    """Kill the process that applies before a step, and twice one that finishes; False if there are fewer steps."""
    (folder / str(moment)).mkdir()
    view = make_view(folder / str(moment), BEFORE, runs / str(moment))
    now = view.layer.start_ns
    before, after = snapshot(view.root, now), view.run_on_copy(COMMAND)
    view.sh(COMMAND)
    changes = view.changes()
    if run_in_child(lambda: apply_changes(changes, view.run, Killed(moment))):
        return False
    begun = (view.run / "journal").exists()
    for number in (moment % 7, moment % 31):
        run_in_child(lambda number=number: finish_applying(view.run.parent, Killed(number)))
    sentences = finish_applying(view.run.parent)
    assert not view.run.exists(), sentences
    assert snapshot(view.root, now) == (after if begun else before), moment
    return True


class Failing:
    """Raises an error before the step of a number."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.number = number
        self.error = error
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.number + 1:
            raise self.error


@pytest.mark.slow
def test_error_before_any_step_takes_everything_back(tmp_path: Path, runs: Path) -> None:
    view = make_view(tmp_path, BEFORE, runs)
    now = view.layer.start_ns
    before, after = snapshot(view.root, now), view.run_on_copy(COMMAND)
    view.sh(COMMAND)
    changes = view.changes()
    moment = 0
    while not fails_at(changes, view.run, moment):
        assert snapshot(view.root, now) == before, moment
        moment += 1
    assert moment > 40
    assert snapshot(view.root, now) == after


def fails_at(changes: list[LayerChange], run: Path, moment: int) -> bool:
    """Raise an error before a step of applying; True if there are fewer steps."""
    failing = Failing(moment, OSError(ENOSPC, os.strerror(ENOSPC)) if moment % 2 else KeyboardInterrupt())
    with suppress(KeyboardInterrupt):
        try:
            apply_changes(changes, run, failing)
        except SandboxError as error:
            if "No space left on device" not in str(error):
                raise
    return failing.count <= moment
