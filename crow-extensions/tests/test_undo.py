"""Undo restores files to the byte, and never loses a change by somebody else."""

import asyncio
import codecs
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp.connection import RpcError
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.masking import MASK
from crow_core.mcp.server import Server
from crow_core.messages.message import Message
from crow_core.messages.passes import drop_rewound, view
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.commands import commands
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.subagents import subagents
from crow_extensions.undo import plan_undo, restore_files, undo
from crow_permissions.extension import permissions
from hypothesis import given
from hypothesis import strategies as st

TOOLS = Server("crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True)


def edit(command: str, path: str, **arguments: Any) -> Use:
    return Use(name="file_editor", arguments={"command": command, "path": path, **arguments})


def create(path: str, text: str) -> Use:
    return edit("create", path, file_text=text)


def replace(path: str, old: str, new: str) -> Use:
    return edit("str_replace", path, old_str=old, new_str=new)


def run(command: str) -> Use:
    return Use(name="terminal", arguments={"command": command})


@dataclass
class Talk:
    """A session in a folder, and its editor."""

    editor: Editor
    session: Session
    folder: Path
    model: ScriptedModel

    async def say(self, words: str) -> str:
        """Send a prompt; return the text of the answer."""
        before = len(self.editor.text)
        await self.editor.prompt(self.session.id, words)
        return self.editor.text[before:]

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


@asynccontextmanager
async def talk(folder: Path, *turns: Sequence[Use], crow: Crow | None = None, **options: Any) -> AsyncIterator[Talk]:
    """Open a session whose model makes these tool calls, turn by turn, one after the other."""
    replies = [reply for turn in turns for reply in ([Reply(tool_calls=[use]) for use in turn] + [Reply("Done.")])]
    model = ScriptedModel([*replies, Reply("What was that?")])
    crow = (crow or Crow(model, servers=[TOOLS])).use(mask_secrets, **options).use(permissions, deny=["terminal:rm*"])
    crow.use(commands).use(undo)
    async with connect(crow) as editor:
        opened = await editor.new_session(str(folder))
        yield Talk(editor, crow.sessions[opened.session_id], folder, model)


@pytest.mark.anyio
async def test_undo_shows_a_plan_and_undo_yes_restores_the_files(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    turn = [replace("a.txt", "two\n", "2\n3\n"), create("new/b.txt", "b\n"), replace("a.txt", "one", "1")]
    async with talk(tmp_path, turn) as it:
        await it.say("count   with\ndigits")
        told = await it.say("/undo")
        assert told.splitlines() == [
            "To take back the last turn, “count with digits”:",
            "",
            f"- `{tmp_path / 'a.txt'}`: 2 lines come back, 3 go",
            f"- `{tmp_path / 'new/b.txt'}`: will be removed",
            "",
            "`/undo yes` does it.",
        ]
        assert it.read("a.txt") == "1\n2\n3\n"
        done = await it.say("/undo yes")
        assert done == "Taken back, 2 files as before. The model has forgotten “count with digits” and what followed."
        assert it.read("a.txt") == "one\ntwo\n"
        assert not (tmp_path / "new/b.txt").exists()
        assert view(it.session.log) == []
        await it.say("hello?")
    assert [message["content"] for message in it.model.requests[-1]["messages"][1:]] == ["hello?"]


@pytest.mark.anyio
async def test_redo_brings_back_what_undo_took_back(tmp_path: Path):
    (tmp_path / "a.txt").write_text("1\n")
    turns = [
        [replace("a.txt", "1", "2"), create("b.txt", "b\n")],
        [replace("a.txt", "2", "3"), edit("delete", "x")],
        [],
    ]
    async with talk(tmp_path, *turns) as it:
        for n in range(3):
            await it.say(f"turn {n}")
        seen = view(it.session.log)
        assert "There is nothing to bring back" in await it.say("/redo")
        await it.say("/undo 2 yes")
        once = view(it.session.log)
        await it.say("/undo yes")
        assert (it.read("a.txt"), (tmp_path / "b.txt").exists()) == ("1\n", False)
        assert await it.say("/redo") == "Brought back, 2 files as after it. The model remembers it again."
        assert view(it.session.log) == once
        assert (it.read("a.txt"), it.read("b.txt")) == ("2\n", "b\n")
        assert "1 file as after it" in await it.say("/redo")
        assert view(it.session.log) == seen
        assert it.read("a.txt") == "3\n"
        assert "There is nothing to bring back" in await it.say("/redo")
        await it.say("/undo 3 yes")
        assert (it.read("a.txt"), (tmp_path / "b.txt").exists()) == ("1\n", False)


@pytest.mark.anyio
async def test_redo_overwrites_nothing_and_forgets_no_later_turn(tmp_path: Path):
    async with talk(tmp_path, [create("a.txt", "1\n")]) as it:
        await it.say("first")
        await it.say("/undo yes")
        (tmp_path / "a.txt").write_text("by somebody else\n")
        assert "has been changed by somebody else since" in await it.say("/redo")
        assert it.read("a.txt") == "by somebody else\n"
        assert "/redo 2 is not understood" in await it.say("/redo 2")
        await it.say("second")
        (tmp_path / "a.txt").unlink()
        assert "There is nothing to bring back" in await it.say("/redo")
        assert not (tmp_path / "a.txt").exists()


@pytest.mark.anyio
async def test_turns_can_be_undone_one_by_one_or_several_at_once(tmp_path: Path):
    turns = [[create("a.txt", "1\n")], [replace("a.txt", "1", "2")], [replace("a.txt", "2", "3")], []]
    async with talk(tmp_path, *turns) as it:
        for n in range(4):
            await it.say(f"turn {n}")
        assert "no file had to change" in await it.say("/undo yes")
        assert it.read("a.txt") == "3\n"
        await it.say("/undo yes")
        assert it.read("a.txt") == "2\n"
        told = await it.say("/undo 2")
        assert told.startswith("To take back the last 2 turns, from “turn 0”:")
        assert told.endswith("`/undo 2 yes` does it.")
        assert await it.say("/undo 3 yes") == "There are only 2 turns to take back."
        await it.say("/undo 2 yes")
        assert not (tmp_path / "a.txt").exists()
        assert await it.say("/undo") == "There are no turns to take back."


@pytest.mark.anyio
async def test_an_edit_can_be_made_again_after_it_was_taken_back(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    turn = [replace("a.txt", "two", "2"), replace("a.txt", "one", "1")]
    async with talk(tmp_path, turn, turn) as it:
        await it.say("use digits")
        await it.say("/undo yes")
        await it.say("use digits after all")
        assert it.read("a.txt") == "1\n2\n"


@pytest.mark.anyio
async def test_undo_leaves_earlier_turns_unchanged(tmp_path: Path):
    async with talk(tmp_path, [create("a.txt", "1\n")], [create("b.txt", "2\n")]) as it:
        await it.say("first")
        before = view(it.session.log)
        await it.say("second")
        await it.say("/undo yes")
        assert view(it.session.log) == before
        assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.anyio
async def test_the_system_prompt_is_rendered_again_after_the_first_turn_was_undone(tmp_path: Path):
    async with talk(tmp_path, []) as it:
        await it.say("first")
        await it.say("/undo yes")
        await it.say("again")
        renders = [
            entry["crow"] for entry in drop_rewound(it.session.log) if entry.get("crow", {}).get("kind") == "render"
        ]
    assert [render["text"] for render in renders] == [it.model.requests[-1]["messages"][0]["content"]]


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"no line end",
        "é\r\nü\r\n".encode(),
        codecs.BOM_UTF8 + "é\r\n".encode(),
        codecs.BOM_UTF16_LE + "é\n".encode("utf-16-le"),
        codecs.BOM_UTF16_BE + "é\n".encode("utf-16-be"),
        codecs.BOM_UTF32_BE + "é\n".encode("utf-32-be"),
        "é\n".encode("latin-1"),
        "\u201cé\u201d\n".encode("cp1252"),
    ],
)
@pytest.mark.anyio
async def test_undo_restores_the_bytes_and_the_mode_of_a_file(tmp_path: Path, before: bytes):
    (tmp_path / "a.txt").write_bytes(before)
    (tmp_path / "a.txt").chmod(0o751)
    async with talk(tmp_path, [edit("view", "a.txt"), create("a.txt", "other\n")]) as it:
        await it.say("go")
        assert (tmp_path / "a.txt").read_bytes() != before
        await it.say("/undo yes")
    assert (tmp_path / "a.txt").read_bytes() == before
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == (0o666 if sys.platform == "win32" else 0o751)
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.anyio
async def test_undo_restores_a_removed_file(tmp_path: Path):
    async with talk(tmp_path, [create("deep/a.txt", "precious\n")], [edit("undo_edit", "deep/a.txt")]) as it:
        await it.say("make")
        await it.say("remove")
        (tmp_path / "deep").rmdir()
        assert f"- `{tmp_path / 'deep/a.txt'}`: 1 line comes back, 0 go" in await it.say("/undo")
        await it.say("/undo yes")
        assert it.read("deep/a.txt") == "precious\n"


@pytest.mark.parametrize("meddle", ["edit", "remove", "replace with a folder", "link", "link above"])
@pytest.mark.anyio
async def test_undo_changes_nothing_if_somebody_else_changed_a_file_since(tmp_path: Path, meddle: str):
    project = tmp_path / "project"
    file = project / "in" / "b.txt"
    file.parent.mkdir(parents=True)
    file.write_text("1\n")
    async with talk(project, [create("a.txt", "1\n"), replace("in/b.txt", "1", "2")]) as it:
        await it.say("go")
        match meddle:
            case "edit":
                file.write_text("mine\n")
            case "remove":
                file.unlink()
            case "replace with a folder":
                file.unlink()
                file.mkdir()
            case "link":
                file.rename(tmp_path / "b.txt")
                file.symlink_to(tmp_path / "b.txt")
            case _:
                file.parent.rename(tmp_path / "in")
                file.parent.symlink_to(tmp_path / "in")
        length = len(it.session.log)
        for words in ("/undo", "/undo yes"):
            said = await it.say(words)
            assert said.startswith(str(file))
            assert said.splitlines()[0].endswith("Nothing was taken back.")
        assert it.read("a.txt") == "1\n"
        assert len(it.session.log) == length


@pytest.mark.posix("the commands are those of a POSIX shell")
@pytest.mark.parametrize("command", ["sed -i s/2/3/ a.txt", "echo 3 >> a.txt", "rm a.txt", "mv a.txt c.txt"])
@pytest.mark.anyio
async def test_undo_keep_takes_back_the_rest_where_something_else_changed_a_file(tmp_path: Path, command: str):
    (tmp_path / "a.txt").write_text("1\n")
    (tmp_path / "b.txt").write_text("1\n")
    async with talk(tmp_path, [replace("b.txt", "1", "2"), replace("a.txt", "1", "2"), create("new", "")], []) as it:
        await it.say("go")
        before = view(it.session.log)
        await asyncio.to_thread(subprocess.run, command, shell=True, cwd=tmp_path, check=True)
        changed = (tmp_path / "a.txt").read_text() if (tmp_path / "a.txt").exists() else None
        said = await it.say("/undo yes")
        assert said.endswith("`/undo keep` tells what changes if such files are kept as they are.")
        assert it.read("b.txt") == "2\n"
        told = await it.say("/undo keep")
        assert f"- `{tmp_path / 'a.txt'}` is kept as it is: {tmp_path / 'a.txt'} has been changed by" in told
        assert told.endswith("`/undo keep yes` does it.")
        assert f"2 files as before. Kept as they are: {tmp_path / 'a.txt'}." in await it.say("/undo keep yes")
        assert it.read("b.txt") == "1\n"
        assert not (tmp_path / "new").exists()
        assert view(it.session.log) == []
        assert "Brought back, 2 files" in await it.say("/redo")
        assert view(it.session.log) == before
        assert it.read("b.txt") == "2\n"
        assert ((tmp_path / "a.txt").read_text() if (tmp_path / "a.txt").exists() else None) == changed


@pytest.mark.anyio
async def test_undo_does_not_lose_an_edit_of_the_user_between_two_turns(tmp_path: Path):
    async with talk(tmp_path, [create("a.txt", "1\n")], [edit("view", "a.txt"), create("a.txt", "3\n")]) as it:
        await it.say("first")
        (tmp_path / "a.txt").write_text("2, by hand\n")
        await it.say("second")
        said = await it.say("/undo 2 yes")
        assert said.startswith(
            f"{tmp_path / 'a.txt'} was changed by somebody else between these turns: take back fewer"
        )
        assert it.read("a.txt") == "3\n"
        await it.say("/undo yes")
        assert it.read("a.txt") == "2, by hand\n"
        assert "has been changed by somebody else since" in await it.say("/undo yes")
        assert it.read("a.txt") == "2, by hand\n"


@pytest.mark.anyio
async def test_undo_reports_a_change_by_a_command_between_two_edits_and_undoes_it(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n")
    turn = [
        replace("a.txt", "one", "two"),
        run("echo more >> a.txt"),
        edit("view", "a.txt"),
        replace("a.txt", "two", "2"),
    ]
    async with talk(tmp_path, turn) as it:
        await it.say("go")
        assert "1 line comes back, 2 go; something else changed it during the turn, which goes too" in await it.say(
            "/undo"
        )
        await it.say("/undo yes")
        assert it.read("a.txt") == "one\n"


@pytest.mark.posix("the commands are those of a POSIX shell")
@pytest.mark.anyio
async def test_undo_lists_commands_since_their_effects_stay(tmp_path: Path):
    turn = [run("touch made"), run("rm -rf made"), run("false"), edit("view", "."), create("a.txt", "1\n")]
    async with talk(tmp_path, turn) as it:
        await it.say("go")
        told = await it.say("/undo")
        assert "What these did stays, as only edits can be taken back:\n- `touch made`\n- `false`\n\n" in told
        await it.say("/undo yes")
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.anyio
async def test_undo_restores_what_a_sub_agent_changed_in_the_turn(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n")
    task = Use(name="agent", arguments={"description": "Edit", "prompt": "Edit."})
    plays = [[task], [replace("a.txt", "one", "two")], [run("touch made")], [], [replace("a.txt", "two", "2")], []]
    model = ScriptedModel([Reply("Done.", tool_calls=uses) for uses in plays])
    async with talk(tmp_path, crow=Crow(model, servers=[TOOLS]).use(subagents)) as it:
        await it.say("go")
        assert it.read("a.txt") == "2\n"
        told = await it.say("/undo")
        assert "a.txt`: 1 line comes back, 1 goes\n" in told
        assert "- `touch made`" in told
        await it.say("/undo yes")
        assert it.read("a.txt") == "one\n"


@pytest.mark.anyio
async def test_undo_does_not_write_the_mask_of_a_secret_into_a_file(tmp_path: Path):
    key = "canary-0123456789"
    (tmp_path / ".envrc").write_text(f"KEY={key}\nPORT=1\n")
    async with talk(tmp_path, [replace(".envrc", "PORT=1", "PORT=2"), create("b", "1")], known=[key]) as it:
        await it.say("go")
        said = await it.say("/undo yes")
        assert said.startswith(
            f"What {tmp_path / '.envrc'} held before was not kept whole: a secret in it was masked. "
            "Nothing was taken back."
        )
        assert it.read(".envrc") == f"KEY={key}\nPORT=2\n"
        assert it.read("b") == "1"


@pytest.mark.anyio
async def test_undo_restores_a_text_that_only_looks_like_the_mask(tmp_path: Path):
    (tmp_path / "a.txt").write_text(f"{MASK}\n")
    async with talk(tmp_path, [replace("a.txt", MASK, "open")]) as it:
        await it.say("go")
        await it.say("/undo yes")
        assert it.read("a.txt") == f"{MASK}\n"


@pytest.mark.anyio
async def test_an_interrupted_undo_continues_when_it_is_repeated(tmp_path: Path):
    async with talk(
        tmp_path,
        [create("a.txt", "1\n"), create("in/b.txt", "2\n")],
        [replace("a.txt", "1", "one"), edit("undo_edit", "in/b.txt")],
    ) as it:
        await it.say("make")
        await it.say("change")
        (tmp_path / "in").rmdir()
        (tmp_path / "in").write_text("in the way")
        said = await it.say("/undo yes")
        assert said.startswith(f"{tmp_path / 'in/b.txt'} cannot be put back")
        assert "1 of 2 files are as before" in said
        assert (it.read("a.txt"), it.read("in")) == ("1\n", "in the way")
        (tmp_path / "in").unlink()
        assert "1 file as before" in await it.say("/undo yes")
        assert (it.read("a.txt"), it.read("in/b.txt")) == ("1\n", "2\n")
        assert [entry["content"] for entry in drop_rewound(it.session.log) if entry.get("role") == "user"] == ["make"]


@pytest.mark.anyio
async def test_a_rewind_that_cannot_be_stored_is_an_error_but_takes_effect(tmp_path: Path):
    def store(session: Session, entry: Message) -> None:
        if entry.get("crow", {}).get("kind") == "rewind":
            raise StoreError("The disk is full. Make room.")

    async with talk(tmp_path, [create("a.txt", "1\n")]) as it:
        await it.say("go")
        it.session.hooks.message.functions.append(store)
        with pytest.raises(RpcError, match="cannot be stored"):
            await it.say("/undo yes")
        assert not (tmp_path / "a.txt").exists()
        assert await it.say("/undo yes") == "There are no turns to take back."


@pytest.mark.parametrize("words", ["no", "0", "-1", "yes 2", "1 2 yes", "yes please", "²"])
@pytest.mark.anyio
async def test_undo_with_other_arguments_explains_them_and_changes_nothing(tmp_path: Path, words: str):
    async with talk(tmp_path, [create("a.txt", "1\n")]) as it:
        await it.say("go")
        assert "is not understood" in await it.say(f"/undo {words}")
        assert it.read("a.txt") == "1\n"


@pytest.mark.anyio
async def test_a_slash_command_does_not_count_as_a_turn(tmp_path: Path):
    async with talk(tmp_path) as it:
        await it.say("/help")
        assert await it.say("/undo yes") == "There are no turns to take back."


def digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


TEXT = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), TEXT)), min_size=1, max_size=4), st.data())
def test_undo_restores_files_after_any_edits(turns: list[list[tuple[str, str | None]]], data: st.DataObject):
    """A turn is a list of edits: the name of a file and its new content, None for a removed file."""
    with TemporaryDirectory() as created:
        folder = os.path.realpath(created)
        held: dict[str, str | None] = {}
        states: list[dict[str, str | None]] = []
        log: list[Message] = []
        for n, turn in enumerate(turns):
            states.append(dict(held))
            log.append({"role": "user", "content": f"turn {n}", "crow": {"id": f"u{n}"}})
            for name, text in turn:
                old = held.get(name)
                both = [None if one is None else one.encode() for one in (old, text)]
                change = {"path": os.path.join(folder, name), "old": old, "new": text}
                change |= {"before": digest(both[0]), "after": digest(both[1])}
                log.append(
                    {
                        "role": "tool",
                        "tool_call_id": name,
                        "content": "",
                        "crow": {"id": f"{n}.{len(log)}", "changes": [change]},
                    }
                )
                held[name] = text
        for name, text in held.items():
            if text is not None:
                Path(folder, name).write_bytes(text.encode())
        back = data.draw(st.integers(1, len(turns)))
        planned = plan_undo(log, back)
        restore_files(planned.files)
        wanted = {name: text.encode() for name, text in states[-back].items() if text is not None}
        assert {file.name: file.read_bytes() for file in Path(folder).iterdir()} == wanted
        ids = [entry.get("crow", {})["id"] for entry in log]
        assert planned.to == ["", *ids][ids.index(f"u{len(turns) - back}")]
