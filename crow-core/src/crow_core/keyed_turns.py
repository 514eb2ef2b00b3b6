"""Turns with a key of the caller's: an interrupted one goes on from the log, and one that has ended is not run again.

The notes of the user's message have the key, and the marker `ended` the stop reason, the text and the tokens of the
turn. A marker `started` says that a tool call may have had effects. A completed call is never repeated; an interrupted
one runs at most once unless its tool is declared idempotent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from crow_core.acp.schema import StopReason
from crow_core.content import replay, to_interruption
from crow_core.errors import PromptError
from crow_core.messages.message import (
    Message,
    RawToolCall,
    find_markers_of_call,
    find_unanswered,
    get_id,
    is_reply,
    marker_kind,
)
from crow_core.messages.notes import Notes
from crow_core.models.usage import TURN_TOTALS
from crow_core.react import STOP_REASONS, act, react
from crow_core.session.output import STOPPED, TURN_NOTES
from crow_core.session.session import Session
from crow_core.session.store import KeyedOrigin

COUNTED = ("calls", "prompt", "completion", "cached", "thought")
"""The totals of a turn that its marker keeps."""


@dataclass
class KeyedTurn:
    """A turn with a key, as the log has it."""

    entries: list[Message]
    """Its entries; the first is the user's message."""
    end: Notes | None = None
    """The notes of its marker `ended`; None if it has not ended."""

    @property
    def message(self) -> Message:
        """The user's message."""
        return self.entries[0]


def digest_prompt(message: Message) -> str:
    """Return a digest of a prompt as it arrived, by which another prompt with the same key is known."""
    asked = [message.get("content"), message.get("crow", {}).get("output")]
    return sha256(msgspec.json.encode(asked, order="sorted")).hexdigest()[:32]


def find_turn(entries: Sequence[Message], key: str, message: Message) -> KeyedTurn | None:
    """Find the turn of this key; None for no key, or if it has not begun.

    Raises PromptError if it is the turn of another prompt than this message.
    """
    if not key:
        return None
    places = [at for at, entry in enumerate(entries) if entry.get("crow", {}).get("key") == key]
    if not places:
        return None
    first, last = entries[places[0]], entries[places[-1]].get("crow", {})
    if first.get("crow", {}).get("prompt", "") != digest_prompt(message):
        raise PromptError(f"The key {key!r} belongs to another prompt of this session. Give this prompt another key.")
    if last.get("kind") == "ended":
        return KeyedTurn([*entries[places[0] : places[-1]]], last)
    return KeyedTurn([*entries[places[0] :]])


def find_open_turn(entries: Sequence[Message]) -> str:
    """Return the key of the last turn that has one, if the turn has not ended; else ""."""
    for entry in reversed(entries):
        if key := entry.get("crow", {}).get("key"):
            return "" if marker_kind(entry) == "ended" else str(key)
    return ""


def end_turn(session: Session, stop_reason: StopReason, text: str | None = None, *, key: str = "") -> None:
    """Append the marker that says that a turn has ended, by default the running one, if it has a key.

    `text` is what the user was told at its end; by default the text of the last reply. The running turn can go on
    after it was cancelled, so then it has not ended.
    """
    if not (key or (session.turns.key and stop_reason != "cancelled")):
        return
    notes: Notes = {"kind": "ended", "key": key or session.turns.key, "stop": stop_reason}
    if not key:
        message = session.turns.message or Message()
        notes["prompt"] = message.get("crow", {}).get("prompt") or digest_prompt(message)
        notes["text"] = find_last_text(session.view.entries()) if text is None else text
        if (spent := TURN_TOTALS.get()) and spent.calls:
            notes["usage"] = {name: getattr(spent, name) for name in COUNTED}
        if more := TURN_NOTES.get():
            notes["notes"] = dict(more)
    session.log.append({"crow": notes})


def find_last_text(entries: Sequence[Message]) -> str:
    """Find the text of the last reply."""
    return next((str(entry.get("content") or "") for entry in reversed(entries) if is_reply(entry)), "")


