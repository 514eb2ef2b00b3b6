"""`crow -w` and `crow worktrees`: sessions in git worktrees of their own, and the end of these."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crow_cli import worktree_session
from crow_cli.worktrees import (
    NoWorktree,
    check_name,
    choose_name,
    diff,
    make_tree,
    measure,
    merge,
    read_repository,
    remove,
)
from crow_core.testing import Reply, ScriptedCall, ScriptedServer
from crow_testing.screens import Screen, open_screen

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = [pytest.mark.anyio, pytest.mark.posix]

AUTHOR = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture(autouse=True)
def author(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AUTHOR.items():
        monkeypatch.setenv(name, value)


def git(folder: Path | str, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, env={**os.environ, **AUTHOR}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    return commit_all(folder)


def commit_all(folder: Path) -> Path:
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=first")
    return folder


def make(repo: Path, name: str) -> Path:
    tree, _ = make_tree(read_repository(str(repo)), name)
    return Path(tree.folder)


def end(repo: Path, name: str, act: str) -> str:
    repository = read_repository(str(repo))
    tree = repository.find(name)
    assert tree
    if act == "merge":
        return merge(tree, repository)
    return remove(tree, repository, measure(tree, repository.main))


def test_a_worktree_is_beside_the_repository_with_a_branch_of_its_name(repo: Path):
    tree, said = make_tree(read_repository(str(repo)), "fix/parser")
    assert tree.folder == f"{repo}.worktrees/fix-parser"
    assert git(tree.folder, "branch", "--show-current") == "fix/parser"
    assert said == [f"Worktree {tree.folder}, branch fix/parser, from main."]


def test_a_name_is_made_of_the_words_and_is_new(repo: Path):
    git(repo, "branch", "fix-the-parser")
    repository = read_repository(str(repo))
    assert choose_name(repository, "Fix the parser!") == "fix-the-parser-2"
    assert choose_name(repository, "…")[:2] == "20"


def test_a_worktree_that_exists_is_used_again(repo: Path):
    (make(repo, "fix") / "new.txt").write_text("kept\n")
    tree, said = make_tree(read_repository(str(repo)), "fix")
    assert Path(tree.folder, "new.txt").read_text() == "kept\n"
    assert said == ["The session goes on in the worktree fix."]


def test_a_merge_takes_what_is_committed_and_what_is_not(repo: Path):
    folder = make(repo, "fix")
    (folder / "a.txt").write_text("two\n")
    git(folder, "commit", "--quiet", "--all", "--message=second")
    (folder / "new.txt").write_text("new\n")
    assert end(repo, "fix", "merge") == "Merged fix into main."
    assert (repo / "a.txt").read_text() == "two\n"
    assert (repo / "new.txt").read_text() == "new\n"
    assert end(repo, "fix", "remove") == "Removed the worktree fix with its branch."
    assert not os.path.exists(f"{repo}.worktrees")
    assert git(repo, "branch", "--format=%(refname:short)") == "main"


def test_the_diff_has_new_files_and_changes_nothing(repo: Path):
    folder = make(repo, "fix")
    (folder / "new.txt").write_text("new\n")
    repository = read_repository(str(repo))
    tree = repository.find("fix")
    assert tree
    changes = measure(tree, repository.main)
    assert changes.describe() == "1 file not committed: 1 file changed, 1 insertion(+)"
    assert "+new" in diff(tree, changes.start)
    assert git(folder, "status", "--porcelain") == "?? new.txt"


def test_a_merge_with_conflicts_changes_nothing(repo: Path):
    folder = make(repo, "fix")
    (folder / "a.txt").write_text("theirs\n")
    (repo / "a.txt").write_text("ours\n")
    git(repo, "commit", "--quiet", "--all", "--message=second")
    with pytest.raises(NoWorktree, match=r"fix and main both change a\.txt, so nothing was merged"):
        end(repo, "fix", "merge")
    assert git(repo, "status", "--porcelain") == ""
    assert (repo / "a.txt").read_text() == "ours\n"
    assert (folder / "a.txt").read_text() == "theirs\n"


def test_a_merge_over_changes_that_are_not_committed_leaves_them(repo: Path):
    (make(repo, "fix") / "a.txt").write_text("theirs\n")
    (repo / "a.txt").write_text("ours\n")
    with pytest.raises(NoWorktree, match="Nothing was merged"):
        end(repo, "fix", "merge")
    assert (repo / "a.txt").read_text() == "ours\n"


def test_removed_commits_can_be_brought_back(repo: Path):
    folder = make(repo, "fix")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=mine")
    commit = git(folder, "rev-parse", "HEAD")
    assert f"`git branch fix {commit[:12]}` brings its commits back" in end(repo, "fix", "remove")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fix the parser", "no spaces: fix-the-parser, for example"),
        ("-x", "no spaces: x, for example"),
        ("..", "no spaces."),
    ],
)
def test_a_name_that_no_branch_can_have_is_refused_with_one_that_it_can(repo: Path, name: str, says: str):
    with pytest.raises(NoWorktree, match=says):
        check_name(name, str(repo))


def test_a_branch_and_a_folder_of_others_are_left_alone(repo: Path):
    git(repo, "branch", "theirs")
    with pytest.raises(NoWorktree, match="There is a branch theirs already"):
        make(repo, "theirs")
    Path(f"{repo}.worktrees/mine").mkdir(parents=True)
    Path(f"{repo}.worktrees/mine/a.txt").write_text("mine\n")
    with pytest.raises(NoWorktree, match="exists, and is no worktree of this repository"):
        make(repo, "mine")


def test_folders_without_worktrees_are_told_in_a_sentence(tmp_path: Path, repo: Path):
    with pytest.raises(NoWorktree, match="is in no git repository"):
        read_repository(str(tmp_path))
    git(tmp_path, "clone", "--quiet", "--bare", str(repo), "bare.git")
    with pytest.raises(NoWorktree, match="is a bare repository"):
        read_repository(str(tmp_path / "bare.git"))
    git(repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tmp_path / "bare.git"), "sub")
    with pytest.raises(NoWorktree, match="is a submodule"):
        read_repository(str(repo / "sub"))
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "--quiet")
    with pytest.raises(NoWorktree, match="has no commit yet"):
        make(tmp_path / "empty", "fix")


def test_a_worktree_of_a_detached_head_begins_there(repo: Path):
    git(repo, "checkout", "--quiet", "--detach")
    tree, said = make_tree(read_repository(str(repo)), "fix")
    assert said == [f"Worktree {tree.folder}, branch fix, from {tree.commit[:8]}."]


def test_what_a_kill_has_left_is_made_again(repo: Path):
    folder = make(repo, "fix")
    (repo / ".git" / "worktrees" / "fix" / "locked").write_text("crow is making it")
    (folder / "a.txt").unlink()
    tree, said = make_tree(read_repository(str(repo)), "fix")
    assert said[0] == "The worktree fix was left half made, and is made again."
    assert Path(tree.folder, "a.txt").exists()
    assert git(folder, "branch", "--show-current") == "fix"
    assert "locked" not in git(repo, "worktree", "list", "--porcelain")


def test_a_folder_that_is_gone_is_made_again_from_its_branch(repo: Path):
    folder = make(repo, "fix")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=mine")
    commit = git(folder, "rev-parse", "HEAD")
    subprocess.run(["rm", "-rf", folder], check=True)
    _, said = make_tree(read_repository(str(repo)), "fix")
    assert said[0] == "The folder of the worktree fix was gone, and is made again."
    assert git(folder, "rev-parse", "HEAD") == commit


async def use(machine: "Machine", screen: Screen) -> None:
    """Let the model write a file in the session on a screen, and leave the session."""
    await screen.until("Ask")
    screen.type("write it\r")
    await screen.until("Yes")
    await screen.type_until("y", "Done.")
    screen.type("\x03\x03")
    await screen.until("What becomes of it?")


WRITE = ScriptedCall(name="file_editor", arguments={"command": "create", "path": "new.txt", "file_text": "hello\n"})


async def test_a_session_in_a_worktree_ends_with_one_question(machine: "Machine"):
    machine.env |= AUTHOR
    commit_all(machine.project)
    async with ScriptedServer([Reply(tool_calls=[WRITE]), Reply("Done.")]) as server:
        machine.ask(server.url)
        async with open_screen(machine, "-w", "fix") as screen:
            await use(machine, screen)
            screen.type("2\r")
            await screen.until("Merged fix into")
    assert (machine.project / "new.txt").read_text() == "hello\n"
    assert read_repository(str(machine.project)).list_made() == []


async def test_a_kept_worktree_is_listed_and_its_session_is_found_from_the_repository(machine: "Machine"):
    machine.env |= AUTHOR
    commit_all(machine.project)
    async with ScriptedServer([Reply(tool_calls=[WRITE]), Reply("Done."), Reply("Still here.")]) as server:
        machine.ask(server.url)
        async with open_screen(machine, "-w", "fix") as screen:
            await use(machine, screen)
            screen.type("\r")
            await screen.until("The worktree is kept.")
        assert not (machine.project / "new.txt").exists()
        [tree] = json.loads((await machine.crow("worktrees", "--json")).out)
        assert (tree["branch"], tree["uncommitted_files"]) == ("fix", 1)
        [session] = json.loads((await machine.crow("sessions", "list", "--json")).out)
        assert session["cwd"] == tree["folder"] == f"{machine.project}.worktrees/fix"
        [hit] = json.loads((await machine.crow("sessions", "search", "--json", "Done")).out)
        assert hit["session"] == session["id"]
        done = await machine.crow("run", "-c", "and now?")
        assert done.out == "Still here.\n"
        git(machine.project, "worktree", "remove", "--force", tree["folder"])
        [session] = json.loads((await machine.crow("sessions", "list", "--json")).out)
        assert session["cwd"] == tree["folder"]


async def test_the_set_up_command_of_a_project_runs_once_where_the_folder_is_trusted(machine: "Machine"):
    (machine.project / ".crow").mkdir()
    (machine.project / ".crow/config.toml").write_text('[worktree]\nsetup = "echo ready >> ready.txt"\n')
    commit_all(machine.project)
    machine.env["TERM"] = "dumb"
    ready = read_repository(str(machine.project)).make_path("fix") + "/ready.txt"
    async with ScriptedServer([Reply("Hello.")] * 3) as server:
        machine.ask(server.url)
        await machine.crow("-w", "fix", stdin="hello\n")
        assert not os.path.exists(ready)  # noqa: ASYNC240 - a local file, and nothing else runs
        await machine.crow("-w", "fix", stdin="hello\n")
        assert (await machine.crow("trust", "--yes")).code == 0
        done = await machine.crow("-w", "fix", stdin="hello\n")
        assert "Setting it up: echo ready >> ready.txt" in done.err
        assert "fix has 1 file not committed: 1 file changed, 1 insertion(+). The worktree is kept." in done.err
        done = await machine.crow("-w", "fix", stdin="hello\n")
        assert "Setting it up" not in done.err
    with open(ready) as file:  # noqa: ASYNC230 - a local file, and nothing else runs
        assert file.read() == "ready\n"


async def test_a_set_up_command_that_fails_is_told_and_runs_again(machine: "Machine"):
    commit_all(machine.project)
    async with ScriptedServer([Reply("Hello.")] * 2) as server:
        machine.configure('[worktree]\nsetup = "touch tried.txt; exit 3"\n')
        machine.ask(server.url)
        for _ in range(2):
            done = await machine.crow("-w", "fix", stdin="hello\n")
            assert (
                "The set-up command failed (exit code 3). The worktree can be used; crow -w fix runs it again."
                in done.err
            )
            assert done.out.endswith("Hello.\n")


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (subprocess.TimeoutExpired("", 0), "took more than 600 seconds and was stopped"),
        (KeyboardInterrupt(), "was stopped"),
    ],
)
def test_a_set_up_command_that_hangs_or_is_interrupted_is_stopped_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, fault: str
):
    os.mkfifo(pipe := tmp_path / "pipe")
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    waits = subprocess.Popen[bytes].wait

    def wait(process: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        if timeout is None:
            return waits(process)
        assert select.select([reading], [], [], 60)[0]
        assert os.read(reading, 9) == b"running\n"
        raise error

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    command = "exec 3> pipe; sleep 600 & echo running >&3; wait"
    assert worktree_session.run_setup(command, str(tmp_path), []) == fault
    assert os.read(reading, 1) == b""  # the end: nobody has it open any more
    os.close(reading)


async def test_a_trusted_folder_is_trusted_in_its_worktrees_as_long_as_its_settings_are_the_same(machine: "Machine"):
    (machine.project / ".crow").mkdir()
    (machine.project / ".crow/config.toml").write_text('[permissions]\ndeny = ["terminal:rm"]\n')
    commit_all(machine.project)
    assert (await machine.crow("trust", "--yes")).code == 0
    folder = make(machine.project, "fix")
    there = replace(machine, project=folder)
    assert json.loads((await there.crow("status", "--json")).out)["trusted"] is True
    (folder / ".crow/config.toml").write_text("")
    assert json.loads((await there.crow("status", "--json")).out)["trusted"] is False


def test_a_record_that_git_had_just_begun_does_not_keep_others_from_a_worktree(repo: Path):
    make(repo, "fix")
    record = repo / ".git" / "worktrees" / "fix"
    (record / "locked").write_text("crow is making it")
    (record / "commondir").write_text("")  # as a killed git leaves it; git fails with it
    assert git(make(repo, "other"), "branch", "--show-current") == "other"
    assert not record.exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(12))
def test_a_kill_at_any_moment_leaves_a_usable_worktree_or_nothing(repo: Path, moment: int):
    for number in range(300):
        (repo / f"{number}.txt").write_text("text\n" * 100)
    git(repo, "add", ".")
    git(repo, "commit", "--quiet", "--message=many")
    code = "import sys; from crow_cli.worktrees import *; make_tree(read_repository(sys.argv[1]), 'fix')"
    process = subprocess.Popen([sys.executable, "-c", code, str(repo)], start_new_session=True)
    record, looks = repo / ".git" / "worktrees", 0
    while process.poll() is None and looks < 2**moment:  # from the first file of the record on
        looks += record.exists()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    folder = make(repo, "fix")
    assert git(folder, "branch", "--show-current") == "fix"
    assert git(folder, "status", "--porcelain") == ""
    assert len(list(folder.glob("*.txt"))) == 301
