"""Signals in a stored session that something went wrong: each names its message and quotes it."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from crow_core.messages.message import Message, find_turns, get_id, joins_turn, marker_kind
from crow_core.messages.passes import drop_rewound, find_entry
from crow_persistence.recent_logs import RecentLog

from crow_eval.lessons.call_signals import (
    Signal,
    TurnCalls,
    Use,
    add_result,
    find_call_signals,
    get_text,
    make_use,
)
from crow_eval.lessons.corrections import find_correction, make_line, split_sentences

REJECTED = "the user rejected it: "
"""The beginning of a decision for which the user gave a reason."""
REJECTED_ELSEWHERE = re.compile(
    r"To tell you how to proceed, the user said:\s*(?P<claude>.+?)(?:\n\nNote: |\Z)"
    r"|with the following feedback: (?P<opencode>.+)",
    re.DOTALL,
)
"""The user's words in results of calls that were rejected in Claude Code and opencode."""


@dataclass(frozen=True)
class SaidMessage:
    """A message of a user, without secrets and private data."""

    session: str
    entry: str
    cwd: str
    text: str
    is_first: bool = False
    """True if it begins its session, so that it cannot correct anything."""


def find_signals(log: RecentLog) -> Iterator[Signal]:
    turn, uses = TurnCalls(log.id, log.cwd), dict[str, Use]()
    is_of_user, answered = not any(map(is_of_sub_agents, log.entries)), False
    for at, entry in enumerate(log.entries):
        notes = entry.get("crow", {})
        match entry.get("role") or marker_kind(entry):
            case "user" if is_said(entry):
                if answered and is_of_user and (said := find_correction(get_text(entry))):
                    yield turn.make_signal("correction", get_id(entry), said.quote, said.line)
                if not joins_turn(entry):
                    yield from find_call_signals(turn)
                    turn = TurnCalls(log.id, log.cwd)
            case "assistant":
                answered = True
                made = {call["id"]: make_use(call) for call in entry.get("tool_calls", [])}
                uses |= made
                turn.uses += made.values()
            case "tool" if use := uses.get(entry.get("tool_call_id", "")):
                add_result(use, entry)
            case "render" if notes.get("purpose") == "skill":
                folder = str(notes.get("variables", {}).get("folder", ""))
                turn.skill = folder if os.path.isabs(folder) else ""  # that of an MCP server has an address
            case "rewind" if prompt := find_undone_prompt(log.entries, at):
                yield turn.make_signal("undone", get_id(prompt), get_text(prompt))
            case _:
                pass
        if words := find_rejection(entry):
            yield turn.make_signal("rejection", get_id(entry), words, make_rejection_line(words))
    yield from find_call_signals(turn)


def list_said(log: RecentLog, clean: Callable[[str, str], str]) -> list[SaidMessage]:
    """List the messages that the user wrote in a session, cleaned by a function; none if there is only a first one."""
    said = [entry for entry in log.entries if is_said(entry)]
    if len(said) < 2 or any(map(is_of_sub_agents, log.entries)):
        return []
    return [
        SaidMessage(log.id, get_id(entry), log.cwd, clean(log.id, get_text(entry)), is_first=at == 0)
        for at, entry in enumerate(said)
    ]


def is_said(entry: Message) -> bool:
    """Return whether an entry is a message that the user wrote, unlike one of crow or of a command file."""
    notes = entry.get("crow", {})
    return entry.get("role") == "user" and not notes.get("hidden") and not notes.get("command")


def is_of_sub_agents(entry: Message) -> bool:
    """Return whether an entry says that a model has written the prompts of an imported session."""
    return marker_kind(entry) == "imported" and str(entry.get("crow", {}).get("session", "")).endswith("/sub-agents")


def find_rejection(entry: Message) -> str:
    """Return the words with which the user rejected a tool call, of a decision or of another agent's result."""
    notes = entry.get("crow", {})
    if marker_kind(entry) == "decision" and notes.get("is") == "deny":
        by = str(notes.get("by", ""))
        return by.removeprefix(REJECTED) if by.startswith(REJECTED) else ""
    found = REJECTED_ELSEWHERE.search(get_text(entry)) if entry.get("role") == "tool" and notes.get("failed") else None
    return (found["claude"] or found["opencode"]) if found else ""


def make_rejection_line(words: str) -> str:
    """Make a line of instructions of the words with which the user rejected a call."""
    said = find_correction(words)
    return said.line if said and said.line else make_line(next(iter(split_sentences(words)), ""))


def find_undone_prompt(entries: Sequence[Message], at: int) -> Message | None:
    """Return the first prompt that the marker at an index has undone; None if it has undone nothing, or a later marker
    brings it back."""
    notes = entries[at].get("crow", {})
    undone = notes.get("undone")
    later = (entry.get("crow", {}).get("to") for entry in entries[at:] if marker_kind(entry) == "rewind")
    if not undone or undone in later:
        return None
    path = drop_rewound(entries[:at])
    after = path[find_entry(path, notes.get("to")) :]
    return next((after[prompt] for prompt in find_turns(after)), None)
