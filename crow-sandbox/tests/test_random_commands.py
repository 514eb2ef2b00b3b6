"""Random commands leave the same on a view, after its changes are applied, as without one."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from crow_sandbox.applying import apply_changes
from crow_sandbox.changes import read_changes
from crow_sandbox.layers import Layer
from crow_testing.views import enter_view, snapshot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PERFORM = """
import contextlib, json, os, shutil, sys
os.umask(0o022)
for name, first, second, number in json.loads(sys.argv[1]):
    with contextlib.suppress(OSError, shutil.Error):
        if name == "write":
            os.makedirs(os.path.dirname(first) or ".", exist_ok=True)
            with open(first, "w") as file:
                file.write(second * number)
        elif name == "append":
            with open(first, "a") as file:
                file.write(second)
        elif name == "remove":
            shutil.rmtree(first) if os.path.isdir(first) and not os.path.islink(first) else os.unlink(first)
        elif name == "make":
            os.makedirs(first)
        elif name == "symlink":
            os.symlink(second, first)
        elif name == "move" and not os.path.lexists(second):
            shutil.move(first, second)
        elif name == "replace" and not os.path.isdir(first):
            os.replace(first, second)
        elif name == "link":
            os.link(first, second, follow_symlinks=False)
        elif name == "mode" and not os.path.islink(first):
            os.chmod(first, [0o755, 0o700, 0o555, 0o640, 0o400, 0][number])
        elif name == "time":
            os.utime(first, (10**9 + number, 10**9 + number), follow_symlinks=False)
"""
PATHS = st.lists(st.sampled_from(["a", "b", "é"]), min_size=1, max_size=3).map("/".join)
NAMES = ["write", "append", "remove", "make", "symlink", "move", "replace", "link", "mode", "time"]
OPERATIONS = st.lists(st.tuples(st.sampled_from(NAMES), PATHS, PATHS, st.integers(0, 5)), max_size=15)
TREES = st.lists(
    st.tuples(st.sampled_from(["write", "write", "make", "symlink", "mode"]), PATHS, PATHS, st.integers(0, 5))
)


def perform(operations: Sequence[object], folder: Path, *before: str) -> None:
    command = [*before, sys.executable, "-SEc", PERFORM, json.dumps(operations)]
    subprocess.run(command, check=True, cwd=folder)


@given(TREES, OPERATIONS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_commands_leave_the_same_as_without_a_view(tree: list[object], operations: list[object]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        root, copy, upper, work = (folder / name for name in ("root", "copy", "upper", "work"))
        for path in (root, upper, work):
            path.mkdir()
        perform(tree, root)
        subprocess.run(["cp", "-a", root, copy], check=True)
        (folder / "start").touch()
        now = (folder / "start").stat().st_ctime_ns
        layer = Layer(root, upper, work, now)
        before = snapshot(root, now)
        perform(operations, root, *enter_view(layer))
        perform(operations, copy)
        assert snapshot(root, now) == before
        changes = read_changes(layer)
        assert not [change for change in changes if change.conflicts]
        apply_changes(changes, folder)
        assert snapshot(root, now) == snapshot(copy, now)
