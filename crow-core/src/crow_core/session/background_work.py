"""The work of a session that goes on after its tool call: commands and sub-agents in the background."""

import asyncio
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from crow_system.shortening import shorten_line

from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.schema import SessionInfoUpdate
from crow_core.masking import mask
from crow_core.messages.message import find_unanswered
from crow_core.messages.notes import Notes
from crow_core.session.session import Session
from crow_core.session_state import StateKey
from crow_core.text import to_line

TOOLS = ("terminal", "agent")
"""The tools whose calls can be answered while their work goes on."""
TITLE_LENGTH = 80
"""Characters of a title that are shown and stored."""


class RunningWork(Protocol):
    """A command or a sub-agent that a tool call waits for; see `crow_mcp_server.workspace.Running`."""

    @property
    def kind(self) -> str:
        """`command` or `agent`."""
        ...

    @property
    def title(self) -> str: ...
    @property
    def name(self) -> str:
        """The name by which the model and the user reach it; "" if it has none yet."""
        ...

    @property
    def over(self) -> asyncio.Event:
        """Set when it has ended."""
        ...

    @property
    def end(self) -> str:
        """The way in which it has ended, such as "exit code 1"; "" before."""
        ...

    @property
    def exit(self) -> Mapping[str, int | str]:
        """The `exitCode` or the `signal` of a command that has ended."""
        ...

    @property
    def is_told(self) -> bool:
        """True if the result of a tool call has told its end."""
        ...

    def answer(self) -> None:
        """Let the tool call that waits be answered now."""
        ...

    def get_last_line(self, limit: int) -> str: ...
    def read_output(self, start: int, limit: int) -> tuple[str, int]:
        """Return its output from a position on, and the position of its end; see `crow_mcp_server.workspace`."""
        ...

    async def kill(self) -> None: ...


class KnownAgent(RunningWork, Protocol):
    """A sub-agent of a session, which runs or has ended."""

    @property
    def session_id(self) -> str:
        """The id of its own session."""
        ...

    @property
    def call(self) -> str:
        """The id of the tool call that began it."""
        ...

    async def tell(self, words: str) -> str:
        """Give words to the sub-agent: it goes on with them. Return a sentence for the user. Raises RpcError if it does
        not."""
        ...


class ContinuedWork:
    """A command or a sub-agent that goes on after its tool call."""

    def __init__(self, call: str, running: RunningWork, title: str) -> None:
        self.call, self.running = call, running
        """The id of the tool call that began it, and what runs."""
        self.title = title
        """Its title in a line, with secrets masked."""
        self.is_stopped = False
        """True if the user stops it, and is told so by the answer."""
        self.watch: asyncio.Task[None] | None = None
        """Waits for its end."""

    @property
    def is_over(self) -> bool:
        """True if it has ended."""
        return self.running.over.is_set()


class Background:
    """The work that tool calls of a session wait for, and the work that went on after its call."""

    def __init__(self) -> None:
        self.waiting: dict[str, RunningWork] = {}
        """The commands and sub-agents that tool calls wait for, by the ids of the calls."""
        self.wanted: set[str] = set()
        """The ids of tool calls that are to be answered as soon as they wait for something."""
        self.works: list[ContinuedWork] = []
        """The work that went on and whose end the model does not know, in the order of its start."""
        self.agents: dict[str, KnownAgent] = {}
        """The sub-agents of the session by name, the oldest first."""
        self.lost: dict[str, str] = {}
        """The titles of work that ended with an earlier process, by its tool calls; the model does not know."""

    def find(self, name: str) -> RunningWork | None:
        """Find work in the background, or a sub-agent, by its name."""
        return next((work.running for work in self.works if work.running.name == name), self.agents.get(name))

    def list_open(self) -> list[ContinuedWork]:
        """List the work that runs."""
        return [work for work in self.works if not work.is_over]


BACKGROUND = StateKey("background", Background)
AGENTS_SHOWN = 20
"""Sub-agents that are listed, the newest, in addition to those in the background."""
LINE_LENGTH = 1_000
"""Characters of a last line that are shown."""


def send(session: Session, call: str = "") -> list[str]:
    """Let the tool calls be answered whose command or sub-agent runs, or only this one; return their ids."""
    background = session.state[BACKGROUND]
    sent = [id for id, running in background.waiting.items() if call in ("", id) and not running.over.is_set()]
    for id in sent:
        background.waiting[id].answer()
    if session.client.capabilities.terminal:  # its terminals end with their calls
        return sent
    for use in find_unanswered(session.log):
        id = use["id"]
        starts = session.toolbox.is_running(id) and session.toolbox.parse(use).name in TOOLS
        if starts and call in ("", id) and id not in background.waiting:
            background.wanted.add(id)
            sent.append(id)
    return sent


