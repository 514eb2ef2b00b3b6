"""Turns with a key: an interrupted one goes on, here or in another process, and one that has ended is not run again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crow_agent import Agent, AgentError, AgentSession, PromptFailed, tool
from crow_core.acp.schema import AgentMessageChunk, SessionUpdate
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.messages.message import INTERRUPTED, Message, marker_kind
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedCall
from pydantic import BaseModel
from sqlalchemy import create_engine, text

Make = Callable[..., Agent]
PROGRAM = Path(__file__).with_name("keyed_program.py")


def run_program(folder: Path, store: str, *keys: str, killed: bool) -> list[Any]:
    """Run the program in a folder; return the results of the turns that ended."""
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "CROW_HOME": str(folder / "crow"), "STORE": store}
    command = [sys.executable, str(PROGRAM), *keys, *([] if killed else ["-"])]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


EFFECTS = {
    "draft": ["note", "put"],
    "assistant": ["note", "put"],
    "before_tool": ["put"],
    "note": ["note", "put"],
    "put": ["note", "put", "put"],
    "result": ["note", "put"],
    "steered": ["note", "put"],
    "joined": ["note", "put"],
    "ended": ["note", "put"],
}
"""The runs of tools in a turn that was killed once, by the moment: `note` runs at most once, `put` is idempotent."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("store", "moments"), [("sqlite", [*EFFECTS]), ("postgresql", ["note", "ended"])], indirect=["store"]
)
def test_killed_turn_goes_on_and_repeats_no_completed_call(tmp_path: Path, store: str, moments: list[str]) -> None:
    results: list[Any] = []
    for at in range(len(moments)):
        before, results = results, run_program(tmp_path, store, *moments[: at + 1], killed=True)
        assert results[: len(before)] == before, "same key, same result"
    results = run_program(tmp_path, store, *moments, killed=False)
    for moment, (said, stop_reason, calls, usage) in zip(moments, results, strict=True):
        is_interrupted = moment in ("before_tool", "note")
        words = " in blue" if moment == "joined" else ""  # those of "steered" were not stored, nor said to be taken
        assert (said, stop_reason) == (f"Done: {INTERRUPTED if is_interrupted else 'done'} / done{words}", "end_turn")
        assert calls == [["note", "failed" if is_interrupted else "completed"], ["put", "completed"]]
        assert usage > 0
    effects = (tmp_path / "effects").read_text().splitlines()
    assert effects == [f"{name} {moment}" for moment in moments for name in EFFECTS[moment]]


