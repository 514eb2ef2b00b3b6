"""The log of a session: entries that are only ever appended, and the chain of writes behind them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from copy import copy
from secrets import token_hex
from typing import TypeVar, overload

from crow_core.messages.message import Message
from crow_core.models.model_call import ModelCall

T = TypeVar("T")

DRAFT_INTERVAL = 0.2
"""Seconds after which text that the client was shown is written, while its reply still streams."""


def new_id() -> str:
    """Make an id: 128 random bits, in hexadecimal."""
    return token_hex(16)


class SessionLog(Sequence[Message]):
    """The entries of a session, messages and markers, in order.

    `append` extends the log at once. The writers run after it, one after the other: a session's hooks `message` and
    `model_call`, and `write_draft` of its store. `written` waits for them, and then for the store's `flush`.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[Message], Awaitable[None]] | None = None,
        on_model_call: Callable[[ModelCall], Awaitable[None]] | None = None,
    ) -> None:
        self.entries: list[Message] = []
        self.title = ""
        """The name of the session in a list; empty until it has one."""
        self.damage = ""
        """A sentence about what could not be restored; empty if nothing is missing."""
        self.on_draft: Callable[[Message], Awaitable[None]] | None = None
        """`write_draft` of the store, if there is one."""
        self.on_flush: Callable[[], Awaitable[None]] | None = None
        """`flush` of the store, if there is one."""
        self._on_message = on_message
        self._on_model_call = on_model_call
        self.is_frozen = False
        """True while `append` does nothing."""
        self._must_flush = False
        """True if something was appended or written since the last flush."""
        self._writing: asyncio.Task[None] | None = None
        """The last write; it ends after all writes before it."""
        self._draft: asyncio.TimerHandle | None = None

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> list[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | list[Message]:
        return self.entries[at]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.entries)

    def __eq__(self, other: object) -> bool:
        """Compare the entries, with those of another log or with a list."""
        return self.entries == (other.entries if isinstance(other, SessionLog) else other)

    def __repr__(self) -> str:
        return f"SessionLog({self.entries!r})"

    def append(self, entry: Message) -> None:
        """Append an entry, give it an id if it has none, and start to write it."""
        if self.is_frozen:
            return
        entry.setdefault("crow", {}).setdefault("id", new_id())
        self.entries.append(entry)
        self._must_flush = self.on_flush is not None
        if self._on_message:
            self._write(self._on_message, entry)

    def record(self, model_call: ModelCall) -> None:
        """Record a model call that was sent, or has ended. The writer sees it as it is now, also if it runs later."""
        if self._on_model_call:
            self._write(self._on_model_call, copy(model_call))

    def schedule_draft(self, model_call: ModelCall) -> None:
        """Write what is new in the reply DRAFT_INTERVAL seconds from now."""
        if self.on_draft and self._draft is None:
            self._draft = asyncio.get_running_loop().call_later(DRAFT_INTERVAL, self._write_draft, model_call)

    def cancel_draft(self) -> None:
        """Write no draft: the reply itself is about to be appended."""
        if self._draft is not None:
            self._draft.cancel()
            self._draft = None

    def _write_draft(self, model_call: ModelCall) -> None:
        self._draft = None
        draft = model_call.arriving.take_part()
        draft.setdefault("crow", {})["id"] = model_call.id
        assert self.on_draft is not None
        self._write(self.on_draft, draft)

    def _write(self, write: Callable[[T], Awaitable[None]], value: T) -> None:
        """Run a writer after all that were started before."""
        self._must_flush = self.on_flush is not None
        self._writing = asyncio.ensure_future(self._write_after(self._writing, write(value)))

    async def _write_after(self, before: "asyncio.Task[None] | None", writing: Awaitable[None]) -> None:
        if before is not None and not before.done():
            await asyncio.wait([before])
        try:
            await writing
        finally:
            if before is not None:
                before.result()  # whoever waits for this write gets the first failure

    def _flush(self) -> None:
        """Flush after all writers that were started before, if there is something to flush."""
        if self._must_flush and self.on_flush:
            self._must_flush = False
            self._writing = asyncio.ensure_future(self._write_after(self._writing, self.on_flush()))

    @property
    def is_written(self) -> bool:
        """True if nothing waits to be written."""
        return self._writing is None and not self._must_flush

    async def written(self) -> None:
        """Wait until everything appended so far has been written. Raises what a writer raised."""
        self._flush()
        if (writing := self._writing) is not None:
            try:
                await asyncio.shield(writing)
            finally:
                if writing.done() and self._writing is writing:
                    self._writing = None

    async def finish(self) -> None:
        """Like `written`, but drop an unwritten draft and ignore a reported failure. Later writes start a new chain."""
        self.cancel_draft()
        self._flush()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # also if this is cancelled
            await asyncio.wait([writing])
