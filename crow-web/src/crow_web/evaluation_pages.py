"""Evaluations: their reports, with each run next to its session, and comparisons of two."""

from crow_eval import rows as stored
from crow_eval.evaluation_report import Comparison, compare_evaluations, list_changed_tasks, make_report
from crow_eval.evaluation_store import load
from crow_eval.page import describe_comparison, plot_differences, to_body
from crow_eval.search_page import to_search
from markupsafe import Markup
from sqlalchemy import Connection
from starlette.requests import Request

from crow_web.pages import Pages

LISTED = 200
"""Evaluations of the list, the latest."""


def show_evaluations(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the list of evaluations."""
    return pages.render("evaluations.html", rows=stored.list_evaluations(connection, LISTED))


def show_evaluation(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the report of an evaluation or of a search, or what another one differs in."""
    evaluation = load(pages.database, request.path_params["id"])
    others = [row for row in stored.list_evaluations(connection, LISTED) if row.id != evaluation.id]
    comparisons, changed, fault = list[Comparison](), list[str](), ""
    chosen = request.query_params.get("with", "")
    if chosen:
        other = load(pages.database, chosen)
        try:
            comparisons = compare_evaluations(other, evaluation)
            changed = list_changed_tasks(other, evaluation)
        except ValueError as error:
            fault = f"These two cannot be compared: {error}"
    return pages.render(
        "evaluation.html",
        evaluation=evaluation,
        others=others,
        chosen=chosen,
        comparisons=[(each, describe_comparison(each)) for each in comparisons],
        differences=Markup(plot_differences(comparisons)),
        changed=changed,
        fault=fault,
        body=Markup(to_body(make_report(evaluation), "/session/", to_search(evaluation))),
    )
