"""A session that is talked with: what the person does, and what the agent says."""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AvailableCommand,
    AvailableCommandsUpdate,
    BooleanConfigOption,
    ConfigOptionUpdate,
    CurrentModeUpdate,
    ImageBlock,
    SessionInfoUpdate,
    SessionUpdate,
    SetSessionConfigOptionRequest,
    UsageUpdate,
)
from crow_core.acp.shared_methods import STEERING_METHOD, is_taken, make_steering_params
from crow_core.errors import StoreError
from crow_persistence.database import Database
from crow_terminal.agent_connections import NoAgent
from crow_terminal.blocks import Note, UserPrompt
from crow_terminal.chat_client import AgentQuestion
from crow_terminal.prompt_content import make_prompt
from crow_terminal.session_options import OfferedOptions, list_entries
from msgspec import UNSET

from crow_web.completion import list_completions
from crow_web.history import History, read_history
from crow_web.live import Feed, Tab
from crow_web.log import BlockRenderer, Log
from crow_web.open_cards import OpenCards
from crow_web.shared_agent import SharedAgent
from crow_web.turn_undo import TurnUndo

IDLE = 180.0
"""Seconds after the last action in which a session stays open, while a page shows it."""
ALONE = 30.0
"""The same while no page shows it: a phone that sleeps comes back."""
STOPS = {
    "cancelled": "Cancelled.",
    "max_tokens": "The answer was cut: the model reached its limit of tokens.",
    "max_turn_requests": "Stopped at the limit of requests. Say “go on” to go on.",
    "refusal": "The model refused to answer.",
}
"""The sentences for the reasons for which a turn stops before its end."""


@dataclass
class Words:
    """What the person has said and the agent does not have yet."""

    text: str
    images: Sequence[ImageBlock] = ()
    is_steering: bool = False
    """True if the running turn is asked to take it."""
    task: "asyncio.Task[None] | None" = None
    """Asks the running turn."""


