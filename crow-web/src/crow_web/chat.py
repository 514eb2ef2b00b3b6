"""A session that is talked with: the actions of its pages, and what the agent says."""

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AvailableCommand,
    AvailableCommandsUpdate,
    BooleanConfigOption,
    ConfigOptionUpdate,
    CreateElicitationResponse,
    CurrentModeUpdate,
    ImageBlock,
    RequestPermissionRequest,
    SessionInfoUpdate,
    SessionUpdate,
    SetSessionConfigOptionRequest,
    ToolCall,
    UsageUpdate,
)
from crow_core.acp.shared_methods import STEERING_METHOD, is_taken, make_steering_params
from crow_core.errors import StoreError
from crow_persistence.database import Database
from crow_terminal.agent_connections import NoAgent
from crow_terminal.blocks import Note, UserPrompt
from crow_terminal.chat_client import AgentQuestion
from crow_terminal.open_questions import find_call, make_cancellation
from crow_terminal.prompt_content import make_prompt
from crow_terminal.session_options import OfferedOptions, list_entries
from crow_terminal.stops import describe_stop
from msgspec import UNSET

from crow_web.completion import list_completions
from crow_web.history import read_history
from crow_web.live import Feed, Tab
from crow_web.log import BlockRenderer, Log, make_image_url
from crow_web.questions import Card, FormCard, PermissionCard, make_form
from crow_web.shared_agent import SharedAgent

