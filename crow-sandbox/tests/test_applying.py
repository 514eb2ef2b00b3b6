"""Commands run on a real overlay; their changes are read and applied."""

import os
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from errno import ENOSPC
from pathlib import Path

import pytest
from crow_sandbox.applying import apply_changes, finish_applying
from crow_sandbox.changes import LayerChange, list_files, read_changes
from crow_sandbox.layers import Layer
from crow_sandbox.policy import SandboxError
from crow_testing.views import enter_view, snapshot


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
        subprocess.run([*enter_view(self.layer), "bash", "-ec", script], check=True, cwd=self.root)

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


TYPES = " ".join(f"{first}-{second}" for first in ("file", "link", "folder") for second in ("file", "link", "folder"))
BEFORE_TYPES = f"""
mkdir types; cd types
for each in {TYPES}; do case $each in file-*) echo $each > $each;; link-*) ln -s $each $each;;
    *) mkdir -p $each/a $each/b; echo $each > $each/a/c;; esac; done
"""
COMMAND_TYPES = f"""
cd types
for each in {TYPES}; do rm -r $each; case $each in *-file) echo new > $each;; *-link) ln -s .. $each;;
    *) mkdir -p $each/a; echo new > $each/a/c; ln -s d $each/e;; esac; done
mkdir -m 555 new; chmod 500 folder-folder/a; mv file-file moved; mkdir -p deep/er; mv moved deep/er
"""


@pytest.mark.slow
def test_kill_before_any_step_leaves_the_folder_before_or_after(tmp_path: Path, runs: Path) -> None:
    (tmp_path / "first").mkdir()
    view = make_view(tmp_path / "first", BEFORE + BEFORE_TYPES)
    before, after = snapshot(view.root, view.layer.start_ns), view.run_on_copy(COMMAND + COMMAND_TYPES)
    view.sh((COMMAND + COMMAND_TYPES).replace("-m 000", ""))  # a copy cannot be made of what may not be read
    moments = 0
    while kill_at(view, tmp_path, runs, moments, before, after):
        moments += 1
    assert moments > (80 if runs.is_relative_to(tmp_path) else 120)


def copy_view(view: View, folder: Path, run: Path) -> View:
    """Copy a view as its command left it, as if that had just begun."""
    folder.mkdir()
    run.mkdir(parents=True)
    subprocess.run(["cp", "-a", view.root, folder], check=True)
    subprocess.run(["cp", "-a", view.layer.upper, run], check=True)
    (run / "upper/nd/locked").chmod(0)
    (run / "start").touch()
    return View(Layer(folder / "root", run / "upper", run / "work", (run / "start").stat().st_ctime_ns), run)


def kill_at(view: View, folder: Path, runs: Path, moment: int, before: object, after: object) -> bool:
    """Kill the process that applies before a step, and twice one that finishes; False if there are fewer steps."""
    now = view.layer.start_ns
    view = copy_view(view, folder / str(moment), runs / str(moment) / "one")
    changes = view.changes()
    assert not any(change.conflicts for change in changes)
    if run_in_child(lambda: apply_changes(changes, view.run, Killed(moment))):
        assert snapshot(view.root, now) == after
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
        assert view.changes() == changes, moment
        moment += 1
    assert moment > 40
    finish_applying(view.run.parent)
    assert snapshot(view.root, now) == after


def fails_at(changes: list[LayerChange], run: Path, moment: int) -> bool:
    """Raise an error before a step of applying; True if the changes are applied all the same."""
    failing = Failing(moment, OSError(ENOSPC, os.strerror(ENOSPC)) if moment % 2 else KeyboardInterrupt())
    with suppress(KeyboardInterrupt):
        try:
            apply_changes(changes, run, failing)
        except SandboxError as error:
            if "No space left on device" not in str(error):
                raise
    return (run / "journal").exists()


def test_names_links_holes_and_many_files_are_applied(tmp_path: Path) -> None:
    before = r"""
        mkdir many; printf x > $'\xff\xfe'; printf x > $'a\nb'; ln -s $'\xff' $'\xfe'; truncate -s 1M sparse
        for i in $(seq 500); do echo $i > many/$i; done
    """
    command = r"""
        rm $'\xff\xfe'; printf y > $'a\nb'; printf z > $'\xfd'; ln -sfn $'\xfa' $'\xfe'; truncate -s 3M sparse
        for i in $(seq 0 3 2000); do echo new > many/$i; done; rm many/5; mkdir $'\xf0'; echo > $'\xf0/\n'
        ln sparse also
    """
    listed = check(tmp_path, before, command)
    assert len(listed) == 667 + 1 + 7


