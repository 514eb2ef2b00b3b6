"""Copy-on-write views of folders, for tests of what commands change on them."""

import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path

from crow_sandbox.layers import Layer
from crow_sandbox.sandbox import prove

from crow_testing.skipping import unable


@cache
def find_bubblewrap() -> str:
    """Return the bubblewrap that makes views here; skip the test where none does, or fail if all tests are to run."""
    with tempfile.TemporaryDirectory() as folder:
        proof = prove(Path(folder))
    return proof.overlay.program if proof.overlay else unable(proof.says)


def enter_view(layer: Layer) -> list[str]:
    """Return the arguments that start a command on the view of a layer, in its root; those of the command follow."""
    root, upper, work = map(os.fspath, (layer.root, layer.upper, layer.work))
    overlay = ["--overlay-src", root, "--overlay", upper, work, root]
    namespaces = ["--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    return [find_bubblewrap(), *namespaces, *overlay, "--chdir", root]


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
            if sys.platform == "linux":
                entry += os.listxattr(path, follow_symlinks=False)
            found[os.path.relpath(path, root)] = (*entry,)
    return found
