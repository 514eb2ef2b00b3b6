"""The terminal put together: the state between the agent and the screen. `run` starts it."""

import asyncio
import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import crow_system as system
from crow_core import __version__
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AvailableCommandsUpdate,
    ContentBlock,
    ImageBlock,
    ListSessionsRequest,
    LoadSessionRequest,
    NewSessionResponse,
    ResumeSessionRequest,
    SessionNotification,
    SetSessionConfigOptionRequest,
)
from crow_core.acp.shared_methods import (
    REWIND_METHOD,
    REWIND_POINTS_METHOD,
    STEERING_METHOD,
    is_taken,
    make_steering_params,
)
from msgspec import UNSET, Struct
from prompt_toolkit.buffer import Buffer

from crow_terminal import effects
from crow_terminal.agent_connections import AgentAddress, NoAgent, connect
from crow_terminal.blocks import Block, CommandOutput
from crow_terminal.branch import read_branch
from crow_terminal.chat_client import AgentQuestion, ChatClient
from crow_terminal.completion import ChatCompleter
from crow_terminal.dialogs import ListDialog
from crow_terminal.effects import Effect
from crow_terminal.first_run import is_first_run, make_card
from crow_terminal.key_bindings import make_bindings
from crow_terminal.live import compose_above, compose_footer, compose_menu
from crow_terminal.local_commands import find_command
from crow_terminal.markdown import Prose
from crow_terminal.page import NoPage, PageServer
from crow_terminal.paint import Painter
from crow_terminal.pickers import confirm_taking_back, offer_turns, pick_option, pick_prompt, pick_session
from crow_terminal.printable_text import clip, clip_ansi, escape_line
from crow_terminal.prompt_content import MAX_IMAGE_BYTES, find_large_images, find_pasted_image, make_prompt
from crow_terminal.question import Question
from crow_terminal.session_options import OfferedOptions, find_changes
from crow_terminal.state import State
from crow_terminal.terminal import EDITOR_ROWS, Terminal, restore
from crow_terminal.theme import choose_theme
from crow_terminal.user_command import UserCommand

PAINT_SECONDS = 0.04
"""Seconds of a frame in which blocks are painted; the rest waits for the next frame, so that keys are heard."""
START_TIMEOUT = 60.0
"""Seconds that an agent may take to answer `initialize`."""
CLOSE_TIMEOUT = 5.0
"""Seconds to wait for the agent's end when leaving."""
PASTE_LINES = 8
"""Lines of a paste above which only its size is shown in the editor."""
TURNS_LIMIT = 50
"""Messages that `/rewind` offers."""
PASTE_LENGTH = 2_000
"""The same in characters."""
ROWS_AT_A_QUESTION = 2
"""Rows of the editor below a question for permission."""
MAX_PENDING_LINES = 400
"""Lines that are printed in one frame."""


class Settings(Struct, frozen=True):
    """The settings that the terminal is started with."""

    agent: AgentAddress
    cwd: str
    theme: str = "dark"
    history: Callable[[], str | None] | None = None
    """Finds the file of earlier prompts; None for none."""
    resume: str = ""
    """The id of the session to load; empty for a new one."""
    last: bool = False
    """Whether to load the last session of the folder, if there is one."""
    prompt: str = ""
    """A prompt to begin with."""
    command: str = ""
    """The command that opens this terminal; it takes `-c` and `-r ID`. Empty for none."""
    choose: bool = False
    """Whether the user chooses one of the stored sessions first."""
    page: Sequence[str] = ()
    """The command that serves the pages of sessions, as `PageServer` starts it; empty for none."""


