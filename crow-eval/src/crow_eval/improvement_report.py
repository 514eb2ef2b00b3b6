"""The report of a search: its best candidate against the first prompt, on tasks that the search never saw."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crow_persistence.intervals import Interval, wilson

from crow_eval.cells import Cell, SearchNotes
from crow_eval.compared_prompts import JUDGE
from crow_eval.evaluation_report import LEVEL, Comparison, VariantReport, compare, report_variant
from crow_eval.evaluation_store import Evaluation
from crow_eval.statistics import fisher


@dataclass(frozen=True)
class Noise:
    """Two runs of each task with the first prompt unchanged: the differences are the model's own."""

    pairs: int
    differing: int


@dataclass(frozen=True)
class Agreement:
    """The agreement of a judge with a person, in its first verdict of each answer."""

    prompt: str
    rated: int
    agreed: int
    interval: Interval
    said_yes: int
    p_value: float
    """Of Fisher's exact test: how likely chance alone agrees so often, with as many of each verdict and rating."""

    @property
    def is_chance(self) -> bool:
        """True if the agreement is at most that of chance."""
        return self.p_value >= LEVEL


@dataclass(frozen=True)
class Sums:
    """The number of runs and requests, and the tokens and cost of their model calls."""

    runs: int
    requests: int
    tokens: int
    cost: float | None
    currency: str | None


@dataclass(frozen=True)
class ImprovementReport:
    """The result of a search, which need not have ended."""

    evaluation: Evaluation
    notes: SearchNotes
    before: VariantReport | None
    """The first prompt on the tasks of the report; None if the search found nothing to compare it with."""
    after: VariantReport | None
    comparison: Comparison | None
    noise: Noise | None
    search: Sums
    """Of the runs of the search, without the proposals."""
    proposals: Sums
    test: Sums
    agreements: list[Agreement]
    """Of a judge's prompts with a person's ratings: of the first, and of the best."""

    @property
    def is_better(self) -> bool:
        """True if the best candidate passes more often than the first prompt, by the test alone."""
        return self.comparison is not None and self.comparison.better == self.comparison.second


def make_improvement_report(evaluation: Evaluation) -> ImprovementReport:
    """Make the report of a search, which need not have ended."""
    settings, notes = evaluation.settings, evaluation.settings.search
    assert notes
    variants, hidden = settings.variants, {*notes.test}
    test = [cell for cell in evaluation.cells if cell.task in hidden]
    search = [cell for cell in evaluation.cells if cell.task not in hidden]
    before = after = comparison = noise = None
    if notes.winner and test:
        before, after = (
            report_variant(variants[at], [cell for cell in test if cell.variant == at], settings.repeat)
            for at in (0, notes.winner)
        )
        comparison = compare(test, variants[0], test, variants[notes.winner])
        comparison = Comparison(comparison.first, comparison.second, comparison.pairs, comparison.pairs.p_value)
        noise = find_noise(test)
    agreements = find_agreements(evaluation, test)
    asked = notes.proposals
    costs = [each.cost for each in asked if each.cost is not None]
    proposals = Sums(
        len(asked),
        sum(each.requests for each in asked),
        sum(each.tokens for each in asked),
        sum(costs) if costs else None,
        next((each.currency for each in asked if each.currency), None),
    )
    return ImprovementReport(
        evaluation,
        notes,
        before,
        after,
        comparison,
        noise,
        sum_cells(search),
        proposals,
        sum_cells(test),
        agreements,
    )


def find_noise(cells: Sequence[Cell]) -> Noise | None:
    """Compare the first two runs of each task with the first prompt; None if no task has two."""
    states = {(cell.task, cell.repetition): cell.state for cell in cells if cell.variant == 0 and cell.state != "error"}
    pairs = [(state, states[task, 2]) for (task, n), state in states.items() if n == 1 and (task, 2) in states]
    return Noise(len(pairs), sum(one != two for one, two in pairs)) if pairs else None


def find_agreements(evaluation: Evaluation, cells: Sequence[Cell]) -> list[Agreement]:
    """Compare the verdicts of a judge's prompts with the ratings; none of other prompts."""
    notes, prompts = evaluation.settings.search, evaluation.settings.prompts
    if notes is None or notes.target != JUDGE:
        return []
    found: list[Agreement] = []
    for at in sorted({0, notes.winner or 0}):
        pairs: Counter[tuple[bool, bool]] = Counter()
        for cell in cells:
            if cell.variant == at and cell.repetition == 1 and cell.outcome.checks:
                said_yes = cell.outcome.answer.startswith("yes")
                pairs[said_yes, said_yes == (cell.state == "passed")] += 1
        if rated := pairs.total():
            agreed, yes = pairs[True, True] + pairs[False, False], pairs[True, True] + pairs[True, False]
            p = fisher(pairs[True, True], pairs[True, False], pairs[False, True], pairs[False, False])
            found.append(Agreement(prompts[at].label, rated, agreed, wilson(agreed, rated), yes, p))
    return found


def sum_cells(cells: Sequence[Cell]) -> Sums:
    """Sum what cells took."""
    costs = [cell.cost for cell in cells if cell.cost is not None]
    return Sums(
        len(cells),
        sum(cell.requests for cell in cells),
        sum(cell.input + cell.output for cell in cells),
        sum(costs) if costs else None,
        next((cell.currency for cell in cells if cell.currency), None),
    )


def list_candidates(report: ImprovementReport) -> list[dict[str, Any]]:
    """List the candidates, each with its parent, its score and why it was not run."""
    prompts = report.evaluation.settings.prompts
    return [
        {
            "prompt": prompts[at].label,
            "template": prompts[at].template,
            "parent": None if each.parent is None else prompts[each.parent].label,
            "score": each.score,
            "fault": each.fault or None,
        }
        for at, each in enumerate(report.notes.candidates)
    ]


def improvement_to_json(report: ImprovementReport) -> dict[str, Any]:
    """Convert a report to JSON values."""
    notes, prompts = report.notes, report.evaluation.settings.prompts
    return {
        "id": report.evaluation.id,
        "dataset": report.evaluation.dataset,
        "first": prompts[0].label,
        "best": None if notes.winner is None else prompts[notes.winner].label,
        "better": report.is_better,
        "stopped": notes.stopped,
        "before": report.before and asdict(report.before),
        "after": report.after and asdict(report.after),
        "comparison": report.comparison and asdict(report.comparison),
        "unchanged": report.noise and asdict(report.noise),
        "parts": {"train": notes.train, "validation": notes.validation, "test": notes.test},
        "took": {"search": asdict(report.search), "proposals": asdict(report.proposals), "test": asdict(report.test)},
        "agreements": [{**asdict(each), "is_chance": each.is_chance} for each in report.agreements],
        "candidates": list_candidates(report),
    }
