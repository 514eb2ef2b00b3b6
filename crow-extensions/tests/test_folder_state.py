"""The extension `recorded_folders`: the state of a session's folder is in the log before a tool changes it."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import Message
from crow_core.messages.worktree import ChangedPath, WorkTree, find_recorded
from crow_core.session.session import Session
from crow_core.testing import Editor, MemoryStore, Reply, ScriptedModel, connect
from crow_extensions import recorded_folders as extension
from crow_extensions.commands import commands
from crow_extensions.folder_state import FolderStateError, check_restorable, read_state, restore_state
from crow_extensions.folder_state import make_environment as make_git_environment
from crow_extensions.recorded_folders import recorded_folders
from crow_extensions.undo import undo

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")]


def git(folder: Path, *arguments: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *name, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with one commit, on the branch `main`."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    for name in ("kept", "changed", "removed", "moved", "src/deep"):
        (folder / name).write_text(f"{name}\n")
    (folder / ".gitignore").write_text("ignored\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def change(folder: Path) -> None:
    """Make changes of all kinds that a work tree may have."""
    (folder / "changed").write_bytes(b"two\r\nlines without an end")
    (folder / "removed").unlink()
    git(folder, "mv", "moved", "renamed name")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "script").write_text("#!/bin/sh\n")
    (folder / "script").chmod(0o755)
    (folder / "link").symlink_to("/nowhere/at/all")
    (folder / "ignored").write_text("ignored\n")
    (folder / "src" / "deep").unlink()
    (folder / "src" / "deep").mkdir()
    (folder / "src" / "deep" / "new").write_text("in a folder that was a file\n")
    os.mkdir(os.fsencode(folder) + b"/caf\xe9")
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9/a")).write_text("a\n")
    git(folder, "add", "script")


def list_files(folder: Path) -> dict[str, Any]:
    """Return the files of a folder, without those of git: their bytes and modes, or where they lead."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if ".git" in path.relative_to(folder).parts or (path.is_dir() and not path.is_symlink()):
            continue
        found[name] = os.readlink(path) if path.is_symlink() else (path.read_bytes(), path.stat().st_mode & 0o111)
    return found


