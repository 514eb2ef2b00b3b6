"""An ACP client that prints a turn in the terminal: the answer on standard output, all else on standard error."""

import asyncio
import difflib
import os
import sys
from collections.abc import Sequence
from errno import EIO, EPIPE
from typing import IO

import click
from crow_core.acp.client import AcpClient, answer_permission
from crow_core.acp.connection import Handler
from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    BlockContent,
    DiffContent,
    NoticeUpdate,
    PermissionOption,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SessionNotification,
    SessionUpdate,
    TextBlock,
    ToolCall,
    ToolCallContent,
    ToolCallUpdate,
    UsageUpdate,
)
from crow_core.acp.transports import Transport
from crow_core.text import CONTROL_CHARACTERS as CONTROL_CHARACTERS
from crow_core.text import show_invisible
from msgspec import UNSET

from crow_cli.console import MAX_OUTPUT_LINES, remove_controls

ANSWER_LETTERS = {"allow_once": "y", "allow_always": "a", "reject_once": "n"}
"""The letter to type for the first answer of each kind."""
WORDS = {"y": "yes", "n": "no", "a": "always", "o": "other"}
"""The word that may be typed in place of each letter."""
LINE_BYTES = 4096
"""The longest line that a terminal passes on."""


class TerminalClient(AcpClient):
    """An ACP client that prints updates. It asks the user for permissions if there is a `terminal`."""

    def __init__(self, transport: Transport, *, terminal: int | None = None, quiet: bool = False) -> None:
        handlers: dict[str, Handler] = {"session/update": self.on_update}
        if terminal is not None:
            handlers["session/request_permission"] = self.on_permission
        super().__init__(transport, handlers)
        self.terminal = terminal
        """The descriptor from which the user's answers are read."""
        self.quiet = quiet
        """Print nothing while the turn runs, but questions."""
        self.answer_apart = False
        """Print the agent's messages on standard error: something else is the answer."""
        self.text = ""
        """The text of all messages of the agent."""
        self.last_notice = ""
        """The title of the last notice."""
        self.usage: UsageUpdate | None = None
        self.previewed_calls: set[str] = set()
        """The ids of the tool calls whose diff was printed with the question for permission."""
        self.message_id = ""
        """The id of the message being printed. Another message starts on a new line."""
        self.open_line: IO[str] | None = None
        """The stream whose last line has no newline yet."""
        self.output_closed: BrokenPipeError | None = None
        """The error that says that the reader of the output has closed it."""

    async def on_update(self, notification: SessionNotification) -> None:
        if self.output_closed:
            return
        try:
            self.show(notification.update)
        except OSError as error:
            if error.errno not in (EPIPE, EIO):
                raise
            from crow_terminal.lost_output import discard_output  # not above: few outputs end before the program

            discard_output()
            self.output_closed = BrokenPipeError(EPIPE, "the reader of the output is gone")
            await self.cancel(notification.session_id)

    def show(self, update: SessionUpdate) -> None:
        match update:
            case AgentMessageChunk(content=TextBlock(text=text), message_id=message_id):
                answers = sys.stderr if self.answer_apart else sys.stdout
                if self.text and message_id != self.message_id:
                    self.print("\n\n" if self.open_line else "\n", answers)
                    self.text += "\n\n"
                self.message_id = str(message_id)
                self.text += text
                self.print(text, answers, dim=self.answer_apart)
            case AgentThoughtChunk(content=TextBlock(text=text)):
                self.print(text, sys.stderr, dim=True)
            case ToolCall(title=title) | ToolCallUpdate(title=str(title), status="pending") as call:
                if call.raw_input is not UNSET:  # without input, the call is not complete yet
                    self.print_line(f"● {title}", fg="cyan")
            case ToolCallUpdate(status="completed" | "failed" as status) as update:
                if update.tool_call_id not in self.previewed_calls or status == "failed":
                    self.print_result(update.content or [], failed=status == "failed")
            case NoticeUpdate(title=title, severity=severity):
                self.last_notice = title
                self.print_line(f"! {title}", fg="yellow" if severity != "info" else None)
            case UsageUpdate() as usage:
                self.usage = usage
            case _:
                pass

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        quiet, self.quiet = self.quiet, False
        try:
            return await self.ask(question)
        finally:
            self.quiet = quiet

    async def ask(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        """Ask the user whether a tool call may run."""
        assert self.terminal is not None
        call = question.tool_call
        if call.content:
            self.print_result(call.content, failed=False)
            self.previewed_calls.add(call.tool_call_id)
        match call.raw_input:
            case {"command": str(command)} if call.kind == "execute":
                for line in show_invisible(command).split("\n"):  # each has a mark, which no text of crow's has
                    self.print_line(f"  | {line}")
                asks = "Allow this command?"
            case _:
                asks = f"Allow {show_invisible(call.title or call.tool_call_id)}?"
        offered: dict[str, PermissionOption] = {}
        for option in question.options:
            if letter := ANSWER_LETTERS.get(option.kind):
                offered.setdefault(letter, option)
        others = [option for option in question.options if option.kind.endswith("_always")]
        may_edit = call.kind == "execute" and "y" in offered
        hints = ["[y]es", "[n]o (and why)" if "n" in offered else "[n]o"]
        hints += ["[o]ther answers"] if others or may_edit else []
        hints += ["[a]lways in this session"] if "a" in offered else []
        while True:
            typed = await self.ask_line(f"{asks} {', '.join(hints)}: ")
            word, _, rest = (typed or "").partition(" ")
            letter = word[:1].lower() or "n"
            if typed is None:
                return answer_permission()
            if word and word.lower() not in (letter, WORDS.get(letter)):
                continue
            if letter == "o" and (others or may_edit):
                answer = await self.ask_other_answer(others, offered.get("y") if may_edit else None)
            elif letter in offered and (letter == "n" or not rest.strip()):
                answer = answer_permission(offered[letter].option_id, reason=rest.strip())
            elif letter == "n":
                return answer_permission()
            else:
                continue
            if answer:
                return answer

    async def ask_other_answer(
        self, options: Sequence[PermissionOption], edits: PermissionOption | None
    ) -> RequestPermissionResponse | None:
        """Ask for an answer that lasts, of a list, or for another command to run; None for none of these.

        `edits` is the option that allows the changed command.
        """
        for number, option in enumerate(options, 1):
            self.print_line(f"  {number}  {option.name}")
        if edits:
            self.print_line("  e  Change the command, and run it once")
        typed = await self.ask_line("Which one? ")
        if edits and typed == "e":
            command = await self.ask_line("Run instead: ")
            return answer_permission(edits.option_id, command=command) if command else None
        if typed and typed.isdecimal() and 0 < int(typed) <= len(options):
            return answer_permission(options[int(typed) - 1].option_id)
        return None

    async def ask_line(self, question: str) -> str | None:
        """Ask for a line, and return it without blanks around it; None at the end of the input."""
        self.end_line()
        self.print(question, sys.stderr, fg="yellow")
        assert self.terminal is not None
        typed = await read_line(self.terminal)
        self.open_line = None
        return typed

    def print_result(self, parts: list[ToolCallContent], *, failed: bool) -> None:
        """Print the result of a tool call: its diffs, or the last lines of its output."""
        for part in parts:
            match part:
                case DiffContent():
                    self.print_diff(part)
                case BlockContent(content=TextBlock(text=text)):
                    lines = [line for line in text.strip().splitlines() if not line.startswith("```")]
                    if len(lines) > MAX_OUTPUT_LINES:
                        lines = [f"… {len(lines) - MAX_OUTPUT_LINES} lines before", *lines[-MAX_OUTPUT_LINES:]]
                    for line in lines:
                        self.print_line(f"  {line}", fg="red" if failed else None, dim=not failed)
                case _:
                    pass

    def print_diff(self, change: DiffContent) -> None:
        old, new = (change.old_text or "").splitlines(), change.new_text.splitlines()
        for line in list(difflib.unified_diff(old, new, lineterm="", n=2))[2:]:
            colour = {"+": "green", "-": "red"}.get(line[:1])
            self.print_line(f"  {line}", fg=colour, dim=colour is None)

    def print_line(self, text: str, *, fg: str | None = None, dim: bool = False) -> None:
        """Print a line on standard error, apart from the answer."""
        self.end_line()
        self.print(f"{text}\n", sys.stderr, fg=fg, dim=dim)

    def end_line(self) -> None:
        if self.open_line is not None:
            self.print("\n", self.open_line)

    def print(self, text: str, file: IO[str], *, fg: str | None = None, dim: bool = False) -> None:
        if self.quiet or not (text := remove_controls(text)):
            return
        if self.open_line not in (None, file):
            click.echo(file=self.open_line)
        styled = click.style(text, fg=fg, dim=dim) if fg or dim else text
        click.echo(styled, file=file, nl=False)
        self.open_line = None if text.endswith("\n") else file


async def read_line(terminal: int) -> str | None:
    """Read a line and return it without blanks around it; return None at the end of input.

    This does not call `input` in a thread, which would keep the process alive after the question was cancelled.
    """
    loop, line = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(terminal, line.set)
    try:
        await line.wait()
        typed = os.read(terminal, LINE_BYTES)
        return typed.decode(errors="replace").strip() if typed else None
    finally:
        loop.remove_reader(terminal)
