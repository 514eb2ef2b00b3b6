"""What a command changed in a git repository, from real ones."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from crow_sandbox.changes import read_changes
from crow_sandbox.git_changes import classify_git_path, split_git_changes
from crow_sandbox.layers import Layer
from crow_testing.views import enter_view
from hypothesis import example, given
from hypothesis import strategies as st

PERSON = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
ENVIRONMENT = {**os.environ, **PERSON, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
INIT = "git init -qb main .; echo a > a; git add .; git commit -qm a;"
ADD = 'git -c protocol.file.allow=always submodule --quiet add "file://$PWD/.git" libs/sub; git commit -qm sub;'


def run(root: Path, script: str, *before: str) -> None:
    subprocess.run([*before, "bash", "-ec", script], check=True, cwd=root, env=ENVIRONMENT, capture_output=True)


def summarize(folder: Path, before: str, command: str, inside: str = "") -> tuple[list[str], list[str]]:
    """Run a command on a view; return the lines about repositories, with X for ids, and the paths of other changes."""
    layer = Layer(folder / "root" / inside, folder / "upper", folder / "work", time.time_ns())
    for path in (folder / "root", layer.upper, layer.work):
        path.mkdir()
    run(folder / "root", before)
    root = os.fspath(layer.root)
    run(layer.root, command, *enter_view(layer))
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
    ".git/modules/libs/sub/objects/pack/pack-1.idx",
    ".git/modules/a/modules/b/index",
    "sub/.git/logs/HEAD",
]
LATER = [
    ".git",
    "sub/.git",
    ".git/hooks/new/file",
    ".git/unknown",
    ".git/modules/libs/sub/config",
    ".git/modules/libs/sub/hooks/post-checkout",
    ".git/modules/a/objects/hooks/post-commit",
    ".git/modules/refs/config",
    ".git/modules/a/refs/hooks/post-commit",
    ".git/modules/a",
    ".git/worktrees/x/modules/foo/refs/hooks/post-commit",
    ".git/refs/heads/.git/config",
]


def test_only_known_data_of_git_does_not_run_later(tmp_path: Path) -> None:
    layer = Layer(tmp_path, tmp_path / "upper", tmp_path / "work", 0)
    assert [path for path in DATA if classify_git_path(layer, path) != "data"] == []
    assert [path for path in LATER if classify_git_path(layer, path) != "runs-later"] == []
    assert classify_git_path(layer, "config") is None


LAYOUT = {
    "objects/ab/" + "0" * 38: "data",
    "objects/pack/pack-1.pack": "data",
    "objects/info/packs": "data",
    "objects/info/alternates": "runs-later",  # takes objects from any folder
    "objects/info/http-alternates": "runs-later",
    "refs/heads/main": "data",
    "refs/tags/v1": "data",
    "refs/remotes/origin/main": "data",
    "refs/replace/" + "0" * 40: "data",
    "packed-refs": "data",
    "HEAD": "data",
    "config": "runs-later",
    "config.worktree": "runs-later",
    "branches/origin": "runs-later",  # the address of a remote
    "hooks/pre-commit": "runs-later",
    "hooks/pre-commit.sample": "data",
    "common": "runs-later",
    "index": "data",
    "sharedindex." + "0" * 40: "data",
    "info/refs": "data",
    "info/grafts": "runs-later",
    "info/exclude": "data",
    "info/attributes": "runs-later",  # names the filters that run
    "info/sparse-checkout": "data",
    "remotes/origin": "runs-later",
    "logs/HEAD": "data",
    "logs/refs/heads/main": "data",
    "shallow": "data",
    "commondir": "runs-later",
    "gitdir": "runs-later",
    "modules/lib/config": "runs-later",
    "modules/lib/HEAD": "data",
    "worktrees/x/HEAD": "data",
    "worktrees/x/gitdir": "data",  # as git writes it; see below
    "worktrees/x/locked": "data",
    "worktrees/x/commondir": "runs-later",
    "worktrees/x/config.worktree": "runs-later",
    # what git keeps beside these while it works
    "COMMIT_EDITMSG": "data",
    "MERGE_MSG": "data",
    "MERGE_HEAD": "data",
    "ORIG_HEAD": "data",
    "sequencer/head": "data",
    "sequencer/todo": "runs-later",
    "sequencer/opts": "runs-later",
    "rebase-merge/onto": "data",
    "rebase-merge/git-rebase-todo": "runs-later",  # its `exec` lines
    "rebase-merge/git-rebase-todo.backup": "runs-later",
    "rebase-merge/author-script": "runs-later",
    "rebase-merge/strategy": "runs-later",
    "rebase-apply/patch": "data",
}
"""The files of git's own documentation, gitrepository-layout."""


