"""The work trees of a repository, found by git's files."""

import os
import subprocess
from pathlib import Path

import pytest
from crow_system.repository import find_folder_to_continue, find_main_folder, list_same_folders

ENV = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=folder, env={**os.environ, **ENV}, capture_output=True, check=True)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (folder := tmp_path / "repo").mkdir()
    git(folder, "init")
    (folder / "src").mkdir()
    (folder / "src" / "a.txt").touch()
    git(folder, "add", ".")
    git(folder, "commit", "-m", "first")
    git(folder, "worktree", "add", "../other")
    return folder


def test_a_folder_of_a_linked_work_tree_corresponds_to_one_of_the_main_work_tree(repo: Path):
    assert find_main_folder(f"{repo}/../other/src") == f"{repo}/src"
    assert find_main_folder(str(repo)) == str(repo)
    assert find_main_folder(str(repo.parent)) == str(repo.parent)


def test_the_same_folder_is_listed_for_all_work_trees(repo: Path):
    assert list_same_folders(f"{repo}/src") == [f"{repo}/src", f"{repo.parent}/other/src"]
    assert list_same_folders(f"{repo.parent}/other/src") == [f"{repo}/src", f"{repo.parent}/other/src"]
    assert list_same_folders(str(repo.parent)) == [str(repo.parent)]


def test_a_folder_that_only_claims_to_be_a_work_tree_of_a_repository_is_not(repo: Path, tmp_path: Path):
    (folder := tmp_path / "claims").mkdir()
    (folder / ".git").write_text(f"gitdir: {repo}/.git/worktrees/other\n")
    assert find_main_folder(str(folder)) == str(folder)
    (own := folder / "worktrees" / "x").mkdir(parents=True)
    (own / "commondir").write_text(f"{repo}/.git\n")
    (own / "gitdir").write_text(f"{folder}/.git\n")
    (folder / ".git").write_text(f"gitdir: {own}\n")
    assert find_main_folder(str(folder)) == str(folder)


def test_a_session_goes_on_in_its_own_work_tree_while_that_exists(repo: Path):
    other = f"{repo.parent}/other"
    assert find_folder_to_continue(other, str(repo)) == other
    assert find_folder_to_continue(f"{other}/src", str(repo)) == str(repo)
    git(repo, "worktree", "remove", "../other")
    assert find_folder_to_continue(other, str(repo)) == str(repo)
