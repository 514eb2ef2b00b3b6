"""The journal of a session's turns: what has begun in the running turn, and what a turn with a key needs to go on.

A prompt may have a key of the caller's, the note `key` of its message. An interrupted turn with a key goes on from the
log, and one that has ended is not run again. A marker `started` says that a tool call may have had effects. A marker
`ended` has the stop reason, the text and the tokens of the turn. A turn without a key appends no markers.
"""

import asyncio
from collections.abc import Sequence, Set
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from crow_core.acp.schema import StopReason
from crow_core.content import to_interruption
from crow_core.errors import PromptError
from crow_core.mcp.tool import ToolCall
from crow_core.mcp.toolbox import Toolbox
from crow_core.messages.message import (
    Message,
    RawToolCall,
    find_markers_of_call,
    find_unanswered,
    is_reply,
    marker_kind,
)
from crow_core.messages.notes import Notes
from crow_core.messages.view import View
from crow_core.models.model_call import ModelCall
from crow_core.models.token_usage import TURN_TOTALS, count_tokens, find_price
from crow_core.session.log import SessionLog
from crow_core.session.output import TURN_NOTES

COUNTED = ("calls", "prompt", "completion", "cached", "thought")
"""The totals of a turn that its marker keeps."""


@dataclass
class KeyedTurn:
    """A turn with a key, as the log has it."""

    entries: list[Message]
    """Its entries; the first is the user's message."""
    end: Notes | None = None
    """The notes of its marker `ended`; None if it has not ended."""


