"""Blocks of HTML that change while pages show them."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeAlias

INTERVAL = 0.1
"""Seconds between two batches of changes: a page gets at most 10 a second."""
Source: TypeAlias = str | Callable[[], str] | None
"""The HTML of a block, or a function that makes it when it is sent. None removes the block."""


class Tab:
    """A page that shows a feed: the changes that it has not got yet."""

    def __init__(self, blocks: Mapping[str, str]) -> None:
        self._pending: dict[str, str | None] = dict(blocks)
        self._changed = asyncio.Event()
        self._changed.set()
        self.completing: asyncio.Task[None] | None = None
        """Makes the completions that the page asked for last."""

    def add(self, blocks: Mapping[str, str | None]) -> None:
        """Add changes; a newer state of a block replaces an earlier one, so a slow page gets fewer."""
        self._pending |= blocks
        if blocks:
            self._changed.set()

    async def take(self) -> dict[str, str | None]:
        """Wait for changes and return them."""
        await self._changed.wait()
        self._changed.clear()
        pending, self._pending = self._pending, {}
        return pending


class Feed:
    """Blocks of HTML by id in their order, and the tabs that show them.

    An id that begins with `@` names a value for the page's script, such as its title.
    """

    def __init__(self) -> None:
        self.blocks: dict[str, str] = {}
        self.tabs: set[Tab] = set()
        self._changed: dict[str, Source] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sent = float("-inf")

    def put(self, id: str, source: Source) -> None:
        """Set a block; the tabs get it at the end of the interval."""
        self._changed[id] = source
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._sent + INTERVAL), self.flush)

    def fill(self, blocks: Mapping[str, str]) -> None:
        """Set the blocks of the log to these: those that are not among them are removed."""
        self.flush()
        for id in self.blocks:
            if is_of_log(id) and id not in blocks:
                self.put(id, None)
        for id, html in blocks.items():
            self.put(id, html)

    def flush(self) -> None:
        """Make the blocks that have changed and give them to the tabs."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._sent = asyncio.get_running_loop().time()
        changed, self._changed = self._changed, {}
        batch: dict[str, str | None] = {}
        for id, source in changed.items():
            html = source() if callable(source) else source
            if html is None:
                if self.blocks.pop(id, None) is not None:
                    batch[id] = None
            elif self.blocks.get(id) != html:
                self.blocks[id] = batch[id] = html
        for tab in self.tabs:
            tab.add(batch)

    def join(self) -> Tab:
        """Add a tab, which gets all blocks first."""
        self.flush()
        tab = Tab(self.blocks)
        self.tabs.add(tab)
        return tab

    def leave(self, tab: Tab) -> None:
        self.tabs.discard(tab)
        if tab.completing:
            tab.completing.cancel()


def is_of_log(id: str) -> bool:
    """Return whether a block stands in the log, whose ids are `b` and a number."""
    return id[:1] == "b" and id[1:2].isdecimal()