async def show_ended(session: Session, turn: KeyedTurn) -> None:
    """Show the client a turn that has ended, and set its tokens and its notes for the answer to the prompt."""
    end = turn.end or {}
    for update in replay(turn.entries[1:], session.cwd):
        await session.update(update)
    if (text := end.get("text", "")) and text != find_last_text(turn.entries):
        await session.say(text)
    kept = end.get("notes", {})
    if stopped := kept.get(STOPPED):
        await session.say(stopped["reason"], is_answer=False)
    if (notes := TURN_NOTES.get()) is not None:
        notes |= kept
    add_spent(end.get("usage", {}))


def add_spent(spent: Mapping[str, float]) -> None:
    """Add tokens to those of the running turn."""
    if (totals := TURN_TOTALS.get()) is not None:
        for name in COUNTED:
            setattr(totals, name, getattr(totals, name) + spent.get(name, 0))


async def go_on(session: Session, turn: KeyedTurn) -> StopReason:
    """Run the rest of an interrupted turn.

    A reply that was cut is dropped and asked for again. A tool call without an answer runs if it was not started, or if
    its tool may be called twice; else it is answered as interrupted.
    """
    replies = [entry.get("crow", {}) for entry in turn.entries if entry.get("role") == "assistant"]
    for notes in replies:
        add_spent({"calls": 1, **notes.get("spent", {})})
    drop_cut_reply(session, turn.entries)
    uses = answer_interrupted(session)
    places = (at for at, entry in enumerate(session.view.entries()) if entry.get("crow", {}).get("key"))
    entries = session.view.entries()[max(places) :]
    await session.hooks.turn_resume.run(session, entries)
    for update in replay([drop_raw_calls(entry, uses) for entry in entries[1:]], session.cwd):
        await session.update(update)
    last = next(entry for entry in reversed(entries) if "role" in entry)
    if uses:
        await act(session, uses)
    elif last.get("role") == "assistant" and not last.get("tool_calls"):
        stop_reason = STOP_REASONS.get(last.get("crow", {}).get("cut", ""), "end_turn")
        if (more := await session.hooks.before_end.run(session, stop_reason)) is None:
            return stop_reason
        session.log.append(more)
    return await react(session, len(replies))


def drop_cut_reply(session: Session, entries: Sequence[Message]) -> None:
    """Drop the last message of a turn if it is a reply that broke off. The markers behind it stay."""
    at = max(at for at, entry in enumerate(entries) if "role" in entry)
    cut = entries[at].get("crow", {}).get("cut")
    if cut is None or entries[at].get("role") != "assistant" or cut in STOP_REASONS:
        return
    markers = [entry.get("crow", Notes()).copy() for entry in entries[at + 1 :]]
    session.rewind(get_id(entries[at - 1]))
    for notes in markers:
        notes.pop("id", None)
        session.log.append({"crow": notes})


def answer_interrupted(session: Session) -> list[RawToolCall]:
    """Answer the tool calls that were started and must not run twice. Return the others that have no answer."""
    others: list[RawToolCall] = []
    unanswered = find_unanswered(session.log)
    for use in unanswered:
        tool_call = session.toolbox.parse(use)
        markers = find_markers_of_call(session.log, use["id"])
        was_started = any(notes.get("kind") == "started" for notes in markers)
        if was_started and not (tool_call.tool and tool_call.tool.may_repeat(tool_call.arguments)):
            session.log.append(to_interruption(tool_call))
        else:
            others.append(use)
    return others


def drop_later_turns(session: Session, origin: KeyedOrigin) -> Session:
    """Drop the turns of a session's origin that are not kept, and all that follows the first of them. Return the
    session."""
    entries = session.view.entries()
    for at, entry in enumerate(entries):
        key = str(entry.get("crow", {}).get("key", ""))
        if key.startswith(origin.prefixes) and key not in origin.keys:
            session.rewind(get_id(entries[at - 1]) if at else "")
            break
    return session


def drop_raw_calls(entry: Message, uses: Sequence[RawToolCall]) -> Message:
    """Return an entry without these tool calls."""
    if not (calls := entry.get("tool_calls")):
        return entry
    ids = {use["id"] for use in uses}
    return {**entry, "tool_calls": [use for use in calls if use["id"] not in ids]}
