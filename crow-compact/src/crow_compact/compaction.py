"""How a conversation becomes shorter: old tool outputs shrink; where that is not enough, the model sums up.

Both are markers in the log, appended when all is done: whatever goes wrong before leaves the conversation as it was.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from crow_core.errors import ModelError, PromptError
from crow_core.messages import (
    Message,
    drop_rewound,
    find_markers,
    find_prompts,
    join_user_messages,
    marker_kind,
    select_entries,
    view,
)
from crow_core.models.chat import Request
from crow_core.session import Session

from crow_compact.gauge import Gauge
from crow_compact.outputs import TOOL

ENOUGH = 0.75
"""The share of the limit below which shrinking alone is enough: less gain would not last."""
KEEP = 0.25
"""The share of the limit that the latest messages, which stay as they are, may take."""
FILL = 0.9
"""The share of the window that a request for a summary may take; the rest is for the summary."""
SHORT = 2_000
"""Characters that are left of an old tool output."""
TRIES = 6
"""How often a summary is asked for when the request for it is itself too long."""
LESS = 0.6
"""The share of it that is tried next."""


class Unable(Exception):
    """Why a conversation stays as it is, as a sentence for a person."""


@dataclass
class Compaction:
    """One attempt to make a session's requests shorter."""

    session: Session
    gauge: Gauge
    window: int
    """Tokens that fit into a request and its reply."""
    limit: int
    """Tokens that a request should have at most."""
    instructions: str = ""
    """What the user asks of the summary."""
    summary: str = ""
    """What it became; empty where old outputs only shrank."""

    async def run(self, *, shrink: bool = True) -> str:
        """Make the view shorter; gives what was done. With `shrink` it may be enough that old outputs do.

        Raises Unable; then all is as it was.
        """
        session, request = self.session, await self.session.request()
        before = self.gauge.tokens(request)
        self.gauge.tried = before
        entries, pins = select_entries(session.log), pinned(session.log)
        begin = start_of(entries)
        places = [at for at in cuts(entries) if at > begin]
        if not places:
            raise Unable("There is nothing yet to sum up: the conversation has only begun.")
        place = self.place(entries, places)
        if shrink:
            old = shrinking(id_of(entries[place]), pins)
            if (after := self.tokens(request, old)) <= min(ENOUGH * self.limit, before - 1):
                return self.done([old], before, after, "Old tool outputs were shortened; the model can read them back.")
        markers: list[Message] = []
        if any("role" in entry for entry in entries[begin + 1 : place]):
            self.summary = await self.ask_in_parts(request, entries, [at for at in places if at <= place])
            kept = [*pins, *self.prompt(entries, place)]
            markers.append(compacting(self.summary, id_of(entries[place]), kept))
        after = self.tokens(request, *markers)
        if after > self.limit and (less := self.tokens(request, *markers, shrinking("", pins))) < after:
            markers.append(shrinking("", pins))
            after = less
        if not markers:
            raise Unable("There is nothing to sum up: all there is, is what is being worked on.")
        if after >= before:
            raise Unable("What it would become is no shorter than what it is.")
        latest = sum("role" in entry for entry in entries[place:])
        held = f", {len(pins)} pinned" if pins else ""
        return self.done(markers, before, after, f"Kept word for word: the first message{held}, the last {latest}.")

    def done(self, markers: Sequence[Message], before: int, after: int, what: str) -> str:
        for marker in markers:
            marker["crow"] = {**marker.get("crow", {}), "before": before, "after": after}
            self.session.log.append(marker)
        self.gauge.tried = after
        return f"Compacted from about {before:,} to {after:,} tokens. {what}"

    def tokens(self, request: Request, *markers: Message) -> int:
        """What the request would be with these markers at the log's end."""
        return self.gauge.tokens(with_messages(request, view([*self.session.log, *markers])))

    def place(self, entries: Sequence[Message], places: Sequence[int]) -> int:
        """Where what is kept begins: at the last prompt, or as early after it as there is room."""
        place, room = places[-1], KEEP * self.limit
        for at in range(len(entries) - 1, find_prompts(entries)[-1] - 1, -1):
            room -= self.weigh(entries[at])
            if room < 0:
                break
            place = at if at in places else place
        return place

    def weigh(self, entry: Message) -> int:
        return self.gauge.tokens({"messages": [entry]}) if "role" in entry else 0

    def prompt(self, entries: Sequence[Message], place: int) -> list[str]:
        """The prompt that is being worked on, where the cut would take it away and it is not too long."""
        turn = find_prompts(entries)[-1]
        return [id_of(entries[turn])] if turn < place and self.weigh(entries[turn]) <= KEEP * self.limit else []

    async def ask_in_parts(self, request: Request, entries: Sequence[Message], places: Sequence[int]) -> str:
        """A summary of what comes before the last of these places: at once where the request for it fits, else part by
        part, each from the summary of those before. Raises Unable."""
        kept = sum("role" in entry for entry in entries[places[-1] :])
        for _ in range(TRIES):
            try:
                if self.gauge.tokens(request) <= FILL * self.window:
                    return await self.ask(request, kept)
                return await self.ask_for_each(request, entries, places)
            except ModelError as error:
                if not error.too_long:
                    raise Unable(str(error)) from error
                self.window = int(min(self.window, self.gauge.tokens(request)) * LESS)
        raise Unable("Even a part of it is too long for the model to sum up.")

    async def ask_for_each(self, request: Request, entries: Sequence[Message], places: Sequence[int]) -> str:
        earlier = next(find_markers(drop_rewound(self.session.log), "compaction", "from"), None)
        summary, start = (str(earlier[0][key]) for key in ("summary", "from")) if earlier else ("", "")
        places = [at for at in places if id_of(entries[at]) != start]
        while places:

            def part(at: int, start: str = start, summary: str = summary) -> Request:
                """What stands before a place: the summary so far, and what came after it."""
                end = next(n for n, entry in enumerate(self.session.log) if id_of(entry) == id_of(entries[at]))
                markers = [shrinking("", []), *([compacting(summary, start, [])] if start else [])]
                return with_messages(request, view([*self.session.log[:end], *markers]))

            fitting = bisect_right(places, FILL * self.window, key=lambda at: self.gauge.tokens(part(at)))
            if not fitting:
                raise Unable("A single message is too long for the model's window; /undo takes it back.")
            summary = await self.ask(part(places[fitting - 1]), 0)
            start, places = id_of(entries[places[fitting - 1]]), places[fitting:]
        return summary

    async def ask(self, request: Request, kept: int) -> str:
        """A summary of what a request holds but for its last messages, `kept` in number; asked behind them, so that the
        server need not read them anew. Raises Unable and ModelError."""
        prompt, words = self.session.prompts.templates["compaction"], max(100, int(self.limit * KEEP * 0.6))
        try:
            text = self.session.prompts.render(
                prompt, "compaction", kept=kept, instructions=self.instructions, words=words
            )
        except PromptError as error:
            raise Unable(str(error)) from error
        messages = join_user_messages([*request["messages"], {"role": "user", "content": text}])
        call = await self.session.ask_model({**request, "messages": messages}, "compaction")
        summary = str(call.reply.get("content") or "").strip()
        if call.reply.get("tool_calls"):
            raise Unable("The model called a tool instead of summing up.")
        match call.finish_reason:
            case "content_filter":
                raise Unable("The model refused to sum up.")
            case "length":
                raise Unable("The model's summary was cut short; a larger max_tokens may help.")
            case _ if not summary:
                raise Unable("The model's summary was empty.")
            case _:
                return summary