def test_devices_sockets_and_pipes_are_listed_but_never_applied(tmp_path: Path) -> None:
    view = make_view(tmp_path, "echo a > file; mkfifo old")
    socket = "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
    view.sh(
        f'rm file; mkfifo file; mkfifo pipe; python3 -c "{socket}"; mkdir new; mkfifo new/pipe; echo > new/file; rm old'
    )
    assert view.listed() == [
        ("changed", "other", "file"),
        ("added", "folder", "new"),
        ("removed", "other", "old"),
        ("added", "other", "pipe"),
        ("added", "other", "socket"),
    ]
    view.apply()
    assert sorted(os.listdir(view.root)) == ["file", "new"]
    assert (view.root / "file").read_text() == "a\n"
    assert os.listdir(view.root / "new") == ["file"]


def test_nothing_is_listed_for_what_is_the_same(tmp_path: Path) -> None:
    view = make_view(tmp_path, "mkdir -p a/b; echo 1 > a/b/1; ln -s a link; mkdir -p made/below; echo x > made/below/x")
    view.sh(": >> a/b/1; rm link; ln -s a link; touch a new; rm new; mkdir c; rmdir c; chmod 700 a; chmod 755 a")
    view.sh("cp -a made copy; rm -r made; cp -a copy made; rm -r copy")
    assert view.listed() == []


def test_touched_file_differs_in_its_time_only(tmp_path: Path) -> None:
    view = make_view(tmp_path, "echo 1 > touched; echo 1 > mode; touch -d 2001-01-01 touched")
    view.sh("touch touched; chmod +x mode")
    assert [(each.path, each.mode_only, each.times_only) for each in view.changes()] == [
        ("mode", True, False),
        ("touched", True, True),
    ]


CONFLICTS: list[tuple[str, str, str, list[str]]] = [
    ("echo 1 > a", "echo 2 > a", "echo 3 > a", ["a"]),
    ("echo 1 > a", "rm a", "echo 3 > a", ["a"]),
    ("", "echo 2 > a", "echo 3 > a", ["a"]),
    ("echo 1 > a", "echo 2 > a", "rm a", ["a"]),
    ("mkdir d", "rmdir d", "echo 3 > d/x", ["d"]),
    ("mkdir -p d/e", "rm -r d", "echo 3 > d/e/x", ["d"]),
    ("mkdir -p d/e", "rm -r d; echo > d", "echo 3 > d/e/x", ["d"]),
    ("mkdir -p d/e", "rm -r d; mkdir d; echo > d/new", "echo 3 > d/e/x", ["d/e"]),
    ("mkdir d; echo 1 > d/a", "echo 2 > d/a", "rm -r d", ["d"]),
    ("mkdir d; echo 1 > d/a", "echo 2 > d/a", "rm -r d; echo > d", ["d"]),
    ("mkdir d; echo 1 > d/a", "echo 2 > d/a", "rm -r d; ln -s / d", ["d"]),
    ("echo 1 > a", "echo 2 > a", "echo 2 > a", []),
    ("echo 1 > a", "rm a", "rm a", []),
    ("", "echo 2 > a", "echo 2 > a", []),
    ("mkdir d", "echo 2 > d/a", "echo 2 > d/b", []),
    ("", "mkdir d; echo 2 > d/a", "mkdir d; echo 2 > d/b", []),
]


@pytest.mark.parametrize(("before", "command", "person", "conflicts"), CONFLICTS)
def test_conflict_is_what_somebody_else_changed_too(
    tmp_path: Path, before: str, command: str, person: str, conflicts: list[str]
) -> None:
    view = make_view(tmp_path, before)
    view.sh(command)
    subprocess.run(["bash", "-ec", person], check=True, cwd=view.root)
    assert [change.path for change in view.changes() if change.conflicts] == conflicts


