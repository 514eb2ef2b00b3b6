"""The addresses of `crow web` and their pages. Each handler runs in a thread and reads one snapshot of the database."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from crow_core.errors import StoreError
from crow_core.messages.message import Message
from crow_persistence import loader, prompt_versions, requests
from crow_persistence.database import Database
from crow_persistence.export.html import replace_invalid, to_html
from crow_persistence.export.transcript import Transcript, TranscriptPart, decode_media, describe_media
from crow_persistence.search import MATCH_END, MATCH_START
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from sqlalchemy import Connection
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from crow_web import markup, queries
from crow_web.chart import Bar, draw_bars, draw_spans
from crow_web.chats import Chats
from crow_web.queries import DecisionFilter, SessionFilter

HERE = Path(__file__).parent
PARTS = 200
"""Messages of a page of a session."""
DAYS = 60
"""Days that the charts show."""

CHARTS: Sequence[tuple[str, Callable[[queries.DayUsage], float]]] = (
    ("Tokens sent", lambda each: each.input),
    ("Tokens not cached", lambda each: each.input - each.cached),
    ("Tokens answered", lambda each: each.output),
    ("Cost", lambda each: each.cost),
    ("Model calls", lambda each: each.calls),
    ("Failed calls", lambda each: each.errors),
    ("Minutes of waiting for models", lambda each: each.total / 60_000),
)
"""The charts: their titles and the values of their bars."""

Handler = Callable[["Pages", Connection, Request], str]


class Pages:
    """Makes the pages."""

    def __init__(self, database: Database, *, has_chats: bool = False) -> None:
        self.database = database
        self._templates = make_templates()
        own: dict[str, Any] = {"chats": has_chats}
        self._templates.globals.update(own)

    def render(self, template: str, /, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    def answer(self, handler: Handler, request: Request) -> Response:
        """Answer a request by a handler; a fault of the database is a page with its sentence."""
        try:
            with self.database.begin_read() as connection:
                return HTMLResponse(handler(self, connection, request))
        except StoreError as error:
            return HTMLResponse(self.render("error.html", sentence=str(error)), 404)


def make_app(database: Database, chats: Chats | None = None) -> Starlette:
    """Make the app that answers requests which the gate has let in. Without `chats`, it only reads."""
    pages = Pages(database, has_chats=chats is not None)
    addresses: Mapping[str, Handler] = {
        "/": show_sessions,
        "/session/{id}": show_session,
        "/session/{id}/calls": show_calls,
        "/call/{id}": show_call,
        "/permissions": show_permissions,
        "/prompts": show_prompts,
        "/prompts/{name}": show_prompt,
        "/charts": show_charts,
    }
    routes = [Route(path, partial(pages.answer, handler)) for path, handler in addresses.items()]
    return Starlette(
        routes=[
            *routes,
            Route("/session/{id}/export", partial(export, pages)),
            Route("/static/code.css", answer_with_style),
            Mount("/static", StaticFiles(directory=HERE / "static")),
            *(chats.routes if chats else ()),
        ],
        lifespan=chats.lifespan if chats else None,
    )


def answer_with_style(request: Request) -> Response:
    return Response(markup.make_code_style(), media_type="text/css")


def make_templates() -> Environment:
    """Load the templates, which escape all values that are not markup already."""
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    made.filters.update(
        markdown=markup.to_markdown,
        diff=markup.to_diff,
        json=markup.to_json,
        time=format_time,
        count=format_count,
        cost=format_cost,
        ms=format_duration,
        snippet=mark_snippet,
        home=shorten_home,
    )
    shared: dict[str, Any] = {"decode_media": decode_media, "describe_media": describe_media}
    made.globals.update(shared)
    return made


def finalize(value: Any) -> Any:
    """Replace what a page cannot hold; markup is left as it is."""
    return replace_invalid(value) if type(value) is str else value


def show_sessions(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the list of sessions."""
    query = request.query_params
    days = read_number(query.get("days", ""))
    wanted = SessionFilter(
        query.get("q", ""),
        query.get("folder", ""),
        query.get("model", ""),
        int(time.time() * 1000) - days * queries.DAY if days else 0,
        bool(query.get("errors")),
        read_number(query.get("from", "")),
    )
    rows, has_more = queries.list_sessions(connection, wanted)
    return pages.render(
        "sessions.html",
        rows=rows,
        wanted=wanted,
        days=days,
        folders=queries.list_folders(connection),
        models=queries.list_models(connection),
        more=str(request.url.include_query_params(**{"from": wanted.offset + queries.PAGE})) if has_more else "",
    )


