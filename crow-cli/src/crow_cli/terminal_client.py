"""An ACP client that prints a turn in the terminal: the answer on standard output, all else on standard error."""

import asyncio
import difflib
import os
import sys
from typing import IO

import click
from crow_core.acp.client import AcpClient
from crow_core.acp.connection import Handler
from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    BlockContent,
    CancelledOutcome,
    DiffContent,
    NoticeUpdate,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
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
from msgspec import UNSET

from crow_cli.console import MAX_OUTPUT_LINES, remove_controls

ANSWER_LETTERS = {"allow_once": "y", "allow_always": "a", "reject_once": "n"}
"""The letter to type for each kind of answer; any other input means no."""


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
        except BrokenPipeError as error:
            self.output_closed = error
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
            case {"command": str(command)} if call.kind == "execute" and command != call.title:
                self.print_line(command)  # the whole command: the title has only one line of it
            case _:
                pass
        offered = {ANSWER_LETTERS[option.kind]: option for option in question.options if option.kind in ANSWER_LETTERS}
        self.end_line()
        always = ", [a]lways in this session" if "a" in offered else ""
        self.print(f"Allow {call.title}? [y]es, [n]o{always}: ", sys.stderr, fg="yellow")
        answer = await read_answer(self.terminal)
        self.open_line = None
        chosen = offered.get(answer or "", offered.get("n"))
        if chosen is None or answer is None:
            return RequestPermissionResponse(outcome=CancelledOutcome())
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id=chosen.option_id))

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


async def read_answer(terminal: int) -> str | None:
    """Read a line and return its first letter in lower case; return None at the end of input.

    This does not call `input` in a thread, which would keep the process alive after the question was cancelled.
    """
    loop, line = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(terminal, line.set)
    try:
        await line.wait()
        typed = os.read(terminal, 1024)
        return typed.decode(errors="replace").strip().lower()[:1] if typed else None
    finally:
        loop.remove_reader(terminal)
