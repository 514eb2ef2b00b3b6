"""The turns of a session: each prompt with what followed it, its model calls, and how its time was spent."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from crow_persistence.export.transcript import Transcript, TranscriptPart

PAUSE = 50
"""Milliseconds between two model calls above which the time is shown."""


@dataclass(frozen=True)
class Span:
    """A part of the time of a turn. Times are milliseconds since 1970."""

    kind: str
    """`model`, `tools` or `person`."""
    label: str
    start: float
    end: float
    link: str = ""


@dataclass
class Turn:
    """A prompt, and what followed it up to the next one."""

    prompt: TranscriptPart | None = None
    """None for what is before the first prompt."""
    parts: list[TranscriptPart] = field(default_factory=list[TranscriptPart])
    """All its messages and notes, the prompt first."""
    calls: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    spans: list[Span] = field(default_factory=list[Span])

    @property
    def cost(self) -> dict[str, float]:
        """The cost by currency."""
        found: dict[str, float] = {}
        for call in self.calls:
            if call["cost"] is not None:
                found[call["currency"]] = found.get(call["currency"], 0.0) + call["cost"]
        return found

    @property
    def took(self) -> float:
        """Milliseconds from its first span to the end of its last."""
        return max(span.end for span in self.spans) - self.spans[0].start if self.spans else 0.0

    @property
    def fill(self) -> int:
        """Tokens of its last request."""
        return next((call["input"] for call in reversed(self.calls) if call["purpose"] == "turn" and call["input"]), 0)


def list_turns(transcript: Transcript) -> list[Turn]:
    """Return the turns of a session.

    A call belongs to the turn that holds its reply. One without a reply belongs to the turn that ran when it started.
    """
    notes = {(entry.get("crow", {})).get("id"): entry.get("crow", {}) for entry in transcript.record.log}
    turns, place = [Turn()], dict[str, int]()
    for part in transcript.parts():
        if part.who == "user" and not notes.get(part.id, {}).get("steer"):
            turns.append(Turn(part))
        turns[-1].parts.append(part)
        place[part.id] = len(turns) - 1
    begun = [turn.prompt.at or 0 if turn.prompt else 0 for turn in turns]
    at = 0
    for call in transcript.model_calls:
        found = place.get(call["id"])
        at = max(at, bisect_right(begun, call["started"]) - 1) if found is None else found
        turns[at].calls.append(call)
    answered = list_answers_of_persons(transcript)
    for turn in turns:
        turn.spans = list(list_spans(turn, answered))
    return [turn for turn in turns if turn.parts or turn.calls]


def list_answers_of_persons(transcript: Transcript) -> list[int]:
    """Return the times at which a person answered a permission question."""
    notes = (entry.get("crow", {}) for entry in transcript.record.log)
    asked = [note.get("id", "") for note in notes if str(note.get("by", "")).startswith("the user")]
    return [transcript.times[id] for id in asked if id in transcript.times]


def list_spans(turn: Turn, answered: list[int]) -> Iterator[Span]:
    """Yield the model calls of a turn, and what lies between them: waiting for a person, then tools."""
    parts = {part.id: part for part in turn.parts}
    before: Mapping[str, Any] | None = None
    for call in turn.calls:
        if before is not None:
            start, end = before["started"] + (before["total"] or 0.0), float(call["started"])
            waited = max((at for at in answered if start <= at <= end), default=start)
            if waited - start > PAUSE:
                yield Span("person", "waiting for you", start, waited)
            if end - waited > PAUSE:
                names = (
                    [tool_call.name for tool_call in parts[before["id"]].tool_calls] if before["id"] in parts else []
                )
                yield Span("tools", ", ".join(dict.fromkeys(names)) or "between", waited, end)
        total = call["total"] or 0.0
        yield Span("model", call["model"], call["started"], call["started"] + total, f"/call/{call['id']}")
        before = call
