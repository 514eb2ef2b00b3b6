"""crow can be killed at any moment without losing anything it has shown.

Each session is continued by a chain of processes: one runs turns and is killed; the next loads the session, answers a
plain question, runs turns and is killed. CROW_SOAK is the number of kills, CROW_SEED repeats an earlier run.
"""

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from random import Random, randrange
from time import monotonic
from typing import Any

import pytest
from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    ClientCapabilities,
    ListSessionsRequest,
    LoadSessionRequest,
    SessionInfoUpdate,
    SessionNotification,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
    UsageUpdate,
    UserMessageChunk,
)
from crow_core.acp.transports import ChildTransport, spawn
from crow_core.messages.message import INTERRUPTED
from crow_core.testing import Editor, Raw, Reply, ScriptedServer
from crow_core.testing.script import FRAGMENT_LENGTH
from crow_persistence.checks import check
from crow_persistence.database import Database
from crow_testing.chaos import to_body
from msgspec import to_builtins
from sqlalchemy import text

SOAK = int(os.environ.get("CROW_SOAK") or 0)
KILLS = SOAK or 20
LINKS = 5
"""Number of kills of one session."""
AT_ONCE = 4
"""Number of concurrent sessions."""
LATE = 0.25
"""Seconds after which shown text is committed before more of it is shown."""

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120 + 20 * KILLS)]

Request = dict[str, Any]
Event = tuple[float, Any]
"""Time and event: an update, the text of a prompt when it was sent, None when its turn ended."""
Item = tuple[str, str, Any]
"""One item that a client shows: kind (user, reply or call), id, content."""


@dataclass(frozen=True)
class Moment:
    """Time of a kill: `after` seconds after the n-th event of a kind; at the latest after three turns."""

    what: str
    """Kind of event: byte of the model's stream (which then stops), update, update of a tool call (call), prompt, load.
    "" for never."""
    n: int = 1
    after: float = 0.0
    pace: float = 0.0
    """Seconds that the model takes for four letters."""


NEVER = Moment("")


def moments(random: Random, count: int) -> list[Moment]:
    """Return kills of all kinds, equally often and in random order."""
    found: list[Moment] = []
    while len(found) < count:
        pace = random.choice((0.0, 0.01))
        found += [
            Moment("byte", random.randint(1, 60_000), random.uniform(0, 0.8)),
            Moment("update", random.randint(1, 250), pace=pace),
            Moment("call", random.randint(1, 15), random.choice((0, 0.4)) * random.random(), pace),
            Moment("prompt", random.randint(2, 3), random.uniform(0, 0.1), pace),
            Moment("prompt", 2, random.uniform(0, 4), 0.01),
            Moment("load", 1, random.uniform(0, 1), pace),
        ]
    return random.sample(found[:count], count)


class Witness(Editor):
    """An editor that kills its agent at a moment, and records what it was shown."""

    def __init__(self, child: ChildTransport, moment: Moment) -> None:
        super().__init__(child)
        self.child, self.moment = child, moment
        self.events: list[Event] = []
        self.counted = Counter[str]()
        self.killed = False

    async def on_update(self, notification: SessionNotification) -> None:
        self.events.append((monotonic(), notification.update))
        self.count("update")
        if isinstance(notification.update, ToolCall | ToolCallUpdate):
            self.count("call")
        await super().on_update(notification)

    def count(self, what: str, n: int = 1) -> None:
        """Count events of a kind, and kill the agent when the moment has come."""
        before, self.counted[what] = self.counted[what], self.counted[what] + n
        if what == self.moment.what and before < self.moment.n <= self.counted[what]:
            asyncio.get_running_loop().call_later(self.moment.after, self.kill)

    def kill(self) -> None:
        self.killed = True
        self.child.process.kill()

    async def say(self, id: str, text: str) -> None:
        """Run a turn to its end. Raises ConnectionClosed when the agent is killed."""
        self.events.append((monotonic(), text))
        turn = asyncio.ensure_future(self.prompt(id, text))
        self.count("prompt")  # the task has sent the prompt by the time of a scheduled kill
        assert (await turn).stop_reason == "end_turn"
        self.events.append((monotonic(), None))


