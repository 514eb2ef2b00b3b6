"""The page of a session: what was said and done in it, and the files that it changed."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from crow_core.messages.message import Message, list_edits
from crow_eval import plots
from crow_persistence import blobs, leases, loader, search
from crow_persistence.entries import DamagedEntry, find_blobs, unpack
from crow_persistence.export.transcript import Transcript, TranscriptPart, make_diff
from crow_persistence.tables import messages, sessions
from markupsafe import Markup
from sqlalchemy import Connection, Row, func, select
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from crow_web.formats import format_clock
from crow_web.pages import Pages, read_number
from crow_web.session_pages import load
from crow_web.turns import Turn, list_turns

PARTS = 120
"""Messages of a page."""
LIMIT = 8_000
"""Characters of a tool's result that the page of a session shows."""
LISTED = 60
"""Prompts of an outline; of more, those of the shown page are listed."""
BARS = 100
"""Bars of the chart of the context. Of more requests, each bar shows the last of several."""
MARKS = {"compaction", "rewind", "shrink", "child", "parent", "option", "imported", "reask", "worktree"}
"""Kinds of markers that are shown as lines across the timeline. Others are folded."""


def show_session(pages: Pages, connection: Connection, request: Request) -> str | Response:
    """Show a page of what was said and done in a session, or lead to the message with a tool call."""
    row, transcript = load(connection, request)
    if entry := find_asking(transcript, request.query_params.get("call", "")):
        return RedirectResponse(f"/session/{row.id}?at={entry}#{entry}", 303)
    turns = list_turns(transcript)
    parts = [part for turn in turns for part in turn.parts]
    numbers = {part.id: number for number, part in enumerate(parts)}
    query = request.query_params
    at = numbers.get(query.get("at", ""), read_number(query.get("from", "")))
    start = min(at, max(len(parts) - 1, 0)) // PARTS * PARTS
    starts = accumulate((len(turn.parts) for turn in turns), initial=0)
    outline = [(turn, at // PARTS * PARTS) for at, turn in zip(starts, turns, strict=False) if turn.prompt]
    if len(outline) > LISTED:
        outline = [(turn, page) for turn, page in outline if page == start]
    return pages.render(
        "session.html",
        **describe(connection, row, transcript),
        **find_forks(connection, row, transcript, parts),
        outline=outline,
        strips={id(turn): draw_strip(turn) for turn, _ in outline},
        most=max((turn.fill for turn in turns), default=0),
        parts=parts[start : start + PARTS],
        first=start,
        total=len(parts),
        step=PARTS,
        chart=draw_context(transcript, turns),
        files=list_files(transcript),
        limit=LIMIT,
    )


def find_asking(transcript: Transcript, call: str) -> str:
    """Return the id of the message that holds a tool call; "" if there is none."""
    for entry in transcript.record.log:
        own = entry.get("crow", {})
        if any(use["id"] == call for use in (*entry.get("tool_calls", []), own.get("use", {"id": None}))):
            return own.get("id", "")
    return ""


def show_entry(pages: Pages, connection: Connection, request: Request) -> str:
    """Show one message of a session, and all of its tools' results."""
    row, transcript = load(connection, request)
    parts = [part for part in transcript.parts() if part.id == request.path_params["entry"]]
    return pages.render(
        "entry.html", **describe(connection, row, transcript), title="One message", parts=parts, limit=10**9
    )


def show_dropped(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the messages of a session that rewinds have dropped."""
    row, transcript = load(connection, request)
    shown = {entry.get("crow", {}).get("id") for entry in transcript.record.log}
    dropped: list[Message] = []
    times: dict[str, int] = {}
    for stored in connection.execute(
        select(messages).where(messages.c.session == row.number).order_by(messages.c.id)
    ).all():
        with suppress(DamagedEntry):
            entry = unpack(stored.kind, stored.body, blobs.fetch(connection, find_blobs(stored.body)))
            id = entry.get("crow", {}).get("id", "")
            if id not in shown:
                dropped.append(entry)
                times[id] = stored.at
    its = replace(transcript, record=replace(transcript.record, log=dropped), times=times)
    parts = list(its.parts())
    title = "Messages that were taken back"
    return pages.render("entry.html", **describe(connection, row, its), title=title, parts=parts, limit=LIMIT)


def show_files(pages: Pages, connection: Connection, request: Request) -> str:
    """Show what a session changed in each file, from the first change to the last."""
    row, transcript = load(connection, request)
    return pages.render("files.html", **describe(connection, row, transcript), files=list_files(transcript))


def describe(connection: Connection, row: Row[Any], transcript: Transcript) -> dict[str, Any]:
    """Return what the pages of a session say of it and of its messages."""
    notes = {entry.get("crow", {}).get("id", ""): entry.get("crow", {}) for entry in transcript.record.log}
    rated = [note for note in notes.values() if note.get("kind") == "rating"]
    return {
        "session": transcript.summary,
        "facts": dict(transcript.facts()),
        "notes": notes,
        "calls": {call["id"]: call for call in transcript.model_calls},
        "marks": MARKS,
        "ratings": {note.get("reply"): note for note in rated},
        "is_open": row.owner is not None and not leases.is_free(connection, row, ""),
    }


def find_first_own(connection: Connection, number: int) -> int | None:
    """Return the row of the first entry that a session does not share with the one that it was forked from."""
    return connection.scalar(select(func.min(messages.c.id)).where(messages.c.session == number))


def find_entry(connection: Connection, number: int | None) -> str:
    """Return the id of the entry in a row of `messages`; "" if there is none."""
    body = connection.scalar(select(messages.c.body).where(messages.c.id == number))
    return str(search.read_entry(body).get("crow", {}).get("id", "")) if body else ""


def find_forks(
    connection: Connection, row: Row[Any], transcript: Transcript, parts: Sequence[TranscriptPart]
) -> dict[str, Any]:
    """Find the session from which this one was forked (`origin`) with its first own message (`forked_at`). Find also
    its forks by the last shared message: their ids and titles (`forks`)."""
    order = {entry.get("crow", {}).get("id", ""): number for number, entry in enumerate(transcript.record.log)}
    shown = [(order.get(part.id, 0), part.id) for part in parts]
    forks: dict[str, list[tuple[str, str]]] = {}
    its = select(sessions).where(sessions.c.origin == row.id, sessions.c.deleted.is_(None))
    for fork in connection.execute(its.order_by(sessions.c.number)).all():
        first = find_first_own(connection, fork.number)
        shared = connection.scalar(select(messages.c.parent).where(messages.c.id == first)) if first else fork.head
        parent = find_entry(connection, shared)
        last = max((one for one in shown if one[0] <= order.get(parent, 0)), default=(0, ""))
        forks.setdefault(last[1], []).append((fork.id, fork.title or fork.id[:8]))
    own = find_entry(connection, find_first_own(connection, row.number)) if row.origin else ""
    forked_at = next((id for number, id in shown if own and number >= order.get(own, 0)), "")
    origin = loader.find_session_by_id(connection, row.origin) if row.origin else None
    return {"origin": origin, "forked_at": forked_at, "forks": forks}


def list_files(transcript: Transcript) -> list[tuple[str, str, str, list[str]]]:
    """Return the files that a session changed: the path, the diff of all changes, how it reads in short, and the ids of
    the messages that changed it."""
    calls = {call["id"]: entry for entry in transcript.record.log for call in entry.get("tool_calls", [])}
    changes: dict[str, list[Mapping[str, Any]]] = {}
    places: dict[str, list[str]] = {}
    for entry in transcript.record.log:
        asking = calls.get(entry.get("tool_call_id", ""), entry).get("crow", {}).get("id", "")
        for edit in list_edits(entry):
            path = str(edit.get("path"))
            changes.setdefault(path, []).append(edit)
            places.setdefault(path, []).append(asking)
    found: list[tuple[str, str, str, list[str]]] = []
    for path, edits in sorted(changes.items()):
        diff = make_diff({"path": path, "old": edits[0].get("old"), "new": edits[-1].get("new")})
        lines = diff.splitlines()[2:]
        added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
        found.append((path, diff, f"+{added} −{removed}", list(dict.fromkeys(places[path]))))
    return found


def draw_strip(turn: Turn) -> Markup:
    """Draw how the time of a turn was spent, in a line."""
    if not turn.spans or turn.took <= 0:
        return Markup("")
    begin = turn.spans[0].start
    return Markup(
        plots.plot_strip([(span.kind, span.start - begin, span.end - begin) for span in turn.spans], turn.took)
    )


def draw_context(transcript: Transcript, turns: Sequence[Turn]) -> Markup:
    """Draw how full the context was at each model call of a turn: cached tokens, then the others. A line marks a
    compaction."""
    times = [part.at or 0 for turn in turns for part in turn.parts if part.title.startswith("Compacted")]
    shown = [call for call in transcript.model_calls if call["purpose"] == "turn" and call["input"]]
    every = -(-len(shown) // BARS) or 1
    shown = shown[every - 1 :: every]
    bars: list[plots.Bar] = []
    for number, call in enumerate(shown):
        cached, last = call["cached"] or 0, shown[number - 1]["started"] if number else 0
        hint = f"{format_clock(call['started'])}: {call['input']:,} tokens, {cached:,} cached"
        is_compacted = any(last < at <= call["started"] for at in times)
        bars.append(plots.Bar("", (cached, call["input"] - cached), hint, f"/call/{call['id']}", has_line=is_compacted))
    return Markup(plots.plot_bars(bars, title="Tokens of each request"))
