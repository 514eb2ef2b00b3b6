"""Shorten a conversation: cut old tool outputs and, if that is not enough, ask the model for a summary.

Both append a marker to the log after everything else has succeeded, so a failure leaves the conversation as it was.
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
from crow_core.models.chat import ModelRequest
from crow_core.session import Session

from crow_compact.read_output import TOOL
from crow_compact.tokens import TokenEstimator

SHRINK_SHARE = 0.75
"""The share of the limit that cutting tool outputs alone must reach; with less gain it would soon be full again."""
LATEST_SHARE = 0.25
"""The share of the limit that the latest messages may take, which stay unchanged."""
SUMMARY_REQUEST_SHARE = 0.9
"""The share of the window that a request for a summary may take; the rest is for the summary."""
SHRUNK_CHARACTERS = 2_000
"""Characters that remain of an old tool output."""
MAX_ATTEMPTS = 6
"""Requests for a summary that are tried when they are refused as too long."""
RETRY_SHARE = 0.6
"""The share of a refused request's size that the next attempt may have."""


class CannotCompact(Exception):
    """A conversation cannot be made shorter. The text is a sentence for the user."""


@dataclass
class Compaction:
    """One attempt to make a session's requests shorter."""

    session: Session
    estimator: TokenEstimator
    window: int
    """Tokens that fit into a request and its reply."""
    limit: int
    """Tokens that a request should have at most."""
    instructions: str = ""
    """The user's wishes for the summary."""
    summary: str = ""
    """The summary after `run`; empty if only tool outputs were cut."""

    async def run(self, *, shrink: bool = True) -> str:
        """Shorten what the model sees of the log, and return a report for the user.

        With `shrink`, only cut old tool outputs if that is enough. Raises CannotCompact, with the log unchanged.
        """
        session, request = self.session, await self.session.request()
        before = self.estimator.estimate(request)
        self.estimator.tried = before
        entries, pins = select_entries(session.log), find_pinned(session.log)
        begin = find_start(entries)
        cuts = [at for at in find_cuts(entries) if at > begin]
        if not cuts:
            raise CannotCompact("There is nothing yet to sum up: the conversation has only begun.")
        cut = self.choose_cut(entries, cuts)
        if shrink:
            shrink_old = make_shrink_marker(get_id(entries[cut]), pins)
            if (after := self.estimate_with(request, shrink_old)) <= min(SHRINK_SHARE * self.limit, before - 1):
                outcome = "Old tool outputs were shortened; the model can read them back."
                return self.append_markers([shrink_old], before, after, outcome)
        markers: list[Message] = []
        if any("role" in entry for entry in entries[begin + 1 : cut]):
            self.summary = await self.summarize(request, entries, [at for at in cuts if at <= cut])
            kept_ids = [*pins, *self.find_current_prompt(entries, cut)]
            markers.append(make_compaction_marker(self.summary, get_id(entries[cut]), kept_ids))
        after = self.estimate_with(request, *markers)
        shrink_all = make_shrink_marker("", pins)
        if after > self.limit and (less := self.estimate_with(request, *markers, shrink_all)) < after:
            markers.append(shrink_all)
            after = less
        if not markers:
            raise CannotCompact("There is nothing to sum up: all messages belong to the current work.")
        if after >= before:
            raise CannotCompact("The summary would not be shorter than the conversation.")
        latest = sum("role" in entry for entry in entries[cut:])
        pinned = f", {len(pins)} pinned" if pins else ""
        outcome = f"Kept word for word: the first message{pinned}, the last {latest}."
        return self.append_markers(markers, before, after, outcome)

    def append_markers(self, markers: Sequence[Message], before: int, after: int, outcome: str) -> str:
        """Append the markers to the log with both token counts, and return the report."""
        for marker in markers:
            marker["crow"] = {**marker.get("crow", {}), "before": before, "after": after}
            self.session.log.append(marker)
        self.estimator.tried = after
        return f"Compacted from about {before:,} to {after:,} tokens. {outcome}"

    def estimate_with(self, request: ModelRequest, *markers: Message) -> int:
        """Return the estimated tokens of the request if these markers were at the end of the log."""
        return self.estimator.estimate(replace_messages(request, view([*self.session.log, *markers])))

    def choose_cut(self, entries: Sequence[Message], cuts: Sequence[int]) -> int:
        """Return the cut that messages are kept from: the last, or the earliest after the last prompt that fits.

        The messages from such an earlier cut on take at most LATEST_SHARE of the limit.
        """
        cut, room = cuts[-1], LATEST_SHARE * self.limit
        for at in range(len(entries) - 1, find_prompts(entries)[-1] - 1, -1):
            room -= self.estimate_entry(entries[at])
            if room < 0:
                break
            cut = at if at in cuts else cut
        return cut

    def estimate_entry(self, entry: Message) -> int:
        """Return the estimated tokens of an entry; 0 for a marker."""
        return self.estimator.estimate({"messages": [entry]}) if "role" in entry else 0

    def find_current_prompt(self, entries: Sequence[Message], cut: int) -> list[str]:
        """Return the id of the current turn's prompt if it is before the cut and short enough to keep, in a list."""
        prompt = find_prompts(entries)[-1]
        is_short = prompt < cut and self.estimate_entry(entries[prompt]) <= LATEST_SHARE * self.limit
        return [get_id(entries[prompt])] if is_short else []

    async def summarize(self, request: ModelRequest, entries: Sequence[Message], cuts: Sequence[int]) -> str:
        """Return a summary of the entries before the last of `cuts`, made in parts if the request does not fit at once.

        Raises CannotCompact.
        """
        latest = sum("role" in entry for entry in entries[cuts[-1] :])
        for _ in range(MAX_ATTEMPTS):
            try:
                if self.estimator.estimate(request) <= SUMMARY_REQUEST_SHARE * self.window:
                    return await self.ask_for_summary(request, latest)
                return await self.summarize_in_parts(request, entries, cuts)
            except ModelError as error:
                if not error.too_long:
                    raise CannotCompact(str(error)) from error
                self.window = int(min(self.window, self.estimator.estimate(request)) * RETRY_SHARE)
        raise CannotCompact("Even a part of the conversation is too long for the model to sum up.")

    async def summarize_in_parts(self, request: ModelRequest, entries: Sequence[Message], cuts: Sequence[int]) -> str:
        """Return a summary of the entries before the last of `cuts`, each part from the summary of those before it.

        Begin with the last compaction's summary, if there is one. Raises CannotCompact and ModelError.
        """
        earlier = next(find_markers(drop_rewound(self.session.log), "compaction", "from"), None)
        summary, start = (str(earlier[0][key]) for key in ("summary", "from")) if earlier else ("", "")
        cuts = [at for at in cuts if get_id(entries[at]) != start]
        while cuts:

            def make_part(cut: int, start: str = start, summary: str = summary) -> ModelRequest:
                """Return the request with the summary so far and the messages between it and a cut."""
                end = next(n for n, entry in enumerate(self.session.log) if get_id(entry) == get_id(entries[cut]))
                earlier = [make_compaction_marker(summary, start, [])] if start else []
                markers = [make_shrink_marker("", []), *earlier]
                return replace_messages(request, view([*self.session.log[:end], *markers]))

            limit = SUMMARY_REQUEST_SHARE * self.window
            fitting = bisect_right(cuts, limit, key=lambda cut: self.estimator.estimate(make_part(cut)))
            if not fitting:
                raise CannotCompact("A single message is too long for the model's window; /undo takes it back.")
            summary = await self.ask_for_summary(make_part(cuts[fitting - 1]), 0)
            start, cuts = get_id(entries[cuts[fitting - 1]]), cuts[fitting:]
        return summary

    async def ask_for_summary(self, request: ModelRequest, latest: int) -> str:
        """Return the model's summary of a request's messages, except the last `latest` ones.

        Ask for it behind those messages, so that the server can use its cache. Raises CannotCompact and ModelError.
        """
        prompt, words = self.session.prompts.templates["compaction"], max(100, int(self.limit * LATEST_SHARE * 0.6))
        try:
            text = self.session.prompts.render(
                prompt, "compaction", kept=latest, instructions=self.instructions, words=words
            )
        except PromptError as error:
            raise CannotCompact(str(error)) from error
        messages = join_user_messages([*request["messages"], {"role": "user", "content": text}])
        model_call = await self.session.ask_model({**request, "messages": messages}, "compaction")
        summary = str(model_call.reply.get("content") or "").strip()
        if model_call.reply.get("tool_calls"):
            raise CannotCompact("The model called a tool instead of summing up.")
        match model_call.finish_reason:
            case "content_filter":
                raise CannotCompact("The model refused to sum up.")
            case "length":
                raise CannotCompact("The model's summary was cut short; a larger max_tokens may help.")
            case _ if not summary:
                raise CannotCompact("The model's summary was empty.")
            case _:
                return summary


