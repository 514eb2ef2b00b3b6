"""The list of sessions, and the export of one."""

from dataclasses import replace
from itertools import groupby
from typing import Any

from crow_cli.shared_session import find_known_secrets, prepare
from crow_core.errors import ConfigError, StoreError
from crow_persistence import loader
from crow_persistence.export.html import to_html
from crow_persistence.export.transcript import Transcript
from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from crow_web import queries
from crow_web.formats import format_day, to_start
from crow_web.pages import Pages, read_number
from crow_web.queries import DAY, OWN_KINDS, SessionFilter


def show_sessions(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the list of sessions, by day."""
    query = request.query_params
    until = to_start(query.get("until", ""))
    wanted = SessionFilter(
        words=query.get("q", ""),
        folder=query.get("folder", ""),
        model=query.get("model", ""),
        agent=query.get("agent", ""),
        rating=query.get("rating", ""),
        since=to_start(query.get("since", "")),
        until=until + DAY if until else 0,
        cost=read_amount(query.get("cost", "")),
        only_errors=bool(query.get("errors")),
        offset=read_number(query.get("from", "")),
    )
    rows, has_more = queries.list_sessions(connection, wanted)
    days = [(day, list(own)) for day, own in groupby(rows, lambda row: row.day)]
    spent = queries.sum_days(connection, to_start(f"{days[-1][0]}")) if days else {}
    return pages.render(
        "sessions.html",
        days=[(day, format_day(day), own, spent.get(day)) for day, own in days],
        wanted=wanted,
        is_filtered=not wanted.is_empty,
        more_filters=not replace(wanted, words="", folder="").is_empty,
        since=query.get("since", "") if wanted.since else "",
        until=query.get("until", "") if wanted.until else "",
        folders=queries.list_folders(connection),
        models=queries.list_models(connection),
        agents=["crow", *queries.list_agents(connection), *OWN_KINDS],
        more=str(request.url.include_query_params(**{"from": wanted.offset + queries.PAGE})) if has_more else "",
    )


def read_amount(text: str) -> float:
    """Return the amount of money in a parameter of an address; 0 if it is none."""
    whole, _, rest = text.replace(",", ".").partition(".")
    return float(f"{read_number(whole)}.{(read_number(rest) and rest) or 0}")


def load(connection: Connection, request: Request) -> tuple[Any, Transcript]:
    """Load the session that an address names. Raises StoreError."""
    row = loader.find_session(connection, request.path_params["id"])
    return row, Transcript.load(connection, row)


def export(pages: Pages, request: Request) -> Response:
    """Answer with the session as one page, to be saved, as `crow sessions share` writes it."""
    try:
        with pages.database.begin_read() as connection:
            _, transcript = load(connection, request)
        story = prepare(transcript, find_known_secrets(pages.env))
    except StoreError as error:
        return pages.explain("Not found", str(error), 404)
    except ConfigError as error:
        return pages.explain("Not saved", f"Secrets of the settings cannot be left out: {error}", 500)
    name = f"crow-{transcript.summary.id[:12]}.html"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return HTMLResponse(to_html(story), headers=headers)
