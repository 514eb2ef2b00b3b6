"""Statistics of pass rates: intervals, a test for pairs, an interval for a paired difference, and pass@k.

Outcomes are 1 for a run that passed and 0 for one that failed. Runs of the same task are alike, so they tell less than
runs of as many tasks: intervals count them by their design effect (Kish, Survey Sampling, 1965).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean

from crow_persistence.intervals import Interval, wilson

Outcomes = Mapping[str, Sequence[int]]
"""The outcomes of the runs of each task, by the task's id."""


@dataclass(frozen=True)
class PairedComparison:
    """Two variants, compared on the same tasks: A is the first, B the second."""

    pairs: int
    rate_a: float
    rate_b: float
    only_a: int
    """Pairs in which A passed and B failed."""
    only_b: int
    difference: float
    """The rate of B less the rate of A, each the mean of the tasks' rates."""
    interval: Interval
    p_value: float


def find_rate(outcomes: Outcomes) -> float:
    """Return the mean of the tasks' pass rates; 0 without outcomes."""
    rates = [fmean(runs) for runs in outcomes.values() if runs]
    return fmean(rates) if rates else 0.0


def count_effective(outcomes: Outcomes) -> float:
    """Return how many independent runs tell as much about the rate as these, which are several of each task.

    It is the variance of one run over the variance of the mean of the tasks' rates, at least the number of tasks and at
    most that of runs.
    """
    rates = [fmean(runs) for runs in outcomes.values() if runs]
    runs = sum(map(len, outcomes.values()))
    tasks = len(rates)
    if tasks < 2 or runs == tasks:
        return float(tasks if runs == tasks else runs)
    mean = fmean(rates)
    of_mean = sum((rate - mean) ** 2 for rate in rates) / (tasks - 1) / tasks
    if mean in (0.0, 1.0):
        return float(tasks)
    return float(runs) if not of_mean else min(max(mean * (1 - mean) / of_mean, tasks), runs)


def find_rate_interval(outcomes: Outcomes, confidence: float = 0.95) -> Interval:
    """Return Wilson's interval of the pass rate, for the effective number of runs."""
    runs = count_effective(outcomes)
    return wilson(find_rate(outcomes) * runs, runs, confidence)


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: the binomial test of the pairs that differ.

    If neither variant is better, each pair that differs is as likely to favour A as B; this holds for several runs of a
    task, too. The exact test needs no least number of pairs, as the one with chi-squared does, and its level never
    exceeds the stated one. Q. McNemar, Psychometrika 12 (1947), 153-157; A. Agresti, Categorical Data Analysis, 11.1.
    """
    differing, least = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(comb(differing, k) for k in range(least + 1)) / 2**differing)


def fisher(both: int, only_first: int, only_second: int, neither: int) -> float:
    """Return the one-sided p-value of Fisher's exact test: whether two yes-or-no judgements agree more than by chance.

    The numbers of each answer of either are held fixed. R. A. Fisher, Statistical Methods for Research Workers (1934).
    """
    first, second = both + only_first, both + only_second
    total = first + only_second + neither
    ways = (comb(second, k) * comb(total - second, first - k) for k in range(both, min(first, second) + 1))
    return min(1.0, sum(ways) / comb(total, first))


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, corrected by Holm's method: with any of them, all keep one level together.

    If no test has anything to find, at most a share of 0.05 of such families has a corrected value below 0.05. The
    tests may depend on one another. S. Holm, Scandinavian Journal of Statistics 6 (1979), 65-70.
    """
    adjusted = [1.0] * len(p_values)
    least = 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda at: p_values[at])):
        least = max(least, min(1.0, p_values[at] * (len(p_values) - rank)))
        adjusted[at] = least
    return adjusted


def compare_pairs(first: Outcomes, second: Outcomes, confidence: float = 0.95) -> PairedComparison:
    """Compare two variants by the tasks and repetitions that both have: the n-th run of one with the n-th of the other.

    The interval is Newcombe's for paired proportions (method 10): the Wilson intervals of both rates, joined with the
    correlation of the tasks' rates. R. G. Newcombe, Statistics in Medicine 17 (1998), 2635-2650.
    """
    pairs = {
        task: list(zip(first[task], second[task], strict=False))
        for task in first
        if task in second and first[task] and second[task]
    }
    a = {task: [one for one, _ in runs] for task, runs in pairs.items()}
    b = {task: [two for _, two in runs] for task, runs in pairs.items()}
    differing = [one - two for runs in pairs.values() for one, two in runs if one != two]
    rate_a, rate_b = find_rate(a), find_rate(b)
    interval_a, interval_b = find_rate_interval(a, confidence), find_rate_interval(b, confidence)
    both = find_correlation(a, b)
    difference = rate_b - rate_a
    down = join_widths(rate_b - interval_b.low, interval_a.high - rate_a, both)
    up = join_widths(interval_b.high - rate_b, rate_a - interval_a.low, both)
    interval = Interval(max(difference - down, -1.0), min(difference + up, 1.0))
    only_a, only_b = differing.count(1), differing.count(-1)
    return PairedComparison(
        sum(map(len, pairs.values())),
        rate_a,
        rate_b,
        only_a,
        only_b,
        difference,
        interval if pairs else Interval(-1.0, 1.0),
        mcnemar(only_a, only_b),
    )


def join_widths(first: float, second: float, correlation: float) -> float:
    """Return the width of the interval of a difference on one side, from those of the two rates."""
    return sqrt(max(first * first - 2 * correlation * first * second + second * second, 0.0))


def find_correlation(first: Outcomes, second: Outcomes) -> float:
    """Return the correlation of the tasks' rates of two variants; for one run of each task, it is phi.

    A positive one is made smaller by Newcombe's correction, as if half a pair less had passed and failed alike.
    """
    rates = [(fmean(first[task]), fmean(second[task])) for task in first]
    tasks = len(rates)
    if tasks < 2:
        return 0.0
    mean_a, mean_b = (fmean(side) for side in zip(*rates, strict=True))
    together = sum((a - mean_a) * (b - mean_b) for a, b in rates)
    spread = sqrt(sum((a - mean_a) ** 2 for a, _ in rates) * sum((b - mean_b) ** 2 for _, b in rates))
    if not spread:
        return 0.0
    correction = 0.5 * tasks / sum(map(len, first.values()))
    return (max(together - correction, 0.0) if together > 0 else together) / spread


def find_pass_at(outcomes: Outcomes, k: int) -> float | None:
    """Return pass@k: how likely one of k runs of a task passes, as the mean over the tasks; None if one has fewer runs.

    M. Chen et al., Evaluating Large Language Models Trained on Code, arXiv:2107.03374 (2021), equation 1.
    """
    counted = [(len(runs), sum(runs)) for runs in outcomes.values() if runs]
    if not counted or any(runs < k for runs, _ in counted):
        return None
    return fmean(1 - comb(runs - passed, k) / comb(runs, k) for runs, passed in counted)
