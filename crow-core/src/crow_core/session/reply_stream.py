"""The replies of a session's model: shown to the client, and stored."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from msgspec.structs import asdict

from crow_core.acp.schema import AgentMessageChunk, AgentThoughtChunk, TextBlock, ToolCallUpdate
from crow_core.content import to_announcement, to_early_announcement
from crow_core.mcp.tool import ToolCall
from crow_core.mcp.toolbox import Toolbox
from crow_core.messages.message import Delta, settle
from crow_core.messages.notes import Notes
from crow_core.models.model_call import ModelCall
from crow_core.models.reply import PartialCall
from crow_core.models.token_usage import to_count
from crow_core.session.journal import TurnJournal
from crow_core.session.updates import SessionUpdates

LONG_READING = 10.0
"""Seconds for which the server must still process a prompt so that the user is told."""
LONG_ARGUMENTS = 400
"""Characters of a tool call's arguments from which on the call is announced while the rest still arrives."""


class ReplyStream:
    """Shows the replies of a session's model and their tool calls to the client, and appends them to the log."""

    def __init__(self, updates: SessionUpdates, toolbox: Toolbox, journal: TurnJournal, cwd: str) -> None:
        self.used_ids: set[str] = set()
        """The ids of all tool calls of the session so far."""
        self.arriving: ModelCall | None = None
        """The model call whose reply was shown last; the log has it once it has ended."""
        self._updates = updates
        self._toolbox = toolbox
        self._journal = journal
        self._cwd = cwd
        self.announced: set[str] = set()
        """The tool calls that the client was shown before all of their arguments had arrived."""
        self._told = ""
        """The id of the last model call about whose progress the user was told."""
        self._examined: PartialCall | None = None
        """The last tool call with long arguments that `_announce_early` has seen."""

    async def show(self, delta: Delta, model_call: ModelCall) -> None:
        """Show a fragment of a reply, and let it be written soon."""
        self.arriving, updates = model_call, self._updates
        if "content" in delta or "reasoning_content" in delta:
            updates.log.schedule_draft(model_call)
        if text := delta.get("reasoning_content"):
            await updates.update(AgentThoughtChunk(content=TextBlock(text=text), message_id=model_call.id))
        if text := delta.get("content"):
            await updates.update(AgentMessageChunk(content=TextBlock(text=text), message_id=model_call.id))
        if delta.get("tool_calls"):
            await self._announce_early(model_call.arriving.calls)
        await self.report(delta, model_call)

    async def report(self, delta: Delta, model_call: ModelCall) -> None:
        """Record that a request was sent, and show a notice about it; for any model call."""
        if "sent" in delta:
            self._updates.log.record(model_call)
        if "progress" in delta and model_call.id != self._told and (sentence := describe_progress(delta["progress"])):
            self._told = model_call.id
            await self._updates.notice(sentence)
        if text := delta.get("notice"):
            await self._updates.notice(text, "warning")

    async def _announce_early(self, calls: Sequence[PartialCall]) -> None:
        """Announce the last tool call of a reply if its arguments are long, and its id so far is one it can keep."""
        call = calls[-1]
        if call.length < LONG_ARGUMENTS or not call.id or call is self._examined:
            return
        self._examined = call
        ids = {call.id for call in calls}
        keeps_id = len(ids) == len(calls) and "" not in ids and self.used_ids.isdisjoint(ids)
        if keeps_id and not (tool_call := self._toolbox.parse(call.build())).is_valid:
            await self._updates.log.written()
            self.announced.add(call.id)
            await self._updates.send(to_early_announcement(tool_call))

    async def announce(self, tool_call: ToolCall) -> None:
        """Show a tool call that is about to run."""
        announcement = to_announcement(tool_call, self._cwd)
        was_announced = tool_call.id in self.announced
        self.announced.discard(tool_call.id)
        await self._updates.send(ToolCallUpdate(**asdict(announcement)) if was_announced else announcement)

    async def fail_announced(self, kept: Set[str] = frozenset()) -> None:
        """Tell the client that the tool calls it was shown early will not run, but for those to be kept."""
        self.used_ids |= self.announced
        for id in self.announced - kept:
            self.announced.discard(id)
            await self._updates.send(ToolCallUpdate(tool_call_id=id, status="failed"))

    async def append(self, model_call: ModelCall, *, whole: bool) -> None:
        """Append a reply to the log, unless it is empty. Its tool calls are kept only if it arrived `whole`."""
        log = self._updates.log
        log.cancel_draft()
        notes: Notes = {"id": model_call.id}
        if not whole:
            notes["cut"] = model_call.error or model_call.finish_reason
        reply = settle(model_call.reply, used=self.used_ids, whole=whole)
        if called := self._toolbox.find_called(reply.get("tool_calls", [])):
            notes["called"] = called
        notes |= self._journal.count(model_call)
        if any(reply.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            reply["crow"] = reply.get("crow", Notes()) | notes
            log.append(reply)
        log.record(model_call)
        await self.fail_announced({use["id"] for use in reply.get("tool_calls", ())})


def describe_progress(progress: Mapping[str, Any]) -> str:
    """Say how long the server still processes a prompt; "" if it is short, or not known."""
    total, cached, done, spent = (to_count(progress.get(key)) for key in ("total", "cache", "processed", "time_ms"))
    if done <= cached or total <= done or not spent:
        return ""
    left = (total - done) * spent / (done - cached) / 1000
    return f"The model reads {total - cached:,} tokens; about {left:.0f} s more." if left >= LONG_READING else ""
