"""Test that tools use the client's files and terminals, and that the model reads the same without them."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from crow_agent.builtin_tools import make_tool_server
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    METHOD_NOT_FOUND,
    BlockContent,
    ClientCapabilities,
    DiffContent,
    FileSystemCapabilities,
    TerminalContent,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    WriteTextFileRequest,
)
from crow_core.acp.transports import memory_pair
from crow_core.agent import client_files as editors
from crow_core.agent.acp_agent import AcpAgent
from crow_core.agent.client_files import terminals
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.mask_secrets import mask_secrets
from crow_mcp_server.terminal import processes
from crow_mcp_server.terminal.command_output import UNSHOWN_NOTE
from crow_permissions.extension import permissions
from crow_testing.process_states import is_alive
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio


def offers(*, read: bool = False, write: bool = False, terminal: bool = False) -> ClientCapabilities:
    return ClientCapabilities(fs=FileSystemCapabilities(read_text_file=read, write_text_file=write), terminal=terminal)


FILES = offers(read=True, write=True)
TERMINALS = offers(terminal=True)
EVERYTHING = offers(read=True, write=True, terminal=True)
NOTHING = offers()


def edit(command: str, path: str, **arguments: Any) -> Use:
    return {"name": "file_editor", "arguments": {"command": command, "path": path, **arguments}}


def replace(path: str, old: str, new: str) -> Use:
    return edit("str_replace", path, old_str=old, new_str=new)


def run(command: str, **arguments: Any) -> Use:
    return {"name": "terminal", "arguments": {"command": command, **arguments}}


@dataclass
class Talk:
    """A session in a folder; every prompt makes its model call tools."""

    editor: Editor
    crow: Crow
    id: str
    folder: Path
    model: ScriptedModel
    uses: list[Use] = field(default_factory=list)

    def answer(self, request: dict[str, Any]) -> Reply:
        return Reply(tool_calls=self.uses) if request["messages"][-1]["role"] == "user" else Reply("Done.")

    async def use(self, *uses: Use) -> str:
        """Let the model call tools in parallel; return the text of the last result, without its last line feed."""
        self.uses = list(uses)
        response = await self.editor.prompt(self.id, "go")
        assert response.stop_reason == "end_turn"
        return self.model.requests[-1]["messages"][-1]["content"].removesuffix("\n")

    @property
    def last_update(self) -> ToolCallUpdate:
        """The last update of the last tool call."""
        return self.editor.of(ToolCallUpdate)[-1]

    def diff(self) -> tuple[str | None, str]:
        """The texts before and after in the diff of the last tool call."""
        (part,) = self.last_update.content or []
        assert isinstance(part, DiffContent)
        return part.old_text or None, part.new_text  # type: ignore[return-value]

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_bytes(text.encode())
        return path


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@asynccontextmanager
async def talk(
    folder: Path,
    capabilities: ClientCapabilities = EVERYTHING,
    *,
    permit: str = "allow_once",
    rules: Sequence[str] = (),
    **options: Any,
) -> AsyncGenerator[Talk]:
    model = ScriptedModel(lambda request: it.answer(request))
    crow = Crow(model)
    crow.servers.append(make_tool_server(crow, ["CROW_TEST_KEY"]))
    crow.use(mask_secrets, **options).use(permissions, allow=rules).use(terminals)
    async with connect(crow, permit=permit, capabilities=capabilities) as editor:
        session = await editor.new_session(str(folder))
        it = Talk(editor, crow, session.session_id, folder, model)
        yield it
    assert editor.missing_terminals == []


@pytest.mark.parametrize("capabilities", [EVERYTHING, ClientCapabilities()], ids=["terminal", "local"])
@pytest.mark.parametrize(
    ("command", "status", "exit_status"),
    [
        ("true", "completed", None),
        ("echo out; exit 3", "failed", {"exitCode": 3}),
        ("kill -SEGV $$", "failed", {"signal": "SIGSEGV"}),
        ("no-such-command-7", "failed", {"exitCode": 127}),
    ],
)
async def test_command_that_fails_is_shown_as_failed_with_its_exit_status(
    tmp_path: Path, capabilities: ClientCapabilities, command: str, status: str, exit_status: dict[str, Any] | None
):
    async with talk(tmp_path, capabilities) as it:
        text = await it.use(run(command))
        assert it.last_update.status == status
        shown = {"output": text} if capabilities is EVERYTHING else {}  # else the content has the text
        assert (it.last_update.raw_output or {}) == {**shown, **({"exitStatus": exit_status} if exit_status else {})}


async def test_command_that_times_out_is_shown_as_failed(tmp_path: Path):
    async with talk(tmp_path, ClientCapabilities()) as it:
        await it.use(run("sleep 1000", timeout=0.2))
        assert it.last_update.status == "failed"


async def test_failed_command_of_a_terminal_session_is_shown_as_failed(tmp_path: Path):
    async with talk(tmp_path) as it:
        await it.use(run("false", session="one"))
        assert it.last_update.status == "failed"
        assert it.last_update.raw_output["exitStatus"] == {"exitCode": 1}
        await it.use({"name": "terminal", "arguments": {"session": "one"}})
        assert it.last_update.status == "completed"


async def test_raw_output_is_limited_and_has_both_ends(tmp_path: Path):
    async with talk(tmp_path) as it:
        it.write("long", "first line\n" + ("x" * 60 + "\n") * 300 + "\nlast line\n")
        await it.use(edit("view", "long"))
        assert not it.last_update.raw_output  # the content has it
        await it.use(run("cat long"))
        raw = it.last_update.raw_output
        assert raw["truncated"] is True
        assert len(raw["output"]) < 10_100
        assert "first line" in raw["output"]
        assert "last line" in raw["output"]


# Files


async def test_unsaved_text_is_viewed_edited_and_written_once(tmp_path: Path):
    async with talk(tmp_path) as it:
        path = it.write("a.py", "saved\n")
        it.editor.buffers[str(path)] = "unsaved\n"
        assert "unsaved" in await it.use(edit("view", "a.py"))
        text = await it.use(replace("a.py", "unsaved", "edited"))
        assert text.startswith(f"Edited {path}:\n")
        assert it.diff() == ("unsaved\n", "edited\n")
        assert path.read_text() == "edited\n"
    assert it.editor.list_requested_methods().count("fs/write_text_file") == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("read", [True, False])
async def test_only_capabilities_of_the_client_are_used(tmp_path: Path, read: bool, write: bool, terminal: bool):
    async with talk(tmp_path, offers(read=read, write=write, terminal=terminal)) as it:
        path = it.write("a.py", "one\n")
        it.editor.buffers[str(path)] = "one\nunsaved\n"
        await it.use(edit("insert", "a.py", insert_line=1, new_str="two"))
        assert it.diff() == (("one\nunsaved\n", "one\ntwo\nunsaved\n") if read else ("one\n", "one\ntwo\n"))
        assert path.read_text() == it.diff()[1]
        await it.use(edit("create", "new.py", file_text="new\n"))
        assert (tmp_path / "new.py").read_text() == "new\n"
        assert await it.use(run("cat new.py")) == "new"
    asked = {method.partition("_")[0] for method in it.editor.list_requested_methods()}
    offered = [(read, {"fs/read"}), (write, {"fs/write"}), (terminal, {"terminal/create", "terminal/output"})]
    assert asked - {"terminal/wait", "terminal/release"} == set().union(*[names for yes, names in offered if yes])


async def test_file_that_the_client_cannot_read_is_read_from_the_disk(tmp_path: Path):
    async with talk(tmp_path) as it:
        path = it.write("a.py", "one\n")
        it.editor.refuses.add("fs/read_text_file")
        assert "one" in await it.use(edit("view", "a.py"))
        await it.use(replace("a.py", "one", "two"))
        assert it.diff() == ("one\n", "two\n")
        assert path.read_text() == "two\n"
    assert "fs/write_text_file" not in it.editor.list_requested_methods()


async def test_client_that_reports_a_file_as_empty_does_not_lose_it(tmp_path: Path):
    async with talk(tmp_path) as it:
        path = it.write("a.py", "precious\n")
        it.editor.buffers[str(path)] = ""
        assert "has not been viewed" in await it.use(edit("create", "a.py", file_text="new\n"))
        await it.use(edit("insert", "a.py", insert_line=0, new_str="more"))
        assert path.read_text() == "more\nprecious\n"


async def test_file_for_which_the_client_shows_no_text_does_not_exist(tmp_path: Path):
    async with talk(tmp_path) as it:
        it.editor.buffers[str(tmp_path / "a.py")] = ""
        assert "does not exist" in await it.use(edit("view", "a.py"))
        assert "does not exist" in await it.use(replace("a.py", "a", "b"))
        assert set(it.editor.list_requested_methods()) == {"fs/read_text_file"}
        assert "Created" in await it.use(edit("create", "deep/er/a.py", file_text="a\n"))
        assert "is gone" in await it.use(edit("undo_edit", "deep/er/a.py"))
        assert not (tmp_path / "deep/er/a.py").exists()


async def test_only_plain_text_in_the_roots_goes_through_the_client(tmp_path: Path):
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "secret.txt").write_text("outside\n")
    (project / "latin.txt").write_bytes(b"caf\xe9\n")
    (project / "mark.txt").write_bytes(b"\xef\xbb\xbfone\n")
    (project / "binary").write_bytes(b"\0\1\2")
    async with talk(project) as it:
        await it.use(replace("latin.txt", "caf", "th"))
        await it.use(replace("mark.txt", "one", "two"))
        assert "binary" in await it.use(edit("view", "binary"))
        assert "latin.txt" in await it.use(edit("view", "."))
        assert "outside of the folders" in await it.use(edit("view", "../secret.txt"))
        assert "outside of the folders" in await it.use(edit("create", "../new.txt", file_text="new"))
    assert it.editor.requests == []
    assert (project / "latin.txt").read_bytes() == b"th\xe9\n"
    assert (project / "mark.txt").read_bytes() == b"\xef\xbb\xbftwo\n"


async def test_rejected_edit_is_shown_from_the_buffer_and_never_written(tmp_path: Path):
    async with talk(tmp_path, permit="reject_once") as it:
        path = it.write("a.py", "saved\n")
        it.editor.buffers[str(path)] = "unsaved\n"
        await it.use(replace("a.py", "unsaved", "edited"), edit("create", "deep/b.py", file_text="b\n"))
        contents = [part for question in it.editor.questions for part in question.tool_call.content or []]
        assert contents[0] == DiffContent(path=str(path), old_text="unsaved\n", new_text="edited\n")
        assert path.read_text() == "saved\n"
        assert files_in(tmp_path) == ["a.py"]
    assert set(it.editor.list_requested_methods()) == {"fs/read_text_file"}


async def test_text_that_the_client_formats_on_saving_is_accepted(tmp_path: Path):
    async with talk(tmp_path) as it:
        path = it.write("a.py", "x=1\ny=2\n")
        it.editor.on_save = lambda text: "# formatted\n" + text.replace("=", " = ")
        text = await it.use(replace("a.py", "x=1", "x=3"))
        assert it.diff() == ("x=1\ny=2\n", path.read_text())
        assert path.read_text() == "# formatted\nx = 3\ny = 2\n"
        assert "     2\tx = 3\n" in text
        assert text.endswith("[the editor changed the text when it saved it; this is how it is now]")
        it.editor.on_save = str
        assert "Edited" in await it.use(replace("a.py", "x = 3", "x = 4"))  # the model has seen the formatted text
        assert "formatted" in await it.use(edit("undo_edit", "a.py"))


async def test_line_endings_survive_a_client_that_sends_only_line_feeds(tmp_path: Path):
    async with talk(tmp_path) as it:
        path = it.write("a.txt", "one\r\ntwo\r\nthree\r\n")
        it.editor.buffers[str(path)] = "one\ntwo\nthree\n"
        await it.use(replace("a.txt", "one\ntwo", "1\n2"))
        assert path.read_bytes() == b"1\r\n2\r\nthree\r\n"
        assert it.diff() == ("one\ntwo\nthree\n", "1\n2\nthree\n")  # what the client shows has line feeds alone


@pytest.mark.parametrize("saves", [True, False])
async def test_file_that_only_the_client_has_is_viewed_and_edited_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool
):
    if not saves:

        async def keep(editor: Editor, request: WriteTextFileRequest) -> None:
            editor.buffers[request.path] = request.content

        monkeypatch.setattr(Editor, "on_write", keep)
    async with talk(tmp_path) as it:
        path = str(tmp_path / "new.py")
        it.editor.buffers[path] = "one\ntwo\n"
        assert "exists, and has not been viewed" in await it.use(edit("create", "new.py", file_text="other\n"))
        assert "     1\tone\n     2\ttwo" in await it.use(edit("view", "new.py"))
        assert "Edited" in await it.use(replace("new.py", "one", "1"))
        assert it.diff() == ("one\ntwo\n", "1\ntwo\n")
        assert "Overwrote" in await it.use(edit("create", "new.py", file_text="other\n"))
        text = (tmp_path / "new.py").read_text() if saves else it.editor.buffers[path]
    assert text == "other\n"


async def test_file_that_only_the_client_has_is_written_to_the_disk_if_the_client_does_not_write(tmp_path: Path):
    async with talk(tmp_path, offers(read=True)) as it:
        it.editor.buffers[str(tmp_path / "new.py")] = "one\n"
        assert "Edited" in await it.use(replace("new.py", "one", "1"))
    assert (tmp_path / "new.py").read_text() == "1\n"


async def test_linked_folder_keeps_the_name_that_the_client_uses(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    async with talk(tmp_path / "link") as it:
        it.write("a.py", "one\n")
        it.editor.buffers[str(tmp_path / "link/a.py")] = "unsaved\n"
        await it.use(replace("a.py", "unsaved", "edited"))
        assert (tmp_path / "real/a.py").read_text() == "edited\n"


async def test_client_that_does_not_answer_a_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(editors, "ANSWER_TIMEOUT", 0.05)
    async with talk(tmp_path) as it:
        path = it.write("a.py", "one\n")
        it.editor.waits["fs/read_text_file"] = asyncio.Event()
        text = await it.use(replace("a.py", "one", "two"))
        assert "the editor did not answer fs/read_text_file within 0.05 s" in text
        assert "Nothing was changed." in text
        assert it.editor.cancelled
        assert path.read_text() == "one\n"
        it.editor.waits.clear()
        monkeypatch.setattr(editors, "ANSWER_TIMEOUT", 30)
        assert "Edited" in await it.use(replace("a.py", "one", "two"))
        assert it.diff() == ("one\n", "two\n")


@pytest.mark.parametrize("deaf", [True, False])
async def test_refused_or_unanswered_write_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool
):
    async with talk(tmp_path, offers(write=True)) as it:
        path = it.write("a.py", "one\n")
        if deaf:
            monkeypatch.setattr(editors, "ANSWER_TIMEOUT", 0.05)
            it.editor.waits["fs/write_text_file"] = asyncio.Event()
            why = "the editor did not answer fs/write_text_file within 0.05 s"
        else:
            it.editor.refuses.add("fs/write_text_file")
            why = "the editor refused fs/write_text_file: fs/write_text_file is in `refuses`"
        for use in (replace("a.py", "one", "two"), edit("create", "deep/er/b.py", file_text="b\n")):
            text = await it.use(use)
            assert why in text
            assert "View it before you edit it again." in text
            assert it.last_update.status == "failed"
        assert files_in(tmp_path) == ["a.py"]
        assert path.read_text() == "one\n"
        assert "no edit" in await it.use(edit("undo_edit", "a.py"))
        monkeypatch.setattr(editors, "ANSWER_TIMEOUT", 30)
        it.editor.waits.clear()
        it.editor.refuses.clear()
        await it.use(replace("a.py", "one", "two"))
        assert path.read_text() == "two\n"


@pytest.mark.parametrize("method", ["fs/read_text_file", "fs/write_text_file"])
async def test_cancelled_turn_cancels_its_request_and_ends(tmp_path: Path, method: str):
    async with talk(tmp_path) as it:
        path = it.write("a.py", "one\n")
        it.editor.waits[method] = asyncio.Event()
        it.uses = [replace("a.py", "one", "two")]
        turn = asyncio.ensure_future(it.editor.prompt(it.id, "go"))
        await it.editor.until(lambda editor: method in editor.list_requested_methods())
        await it.editor.cancel(it.id)
        assert (await turn).stop_reason == "cancelled"
        await it.editor.until(lambda editor: editor.cancelled == [method])
        assert it.last_update.status == "failed"
        assert path.read_text() == "one\n"
        it.editor.waits.clear()
        assert "Edited" in await it.use(replace("a.py", "one", "two"))


@pytest.mark.parametrize(
    ("use", "method"),
    [
        (edit("view", "a.py"), "fs/read_text_file"),
        (replace("a.py", "one", "two"), "fs/write_text_file"),
        (run("true"), "terminal/create"),
        (run("sleep 600"), "terminal/wait_for_exit"),
    ],
)
async def test_client_that_disconnects_during_a_tool_call_leaves_every_call_answered(
    tmp_path: Path, use: Use, method: str
):
    (tmp_path / "a.py").write_text("one\n")
    crow = Crow(ScriptedModel(lambda _: Reply(tool_calls=[use])))
    crow.servers.append(make_tool_server(crow))
    crow.use(terminals)
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    editor = Editor(ours)
    async with editor.serving():
        await editor.initialize("editor", EVERYTHING)
        id = (await editor.new_session(str(tmp_path))).session_id
        (session,) = crow.sessions.values()
        if method != "terminal/wait_for_exit":
            editor.waits[method] = asyncio.Event()
        turn = asyncio.ensure_future(editor.prompt(id, "go"))
        await editor.until(lambda editor: method in editor.list_requested_methods())
    with suppress(Exception):
        await turn
    await agent
    await crow.shut_down()
    for terminal in editor.terminals.values():
        await terminal.close()
    assert [entry["role"] for entry in session.log if "role" in entry] == ["user", "assistant", "tool"]
    assert (tmp_path / "a.py").read_text() == "one\n"


async def test_client_gets_the_lines_of_each_change(tmp_path: Path):
    async with talk(tmp_path) as it:
        it.write("a.py", "".join(f"line {n}\n" for n in range(1, 31)))
        seen: list[tuple[Any, Any]] = []
        for use in (
            edit("view", "a.py", view_range=[7, 9]),
            edit("insert", "a.py", insert_line=20, new_str="new"),
            replace("a.py", "line 12\n", "LINE 12\n"),
            edit("view", "a.py"),
            edit("view", "a.py", view_range=[0, 2]),
        ):
            await it.use(use)
            call = it.editor.of(ToolCall)[-1]
            (first,), (last,) = call.locations or [None], it.last_update.locations or [None]
            assert first
            assert first.path == str(tmp_path / "a.py")
            seen.append((first.line or None, last and last.line))
        assert seen == [(7, 7), (21, 21), (None, 12), (None, 1), (None, None)]


# Terminals


async def test_command_runs_in_a_terminal_of_the_client_that_stays_visible(tmp_path: Path):
    async with talk(tmp_path) as it:
        assert await it.use(run("echo out; echo err >&2; exit 3")) == "out\nerr\n[exit code 3]"
        await it.editor.until(lambda editor: not editor.terminals)
        requests = dict(it.editor.requests)
        create = requests["terminal/create"]
        assert (create.command, create.args[-1]) == ("bash", "echo out; echo err >&2; exit 3")
        assert (create.session_id, create.cwd) == (it.id, str(tmp_path))
        assert create.output_byte_limit > 100_000
        embedded = [TerminalContent(terminal_id="terminal-1")]
        states = [(update.status or None, update.content or None) for update in it.editor.of(ToolCallUpdate)]
        assert states == [("in_progress", None), (None, embedded), ("failed", embedded)]
    assert it.editor.list_requested_methods() == [
        "terminal/create",
        "terminal/wait_for_exit",
        "terminal/output",
        "terminal/release",
    ]


async def test_command_in_a_terminal_gets_the_same_environment_as_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CROW_TEST_KEY", "canary-4711")
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("sub")
    results: dict[bool, list[str]] = {}
    for terminal in (True, False):
        async with talk(tmp_path, offers(terminal=terminal)) as it:
            names = ("PAGER", "GIT_PAGER", "GIT_TERMINAL_PROMPT", "TERM", "NO_COLOR", "CROW_TEST_KEY")
            environment = await it.use(run("echo " + " ".join(f"{name}=${name}" for name in names)))
            results[terminal] = [environment, await it.use(run("pwd", cwd="link")), await it.use(run("cat; echo $?"))]
    assert results[True] == results[False]
    assert results[True][0] == "PAGER=cat GIT_PAGER=cat GIT_TERMINAL_PROMPT=0 TERM=dumb NO_COLOR=1 CROW_TEST_KEY="
    assert results[True][1] == f"{tmp_path}/link"


async def test_loaded_session_shows_text_instead_of_terminals(tmp_path: Path):
    async with talk(tmp_path) as it:
        await it.use(run("echo hello"))
        (session,) = it.crow.sessions.values()
        *_, end = [update for update in replay(session.log, str(tmp_path)) if isinstance(update, ToolCallUpdate)]
        assert end.content == [BlockContent(content=TextBlock(text="```\nhello\n```"))]


async def test_loaded_session_shows_the_arguments_that_a_tool_was_called_with(tmp_path: Path):
    """The model wrote a list as a string."""
    async with talk(tmp_path) as it:
        (tmp_path / "a.txt").write_text("one\ntwo\n")
        await it.use(edit("view", "a.txt", view_range="[2, 2]"))
        (live,) = it.editor.of(ToolCall)
        (session,) = it.crow.sessions.values()
        (loaded,) = [update for update in replay(session.log, str(tmp_path)) if isinstance(update, ToolCall)]
    assert (loaded.raw_input, loaded.title) == (live.raw_input, live.title)
    assert live.raw_input["view_range"] == [2, 2]


async def overlong(it: Talk, command: str) -> tuple[str, str]:
    """Run a command over its timeout; return the first line of its output, and the rest of the result."""
    for timeout in (0.5, 5, 50):  # the machine may be busy
        text = await it.use(run(command, timeout=timeout))
        if not text.startswith("["):
            break
    first, rest = text.split("\n", 1)
    assert rest.startswith(f"[timed out after {timeout:g} s and was killed")
    return first, rest


async def test_command_over_its_timeout_is_killed_and_its_output_returned(tmp_path: Path):
    async with talk(tmp_path) as it:
        pid, _ = await overlong(it, "echo $$; sleep 600")
        assert it.last_update.content == [TerminalContent(terminal_id=f"terminal-{it.editor.opened_terminals}")]
        await it.editor.until(lambda editor: not editor.terminals)
        assert not is_alive(int(pid))
    assert it.editor.list_requested_methods()[-4:] == [
        "terminal/wait_for_exit",
        "terminal/kill",
        "terminal/output",
        "terminal/release",
    ]
    assert it.editor.cancelled == ["terminal/wait_for_exit"] * it.editor.opened_terminals


async def test_cancelled_command_is_killed_and_its_terminal_released(tmp_path: Path):
    async with talk(tmp_path) as it:
        it.uses = [run("sleep 600 & sleep 600"), run("sleep 600")]
        turn = asyncio.ensure_future(it.editor.prompt(it.id, "go"))
        await it.editor.until(lambda editor: editor.list_requested_methods().count("terminal/wait_for_exit") == 2)
        processes = [terminal.process for terminal in it.editor.terminals.values()]
        await it.editor.cancel(it.id)
        assert (await turn).stop_reason == "cancelled"
        await it.editor.until(lambda editor: not editor.terminals)
        assert [process.returncode for process in processes] == [-9, -9]
        assert "terminal/kill" not in it.editor.list_requested_methods()  # the release kills it
        assert await it.use(run("echo next")) == "next"


async def test_terminal_created_after_the_turn_is_released(tmp_path: Path):
    async with talk(tmp_path) as it:
        it.editor.waits["terminal/create"] = asyncio.Event()
        it.uses = [run("sleep 600")]
        turn = asyncio.ensure_future(it.editor.prompt(it.id, "go"))
        await it.editor.until(lambda editor: "terminal/create" in editor.list_requested_methods())
        await it.editor.cancel(it.id)
        assert (await turn).stop_reason == "cancelled"
        it.editor.waits["terminal/create"].set()
        await it.editor.until(
            lambda editor: "terminal/release" in editor.list_requested_methods() and not editor.terminals
        )
        assert it.editor.opened_terminals == 1


@pytest.mark.parametrize("how", ["deaf", "refuses"])
@pytest.mark.parametrize("method", ["terminal/create", "terminal/wait_for_exit", "terminal/output"])
async def test_failing_terminal_is_an_error_and_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, how: str
):
    async with talk(tmp_path) as it:
        use, why, ended = run("test 1"), f"the editor refused {method}: {method} is in `refuses`", asyncio.Event()
        if how == "refuses":
            it.editor.refuses.add(method)
        else:
            why = f"the editor did not answer {method} within 0.05 s"
            it.editor.waits |= {"terminal/wait_for_exit": ended, method: asyncio.Event()}
        if (method, how) == ("terminal/wait_for_exit", "deaf"):
            use, why = run("sleep 600", timeout=0.5), "[timed out after 0.5 s"
        if (method, how) == ("terminal/create", "deaf"):
            monkeypatch.setattr(editors, "ANSWER_TIMEOUT", 0.05)
        using = asyncio.ensure_future(it.use(use))
        if (method, how) == ("terminal/output", "deaf"):
            await it.editor.until(lambda editor: "terminal/wait_for_exit" in editor.list_requested_methods())
            monkeypatch.setattr(
                editors, "ANSWER_TIMEOUT", 0.05
            )  # only now: the other requests are answered, perhaps slowly
            ended.set()
        if (method, how) == ("terminal/create", "refuses"):
            assert await using == f"[no output]\n[not in the editor's terminal: {why}]"
        else:
            assert why in await using
        for event in it.editor.waits.values():
            event.set()
        await it.editor.until(lambda editor: not editor.terminals)
        assert it.editor.list_requested_methods().count("terminal/release") == it.editor.opened_terminals
        monkeypatch.setattr(editors, "ANSWER_TIMEOUT", 30)
        it.editor.refuses.clear()
        assert await it.use(run("echo again")) == "again"


ERRORS = [
    RpcError(-32602, "Invalid params", {"reason": "env is not allowed"}),
    RpcError(-32602, "Invalid params", "env is not allowed"),
    RpcError(-32602, "env is not allowed"),
    RpcError(-32602, "Invalid params", {"env": ["env is not allowed"]}),
    RpcError(-32602, "Invalid params", details="env is not allowed"),
]


@pytest.mark.posix("the commands are those of a POSIX shell")
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("asks", [True, False])
async def test_command_that_the_client_does_not_start_runs_here_only_if_the_user_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RpcError, asks: bool
):
    async def refuse(editor: Editor, request: Any) -> Any:
        raise error

    monkeypatch.setattr(Editor, "on_create", refuse)
    async with talk(tmp_path, rules=() if asks else ("terminal:touch *",)) as it:
        text = await it.use(run("touch made"))
    assert "the editor refused terminal/create: " in text
    assert "env is not allowed" in text
    assert files_in(tmp_path) == (["made"] if asks else [])
    assert text.startswith("The command was not run: ") is not asks
    assert "stays" not in text


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_command_runs_here_if_the_client_does_not_know_terminals_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(editor: Editor, request: Any) -> Any:
        raise RpcError(METHOD_NOT_FOUND, "Method not found: terminal/create")

    monkeypatch.setattr(Editor, "on_create", refuse)
    async with talk(tmp_path, rules=("terminal:touch *",)) as it:
        await it.use(run("touch made"))
    assert files_in(tmp_path) == ["made"]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_client_gets_no_variable_that_runs_code_and_none_that_commands_have_set(tmp_path: Path):
    async with talk(tmp_path) as it:
        await it.use(run("export PYTHONPATH=lib LD_LIBRARY_PATH=lib PATH=/opt/none:$PATH; unset PAGER"))
        assert (await it.use(run("echo $PYTHONPATH [$PAGER] ${PATH%%:*}"))) == "lib [] /opt/none"
        created = [params for method, params in it.editor.requests if method == "terminal/create"]
    names = {variable.name for params in created for variable in params.env}
    assert not names & {"BASH_ENV", "ENV", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "PROMPT_COMMAND"}


async def test_command_that_the_client_does_not_kill_is_still_reported(tmp_path: Path):
    async with talk(tmp_path) as it:
        it.editor.refuses.add("terminal/kill")
        assert (await overlong(it, "echo begun; sleep 600"))[0] == "begun"
        await it.editor.until(lambda editor: not editor.terminals)


async def test_output_cut_by_the_client_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with talk(tmp_path) as it:
        text = await it.use(run("yes | head -c 2000000; echo the end"))
        assert text.startswith("[… the beginning was left out here")
        assert text.endswith("\ny\nthe end")
        assert 29_000 < len(text) <= 30_000
        monkeypatch.setattr(editors, "MAX_OUTPUT_BYTES", 20)
        text = await it.use(run("seq 1000"))
        assert text.startswith("[… the beginning was left out here")
        assert text.endswith("\n999\n1000")


async def test_commands_and_edits_run_in_parallel(tmp_path: Path):
    async with talk(tmp_path) as it:
        meet = "touch {0}; while [ ! -e {1} ]; do sleep 0.01; done; echo met"
        await it.use(run(meet.format("a", "b")), edit("create", "c", file_text="c\n"), run(meet.format("b", "a")))
        answers = [message["content"] for message in it.model.requests[-1]["messages"][-3:]]
        assert (answers[0], answers[2]) == ("met\n", "met\n")
        assert (tmp_path / "c").read_text() == "c\n"
        await it.editor.until(lambda editor: not editor.terminals)


async def test_sessions_do_not_see_each_others_buffers(tmp_path: Path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with talk(tmp_path / "one") as it:
        other = await it.editor.new_session(str(tmp_path / "two"))
        it.write("a.py", "one\n")
        await it.use(edit("view", "a.py"))
        it.id, first = other.session_id, it.id
        assert "does not exist" in await it.use(edit("view", "a.py"))
        await it.use(run("true"))
    asked = [(method, params.session_id) for method, params in it.editor.requests]
    assert asked[0] == ("fs/read_text_file", first)
    assert {session for _, session in asked[1:]} == {it.id}


# The same either way

COMMANDS = [
    "true",
    "false",
    "echo out; echo err >&2; exit 3",
    "printf 'no newline'",
    "printf '\\033[31mred\\033[0m\\r\\nprogress 1\\rprogress 2\\n'",
    "kill -TERM $$",
    "kill -SEGV $$",
    "no-such-command-here",
    "echo (",
    "seq 20000",
    "head -c 300000 /dev/zero | tr '\\0' x",
    "printf '\\377\\376 no text'",
    "cat <<'X'\n'quotes' \"and\" $dollars `ticks` \\ back\nX",
    "for n in 1 2 3; do\n  echo line $n\ndone\n# a comment",
    "cat; read answer; echo $?",
    "git commit",
    "echo '日本語 ✓ é'",
    "",
    " \n",
    "cd /; pwd",
    "pwd; export GREETING='hello  world'; unset PAGER",
    'pwd; echo "$GREETING [$PAGER]"',
    "exec >&- 2>&-; exit 4",
    "echo a\0b",
]
EDITS = [
    edit("view", "."),
    edit("create", "a.py", file_text="one\ntwo\nthree\n"),
    edit("view", "a.py"),
    edit("view", "a.py", view_range=[2, -1]),
    replace("a.py", "two", "2"),
    replace("a.py", "twoo", "2"),
    replace("a.py", "e", "E"),
    edit("insert", "a.py", insert_line=3, new_str="four"),
    edit("insert", "a.py", insert_line=9, new_str="nine"),
    edit("create", "a.py", file_text="other\n"),
    edit("undo_edit", "a.py"),
    edit("undo_edit", "a.py"),
    edit("create", "sub/b.txt", file_text="b"),
    replace("sub/b.txt", "b", "B"),
    edit("undo_edit", "sub/b.txt"),
    edit("undo_edit", "sub/b.txt"),
    edit("undo_edit", "sub/b.txt"),
    edit("view", "crlf.txt"),
    replace("crlf.txt", "one\ntwo", "1\n2"),
    edit("create", "crlf.txt", file_text="new\ntext\n"),
    replace("latin.txt", "caf", "th"),
    edit("view", "binary"),
    edit("view", "missing"),
    edit("view", "../.."),
    edit("create", "empty", file_text=""),
    edit("view", "empty"),
    edit("create", "empty", file_text="no longer\n"),
    edit("nonsense", "a.py"),
    edit("create", "sub", file_text="a folder"),
]


@pytest.mark.slow
async def test_model_reads_the_same_with_and_without_the_client(tmp_path: Path):
    results: list[list[str]] = []
    diffs: list[list[Any]] = []
    for name, capabilities in (("local", NOTHING), ("editor", EVERYTHING)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "crlf.txt").write_bytes(b"one\r\ntwo\r\n")
        (folder / "latin.txt").write_bytes(b"caf\xe9\n")
        (folder / "binary").write_bytes(b"\0\1")
        async with talk(folder, capabilities) as it:
            uses = [*EDITS, *map(run, COMMANDS), run("sleep 600", timeout=0.3), run("true", cwd="gone")]
            answers = [(await it.use(use)).replace(str(folder), "FOLDER") for use in uses]
            # A client's terminal may add or remove the CR of a line end, and cannot tell what it does not show.
            answers = [answer.replace("\r\n", "\n").replace(UNSHOWN_NOTE, "").rstrip("\n") for answer in answers]
            answers = [re.sub(r"/\S*/crow-terminal-\S+", "FILE", answer) for answer in answers]
            # A client's terminal evaluates the command, so the shell's words for a syntax error are others.
            results.append([re.sub("bash: (-c|eval): |set --; ", "", answer) for answer in answers])
            updates = [update for update in it.editor.of(ToolCallUpdate) if update.status != "in_progress"]
            diffs.append([part for update in updates for part in update.content or [] if isinstance(part, DiffContent)])
            diffs[-1] = [(part.path.replace(str(folder), ""), part.old_text, part.new_text) for part in diffs[-1]]
            assert bool(it.editor.requests) == (capabilities is EVERYTHING)
    for local, editor in zip(*results, strict=True):
        assert editor == local
    assert diffs[0] == diffs[1]
    names = files_in(tmp_path / "local")
    assert files_in(tmp_path / "editor") == names
    for name in names:
        local, editor = tmp_path / "local" / name, tmp_path / "editor" / name
        assert local.is_dir() or local.read_bytes() == editor.read_bytes()


# What a command has printed so far


def beats(editor: Editor) -> list[str]:
    """Return the texts that were shown while commands ran."""
    running = [update for update in editor.of(ToolCallUpdate) if not update.status]
    return [part.content.text for update in running for part in update.content or []]  # type: ignore[union-attr]


async def test_local_command_shows_its_output_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "WATCH_INTERVAL", 0.01)
    async with talk(tmp_path, FILES) as it:
        it.uses = [run("echo one; until [ -e go ]; do sleep 0.01; done; echo two")]
        turn = asyncio.ensure_future(it.editor.prompt(it.id, "go"))
        await it.editor.until(lambda editor: beats(editor) == ["```\none\n\n```"])
        it.write("go", "")
        await turn
        assert it.last_update.content == [BlockContent(content=TextBlock(text="```\none\ntwo\n```"))]
        assert it.model.requests[-1]["messages"][-1]["content"] == "one\ntwo\n"


async def test_shown_output_of_a_running_command_is_short_and_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "WATCH_INTERVAL", 0.01)
    async with talk(tmp_path, NOTHING, known=["canary-Zeisig"]) as it:
        lines = "for n in $(seq 1 30000); do echo $n canary-Zeisig; done"
        it.uses = [run(f"{lines}; until [ -e go ]; do sleep 0.01; done")]
        turn = asyncio.ensure_future(it.editor.prompt(it.id, "go"))
        await it.editor.until(lambda editor: any("\n30000 " in beat for beat in beats(editor)))
        it.write("go", "")
        await turn
        assert all(len(beat) < 4_100 for beat in beats(it.editor))
        assert not any("canary" in beat or "Zeisig" in beat for beat in beats(it.editor))
        before, _, rest = beats(it.editor)[-1].removeprefix("```\n… ").partition(" lines before\n")
        assert int(before) == int(rest.split()[0]) - 1


async def test_quick_command_and_command_in_a_terminal_show_no_output_while_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "WATCH_INTERVAL", 3600)
    async with talk(tmp_path, NOTHING) as it:
        await it.use(run("echo one"))
        assert beats(it.editor) == []
    monkeypatch.setattr(processes, "WATCH_INTERVAL", 0.01)
    async with talk(tmp_path, TERMINALS) as it:
        await it.use(run("echo one; sleep 0.1; echo two"))
        (update,) = [update for update in it.editor.of(ToolCallUpdate) if not update.status]
        assert update.content == [TerminalContent(terminal_id="terminal-1")]


async def test_processes_of_a_session_end_with_it(tmp_path: Path):
    async with talk(tmp_path, NOTHING) as it:
        await it.use(
            run("echo $$ > one; mv one 1.pid; sleep 999", wait=0.1),
            run("echo $$ > two; mv two 2.pid; sleep 999", session="a", wait=0.1),
            run("(sleep 999 & echo $! > three; mv three 3.pid)"),
        )
        while len(files := [name for name in files_in(tmp_path) if name.endswith(".pid")]) < 3:
            await asyncio.sleep(0.01)
        await it.crow.close(it.crow.sessions[it.id])
        while any(is_alive(int((tmp_path / name).read_text())) for name in files):
            await asyncio.sleep(0.01)  # they are killed, but may need time to end


# Whatever happens


@dataclass
class SharedEditing:
    """A state machine in which the model and the user edit the same files."""

    it: Talk
    read: bool
    write: bool

    def now(self, name: str) -> str | None:
        """Return the text that the model should read."""
        path = self.it.folder / name
        disk = path.read_bytes().decode() if path.exists() else None
        if not self.read or disk is None:
            return disk
        buffer = self.it.editor.buffers.get(str(path)) or disk
        if buffer.replace("\r\n", "\n") == disk.replace("\r\n", "\n"):
            return disk
        windows = disk.count("\r\n") * 2 > disk.count("\n")
        return buffer.replace("\n", "\r\n") if windows and "\r" not in buffer else buffer

    async def step(self, who: str, name: str, what: Any) -> None:
        path = str(self.it.folder / name)
        buffers = self.it.editor.buffers
        match who:
            case "types":
                buffers[path] = what
            case "saves" if path in buffers:
                self.it.write(name, buffers.pop(path))
            case "writes":
                self.it.write(name, what)
            case "formats":
                self.it.editor.on_save = str.upper if what else str
            case "model":
                before = self.now(name)
                await self.it.use({"name": "file_editor", "arguments": {"path": name, **what}})
                if self.it.last_update.status != "completed" or not isinstance(
                    self.it.last_update.content[0], DiffContent
                ):  # type: ignore[index]
                    assert self.now(name) == before
                    return
                change = self.it.crow.sessions[self.it.id].log[-2]["crow"]["changes"][0]
                assert change["old"] == before
                if not self.write and path in buffers:
                    buffers.pop(path)  # the disk has changed, and the user reloads it
                assert change["new"] == self.now(name)


NAMES = st.sampled_from(["a", "b"])
TEXTS = st.builds(
    lambda words, newline, end: newline.join(words) + end,
    st.lists(st.sampled_from(["one", "two", "é日", ""]), max_size=4),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "\n", "\r\n"]),
)
USES = st.one_of(
    st.just({"command": "view"}),
    st.just({"command": "undo_edit"}),
    st.builds(lambda text: {"command": "create", "file_text": text}, TEXTS),
    st.builds(lambda text: {"command": "insert", "insert_line": 0, "new_str": text}, TEXTS),
    st.builds(
        lambda old, new: {"command": "str_replace", "old_str": old, "new_str": new},
        st.sampled_from(["one", "two", "é日", "one\ntwo"]),
        TEXTS,
    ),
)
STEPS = st.one_of(
    *[st.tuples(st.just("model"), NAMES, USES)] * 3,
    st.tuples(st.just("types"), NAMES, TEXTS),
    st.tuples(st.just("writes"), NAMES, TEXTS),
    st.tuples(st.just("saves"), NAMES, st.none()),
    st.tuples(st.just("formats"), NAMES, st.booleans()),
)


@given(
    files=st.tuples(TEXTS, TEXTS),
    steps=st.lists(STEPS, min_size=4, max_size=12),
    read=st.booleans(),
    write=st.booleans(),
)
@settings(max_examples=settings.default.max_examples * 4 // 10, deadline=None)
def test_every_diff_is_of_the_real_states_before_and_after(
    files: tuple[str, str], steps: list[Any], read: bool, write: bool
):
    async def play(folder: Path) -> None:
        async with talk(folder, offers(read=read, write=write)) as it:
            desk = SharedEditing(it, read, write)
            for name, text in zip("ab", files, strict=True):
                await desk.step("writes", name, text)
                await desk.step("model", name, {"command": "view"})
            for step in steps:
                await desk.step(*step)

    with TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder).resolve()))