def replace_messages(request: ModelRequest, messages: Sequence[Message]) -> ModelRequest:
    """Return a copy of a request with its system prompt and other messages."""
    return {**request, "messages": [request["messages"][0], *messages]}


def make_compaction_marker(summary: str, start: str, pins: Sequence[str]) -> Message:
    """Return a marker that puts a summary in the place of the entries before the id `start`, except the pinned ids."""
    return {"crow": {"kind": "compaction", "summary": summary, "from": start, "pinned": list(pins)}}


def make_shrink_marker(upto: str, pins: Sequence[str]) -> Message:
    """Return a marker that cuts the tool results before the id `upto` (all before it if ""), except the pinned ids."""
    limit = SHRUNK_CHARACTERS
    return {"crow": {"kind": "shrink", "upto": upto, "limit": limit, "tool": TOOL, "pinned": list(pins)}}


def get_id(entry: Message) -> str:
    """Return the id of an entry, or "" if it has none."""
    return str(entry.get("crow", {}).get("id", ""))


def find_start(entries: Sequence[Message]) -> int:
    """Return the index of the entry that a summary would follow: the last summary or, without one, the first prompt."""
    prompts = [at for at, entry in enumerate(entries) if entry.get("role") == "user"]
    first = prompts[0] if prompts else len(entries)
    return next((at for at in prompts if not get_id(entries[at])), first)  # only a summary has no id


