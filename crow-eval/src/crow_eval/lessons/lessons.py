"""Lessons: signals about the same thing, with evidence and a line of instructions, free of secrets and private data."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path

from crow_persistence.recent_logs import load_recent_logs
from sqlalchemy import Connection

from crow_eval.lessons.call_signals import Signal
from crow_eval.lessons.cleaning import Cleaner
from crow_eval.lessons.corrections import DATA
from crow_eval.lessons.instruction_files import find_instruction_file, knows_line
from crow_eval.lessons.session_signals import SaidMessage, find_signals, list_said

LEAST = {"failure": 3, "refused": 2, "cut": 2}
"""The least number of times that a signal must occur to be a lesson; once for the others."""
OPINIONS = ("correction", "rejection")
"""Kinds of signals that are the user's words. They are grouped together."""
EVIDENCE_LIMIT = 5
"""Signals of a lesson that are quoted, the latest."""
LINE_LIMIT = 200
"""Characters of a line of instructions."""
FIXED_LINES = {"loop": "If a tool call gives the same result twice, do not repeat it: try another way, or ask."}
"""Lines for kinds that say nothing about a project."""

WORD = re.compile(r"[^\W_][\w.@/+-]*[^\W_]|[^\W_]")
EMPTY, COMMON = (frozenset(DATA[name].split()) for name in ("empty", "common"))
"""Words that do not say what a correction is about, and words that say it only if there are no others."""


@dataclass(frozen=True)
class Evidence:
    """A message that shows what went wrong."""

    session: str
    entry: str
    """The id of the log's entry, as `crow sessions show` prints it."""
    quote: str


@dataclass
class Lesson:
    """A fault, its number of times, and a line of instructions that could prevent it."""

    id: str
    kind: str
    times: int
    sessions: int
    line: str
    """"" if no line follows from it."""
    file: str
    """The file of instructions that the line is for: of the project, of the user, or of a skill."""
    evidence: list[Evidence] = field(default_factory=list[Evidence])


@dataclass
class Group:
    """Signals about the same thing, in the order of their sessions."""

    signals: list[Signal] = field(default_factory=list[Signal])
    words: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        return self.signals[0].kind

    @property
    def sessions(self) -> set[str]:
        return {signal.session for signal in self.signals}


@dataclass
class SessionsReading:
    """The stored sessions, as far as they were read."""

    signals: list[Signal] = field(default_factory=list[Signal])
    said: list[SaidMessage] = field(default_factory=list[SaidMessage])
    """The messages of users, without secrets and private data, if a model is to read them."""
    sessions: int = 0


def read_sessions(
    connection: Connection, since: int, cwd: str, secrets: Collection[str], *, for_model: bool = False
) -> SessionsReading:
    """Read the sessions in a folder ("" for all) that were used after a time, in milliseconds since 1970."""
    reading = SessionsReading()
    cleaner = Cleaner(connection, secrets)
    for log in load_recent_logs(connection, since, cwd):
        reading.sessions += 1
        reading.signals += find_signals(log)
        if for_model:
            reading.said += list_said(log, cleaner.clean)
    return reading


def add_model_signals(signals: Sequence[Signal], found: Sequence[Signal]) -> list[Signal]:
    """Return signals with those that a model has found. Its line is used where there was none."""
    lines = {(one.session, one.entry): one.line for one in found}
    known = {(one.session, one.entry) for one in signals}
    completed = [replace(one, line=one.line or lines.get((one.session, one.entry), "")) for one in signals]
    return [*completed, *(one for one in found if (one.session, one.entry) not in known)]


def group_signals(signals: Iterable[Signal]) -> list[Group]:
    """Group signals about the same thing; leave out those that occurred too rarely."""
    opinions: list[Signal] = []
    groups: dict[tuple[str, str], Group] = {}
    for signal in signals:
        if signal.kind in OPINIONS:
            opinions.append(signal)
        else:
            groups.setdefault((signal.kind, signal.key or signal.line or signal.quote), Group()).signals.append(signal)
    found = [*group_by_words(opinions), *groups.values()]
    found = [group for group in found if len(group.signals) >= LEAST.get(group.kind, 1)]
    return sorted(found, key=lambda group: (-len(group.sessions), -len(group.signals)))


def group_by_words(signals: Iterable[Signal]) -> list[Group]:
    """Group what users have said by the words that it is about."""
    groups: list[Group] = []
    by_word: dict[str, list[Group]] = {}
    for signal in signals:
        words = find_words(f"{signal.quote} {signal.line}")
        near = {id(group): group for word in words for group in by_word.get(word, ())}
        group = next((group for group in near.values() if are_alike(words, group.words)), None)
        if group is None:
            groups.append(group := Group(words=words))
            for word in words:
                by_word.setdefault(word, []).append(group)
        group.signals.append(signal)
    return groups


def find_words(text: str) -> frozenset[str]:
    """Find the words that say what a correction is about."""
    words = set(WORD.findall(text.lower().replace("’", "'"))) - EMPTY
    return frozenset(words - COMMON or words)


def are_alike(one: frozenset[str], other: frozenset[str]) -> bool:
    """Return whether two corrections are about the same: all words of one, or half of all, are in both."""
    both = len(one & other)
    return both > 0 and (both == min(len(one), len(other)) or 2 * both >= len(one | other))


def make_lessons(
    connection: Connection, signals: Iterable[Signal], config: Path, secrets: Collection[str], limit: int
) -> list[Lesson]:
    """Make at most `limit` lessons of signals, the most frequent first, without secrets and private data.

    `config` is the user's folder of settings.
    """
    cleaner = Cleaner(connection, secrets)
    lessons = (make_lesson(group, cleaner, config) for group in group_signals(signals))
    return list(islice(filter(None, lessons), limit))


def make_lesson(group: Group, cleaner: Cleaner, config: Path) -> Lesson | None:
    """Make a lesson of a group; None if all of its signals are about private data, or its file has the line."""
    shown = [signal for signal in list_latest(group) if not cleaner.is_private(signal.session, signal.entry)]
    if not shown:
        return None
    lines = (cleaner.clean_line(signal.session, signal.line) for signal in shown if signal.line)
    line = FIXED_LINES.get(group.kind) or next(filter(None, lines), "")
    line = line if len(line) <= LINE_LIMIT else ""
    evidence = [Evidence(one.session, one.entry, cleaner.clean(one.session, one.quote)) for one in shown]
    file = find_instruction_file({one.cwd for one in group.signals}, {one.skill for one in group.signals}, config)
    if line and knows_line(file, line):
        return None
    about = line or min((one.quote for one in evidence), default="")
    id = sha256(f"{group.kind}\0{about}".encode()).hexdigest()[:6]
    return Lesson(id, group.kind, len(group.signals), len(group.sessions), line, str(file), evidence)


def list_latest(group: Group) -> Iterator[Signal]:
    """Yield the signals of a group that are quoted, the latest first."""
    yield from group.signals[: -EVIDENCE_LIMIT - 1 : -1]
