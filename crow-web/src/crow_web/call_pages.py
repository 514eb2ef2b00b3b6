"""Model calls: those of a session by turn, and each request next to its answer."""

from collections.abc import Sequence
from typing import Any

from crow_core.messages.message import Message
from crow_eval import plots
from crow_persistence import loader, requests
from markupsafe import Markup
from sqlalchemy import Connection
from starlette.requests import Request

from crow_web import queries
from crow_web.ask_again import list_asked_again
from crow_web.pages import Pages, read_number
from crow_web.session_pages import load
from crow_web.turns import Span, Turn, list_turns

TURNS = 50
"""Turns of a page."""


def show_calls(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the model calls of a session, and how the time of each turn was spent."""
    _, transcript = load(connection, request)
    turns = [turn for turn in list_turns(transcript) if turn.prompt or turn.calls]
    calls = {f"/call/{call['id']}": call for call in transcript.model_calls}
    first = min(read_number(request.query_params.get("from", "")), len(turns)) // TURNS * TURNS
    return pages.render(
        "calls.html",
        session=transcript.summary,
        turns=turns[first : first + TURNS],
        first=first,
        step=TURNS,
        total=len(turns),
        calls=calls,
        bar=draw_span,
    )


def draw_span(turn: Turn, span: Span) -> Markup:
    """Draw a span of a turn at its place in the time of the turn."""
    begin = turn.spans[0].start
    return Markup(plots.plot_strip([(span.kind, span.start - begin, span.end - begin)], max(turn.took, 1.0)))


def show_call(pages: Pages, connection: Connection, request: Request) -> str:
    """Show a request as it was sent, next to its answer, and its differences from the request before."""
    call = requests.find_model_call(connection, request.path_params["id"])
    body, is_exact = requests.rebuild_request(connection, call.id)
    same = [each for each in queries.list_session_calls(connection, call.session) if each.purpose == call.purpose]
    place = next(index for index, each in enumerate(same) if each.id == call.id)
    before = same[place - 1] if place else None
    messages, common, changed = list(body.get("messages", ())), 0, list[str]()
    if before is not None:
        earlier, _ = requests.rebuild_request(connection, before.id)
        common = count_common(earlier.get("messages", ()), messages)
        keys = {*earlier, *body} - {"messages"}
        changed = sorted(key for key in keys if earlier.get(key) != body.get(key))
        dropped = len(earlier.get("messages", ())) - common
    else:
        dropped = 0
    return pages.render(
        "call.html",
        call=call,
        usage=loader.decode_or(call.usage or "", {}),
        is_exact=is_exact,
        messages=messages,
        common=common,
        changed=changed,
        dropped=dropped,
        before=before,
        after=same[place + 1] if place + 1 < len(same) else None,
        tools=body.get("tools") or [],
        rest={key: value for key, value in body.items() if key not in ("messages", "tools")},
        answer=find_answer(connection, call),
        may_ask=call.purpose == "turn" and call.reply is not None and not call.error,
        again=list_asked_again(connection, call),
        session=loader.find_session_by_id(connection, call.of),
    )


def count_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many messages two requests begin with alike."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def find_answer(connection: Connection, call: Any) -> Message | None:
    """Return the reply of a model call as it is stored; None if none was appended to the session."""
    return requests.load_entries(connection, [call.reply]).get(call.reply) if call.reply is not None else None