@contextmanager
def waiting(session: Session, call: str, running: RunningWork) -> Generator[None]:
    """Wait for something in a tool call. If it still runs at the end, and nothing was raised, it goes on."""
    background = session.state[BACKGROUND]
    background.waiting[call] = running
    if call in background.wanted:
        running.answer()
    try:
        yield
    finally:
        del background.waiting[call]
        background.wanted.discard(call)
    goes_on = any(work.running is running and work.watch and not work.watch.done() for work in background.works)
    if not (running.over.is_set() or goes_on):
        go_on(session, call, running)


def go_on(session: Session, call: str, running: RunningWork) -> None:
    """Note that something goes on after its tool call, and watch for its end."""
    work = ContinuedWork(call, running, to_title(session, running))
    background = session.state[BACKGROUND]
    background.works = [each for each in background.works if not (each.running.is_told or each.running is running)]
    background.works.append(work)
    title = work.title if running.kind == "command" else f"{work.title} (agent {running.name!r})"
    notes: Notes = {"kind": "background", "call": call, "name": running.name, "title": title}
    session.log.append({"crow": notes})
    work.watch = asyncio.ensure_future(watch(session, work))


async def watch(session: Session, work: ContinuedWork) -> None:
    """Tell the client that work goes on in the background, and its end."""
    with suppress(ConnectionClosed):
        await announce(session)
    background = session.state[BACKGROUND]
    await work.running.over.wait()
    note_end(session, work.call, work.running.end)
    with suppress(ConnectionClosed):
        await announce(session)
        if not (work.is_stopped or work.running.is_told or work.running in background.waiting.values()):
            await session.notice(f"In the background, {work.title} has ended ({work.running.end}).")


def note_end(session: Session, call: str, end: str) -> None:
    """Append to the log how the work of a tool call has ended."""
    notes: Notes = {"kind": "background", "call": call, "end": end}
    session.log.append({"crow": notes})


async def announce(session: Session) -> None:
    """Tell the client what runs in the background."""
    background = session.state[BACKGROUND]
    titles = [work.title for work in background.list_open()]
    await session.send(SessionInfoUpdate(meta={"crow": {"background": titles}}))


async def stop_all(session: Session) -> list[ContinuedWork]:
    """End all work of a session that is being closed. Return the work that ran."""
    background = session.state[BACKGROUND]
    for work in background.works:
        if work.watch:
            work.watch.cancel()
    stopped = background.list_open()
    await asyncio.gather(*(work.running.kill() for work in stopped))
    return stopped


def find_lost(session: Session) -> dict[str, str]:
    """Find the work of a stored session that had not ended with its last process, as `Background.lost` has it."""
    found: dict[str, str] = {}
    for entry in session.view.find_kind("background"):
        notes = entry.get("crow", {})
        if "end" in notes:
            found.pop(notes.get("call", ""), None)
        else:
            found[notes.get("call", "")] = notes.get("title", "")
    return found


def list_all(session: Session) -> list[dict[str, Any]]:
    """Describe for a client the work in the background, and all sub-agents."""
    background = session.state[BACKGROUND]
    works = [(work.running, work.call, work.title) for work in background.works]
    known = [work.running for work in background.works]
    agents = [each for each in background.agents.values() if each not in known]
    works = [*((each, each.call, to_title(session, each)) for each in agents[-AGENTS_SHOWN:]), *works]
    return [describe(session, *work) for work in works]


def to_title(session: Session, running: RunningWork) -> str:
    """Make the title of work in a line, with secrets masked."""
    return shorten_line(to_line(mask(running.title, session.secrets)), TITLE_LENGTH)


def describe(session: Session, running: RunningWork, call: str, title: str) -> dict[str, Any]:
    """Describe work for a client."""
    secrets, over = session.secrets, running.over.is_set()
    line = to_line(mask(running.get_last_line(LINE_LENGTH), secrets))
    about = {"name": running.name, "kind": running.kind, "title": title, "toolCallId": call}
    agent = session.state[BACKGROUND].agents.get(running.name) if running.kind == "agent" else None
    session_id = {"sessionId": agent.session_id} if agent else {}
    return {**about, **session_id, "state": "ended" if over else "running", "end": running.end, "lastLine": line}
