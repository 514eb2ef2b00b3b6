"""Go on with an interrupted turn that has a key, and show one again that has ended.

A completed tool call is never repeated. An interrupted one runs at most once unless its tool is declared idempotent. A
call that its server runs as a task gets the result of the task, also in a turn without a key.
"""

from collections.abc import Mapping, Sequence

from crow_core.acp.schema import StopReason
from crow_core.content import replay, to_interruption
from crow_core.messages.message import Message, RawToolCall, find_unanswered, get_id
from crow_core.messages.notes import Notes
from crow_core.models.token_usage import TURN_TOTALS
from crow_core.react import STOP_REASONS, act, react
from crow_core.session.journal import COUNTED, KeyedTurn, find_last_text
from crow_core.session.output import STOPPED, TURN_NOTES
from crow_core.session.session import Session


async def show_ended(session: Session, turn: KeyedTurn, end: Notes) -> StopReason:
    """Show the client a turn that has ended, and set its tokens and its notes for the answer to the prompt."""
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
    return end.get("stop", "end_turn")


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
    session.turns.requests = len(replies)
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
    return await react(session)


async def finish_tasks(session: Session) -> None:
    """Answer the calls of an interrupted turn that their servers go on with as tasks: wait for their results."""
    if uses := session.journal.find_tasks():
        await act(session, uses)


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
    for use in find_unanswered(session.log):
        tool_call = session.toolbox.parse(use)
        may_repeat = tool_call.tool and tool_call.tool.may_repeat(tool_call.arguments)
        is_task = bool(session.journal.find_task(use["id"]))
        if session.journal.has_started(use["id"]) and not may_repeat and not is_task:
            session.log.append(to_interruption(tool_call))
        else:
            others.append(use)
    return others


def drop_raw_calls(entry: Message, uses: Sequence[RawToolCall]) -> Message:
    """Return an entry without these tool calls."""
    if not (calls := entry.get("tool_calls")):
        return entry
    ids = {use["id"] for use in uses}
    return {**entry, "tool_calls": [use for use in calls if use["id"] not in ids]}
