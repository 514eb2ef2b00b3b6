"""Queries for the pages, in addition to those of `crow_persistence` for the commands."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

from crow_core.text import to_line
from crow_persistence import leases, loader, requests, search
from crow_persistence.entries import encode
from crow_persistence.loader import SELECT_FIRST_KIND
from crow_persistence.tables import calls, decisions, messages, sessions
from sqlalchemy import ColumnElement, Connection, Row, case, exists, func, or_, select

from crow_web.formats import to_date

QUARTER, DAY = 900_000, 86_400_000
"""Milliseconds."""
PAGE = 50
"""Sessions or decisions of a page."""
TITLE = 80
"""Characters of a prompt in place of a title."""
RESULTS = "completed", "failed"
"""Verdicts of results."""
FOUND = 120
"""The most messages whose sessions a search shows."""


@dataclass(frozen=True)
class SessionFilter:
    """The sessions that a list shows; empty values leave nothing out."""

    words: str = ""
    """Words that one of its messages has."""
    folder: str = ""
    model: str = ""
    agent: str = ""
    """The agent that it is imported from, or a kind of OWN_KINDS. Empty also leaves out sessions of sub-agents, and
    those that ask another one again."""
    rating: str = ""
    """good or bad."""
    since: int = 0
    """Milliseconds since 1970 of the last change."""
    until: int = 0
    cost: float = 0.0
    """The least cost, in any currency."""
    only_errors: bool = False
    offset: int = 0

    @property
    def is_empty(self) -> bool:
        """True if nothing is left out."""
        return self == SessionFilter(offset=self.offset)


OWN_KINDS = {"sub-agents": "parent", "asked again": "reask"}
"""Sessions that a list shows only if they are asked for, with the kind of their first entry."""


@dataclass
class SessionRow:
    """A session in a list."""

    id: str
    title: str
    folder: str
    updated: int
    is_open: bool
    """True if a process has it open."""
    snippet: str = ""
    models: list[str] = field(default_factory=list[str])
    calls: int = 0
    errors: int = 0
    """Model calls that failed."""
    input: int = 0
    cached: int = 0
    output: int = 0
    cost: dict[str, float] = field(default_factory=dict[str, float])
    """By currency."""

    @property
    def day(self) -> date:
        """The day of the last change."""
        return to_date(self.updated)


def list_sessions(connection: Connection, wanted: SessionFilter) -> tuple[list[SessionRow], bool]:
    """Return one page of sessions, latest first, and whether there are more."""
    query = select(sessions).where(sessions.c.deleted.is_(None))
    snippets: dict[str, str] = {}
    if wanted.words:
        for hit in search.search(connection, wanted.words, limit=FOUND):
            snippets.setdefault(hit.session, hit.snippet)
        title = func.lower(func.coalesce(sessions.c.title, "")).contains(wanted.words.lower(), autoescape=True)
        query = query.where(or_(sessions.c.id.in_(snippets), title))
    for condition in list_conditions(wanted):
        query = query.where(condition)
    latest = query.order_by(sessions.c.updated.desc(), sessions.c.number.desc())
    found = connection.execute(latest.offset(wanted.offset).limit(PAGE + 1)).all()
    rows = {row.number: to_row(connection, row, snippets.get(row.id, "")) for row in found[:PAGE]}
    add_sums(connection, rows)
    add_titles(connection, rows)
    return list(rows.values()), len(found) > PAGE


def list_conditions(wanted: SessionFilter) -> Iterator[ColumnElement[bool]]:
    """Yield what a session must fulfil, apart from the words."""
    call, entry = calls.c.session == sessions.c.number, messages.c.session == sessions.c.number
    first = func.coalesce(SELECT_FIRST_KIND.scalar_subquery(), "")
    if kind := OWN_KINDS.get(wanted.agent):
        yield first == kind
    else:
        yield first.not_in(OWN_KINDS.values())
    if wanted.agent == "crow":
        yield ~exists().where(entry, messages.c.kind == "imported")
    elif wanted.agent and not kind:
        its = messages.c.body.contains(f'"agent":{encode(wanted.agent)}', autoescape=True)
        yield exists().where(entry, messages.c.kind == "imported", its)
    if wanted.folder:
        yield sessions.c.cwd == wanted.folder
    if wanted.since:
        yield sessions.c.updated >= wanted.since
    if wanted.until:
        yield sessions.c.updated < wanted.until
    if wanted.model:
        yield exists().where(call, calls.c.model == wanted.model)
    if wanted.only_errors:
        yield exists().where(call, calls.c.error.is_not(None))
    if wanted.cost:
        spent = select(func.sum(calls.c.cost)).where(call)
        yield spent.scalar_subquery() >= wanted.cost
    if wanted.rating:
        its = messages.c.body.contains(f'"rating":{encode(wanted.rating)}', autoescape=True)
        yield exists().where(entry, messages.c.kind == "rating", its)


def list_agents(connection: Connection) -> list[str]:
    """Return the agents from which sessions are imported."""
    copied = select(sessions.c.number).where(sessions.c.copied.is_not(None))
    its = select(messages.c.body).where(messages.c.kind == "imported", messages.c.session.in_(copied))
    found = {str(search.read_entry(body).get("crow", {}).get("agent", "")) for body in connection.scalars(its)}
    return sorted(found - {""})


def sum_days(connection: Connection, since: int) -> dict[date, dict[str, float]]:
    """Return the cost of each day by currency, from a time in milliseconds since 1970 on."""
    quarter: Any = (
        calls.c.started // QUARTER if connection.dialect.name == "sqlite" else func.div(calls.c.started, QUARTER)
    )
    keys = quarter.label("quarter"), calls.c.currency
    found: Any = select(*keys, func.sum(calls.c.cost)).where(calls.c.started >= since, calls.c.cost.is_not(None))
    spent: dict[date, dict[str, float]] = {}
    rows: Sequence[Any] = connection.execute(found.group_by(*keys)).all()
    for at, currency, cost in rows:
        day = spent.setdefault(to_date(int(at) * QUARTER), {})
        day[currency or ""] = day.get(currency or "", 0.0) + float(cost)
    return spent


def divide(connection: Connection, length: int) -> Any:
    """Return the number of whole lengths, in milliseconds, from 1970 to the start of a model call, as SQL."""
    started: Any = calls.c.started
    return started // length if connection.dialect.name == "sqlite" else func.div(started, length)


def to_row(connection: Connection, row: Row[Any], snippet: str) -> SessionRow:
    is_open = row.owner is not None and not leases.is_free(connection, row, "")
    return SessionRow(row.id, row.title or "", row.cwd, row.updated, is_open, snippet)


def add_sums(connection: Connection, rows: Mapping[int, SessionRow]) -> None:
    """Add the sums of the model calls to the rows, which are by the numbers of their sessions."""
    columns = calls.c.session, calls.c.model, calls.c.currency
    sums = [func.coalesce(func.sum(column), 0) for column in (calls.c.input, calls.c.cached, calls.c.output)]
    counted = func.count(), func.count(calls.c.error), *sums, func.sum(calls.c.cost)
    found: Any = select(*columns, *counted).where(calls.c.session.in_(rows)).group_by(*columns)
    sums_by_model: Sequence[Any] = connection.execute(found).all()
    for number, model, currency, count, errors, input, cached, output, cost in sums_by_model:
        row = rows[number]
        row.models = row.models if model in row.models else [*row.models, model]
        row.calls, row.errors = row.calls + count, row.errors + errors
        row.input, row.cached, row.output = row.input + int(input), row.cached + int(cached), row.output + int(output)
        if currency and cost:
            row.cost[currency] = row.cost.get(currency, 0.0) + float(cost)


def add_titles(connection: Connection, rows: Mapping[int, SessionRow]) -> None:
    """Name the sessions without a title by their first prompts."""
    untitled = [number for number, row in rows.items() if not row.title]
    first = select(func.min(messages.c.id)).where(messages.c.session.in_(untitled), messages.c.kind == "user")
    found = select(messages.c.session, messages.c.body).where(messages.c.id.in_(first.group_by(messages.c.session)))
    prompts: Sequence[Any] = connection.execute(found).all()
    for number, body in prompts:
        words = " ".join(text for _, text in search.extract_texts(search.read_entry(body)))
        rows[number].title = to_line(words)[:TITLE]


def list_folders(connection: Connection) -> Sequence[str]:
    """Return the folders of all sessions, those used last first."""
    last = func.max(sessions.c.updated)
    return list(
        connection.scalars(
            select(sessions.c.cwd)
            .where(sessions.c.deleted.is_(None))
            .group_by(sessions.c.cwd)
            .order_by(last.desc())
            .limit(200)
        )
    )


def list_models(connection: Connection) -> Sequence[str]:
    """Return the models of all model calls."""
    return list(connection.scalars(select(calls.c.model).distinct().order_by(calls.c.model)))


@dataclass(frozen=True)
class DayUsage:
    """The model calls of one day, of one model or folder."""

    day: int
    """Days since 1970 (UTC)."""
    name: str
    """The model or the folder."""
    calls: int
    errors: int
    input: int
    cached: int
    output: int
    cost: float
    currency: str
    total: float
    """Milliseconds of all calls."""
    first: float
    """Milliseconds until the first token, of all calls."""

    @property
    def date(self) -> str:
        return to_utc_day(self.day)


def to_utc_day(day: int) -> str:
    """Return the date of a number of days since 1970."""
    return f"{datetime.fromtimestamp(day * 86_400, UTC):%Y-%m-%d}"


def list_usage(connection: Connection, since: int, *, by_folder: bool = False) -> list[DayUsage]:
    """Return the use of models by day, oldest first, and by model or by folder."""
    day = divide(connection, DAY)
    name = sessions.c.cwd if by_folder else calls.c.model
    keys = day.label("day"), name.label("name"), func.coalesce(calls.c.currency, "").label("currency")
    columns = calls.c.input, calls.c.cached, calls.c.output, calls.c.cost, calls.c.total, calls.c.first
    sums = [func.coalesce(func.sum(column), 0) for column in columns]
    found: Any = select(*keys, func.count(), func.count(calls.c.error), *sums).join(sessions)
    found = found.where(calls.c.started >= since).group_by(*keys).order_by("day", "name")
    rows: Sequence[Any] = connection.execute(found).all()
    return [
        DayUsage(int(d), name, n, bad, int(i), int(c), int(o), float(cost), currency, float(total), float(first))
        for d, name, currency, n, bad, i, c, o, cost, total, first in rows
    ]


@dataclass(frozen=True)
class ToolUsage:
    """The decided calls of a tool."""

    tool: str
    completed: int
    failed: int
    denied: int

    @property
    def all(self) -> int:
        return self.completed + self.failed + self.denied


def list_tools(connection: Connection, since: int) -> list[ToolUsage]:
    """Return how the calls of each tool ended, those of the most used first."""
    verdicts = "completed", "failed", "deny"
    counts = [func.coalesce(func.sum(case((decisions.c.verdict == it, 1), else_=0)), 0) for it in verdicts]
    found: Any = select(decisions.c.tool, *counts).where(decisions.c.at >= since, decisions.c.tool != "")
    rows: Sequence[Any] = connection.execute(found.group_by(decisions.c.tool)).all()
    found = (ToolUsage(tool, int(a), int(b), int(c)) for tool, a, b, c in rows)
    return sorted((each for each in found if each.all), key=lambda it: -it.all)


def list_session_calls(connection: Connection, number: int) -> Sequence[Row[Any]]:
    """Return the model calls of a session, oldest first."""
    return list(requests.list_model_calls(connection, number))[::-1]


@dataclass(frozen=True)
class DecisionFilter:
    """The permission decisions that a list shows."""

    session: str = ""
    tool: str = ""
    verdict: str = ""
    by: str = ""
    """A part of what decided."""
    call: str = ""
    """Id of a tool call."""
    before: int = 0
    """Number of a row: only those before it; 0 for all."""


def list_decisions(connection: Connection, wanted: DecisionFilter) -> tuple[list[dict[str, Any]], bool]:
    """Return one page of decisions, latest first, each with its outcome and the files that the call changed, and
    whether there are more. If the verdict is one of RESULTS, these are returned instead."""
    query = select(decisions).where(decisions.c.session.startswith(wanted.session, autoescape=True))
    columns = decisions.c.tool, decisions.c.verdict, decisions.c.call
    for column, value in zip(columns, (wanted.tool, wanted.verdict, wanted.call), strict=True):
        query = query.where(column == value) if value else query
    if wanted.verdict not in RESULTS:
        query = query.where(decisions.c.kind != "result")
    if wanted.by:
        query = query.where(decisions.c.by.contains(wanted.by, autoescape=True))
    if wanted.before:
        query = query.where(decisions.c.number < wanted.before)
    found = connection.execute(query.order_by(decisions.c.number.desc()).limit(PAGE + 1)).mappings().all()
    rows = [dict(row) for row in found[:PAGE]]
    its = select(decisions).where(
        decisions.c.kind == "result", decisions.c.session.in_({row["session"] for row in rows})
    )
    its = its.where(decisions.c.call.in_({row["call"] for row in rows}))
    results = {(row["session"], row["call"]): dict(row) for row in connection.execute(its).mappings()}
    for row in rows:
        result = row if row["kind"] == "result" else results.get((row["session"], row["call"]))
        row["outcome"] = result["verdict"] if result else ""
        row["files"] = loader.decode_or(result["files"], []) if result else []
    return rows, len(found) > PAGE


def count_decisions(connection: Connection) -> Sequence[Row[Any]]:
    """Return, for each tool, how many of its decisions allowed and denied."""
    allowed = func.sum(case((decisions.c.verdict == "allow", 1), else_=0))
    found: Any = select(decisions.c.tool, func.count().label("all"), allowed.label("allowed"))
    return connection.execute(
        found.where(decisions.c.kind == "decision").group_by(decisions.c.tool).order_by(func.count().desc())
    ).all()