def find_cuts(entries: Sequence[Message]) -> list[int]:
    """Return the indexes of the user's and the model's messages before which every tool call is answered."""
    cuts: list[int] = []
    waiting: set[str] = set()
    for at, entry in enumerate(entries):
        if entry.get("role") in ("user", "assistant") and not waiting and get_id(entry):
            cuts.append(at)
        waiting |= {tool_call["id"] for tool_call in entry.get("tool_calls", ())}
        waiting.discard(entry.get("tool_call_id", ""))
    return cuts


def find_pinned(log: Sequence[Message]) -> list[str]:
    """Return the ids of the pinned entries, and of the results of their tool calls."""
    entries = drop_rewound(log)
    ids = {str(entry.get("crow", {}).get("entry")) for entry in entries if marker_kind(entry) == "pin"}
    tool_calls = {
        tool_call["id"] for entry in entries if get_id(entry) in ids for tool_call in entry.get("tool_calls", ())
    }
    return [get_id(e) for e in entries if "role" in e and (get_id(e) in ids or e.get("tool_call_id") in tool_calls)]


def view_since(log: Sequence[Message], id: str) -> list[Message]:
    """Return the view of the entry with this id and of those after it."""
    at = next((at for at in range(len(log) - 1, -1, -1) if get_id(log[at]) == id), len(log))
    return view(log[at:])
