"""The findings of an evaluation: rates with intervals, comparisons in pairs, tokens and times, failures in groups."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any

import msgspec
from crow_core.text import to_line
from crow_persistence.intervals import Interval
from crow_system.shortening import shorten_line

from crow_eval.cells import Cell, EvaluationSettings, Variant
from crow_eval.evaluation_store import Evaluation
from crow_eval.statistics import (
    Outcomes,
    PairedComparison,
    adjust_p_values,
    compare_pairs,
    find_pass_at,
    find_rate,
    find_rate_interval,
)

LEVEL = 0.05
"""The p-value, corrected for the comparisons of a report, below which one says that a variant is better."""
WORDS_LIMIT = 90
"""Characters of the last words of an answer by which failures are grouped."""


@dataclass(frozen=True)
class VariantReport:
    """The results of the cells of a variant."""

    label: str
    prompt: str
    model: str
    runs: int
    """Cells that have passed or failed."""
    passed: int
    failed: int
    errors: int
    rate: float
    """The mean of the tasks' pass rates."""
    interval: Interval
    pass_at: dict[int, float]
    """pass@k by k, for 1 and the number of repetitions."""
    input: int
    """Tokens, of all cells."""
    output: int
    cached_share: float
    """The part of the input that the server had in its cache."""
    cost: float | None
    currency: str | None
    requests: float
    """The mean number of model calls of a cell."""
    first: float | None
    """The median of the milliseconds until the first delta."""
    total: float | None
    """The median of the milliseconds of a turn."""


@dataclass(frozen=True)
class Comparison:
    """Two variants, compared in pairs. A positive difference is in favour of `second`."""

    first: str
    second: str
    pairs: PairedComparison
    adjusted_p: float = 1.0
    """The p-value, corrected by Holm's method for the comparisons of the same report."""

    @property
    def better(self) -> str:
        """The variant that passes more often, by the test alone; empty if no difference is shown."""
        if self.adjusted_p >= LEVEL:
            return ""
        return self.second if self.pairs.only_b > self.pairs.only_a else self.first


@dataclass(frozen=True)
class FailureGroup:
    """Failures that are alike."""

    what: str
    count: int
    tasks: list[str]
    variants: list[str]


@dataclass(frozen=True)
class EvaluationReport:
    """The findings of an evaluation."""

    evaluation: Evaluation
    variants: list[VariantReport]
    comparisons: list[Comparison]
    by_check: list[FailureGroup]
    by_words: list[FailureGroup]
    errors: list[FailureGroup]
    cells: list[Cell] = field(default_factory=list[Cell])
    """All that have ended, by task, repetition and variant."""


def make_report(evaluation: Evaluation) -> EvaluationReport:
    """Make the report of an evaluation, which need not have ended."""
    settings = evaluation.settings
    variants = settings.variants
    order = {task.id: number for number, task in enumerate(settings.tasks)}
    cells = sorted(evaluation.cells, key=lambda cell: (order.get(cell.task, 0), cell.repetition, cell.variant))
    labels = [variant.label for variant in variants]
    failed = [cell for cell in cells if cell.state == "failed"]
    reports = [report_variant(variant, select(cells, variant), settings.repeat) for variant in variants]
    return EvaluationReport(
        evaluation,
        reports,
        compare_variants(settings, cells),
        group_failures(((check.name, cell) for cell in failed for check in cell.failed_checks), labels),
        group_failures(((find_last_words(cell.outcome.answer), cell) for cell in failed), labels),
        group_failures(((to_short_line(cell.outcome.error), cell) for cell in cells if cell.state == "error"), labels),
        cells,
    )


def select(cells: Iterable[Cell], variant: Variant) -> list[Cell]:
    """Return the cells of a variant."""
    return [cell for cell in cells if cell.variant == variant.number]


def to_outcomes(cells: Iterable[Cell]) -> Outcomes:
    """Return the outcomes of cells by their tasks, in the order of the repetitions; errors have none."""
    outcomes: dict[str, list[int]] = {}
    for cell in sorted(cells, key=lambda cell: cell.repetition):
        if cell.state != "error":
            outcomes.setdefault(cell.task, []).append(int(cell.state == "passed"))
    return outcomes


def report_variant(variant: Variant, cells: Sequence[Cell], repeat: int) -> VariantReport:
    """Sum up the cells of a variant."""
    outcomes = to_outcomes(cells)
    states = Counter(cell.state for cell in cells)
    pass_at = {k: find_pass_at(outcomes, k) for k in sorted({1, repeat})}
    costs = [cell.cost for cell in cells if cell.cost is not None]
    tokens = sum(cell.input for cell in cells)
    judged = [cell for cell in cells if cell.state != "error"]
    return VariantReport(
        label=variant.label,
        prompt=variant.prompt.label,
        model=variant.name,
        runs=states["passed"] + states["failed"],
        passed=states["passed"],
        failed=states["failed"],
        errors=states["error"],
        rate=find_rate(outcomes),
        interval=find_rate_interval(outcomes),
        pass_at={k: found for k, found in pass_at.items() if found is not None},
        input=tokens,
        output=sum(cell.output for cell in cells),
        cached_share=sum(cell.cached for cell in cells) / tokens if tokens else 0.0,
        cost=sum(costs) if costs else None,
        currency=next((cell.currency for cell in cells if cell.currency), None),
        requests=fmean(cell.requests for cell in judged) if judged else 0.0,
        first=find_median(cell.first for cell in judged),
        total=find_median(cell.total for cell in judged),
    )