class WebChat:
    """A session, for any number of pages. It is opened by the first action, and closed when nothing happens."""

    def __init__(
        self, agent: SharedAgent, renderer: BlockRenderer, database: Database | None, folder: str, id: str = ""
    ) -> None:
        """`id` is that of a stored session; empty for a new one."""
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
        self.touched = asyncio.get_running_loop().time()
        """The time of the last action."""
        self._agent, self._renderer, self._database = agent, renderer, database
        self._version: tuple[Any, ...] = ()
        self._is_shown = not id
        """True if the log shows what was said, so that the agent need not send it."""
        self.cards = OpenCards(agent, renderer, get_time, self._put_frame)
        self._undo = TurnUndo(renderer)
        self.numbers: dict[str, int] = {}
        """The number of the last action of each page."""
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

    # What a person does

    def take_number(self, page: str, number: int) -> bool:
        """Return whether the action with this number of a page is a new one."""
        if number <= self.numbers.setdefault(page, 0):
            return False
        self.numbers[page], self.touched = number, get_time()
        return True

    def say(self, words: Words, *, later: bool = False) -> None:
        """Send a prompt, or let the running turn have it; `later` keeps it for after the turn."""
        if not (words.text.strip() or words.images):
            return
        if words.text.strip() == "/undo" and self.phase != "working":
            self.start(self.ask_undo())
            return
        steers = self._agent.abilities.steers and not (words.images or words.text.startswith("/"))
        words.is_steering = steers and self.phase == "working" and not (later or self._is_cancelled)
        self.words.append(words)
        if words.is_steering:
            words.task = self.start(self._steer(words))
        else:
            self._send_waiting()
        self._put_frame()

    async def cancel(self) -> None:
        """Stop the turn; the questions of it need no answer."""
        if self.phase == "working" and not self._is_cancelled and (client := self._agent.client):
            self._is_cancelled = True
            self.cards.refuse_all()
            await client.cancel(self.id)

    def recall(self, tab: Tab, place: int) -> None:
        """Take words back into the editor of a page."""
        if place < len(self.words):
            words = self.words.pop(place)
            if words.task:
                words.task.cancel()  # the agent is told
            tab.add({"@edit": words.text})
            self._put_frame()

    async def ask_undo(self) -> None:
        """Ask whether the last turn shall be undone."""
        if await self.open() and self.phase == "ready" and (client := self._agent.client):
            if self._agent.abilities.undoes:
                await self._undo.ask(client, self.id, self.folder, self.log)
            else:
                self.log.show([Note("This agent cannot undo a turn.", "warning")])

    async def undo(self, *, confirmed: bool) -> None:
        """Undo the last turn, if the person has confirmed it, and show the session as it is then."""
        if not confirmed:
            self._undo.leave()
        elif self.phase == "ready" and (client := self._agent.client) and await self._undo.confirm(client):
            if self._database:
                history = await asyncio.to_thread(read_history, self._database, self._renderer, self.id, is_ours=True)
                self._take(history)
            self.log.show([Note("The last turn was undone.")])

    # The agent

    def receive(self, update: SessionUpdate) -> None:
        match update:
            case AvailableCommandsUpdate(available_commands=commands):
                self.commands = [*commands]
            case CurrentModeUpdate(current_mode_id=mode):
                self.options.set_mode(mode)
            case ConfigOptionUpdate(config_options=options):
                self.options.config = options
            case UsageUpdate():
                self.usage = update
            case SessionInfoUpdate(title=title):
                self.title = title if isinstance(title, str) else self.title
            case _:
                self.log.add(update, get_time())
                return
        self._put_frame()

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
        if runs:
            self.phase, self._is_cancelled, self.is_used = "working", False, True
            self._put_frame()
        elif self.phase == "working":
            self._end_turn(stop_reason)
            self._send_waiting()

    def lose(self, sentence: str) -> None:
        """Note that the connection to the agent has ended. The next prompt opens the session again."""
        if self.phase == "working" and sentence:
            sentence = f"{sentence} The turn was stopped; what was said is kept."
        self._end_session()
        if sentence:
            self.log.show([Note(sentence, "error")])
        elif self.feed.tabs:
            self.start(self.open())

    # A session

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
        """Show the terminal's session: what is stored, then its last turn, then what happens."""
        started = meta["crow"]["started"]
        if self._database:
            read = partial(read_history, self._database, self._renderer, self.id, is_ours=True, before=started)
            self._take(await asyncio.to_thread(read))
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
        self.phase, self._is_cancelled, self._version = "viewing", False, ()
        for words in self.words:
            words.is_steering = False
        self._put_frame()

    async def look(self) -> None:
        """Show what is stored, if another process has changed it."""
        if self.phase != "viewing" or self._database is None:
            return
        try:
            known = self._version
            history = await asyncio.to_thread(read_history, self._database, self._renderer, self.id, known)
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

    def _take(self, history: History) -> None:
        """Show the log of a stored session."""
        if history.log:
            self.log, self.log.put, self._is_shown = history.log, self.feed.put, True
            self.feed.fill(history.blocks)
            self.feed.put("earlier", "" if history.is_whole else self._renderer.render("earlier", self.id))

    async def _run_turns(self) -> None:
        """Send the prompts that wait, one after the other."""
        while next((True for words in self.words if not words.is_steering), False) and await self.open():
            client = self._agent.client
            if client is None or self.phase == "working":
                return
            self._undo.leave()
            words = next(words for words in self.words if not words.is_steering)
            self.words.remove(words)
            self.phase, self._is_cancelled, self.is_used = "working", False, True
            self.log.show([*self.log.record.end_text(), UserPrompt(words.text)])
            for image in words.images:
                self.log.show_image(image)
            self._put_frame()
            prompt = await asyncio.to_thread(
                make_prompt, words.text, (), self.folder, self._agent.abilities, words.images
            )
            try:
                response = await client.prompt(self.id, prompt)
            except ConnectionClosed:
                return  # `lose` says so
            except RpcError as error:
                notes = [Note(client.describe_error(error), "error")]
                self._end_turn("", notes)
            else:
                self._end_turn(response.stop_reason)

    def _end_turn(self, stop_reason: str, notes: Sequence[Note] = ()) -> None:
        sentence = STOPS.get(stop_reason)
        self.log.end_turn(get_time())
        self.log.show([*notes, *([Note(sentence, "warning")] if sentence else [])])
        self.cards.withdraw_all()
        for waiting in self.words:
            waiting.is_steering = False
        self.phase, self.touched = "ready", get_time()
        self._put_frame()

    def _send_waiting(self) -> None:
        """Send the prompts that wait, unless that is being done."""
        if self._turns is None or self._turns.done():
            self._turns = asyncio.ensure_future(self._report(self._run_turns()))

    async def _steer(self, words: Words) -> None:
        """Offer words to the running turn; those that it does not take are sent as a prompt."""
        taken = False
        if client := self._agent.client:
            content = await asyncio.to_thread(make_prompt, words.text, (), self.folder, self._agent.abilities)
            with suppress(RpcError, ConnectionClosed):
                taken = is_taken(await client.request(STEERING_METHOD, make_steering_params(self.id, content)))
        if taken and words in self.words:
            self.words.remove(words)
        elif words in self.words:
            words.is_steering = False
            self._send_waiting()
        self._put_frame()

    async def set_option(self, id: str, value: str) -> None:
        if not await self.open() or not (client := self._agent.client):
            return
        if not id:
            await client.set_mode(self.id, value)
            self.options.set_mode(value)
        else:
            is_boolean = any(isinstance(one, BooleanConfigOption) and one.id == id for one in self.options.config)
            request = SetSessionConfigOptionRequest(
                session_id=self.id,
                config_id=id,
                value=value == "on" if is_boolean else value,
                type="boolean" if is_boolean else UNSET,
            )
            self.options.config = (await client.request("session/set_config_option", request)).config_options
        self._put_frame()

    async def move(self, folder: str) -> None:
        """Begin in another folder, as nothing has been said yet."""
        if self.is_used or self.phase == "opening":
            return
        await self.close()
        self.phase, self.id, self.folder = "new", "", await asyncio.to_thread(os.path.expanduser, folder.strip())
        await self.open()

    async def fork(self, tab: Tab) -> None:
        """Go on in a copy of the session."""
        copy = WebChat(self._agent, self._renderer, self._database, self.folder)
        opened = await self._agent.fork_session(copy, self.id, self.folder)
        await self._agent.close_session(opened.session_id)  # it is stored, and opened by the first action
        tab.add({"@go": f"/chat/{opened.session_id}"})

    async def complete(self, tab: Tab, text: str) -> None:
        found = await asyncio.to_thread(list_completions, text, self.commands, self.folder)
        tab.add({"@menu": self._renderer.render("menu", found, text)})

    # What is around the log

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
            lambda: self._renderer.render("state", self.phase, asked, self._is_cancelled, self.usage, self._can_undo),
        )
        self.feed.put("queue", lambda: self._renderer.render("queue", self.words))
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
