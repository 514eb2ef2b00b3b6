"""A search on the page of its evaluation: its finding, and the tree of its candidates with their differences."""

from dataclasses import dataclass, field
from difflib import unified_diff

from crow_eval.evaluation_store import Evaluation
from crow_eval.improvement_report import ImprovementReport, make_improvement_report
from crow_eval.page import format_p, format_percent, format_points, load_templates


@dataclass(frozen=True)
class Branch:
    """A candidate, and those that were made from it."""

    label: str
    score: float | None
    fault: str
    is_best: bool
    diff: list[str]
    """The lines of the difference from its parent."""
    children: list["Branch"] = field(default_factory=list["Branch"])


def to_search(evaluation: Evaluation) -> str:
    """Make the section of a search; "" for another evaluation."""
    if evaluation.settings.search is None:
        return ""
    report = make_improvement_report(evaluation)
    template = load_templates().get_template("search.html.j2")
    return template.render(report=report, finding=describe_finding(report), tree=grow_tree(report))


def grow_tree(report: ImprovementReport) -> Branch:
    """Return the first prompt with the candidates that were made from it."""
    prompts = report.evaluation.settings.prompts
    branches: list[Branch] = []
    for at, candidate in enumerate(report.notes.candidates):
        parent = prompts[at if candidate.parent is None else candidate.parent].template
        diff = list(unified_diff(parent.splitlines(), prompts[at].template.splitlines(), n=1, lineterm=""))[2:]
        is_best = bool(at) and at == report.notes.winner
        branches.append(Branch(prompts[at].label, candidate.score, candidate.fault, is_best, diff))
        if candidate.parent is not None:
            branches[candidate.parent].children.append(branches[at])
    return branches[0]


def describe_finding(report: ImprovementReport) -> str:
    """Say whether the best candidate is better than the first prompt."""
    notes, prompts = report.notes, report.evaluation.settings.prompts
    if notes.winner is None:
        return "The search has not ended."
    if len(prompts) == 1:
        return "No better than today's: the search found no candidate."
    if not notes.winner:
        return f"No better than today's: no candidate did better on the {len(notes.validation)} validation tasks."
    if report.comparison is None or report.before is None or report.after is None:
        return f"The best candidate is {prompts[notes.winner].label}. Its report has not been run."
    pairs = report.comparison.pairs
    rates = [
        f"{format_percent(one.rate)} ({format_percent(one.interval.low)} to {format_percent(one.interval.high)})"
        for one in (report.before, report.after)
    ]
    verdict = "Better than today's." if report.is_better else "No better than today's, as far as these tasks tell."
    return (
        f"{verdict} On {len(notes.test)} tasks that the search never saw, {prompts[0].label} passes {rates[0]} and "
        f"{prompts[notes.winner].label} {rates[1]}: {format_points(pairs.difference)} points "
        f"({format_points(pairs.interval.low)} to {format_points(pairs.interval.high)}), McNemar's exact test p "
        f"{format_p(pairs.p_value)}, {pairs.only_b} better, {pairs.only_a} worse."
    )
