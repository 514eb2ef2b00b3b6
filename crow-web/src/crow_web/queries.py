"""What the pages read from the database, beside what `crow_persistence` reads for the commands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from crow_core.text import to_line
from crow_persistence import leases, loader, requests, search
from crow_persistence.tables import calls, decisions, messages, sessions
from sqlalchemy import Connection, Row, case, exists, func, or_, select

DAY = 86_400_000
"""Milliseconds."""
PAGE = 50
"""Sessions or decisions of a page."""
TITLE = 80
"""Characters of a prompt in place of a title."""
FOUND = 200
"""Messages of which a search shows the sessions."""


@dataclass(frozen=True)
class SessionFilter:
    """Which sessions a list shows; empty values leave nothing out."""

    words: str = ""
    """Words that one of its messages has."""
    folder: str = ""
    model: str = ""
    since: int = 0
    """Milliseconds since 1970 of the last change."""
    only_errors: bool = False
    offset: int = 0

    def describe(self) -> bool:
        """Return whether anything is left out."""
        return bool(self.words or self.folder or self.model or self.since or self.only_errors)


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


def list_sessions(connection: Connection, wanted: SessionFilter) -> tuple[list[SessionRow], bool]:
    """Return one page of sessions, latest first, and whether there are more."""
    query = select(sessions).where(sessions.c.deleted.is_(None))
    snippets: dict[str, str] = {}
    if wanted.words:
        for hit in search.search(connection, wanted.words, limit=FOUND):
            snippets.setdefault(hit.session, hit.snippet)
        title = func.lower(func.coalesce(sessions.c.title, "")).contains(wanted.words.lower(), autoescape=True)
        query = query.where(or_(sessions.c.id.in_(snippets), title))
    if wanted.folder:
        query = query.where(sessions.c.cwd == wanted.folder)
    if wanted.since:
        query = query.where(sessions.c.updated >= wanted.since)
    own = calls.c.session == sessions.c.number
    if wanted.model:
        query = query.where(exists().where(own, calls.c.model == wanted.model))
    if wanted.only_errors:
        query = query.where(exists().where(own, calls.c.error.is_not(None)))
    latest = query.order_by(sessions.c.updated.desc(), sessions.c.number.desc())
    found = connection.execute(latest.offset(wanted.offset).limit(PAGE + 1)).all()
    rows = {row.number: to_row(connection, row, snippets.get(row.id, "")) for row in found[:PAGE]}
    add_sums(connection, rows)
    add_titles(connection, rows)
    return list(rows.values()), len(found) > PAGE


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
    """The model calls of one day with one model."""

    day: int
    """Days since 1970 (UTC)."""
    model: str
    calls: int
    errors: int
    input: int
    cached: int
    output: int
    cost: float
    currency: str
    total: float
    """Milliseconds of all calls."""

    @property
    def date(self) -> str:
        return f"{datetime.fromtimestamp(self.day * 86_400, UTC):%Y-%m-%d}"


def list_usage(connection: Connection, since: int) -> list[DayUsage]:
    """Return the use of models by day, oldest first."""
    day: Any = calls.c.started // DAY if connection.dialect.name == "sqlite" else func.div(calls.c.started, DAY)
    keys = day.label("day"), calls.c.model, func.coalesce(calls.c.currency, "").label("currency")
    columns = calls.c.input, calls.c.cached, calls.c.output, calls.c.cost, calls.c.total
    sums = [func.coalesce(func.sum(column), 0) for column in columns]
    found: Any = select(*keys, func.count(), func.count(calls.c.error), *sums).where(calls.c.started >= since)
    rows: Sequence[Any] = connection.execute(found.group_by(*keys).order_by("day", calls.c.model)).all()
    return [
        DayUsage(int(d), model, n, bad, int(i), int(c), int(o), float(cost), currency, float(total))
        for d, model, currency, n, bad, i, c, o, cost, total in rows
    ]


def list_session_calls(connection: Connection, number: int) -> Sequence[Row[Any]]:
    """Return the model calls of a session, oldest first."""
    return list(requests.list_model_calls(connection, number))[::-1]


def find_number(connection: Connection, id: str) -> Row[Any] | None:
    """Return the row of a session that was not deleted."""
    return loader.find_session_by_id(connection, id)


@dataclass(frozen=True)
class DecisionFilter:
    """Which permission decisions a list shows."""

    session: str = ""
    tool: str = ""
    verdict: str = ""
    by: str = ""
    """A part of what decided."""
    before: int = 0
    """Number of a row: only those before it; 0 for all."""


def list_decisions(connection: Connection, wanted: DecisionFilter) -> tuple[list[dict[str, Any]], bool]:
    """Return one page of decisions and results, latest first, and whether there are more."""
    query = select(decisions).where(decisions.c.session.startswith(wanted.session, autoescape=True))
    for column, value in ((decisions.c.tool, wanted.tool), (decisions.c.verdict, wanted.verdict)):
        query = query.where(column == value) if value else query
    if wanted.by:
        query = query.where(decisions.c.by.contains(wanted.by, autoescape=True))
    if wanted.before:
        query = query.where(decisions.c.number < wanted.before)
    rows = connection.execute(query.order_by(decisions.c.number.desc()).limit(PAGE + 1)).mappings().all()
    return [dict(row) for row in rows[:PAGE]], len(rows) > PAGE


def count_decisions(connection: Connection) -> Sequence[Row[Any]]:
    """Return, for each tool, how many of its decisions allowed and denied."""
    allowed = func.sum(case((decisions.c.verdict == "allow", 1), else_=0))
    found: Any = select(decisions.c.tool, func.count().label("all"), allowed.label("allowed"))
    return connection.execute(
        found.where(decisions.c.kind == "decision").group_by(decisions.c.tool).order_by(func.count().desc())
    ).all()