def find_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def compare_variants(settings: EvaluationSettings, cells: Sequence[Cell]) -> list[Comparison]:
    """Compare each prompt with the first one, model by model, and each model with the first one, prompt by prompt."""
    variants, width = settings.variants, len(settings.models)
    pairs = [(at % width, at) for at in range(width, len(variants))]
    pairs += [(at - at % width, at) for at in range(len(variants)) if at % width]
    return adjust([compare(cells, variants[first], cells, variants[second]) for first, second in pairs])


def adjust(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Correct the p-values of the comparisons of one report for their number. One without pairs does not count."""
    tested = [each for each in comparisons if each.pairs.pairs]
    adjusted = iter(adjust_p_values([each.pairs.p_value for each in tested]))
    return [replace(each, adjusted_p=next(adjusted)) if each.pairs.pairs else each for each in comparisons]


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Convert a comparison to JSON values."""
    return {**asdict(comparison), "better": comparison.better or None}


def compare(first_cells: Sequence[Cell], first: Variant, second_cells: Sequence[Cell], second: Variant) -> Comparison:
    """Compare two variants by the cells of the same task and repetition that have an outcome in both."""
    one = {(cell.task, cell.repetition): cell for cell in select(first_cells, first) if cell.state != "error"}
    two = {(cell.task, cell.repetition): cell for cell in select(second_cells, second) if cell.state != "error"}
    both = sorted(one.keys() & two.keys())
    pairs = compare_pairs(to_outcomes(one[key] for key in both), to_outcomes(two[key] for key in both))
    return Comparison(first.label, second.label, pairs)


def group_failures(found: Iterable[tuple[str, Cell]], labels: Sequence[str]) -> list[FailureGroup]:
    """Group cells by a text, the largest group first."""
    groups: dict[str, list[Cell]] = {}
    for what, cell in found:
        groups.setdefault(what, []).append(cell)
    return [
        FailureGroup(
            what,
            len(cells),
            list(dict.fromkeys(cell.task for cell in cells)),
            [labels[number] for number in sorted({cell.variant for cell in cells})],
        )
        for what, cells in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]


def find_last_words(answer: str) -> str:
    """Return the last sentence of an answer, with each number as `#`, so that failures that end alike are found."""
    line = to_line(next((line for line in reversed(answer.splitlines()) if line.strip()), "")).strip()
    sentences = [each for each in re.split(r"(?<=[.!?])\s+", line) if each]
    return to_short_line(re.sub(r"\d+", "#", sentences[-1])) if sentences else "(no answer)"


def to_short_line(text: str) -> str:
    """Make one line of a text, of at most WORDS_LIMIT characters."""
    return shorten_line(to_line(" ".join(text.split())), WORDS_LIMIT)


def to_json(report: EvaluationReport) -> dict[str, Any]:
    """Convert a report to JSON values."""
    evaluation = report.evaluation
    settings = evaluation.settings
    prompts = [{"label": each.label, "name": each.name, "version": each.version} for each in settings.prompts]
    labels = [variant.label for variant in settings.variants]
    return {
        "id": evaluation.id,
        "dataset": evaluation.dataset,
        "created": evaluation.created,
        "ended": evaluation.ended,
        "cells_wanted": evaluation.cells_wanted,
        "settings": {**msgspec.to_builtins(settings), "prompts": prompts},
        "variants": [asdict(each) for each in report.variants],
        "comparisons": [comparison_to_json(each) for each in report.comparisons],
        "failures": {
            "by_check": [asdict(each) for each in report.by_check],
            "by_last_words": [asdict(each) for each in report.by_words],
            "errors": [asdict(each) for each in report.errors],
        },
        "cells": [{**msgspec.to_builtins(cell), "variant": labels[cell.variant]} for cell in report.cells],
    }


def compare_evaluations(first: Evaluation, second: Evaluation) -> list[Comparison]:
    """Compare the variants of two evaluations that have the same prompt and model, or their only ones.

    Raises ValueError if there are none.
    """
    ones, twos = first.settings.variants, second.settings.variants
    if len(ones) == len(twos) == 1:
        pairs = [(ones[0], twos[0])]
    else:
        by_label = {variant.label: variant for variant in twos}
        pairs = [(one, by_label[one.label]) for one in ones if one.label in by_label]
    found = adjust([compare(first.cells, one, second.cells, two) for one, two in pairs])
    if not any(each.pairs.pairs for each in found):
        labels = ["; ".join(variant.label for variant in variants) for variants in (ones, twos)]
        raise ValueError(f"they have no task and variant in common: {labels[0]} against {labels[1]}.")
    return found


def list_changed_tasks(first: Evaluation, second: Evaluation) -> list[str]:
    """List the tasks of both evaluations that are not the same in both."""
    digests = {task.id: task.digest for task in second.settings.tasks}
    return [task.id for task in first.settings.tasks if digests.get(task.id, task.digest) != task.digest]