@asynccontextmanager
async def process(home: Path, folder: Path, url: str, model: str, moment: Moment = NEVER) -> AsyncGenerator[Witness]:
    """Run the real agent. It is killed at its moment, or at the end of the block; with NEVER it ends normally."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CROW_HOME": str(home),
        "LANG": "C.UTF-8",
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "key",
        "CROW_MODEL": model,
    }
    with (home / "stderr").open("ab") as stderr:
        witness = Witness(await spawn(sys.executable, ["-m", "crow_cli", "acp"], env, folder, stderr), moment)
    serving = asyncio.ensure_future(witness.connection.serve())
    try:
        with suppress(ConnectionClosed):
            await witness.initialize("witness", ClientCapabilities())
            yield witness
            if moment == NEVER:
                await witness.connection.close()
            else:
                witness.kill()
        assert witness.killed == (moment != NEVER), "it ended by itself"
    finally:
        witness.child.process.kill()
        await serving  # until its last line was read


def items(events: Sequence[Event]) -> list[Item]:
    """Return what the client shows, in order: each reply joined, each tool call in its last state."""
    found: dict[Any, Item] = {}
    for at, (_, update) in enumerate(events):
        match update:
            case str(text):
                found[at] = ("user", "", text)
            case UserMessageChunk(content=TextBlock(text=text)):
                found[at] = ("user", "", text)
            case AgentThoughtChunk(content=TextBlock(text=text), message_id=str(id)):
                thought, words = found[id][2] if id in found else ("", "")
                found[id] = ("reply", id, (thought + text, words))
            case AgentMessageChunk(content=TextBlock(text=text), message_id=str(id)):
                thought, words = found[id][2] if id in found else ("", "")
                found[id] = ("reply", id, (thought, words + text))
            case ToolCall(tool_call_id=id) | ToolCallUpdate(tool_call_id=id):
                before: dict[str, Any] = found[id][2] if id in found else {}
                found[id] = ("call", id, {**before, **to_builtins(update), "sessionUpdate": ""})
            case _:
                pass
    return list(found.values())


def chunks(events: Sequence[Event], id: str) -> list[int]:
    """Return the indexes of a reply's chunks."""
    return [at for at, (_, update) in enumerate(events) if getattr(update, "message_id", "") == id]


def is_over(events: Sequence[Event], id: str) -> bool:
    """Test whether anything was shown after the complete reply."""
    rest = events[chunks(events, id)[-1] + 1 :]
    return any(update is None or isinstance(update, ToolCall | UsageUpdate) for _, update in rest)


def is_interrupted(call: dict[str, Any]) -> bool:
    return call["status"] == "failed" and INTERRUPTED in str(call["content"])


@dataclass
class Chain:
    """One session as seen from outside."""

    home: Path
    folder: Path
    url: str
    id: str = ""
    turns: int = 0
    known: list[Item] = field(default_factory=list[Item])
    """The items of the last replay."""
    requests: list[Request] = field(default_factory=list[Request])
    """Requests to the model, without those whose prompt was lost before anything of its turn was shown."""
    said: set[str] = field(default_factory=set[str])
    """Everything the model has said: thoughts, then texts."""
    asked: float = 0.0
    """Time of the latest request."""
    now: Witness | None = None
    last: Witness | None = None
    """The editor of the last process, until its items were compared."""

    async def live(self, moment: Moment) -> None:
        """Continue the session in a new process, for three turns if it is not killed earlier."""
        async with process(self.home, self.folder, self.url, self.folder.name, moment) as self.now:
            await self.open(self.now)
            await self.now.say(self.id, "And now?")
            for _ in range(1 if moment == NEVER else 3):
                self.turns += 1
                await self.now.say(self.id, f"turn {self.turns}")

    async def open(self, witness: Witness) -> None:
        """Load the session and check that everything shown is there; start a new one when nothing was shown."""
        listed = await witness.request("session/list", ListSessionsRequest(cwd=str(self.folder)))
        titles = {found.session_id: found.title for found in listed.sessions}
        if self.id in titles:
            witness.count("load")
            request = LoadSessionRequest(session_id=self.id, cwd=str(self.folder), mcp_servers=[])
            await witness.request("session/load", request)
            self.compare(items(witness.events))
            named = [update.title for update in (self.last.of(SessionInfoUpdate) if self.last else [])]
            assert named in ([], [titles[self.id]])
        else:
            self.compare([])
            self.id = (await witness.new_session(str(self.folder))).session_id
        witness.events.clear()
        self.last = witness

    def compare(self, replayed: list[Item]) -> None:
        """Check that the replay repeats the last replay and everything shown since."""
        before, self.known = self.known, replayed
        assert replayed[: len(before)] == before
        events = self.last.events if self.last else []
        shown, there = items(events), replayed[len(before) :]
        if len(there) < len(shown) and shown[-1][0] == "user":  # nothing of the turn was shown
            _, _, prompt = shown.pop()
            self.requests = [request for request in self.requests if prompt not in str(request["messages"])]
        for mine, theirs in zip_longest(shown, there):
            match mine, theirs:
                case ("reply", id, (thought, words)), (None | (_, _, _)) if not is_over(events, id):
                    assert theirs is None or theirs[1] == id
                    kept = "".join(theirs[2]) if theirs else ""
                    assert (thought + words).startswith(kept) or kept in self.said
                    assert kept.startswith(self.due(id))
                    cut = [item for item in there if item[1] == f"{id}-cut"]
                    assert bool(kept) == (kept in self.said or bool(cut))
                case ("call", id, {"status": "pending" | "in_progress"}), ("call", same, call):
                    assert id == same
                    assert call["status"] == "completed" or is_interrupted(call)
                case None, ("call", _, call):  # requested in the last reply, but not shown
                    assert call["status"] == "completed" or is_interrupted(call)
                case None, ("reply", id, said):
                    assert id == f"{shown[-1][1]}-cut"
                    assert said == ("Interrupted here.\n", "")
                case _:
                    assert theirs == mine

    def due(self, id: str) -> str:
        """Return the text of a reply that must be stored: all of it that was shown more than LATE seconds before the
        model sent what was shown last. The time of sending follows from the model's pace, so this holds on slow
        machines, too."""
        assert self.last is not None
        pieces = [self.last.events[at] for at in chunks(self.last.events, id)]
        sent = (
            self.asked + self.last.moment.pace * sum(len(piece.content.text) for _, piece in pieces) / FRAGMENT_LENGTH
        )
        return "".join(piece.content.text for at, piece in pieces if at < sent - LATE)

    def answer(self, request: Request) -> Reply | Raw:
        """Reply as the model: three steps for a turn. Each tool call leaves a mark in a file."""
        assert self.now is not None
        self.asked = monotonic()
        self.requests.append(request)
        last = max(at for at, message in enumerate(request["messages"]) if message["role"] == "user")
        _, _, turn = request["messages"][last]["content"].rpartition("turn ")
        steps = Counter(message["role"] for message in request["messages"][last:])["assistant"]
        reply = scripted(turn, steps, self.now.moment.pace)
        self.said.add(reply.reasoning + reply.content)
        if self.now.moment.what != "byte":
            return reply
        stream = to_body(reply, request)
        rest = self.now.moment.n - self.now.counted["byte"]
        self.now.count("byte", len(stream))
        return Raw([stream[:rest]], hang=rest < len(stream))

    async def end(self) -> None:
        """Run a process that is not killed, then check everything."""
        await self.live(NEVER)
        async with process(self.home, self.folder, self.url, self.folder.name) as witness:
            await self.open(witness)
        for earlier, later in pairwise(self.requests):
            assert begins(later, earlier)
        marks = [mark for name in ("ran", "edits") for mark in (self.folder / name).read_text().split()]
        assert len({*marks}) == len(marks), "a call has run twice"
        for call in [call for kind, _, call in self.known if kind == "call"]:
            (mark,) = re.findall(r"mark[.\d]+", str(call["rawInput"]))
            assert mark in marks or is_interrupted(call)