def load(connection: Connection, request: Request) -> tuple[Any, Transcript]:
    """Load the session that an address names. Raises StoreError."""
    row = loader.find_session(connection, request.path_params["id"])
    return row, Transcript.load(connection, row)


def show_session(pages: Pages, connection: Connection, request: Request) -> str:
    """Show what was said and done in a session."""
    row, transcript = load(connection, request)
    parts = list(transcript.parts())
    start = min(read_number(request.query_params.get("from", "")), max(len(parts) - 1, 0)) // PARTS * PARTS
    by_id = {call["id"]: call for call in transcript.model_calls}
    prompts = [part for part in parts if part.who == "user"]
    return pages.render(
        "session.html",
        session=transcript.summary,
        facts=transcript.facts(),
        parts=parts[start : start + PARTS],
        first=start,
        total=len(parts),
        step=PARTS,
        calls=by_id,
        prompts=[(part, parts.index(part) // PARTS * PARTS) for part in prompts],
        files=list_files(parts),
        is_open=row.owner is not None,
        chart=draw_context(transcript.model_calls),
    )


def list_files(parts: Sequence[TranscriptPart]) -> list[tuple[str, str, int]]:
    """Return the files that a session changed, each with the id of the last message that did and how often."""
    found: dict[str, tuple[str, int]] = {}
    for part in parts:
        for diff in (diff for tool_call in part.tool_calls for diff in tool_call.diffs):
            names = [line[4:] for line in diff.splitlines()[:2]]
            path = next((name for name in reversed(names) if name != "/dev/null"), "")
            found[path] = (part.id, found.get(path, ("", 0))[1] + 1)
    return [(path, id, count) for path, (id, count) in found.items()]


def draw_context(model_calls: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw how full the context was at each model call of a turn: cached tokens, then the others."""
    turns = [call for call in model_calls if call["purpose"] == "turn" and call["input"]]
    bars = [
        Bar(
            str(number),
            (call["cached"] or 0, call["input"] - (call["cached"] or 0)),
            f"{call['input']:,} tokens, {call['cached'] or 0:,} cached, at {format_time(call['started'])}",
            f"/call/{call['id']}",
        )
        for number, call in enumerate(turns, 1)
    ]
    return draw_bars("Tokens of each request", bars)


def show_calls(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the model calls of a session, and how the time of each turn was spent."""
    _, transcript = load(connection, request)
    turns = group_calls(transcript)
    return pages.render(
        "calls.html",
        session=transcript.summary,
        turns=[(part, own, draw_turn(part, own)) for part, own in turns],
    )


def group_calls(transcript: Transcript) -> list[tuple[TranscriptPart | None, list[Mapping[str, Any]]]]:
    """Return the prompts of a session, each with the model calls of its turn; None for those before the first prompt.

    A call belongs to the turn that holds its reply. One without a reply belongs to the turn that ran when it started.
    """
    turns: list[tuple[TranscriptPart | None, list[Mapping[str, Any]]]] = [(None, [])]
    place: dict[str, int] = {}
    for part in transcript.parts():
        if part.who == "user":
            turns.append((part, []))
        place[part.id] = len(turns) - 1
    at = 0
    for call in transcript.model_calls:
        prompts = [index for index, (part, _) in enumerate(turns) if part and (part.at or 0) <= call["started"]]
        at = place.get(call["id"], max([at, *prompts]))
        turns[at][1].append(call)
    return [(part, own) for part, own in turns if part or own]


def draw_turn(part: TranscriptPart | None, calls: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the times of a turn: its model calls, and what lies between them: tools, and waiting for a person."""
    if not calls:
        return Markup("")
    start = min([call["started"] for call in calls] + ([part.at] if part and part.at else []))
    spans: list[tuple[str, float, float, str, str]] = []
    end = float(start)
    for call in calls:
        if call["started"] - end > 50 and spans:
            spans.append(
                ("tools, questions", end - start, call["started"] - start, "c2", format_duration(call["started"] - end))
            )
        total = call["total"] or 0.0
        hint = f"{call['purpose']}: {format_duration(total)}, the first token after {format_duration(call['first'])}"
        spans.append((call["model"], call["started"] - start, call["started"] - start + total, "c0", hint))
        end = call["started"] + total
    return draw_spans(spans, end - start)


def show_call(pages: Pages, connection: Connection, request: Request) -> str:
    """Show a request as it was sent, beside its answer and what differs from the request before."""
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


def show_permissions(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the ledger of permission decisions and results."""
    query = request.query_params
    wanted = DecisionFilter(
        query.get("session", ""),
        query.get("tool", ""),
        query.get("verdict", ""),
        query.get("by", ""),
        read_number(query.get("before", "")),
    )
    rows, has_more = queries.list_decisions(connection, wanted)
    more = str(request.url.include_query_params(before=rows[-1]["number"])) if has_more else ""
    for row in rows:
        row["files"] = loader.decode_or(row["files"], [])
    counts = queries.count_decisions(connection)
    return pages.render("permissions.html", rows=rows, wanted=wanted, counts=counts, more=more)


def show_prompts(pages: Pages, connection: Connection, request: Request) -> str:
    """Show every version of every prompt with what came of it."""
    return pages.render("prompts.html", versions=prompt_versions.list_stats(connection))


def show_prompt(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the versions of a prompt as differences, and where they were used."""
    name = request.path_params["name"]
    chosen = prompt_versions.find_version(connection, name)
    versions = prompt_versions.list_versions(connection, chosen.name)
    pairs = [(f"{chosen.name}@{old.number}", f"{chosen.name}@{new.number}") for old, new in pairwise(versions)]
    return pages.render(
        "prompt.html",
        name=chosen.name,
        versions=versions,
        diffs=[(new, prompt_versions.diff_versions(connection, old, new)) for old, new in reversed(pairs)],
        used=prompt_versions.list_renders(connection, chosen.name, 30),
    )


def show_charts(pages: Pages, connection: Connection, request: Request) -> str:
    """Show tokens, cost, calls and failures by day."""
    since = int(time.time() * 1000) - DAYS * queries.DAY
    usage = queries.list_usage(connection, since)
    models = sorted({each.model for each in usage})
    days = sorted({each.day for each in usage})
    return pages.render(
        "charts.html",
        models=models,
        usage=usage,
        charts=[(title, draw_days(title, usage, days, models, value)) for title, value in CHARTS],
    )


def draw_days(
    title: str,
    usage: Sequence[queries.DayUsage],
    days: Sequence[int],
    models: Sequence[str],
    value: Callable[[queries.DayUsage], float],
) -> Markup:
    """Draw a value by day, with a part of the bar for each model."""
    bars: list[Bar] = []
    for day in days:
        own = [each for each in usage if each.day == day]
        parts = [sum(value(each) for each in own if each.model == model) for model in models]
        bars.append(Bar(own[0].date[5:], parts, f"{own[0].date}: {sum(parts):,.4g}"))
    return draw_bars(title, bars)


def export(pages: Pages, request: Request) -> Response:
    """Answer with the session as one page without likely secrets, to be saved."""
    try:
        with pages.database.begin_read() as connection:
            _, transcript = load(connection, request)
    except StoreError as error:
        return HTMLResponse(pages.render("error.html", sentence=str(error)), 404)
    name = f"crow-{transcript.summary.id[:12]}.html"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return HTMLResponse(to_html(transcript.redact()), headers=headers)


def read_number(text: str) -> int:
    """Return the number in a parameter of an address; 0 if it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0


def format_time(at: int | None) -> str:
    return f"{datetime.fromtimestamp(at / 1000, UTC).astimezone():%Y-%m-%d %H:%M:%S}" if at else ""


def format_count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def format_cost(cost: Mapping[str, float] | float | None, currency: str = "") -> str:
    if cost is None:
        return ""
    amounts = cost if isinstance(cost, Mapping) else {currency: cost}
    return ", ".join(f"{amount:.4f} {name}".strip() for name, amount in amounts.items())


def format_duration(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s" if ms < 60_000 else f"{ms / 60_000:.1f} min"


def mark_snippet(text: str) -> Markup:
    """Return a line that a search found, with its matches marked."""
    safe = str(escape(replace_invalid(text)))
    return Markup(safe.replace(MATCH_START, "<mark>").replace(MATCH_END, "</mark>"))


def shorten_home(path: str) -> str:
    home = os.path.expanduser("~")
    return f"~{path.removeprefix(home)}" if path == home or path.startswith(f"{home}/") else path
