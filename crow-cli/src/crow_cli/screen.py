"""What a person sees of a turn in the terminal: the answer on standard output, all else on standard error."""

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

LINES = 12
"""How much of a tool's output is shown."""

CONTROL = {code: None for code in CONTROL_CHARACTERS if chr(code) not in "\n\t"}
"""Models and tools may not steer the terminal, nor turn text around: what could is left out."""

ANSWERS = {"allow_once": "y", "allow_always": "a", "reject_once": "n"}
"""The letter for each kind of answer; whatever else is typed means no."""


class Screen(AcpClient):
    """An ACP client that prints. Only an `interactive` one asks the person for permissions."""

    def __init__(self, transport: Transport, *, interactive: bool = False, quiet: bool = False) -> None:
        handlers: dict[str, Handler] = {"session/update": self.on_update}
        if interactive:
            handlers["session/request_permission"] = self.on_permission
        super().__init__(transport, handlers)
        self.quiet = quiet
        """Print nothing while the turn runs."""
        self.text = ""
        """All that the agent said."""
        self.usage: UsageUpdate | None = None
        self.previewed: set[str] = set()
        """The calls whose diff was shown when they were asked about."""
        self.message = ""
        """The message being printed: another one starts on a line of its own."""
        self.column: IO[str] | None = None
        """Where a line has been begun and not ended."""
        self.unread: BrokenPipeError | None = None
        """That nobody reads on what is printed."""

    async def on_update(self, notification: SessionNotification) -> None:
        if self.unread:
            return
        try:
            self.show(notification.update)
        except BrokenPipeError as error:
            self.unread = error
            await self.cancel(notification.session_id)

    def show(self, update: SessionUpdate) -> None:
        match update:
            case AgentMessageChunk(content=TextBlock(text=text), message_id=message_id):
                if self.text and message_id != self.message:
                    self.say("\n\n" if self.column else "\n", sys.stdout)
                    self.text += "\n\n"
                self.message = str(message_id)
                self.text += text
                self.say(text, sys.stdout)
            case AgentThoughtChunk(content=TextBlock(text=text)):
                self.say(text, sys.stderr, dim=True)
            case ToolCall(title=title) | ToolCallUpdate(title=str(title), status="pending") as call:
                if call.raw_input is not UNSET:  # else the rest of it is to come
                    self.line(f"● {title}", fg="cyan")
            case ToolCallUpdate(status="completed" | "failed" as status) as update:
                if update.tool_call_id not in self.previewed or status == "failed":
                    self.result(update.content or [], failed=status == "failed")
            case NoticeUpdate(title=title, severity=severity):
                self.line(f"! {title}", fg="yellow" if severity != "info" else None)
            case UsageUpdate() as usage:
                self.usage = usage
            case _:
                pass

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        call = question.tool_call
        if call.content:
            self.result(call.content, failed=False)
            self.previewed.add(call.tool_call_id)
        match call.raw_input:
            case {"command": str(command)} if call.kind == "execute" and command != call.title:
                self.line(command)  # whole: the title shows one line of it
            case _:
                pass
        offered = {ANSWERS[option.kind]: option for option in question.options if option.kind in ANSWERS}
        self.end_line()
        always = ", [a]lways in this session" if "a" in offered else ""
        self.say(f"Allow {call.title}? [y]es, [n]o{always}: ", sys.stderr, fg="yellow")
        answer = await read_answer()
        self.column = None
        chosen = offered.get(answer or "", offered.get("n"))
        if chosen is None or answer is None:
            return RequestPermissionResponse(outcome=CancelledOutcome())
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id=chosen.option_id))

    def result(self, parts: list[ToolCallContent], *, failed: bool) -> None:
        """What a tool did: diffs, or the end of what it said."""
        for part in parts:
            match part:
                case DiffContent():
                    self.diff(part)
                case BlockContent(content=TextBlock(text=text)):
                    lines = [line for line in text.strip().splitlines() if not line.startswith("```")]
                    if len(lines) > LINES:
                        lines = [f"… {len(lines) - LINES} lines before", *lines[-LINES:]]
                    for line in lines:
                        self.line(f"  {line}", fg="red" if failed else None, dim=not failed)
                case _:
                    pass

    def diff(self, change: DiffContent) -> None:
        old, new = (change.old_text or "").splitlines(), change.new_text.splitlines()
        for line in list(difflib.unified_diff(old, new, lineterm="", n=2))[2:]:
            colour = {"+": "green", "-": "red"}.get(line[:1])
            self.line(f"  {line}", fg=colour, dim=colour is None)

    def line(self, text: str, *, fg: str | None = None, dim: bool = False) -> None:
        """A line of its own, beside the answer."""
        self.end_line()
        self.say(f"{text}\n", sys.stderr, fg=fg, dim=dim)

    def end_line(self) -> None:
        if self.column is not None:
            self.say("\n", self.column)

    def say(self, text: str, file: IO[str], *, fg: str | None = None, dim: bool = False) -> None:
        if self.quiet or not (text := clean(text)):
            return
        if self.column not in (None, file):
            click.echo(file=self.column)
        styled = click.style(text, fg=fg, dim=dim) if fg or dim else text
        click.echo(styled, file=file, nl=False)
        self.column = None if text.endswith("\n") else file


def clean(text: str) -> str:
    """Text that cannot steer the terminal."""
    return text.translate(CONTROL)


def spelled_out(text: str) -> str:
    """Text that cannot steer the terminal and hides nothing: its control characters as JSON writes them."""
    return text.translate({code: f"\\u{code:04x}" for code in CONTROL})


async def read_answer() -> str | None:
    """The first letter of the next line typed, in lower case; None at the end of input.

    Not `input` in a thread: a cancelled question must not keep the process waiting for a key.
    """
    loop, line = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, line.set)
    try:
        await line.wait()
        typed = os.read(sys.stdin.fileno(), 1024)
        return typed.decode(errors="replace").strip().lower()[:1] if typed else None
    finally:
        loop.remove_reader(sys.stdin)