def scripted(turn: str, steps: int, pace: float) -> Reply:
    """Return the model's reply; a short one unless the prompt is a numbered turn."""
    here = f"{turn}.{steps}"
    words = " ".join(f"{here}.{n}–ü🪶" for n in range(20))
    edit = {"command": "insert", "path": "edits", "insert_line": 0, "new_str": f"mark.{here}.2\n"}
    calls: list[Any] = [
        {"name": "terminal", "arguments": {"command": f"echo mark.{here}.0 >> ran; sleep 0.2; echo done"}},
        {"name": "terminal", "arguments": {"command": f"echo mark.{here}.1 | tee -a ran"}},
        {"name": "file_editor", "arguments": edit},
    ]
    if not turn.isdecimal():
        return Reply("I go on.")
    if steps < 2:
        return Reply(words, f"Hm, {words}", calls[steps:], pace=pace)
    return Reply(words, pace=pace)


def assert_valid(request: Request) -> None:
    """Check that any provider accepts a request: each tool call has one result, roles alternate, and no message is
    empty."""
    follows = {
        "": {"system"},
        "system": {"user"},
        "user": {"assistant"},
        "assistant": {"user"},
        "tool": {"user", "assistant"},
    }
    before, asked, used = "", list[str](), list[str]()
    for message in request["messages"]:
        role, calls = message["role"], message.get("tool_calls", [])
        assert message.keys() <= {"role", "content", "reasoning_content", "tool_calls", "tool_call_id"}
        assert message["content"].strip() or calls, "an empty message"
        if role == "tool":
            assert message["tool_call_id"] in asked, "an answer to nobody, or the second to one call"
            asked.remove(message["tool_call_id"])
        else:
            assert not asked, "a call without an answer"
            assert role in follows[before]
        for call in calls:
            assert role == "assistant"
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            asked.append(call["id"])
        used += [call["id"] for call in calls]
        before = role
    assert not asked, "a call without an answer"
    assert len({*used}) == len(used)
    assert before in ("user", "tool")