@pytest.mark.parametrize(("path", "kind"), LAYOUT.items())
def test_files_of_the_documented_layout_are_told_apart(tmp_path: Path, path: str, kind: str) -> None:
    layer = Layer(tmp_path, tmp_path / "upper", tmp_path / "work", 0)
    assert classify_git_path(layer, f".git/{path}") == kind
    assert classify_git_path(Layer(tmp_path / ".git", layer.upper, layer.work, 0), path) == kind
    assert classify_git_path(layer, f"a/.git/modules/lib/{path}") in (kind, "runs-later")


NAMES = st.sampled_from(
    ["a", "refs", "objects", "heads", "logs", "hooks", "config", "info", "modules", "worktrees", "HEAD", "index", "ab"]
)
FOLDERS = st.one_of(
    st.tuples(st.just("modules"), st.lists(NAMES, min_size=1, max_size=3).map("/".join)).map("/".join),
    st.tuples(st.just("worktrees"), NAMES).map("/".join),
)
"""What may lie between a git folder and that of a submodule or a worktree."""
ROLES = ["hooks/post-checkout", "hooks/config", "config", "config.worktree", "info/attributes", "info/grafts"]
ROLES += ["commondir", "objects/info/alternates", "rebase-merge/git-rebase-todo"]


@example(["worktrees/a", "modules/a/refs"], "hooks/post-checkout", "")
@example(["worktrees/a", "modules/refs"], "config", "")
@given(st.lists(FOLDERS, max_size=3), st.sampled_from(ROLES), st.sampled_from(["", "lib/"]))
def test_what_runs_later_is_no_data_in_any_git_folder(folders: list[str], role: str, start: str) -> None:
    layer = Layer(Path("/nowhere"), Path("/nowhere/upper"), Path("/nowhere/work"), 0)
    assert classify_git_path(layer, "/".join([f"{start}.git", *folders, role])) == "runs-later"


TREE = "git worktree add -q wt;"
MODULE = ".git/modules/x/refs"
BARE = "mkdir -p x/objects x/refs; echo ref: refs/heads/main > x/HEAD"


@pytest.mark.parametrize(
    ("before", "command"),
    [
        ("", "rm -r .git/info; echo > .git/info"),
        ("", "rm -r .git/info; ln -s ../evil .git/info"),
        ("", "rm -r .git/info/*; rmdir .git/info; ln -s ../evil .git/info"),
        ("", "rm -r .git/refs; echo > .git/refs"),
        ("", "rm -r .git/refs"),
        ("", "rm .git/HEAD"),
        ("", "rm .git/HEAD; ln -s refs/heads/main .git/HEAD"),
        ("", "mkdir .git/refs/new; ln -s /etc/passwd .git/refs/new/x"),
        ("", "mkfifo .git/refs/heads/x; mkdir .git/rr-cache; mkfifo .git/rr-cache/x"),
        ("", "rm -r .git; echo gitdir: /elsewhere > .git"),
        ("", "mv .git other"),
        ("", "echo '#!/bin/sh' > .git/refs/heads/x; chmod +x .git/refs/heads/x"),
        ("", "chmod +x .git/HEAD"),
        ("", "mkdir -p .git/refs/heads/x; echo '[core]' > .git/refs/heads/x/config"),
        ("", "mkdir -p .git/logs/refs/heads/x/hooks; echo x > .git/logs/refs/heads/x/hooks/pre-commit"),
        ("", "mkdir -p .git/worktrees/x/modules/foo/refs/hooks; echo > .git/worktrees/x/modules/foo/refs/hooks/a"),
        (f"mkdir -p {MODULE}", f"mkdir {MODULE}/hooks; echo > {MODULE}/hooks/pre-commit"),
        (f"mkdir -p {MODULE}", f"echo > {MODULE}/config"),
        (TREE, "echo /elsewhere/.git > .git/worktrees/wt/gitdir"),
        (TREE, "echo /elsewhere > .git/worktrees/wt/commondir"),
        (TREE, "echo > .git/worktrees/wt/config.worktree"),
        ("", "mkdir -p .git/worktrees/x; echo /elsewhere > .git/worktrees/x/gitdir"),
        ("", BARE),
    ],
)
def test_no_change_that_git_obeys_passes_as_data(tmp_path: Path, before: str, command: str) -> None:
    _, shown = summarize(tmp_path, INIT + before, command)
    assert shown


def test_new_repository_without_a_work_tree_runs_later(tmp_path: Path) -> None:
    layer = Layer(tmp_path / "root", tmp_path / "upper", tmp_path / "work", 0)
    run(tmp_path, "mkdir root upper work root/x upper/x root/x/refs; cd upper/x; mkdir objects; touch HEAD config")
    assert classify_git_path(layer, "x/config") == "runs-later"
    run(tmp_path, "git init -q --bare root/old")
    assert classify_git_path(layer, "old/hooks/post-receive") == "runs-later"
    assert classify_git_path(layer, "old/refs/heads/main") is None
    assert classify_git_path(layer, "new/config") is None
