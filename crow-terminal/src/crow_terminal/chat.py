"""The terminal put together: the state between the agent and the screen. `run` starts it."""

import asyncio
import gc
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import crow_system as system
from crow_core import __version__

from crow_terminal import effects
from crow_terminal.agent_calls import AgentCalls
from crow_terminal.blocks import Block, CommandOutput
from crow_terminal.chat_base import get_time
from crow_terminal.completion import ChatCompleter
from crow_terminal.effects import Effect
from crow_terminal.key_actions import KeyActions
from crow_terminal.key_bindings import make_bindings
from crow_terminal.live import compose_above, compose_footer, compose_menu
from crow_terminal.lost_output import discard_output
from crow_terminal.page import NoPage, PageServer
from crow_terminal.printable_text import clip, clip_ansi, escape_line
from crow_terminal.settings import Left, Settings, describe_continuation
from crow_terminal.terminal import EDITOR_ROWS, Terminal, restore
from crow_terminal.theme import choose_theme
from crow_terminal.user_command import UserCommand

PAINT_SECONDS = 0.04
"""Seconds of a frame in which blocks are painted; the rest waits for the next frame, so that keys are heard."""
CLOSE_TIMEOUT = 5.0
"""Seconds to wait for the agent's end when leaving."""
ROWS_AT_A_QUESTION = 2
"""Rows of the editor below a question for permission."""
MAX_PENDING_LINES = 400
"""Lines that are printed in one frame."""


class Chat(AgentCalls, KeyActions):
    """An interactive terminal with one agent."""

    def __init__(self, settings: Settings, left: Left | None = None) -> None:
        super().__init__(settings, left)
        self._command: UserCommand | None = None
        self._pages = PageServer(settings.page, self.link.serve)
        self._pending: deque[tuple[Block, bool]] = deque()
        """Blocks to print; with each whether to leave out nothing."""
        self._lines: deque[str] = deque()
        self._tail: tuple[Any, int, list[str]] = (None, 0, [])
        self.completer = ChatCompleter(
            self.state, lambda: self.terminal.editor.history.get_strings(), self.complete_by_agent
        )
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
            system.on_signal(loop, number, self.end_by_signal)
        try:
            await self.terminal.run(self.start)
        except EOFError:  # the terminal is gone
            discard_output()
            self.left.by_user = False
        finally:
            restore()
            await self.close()
            if self._is_used:
                session, can = self.session_id, self.state.abilities
                stopped = clip(self.state.describe_background_end(), self.terminal.columns)
                lines = describe_continuation(self.settings, session, can, self.terminal.columns)
                lines = [stopped, *lines] if stopped else lines
                sys.stdout.write("".join(f"\n{line}" for line in ["", *lines]) + "\n" if lines else "")
        return 0

    def end_by_signal(self) -> None:
        self.left.by_user = False
        self.terminal.exit()

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
        await self._pages.end()
        tasks = [*self._tasks, *([self._session_task] if self._session_task else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT)

    # What is shown

    def compose_above(self, width: int, height: int) -> list[str]:
        tail, has_words = self.paint_tail(width), bool(self.terminal.editor.text)
        return compose_above(self.state, get_time(), width, height, self.painter.theme, tail, has_words=has_words)

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
        """Return the next lines to print, for a frame, which brings the title up to date as well."""
        self.terminal.set_title(self.make_title())
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
            case effects.CallBackground():
                self._start(self._call_background(effect))
            case effects.Respond(id=id, response=response):
                self.link.end_question(id)
                if self.client:
                    self.client.answer(id, response)
            case effects.LogIn(args=args, env=env):
                self._start(self._log_in(args, env))
            case effects.Wait(seconds=seconds):
                asyncio.get_running_loop().call_later(seconds, self.wake)
            case effects.Leave(worktree=name):
                self.left.worktree = name
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
            case effects.ListTurns(last=last):
                self._start(self._list_turns(last))
            case effects.TakeBack():
                self._start(self._take_back(effect))
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


def run(settings: Settings, left: Left | None = None) -> int:
    """Run the interactive terminal until the user leaves, and return the exit code. `left` takes in how it was left."""

    async def main() -> int:
        return await Chat(settings, left).run()

    return asyncio.run(main())
