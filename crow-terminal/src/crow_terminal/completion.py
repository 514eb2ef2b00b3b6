"""Completion of `/` commands, of files behind `@`, and of what the agent completes."""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

from crow_core.acp.complete_method import Completion as AgentCompletion
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from crow_terminal.command_menu import GROUP_END, list_commands, list_values, rank_commands
from crow_terminal.mentions import MENTION, find_files, list_files, quote_name
from crow_terminal.state import State

COMMAND = re.compile(r"/\S+ ")
"""A command whose arguments are being typed."""
FRESH = 10.0
"""Seconds for which a list of files is used again."""


class ChatCompleter(Completer):
    """Completes commands at the start, and files anywhere."""

    def __init__(
        self,
        state: State,
        get_past: Callable[[], Sequence[str]],
        ask_agent: Callable[[str], Awaitable[Sequence[AgentCompletion]]],
    ) -> None:
        """`get_past` returns the earlier prompts, oldest first; `ask_agent` what the agent knows to follow a text."""
        self._state, self._get_past, self._ask_agent = state, get_past, ask_agent
        self._files: list[str] = []
        self._folder = ""
        self._listed = -FRESH

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if text.startswith("/") and "\n" not in text:
            yield from self.complete_command(text)

    async def get_completions_async(
        self, document: Document, complete_event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        for completion in self.get_completions(document, complete_event):
            yield completion
        if found := MENTION.search(document.text_before_cursor):
            files = await self.get_files()
            typed = next((group for group in found.groups() if group is not None), "")
            for name in await asyncio.to_thread(find_files, files, typed):
                yield Completion(f"@{quote_name(name)}", -len(found[0].lstrip()), display=f"@{name}")
        if found or COMMAND.match(document.text_before_cursor):
            for one in await self._ask_agent(document.text_before_cursor):
                yield Completion(one.text, -one.replaces, display=one.label or one.text, display_meta=one.detail)

    def complete_command(self, text: str) -> Iterable[Completion]:
        """Complete the name of a command, or what it takes."""
        typed, space, words = text[1:].partition(" ")
        if space:
            yield from self.complete_argument(typed, words)
            return
        for one in rank_commands(self._state, typed, self._get_past()):
            yield Completion(
                f"/{one.name} " if one.hint else f"/{one.name}",
                -len(text),
                display=f"/{one.name}" + (f" {one.hint}" if one.hint else ""),
                display_meta=one.description if typed else f"{one.group}{GROUP_END}{one.description}",
            )

    def complete_argument(self, name: str, words: str) -> Iterable[Completion]:
        """Complete the values that a command takes."""
        command = next((one for one in list_commands(self._state) if one.name == name), None)
        if command is None or " " in words:
            return
        for row in list_values(self._state, command):
            value = str(row.value)
            if words.lower() in f"{value} {row.label}".lower() and not re.search(r"\s", value):
                label = f"{row.label} " if row.label != value else ""
                yield Completion(value, -len(words), display=value, display_meta=f"{label}{row.detail}".strip())

    async def get_files(self) -> list[str]:
        """Return the files of the session's folder, listed anew from time to time, in a thread."""
        now = asyncio.get_running_loop().time()
        if self._folder != self._state.folder or now - self._listed > FRESH:
            self._listed, self._folder = now, self._state.folder
            self._files = await asyncio.to_thread(list_files, self._folder)
        return self._files