def list_repository(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the files of a repository, with the times at which they were written."""
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted((folder / ".git").rglob("*"))
        if path.is_file()
    }


async def read(folder: Path) -> WorkTree:
    tree = await read_state(str(folder))
    assert tree is not None
    return tree


async def test_a_state_with_all_kinds_of_changes_is_restored_elsewhere_and_leaves_the_repository_alone(
    folder: Path, tmp_path: Path
):
    change(folder)
    status = git(folder, "status", "--porcelain")
    os.utime(folder / "kept")  # the index would be refreshed
    before, files = list_repository(folder), list_files(folder)
    tree = await read(folder)
    assert list_repository(folder) == before
    assert (tree.top, tree.folder, tree.branch, tree.fault) == (str(folder), "", "main", "")
    assert tree.commit == git(folder, "rev-parse", "HEAD")
    assert restore_state(tree, copy := make(tmp_path / "copy")) == copy
    assert list_files(copy) == {name: data for name, data in files.items() if name != "ignored"}
    assert git(copy, "status", "--porcelain") == status
    assert git(copy, "branch", "--show-current") == "main"
    assert git(copy, "remote") == ""
    after = list_repository(folder)
    assert {name: data for name, (data, _) in after.items()} == {name: data for name, (data, _) in before.items()}
    assert list_files(folder) == files


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def test_a_folder_below_the_top_and_a_linked_worktree_are_restored_as_such(folder: Path, tmp_path: Path):
    git(folder, "worktree", "add", "-q", "-b", "other", str(tmp_path / "linked"))
    (tmp_path / "linked" / "src" / "more").write_text("more\n")
    (tmp_path / "linked" / "src" / "empty").mkdir()
    for inside in ("src", "src/empty"):
        tree = await read(tmp_path / "linked" / inside)
        assert (tree.top, tree.folder, tree.branch) == (str(tmp_path / "linked"), inside, "other")
        copy = make(tmp_path / inside.replace("/", "-"))
        assert restore_state(tree, copy) == copy / inside
        assert (copy / "src" / "more").read_text() == "more\n"
    (folder / "ignored").mkdir()
    assert (await read(folder / "ignored")).fault == "git ignores the folder"


async def test_a_repository_without_a_commit_and_a_detached_head_are_restored(folder: Path, tmp_path: Path):
    git(new := make(tmp_path / "new"), "init", "-q", "-b", "trunk")
    (new / "a").write_text("a\n")
    tree = await read(new)
    assert (tree.commit, tree.branch) == ("", "trunk")
    restore_state(tree, make(tmp_path / "one"))
    assert list_files(tmp_path / "one") == list_files(new)
    git(folder, "checkout", "-q", "--detach")
    restore_state(await read(folder), make(tmp_path / "two"))
    assert git(tmp_path / "two", "branch", "--show-current") == ""
    assert git(tmp_path / "two", "rev-parse", "HEAD") == git(folder, "rev-parse", "HEAD")


@pytest.mark.parametrize("edits", [True, False])
async def test_undo_takes_back_the_first_turn_in_a_work_tree_with_changes(folder: Path, edits: bool):
    change(folder)
    before = list_files(folder)
    path = str(folder / "fresh")
    edit: Any = {"name": "file_editor", "arguments": {"command": "create", "path": path, "file_text": "edited\n"}}
    look: Any = {"name": "terminal", "arguments": {"command": "true"}}
    server = Server("crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True)
    crow = Crow(ScriptedModel([Reply(tool_calls=[edit if edits else look]), Reply("Done.")]), servers=[server])
    crow.use(commands).use(undo).use(recorded_folders).store = MemoryStore()
    async with connect(crow) as editor:
        id = (await editor.new_session(str(folder))).session_id
        await editor.prompt(id, "Go")
        recorded = find_recorded(crow.sessions[id].log)
        assert recorded
        assert recorded.changes
        assert (list_files(folder) != before) is edits
        await editor.prompt(id, "/undo yes")
        assert "Taken back" in editor.text
        assert list_files(folder) == before


async def test_no_program_that_the_repository_names_runs(folder: Path, tmp_path: Path):
    program, proof = tmp_path / "program", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\ntouch {proof}\ncat\n")
    program.chmod(0o755)
    git(folder, "config", "filter.evil.clean", str(program))
    git(folder, "config", "filter.evil.process", str(program))
    git(folder, "config", "filter.evil.required", "true")
    git(folder, "config", "filter.Two.clean", str(program))
    git(folder, "config", "core.fsmonitor", str(program))
    git(folder, "config", "diff.evil.textconv", str(program))
    git(folder, "config", "core.sshCommand", str(program))
    git(folder, "config", "status.submoduleSummary", "true")
    (folder / ".gitattributes").write_text("changed filter=evil diff=evil\nkept filter=Two\n")
    (folder / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    hooks = folder / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-index-change", "post-checkout", "pre-auto-gc", "reference-transaction"):
        shutil.copy(program, hooks / name)
    (folder / "changed").write_text("CHANGED\n")  # of the same size, so that git compares the contents
    os.utime(folder / "kept")
    tree = await read(folder)
    assert not tree.fault
    assert [one.path for one in tree.changes] == ["changed", ".gitattributes"]
    restore_state(tree, make(tmp_path / "copy"))
    assert (tmp_path / "copy" / "changed").read_text() == "CHANGED\n"
    assert not proof.exists()


async def test_a_submodule_is_not_looked_into(folder: Path, tmp_path: Path):
    program, proof = tmp_path / "program", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\ntouch {proof}\ncat\n")
    program.chmod(0o755)
    shutil.copytree(folder, inner := tmp_path / "inner")
    git(folder, "submodule", "--quiet", "add", str(inner), "inner")
    git(folder, "commit", "-q", "-m", "with a submodule")
    git(folder / "inner", "config", "core.fsmonitor", str(program))
    (folder / "inner" / "kept").write_text("changed\n")
    tree = await read(folder)
    assert (tree.changes, tree.fault, proof.exists()) == ([], "", False)
    with pytest.raises(FolderStateError, match="it has submodules, which are not recorded"):
        check_restorable(tree)


async def test_what_cannot_be_recorded_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert await read_state(str(make(tmp_path / "plain"))) is None
    git(bare := make(tmp_path / "bare.git"), "init", "-q", "--bare")
    assert await read_state(str(bare)) is None
    (make(tmp_path / "broken") / ".git").write_text("gitdir: nowhere\n")
    assert "not a git repository" in (await read(tmp_path / "broken")).fault
    (folder / "large").write_bytes(b"x" * 5_000_001)
    tree = await read(folder)
    assert (tree.fault, tree.changes) == ("the changed files have more than 5,000,000 bytes", [])
    assert tree.commit
    with pytest.raises(FolderStateError, match="its changes were not recorded: the changed files have more"):
        check_restorable(tree)
    (folder / "large").unlink()
    for number in range(1_001):
        (folder / f"new{number}").touch()
    assert (await read(folder)).fault == "1,001 files are changed, more than 1,000"
    git(folder, "clean", "-qf")
    shutil.copytree(folder, folder / "nested")
    assert (await read(folder)).fault == "nested/ is a repository of its own"
    shutil.rmtree(folder / "nested")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await read_state(str(folder)) is None, "git is not installed"


async def test_variables_that_name_another_repository_are_ignored(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    git(other := make(tmp_path / "other"), "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert (await read(folder)).top == str(folder)
    assert "GIT_DIR" not in make_git_environment()


async def test_a_state_that_cannot_be_restored_says_why_and_no_path_leads_out(folder: Path, tmp_path: Path):
    tree = await read(folder)
    for path in ("../x", "/x", ".git/config", "src/../../x"):
        tree.changes = [ChangedPath(path)]
        with pytest.raises(FolderStateError, match="cannot be restored"):
            check_restorable(tree)
    tree.changes = [ChangedPath("changed", text="masked", digest="0" * 64)]
    with pytest.raises(FolderStateError, match="changed was not kept whole"):
        check_restorable(tree)
    (folder / "out").symlink_to(tmp_path)
    git(folder, "add", "out")
    git(folder, "commit", "-q", "-m", "a link out of it")
    tree = await read(folder)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    tree.changes = [ChangedPath("out/x", text="", digest=empty)]
    with pytest.raises(FolderStateError, match="leads out of the folder"):
        restore_state(tree, make(tmp_path / "copy"))
    assert not (tmp_path / "x").exists()
    tree.changes, tree.commit = [], "0" * 40
    with pytest.raises(FolderStateError, match=f"the commit 000000000000 is not in {folder} any more"):
        check_restorable(tree)
    shutil.rmtree(folder)
    with pytest.raises(FolderStateError, match=f"the folder {folder} is gone"):
        check_restorable(tree)


def writer(folder: Path) -> Server:
    """A server with the tool `write`, which writes a file, and `look`, which only reads."""

    def make() -> Any:
        from fastmcp import FastMCP

        server = FastMCP("files")

        @server.tool
        def write(text: str) -> str:
            (folder / "changed").write_text(text)
            return "written"

        @server.tool(annotations={"readOnlyHint": True})
        def look() -> str:
            return (folder / "changed").read_text()

        return server

    return Server("files", make, trust=True)


@pytest.fixture
def stored(folder: Path) -> Callable[..., Any]:
    """Make an app that could load sessions, as the extension records for these only."""

    def make(*replies: Reply, **options: Any) -> Crow:
        crow = Crow(ScriptedModel([*replies]), servers=[writer(folder)], **options)
        crow.use(commands).use(undo).use(recorded_folders)
        crow.store = MemoryStore()
        return crow

    return make


def write(text: str) -> Reply:
    return Reply(tool_calls=[{"name": "files_write", "arguments": {"text": text}}])


def kinds(log: list[Message]) -> list[str]:
    return [str(entry.get("role") or entry.get("crow", {}).get("kind")) for entry in log]


async def talk(editor: Editor, crow: Crow, folder: Path, *prompts: str) -> Session:
    opened = await editor.new_session(str(folder))
    for prompt in prompts:
        await editor.prompt(opened.session_id, prompt)
    return crow.sessions[opened.session_id]


async def test_the_state_is_recorded_once_and_before_the_first_tool_runs(folder: Path, stored: Callable[..., Any]):
    (folder / "changed").write_text("by the user\n")
    crow = stored(write("by the model\n"), write("again\n"), Reply("Done."), Reply("Nothing."))
    async with connect(crow) as editor:
        session = await talk(editor, crow, folder, "Go", "And?")
        log = [*session.log]
    assert kinds(log).count("worktree") == 1
    assert kinds(log).index("worktree") < kinds(log).index("tool")
    tree = find_recorded(log)
    assert tree is not None
    assert [(one.path, one.text) for one in tree.changes] == [("changed", "by the user\n")]
    assert (folder / "changed").read_text() == "again\n"


async def test_a_conversation_that_begins_anew_has_a_state_of_its_own(folder: Path, stored: Callable[..., Any]):
    crow = stored(write("one\n"), Reply("Done."), Reply("Done."))
    async with connect(crow) as editor:
        session = await talk(editor, crow, folder, "Go", "/undo yes", "Go")
        await session.hooks.session_end.run(session)
        tree = find_recorded(session.view.entries())
    assert tree is not None
    assert [one.text for one in tree.changes] == ["one\n"], "what a tool of another server has written stays"


async def test_a_session_that_calls_no_tool_has_its_state_when_it_ends(folder: Path, stored: Callable[..., Any]):
    crow = stored(Reply("Hello."))
    async with connect(crow) as editor:
        session = await talk(editor, crow, folder, "Hi")
        await crow.close(session)
        assert find_recorded(session.log)


async def test_nothing_is_recorded_where_no_store_loads_sessions(folder: Path):
    crow = Crow(ScriptedModel([Reply("Hello.")])).use(recorded_folders)
    async with connect(crow) as editor:
        session = await talk(editor, crow, folder, "Hi")
        await crow.close(session)
        assert "worktree" not in kinds([*session.log])


async def test_git_that_hangs_holds_up_no_prompt_and_an_acting_tool_only_for_a_while(
    folder: Path, tmp_path: Path, stored: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """`git` is a program that ends when its pipe is closed, which nobody does."""
    os.mkfifo(pipe := tmp_path / "pipe")
    (hanging := make(tmp_path / "bin") / "git").write_text(f"#!/bin/sh\nread line < {pipe}\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", f"{hanging.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(extension, "ACTING_LIMIT", 0.2)
    look = Reply(tool_calls=[{"name": "files_look", "arguments": {}}])
    crow = stored(look, Reply("Seen."), write("x"), Reply("Done."))
    async with connect(crow) as editor:
        session = await talk(editor, crow, folder, "Look")
        assert "worktree" not in kinds([*session.log]), "reading waits for nothing"
        await editor.prompt(session.id, "Write")
        tree = find_recorded(session.log)
    assert tree is not None
    assert tree.fault == "git took too long"
    assert (folder / "changed").read_text() == "x"


async def test_a_sub_agent_waits_for_the_state_of_the_session_that_it_works_for(
    folder: Path, stored: Callable[..., Any]
):
    crow = stored(Reply("Hello."))
    seen: list[str] = []

    @crow.before_tool
    def note(session: Session, tool_call: ToolCall) -> ToolResult | None:
        root = session.parent or session
        seen.extend(kinds([*root.log]))
        return None

    @crow.model_call
    async def act(session: Session, model_call: Any) -> None:
        if session.parent is None and model_call.ended:
            child = await crow.open(session.client, str(folder), parent=session)
            use: Any = {
                "id": "1",
                "type": "function",
                "function": {"name": "files_write", "arguments": '{"text": "y"}'},
            }
            await asyncio.gather(*(crow.before_tool.run(child, child.toolbox.parse(use)) for _ in range(2)))
            await crow.close(child)

    async with connect(crow) as editor:
        await talk(editor, crow, folder, "Hi")
    assert "worktree" in seen
