"""Shorten a conversation: cut old tool outputs and, if that is not enough, ask the model for a summary.

The markers are appended to the log after everything else has succeeded. Without a usable summary, old tool outputs stay
cut; after several, the oldest messages are left out.
"""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crow_core.messages.message import Message, find_prompts, get_id
from crow_core.models.model_call import ModelRequest
from crow_core.session.session import Session

from crow_compact.markers import (
    find_cuts,
    find_earlier_summary,
    find_pinned,
    find_start,
    make_compaction_marker,
    make_shrink_marker,
)
from crow_compact.summary import MAX_FAILURES, NOT_SHORTER, CannotCompact, NoSummary, Summarizer
from crow_compact.tokens import TokenEstimator

LATEST_SHARE = 0.25
"""The share of the limit that the latest messages may take, which stay unchanged."""
DROP_SHARE = 0.75
"""The share of the limit that a request may take after the oldest messages were left out."""
RETRY_GROWTH = 1.1
"""Factor by which a request must have grown since the last attempt before compaction is tried again."""

CUT_SHORT = "[The summary was cut short here.]"
SHRUNK = "Old tool outputs were shortened; the model can read them back."
LEFT_OUT = "[What followed was left out without a summary. Ask the user for what you miss.]"


@dataclass
class Compaction:
    """One attempt to make a session's requests shorter."""

    session: Session
    estimator: TokenEstimator
    window: int
    """Tokens that fit into a request and its reply."""
    limit: int
    """Tokens that a request should have at most."""
    must_fit: int = 0
    """Tokens that a request cannot exceed, so that an unusable summary is asked for again at once; 0 for none."""
    instructions: str = ""
    """The user's wishes for the summary."""
    ask: Callable[[str, Sequence[Message]], Awaitable[str]] | None = None
    """Shows the summary and the messages that stay to the user, and returns the summary as it counts."""
    summary: str = ""
    """The summary after `run`; empty if there is none."""
    warning: str = ""
    """A sentence for the user after `run` if there is no usable summary."""
    request: ModelRequest = field(default_factory=dict[str, Any], init=False)
    """The session's next request, while `run` works; so are those below."""
    before: int = field(default=0, init=False)
    """Its estimated tokens."""
    entries: Sequence[Message] = field(default=(), init=False)
    """The entries of the log, after its selecting markers were applied."""
    pins: Sequence[str] = field(default=(), init=False)
    """The ids of the pinned entries."""

    async def run(self, *, shrink: bool) -> str:
        """Shorten what the model sees of the log, and return a report for the user.

        With `shrink`, ask for no summary if cutting old tool outputs is enough, and leave out the oldest messages after
        several unusable summaries. Raises CannotCompact, with the log unchanged.
        """
        request = await self.session.request()
        self.request = {key: value for key, value in request.items() if key != "response_format"}  # a summary is text
        self.before = self.estimator.tried = self.estimator.estimate(self.request)
        self.entries, self.pins = self.session.view.select(), find_pinned(self.session.view)
        begin = find_start(self.entries)
        cuts = [at for at in find_cuts(self.entries) if at > begin]
        if not cuts:
            raise CannotCompact("There is nothing yet to sum up: the conversation has only begun.")
        cut = self.choose_cut(cuts)
        shrink_old = make_shrink_marker(get_id(self.entries[cut]), self.pins)
        after = self.estimate_with(shrink_old)
        if shrink and after <= self.limit and after < self.before:
            return self.append_markers([shrink_old], SHRUNK)
        markers: list[Message] = []
        least = make_compaction_marker("", get_id(self.entries[cut]), self.pins)
        if any("role" in e for e in self.entries[begin + 1 : cut]) and self.estimate_with(least) < self.before:
            try:
                markers = await self.sum_up([at for at in cuts if at <= cut], is_urgent=0 < self.must_fit < after)
            except NoSummary as error:
                if shrink and self.estimator.failures >= MAX_FAILURES:
                    return self.leave_out(begin, cuts, shrink_old, error)
                return self.keep_shrunk(shrink_old, error)
        if markers and self.ask:
            pinned = markers[0].get("crow", {}).get("pinned", ())
            self.summary = await self.ask(self.summary, self.list_unchanged(cut, pinned))
            markers = [make_compaction_marker(self.summary, get_id(self.entries[cut]), pinned)]
        markers = self.shrink_to_fit(markers, self.limit)
        if not markers:
            raise CannotCompact("There is nothing to sum up: all messages belong to the current work.")
        latest = sum("role" in entry for entry in self.entries[cut:])
        pinned = f", {len(self.pins)} pinned" if self.pins else ""
        return self.append_markers(markers, f"Kept word for word: the first message{pinned}, the last {latest}.")

    async def sum_up(self, cuts: Sequence[int], *, is_urgent: bool) -> list[Message]:
        """Return a marker with a summary of the entries before the last of `cuts`, in a list. Raises NoSummary.

        After an unusable summary, ask once more, or, if it is urgent, until MAX_FAILURES in a row.
        """
        kept = [*self.pins, *self.find_current_prompt(cuts[-1])]
        while True:
            summarizer = Summarizer(
                self.session,
                self.request,
                self.entries,
                cuts,
                self.estimator,
                self.window,
                self.limit,
                self.instructions,
            )
            try:
                self.summary = await summarizer.summarize()
                marker = make_compaction_marker(self.summary, get_id(self.entries[cuts[-1]]), kept)
                if self.estimate_with(*self.shrink_to_fit([marker], self.limit)) >= self.before:
                    raise NoSummary(NOT_SHORTER, may_repeat=is_urgent)
            except NoSummary as error:
                self.estimator.failures += 1
                is_first = self.estimator.failures == 1
                if self.estimator.failures >= MAX_FAILURES or not error.may_repeat or not (is_first or is_urgent):
                    raise
            else:
                self.estimator.failures, self.estimator.cut_short = 0, ""
                return [marker]

    def list_unchanged(self, cut: int, pinned: Sequence[str]) -> list[Message]:
        """List the messages that stay next to a summary of those before a cut: the first, pinned ones, the latest."""
        first = next(at for at, entry in enumerate(self.entries) if entry.get("role") == "user")
        kept = [entry for entry in self.entries[first + 1 : cut] if get_id(entry) and get_id(entry) in pinned]
        return [self.entries[first], *kept, *(entry for entry in self.entries[cut:] if "role" in entry)]

    def keep_shrunk(self, shrink_old: Message, error: NoSummary) -> str:
        """Shorten old tool outputs, although that is not enough, and return a report.

        Raises the error if too little is gained by it.
        """
        markers = [shrink_old] if self.estimate_with(shrink_old) <= self.window else self.shrink_to_fit([], 0)
        after = self.estimate_with(*markers)
        if after * RETRY_GROWTH > self.before and not after <= self.window < self.before:
            raise error
        self.warning = f"No summary could be made. {error}"
        return self.append_markers(markers, SHRUNK)

    def leave_out(self, begin: int, cuts: Sequence[int], shrink_old: Message, error: NoSummary) -> str:
        """Leave out the oldest messages without a summary, whole turns if possible, and return a report."""
        earlier, _ = find_earlier_summary(self.session.view)
        cut_short = self.estimator.cut_short
        said = f"{cut_short}\n\n{CUT_SHORT}" if cut_short else earlier.removesuffix(LEFT_OUT).strip()
        summary = f"{said}\n\n{LEFT_OUT}".strip()

        def find_kept(at: int) -> list[str]:
            prompt = find_prompts(self.entries)[-1]  # without it, nothing would tell the model what to do
            return [*self.pins, *([get_id(self.entries[prompt])] if prompt < at else [])]

        def leave_out_before(at: int) -> list[Message]:
            return [shrink_old, make_compaction_marker(summary, get_id(self.entries[at]), find_kept(at))]

        def is_enough(at: int) -> bool:
            return self.estimate_with(*leave_out_before(at)) <= DROP_SHARE * self.limit

        prompts = [at for at in find_prompts(self.entries) if at in cuts]
        places = [candidates[bisect_left(candidates, True, key=is_enough) :] for candidates in (prompts, cuts)]
        cut = next((found[0] for found in places if found), cuts[-1])
        markers = self.shrink_to_fit(leave_out_before(cut), self.limit)
        if self.estimate_with(*markers) >= self.before:
            raise error
        self.estimator.failures, self.estimator.cut_short = 0, ""
        kept = find_kept(cut)
        dropped = [entry for entry in self.entries[begin + 1 : cut] if "role" in entry and get_id(entry) not in kept]
        self.warning = (
            f"No summary could be made. {error} The {len(dropped)} oldest messages behind the first were left out: the "
            "model no longer sees them, but the session keeps them. Say again what it still needs."
        )
        return self.append_markers(markers, "The oldest messages were left out without a summary.")

    def append_markers(self, markers: Sequence[Message], outcome: str) -> str:
        """Append the markers to the log with both token counts, and return the report."""
        after = self.estimate_with(*markers)
        for marker in markers:
            notes = marker.get("crow")
            assert notes is not None
            notes.update(before=self.before, after=after)
            self.session.log.append(marker)
        self.estimator.tried = after
        return f"Compacted from about {self.before:,} to {after:,} tokens. {outcome}"

    def estimate_with(self, *markers: Message) -> int:
        """Return the estimated tokens of the request if these markers were at the end of the log."""
        return self.estimator.estimate(replace_messages(self.request, self.session.view.messages(*markers)))

    def shrink_to_fit(self, markers: Sequence[Message], limit: int) -> list[Message]:
        """Return the markers, with one that cuts all tool outputs if the request is too long without it."""
        after, shrink_all = self.estimate_with(*markers), make_shrink_marker("", self.pins)
        helps = after > limit and self.estimate_with(*markers, shrink_all) < after
        return [*markers, shrink_all] if helps else [*markers]

    def choose_cut(self, cuts: Sequence[int]) -> int:
        """Return the cut that messages are kept from: the last, or the earliest after the last prompt that fits.

        The messages from such an earlier cut on take at most LATEST_SHARE of the limit.
        """
        cut, room = cuts[-1], LATEST_SHARE * self.limit
        for at in range(len(self.entries) - 1, find_prompts(self.entries)[-1] - 1, -1):
            room -= self.estimate_entry(self.entries[at])
            if room < 0:
                break
            cut = at if at in cuts else cut
        return cut

    def estimate_entry(self, entry: Message) -> int:
        """Return the estimated tokens of an entry; 0 for a marker."""
        return self.estimator.estimate({"messages": [entry]}) if "role" in entry else 0

    def find_current_prompt(self, cut: int) -> list[str]:
        """Return the id of the current turn's prompt if it is before the cut and short enough to keep, in a list."""
        prompt = find_prompts(self.entries)[-1]
        is_short = prompt < cut and self.estimate_entry(self.entries[prompt]) <= LATEST_SHARE * self.limit
        return [get_id(self.entries[prompt])] if is_short else []


def replace_messages(request: ModelRequest, messages: Sequence[Message]) -> ModelRequest:
    """Return a copy of a request with its system prompt and other messages."""
    return {**request, "messages": [request["messages"][0], *messages]}


def find_limit(session: Session, window: int, threshold: float, models: Mapping[str, float]) -> int:
    """Return the tokens above which a session is compacted: `threshold`, or that of its model's name in `models`."""
    limit = next((limit for name, limit in models.items() if session.models.get(name) is session.model), threshold)
    return int(limit if limit > 1 else limit * window)


def is_due(planned: Compaction, tokens: int, limit: int) -> bool:
    """Test whether a request is above the limit, and has grown since the last attempt or outgrown the window."""
    tried = planned.estimator.tried
    grown = tried * RETRY_GROWTH
    return tokens > max(limit, grown if tried > planned.window else min(grown, planned.window))
