"""A session that is talked with: what the person does, and the turns that follow."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

from crow_core.acp.complete_method import COMPLETE_METHOD, read_completions
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    BooleanConfigOption,
    SetSessionConfigOptionRequest,
)
from crow_core.acp.shared_methods import BACKGROUND_METHOD, STEERING_METHOD, is_taken, make_steering_params
from crow_terminal.blocks import Note, UserPrompt
from crow_terminal.prompt_content import make_prompt
from crow_terminal.state import NOT_SENT
from crow_terminal.stops import STOPS, describe_stop
from msgspec import UNSET

from crow_web.chat_session import ChatSession, Words, get_time
from crow_web.completion import MOST, list_completions
from crow_web.live import Tab

IDLE = 180.0
"""Seconds after the last action in which a session stays open, while a page shows it."""
ALONE = 30.0
"""The same while no page shows it: a phone that sleeps comes back."""


class WebChat(ChatSession):
    """A session with what a person does in it."""

    def say(self, words: Words, *, later: bool = False) -> None:
        """Send a prompt, or let the running turn have it; `later` keeps it for after the turn."""
        if not (words.text.strip() or words.images) or words.sent in self._stored:
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

    async def send_to_background(self) -> None:
        """Send the running commands and sub-agents to the background."""
        if self.phase == "working" and (client := self._agent.client):
            answer = await client.request(BACKGROUND_METHOD, {"sessionId": self.id, "action": "send"})
            if not answer["sent"]:
                self.log.show([Note(NOT_SENT)])

    def recall(self, tab: Tab, place: int) -> None:
        """Take words back into the editor of a page."""
        if place < len(self.words):
            words = self.words.pop(place)
            if words.task:
                words.task.cancel()  # the agent is told
            tab.add({"@edit": words.text})
            self._put_frame()

    def leave_out(self, call: str) -> None:
        """Forget what an app has told."""
        self.contexts.texts.pop(call, None)
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
            self.contexts.texts.clear()
            await self._read_again()
            self.log.show([Note("The last turn was undone.")])

    def follow_turn(self, stop_reason: str, *, runs: bool) -> None:
        """A turn of the terminal has begun, or ended."""
        if runs:
            self.phase, self._is_cancelled, self.is_used = "working", False, True
            self._put_frame()
        elif self.phase == "working":
            sentence = STOPS.get(stop_reason)
            self._end_turn([Note(sentence, "warning")] if sentence else [])
            self._send_waiting()

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
                self.log.show_attachment(image)
            told = [] if words.text.startswith("/") else self.contexts.take()
            for block in told:
                self.log.show_attachment(block)
            self._put_frame()
            prompt = await asyncio.to_thread(
                make_prompt, words.text, (), self.folder, self._agent.abilities, words.images
            )
            before = await self._find_version() if words.text.strip() == "/redo" else None
            try:
                meta = {"crow": {"sent": words.sent}} if words.sent else None
                response = await client.prompt(self.id, [*prompt, *told], meta)
            except ConnectionClosed:
                return  # `lose` says so
            except RpcError as error:
                self._end_turn([Note(client.describe_error(error), "error")])
            else:
                sentence = describe_stop(response)
                self._end_turn([Note(sentence, "warning")] if sentence else [])
                if before and before != await self._find_version():
                    await self._read_again()
                    self.log.show([Note("What the last /undo took back is here again.")])

    def _end_turn(self, notes: Sequence[Note] = ()) -> None:
        self.log.end_turn(get_time())
        self.log.show(notes)
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

    def complete(self, tab: Tab, text: str) -> None:
        """Offer a page what may follow a text. The answer to its last request is dropped, as it could come later."""
        if tab.completing:
            tab.completing.cancel()
        tab.completing = asyncio.ensure_future(self._complete(tab, text))

    async def _complete(self, tab: Tab, text: str) -> None:
        """Show commands and files, and then what the agent adds: it may wait for an MCP server."""
        found = await asyncio.to_thread(list_completions, text, self.commands, self.folder)
        tab.add({"@menu": self._renderer.render("menu", found, text)})
        if self.is_open and self._agent.abilities.completes and (client := self._agent.client):
            with suppress(RpcError, ConnectionClosed):
                answer = await client.request(COMPLETE_METHOD, {"sessionId": self.id, "text": text})
                if added := read_completions(answer, text)[:MOST]:
                    tab.add({"@menu": self._renderer.render("menu", [*found, *added], text)})
