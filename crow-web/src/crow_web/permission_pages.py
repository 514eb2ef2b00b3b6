"""The ledger of permission decisions with what each was about, and the answers that are kept."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from crow_agent.settings.home import Home
from crow_cli.config_values import DEFAULT, list_settings
from crow_core.errors import ConfigError
from crow_permissions.kept_answers import KeptAnswers
from crow_persistence import audit, loader
from crow_persistence.audited_calls import describe_calls
from sqlalchemy import Connection
from starlette.requests import Request

from crow_web import queries
from crow_web.pages import Pages, read_number
from crow_web.queries import DecisionFilter

RULE = re.compile(r"'([^']+)'")
"""The rules that a decision names."""


def show_permissions(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the ledger of permission decisions and results, and the kept answers."""
    query = request.query_params
    wanted = DecisionFilter(
        query.get("session", ""),
        query.get("tool", ""),
        query.get("verdict", ""),
        query.get("by", ""),
        query.get("call", ""),
        read_number(query.get("before", "")),
    )
    rows, has_more = queries.list_decisions(connection, wanted)
    for row, about in zip(rows, describe_calls(connection, rows), strict=True):
        row["about"] = about
    add_places(pages.env, connection, rows)
    answers = KeptAnswers(pages.database.folder)
    return pages.render(
        "permissions.html",
        rows=rows,
        wanted=wanted,
        counts=queries.count_decisions(connection),
        more=str(request.url.include_query_params(before=rows[-1]["number"])) if has_more else "",
        answers=answers.list_all(),
        fault=answers.fault,
        verification=audit.examine(pages.database) if query.get("verify") else None,
        repairs=audit.list_repairs(connection) if query.get("verify") else [],
        verify=str(request.url.include_query_params(verify=1)),
    )


def add_places(env: Mapping[str, str], connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Add to each decision the places in the settings, as they are now, of the rules that it names."""
    places: dict[str, dict[str, str]] = {}
    for row in rows:
        rules: list[str] = RULE.findall(row["by"]) if row["kind"] == "decision" else []
        if rules and row["session"] not in places:
            session = loader.find_session_by_id(connection, row["session"])
            places[row["session"]] = dict(list_places(env, session.cwd)) if session else {}
        row["places"] = [places[row["session"]].get(rule, "") for rule in rules]


def list_places(env: Mapping[str, str], folder: str) -> Iterator[tuple[str, str]]:
    """Yield the permission rules that hold in a folder, each with the place where it is written."""
    try:
        settings = list_settings(Home.find(env), env, Path(folder))
    except (ConfigError, OSError):
        return
    for one in settings:
        value: Any = one.value
        if one.keys[0] == "permissions" and one.source != DEFAULT and isinstance(value, list):
            yield from ((str(rule), one.source) for rule in cast("list[Any]", value))


def revoke(pages: Pages, form: Mapping[str, str], request: Request) -> str:
    """Revoke a kept answer. Raises ConfigError."""
    try:
        KeptAnswers(pages.database.folder).remove([form.get("answer", "")])
    except OSError as error:
        raise ConfigError(f"The answer cannot be revoked: {error}.") from error
    return "/permissions"