IDLE = 180.0
"""Seconds after the last action in which a session stays open, while a page shows it."""
ALONE = 30.0
"""The same while no page shows it: a phone that sleeps comes back."""


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
        self._cards: dict[int, tuple[Card, str, str]] = {}
        """The questions that wait for an answer, each with its block and its tool call."""
        self._done: dict[str, int] = {}
        """The number of the last action of each page."""
        self._is_cancelled = False
        self._problem = ""
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: asyncio.Task[None] | None = None
        self._put_frame()

    @property
    def is_open(self) -> bool:
        return self.phase in ("ready", "working")

    # Actions of the pages

    async def act(self, tab: Tab, action: Mapping[str, Any]) -> None:
        """Carry out an action of a page, once: a page sends it again until it is told that it has arrived."""
        page, number = str(action.get("page", "")), action.get("number")
        if isinstance(number, int):
            if number > self._done.get(page, 0):
                self._done[page] = number
                self.touched = get_time()
                self._carry_out(tab, action)
            tab.add({"@arrived": str(self._done[page])})

    def _carry_out(self, tab: Tab, action: Mapping[str, Any]) -> None:
        match action:
            case {"do": "open"}:
                self._start(self._open())
            case {"do": "prompt", "text": str(text)}:
                images = [*filter(None, map(read_image, action.get("images") or []))]
                self.say(Words(text, images), later=action.get("later") is not None)
            case {"do": "cancel"}:
                self._start(self.cancel())
            case {"do": "answer", "question": str(id), "choice": str(choice)} if id.isdecimal() and choice.isdecimal():
                self.answer(int(id), int(choice), str(action.get("text", "")))
            case {"do": "form", "question": str(id), "send": str(send)} if id.isdecimal():
                self.fill_form(tab, int(id), send, action)
            case {"do": "option", "option": str(option), "value": str(value)}:
                self._start(self._set_option(option, value))
            case {"do": "recall", "place": str(place)} if place.isdecimal():
                self.recall(tab, int(place))
            case {"do": "folder", "folder": str(folder)}:
                self._start(self._move(folder))
            case {"do": "fork"}:
                self._start(self._fork(tab))
            case {"do": "complete", "text": str(text)}:
                self._start(self._complete(tab, text))
            case _:
                pass

    def say(self, words: Words, *, later: bool = False) -> None:
        """Send a prompt, or let the running turn have it; `later` keeps it for after the turn."""
        if not (words.text.strip() or words.images):
            return
        steers = self._agent.abilities.steers and not (words.images or words.text.startswith("/"))
        words.is_steering = steers and self.phase == "working" and not (later or self._is_cancelled)
        self.words.append(words)
        if words.is_steering:
            words.task = self._start(self._steer(words))
        elif self._turns is None or self._turns.done():
            self._turns = asyncio.ensure_future(self._report(self._run_turns()))
        self._put_frame()

    async def cancel(self) -> None:
        """Stop the turn; the questions of it need no answer."""
        if self.phase == "working" and not self._is_cancelled and (client := self._agent.client):
            self._is_cancelled = True
            for id, (card, _, call) in [*self._cards.items()]:
                self.log.record.leave_question(call)
                self._agent.answer(id, make_cancellation(card.request))
                self.withdraw(id)
            await client.cancel(self.id)

    def recall(self, tab: Tab, place: int) -> None:
        """Take words back into the editor of a page."""
        if place < len(self.words):
            words = self.words.pop(place)
            if words.task:
                words.task.cancel()  # the agent is told
            tab.add({"@edit": words.text})
            self._put_frame()

    def answer(self, id: int, choice: int, text: str) -> None:
        """Answer a question for permission. The first answer holds."""
        card, _, call = self._cards.get(id, (None, "", ""))
        if isinstance(card, PermissionCard) and (found := card.respond(choice, text)):
            response, record = found
            self.log.record.note_shown(call)
            self._end_question(id, self._renderer.render_block(record))
            self._agent.answer(id, response)

    def fill_form(self, tab: Tab, id: int, send: str, values: Mapping[str, Any]) -> None:
        """Answer a form: `send` is `accept` or `decline`."""
        card, block, _ = self._cards.get(id, (None, "", ""))
        if not isinstance(card, FormCard):
            return
        response: CreateElicitationResponse | str = CreateElicitationResponse(action="decline")
        if send == "accept":
            response = card.respond({name: read_values(value) for name, value in values.items()})
        if isinstance(response, str):
            tab.add({"@problem": f"{block} {response}"})
            return
        self._end_question(id, self._renderer.render("filled", card.form, send))
        self._agent.answer(id, response)

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
        now, call = get_time(), find_call(request)
        if self._is_cancelled and self.phase == "working":
            self.log.record.leave_question(call)
            self._agent.answer(id, make_cancellation(request))
            return
        if isinstance(request, RequestPermissionRequest):
            self.log.show(self.log.record.propose(request.tool_call, now))
            known = self.log.record.running.get(call)
            about = known.call if known else ToolCall(tool_call_id=call, title=str(request.tool_call.title or ""))
            card = PermissionCard(request, about, self.folder, self._agent.abilities.answers)
        elif not (card := make_form(request)):
            self._agent.answer(id, make_cancellation(request))
            return
        self.log.show(self.log.record.end_text())
        self.log.record.start_question(call, now)
        block = self.log.take_id()
        self._cards[id] = card, block, call
        self.feed.put(block, card.render(self._renderer, id))
        self._put_frame()

    def withdraw(self, id: int) -> None:
        """Remove a question that needs no answer any more."""
        self._end_question(id, self._renderer.render("withdrawn"))

    def _end_question(self, id: int, html: str) -> None:
        _, block, call = self._cards.pop(id, (None, "", ""))
        if block:
            self.log.record.end_question(call, get_time())
            self.feed.put(block, html)
            self._put_frame()

    def lose(self, sentence: str) -> None:
        """Note that the connection to the agent has ended. The next prompt opens the session again."""
        if self.phase == "working":
            sentence = f"{sentence} The turn was stopped; what was said is kept."
        self._end_session()
        self.log.show([Note(sentence, "error")])

    # A session

    async def _open(self) -> bool:
        """Open the session, and return whether it is open."""
        async with self._lock:
            if self.is_open:
                return True
            await self.look()
            if self.holder:
                return False
            before, self.phase, self._problem = self.phase, "opening", ""
            self._put_frame()
            try:
                if not self.id:
                    opened = await self._agent.new_session(self, self.folder)
                    self.id = opened.session_id
                    self.feed.put("@session", self.id)
                else:
                    if not (self._is_shown and self._agent.abilities.resumes):
                        self.feed.fill({})
                        self.log = Log(self._renderer, self.feed.put)
                    shown = self._is_shown
                    opened = await self._agent.open_session(self, self.id, self.folder, is_shown=shown)
                    self.log.end_turn(get_time())
            except (NoAgent, RpcError, ConnectionClosed) as error:
                self.phase = before
                self._problem = self._describe(error)
            else:
                self.phase, self._is_shown = "ready", True
                self.options = OfferedOptions(opened.modes or None, opened.config_options or [])
            self._put_frame()
            return self.is_open

    async def close(self) -> None:
        """Close the session, so that another process can open it."""
        async with self._lock:
            if self.phase != "ready":
                return
            self._end_session()
            await self._agent.close_session(self.id)

    def _end_session(self) -> None:
        for id in [*self._cards]:
            self.withdraw(id)
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
        if history.log:
            self.log, self.log.put, self._is_shown = history.log, self.feed.put, True
            self.feed.fill(history.blocks)
            self.feed.put("earlier", "" if history.is_whole else self._renderer.render("earlier", self.id))
        self._put_frame()

    async def _run_turns(self) -> None:
        """Send the prompts that wait, one after the other."""
        while next((True for words in self.words if not words.is_steering), False) and await self._open():
            client = self._agent.client
            if client is None:
                return
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
            else:
                sentence = describe_stop(response)
                notes = [Note(sentence, "warning")] if sentence else []
            self.log.end_turn(get_time())
            self.log.show(notes)
            for id in [*self._cards]:
                self.withdraw(id)
            for waiting in self.words:
                waiting.is_steering = False
            self.phase, self.touched = "ready", get_time()
            self._put_frame()

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
            if self._turns is None or self._turns.done():
                self._turns = asyncio.ensure_future(self._report(self._run_turns()))
        self._put_frame()

    async def _set_option(self, id: str, value: str) -> None:
        if not await self._open() or not (client := self._agent.client):
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

    async def _move(self, folder: str) -> None:
        """Begin in another folder, as nothing has been said yet."""
        if self.is_used or self.phase == "opening":
            return
        await self.close()
        self.phase, self.id, self.folder = "new", "", await asyncio.to_thread(os.path.expanduser, folder.strip())
        await self._open()

    async def _fork(self, tab: Tab) -> None:
        """Go on in a copy of the session."""
        copy = WebChat(self._agent, self._renderer, self._database, self.folder)
        opened = await self._agent.fork_session(copy, self.id, self.folder)
        await self._agent.close_session(opened.session_id)  # it is stored, and opened by the first action
        tab.add({"@go": f"/chat/{opened.session_id}"})

    async def _complete(self, tab: Tab, text: str) -> None:
        found = await asyncio.to_thread(list_completions, text, self.commands, self.folder)
        tab.add({"@menu": self._renderer.render("menu", found, text)})

    # What is around the log

    def _put_frame(self) -> None:
        """Show the state of the session around its log."""
        name = self.title or (f"Session {self.id[:8]}" if self.is_used else "New session")
        mark = "? " if self._cards else "… " if self.phase == "working" else ""
        asked = next((block for _, block, _ in self._cards.values()), "")
        self.feed.put("@name", f"{mark}{name} · crow")
        self.feed.put("@phase", self.phase)
        self.feed.put(
            "title", lambda: self._renderer.render("title", name, self.id if self.is_used else "", self.folder)
        )
        self.feed.put("notice", lambda: self._renderer.render("notice", self.holder, self._problem))
        self.feed.put(
            "state", lambda: self._renderer.render("state", self.phase, asked, self._is_cancelled, self.usage)
        )
        self.feed.put("queue", lambda: self._renderer.render("queue", self.words))
        self.feed.put("options", lambda: self._renderer.render("options", self.options, list_entries))

    def _describe(self, error: Exception) -> str:
        if isinstance(error, RpcError) and (client := self._agent.client):
            return client.describe_error(error)
        return str(error) or "The connection to the agent has ended."

    def _start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[None]":
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


def read_values(value: Any) -> Sequence[str]:
    """Return the values of a field of a form, which sends one alone, or a list of several."""
    match value:
        case [*several]:
            return [*map(str, several)]
        case _:
            return [str(value)]


def read_image(url: Any) -> ImageBlock | None:
    """Return the image in a URL that contains it; None if it is not of a safe type."""
    head, _, data = str(url).partition(";base64,")
    image = ImageBlock(data=data, mime_type=head.removeprefix("data:"))
    return image if make_image_url(image) else None


def get_time() -> float:
    return asyncio.get_running_loop().time()
