"""The report of a search, and its best candidate so far, on a terminal."""

from typing import TYPE_CHECKING

import click
from crow_cli.console import escape_line, print_json, print_table
from crow_system.shortening import format_count

if TYPE_CHECKING:
    from crow_eval.evaluation_store import Evaluation
    from crow_eval.improvement_report import Sums


def describe_best(evaluation: "Evaluation") -> str:
    """Describe the best candidate so far, by the validation tasks."""
    notes, prompts = evaluation.settings.search, evaluation.settings.prompts
    assert notes
    scores = [candidate.score for candidate in notes.candidates]
    if scores[0] is None:
        return "today's prompt"
    best = max(range(len(scores)), key=lambda at: scores[at] or 0.0)
    found = f"{format_count(len(prompts) - 1, 'candidate')}, "
    if not best:
        return f"{found}none better than today's: {scores[0]:.0%}"
    return f"{found}best {prompts[best].label}: {scores[best]:.0%}, today's {scores[0]:.0%}"


def print_improvement(evaluation: "Evaluation", *, as_json: bool) -> None:
    """Print the report of a search."""
    from crow_eval.context_files import is_file_name
    from crow_eval.improvement_report import improvement_to_json, list_candidates, make_improvement_report
    from crow_eval.search_page import describe_finding

    report = make_improvement_report(evaluation)
    if as_json:
        print_json(improvement_to_json(report))
        return
    notes, prompts = report.notes, evaluation.settings.prompts
    click.secho(escape_line(f"{notes.target} on {evaluation.dataset}  {evaluation.id[:8]}"), bold=True)
    rows = [
        (
            each["prompt"],
            each["parent"] or "-",
            "-" if each["score"] is None else f"{each['score']:.0%}",
            each["fault"] or ("today's" if not at else "best" if at == notes.winner else ""),
        )
        for at, each in enumerate(list_candidates(report))
    ]
    print_table(("CANDIDATE", "MADE FROM", "VALIDATION", ""), rows)
    click.echo()
    click.echo(escape_line(describe_finding(report)))
    if notes.stopped:
        click.echo(f"The search has ended: {notes.stopped[0].lower()}{notes.stopped[1:]}")
    if report.noise:
        click.echo(
            f"Today's prompt, run twice: {report.noise.differing} of {report.noise.pairs} tasks ended otherwise."
        )
    for one in report.agreements:
        between = f"{one.interval.low:.0%} to {one.interval.high:.0%}"
        words = f"{one.prompt} agrees with {one.agreed} of {one.rated} ratings ({between})"
        chance = f", which is no better than chance: it says yes to {one.said_yes}" if one.is_chance else ""
        click.echo(escape_line(f"{words}{chance}."))
    took = {"search": report.search, "proposals": report.proposals, "report": report.test}
    print_table(("", "RUNS", "CALLS", "TOKENS", "COST"), [to_row(name, sums) for name, sums in took.items()])
    if notes.winner and report.is_better:
        best, first = prompts[notes.winner].label, prompts[0].label
        use = f"show {best} > FILE" if is_file_name(notes.target) else f"promote {best}"
        click.echo(escape_line(f"Look at it: crow prompts diff {first} {best}. Use it: crow prompts {use}"))


def to_row(name: str, sums: "Sums") -> tuple[str, ...]:
    """Convert sums to a row of the table."""
    cost = "-" if sums.cost is None else f"{sums.cost:.4f} {sums.currency or ''}".strip()
    return (name, f"{sums.runs:,}", f"{sums.requests:,}", f"{sums.tokens:,}", cost)
