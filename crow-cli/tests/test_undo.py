"""`crow undo` on a session that was stored by a process that has ended, or that still has it open."""

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine, Prefork

pytestmark = pytest.mark.anyio


def create(path: str, text: str) -> ScriptedCall:
    return {"name": "file_editor", "arguments": {"command": "create", "path": path, "file_text": text}}


def undo_edit(path: str) -> ScriptedCall:
    return {"name": "file_editor", "arguments": {"command": "undo_edit", "path": path}}


def reply(request: dict[str, Any]) -> Reply:
    last = request["messages"][-1]
    match last["content"].split(), last["role"]:
        case ["make", path], "user":
            return Reply(tool_calls=[create(path, "made\n")])
        case ["unmake", path], "user":
            return Reply(tool_calls=[undo_edit(path)])
        case _:
            return Reply("; ".join(m["content"] for m in request["messages"] if m["role"] == "user"))


async def talk(machine: "Machine") -> None:
    """Run two turns that create a file each."""
    machine.configure('[permissions]\nmode = "yolo"\n')
    async with ScriptedServer(reply) as server:
        machine.ask(server.url)
        for words in (["make a.txt"], ["-c", "make b.txt"]):
            assert (await machine.crow("run", *words)).code == 0


@pytest.fixture(scope="module")
def after_talk(prepared: Callable[..., Callable[..., "Machine"]]) -> Callable[..., "Machine"]:
    return prepared(talk)


@pytest.fixture
async def talked(after_talk: Callable[..., "Machine"], prefork: "Prefork | None") -> AsyncIterator["Machine"]:
    """A machine on which two turns created a file each; the model still answers."""
    machine = after_talk(prefork)
    async with ScriptedServer(reply) as server:
        machine.ask(server.url)
        yield machine


def files(machine: "Machine") -> list[str]:
    return sorted(file.name for file in machine.project.iterdir())


async def test_last_turn_is_previewed_and_undone_after_confirmation(talked: "Machine"):
    undone = await talked.crow("undo", stdin="y\n")
    assert undone.code == 0, undone.err
    assert undone.out.startswith("To take back the last turn, “make b.txt”:\n\n")
    assert f"- `{talked.project}/b.txt`: will be removed\n" in undone.out
    assert "Taken back, 1 file as before." in undone.out
    assert files(talked) == ["a.txt"]
    assert (await talked.crow("run", "-c", "what did I say?")).out == "make a.txt; what did I say?\n"


async def test_model_can_undo_an_edit_of_an_earlier_process(talked: "Machine"):
    assert (await talked.crow("run", "-c", "unmake a.txt")).code == 0
    assert files(talked) == ["b.txt"]


@pytest.mark.parametrize(("stdin", "said"), [("n\n", ""), ("\n", ""), ("", "To do this without a question: --yes\n")])
async def test_nothing_is_undone_without_confirmation(talked: "Machine", stdin: str, said: str):
    undone = await talked.crow("undo", stdin=stdin)
    assert undone.code == 1
    assert undone.err.endswith(said)
    assert "Traceback" not in undone.err
    assert files(talked) == ["a.txt", "b.txt"]
    assert (await talked.crow("run", "-c", "and?")).out == "make a.txt; make b.txt; and?\n"


async def test_several_turns_are_undone_at_once(talked: "Machine"):
    assert (await talked.crow("undo", "--turns", "2", "--yes")).code == 0
    assert files(talked) == []
    undone = await talked.crow("undo", "--yes")
    assert (undone.code, undone.err) == (1, "crow: There are no turns to take back.\n")


async def test_file_changed_since_prevents_undo(talked: "Machine"):
    file = talked.project / "b.txt"
    file.write_text("mine\n")
    undone = await talked.crow("undo", "--yes")
    assert undone.code == 1
    assert undone.err.startswith(
        f"crow: {file} has been changed by somebody else since. Nothing was taken back. --keep "
    )
    undone = await talked.crow("undo", "--keep", "--yes")
    assert (undone.code, undone.err) == (0, "")
    assert f"Kept as they are: {file}." in undone.out
    assert file.read_text() == "mine\n"


async def test_session_open_in_another_process_is_not_changed(talked: "Machine"):
    async with talked.editor() as editor:
        session = (await editor.new_session(str(talked.project))).session_id
        await editor.prompt(session, "make c.txt")
        undone = await talked.crow("undo", "--yes")
        assert undone.code == 2
        assert undone.err.startswith("crow: ")
        assert session[:8] in undone.err
        assert "c.txt" in files(talked)
    assert (await talked.crow("undo", session[:8], "--yes")).code == 0
    assert "c.txt" not in files(talked)


async def test_unknown_session_and_folder_without_sessions_are_reported(talked: "Machine"):
    unknown = await talked.crow("undo", "nosuch", "--yes")
    assert (unknown.code, len(unknown.err.splitlines())) == (2, 1)
    assert "nosuch" in unknown.err
    (talked.project / "other").mkdir()
    talked.project = talked.project / "other"
    elsewhere = await talked.crow("undo", "--yes")
    assert elsewhere.code == 2
    assert elsewhere.err.startswith(f"crow: There is no session of {talked.project}.")