class Notes:
    """Tools that write notes, the model's replies, and the sessions of the app."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.sessions: list[Session] = []
        self.hangs = False
        self.began, self.release = asyncio.Event(), asyncio.Event()

        @tool
        async def note(text: str) -> str:
            """Write a note."""
            return await self.run("note", text)

        @tool(idempotent=True)
        async def put(text: str) -> str:
            """Put a note in its place."""
            return await self.run("put", text)

        self.tools = [note, put]

    async def run(self, name: str, text: str) -> str:
        self.written.append(f"{name} {text}")
        self.began.set()
        if self.hangs:
            await self.release.wait()
        return "done"

    def watch(self, crow: Crow) -> None:
        """Collect the sessions of an app."""
        crow.session_start(self.sessions.append)

    @property
    def log(self) -> list[Message]:
        """The log of the last session."""
        return self.sessions[-1].log.entries


def call(name: str, text: str) -> Reply:
    asked: ScriptedCall = {"name": name, "arguments": {"text": text}}
    return Reply(tool_calls=[asked])


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def make(make_agent: Make, notes: Notes) -> Make:
    """Make an agent with the tools of `notes`."""

    def make(*replies: Any, extensions: Any = (), **options: Any) -> Agent:
        return make_agent(*replies, tools=notes.tools, extensions=[notes.watch, *extensions], **options)

    return make


async def interrupt(agent: Agent, session: AgentSession, notes: Notes, words: str, key: str) -> None:
    """Close an agent while a tool runs in a turn."""
    notes.hangs = True
    turn = asyncio.ensure_future(session.prompt(words, key=key))
    await notes.began.wait()
    await agent.close()
    await asyncio.wait([turn])
    turn.exception()
    notes.hangs = False
    notes.began.clear()


class Answer(BaseModel):
    n: int


def test_ended_turn_gives_the_same_result_and_runs_nothing(make: Make, notes: Notes) -> None:
    async def main() -> None:
        given = Reply(tool_calls=[{"name": "give_result", "arguments": {"n": 4}}])
        async with make(call("note", "a"), Reply("Well."), given) as agent:
            session = await agent.session("work", create=True)
            first = await session.prompt("Go.", key="1")
            typed = await session.prompt("How many?", key="2", output=Answer)
            again = await session.prompt("Go.", key="1")
            assert (again.text, again.usage, again.tool_calls) == (first.text, first.usage, first.tool_calls)
        async with make() as agent:
            session = await agent.session("work", create=True)
            later = await session.prompt("Go.", key="1")
            assert (later.text, later.usage, later.stop_reason) == ("Well.", first.usage, "end_turn")
            assert [(done.name, done.status) for done in later.tool_calls] == [("note", "completed")]
            value = await session.prompt("How many?", key="2", output=Answer)
            assert value.output == typed.output == Answer(n=4)
        assert notes.written == ["note a"]

    asyncio.run(main())


def test_key_of_another_prompt_is_refused(make: Make) -> None:
    async def main() -> None:
        async with make(Reply("Hello.")) as agent:
            session = await agent.session()
            await session.prompt("Hello?", key="1")
            with pytest.raises(PromptFailed, match="The key '1' belongs to another prompt"):
                await session.prompt("Hello!", key="1")
            assert (await session.prompt("Hello?", key="1")).text == "Hello."

    asyncio.run(main())


def test_turn_without_a_key_leaves_no_markers(make: Make, notes: Notes) -> None:
    async def main() -> None:
        async with make(call("note", "a"), Reply("Well."), Reply("Yes.")) as agent:
            session = await agent.session()
            await session.prompt("Go.")
            await session.prompt("Go.")
        assert not {marker_kind(entry) for entry in notes.log} & {"opened", "started", "ended"}
        assert "spent" not in str(notes.log)

    asyncio.run(main())


def test_failed_turn_goes_on_with_its_key(make: Make, notes: Notes) -> None:
    async def main() -> None:
        async with make(call("note", "a"), Reply(error=ModelError("The model is down."))) as agent:
            session = await agent.session("work", create=True)
            with pytest.raises(PromptFailed):
                await session.prompt("Go.", key="1")
        async with make(Reply("Well.")) as agent:
            session = await agent.session("work")
            result = await session.prompt("Go.", key="1")
            assert (result.text, len(result.tool_calls), notes.written) == ("Well.", 1, ["note a"])
            roles = [entry["role"] for entry in notes.log if "role" in entry]
            assert roles == ["user", "assistant", "tool", "assistant"]

    asyncio.run(main())


@pytest.mark.parametrize(("name", "answer", "runs"), [("note", INTERRUPTED, 1), ("put", "done", 2)])
def test_agent_that_is_closed_appends_nothing_to_a_turn_which_goes_on(
    make: Make, notes: Notes, name: str, answer: str, runs: int
) -> None:
    async def main() -> None:
        agent = make(call(name, "a"))
        await interrupt(agent, await agent.session("work", create=True), notes, "Go.", "1")
        assert [entry["role"] for entry in notes.log if "role" in entry] == ["user", "assistant"]
        async with make(Reply("Well.")) as agent:
            result = await (await agent.session("work", create=True)).prompt("Go.", key="1")
            assert (result.text, result.stop_reason) == ("Well.", "end_turn")
            assert [entry.get("content") for entry in notes.log if entry.get("role") == "tool"] == [answer]
        assert notes.written == [f"{name} a"] * runs

    asyncio.run(main())


def test_cut_reply_is_dropped_and_asked_for_again(make: Make, notes: Notes) -> None:
    async def main() -> None:
        agent = make(call("note", "a"), Reply("Half a", hang=True))
        session = await agent.session("work", create=True)
        shown = asyncio.Event()

        def look(update: SessionUpdate) -> None:
            if isinstance(update, AgentMessageChunk):
                shown.set()

        turn = asyncio.ensure_future(session.prompt("Go.", key="1", on_update=look))
        await shown.wait()
        await session.cancel()
        assert (await turn).stop_reason == "cancelled"
        await agent.close()
        async with make(Reply("A whole reply.")) as agent:
            result = await (await agent.session("work")).prompt("Go.", key="1")
            assert (result.text, notes.written) == ("A whole reply.", ["note a"])
            model: Any = agent.model
            assert "Half" not in str(model.requests)

    asyncio.run(main())


def test_interrupted_turn_is_given_up_by_another_prompt(make: Make, notes: Notes) -> None:
    async def main() -> None:
        agent = make(call("note", "a"))
        await interrupt(agent, await agent.session("work", create=True), notes, "Go.", "1")
        async with make(Reply("Hello.")) as agent:
            session = await agent.session("work", create=True)
            assert (await session.prompt("Hello?", key="2")).text == "Hello."
            given_up = await session.prompt("Go.", key="1")
            assert (given_up.stop_reason, given_up.tool_calls[0].status) == ("cancelled", "failed")

    asyncio.run(main())


def test_session_with_an_id_belongs_to_one_agent(make: Make) -> None:
    async def main() -> None:
        async with make() as one, make(Reply("Hello.")) as other:
            session = await one.session("work", create=True)
            with pytest.raises(AgentError, match="Session work is open in process"):
                await other.session("work", create=True)
            await session.close()
            assert (await (await other.session("work", create=True)).prompt("Hello?")).text == "Hello."

    asyncio.run(main())


@pytest.mark.parametrize("id", ["a" * 65, "../up", "two words", "é", ".hidden", "a\n"])
def test_id_that_no_store_can_hold_is_refused(make: Make, id: str) -> None:
    async def main() -> None:
        async with make() as agent:
            with pytest.raises(PromptFailed, match="is not an id"):
                await agent.session(id, create=True)

    asyncio.run(main())


def test_agent_that_lost_its_session_leaves_the_turn_to_the_next(make: Make, notes: Notes, home: Path) -> None:
    async def main() -> None:
        async with make(call("note", "a"), Reply("Never stored.")) as lost:
            session = await lost.session("work", create=True)
            notes.hangs = True
            turn = asyncio.ensure_future(session.prompt("Go.", key="1"))
            await notes.began.wait()
            engine = create_engine(f"sqlite:///{home}/crow/crow.db")
            with engine.begin() as connection:  # as if no heartbeat had come for long
                connection.execute(text("UPDATE sessions SET owner = NULL"))
            engine.dispose()
            async with make(Reply("Well.")) as agent:
                taken = await agent.session("work", create=True)
                assert (await taken.prompt("Go.", key="1")).text == "Well."
                notes.release.set()
                with pytest.raises(PromptFailed, match="was taken over"):
                    await turn
                assert (await taken.prompt("Go.", key="1")).text == "Well."
        async with make() as agent:
            await agent.session("work")
            roles = [entry["role"] for entry in notes.log if "role" in entry]
            assert roles == ["user", "assistant", "tool", "assistant"]
        assert notes.written == ["note a"]

    asyncio.run(main())