def test_file_that_was_changed_since_the_changes_were_read_is_not_overwritten(tmp_path: Path) -> None:
    view = make_view(tmp_path, "echo 1 > a; echo 1 > b; mkdir -p d/e")
    view.sh("echo 2 > a; echo 2 > b; rm -r d")
    changes = view.changes()
    for person, file in (("echo 33 > b", "b"), ("echo 3 > d/e/x", "d")):
        subprocess.run(["bash", "-ec", person], check=True, cwd=view.root)
        with pytest.raises(SandboxError, match=rf"Somebody else has changed .*/{file} meanwhile; nothing was applied"):
            apply_changes(changes, view.run)
        subprocess.run(["bash", "-ec", "echo 1 > b; touch -r a b"], check=True, cwd=view.root)
        changes = [change for change in changes if change.path != "b"]
    assert (view.root / "a").read_text() == "1\n"
    assert (view.root / "d/e/x").exists()


def test_conflict_that_is_among_the_changes_is_applied_and_the_earlier_file_kept(tmp_path: Path) -> None:
    view = make_view(tmp_path, "echo 1 > a")
    view.sh("echo 2 > a; mkdir new; echo n > new/file; ln -s a link")
    (view.root / "a").write_text("3\n")
    applied = apply_changes(view.changes(), view.run)
    assert (view.root / "a").read_text() == "2\n"
    kept = {each.change.path: each.before and each.before.read_bytes() for each in applied}
    assert kept == {"a": b"3\n", "link": None, "new": None}


def test_changes_that_are_not_chosen_are_left_out(tmp_path: Path) -> None:
    view = make_view(tmp_path, "mkdir d; echo 1 > d/a; echo 1 > d/b")
    view.sh("rm -r d; mkdir d; echo 2 > d/a; echo 3 > c")
    apply_changes([change for change in view.changes() if change.path == "d/a"], view.run)
    assert snapshot_names(view.root) == ["d", "d/a", "d/b"]
    assert (view.root / "d/a").read_text() == "2\n"


def snapshot_names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.mark.parametrize("path", ["../outside", "d/../../outside", "/etc/x", "d//a", "."])
def test_path_that_leads_out_of_the_root_is_refused(tmp_path: Path, path: str) -> None:
    view = make_view(tmp_path, "mkdir d")
    view.sh("echo 1 > d/a")
    with pytest.raises(SandboxError, match="is not a path in"):
        apply_changes([replace(view.changes()[0], path=path)], view.run)


def test_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    view = make_view(tmp_path, "mkdir -p d/e; echo 1 > d/e/a; echo 1 > b")
    (tmp_path / "outside").mkdir()
    view.sh("echo 2 > b; echo 2 > d/e/a")
    changes = view.changes()
    subprocess.run(["bash", "-ec", "mv d/e moved; ln -s ../../outside d/e"], check=True, cwd=view.root)
    with pytest.raises(SandboxError, match="d/e/a cannot be changed, as a folder of its path is a link or a file now"):
        apply_changes(changes, view.run)
    assert (view.root / "b").read_text() == "1\n"
    assert [(each.path, each.conflicts) for each in view.changes()] == [("b", False), ("d/e", True)]


def test_links_of_a_command_are_never_followed(tmp_path: Path) -> None:
    view = make_view(tmp_path, "mkdir d; echo 1 > d/a")
    (tmp_path / "outside").mkdir()
    view.sh("rm -r d; ln -s ../outside d; mkdir -p new; ln -s ../../outside new/link; ln -s /etc/passwd file")
    assert [(each.path, list(list_files(each))) for each in view.changes()] == [
        ("d", ["d"]),
        ("file", ["file"]),
        ("new", ["new/link"]),
    ]
    view.apply()
    assert os.readlink(view.root / "d") == "../outside"
    assert os.listdir(tmp_path / "outside") == []


def test_taking_back_does_not_lose_what_a_person_made_meanwhile(tmp_path: Path) -> None:
    view = make_view(tmp_path, "echo 1 > a; echo 1 > b")
    view.sh("echo 2 > a; echo 2 > b")
    changes = view.changes()
    run_in_child(lambda: apply_changes(changes, view.run, Killed(4)))  # b is away, and its new file not yet there
    (view.root / "b").write_text("3\n")
    [sentence] = finish_applying(view.run.parent)
    assert "b" in sentence
    assert str(view.run) in sentence
    assert (view.root / "a").read_text() == "1\n"
    assert (view.root / "b").read_text() == "3\n"
    assert sorted(path.read_text() for path in view.run.rglob("b")) == ["2\n"]