class Chat:
    """An interactive terminal with one agent."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = State(agent=settings.agent.name, folder=settings.cwd, has_page=bool(settings.page))
        self.painter = Painter(choose_theme(settings.theme, os.environ))
        self.client: ChatClient | None = None
        self.session_id = ""
        self._turn_ids: list[str] = []
        """The ids of the messages that `/rewind` offers, the newest first."""
        self._is_used = False
        """Whether something was said in the session."""
        self._choose = settings.choose
        self._is_first = settings.history if settings.agent.name == "crow" else None
        """Finds the file whose absence says that this is the first run; None after that was asked."""
        self.pastes: dict[str, str] = {}
        """The long pastes, and the paths of images, by the words that stand for them in the editor."""
        self.images: dict[str, ImageBlock] = {}
        """The images from the clipboard by the words that stand for them, also in prompts that were sent."""
        self._image_count = 0
        self._completes = False
        """Whether Tab waits for completions."""
        self._is_interrupting = False
        """Whether the key that is being handled is Ctrl-C."""
        self.shown: list[Block] = []
        """Every block, for the export."""
        self._pending: deque[tuple[Block, bool]] = deque()
        """Blocks to print; with each whether to leave out nothing."""
        self._lines: deque[str] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._session_task: asyncio.Task[None] | None = None
        self._command: UserCommand | None = None
        self._pages = PageServer(settings.page)
        self._draft: str | None = None
        """The text of the editor while the user writes an answer there."""
        self._tail: tuple[Any, int, list[str]] = (None, 0, [])
        self.completer = ChatCompleter(self.state, lambda: self.terminal.editor.history.get_strings())
        self.terminal = Terminal(
            above=self.compose_above,
            below=self.compose_below,
            label=self.make_label,
            shows_editor=lambda: not self.state.chooses,
            editor_rows=lambda: ROWS_AT_A_QUESTION if self.is_asking() else EDITOR_ROWS,
            note_key=self.note_key,
            take=self.take_lines,
            is_moving=lambda: self.state.is_moving(time.monotonic()),
            keys=make_bindings(self),
            completer=self.completer,
            history=settings.history,
            no_color=bool(os.environ.get("NO_COLOR")),
            end_key=self.end_key,
        )
        self.terminal.editor.on_completions_changed += self.note_completions

    async def run(self) -> int:
        """Show the terminal until the user leaves, and return the exit code."""
        loop = asyncio.get_running_loop()
        for number in system.END_SIGNALS:
            system.on_signal(loop, number, self.terminal.exit)
        try:
            await self.terminal.run(self.start)
        finally:
            restore()
            await self.close()
            sys.stdout.write(self.describe_continuation())
        return 0

    def describe_continuation(self) -> str:
        """Make the line that says how to continue the session; nothing if that is not possible."""
        command, can = self.settings.command, self.state.abilities
        if not (command and self._is_used and can.loads):
            return ""
        last = f"{command} -c, or " if can.lists else ""
        return f"Continue with {last}{command} -r {self.session_id}\n"

    def start(self) -> None:
        """Start the agent, now that the first frame is shown."""
        gc.enable()  # a caller may have switched it off, to load this module sooner
        name = (
            f"crow {__version__}"
            if self.settings.agent.name == "crow"
            else f"crow with {clip(escape_line(self.settings.agent.name), 24)}"
        )
        self.perform(self.state.remark(f"{name} · /help shows the keys and the commands", "done"))
        if self.settings.prompt:
            self.state.queue.prompts.append(self.settings.prompt)
        self._open(self.settings.resume, last=self.settings.last)
        self._start(self._find_branch())

    async def close(self) -> None:
        """End the connection, the agent and all tasks."""
        if self._command:
            self._command.stop()
        self._pages.end()
        tasks = [*self._tasks, *([self._session_task] if self._session_task else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT)

    # What is shown

    def compose_above(self, width: int, height: int) -> list[str]:
        return compose_above(self.state, get_time(), width, height, self.painter.theme, self.paint_tail(width))

    def paint_tail(self, width: int) -> list[str]:
        """Paint the open text. While finished blocks wait for their frame, it stays as it was before."""
        if self._pending or self._lines:
            return self._tail[2] if self._tail[1] == width else []
        block = self.state.transcript.open
        if block is None or (self.painter.fold_thoughts and block.thought):
            return []
        if self._tail[0] != block or self._tail[1] != width:
            lines = [clip_ansi(line, width) for line in self.painter.paint_alone(block, width)]
            self._tail = block, width, lines
        return self._tail[2]

    def compose_below(self, width: int) -> list[str]:
        theme = self.painter.theme
        completions = self.terminal.editor.complete_state
        if completions and completions.completions and not self.state.chooses:
            items = [(each.display_text, each.display_meta_text) for each in completions.completions]
            return compose_menu(items, completions.complete_index, width, theme)
        return [compose_footer(self.state, time.monotonic(), width, theme)]

    def make_label(self) -> str:
        return "❯ "

    def take_lines(self, width: int) -> list[str]:
        """Return the next lines to print."""
        if self._pending:
            self._tail = (None, 0, [])
        end = time.monotonic() + PAINT_SECONDS
        while self._pending and len(self._lines) < MAX_PENDING_LINES and time.monotonic() < end:
            block, whole = self._pending.popleft()
            if whole:
                self._lines.extend(["", *self.painter.paint_alone(block, width, whole=True)])
            else:
                self._lines.extend(self.painter.paint(block, width))
        count = min(len(self._lines), MAX_PENDING_LINES)
        return [self._lines.popleft() for _ in range(count)]

    def perform(self, wanted: Sequence[Effect]) -> None:
        """Carry out effects, and draw the state as it is now."""
        is_entry = self.state.writes_answer
        if is_entry and self._draft is None:
            self._draft = self.terminal.editor.text
        for effect in wanted:
            self._perform(effect)
        if not is_entry and self._draft is not None:
            self.terminal.set_text(self._draft)
            self._draft = None
        self.terminal.set_title(self.make_title())
        self.terminal.update()

    def make_title(self) -> str:
        """Make the title of the window: whether the agent asks, and what the session is about, or where."""
        state = self.state
        mark = "? " if state.asked else "… " if state.phase == "working" else ""
        return f"{mark}{state.title or os.path.basename(state.folder)} · {state.agent}"

    def _perform(self, effect: Effect) -> None:
        match effect:
            case effects.Show(block=block, whole=whole):
                self._pending.append((block, whole))
                if not whole:
                    self.shown.append(block)
            case effects.Send(text=text, outputs=outputs):
                self._start(self._prompt(text, outputs))
            case effects.Steer():
                self._start(self._steer(effect))
            case effects.Withdraw():
                self._withdraw_words()
            case effects.Cancel():
                self._start(self._cancel())
            case effects.Respond(id=id, response=response):
                if self.client:
                    self.client.answer(id, response)
            case effects.Wait(seconds=seconds):
                asyncio.get_running_loop().call_later(seconds, self.wake)
            case effects.Leave():
                self.terminal.exit()
            case effects.Edit(text=text, keep=keep):
                self._edit(text, keep)
            case effects.SetOption():
                if self.client:
                    self._start(self._set_option(self.client, self.state.options, effect))
            case effects.Open(session=session, again=again):
                self._open(self.session_id if again else session, again=again)
            case effects.ListSessions():
                self._start(self._list_sessions())
            case effects.Run(command=command, shared=shared):
                self._start(self._run_command(command, shared))
            case effects.StopCommand():
                if self._command:
                    self._command.stop()
            case effects.Ring(sentence=sentence):
                self.terminal.ring(sentence)
            case effects.ListTurns():
                self._start(self._list_turns())
            case effects.TakeBack(turns=turns, confirmed=confirmed):
                self._start(self._take_back(turns, confirmed))
            case effects.Copy(text=text):
                self.terminal.copy(text)
                self.state.show_hint("Copied.", time.monotonic())
            case effects.ExportSession(path=path):
                self._start(self._export(path))
            case effects.OpenPage():
                self._start(self._open_page())
            case effects.SetTheme(name=name):
                self.painter.theme = choose_theme(name, os.environ)
                self._tail = (None, 0, [])
            case effects.Fold(thoughts=thoughts, output=output):
                if thoughts is not None:
                    self.painter.fold_thoughts = thoughts
                if output is not None:
                    self.painter.whole = not output

    def _edit(self, text: str, keep: bool) -> None:
        """Put a text into the editor; with `keep`, above the one that is there, or that waits for a question's end."""
        if keep and self._draft is not None:
            self._draft = "\n".join(filter(None, [text, self._draft]))
        else:
            self.terminal.set_text("\n".join(filter(None, [text, self.terminal.editor.text])) if keep else text)

    # The agent

    def _open(self, session: str = "", *, last: bool = False, again: bool = False) -> None:
        """Open a session, after the current one has been closed."""
        before = self._session_task
        self._session_task = asyncio.ensure_future(self._hold_session(before, session, last, again))

    async def _hold_session(self, before: "asyncio.Task[None] | None", session: str, last: bool, again: bool) -> None:
        """Connect to the agent and hold the connection until the session is left or the agent ends."""
        if before:
            before.cancel()
            await asyncio.wait([before])
            name = f"Session {escape_line(session)[:8]}" if session else "New session"
            self.perform(self.state.leave_session(name, again=again and bool(session)))
        try:
            link = await connect(self.settings.agent, self.settings.cwd)
        except NoAgent as error:
            self.perform(self.state.end_agent(str(error), time.monotonic()))
            return
        self.client = client = ChatClient(link.transport, self._receive, self._ask, self._withdraw)
        problem = ""
        try:
            async with client.serving():
                try:
                    await self._open_session(client, session, last)
                except TimeoutError:
                    problem = f"{self.settings.agent.name} did not answer within {START_TIMEOUT:g} seconds."
                except RpcError as error:
                    problem = client.describe_error(error)
                except ConnectionClosed:
                    pass
                if not problem:
                    await client.until_closed()
                    problem = await link.describe_end()
        finally:
            self.client = None
        self.perform(self.state.end_agent(problem, time.monotonic()))

    async def _open_session(self, client: ChatClient, session: str, last: bool) -> None:
        async with asyncio.timeout(START_TIMEOUT):
            self.state.abilities = await client.start(self.settings.agent.version)
        cwd = self.settings.cwd
        if last and self.state.abilities.lists:
            stored = await client.request("session/list", ListSessionsRequest(cwd=cwd))
            session = stored.sessions[0].session_id if stored.sessions else ""
        can, loaded = self.state.abilities, NewSessionResponse(session_id="")
        if session and not (can.loads or can.resumes):
            self.perform(self.state.remark("This agent keeps no sessions: it has forgotten what was said.", "warning"))
            session = ""
        if session:
            self.state.loading, self.session_id = not self.state.muted, session
            try:
                if self.state.muted and can.resumes:
                    loaded = await client.request("session/resume", ResumeSessionRequest(session_id=session, cwd=cwd))
                else:
                    loaded = await client.request("session/load", LoadSessionRequest(session_id=session, cwd=cwd))
            except RpcError as error:
                sentence = f"{client.describe_error(error)} This is a new session."
                self.perform(self.state.remark(sentence, "error"))
                session = ""
        if not session:
            loaded = await client.new_session(cwd)
            self.session_id = loaded.session_id
        options = OfferedOptions(loaded.modes or None, loaded.config_options or [])
        for change in [] if session else find_changes(self.state.options, options):
            try:
                await self._set_option(client, options, change)
            except RpcError as error:  # the session has its own default then
                self.perform(self.state.remark(client.describe_error(error), "error"))
        self._is_used = bool(session)
        if self._is_first and await asyncio.to_thread(is_first_run, self._is_first):
            self.perform([effects.Show(Prose(make_card(options)))])
        self._is_first = None
        self.perform(self.state.open_session(options.modes, options.config, time.monotonic()))
        if self._choose:
            self._choose = False
            self._start(self._list_sessions())

    def _receive(self, notification: SessionNotification) -> None:
        if notification.session_id == self.session_id or not self.session_id:
            self.perform(self.state.receive(notification.update, time.monotonic()))
            if isinstance(notification.update, AvailableCommandsUpdate) and self.terminal.editor.text.startswith("/"):
                self.terminal.editor.start_completion()  # of what was typed before they were known

    def _ask(self, id: int, request: AgentQuestion) -> None:
        self.perform(self.state.ask(id, request, get_time()))

    def _withdraw(self, id: int) -> None:
        self.perform(self.state.withdraw(id, get_time()))

    async def _prompt(self, text: str, outputs: Sequence[CommandOutput]) -> None:
        client = self.client
        if client is None:
            return
        self._is_used = True
        blocks = await self._make_prompt(text, outputs)
        try:
            response = await client.prompt(self.session_id, blocks)
        except RpcError as error:
            self.perform(self.state.fail_turn(client.describe_error(error), time.monotonic()))
        except ConnectionClosed:
            pass  # the end of the connection is told by its own task
        else:
            self.perform(self.state.end_turn(response, time.monotonic()))

    async def _make_prompt(self, text: str, outputs: Sequence[CommandOutput]) -> list[ContentBlock]:
        images = [image for words, image in self.images.items() if words in text]
        if images and not self.state.abilities.images:
            self.perform(self.state.remark("This agent takes no images: it gets the text alone.", "warning"))
        elif large := await asyncio.to_thread(find_large_images, text, self.settings.cwd):
            limit = f"larger than {MAX_IMAGE_BYTES // 1_000_000} MB: the agent gets the path alone"
            self.perform(self.state.remark(f"{', '.join(map(escape_line, large))}: {limit}.", "warning"))
        return await asyncio.to_thread(make_prompt, text, outputs, self.settings.cwd, self.state.abilities, images)

    async def _steer(self, words: effects.Steer) -> None:
        taken = False
        try:
            if client := self.client:
                blocks = await self._make_prompt(words.text, words.outputs)
                params = make_steering_params(self.session_id, blocks)
                taken = is_taken(await client.request(STEERING_METHOD, params))
        except RpcError:
            pass  # withdrawn; or they are sent as a prompt, whose answer says what is wrong
        except ConnectionClosed:
            return  # the end of the connection is told by its own task
        self.perform(self.state.end_steer(words, taken, time.monotonic()))

    def _withdraw_words(self) -> None:
        if self.client:
            self.client.connection.cancel_requests(STEERING_METHOD)

    async def _cancel(self) -> None:
        if self.client:
            await self.client.cancel(self.session_id)

    async def _set_option(self, client: ChatClient, options: OfferedOptions, change: effects.SetOption) -> None:
        id, value = change.id, change.value
        if not id:
            await client.set_mode(self.session_id, str(value))
            options.set_mode(str(value))
        else:
            kind = "boolean" if isinstance(value, bool) else UNSET
            request = SetSessionConfigOptionRequest(session_id=self.session_id, config_id=id, value=value, type=kind)
            answer = await client.request("session/set_config_option", request)
            options.config = answer.config_options
        self.terminal.update()

    async def _list_sessions(self) -> None:
        if self.client:
            answer = await self.client.request("session/list", ListSessionsRequest(cwd=self.settings.cwd))
            self.perform(
                pick_session(self.state, [one for one in answer.sessions if one.session_id != self.session_id])
            )

    async def _list_turns(self) -> None:
        if self.client:
            answer = await self.client.request(REWIND_POINTS_METHOD, {"sessionId": self.session_id})
            points = answer["points"][: -TURNS_LIMIT - 1 : -1]
            self._turn_ids = [each["messageId"] for each in points]
            self.perform(offer_turns(self.state, list(map(find_typed_text, points))))

    async def _take_back(self, turns: int, confirmed: bool) -> None:
        if not self.client:
            return
        params = {"sessionId": self.session_id, "messageId": self._turn_ids[turns - 1], "mode": "both"}
        answer = await self.client.request(REWIND_METHOD, {**params, "dryRun": not confirmed})
        if why := answer["files"].get("error"):
            self.perform(self.state.remark(f"{why} Nothing was taken back.", "warning"))
            return
        paths = answer["files"]["filesChanged"]
        files = ", ".join(path.removeprefix(f"{self.settings.cwd}/") for path in paths)
        count = f"{turns} message{'' if turns == 1 else 's'}"
        if confirmed:
            what = f"files as before: {files}" if files else "no file had to change"
            self.perform(self.state.take_back(turns, f"Took back {count}; {what}."))
        else:
            what = f"restores {files}" if files else "changes no file"
            if stays := ", ".join(map(str, answer.get("_meta", {}).get("crow", {}).get("stays", []))):
                what += f"; what these did stays: {stays}"
            self.perform(confirm_taking_back(self.state, turns, f"This takes back {count}, and {what}."))

    # The user

    async def _run_command(self, command: str, shared: bool) -> None:
        self._command = UserCommand(command, self.settings.cwd)

        def show(lines: Sequence[str]) -> None:
            self.state.extend_command(lines)
            self.terminal.update()

        try:
            output, code = await self._command.run(show)
        finally:
            self._command = None
        self.perform(self.state.end_command(CommandOutput(command, output, code), shared, time.monotonic()))

    async def _export(self, name: str) -> None:
        from crow_terminal.export import write_export

        name = name or f"crow-{time.strftime('%Y%m%d-%H%M%S')}.md"
        try:
            path = await asyncio.to_thread(write_export, self.settings.cwd, name, [*self.shown], self.state.title)
        except OSError as error:
            self.perform(self.state.remark(f"{error.filename} cannot be written: {error.strerror}.", "error"))
        else:
            self.perform(self.state.remark(f"Written to {path}."))

    async def _open_page(self) -> None:
        if not self._is_used:
            self.perform(self.state.remark("Nothing was said yet: this session has no page."))
            return
        self.state.show_hint("Opening the page…", time.monotonic())
        try:
            address = await self._pages.open(self.session_id, self.settings.cwd)
        except NoPage as error:
            self.perform(self.state.remark(str(error), "error"))
        else:
            self.perform(self.state.remark(f"This session in a browser, until you leave: {address}"))

    async def _find_branch(self) -> None:
        """Find the branch that is checked out, for the footer."""
        self.state.branch = await asyncio.to_thread(read_branch, self.settings.cwd)
        self.terminal.update()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; an error of the agent becomes a sentence."""
        task = asyncio.ensure_future(self._report(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RpcError as error:
            sentence = self.client.describe_error(error) if self.client else str(error)
            self.perform(self.state.remark(sentence, "error"))
        except ConnectionClosed:
            pass
        except Exception as error:  # a fault must not end the session without a word
            if os.environ.get("CROW_DEBUG"):
                raise
            what = f"{type(error).__name__}: {error}. This is a fault in crow; CROW_DEBUG=1 shows where."
            self.perform(self.state.remark(what, "error"))

    # Keys

    def is_choosing(self) -> bool:
        return self.state.chooses

    def is_asking(self) -> bool:
        return isinstance(self.state.dialog, Question)

    def is_answering(self) -> bool:
        return self.is_asking() and not self.terminal.editor.text and self.state.pause.came_before()

    def note_key(self) -> None:
        self._completes = False
        if wanted := self.state.note_key(get_time()):
            self.perform(wanted)

    def wake(self) -> None:
        """Answer by the letter that was typed alone, which leaves the prompt; else look again whether keys answer."""
        now, editor = get_time(), self.terminal.editor
        letter = self.state.take_letter(now)
        if letter and editor.document.char_before_cursor == letter:
            editor.delete_before_cursor(len(editor.text) if editor.text.strip(letter) == "" else 1)  # it came too early
            self.perform(self.state.answer(letter, now))
        self.perform(self.state.wake(now))

    def type_letter(self, text: str) -> None:
        if text.isprintable():
            self.terminal.editor.insert_text(text)
            self.perform(self.state.note_letter(text))

    def confirm(self) -> None:
        letter, text = self.state.pause.followed, self.terminal.editor.text
        if letter and text.strip(letter) == "":
            self.terminal.set_text("")
            self.perform(self.state.answer(letter, get_time()))
        elif self.is_answering():
            self.choose(None)
        elif text:
            self.submit()

    def scroll(self, pages: int) -> None:
        self.perform(self.state.scroll(pages))

    def can_recall(self) -> bool:
        return bool(self.state.queue) and not self.terminal.editor.text and not self.is_choosing()

    def submit(self, *, later: bool = False) -> None:
        text = self.expand(self.terminal.editor.text)
        now = get_time()
        if not self.state.writes_answer:
            if text.strip():
                self.terminal.editor.history.append_string(text)
            if found := find_command(self.state, text.strip()):
                command, words = found
                self.terminal.set_text("")
                if self.state.phase == "working" and not command.works_in_turn:
                    self.state.show_hint("Stop the turn first: Esc.", now)
                    self.terminal.update()
                else:
                    self.perform(command.run(self.state, words))
                return
        self.perform(self.state.submit(text, now, later=later))
        self.pastes.clear()

    def expand(self, text: str) -> str:
        """Replace the words that stand for pastes by what was pasted."""
        for words, pasted in self.pastes.items():
            text = text.replace(words, pasted)
        return text

    def move(self, delta: int) -> None:
        self.perform(self.state.move(delta))

    def choose(self, number: int | None) -> None:
        self.perform(self.state.choose(number, get_time()))

    def type_in_list(self, text: str) -> None:
        """Handle a letter while a list is shown: part of a search, or the number of a row."""
        dialog = self.state.dialog
        if not isinstance(dialog, ListDialog):
            return
        if dialog.searchable:
            dialog.search = dialog.search + text if text else dialog.search[:-1]
            dialog.selected = 0
        elif text == " " and dialog.marked is not None:
            dialog.marked ^= {dialog.selected}
        elif text.isdecimal() and 0 < int(text) <= len(dialog.rows):
            if dialog.marked is not None:
                dialog.marked ^= {int(text) - 1}
            elif self.state.asked:
                dialog.selected = int(text) - 1  # Enter takes it
            else:
                self.choose(int(text))
        self.terminal.update()

    def stop(self) -> None:
        editor = self.terminal.editor
        if editor.complete_state:
            editor.cancel_completion()
        else:
            self.perform(self.state.stop(get_time()))

    def interrupt(self) -> None:
        self._is_interrupting = True
        self.perform(self.state.interrupt(self.terminal.editor.text, get_time()))

    def end_input(self) -> None:
        self.perform([effects.Leave()])

    def recall(self) -> None:
        self.perform(self.state.queue.recall())

    def unfold(self) -> None:
        self.perform(self.state.unfold())

    def fold_thoughts(self) -> None:
        self.state.fold_thoughts = not self.state.fold_thoughts
        self.state.show_hint(f"Thoughts are {'hidden' if self.state.fold_thoughts else 'shown'}.", time.monotonic())
        self.perform([effects.Fold(thoughts=self.state.fold_thoughts)])

    def next_mode(self) -> None:
        self.perform(self.state.options.next_mode())

    def pick_model(self) -> None:
        self.perform(pick_option(self.state, "model"))

    def search_history(self) -> None:
        self.perform(pick_prompt(self.state, self.terminal.editor.history.get_strings()))

    def end_key(self) -> None:
        """Note that a key was handled: any but Ctrl-C makes the next Ctrl-C the first again."""
        if not self._is_interrupting:
            self.state.disarm()
        self._is_interrupting = False

    def paste(self, text: str) -> None:
        """Insert a paste; a long one, or the path of an image, as words that stand for it."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        lines = text.count("\n") + 1
        writes_prompt = not (self.state.writes_answer or self.state.chooses)
        if writes_prompt and not text:
            self.paste_image()  # terminals paste an image as nothing
        elif writes_prompt and self.state.abilities.images and (path := find_pasted_image(text, self.settings.cwd)):
            words = self._name_image()
            self.pastes[words], text = path, words
        elif lines > PASTE_LINES or len(text) > PASTE_LENGTH:
            words = f"[paste {len(self.pastes) + 1}: {lines} lines]"
            self.pastes[words], text = text, words
        self.terminal.editor.insert_text(text)

    def paste_image(self) -> None:
        """Insert words that stand for the image in the clipboard."""
        if self.state.writes_answer or self.state.chooses:
            return
        if self.state.abilities.images or self.state.phase == "starting":
            self._start(self._paste_image())
        else:
            self.state.show_hint("This agent takes no images.", time.monotonic())
            self.terminal.update()

    async def _paste_image(self) -> None:
        from crow_terminal.clipboard import NoImage, read_clipboard

        try:
            image = await read_clipboard()
        except NoImage as reason:
            self.state.show_hint(str(reason), time.monotonic())
        else:
            words = self._name_image()
            self.images[words] = image
            if self._draft is None:
                self.terminal.editor.insert_text(words)
            else:
                self._draft += words  # a question took the editor meanwhile
        self.terminal.update()

    def _name_image(self) -> str:
        self._image_count += 1
        return f"[image {self._image_count}]"

    def complete(self) -> None:
        editor = self.terminal.editor
        if editor.complete_state and editor.complete_state.completions:
            editor.complete_next()
        else:
            self._completes = True
            editor.start_completion()  # unless it looks for some already

    def note_completions(self, editor: Buffer) -> None:
        """Mark the first completion, if Tab was pressed before there was one."""
        if self._completes and editor.complete_state and editor.complete_state.completions:
            self._completes = False
            editor.complete_next()

    def apply_completion(self) -> bool:
        editor = self.terminal.editor
        completing = editor.complete_state
        if completing is None or not completing.completions:
            return False
        chosen = completing.current_completion
        if chosen:
            editor.complete_state = None
            return not editor.text.startswith("/") or editor.text.endswith(" ")
        first = completing.completions[0]
        typed = editor.document.text_before_cursor
        if typed.startswith("/") and " " not in typed and first.text.strip() != typed:
            editor.apply_completion(first)
            return first.text.endswith(" ")
        return False

    def edit_outside(self) -> None:
        self._start(self._edit_outside())

    async def _edit_outside(self) -> None:
        from crow_terminal.outside import edit

        text = await edit(self.expand(self.terminal.editor.text))
        if isinstance(text, str):
            self.terminal.set_text(text)
        self.terminal.update()


def get_time() -> float:
    """Return the time of the event loop, which is that of its timers, in seconds."""
    return asyncio.get_running_loop().time()


def run(settings: Settings) -> int:
    """Run the interactive terminal until the user leaves, and return the exit code."""

    async def main() -> int:
        return await Chat(settings).run()

    return asyncio.run(main())


def find_typed_text(point: dict[str, Any]) -> str:
    """Find what the user typed in a message of `_session/rewind_points`: crow names it apart from what goes with it."""
    match point:
        case {"_meta": {"crow": {"texts": [*_, str(last)]}}}:
            return last
        case _:
            return str(point["text"])
