"""Commands in the background: sent there by the user, listed, brought back, stopped, told to the model."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crow_agent.app import build
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    AvailableCommandsUpdate,
    ClientCapabilities,
    ClientSessionCapabilities,
    CloseSessionRequest,
    LoadSessionRequest,
    NoticeCapabilities,
    NoticeUpdate,
    SessionInfoUpdate,
    ToolCallUpdate,
)
from crow_core.acp.shared_methods import BACKGROUND_METHOD
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.editor import Editor
from crow_core.testing.script import ScriptedCall as Use
from crow_testing.process_states import is_alive

pytestmark = [pytest.mark.anyio, pytest.mark.posix]

NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))


def run(*commands: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=[Use(name="terminal", arguments={"command": line, **arguments}) for line in commands])


def look(session: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=[Use(name="terminal", arguments={"session": session, **arguments})])


@dataclass
class Talk:
    """A session of the whole agent with a scripted model."""

    editor: Editor
    id: str
    model: ScriptedModel
    folder: Path

    async def background(self, **params: Any) -> dict[str, Any]:
        return await self.editor.request(BACKGROUND_METHOD, {"sessionId": self.id, **params})

    async def shows(self, text: str) -> None:
        """Wait until a tool call shows a text."""
        await self.editor.until(lambda editor: any(text in str(each.content) for each in editor.of(ToolCallUpdate)))

    async def prompt(self, text: str = "go", send_at: str = "") -> None:
        """Run a turn; send what runs to the background when it shows `send_at`."""
        turn = asyncio.ensure_future(self.editor.prompt(self.id, text))
        if send_at:
            await self.shows(send_at)
            await self.background(action="send")
        await turn

    async def close(self) -> None:
        await self.editor.request("session/close", CloseSessionRequest(session_id=self.id))

    async def load(self) -> None:
        """Open the stored session again, and wait for what is said at its start."""
        self.editor.updates.clear()
        await self.editor.request("session/load", LoadSessionRequest(session_id=self.id, cwd=str(self.folder)))
        await self.editor.until(lambda editor: editor.of(AvailableCommandsUpdate))

    async def until_ended(self, count: int = 1) -> None:
        """Wait until so many pieces of work have ended."""
        await self.editor.until(lambda editor: len(self.notices) >= count)

    @property
    def notices(self) -> list[str]:
        return [str(each.title) for each in self.editor.of(NoticeUpdate) if "background" in str(each.title)]

    @property
    def told(self) -> list[str]:
        """The messages of the last request to the model, after the system prompt."""
        return [str(message["content"]) for message in self.model.requests[-1]["messages"][1:]]


@asynccontextmanager
async def converse(tmp_path: Path, *script: Any) -> AsyncGenerator[Talk]:
    (folder := tmp_path / "project").mkdir(exist_ok=True)
    model = ScriptedModel(list(script))
    env = {"CROW_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    crow = await build(env, models={"scripted": model}, mode="yolo")
    async with connect(crow, capabilities=NOTICES) as editor:
        session = await editor.new_session(str(folder))
        yield Talk(editor, session.session_id, model, folder)


async def test_a_running_command_goes_to_the_background_and_the_turn_goes_on(tmp_path: Path):
    async with converse(tmp_path, run("echo begun; sleep 100"), Reply("It goes on.")) as talk:
        await talk.prompt(send_at="begun")
        assert talk.editor.text == "It goes on."
        assert talk.told[-1].startswith('begun\n[still running in session "1"')
        (work,) = (await talk.background())["work"]
        assert (work["name"], work["state"], work["lastLine"]) == ("1", "running", "begun")
        assert work["title"] == "echo begun; sleep 100"


async def test_a_command_that_has_not_begun_yet_goes_to_the_background_as_soon_as_it_has(tmp_path: Path):
    async with converse(tmp_path, run("sleep 100"), Reply("It goes on.")) as talk:
        turn = asyncio.ensure_future(talk.prompt())
        await talk.editor.until(lambda editor: any(each.status == "in_progress" for each in editor.of(ToolCallUpdate)))
        assert len((await talk.background(action="send"))["sent"]) == 1
        await turn
        assert talk.editor.text == "It goes on."


async def test_a_command_that_ends_before_crow_knows_its_start_does_not_go_to_the_background(tmp_path: Path):
    known = {*threading.enumerate()}

    async def sleep_until_the_command_has_ended() -> None:
        while not (new := [each for each in {*threading.enumerate()} - known if each.name == "command"]):
            await asyncio.sleep(0)
        new[0].join()  # meanwhile the event loop stands still

    command = "sleep 600 & echo $! > pid"
    async with converse(tmp_path, run(command, timeout=0.1), run("sleep 0.5"), Reply("Done.")) as talk:
        busy = asyncio.ensure_future(sleep_until_the_command_has_ended())
        await talk.prompt()
        await busy
        pid = int((talk.folder / "pid").read_text())
        assert is_alive(pid)  # the timeout of a command that has ended stops nothing
        os.kill(pid, signal.SIGKILL)
        assert [each.meta for each in talk.editor.of(SessionInfoUpdate) if each.meta] == []
        assert (await talk.background())["work"] == []


async def test_its_end_is_said_to_the_user_at_once_and_to_the_model_at_the_next_turn(tmp_path: Path):
    script = [run("echo begun; read x < go; exit 3"), Reply("Later."), look("1"), Reply("It failed.")]
    async with converse(tmp_path, *script) as talk:
        os.mkfifo(talk.folder / "go")
        await talk.prompt(send_at="begun")
        (talk.folder / "go").write_text("\n")
        await talk.until_ended()
        assert talk.notices == ["In the background, echo begun; read x < go; exit 3 has ended (exit code 3)."]
        await talk.prompt("and?")
        second = talk.model.requests[2]["messages"][-1]["content"]
        assert second.startswith("and?")
        assert "This has ended in the background (exit code 3): echo begun" in second
        assert 'Call terminal with the session "1"' in second
        assert talk.told[-1].endswith("[exit code 3]")
        assert (await talk.background())["work"] == []


async def test_the_model_that_has_looked_is_not_told_again(tmp_path: Path):
    script = [run("echo begun; read x < go"), Reply("Later."), look("1", wait=60), Reply("Ended."), Reply("Yes.")]
    async with converse(tmp_path, *script) as talk:
        os.mkfifo(talk.folder / "go")
        await talk.prompt(send_at="begun")
        turn = asyncio.ensure_future(talk.prompt("wait"))
        await talk.editor.until(lambda editor: len(talk.model.requests) == 3)
        await asyncio.to_thread((talk.folder / "go").write_text, "\n")
        await turn
        await talk.prompt("and?")
        assert not any("has ended in the background" in text for text in talk.told)


async def test_a_command_that_is_brought_back_is_waited_for_and_can_be_sent_again(tmp_path: Path):
    script = [run("echo begun; sleep 100"), Reply("Later."), look("1", wait=60), Reply("Still.")]
    async with converse(tmp_path, *script) as talk:
        await talk.prompt(send_at="begun")
        turn = asyncio.ensure_future(talk.prompt("/background 1"))
        await talk.editor.until(lambda editor: len(talk.model.requests) == 3)
        while not (await talk.background(action="send"))["sent"]:
            await asyncio.sleep(0)
        await turn
        assert (
            'I brought this back from the background: echo begun; sleep 100. Call terminal with the session "1"'
            in (talk.model.requests[2]["messages"][-1]["content"])
        )
        assert len((await talk.background())["work"]) == 1


async def test_a_stopped_command_ends_with_its_processes(tmp_path: Path):
    script = [run("echo $$ > pid; echo begun; sleep 100 & wait"), Reply("Later."), Reply("Stopped.")]
    async with converse(tmp_path, *script) as talk:
        await talk.prompt(send_at="begun")
        await talk.prompt("/background stop")
        assert "Stopped: echo $$ > pid" in talk.editor.text
        assert not is_alive(int((talk.folder / "pid").read_text()))
        await talk.prompt("and?")
        assert "killed by SIGKILL" in talk.told[-1]
        assert talk.notices == []


async def test_the_session_ends_its_commands_and_says_so(tmp_path: Path):
    async with converse(tmp_path, run("echo $$ > pid; echo begun; sleep 100"), Reply("Later.")) as talk:
        await talk.prompt(send_at="begun")
        await talk.close()
        said = [str(each.title) for each in talk.editor.of(NoticeUpdate)]
        assert "Stopped with the session: echo $$ > pid; echo begun; sleep 100." in said
        assert not is_alive(int((talk.folder / "pid").read_text()))


async def test_the_next_resume_tells_what_was_stopped(tmp_path: Path):
    async with converse(tmp_path, run("echo begun; sleep 100"), Reply("Later."), Reply("I see.")) as talk:
        await talk.prompt(send_at="begun")
        await talk.close()
        await talk.load()
        said = [str(each.title) for each in talk.editor.of(NoticeUpdate)]
        assert "Stopped with the session: echo begun; sleep 100." in said
        await talk.prompt("and?")
        assert "This ran in the background, and was stopped when the session was closed: echo begun" in talk.told[-1]
        await talk.close()
        await talk.load()
        assert not any("Stopped with" in str(each.title) for each in talk.editor.of(NoticeUpdate))


async def test_a_cancelled_turn_leaves_the_background_alone(tmp_path: Path):
    script = [run("echo $$ > pid; echo begun; sleep 100"), run("echo second; sleep 100")]
    async with converse(tmp_path, *script) as talk:
        turn = asyncio.ensure_future(talk.prompt(send_at="begun"))
        await talk.shows("second")
        await talk.editor.cancel(talk.id)
        await turn
        assert [work["title"] for work in (await talk.background())["work"]] == ["echo $$ > pid; echo begun; sleep 100"]
        assert is_alive(int((talk.folder / "pid").read_text()))


async def test_twenty_commands_and_ten_megabytes_are_listed_with_their_last_lines(tmp_path: Path):
    commands = [f"echo last-{n}; sleep 100" for n in range(19)]
    commands.append("head -c 10000000 /dev/zero | tr '\\0' 'x' | fold; echo; echo the end; sleep 100")
    async with converse(tmp_path, run(*commands), Reply("Later.")) as talk:
        turn = asyncio.ensure_future(talk.prompt())
        await talk.shows("the end")
        for n in range(19):
            await talk.shows(f"last-{n}")
        assert len((await talk.background(action="send"))["sent"]) == 20
        await turn
        works = (await talk.background())["work"]
        assert len({work["name"] for work in works}) == 20
        assert {work["lastLine"] for work in works} == {*(f"last-{n}" for n in range(19)), "the end"}
        shown = [each.meta for each in talk.editor.of(SessionInfoUpdate) if each.meta]
        assert len(shown[-1]["crow"]["background"]) == 20


async def test_nothing_to_send_an_unknown_name_and_an_unknown_action_are_one_sentence_each(tmp_path: Path):
    async with converse(tmp_path) as talk:
        assert await talk.background(action="send") == {"sent": [], "work": []}
        for params, sentence in (
            ({"action": "stop", "name": "9"}, "Nothing in the background has the name '9'. Nothing is there."),
            ({"action": "fly"}, "There is no action 'fly'. The actions are list, send, stop and tell."),
        ):
            with pytest.raises(RpcError) as failure:
                await talk.background(**params)
            assert failure.value.details == sentence
        await talk.prompt("/background")
        assert talk.editor.text == "Nothing is in the background."
