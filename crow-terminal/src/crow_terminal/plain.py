"""An append-only terminal, for screen readers, pipes and terminals that know no escape sequences.

Whole lines are printed once; nothing moves, and no colour is used. Questions are answered by a line.
"""

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

import crow_system as system
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import ListSessionsRequest, LoadSessionRequest, SessionNotification
from crow_system.repository import find_folder_to_continue

from crow_terminal.agent_connections import NoAgent, connect
from crow_terminal.blocks import AnsweredQuestion
from crow_terminal.chat_client import AgentQuestion, ChatClient
from crow_terminal.dialogs import ListDialog, TextDialog
from crow_terminal.effects import Cancel, Edit, Effect, Respond, Send, Show
from crow_terminal.lost_output import discard_output, watch_output
from crow_terminal.paint import Painter
from crow_terminal.printable_text import escape
from crow_terminal.prompt_content import make_prompt
from crow_terminal.question import Question
from crow_terminal.settings import Left, Settings, describe_continuation, find_last
from crow_terminal.state import State
from crow_terminal.theme import Theme

PLAIN = Theme("", "", "", "", "", "", "", "", "", "")
"""A theme without any escape sequence."""
WIDTH = 80
WORDS = {"y": "yes", "a": "always", "n": "no", "e": "edit"}
"""The word that may be written in place of each letter."""


