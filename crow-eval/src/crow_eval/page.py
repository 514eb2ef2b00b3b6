"""The report of an evaluation as one HTML file, without scripts and without anything from elsewhere."""

from datetime import datetime
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from crow_eval.cells import Cell
from crow_eval.evaluation_report import LEVEL, Comparison, EvaluationReport, VariantReport
from crow_eval.plots import Dots, Estimate, plot_dots, plot_intervals


def to_page(report: EvaluationReport, search: str = "") -> str:
    """Make the page of a report. `search` is the section of a search."""
    body = to_body(report, search=search)
    return load_templates().get_template("page.html.j2").render(evaluation=report.evaluation, body=body)


def to_body(report: EvaluationReport, link: str = "", search: str = "") -> str:
    """Make the contents of the page of a report. With a `link`, such as /session/, each run leads to its session.

    `search`, the section of a search, takes the place of the rates: its candidates were not run on the same tasks.
    """
    evaluation = report.evaluation
    grid = {(cell.task, cell.variant, cell.repetition): cell for cell in report.cells}
    template = load_templates().get_template("report.html.j2")
    return template.render(
        report=report,
        evaluation=evaluation,
        settings=evaluation.settings,
        variants=evaluation.settings.variants,
        grid=grid,
        repetitions=range(1, evaluation.settings.repeat + 1),
        describe=describe_cell,
        compare=describe_comparison,
        style=find_style,
        rates=plot_rates(report.variants),
        differences=plot_differences(report.comparisons),
        times=plot_cells(report, "times"),
        tokens=plot_cells(report, "tokens"),
        link=link,
        search=search,
    )


@cache
def load_templates() -> Environment:
    loader = PackageLoader("crow_eval", "templates")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {
        "percent": format_percent,
        "seconds": format_seconds,
        "number": format_number,
        "points": format_points,
        "time": format_time,
        "p": format_p,
    }
    return made


def plot_rates(variants: list[VariantReport]) -> str:
    """Plot the pass rate of each variant with its interval."""
    rows = [
        Estimate(each.label, each.rate, each.interval.low, each.interval.high, f"{each.passed} of {each.runs}")
        for each in variants
    ]
    return plot_intervals(rows, 0.0, 1.0, title="Pass rates with 95 % intervals")


def plot_differences(comparisons: list[Comparison]) -> str:
    """Plot the difference of each comparison with its interval."""
    if not comparisons:
        return ""
    rows: list[Estimate] = []
    for each in comparisons:
        pairs = each.pairs
        style = find_style(each)
        note = f"p {format_p(each.adjusted_p)}"
        rows.append(
            Estimate(describe_pair(each), pairs.difference, pairs.interval.low, pairs.interval.high, note, style)
        )
    most = max(max(abs(row.low), abs(row.high)) for row in rows)
    reach = next(each for each in (0.1, 0.25, 0.5, 1.0) if each >= most - 1e-9)
    return plot_intervals(rows, -reach, reach, title="Differences of pass rates with 95 % intervals", signed=True)


def find_style(comparison: Comparison) -> str:
    """Return the class of a comparison: good if the second variant passes more often, bad if the first, or none."""
    if not comparison.better:
        return ""
    return "good" if comparison.better == comparison.second else "bad"


def describe_pair(comparison: Comparison) -> str:
    """Name what a comparison compares, and once what its two variants have in common."""
    (old, old_model), (new, new_model) = (label.split(" · ", 1) for label in (comparison.first, comparison.second))
    if old_model == new_model:
        return f"{new} − {old} · {new_model}"
    return f"{new_model} − {old_model} · {new}" if old == new else f"{comparison.second} − {comparison.first}"


def plot_cells(report: EvaluationReport, what: str) -> str:
    """Plot the seconds or the tokens of each cell."""
    rows: list[Dots] = []
    for variant in report.evaluation.settings.variants:
        values: list[tuple[float, str, str]] = []
        for cell in report.cells:
            value = (cell.total or 0) / 1000 if what == "times" else cell.input + cell.output
            if cell.variant == variant.number and cell.state != "error" and value:
                said = f"{cell.task} #{cell.repetition}: {value:,.3g}, {cell.state}"
                values.append((value, "good" if cell.state == "passed" else "bad", said))
        rows.append(Dots(variant.label, values))
    title = "Seconds of each run" if what == "times" else "Tokens of each run"
    return plot_dots(rows, title=title, unit="s" if what == "times" else "tokens")


def describe_cell(cell: Cell) -> str:
    """Describe a cell for the tip of its square."""
    failed = "; ".join(check.name for check in cell.failed_checks)
    return f"{cell.state} — {failed or cell.outcome.error or 'all checks'} — session {cell.session or 'none'}"


def describe_comparison(comparison: Comparison) -> str:
    """Say in a sentence what a comparison shows."""
    if not comparison.pairs.pairs:
        return "There are no pairs to compare yet."
    if not comparison.better:
        return f"No difference is shown: p is not below {LEVEL}."
    return f"{comparison.better} passes more often."


def describe_test(comparison: Comparison) -> str:
    """Say the p-value of a comparison, and the one that is corrected for all comparisons where it differs."""
    p, adjusted = comparison.pairs.p_value, comparison.adjusted_p
    return format_p(p) if adjusted == p else f"{format_p(p)}, corrected {format_p(adjusted)}"


def format_percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share in (0, 1) or not 0.005 < share < 0.995 else f"{share * 100:.1f} %"


def format_points(difference: float) -> str:
    return f"{difference * 100:+.1f}"


def format_seconds(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds / 1000:,.2f} s"


def format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"


def format_p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"


def format_time(at: int | None) -> str:
    return "not yet" if at is None else f"{datetime.fromtimestamp(at / 1000):%Y-%m-%d %H:%M}"
