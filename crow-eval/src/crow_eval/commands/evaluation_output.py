"""The report of an evaluation, and its progress, on a terminal."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click
from crow_cli.console import escape_line, print_json, print_note, print_table
from crow_core.errors import ConfigError

if TYPE_CHECKING:
    from crow_eval.cells import Cell
    from crow_eval.evaluation_report import Comparison, EvaluationReport
    from crow_eval.evaluation_store import Evaluation

REPORT_INTERVAL = 10.0
"""Seconds between two lines about the progress, if standard error is not a terminal."""
MAX_GROUPS = 5
"""Groups of failures that the terminal shows."""


@contextmanager
def reporting(evaluation: "Evaluation") -> "Generator[Callable[[Cell], None]]":
    """Yield a function that shows a cell that has ended, as a bar where there is a terminal."""
    total, states = evaluation.cells_wanted, [cell.state for cell in evaluation.finished.values()]

    def describe() -> str:
        return ", ".join(
            f"{states.count(state):,} {name}"
            for state, name in (("passed", "passed"), ("failed", "failed"), ("error", "errors"))
            if states.count(state)
        )

    if not sys.stderr.isatty():
        last = monotonic()

        def report(cell: "Cell") -> None:
            nonlocal last
            states.append(cell.state)
            if monotonic() - last > REPORT_INTERVAL:
                last = monotonic()
                click.echo(f"{len(states):,} of {total:,} runs have ended: {describe()}", err=True)

        yield report
        return
    from rich.console import Console  # imported here because few commands show a bar
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(describe(), total=total, completed=len(states))

        def advance(cell: "Cell") -> None:
            states.append(cell.state)
            progress.update(bar, completed=len(states), description=describe())

        yield advance


def print_report(evaluation: "Evaluation", *, as_json: bool, page: Path | None) -> None:
    """Print the report of an evaluation, and write its page. Raises ConfigError for a file that cannot be written."""
    from crow_eval.evaluation_report import make_report, to_json

    report = make_report(evaluation)
    if page is not None:
        from crow_eval.page import to_page
        from crow_eval.search_page import to_search

        try:
            page.write_text(to_page(report, to_search(evaluation)), "utf-8")
        except OSError as error:
            raise ConfigError(f"--html: {page} cannot be written: {error.strerror}.") from error
    if evaluation.settings.search:
        from crow_eval.commands.improvement_output import print_improvement

        print_improvement(evaluation, as_json=as_json)
    elif as_json:
        print_json(to_json(report))
    else:
        print_tables(report)
    if page is not None:
        print_note(f"The report is in {page}.")


def print_tables(report: "EvaluationReport") -> None:
    from crow_eval.page import format_number, format_percent, format_seconds

    evaluation = report.evaluation
    click.secho(escape_line(f"{evaluation.dataset}  {evaluation.id[:8]}"), bold=True)
    heads = ("PROMPT", "MODEL", "PASSED", "RATE", "95 %", "TOKENS", "FIRST", "IN ALL", "CACHED", "COST", "ERRORS")
    rows = [
        (
            one.prompt,
            one.model,
            f"{one.passed}/{one.runs}",
            format_percent(one.rate),
            f"{format_percent(one.interval.low)}-{format_percent(one.interval.high)}".replace(" %-", "-"),
            format_number(one.input + one.output),
            format_seconds(one.first),
            format_seconds(one.total),
            format_percent(one.cached_share),
            " ".join(filter(None, [format_number(one.cost), one.currency])),
            str(one.errors),
        )
        for one in report.variants
    ]
    print_table(heads, rows)
    later = [f"pass@{k} {format_percent(rate)}" for one in report.variants for k, rate in one.pass_at.items() if k > 1]
    if later:
        click.echo(f"{', '.join(later)}, in the order above")
    print_comparisons(report.comparisons)
    for title, groups in (
        ("Failures by check", report.by_check),
        ("Failures by last words", report.by_words),
        ("Errors", report.errors),
    ):
        if groups:
            click.secho(f"\n{title}", bold=True)
        for group in groups[:MAX_GROUPS]:
            click.echo(f"{group.count:>4}  {escape_line(group.what)}  ({escape_line(', '.join(group.tasks[:4]))})")
        if len(groups) > MAX_GROUPS:
            click.echo(f"      and {len(groups) - MAX_GROUPS} more")


def print_comparisons(comparisons: "Sequence[Comparison]") -> None:
    """Print a line for each comparison."""
    from crow_eval.page import describe_comparison, describe_test, format_points

    for one in comparisons:
        pairs = one.pairs
        click.echo(
            escape_line(
                f"{one.second} against {one.first}: {format_points(pairs.difference)} points "
                f"({format_points(pairs.interval.low)} to {format_points(pairs.interval.high)}), "
                f"McNemar's exact test p {describe_test(one)}, {pairs.pairs} pairs "
                f"({pairs.only_b} better, {pairs.only_a} worse). {describe_comparison(one)}"
            )
        )
