"""A session of the chat: opened, shown and closed; its log, and the state around it."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AvailableCommand,
    AvailableCommandsUpdate,
    ConfigOptionUpdate,
    CurrentModeUpdate,
    ImageBlock,
    SessionInfoUpdate,
    SessionUpdate,
    ToolCallUpdate,
    UsageUpdate,
)
from crow_core.errors import StoreError
from crow_persistence.database import Database
from crow_terminal.agent_connections import NoAgent
from crow_terminal.blocks import Note
from crow_terminal.chat_client import AgentQuestion
from crow_terminal.session_options import OfferedOptions, list_entries

from crow_web.app_contexts import METHOD, AppContexts
from crow_web.app_frames import AppFrames
from crow_web.apps import ask_for_app, render_app
from crow_web.history import History, read_history
from crow_web.live import Feed
from crow_web.log import BlockRenderer, Log
from crow_web.open_cards import OpenCards
from crow_web.shared_agent import SharedAgent
from crow_web.turn_undo import TurnUndo


@dataclass
class Words:
    """Messages of the person that the agent does not have yet."""

    text: str
    images: Sequence[ImageBlock] = ()
    sent: str = ""
    """The name that the page gave to them."""
    is_steering: bool = False
    """True if the running turn is asked to take it."""
    task: "asyncio.Task[None] | None" = None
    """Asks the running turn."""


class ChatSession:
    """A session, for any number of pages. It is opened by the first action, and closed when nothing happens."""

    def __init__(
        self,
        agent: SharedAgent,
        renderer: BlockRenderer,
        database: Database | None,
        folder: str,
        id: str = "",
        frames: AppFrames | None = None,
    ) -> None:
        """`id` is that of a stored session; empty for a new one. `frames` serves the apps of MCP servers."""
        self._frames = frames
        self.id, self.folder, self.title = id, folder, ""
        self.feed = Feed()
        self.log = Log(renderer, self.feed.put)
        self.phase = "viewing" if id else "new"
        """`new`, `viewing`, `opening`, `ready` or `working`."""
        self.holder = ""
        """The process elsewhere that has the session open; empty for none."""
        self.is_used = bool(id)
        """True if something was said."""
        self.words: list[Words] = []
        self.options = OfferedOptions()
        self.commands: list[AvailableCommand] = []
        self.usage: UsageUpdate | None = None
        self.background = 0
        """The number of commands and sub-agents in the background. The session stays open for them."""
        self.apps: dict[str, str] = {}
        """The HTML of the apps that are shown, by the ids of their tool calls."""
        self.contexts = AppContexts()
        self.requests = 0
        """Requests of apps that are not answered yet. The session stays open for them."""
        self.touched = asyncio.get_running_loop().time()
        """The time of the last action."""
        self._agent, self._renderer, self._database = agent, renderer, database
        self._version: tuple[Any, ...] = ()
        self._stored: frozenset[str] = frozenset()
        """The names of stored prompts. A page sends those again that were not acknowledged before a restart."""
        self._is_shown = not id
        """True if the log shows what was said, so that the agent need not send it."""
        self.cards = OpenCards(agent, renderer, get_time, self._put_frame)
        self._undo = TurnUndo(renderer)
        self._is_cancelled = False
        self._problem = ""
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: asyncio.Task[None] | None = None
        self._put_frame()

    @property
    def is_shared(self) -> bool:
        """True if it is the session of the terminal that has opened this page."""
        return bool(self.id) and self.id == self._agent.shared

    @property
    def _can_undo(self) -> bool:
        return self.phase == "ready" and self.is_used and self._agent.abilities.undoes

    @property
    def is_open(self) -> bool:
        return self.phase in ("ready", "working")

    def receive(self, update: SessionUpdate) -> None:
        match update:
            case AvailableCommandsUpdate(available_commands=commands):
                self.commands = [*commands]
                self.feed.put("@commands", " ".join(each.name for each in commands))
            case CurrentModeUpdate(current_mode_id=mode):
                self.options.set_mode(mode)
            case ConfigOptionUpdate(config_options=options):
                self.options.config = options
            case UsageUpdate():
                self.usage = update
            case SessionInfoUpdate(meta={"crow": {"background": [*titles]}}):
                self.background, self.touched = len(titles), get_time()
            case SessionInfoUpdate(title=title):
                self.title = title if isinstance(title, str) else self.title
            case _:
                self.log.add(update, get_time())
                if isinstance(update, ToolCallUpdate) and update.status == "completed" and self.phase == "working":
                    self.start(self.show_app(update.tool_call_id, self.log.take_id()))
                return
        self._put_frame()

    async def show_app(self, call: str, block: str) -> None:
        """Show the app of a tool call, if it has one, in this block of the log."""
        if not await self.open():
            return
        server, html = await render_app(self._agent, self._frames, self._renderer, self.id, call)
        if html:
            self.apps[call], self.contexts.servers[call] = html, server
            self.log.put(block, html)

    async def ask_for_app(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of an app. One that the person uses opens the session, as the person's actions do."""
        if request.get("method") == METHOD:
            try:
                self.contexts.update(request.get("call"), request.get("params"))
            except ValueError as error:
                return {"error": str(error)}
            self._put_frame()
            return {"result": {}}
        if request.get("used") is True and await self.open():
            self.touched = get_time()
        if not self.is_open:
            return {"error": "The session is closed. Say something to open it."}
        self.requests += 1
        try:
            return await ask_for_app(self._agent, self.id, request)
        finally:
            self.requests -= 1

    def ask(self, id: int, request: AgentQuestion) -> None:
        """Show a question of the agent."""
        if self._is_cancelled and self.phase == "working":
            self.cards.refuse(id, request, self.log)
        else:
            self.cards.ask(id, request, self.log, self.folder)

    def withdraw(self, id: int) -> None:
        """Remove a question that needs no answer any more."""
        self.cards.withdraw(id)

    def follow_turn(self, stop_reason: str, *, runs: bool) -> None:
        """A turn of the terminal has begun, or ended."""
        raise NotImplementedError  # `WebChat` has it, as it has the turns

    def lose(self, sentence: str) -> None:
        """Note that the connection to the agent has ended. The next prompt opens the session again."""
        if self.phase == "working" and sentence:
            sentence = f"{sentence} The turn was stopped; what was said is kept."
        self._end_session()
        if sentence:
            self.log.show([Note(sentence, "error")])
        elif self.feed.tabs:
            self.start(self.open())

    async def open(self) -> bool:
        """Open the session, and return whether it is open."""
        async with self._lock:
            if self.is_open:
                return True
            await self.look()
            if self.holder and not self.is_shared:
                return False
            before, self.phase, self._problem = self.phase, "opening", ""
            self._put_frame()
            try:
                if not self.id:
                    opened = await self._agent.new_session(self, self.folder)
                    self.id = opened.session_id
                    self.feed.put("@session", self.id)
                else:
                    await self._agent.connect()  # what it can do is known then
                    if not (self._is_shown and self._agent.abilities.resumes):
                        self.feed.fill({})
                        self.log = Log(self._renderer, self.feed.put)
                    shown = self._is_shown
                    opened = await self._agent.open_session(self, self.id, self.folder, is_shown=shown)
                    self.log.end_turn(get_time())
                    if self.is_shared:
                        await self._join(opened.meta)
            except (NoAgent, RpcError, ConnectionClosed) as error:
                self.phase = before
                self._problem = self._describe(error)
            else:
                self.phase, self._is_shown = "ready", True
                self.options = OfferedOptions(opened.modes or None, opened.config_options or [])
            self._put_frame()
            return self.is_open

    async def _join(self, meta: Any) -> None:
        """Show the terminal's session: the stored part, then its last turn, then new updates."""
        started = meta["crow"]["started"]
        await self._read_again(before=started)
        await self._agent.join(self.id, started)

    async def close(self) -> None:
        """Close the session, so that another process can open it."""
        async with self._lock:
            if self.phase != "ready":
                return
            self._end_session()
            await self._agent.close_session(self.id)

    def _end_session(self) -> None:
        self.cards.withdraw_all()
        self.log.end_turn(get_time())
        self.phase, self._is_cancelled, self._version, self.background = "viewing", False, (), 0
        for words in self.words:
            words.is_steering = False
        self._put_frame()

    async def look(self) -> None:
        """Show the stored part again, if another process has changed it."""
        if self.phase != "viewing" or self._database is None:
            return
        try:
            known = self._version
            read = partial(read_history, self._database, self._renderer, self.id, known, apps=self.apps)
            history = await asyncio.to_thread(read)
        except StoreError as error:
            self._problem = "" if self._is_shown else str(error)
            self._put_frame()
            return
        if self.phase != "viewing":
            return
        self.folder, self.holder, self._version = history.folder, history.holder, history.version
        self.title = history.title or self.title
        self._take(history)
        self._put_frame()

    async def _find_version(self) -> tuple[Any, ...]:
        """Return a value that changes with the stored session; () for a session of another machine."""
        if self._database is None:
            return ()
        return (await asyncio.to_thread(read_history, self._database, self._renderer, self.id)).version

    async def _read_again(self, *, before: int = 0) -> None:
        """Show the stored history of the session that this page has open, without the turn that began at `before`."""
        if self._database:
            kept = partial(read_history, self._database, self._renderer, self.id, apps=self.apps)
            self._take(await asyncio.to_thread(kept, is_ours=True, before=before))

    def _take(self, history: History) -> None:
        """Show the log of a stored session."""
        if history.log:
            self.log, self.log.put, self._is_shown = history.log, self.feed.put, True
            self._stored = history.sent
            self.feed.fill(history.blocks)
            self.feed.put("earlier", "" if history.is_whole else self._renderer.render("earlier", self.id))

    def _put_frame(self) -> None:
        """Show the state of the session around its log."""
        name = self.title or (f"Session {self.id[:8]}" if self.is_used else "New session")
        asked, holder = self.cards.first, "" if self.is_shared else self.holder
        mark = "? " if asked else "… " if self.phase == "working" else ""
        self.feed.put("@name", f"{mark}{name} · crow")
        self.feed.put("@phase", self.phase)
        self.feed.put(
            "title", lambda: self._renderer.render("title", name, self.id if self.is_used else "", self.folder)
        )
        self.feed.put("notice", lambda: self._renderer.render("notice", holder, self._problem))
        self.feed.put(
            "state",
            lambda: self._renderer.render(
                "state",
                self.phase,
                asked,
                self._is_cancelled,
                self.usage,
                self._can_undo,
                self.background,
                self._agent.abilities.backgrounds,
            ),
        )
        self.feed.put("queue", lambda: self._renderer.render("queue", self.words, self.contexts.items()))
        self.feed.put("options", lambda: self._renderer.render("options", self.options, list_entries))

    def _describe(self, error: Exception) -> str:
        if isinstance(error, RpcError) and (client := self._agent.client):
            return client.describe_error(error)
        return str(error) or "The connection to the agent has ended."

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(self._report(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _report(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine; an error of the agent becomes a sentence."""
        try:
            await work
        except (NoAgent, RpcError) as error:
            self.log.show([Note(self._describe(error), "error")])
        except ConnectionClosed:
            pass  # `lose` says so


def get_time() -> float:
    return asyncio.get_running_loop().time()
