"""The base of the terminal's parts: their shared state, and the tasks that run."""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from typing import Any

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    ImageBlock,
)

from crow_terminal.blocks import Block
from crow_terminal.chat_client import ChatClient
from crow_terminal.effects import Effect
from crow_terminal.paint import Painter
from crow_terminal.settings import Left, Settings
from crow_terminal.state import State
from crow_terminal.terminal import Terminal
from crow_terminal.theme import choose_theme


class ChatBase:
    """Things that the keys, the agent's calls and the screen of one terminal work with."""

    terminal: Terminal

    def __init__(self, settings: Settings, left: Left | None = None) -> None:
        self.settings, self.left = settings, left or Left(settings.cwd)
        self.state = State(
            agent=settings.agent.name,
            folder=settings.cwd,
            has_page=bool(settings.page),
            has_worktrees=settings.has_worktrees,
        )
        self.painter = Painter(choose_theme(settings.theme, os.environ))
        self.client: ChatClient | None = None
        self.session_id = ""
        self._turn_ids: list[str] = []
        """The ids of the messages that `/rewind` offers, the newest first."""
        self._is_used = False
        """True if something was said in the session."""
        self._choose = settings.choose
        self._is_first: bool | None = None
        """True if the card of the first run is still to be shown; None until that was asked, before any prompt."""
        self.pastes: dict[str, str] = {}
        """The long pastes, and the paths of images, by the words that stand for them in the editor."""
        self.images: dict[str, ImageBlock] = {}
        """The images from the clipboard by the words that stand for them, also in prompts that were sent."""
        self._image_count = 0
        self._completes = False
        """True if Tab waits for completions."""
        self._is_interrupting = False
        """True if the key that is being handled is Ctrl-C."""
        self.shown: list[Block] = []
        """Every block, for the export."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._session_task: asyncio.Task[None] | None = None
        self._draft: str | None = None
        """The text of the editor while the user writes an answer there."""

    def perform(self, wanted: Sequence[Effect]) -> None:
        """Carry out effects, and draw the state as it is now."""
        raise NotImplementedError  # `Chat` has it, since it draws

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


def get_time() -> float:
    """Return the time of the event loop, which is that of its timers, in seconds."""
    return asyncio.get_running_loop().time()
