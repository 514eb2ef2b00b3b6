"""What a command changed in a git repository, from real ones."""

import os
import re
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
from crow_sandbox.changes import read_changes
from crow_sandbox.git_changes import classify_git_path, split_git_changes
from crow_sandbox.layers import Layer
from crow_sandbox.sandbox import prove

PERSON = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
ENVIRONMENT = {**os.environ, **PERSON, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
INIT = "git init -qb main .; echo a > a; git add .; git commit -qm a;"
ADD = 'git -c protocol.file.allow=always submodule --quiet add "file://$PWD/.git" libs/sub; git commit -qm sub;'


@cache
def find_bubblewrap() -> str:
    """Return the bubblewrap that makes views here; skip the test where none does, or fail if all tests are to run."""
    with tempfile.TemporaryDirectory() as folder:
        proof = prove(Path(folder))
    if proof.overlay is None:
        (pytest.fail if os.environ.get("CROW_TEST_ALL") == "1" else pytest.skip)(proof.says)
    return proof.overlay.program


def run(root: Path, script: str, *before: str) -> None:
    subprocess.run([*before, "bash", "-ec", script], check=True, cwd=root, env=ENVIRONMENT, capture_output=True)


def summarize(folder: Path, before: str, command: str, inside: str = "") -> tuple[list[str], list[str]]:
    """Run a command on a view; return the lines about repositories, with X for ids, and the paths of other changes."""
    layer = Layer(folder / "root" / inside, folder / "upper", folder / "work", time.time_ns())
    for path in (folder / "root", layer.upper, layer.work):
        path.mkdir()
    run(folder / "root", before)
    root = os.fspath(layer.root)
    view = ["--overlay-src", root, "--overlay", os.fspath(layer.upper), os.fspath(layer.work), root]
    run(
        layer.root,
        command,
        find_bubblewrap(),
        "--unshare-all",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        *view,
        "--chdir",
        root,
    )
    repositories, shown = split_git_changes(read_changes(layer))
    lines = [line.replace(root, "ROOT") for line in map(str, repositories)]
    return [re.sub(r"\b[0-9a-f]{7}\b", "X", line) for line in lines], [change.path for change in shown]


@pytest.mark.parametrize(
    ("before", "command", "lines", "shown"),
    [
        (INIT, "echo b > b; git add b; git commit -qm b", [".git: main X → X, 3 objects added, index"], ["b"]),
        (INIT, "git checkout -qb new", [".git: HEAD main → new, new new → X, index"], []),
        (INIT + "git branch old", "git pack-refs --all; git branch -D old", [".git: old X → removed"], []),
        (INIT, "git gc -q", [".git: 3 objects added, 3 objects removed"], []),
        (INIT, "git config a.b c", [], [".git/config"]),
        (INIT, "echo > .git/hooks/pre-push", [], [".git/hooks/pre-push"]),
        (INIT, "echo > .git/info/attributes", [], [".git/info/attributes"]),
        ("", INIT, [".git: HEAD new → main, main new → X, 3 objects added, index"], [".git", "a"]),
        (INIT, "git worktree add -q wt", [".git: wt new → X", ".git/worktrees/wt: HEAD new → wt, index"], ["wt"]),
        (
            INIT + ADD,
            "cd libs/sub; echo x > x; git add x; git commit -qm x; git config a.b c",
            [".git/modules/libs/sub: main X → X, 3 objects added, index"],
            [".git/modules/libs/sub/config", "libs/sub/x"],
        ),
    ],
)
def test_data_of_git_is_one_line_and_what_runs_later_is_shown(
    tmp_path: Path, before: str, command: str, lines: list[str], shown: list[str]
) -> None:
    assert summarize(tmp_path, before, command) == (lines, shown)


def test_repository_of_a_work_tree_may_be_a_root_of_its_own(tmp_path: Path) -> None:
    command = "git update-ref refs/heads/main $(git commit-tree -m x HEAD^{tree}); git config a.b c"
    found = summarize(tmp_path, INIT, command, ".git")
    assert found == (["ROOT: main X → X, 1 object added"], ["config"])


DATA = [
    ".git/objects/ab/01234567890123456789012345678901234567",
    ".git/refs/heads/hooks/config",
    ".git/packed-refs",
    ".git/index",
    ".git/COMMIT_EDITMSG",
    ".git/hooks/pre-commit.sample",
    ".git/worktrees/x/HEAD",
    ".git/worktrees/x/gitdir",
    ".git/modules/libs/sub/objects/pack/pack-1.idx",
    ".git/modules/a/modules/b/index",
    "sub/.git/logs/HEAD",
]
LATER = [
    ".git",
    "sub/.git",
    ".git/config",
    ".git/config.worktree",
    ".git/hooks/pre-commit",
    ".git/hooks/new/file",
    ".git/info/attributes",
    ".git/objects/info/alternates",
    ".git/unknown",
    ".git/commondir",
    ".git/worktrees/x/config.worktree",
    ".git/worktrees/x/commondir",
    ".git/modules/libs/sub/config",
    ".git/modules/libs/sub/hooks/post-checkout",
    ".git/modules/a/objects/hooks/post-commit",
    ".git/modules/refs/config",
    ".git/modules/a/refs/hooks/post-commit",
    ".git/modules/a",
    ".git/rebase-merge/git-rebase-todo",
]


def test_only_known_data_of_git_does_not_run_later(tmp_path: Path) -> None:
    layer = Layer(tmp_path, tmp_path / "upper", tmp_path / "work", 0)
    assert [path for path in DATA if classify_git_path(layer, path) != "data"] == []
    assert [path for path in LATER if classify_git_path(layer, path) != "runs-later"] == []
    assert classify_git_path(layer, "config") is None