def begins(later: Request, earlier: Request) -> bool:
    """Test whether a server can reuse the cached prefix. Two prompts in a row are sent as one, so the last message may
    grow."""
    *before, last = earlier["messages"]
    *same, then = later["messages"][: len(before) + 1]
    grown = last["role"] == then["role"] == "user" and then["content"].startswith(f"{last['content']}\n\n")
    return same == before and (then == last or grown) and later["tools"] == earlier["tools"]


def configure(database: Database, home: Path) -> None:
    """Configure crow to use this database."""
    url = database.url.render_as_string(hide_password=False)
    (home / "config.toml").write_text(f"[database]\nurl = {json.dumps(url)}\n")


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently; a failure cancels the others."""
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


async def test_kill_at_any_moment_loses_nothing(database: Database, tmp_path: Path):
    configure(database, tmp_path)
    seed = int(os.environ.get("CROW_SEED") or randrange(2**32))
    plan = moments(Random(seed), KILLS)
    chains: dict[str, Chain] = {}
    limit = asyncio.Semaphore(AT_ONCE)

    async def forge(chain: Chain, plan: Sequence[Moment]) -> None:
        async with limit:
            for moment in plan:
                await chain.live(moment)

    async def end(chain: Chain) -> None:
        async with limit:
            await chain.end()

    async with ScriptedServer(lambda request: chains[request["model"]].answer(request)) as server:
        for number in range(0, KILLS, LINKS):
            folder = tmp_path / f"project{number}"
            folder.mkdir()
            (folder / "edits").touch()
            (folder / "ran").touch()
            chains[folder.name] = Chain(tmp_path, folder, server.url)
        try:
            await run_all(forge(chain, plan[n * LINKS :][:LINKS]) for n, chain in enumerate(chains.values()))
            assert check(database) == []
            await run_all(map(end, chains.values()))
            for request in server.requests:
                assert_valid(request)
            assert check(database) == []
            assert (tmp_path / "stderr").read_text() == ""
        except BaseException as error:
            error.add_note(f"CROW_SEED={seed} makes the same moments again.")
            raise


async def test_kill_between_gathering_and_commit_loses_nothing_that_was_shown(database: Database, tmp_path: Path):
    """While another writer holds the database, a turn gathers its prompt and its reply, and cannot commit them."""
    configure(database, tmp_path)
    answered = asyncio.Event()

    def answer(request: Request) -> Reply:
        words = request["messages"][-1]["content"]
        if "two" in words:
            answered.set()
        return Reply(f"To {words}.")

    async with ScriptedServer(answer) as server:
        async with process(tmp_path, tmp_path, server.url, "writer", Moment("by hand")) as witness:
            id = (await witness.new_session(str(tmp_path))).session_id
            await witness.say(id, "one")
            witness.events.clear()
            with database.begin_write() as connection:
                if not database.file:
                    connection.execute(text("LOCK TABLE messages IN ACCESS EXCLUSIVE MODE"))
                turn = asyncio.ensure_future(witness.say(id, "two"))
                await answered.wait()
                witness.kill()
                with pytest.raises(ConnectionClosed):
                    await turn
            assert [what for _, _, what in items(witness.events)] == ["two"], "the reply was not shown"
        async with process(tmp_path, tmp_path, server.url, "reader") as witness:
            await witness.request("session/load", LoadSessionRequest(session_id=id, cwd=str(tmp_path), mcp_servers=[]))
            assert [what for _, _, what in items(witness.events)] == ["one", ("", "To one.")]
            await witness.say(id, "three")
    assert check(database) == []
    assert (tmp_path / "stderr").read_text() == ""


async def test_concurrent_processes_lose_nothing(database: Database, tmp_path: Path):
    configure(database, tmp_path)
    writers, turns = (32, 50) if SOAK else (4, 5)
    ids: dict[str, str] = {}

    async def write(url: str, name: str) -> None:
        async with process(tmp_path, tmp_path, url, name) as witness:
            ids[name] = (await witness.new_session(str(tmp_path))).session_id
            for n in range(turns):
                await witness.say(ids[name], f"{name} says {n}")

    async with ScriptedServer(lambda request: Reply(f"To {request['messages'][-1]['content']}.")) as server:
        await run_all(write(server.url, f"writer {n}") for n in range(writers))
        async with process(tmp_path, tmp_path, server.url, "reader") as witness:
            for name, id in ids.items():
                witness.events.clear()
                await witness.request(
                    "session/load", LoadSessionRequest(session_id=id, cwd=str(tmp_path), mcp_servers=[])
                )
                prompts = [f"{name} says {n}" for n in range(turns)]
                said = [what for _, _, what in items(witness.events)]
                assert said == [words for prompt in prompts for words in (prompt, ("", f"To {prompt}."))]
    assert check(database) == []
    assert (tmp_path / "stderr").read_text() == ""