class PlainChat:
    """A conversation on standard input and output, line by line."""

    def __init__(self, settings: Settings, left: Left | None = None) -> None:
        self.settings, self.cwd, self.left = settings, settings.cwd, left or Left(settings.cwd)
        self.state = State(agent=settings.agent.name, folder=settings.cwd)
        self.painter = Painter(PLAIN)
        self.client: ChatClient | None = None
        self.session_id = ""
        self.answered = asyncio.Event()
        """Set when the turn has ended."""
        self.asked = asyncio.Event()
        """Set when something is to be answered, or the turn has ended."""
        self.own_turn: asyncio.Future[None] | None = None
        """A turn that the agent has begun by itself, such as that of a timer."""
        self.begun = asyncio.Event()
        """Set while there is such a turn."""
        self.failed = self.is_used = self.is_lost = self.reads = False
        self._running: asyncio.Future[int]
        self._cancelling: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Answer lines until the end of input or of output, and return the exit code."""
        self._running = asyncio.ensure_future(self.answer_lines())
        with watch_output(self.lose):
            try:
                return await self._running
            except asyncio.CancelledError:
                if not self.is_lost:
                    raise
                return 1

    async def answer_lines(self) -> int:
        """Answer lines until the end of input, and return the exit code."""
        agent = self.settings.agent
        try:
            link = await connect(agent, self.cwd)
        except NoAgent as error:
            self.print(str(error))
            return 1
        self.client = client = ChatClient(link.transport, self.receive, self.ask, self.withdraw)
        async with client.serving():
            ended = asyncio.ensure_future(client.until_closed())
            ended.add_done_callback(self._end_own_turn)
            try:
                self.state.abilities = await client.start(agent.version)
                await self.open_session(client)
                if self.settings.prompt:
                    await self.send(self.settings.prompt)
                while (line := await self.read_prompt()) is not None:
                    if line.strip() in ("/quit", "/exit"):
                        break
                    if line.strip():
                        await self.send(line)
            except RpcError as error:
                self.print(client.describe_error(error))
                return 1
            except ConnectionClosed:
                self.print(await link.describe_end())
                return 1
        if self.is_used and sys.stdout.isatty():
            for line in describe_continuation(self.settings, self.session_id, self.state.abilities, WIDTH):
                self.print(line)
        return 1 if self.failed else 0

    async def open_session(self, client: ChatClient) -> None:
        """Open the session that the settings name, the last one of the folder, or a new one."""
        session = self.settings.resume
        if self.settings.last and self.state.abilities.lists:
            stored = await client.request("session/list", ListSessionsRequest(cwd=self.cwd))
            session = find_last(stored.sessions, self.cwd)
            found = next((one.cwd for one in stored.sessions if one.session_id == session), self.cwd)
            self.cwd = self.left.folder = find_folder_to_continue(found, self.cwd)
        if session:
            self.session_id = session
            await client.request("session/load", LoadSessionRequest(session_id=session, cwd=self.cwd))
        else:
            self.session_id = (await client.new_session(self.cwd)).session_id
        self.is_used = bool(session)
        self.perform(self.state.open_session(None, [], time.monotonic()))

    async def read_prompt(self) -> str | None:
        """Read the next prompt; None at the end of input. A turn that the agent begins by itself comes first."""
        typed = bytearray()
        while True:
            self.reads = True
            reading = asyncio.ensure_future(read_line("> ", typed))
            begun = asyncio.ensure_future(self.begun.wait())
            await asyncio.wait([reading, begun], return_when=asyncio.FIRST_COMPLETED)
            self.reads = False
            begun.cancel()
            reading.cancel()  # what it has read of a line stays in `typed`
            await asyncio.wait([reading])
            while self.own_turn:
                await self.answer_until(self.own_turn)
            if not reading.cancelled():
                return reading.result()

    async def send(self, text: str) -> None:
        """Send a prompt and wait for the end of its turn; ask what the agent asks. Ctrl-C cancels it."""
        client = self.client
        assert client
        self.failed, self.is_used = False, True
        self.perform([one for one in self.state.submit(text, time.monotonic()) if isinstance(one, Send)])
        blocks = await asyncio.to_thread(make_prompt, text, (), self.cwd, self.state.abilities)
        turn = asyncio.ensure_future(client.prompt(self.session_id, blocks))
        try:
            await self.answer_until(turn)
            self.perform(self.state.end_turn(await turn, time.monotonic()))
        except RpcError as error:
            self.failed = True
            self.perform(self.state.fail_turn(client.describe_error(error), time.monotonic()))
        finally:
            turn.cancel()  # it has ended, unless nobody reads the output any more

    async def answer_until(self, turn: "asyncio.Future[Any]") -> None:
        """Ask what the agent asks until a turn has ended. Ctrl-C cancels the turn."""
        loop = asyncio.get_running_loop()
        with suppress(RuntimeError, ValueError):  # not in this thread
            system.on_signal(loop, signal.SIGINT, self.stop)
        try:
            while not turn.done():
                self._asking = asking = asyncio.ensure_future(self.answer_next())
                await asyncio.wait([turn, asking], return_when=asyncio.FIRST_COMPLETED)
                if asking.done() and not asking.cancelled():
                    asking.result()
                asking.cancel()
        finally:
            with suppress(RuntimeError, ValueError):
                system.stop_signal(loop, signal.SIGINT)

    def stop(self) -> None:
        """Cancel the turn, and do not wait for the line that answers its question."""
        self.perform(self.state.cancel(time.monotonic()))
        if self._asking:
            self._asking.cancel()

    async def answer_next(self) -> None:
        """Wait until the agent asks something, and ask the user."""
        await self.asked.wait()
        await self.answer()

    async def answer(self) -> None:
        """Ask the user what the agent asks."""
        dialog = self.state.dialog
        if dialog is None:
            self.asked.clear()
            return
        if isinstance(dialog, Question):
            self.perform(await self.ask_permission(dialog))
            if self.state.dialog is None:
                self.asked.clear()
            return
        for line in dialog.about:
            self.print(f"  {escape(line)}")
        if isinstance(dialog, TextDialog):
            effects = await self.write(dialog)
        else:
            effects = await self.choose(dialog)
        self.perform(effects)
        if self.state.dialog is None:
            self.asked.clear()

    async def write(self, dialog: TextDialog) -> list[Effect]:
        """Ask for a line, which replaces the text that is proposed; at the end of input, dismiss the question."""
        for line in dialog.text.splitlines():
            self.print(f"  {escape(line)}")
        keys = " (Enter accepts this, Ctrl-D declines)" if dialog.text else ""
        line = await read_line(f"{dialog.label}{keys}: ")
        now = time.monotonic()
        return dialog.dismiss(now) if line is None else dialog.submit(line or dialog.text, now)

    async def choose(self, dialog: ListDialog) -> list[Effect]:
        """Ask for the number of a row; at the end of input, dismiss the question."""
        self.print(f"? {escape(dialog.title)}")
        for number, row in enumerate(dialog.rows, 1):
            self.print(f"  {number} {escape(row.label)}")
        while (line := await read_line("Number: ")) is not None:
            if line.strip().isdecimal() and (row := dialog.find(int(line))):
                return dialog.choose(row, time.monotonic())
            self.print(f"Type a number from 1 to {len(dialog.rows)}.")
        return dialog.dismiss(time.monotonic())

    async def ask_permission(self, question: Question) -> list[Effect]:
        """Ask for the letter of an answer, with what it needs after it; at the end of input, cancel the turn."""
        self.print(f"? {question.title}{f' ({question.danger})' if question.danger else ''}")
        for line in question.lines:
            self.print(f"  | {line.text}")
        for row in question.rows:
            self.print(f"  {row.letter}  {row.label}")
        letters = ", ".join(row.letter for row in question.rows if row.letter)
        while (line := await read_line(f"Answer ({letters}): ")) is not None:
            word, _, text = line.strip().partition(" ")
            letter = word[:1].lower()
            row = question.find(letter) if word.lower() in (letter, WORDS.get(letter)) else None
            if row is None or (text and not (row.value and row.value.wants)):
                self.print(f"Type a letter: {letters}.")
            elif row.value is None:
                if chosen := await self.choose_lasting(question):
                    return chosen
            elif row.value.wants:
                return await self.write_answer(question, letter, text)
            else:
                return question.choose(row, time.monotonic())
        self.asked.clear()
        return self.state.cancel(time.monotonic())

    async def choose_lasting(self, question: Question) -> list[Effect]:
        """Ask for the number of an answer that lasts; any other line goes back."""
        rule = ""
        for row in question.lasting:
            if row.value.rule != rule:
                rule = row.value.rule
                self.print(f"  {rule}")
            self.print(f"  {row.letter}  {row.label}")
        line = (await read_line("Number: ") or "").strip()
        row = next((row for row in question.lasting if row.letter and row.letter == line), None)
        return question.choose(row, time.monotonic()) if row else []

    async def write_answer(self, question: Question, letter: str, text: str) -> list[Effect]:
        """Choose an answer with a text; a command that is not on the line is asked for."""
        if letter == "e" and not text:
            text = await read_line("The command to run instead: ") or ""
            if not text.strip():
                return []
        row = question.find(letter)
        effects = question.choose(row, time.monotonic()) if row else []
        dialog = self.state.dialog
        return [*effects, *(dialog.submit(text, time.monotonic()) if isinstance(dialog, TextDialog) else [])]

    def receive(self, notification: SessionNotification) -> None:
        if notification.session_id == self.session_id or not self.session_id:
            self.perform(self.state.receive(notification.update, time.monotonic()))
            self._follow_own_turn()

    def _follow_own_turn(self) -> None:
        """Note that the agent has begun a turn by itself, or that this turn has ended."""
        if self.state.by_agent and not self.own_turn:
            self.own_turn = asyncio.get_running_loop().create_future()
            self.begun.set()
            if self.reads and sys.stdin.isatty():
                self.print("")  # ends the line of the prompt
        elif not self.state.by_agent:
            self._end_own_turn()

    def _end_own_turn(self, ended: object = None) -> None:
        """Note that such a turn has ended, or the agent."""
        if self.own_turn:
            self.own_turn.set_result(None)
            self.own_turn = None
            self.begun.clear()

    def ask(self, id: int, request: AgentQuestion) -> None:
        self.perform(self.state.ask(id, request, time.monotonic()))
        self.asked.set()

    def withdraw(self, id: int) -> None:
        self.perform(self.state.withdraw(id, time.monotonic()))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Show(block=AnsweredQuestion() as block):  # it has been printed
                    self.print(f"  → {block.answer}{f': {block.written}' if block.written else ''}")
                case Show(block=block):
                    for line in self.painter.paint(block, WIDTH):
                        self.print(line)
                case Respond(id=id, response=response) if self.client:
                    self.client.answer(id, response)
                case Cancel() if self.client:
                    self._cancelling = asyncio.ensure_future(self.client.cancel(self.session_id))
                case Edit():
                    pass
                case _:
                    pass

    def print(self, line: str) -> None:
        try:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        except OSError:
            self.lose()

    def lose(self) -> None:
        """End, as nobody reads the output any more."""
        if not self.is_lost:
            self.is_lost = True
            discard_output()
            self._running.cancel()


async def read_line(question: str, line: bytearray | None = None) -> str | None:
    """Read a line from standard input; None at its end. Asks only if a person is there.

    `line` is the beginning of the line, read before. If this is cancelled, it has the bytes read so far.
    """
    line = bytearray() if line is None else line
    if sys.stdin.isatty():
        sys.stdout.write(question)
        sys.stdout.flush()
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(0, ready.set)
    except (OSError, PermissionError):  # a file is always ready
        text = await asyncio.to_thread(sys.stdin.readline)
        return text.rstrip("\n") if text else None
    try:
        while True:
            await ready.wait()
            ready.clear()
            letter = os.read(0, 1)
            if not letter:
                sys.stdout.write("\n" if sys.stdin.isatty() else "")  # ends the line of the question
                return line.decode(errors="replace") if line else None
            if letter == b"\n":
                return line.decode(errors="replace")
            line += letter
    finally:
        loop.remove_reader(0)


def run_plain(settings: Settings, left: Left | None = None) -> int:
    """Run the append-only terminal until the end of input, and return the exit code. `left` is as in `run`."""

    async def main() -> int:
        return await PlainChat(settings, left).run()

    return asyncio.run(main())