def with_messages(request: Request, messages: Sequence[Message]) -> Request:
    """A request with the same beginning, its system prompt too, and other messages."""
    return {**request, "messages": [request["messages"][0], *messages]}


def compacting(summary: str, start: str, pins: Sequence[str]) -> Message:
    return {"crow": {"kind": "compaction", "summary": summary, "from": start, "pinned": list(pins)}}


def shrinking(upto: str, pins: Sequence[str]) -> Message:
    return {"crow": {"kind": "shrink", "upto": upto, "limit": SHORT, "tool": TOOL, "pinned": list(pins)}}


def id_of(entry: Message) -> str:
    return str(entry.get("crow", {}).get("id", ""))


def start_of(entries: Sequence[Message]) -> int:
    """Behind which entry there is something to sum up: the last summary, which alone has no id, or the first prompt."""
    said = [at for at, entry in enumerate(entries) if entry.get("role") == "user"]
    return next((at for at in said if not id_of(entries[at])), said[0] if said else len(entries))


def cuts(entries: Sequence[Message]) -> list[int]:
    """Where a conversation can be cut: before what the user or the model said, when every call before is answered."""
    places: list[int] = []
    waiting: set[str] = set()
    for at, entry in enumerate(entries):
        if entry.get("role") in ("user", "assistant") and not waiting and id_of(entry):
            places.append(at)
        waiting |= {call["id"] for call in entry.get("tool_calls", ())}
        waiting.discard(entry.get("tool_call_id", ""))
    return places


def pinned(log: Sequence[Message]) -> list[str]:
    """The ids of what is to be kept word for word: entries that were pinned, and what tools answered to them."""
    entries = drop_rewound(log)
    ids = {str(entry.get("crow", {}).get("entry")) for entry in entries if marker_kind(entry) == "pin"}
    calls = {call["id"] for entry in entries if id_of(entry) in ids for call in entry.get("tool_calls", ())}
    return [id_of(e) for e in entries if "role" in e and (id_of(e) in ids or e.get("tool_call_id") in calls)]


def since(log: Sequence[Message], id: str) -> list[Message]:
    """The reply with this id and what followed it."""
    at = next((at for at in range(len(log) - 1, -1, -1) if id_of(log[at]) == id), len(log))
    return view(log[at:])