class TurnJournal:
    """Notes what has begun in the running turn; in the log, too, if the turn has a key."""

    def __init__(self, log: SessionLog, view: View, toolbox: Toolbox) -> None:
        self.begun: set[str] = set()
        """The ids of the running turn's tool calls that may have had effects."""
        self.is_closing = False
        """True if the session closes: calls that servers run as tasks are left without an answer, for a later turn."""
        self._log = log
        self._view = view
        self._toolbox = toolbox
        self._notes: Notes = {}
        """The key of the running turn and the digest of its prompt; empty if it has no key."""
        self._has_keys: bool | None = None
        """True if the log has a turn with a key; None if that is not known yet."""
        self._task: asyncio.Task[Any] | None = None
        """The running turn."""

    def find(self, message: Message) -> KeyedTurn | None:
        """Find the turn that this message has begun; None if it has no key, or is new.

        Raises PromptError if the key belongs to another prompt.
        """
        if not (notes := make_notes(message)):
            return None
        entries, key = self._view.entries(), notes.get("key")
        places = [at for at, entry in enumerate(entries) if entry.get("crow", {}).get("key") == key]
        if not places:
            return None
        first, last = entries[places[0]], entries[places[-1]].get("crow", {})
        if first.get("crow", {}).get("prompt", "") != notes.get("prompt"):
            raise PromptError(
                f"The key {key!r} belongs to another prompt of this session. Give this prompt another key."
            )
        if last.get("kind") == "ended":
            return KeyedTurn([*entries[places[0] : places[-1]]], last)
        return KeyedTurn([*entries[places[0] :]])

    def begin(self, message: Message, turn: KeyedTurn | None) -> None:
        """Begin to note a turn. A new one gives up an interrupted turn, whose calls are answered as interrupted."""
        if self._has_keys is None:
            self._has_keys = any("key" in entry.get("crow", ()) for entry in self._log)
        if not turn:
            self.answer_interrupted()
            if self._has_keys and (left := find_open_turn(self._view.entries())):
                self._log.append({"crow": {"kind": "ended", "key": left, "stop": "cancelled"}})
        self._notes, self._task = make_notes(message), asyncio.current_task()
        self._has_keys |= bool(self._notes)

    def sign(self, prompt: Message) -> Message:
        """Return the user's message as the log gets it."""
        return {**prompt, "crow": prompt.get("crow", Notes()) | self._notes} if self._notes else prompt

    async def write(self, tool_call: ToolCall) -> None:
        """Write the log before the client is shown a call. If it has the decision that the call may run, the marker of
        `start` is written with it."""
        markers = find_markers_of_call(self._log, tool_call.id) if self._notes else []
        if any(notes.get("kind") == "decision" and notes.get("is") == "allow" for notes in markers):
            await self._mark_started(tool_call)
        await self._log.written()

    async def start(self, tool_call: ToolCall) -> None:
        """Note that a call may have effects from now on."""
        await self._mark_started(tool_call)
        self.begun.add(tool_call.id)

    async def _mark_started(self, tool_call: ToolCall) -> None:
        """Append the marker `started`, unless a call only reads or has it.

        The call's server is connected before: a call that is marked and lost never runs again.
        """
        only_reads = tool_call.kind in ("read", "search", "think")
        if self._notes and not only_reads and not self.has_started(tool_call.id):
            await self._toolbox.connect(tool_call)
            self._log.append({"crow": {"kind": "started", "call": tool_call.id}})

    def has_started(self, id: str) -> bool:
        """Return True if a call of the last reply has the marker `started`."""
        return any(notes.get("kind") == "started" for notes in find_markers_of_call(self._log, id))

    def find_task(self, id: str, server: str = "") -> str:
        """Return the id of the task as which a server runs a call of the last reply; "" if none does."""
        markers = find_markers_of_call(self._log, id)
        found = (each for each in markers if each.get("kind") == "task" and server in ("", each.get("server")))
        return next((each.get("task", "") for each in found), "")

    def find_tasks(self) -> list[RawToolCall]:
        """Find the calls of the last reply that have no answer yet and run as tasks of their servers."""
        return [use for use in find_unanswered(self._log) if self.find_task(use["id"])]

    def make_answers(self, begun: "Set[str] | None" = None) -> list[Message]:
        """Make answers for the tool calls of the last reply that have none, and never will.

        Those that are not in `begun` are answered as not run; None stands for all. Calls that run as tasks of their
        servers get their answers in a later turn, unless this turn gives them up (`begun`, and the session stays open).
        """
        later = self.find_tasks() if begun is None or self.is_closing else []
        return [
            to_interruption(self._toolbox.parse(use), begun=begun is None or use["id"] in begun)
            for use in find_unanswered(self._log)
            if use not in later
        ]

    def answer_interrupted(self, begun: "Set[str] | None" = None) -> None:
        """Append the answers that `make_answers` makes."""
        for answer in self.make_answers(begun):
            self._log.append(answer)

    def count(self, model_call: ModelCall) -> Notes:
        """Make the notes of a reply that say what it has cost."""
        if not self._notes:
            return {}
        price = find_price(model_call)
        return {"spent": {**count_tokens(model_call), "money": price[0] if price else 0}}

    def suspend(self, task: "asyncio.Task[Any]") -> None:
        """Append nothing more to the log of this turn if it has a key, so that it goes on where it was cancelled."""
        if self._notes and task is self._task:
            self._log.is_frozen = True

    def end(self, stop_reason: StopReason, text: str | None = None) -> None:
        """Note that the running turn has ended. A cancelled one has not: it can go on.

        `text` is what the user was told at its end; by default the text of the last reply.
        """
        if not self._notes or stop_reason == "cancelled":
            return
        notes: Notes = {"kind": "ended"}
        notes |= self._notes
        notes["stop"] = stop_reason
        notes["text"] = find_last_text(self._view.entries()) if text is None else text
        if (spent := TURN_TOTALS.get()) and spent.calls:
            notes["usage"] = {name: getattr(spent, name) for name in COUNTED}
        if more := TURN_NOTES.get():
            notes["notes"] = dict(more)
        self._log.append({"crow": notes})

    def close(self) -> None:
        """Forget the running turn."""
        self._notes, self._task, self._log.is_frozen = Notes(), None, False
        self.begun.clear()


def make_notes(message: Message) -> Notes:
    """Make the notes by which the turn of a prompt is found: its key, and a digest of the prompt as it arrived."""
    if not (key := message.get("crow", {}).get("key")):
        return {}
    asked = [message.get("content"), message.get("crow", {}).get("output")]
    return {"key": key, "prompt": sha256(msgspec.json.encode(asked, order="sorted")).hexdigest()[:32]}


def find_open_turn(entries: Sequence[Message]) -> str:
    """Return the key of the last turn that has one, if the turn has not ended; else ""."""
    for entry in reversed(entries):
        if key := entry.get("crow", {}).get("key"):
            return "" if marker_kind(entry) == "ended" else str(key)
    return ""


def find_last_text(entries: Sequence[Message]) -> str:
    """Find the text of the last reply."""
    return next((str(entry.get("content") or "") for entry in reversed(entries) if is_reply(entry)), "")
