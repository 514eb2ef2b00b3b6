"""The statistics of evaluations, against values of scipy 1.16 and of the papers, and by simulated experiments."""

import os
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from random import Random

import pytest
from crow_eval.cells import Cell, EvaluationSettings, TaskName
from crow_eval.compared_prompts import PromptVersion
from crow_eval.evaluation_report import Comparison, make_report
from crow_eval.evaluation_store import Evaluation
from crow_eval.page import describe_comparison
from crow_eval.statistics import (
    Outcomes,
    adjust_p_values,
    compare_pairs,
    count_effective,
    find_pass_at,
    find_rate_interval,
    fisher,
    mcnemar,
)
from crow_persistence.intervals import wilson

EXPERIMENTS = 2_000 if os.environ.get("CROW_SOAK") else 100


@pytest.mark.parametrize(
    ("passed", "runs", "low", "high"),
    [
        (0, 10, 0.0, 0.27753279986288926),
        (7, 10, 0.39677814746114526, 0.892208732593699),
        (30, 30, 0.8864866068260312, 1.0),
        (81, 263, 0.2552885198782742, 0.36620957698280004),
        (1, 1, 0.20654931437723745, 1.0),
    ],
)
def test_wilson_interval_is_that_of_scipy(passed: int, runs: int, low: float, high: float) -> None:
    """`scipy.stats.binomtest(passed, runs).proportion_ci(method="wilson")`"""
    found = wilson(passed, runs)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize(
    ("table", "p_value"),
    [
        ((6, 0, 6, 0), 1.0),
        ((3, 1, 1, 3), 0.2428571428571429),
        ((7, 0, 0, 7), 1 / 3432),
        ((1, 4, 5, 2), 0.9924242424242424),
    ],
)
def test_fisher_s_p_value_is_that_of_scipy(table: tuple[int, int, int, int], p_value: float) -> None:
    """`scipy.stats.fisher_exact([[a, b], [c, d]], alternative="greater").pvalue`"""
    assert fisher(*table) == pytest.approx(p_value, abs=1e-12)


def test_wilson_interval_of_no_runs_is_everything() -> None:
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0, 1)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [(12, 2, 0.012939453125), (5, 5, 1.0), (0, 6, 0.03125), (8, 1, 0.0390625), (10, 3, 0.09228515625), (0, 0, 1.0)],
)
def test_mcnemar_is_the_binomial_test_of_scipy(only_a: int, only_b: int, p: float) -> None:
    """`scipy.stats.binomtest(min(only_a, only_b), only_a + only_b).pvalue`"""
    assert mcnemar(only_a, only_b) == mcnemar(only_b, only_a) == pytest.approx(p, abs=1e-12)


@pytest.mark.parametrize(
    ("runs", "passed", "k", "value"),
    [(5, 2, 1, 0.4), (10, 3, 5, 0.9166666666666666), (200, 13, 100, 0.9999194971988055), (4, 4, 2, 1), (6, 0, 3, 0)],
)
def test_pass_at_k_is_the_unbiased_estimate(runs: int, passed: int, k: int, value: float) -> None:
    """`1 - scipy.special.comb(runs - passed, k) / scipy.special.comb(runs, k)`"""
    assert find_pass_at({"a": [1] * passed + [0] * (runs - passed)}, k) == pytest.approx(value, abs=1e-12)


def test_pass_at_k_is_unknown_with_fewer_runs() -> None:
    assert find_pass_at({"a": [1, 0, 1], "b": [1]}, 2) is None
    assert find_pass_at({}, 1) is None


def make_pairs(both: int, only_a: int, only_b: int, neither: int) -> tuple[Outcomes, Outcomes]:
    """Make the outcomes of two variants, one run of each task."""
    rows = list(chain(repeat((1, 1), both), repeat((1, 0), only_a), repeat((0, 1), only_b), repeat((0, 0), neither)))
    first = {str(number): [a] for number, (a, _) in enumerate(rows)}
    return first, {str(number): [b] for number, (_, b) in enumerate(rows)}


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [
        ((1, 1, 7, 12), 0.0256, 0.5069),  # Bentur et al. 2009, in Fagerland, Lydersen, Laake 2014, table VIII
        ((36, 12, 2, 0), -0.3404, -0.0569),  # Newcombe 1998, table II, with the sign of B less A
    ],
)
def test_paired_interval_is_that_of_the_papers(counts: tuple[int, int, int, int], low: float, high: float) -> None:
    found = compare_pairs(*make_pairs(*counts))
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high), abs=1e-4)
    assert (found.only_a, found.only_b, found.pairs) == (counts[1], counts[2], sum(counts))


def test_runs_of_the_same_task_tell_less_than_as_many_tasks() -> None:
    alike: Outcomes = {str(n): [n % 2] * 5 for n in range(20)}
    apart: Outcomes = {str(n): [1, 0, 1, 0] for n in range(20)}
    assert count_effective(alike) == 20
    assert count_effective(apart) == 80
    wide, narrow = find_rate_interval(alike), find_rate_interval(apart)
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)


def test_pairs_without_a_task_in_common_say_nothing() -> None:
    found = compare_pairs({"a": [1]}, {"b": [0]})
    assert (found.pairs, found.p_value) == (0, 1)
    assert (found.interval.low, found.interval.high) == (-1, 1)


def experiment(random: Random, tasks: int, runs: int, draw: Callable[[Random], float], gain: float = 0.0) -> bool:
    """Run two variants, of which the second passes more often by `gain`; return whether the interval has zero."""
    first: Outcomes = {}
    second: Outcomes = {}
    for number in range(tasks):
        rate = draw(random)
        first[str(number)] = [int(random.random() < rate) for _ in range(runs)]
        second[str(number)] = [int(random.random() < rate + gain) for _ in range(runs)]
    interval = compare_pairs(first, second).interval
    return interval.low <= 0 <= interval.high


@pytest.mark.parametrize(("tasks", "runs"), [(30, 1), (30, 5), (100, 3)])
@pytest.mark.parametrize("draw", [lambda _: 0.5, lambda random: random.random()], ids=["equal", "any difficulty"])
def test_interval_covers_zero_without_a_difference(tasks: int, runs: int, draw: Callable[[Random], float]) -> None:
    """At 95 % or more, less four standard errors of the simulation and one point, as the interval is approximate."""
    random = Random(20)
    coverage = sum(experiment(random, tasks, runs, draw) for _ in range(EXPERIMENTS)) / EXPERIMENTS
    print(f"coverage {coverage:.4f} of {EXPERIMENTS} experiments")
    assert coverage >= 0.94 - 4 * (0.05 * 0.95 / EXPERIMENTS) ** 0.5


def test_interval_finds_a_difference_that_is_there() -> None:
    random = Random(20)
    missed = sum(experiment(random, 50, 3, lambda random: random.random() * 0.6, gain=0.3) for _ in range(EXPERIMENTS))
    assert missed <= EXPERIMENTS * 0.05


def test_corrected_p_values_are_those_of_holm() -> None:
    """The values of R: p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")."""
    assert adjust_p_values([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_p_values([0.03]) == [0.03]
    assert adjust_p_values([]) == []
    assert adjust_p_values([0.9, 0.8]) == [1.0, 1.0]


def play(random: Random, rates: Sequence[float], tasks: int, runs: int) -> list[Comparison]:
    """Run an evaluation of two prompts and two models with these pass rates; return its comparisons."""
    settings = EvaluationSettings(
        tasks=[TaskName(f"task-{n:02}", "d") for n in range(tasks)],
        prompts=[PromptVersion("old", "system", "a"), PromptVersion("new", "system", "b")],
        models=["small", "large"],
        names=["small", "large"],
        repeat=runs,
        mode="yolo",
        crow="0.1.0",
    )
    cells = [
        Cell(
            task=task.id,
            variant=variant.number,
            repetition=repetition,
            state="passed" if random.random() < rates[variant.number] else "failed",
        )
        for task in settings.tasks
        for variant in settings.variants
        for repetition in range(1, runs + 1)
    ]
    return make_report(Evaluation(1, "ab" * 16, "/tasks", settings, 0, None, cells)).comparisons


@pytest.mark.parametrize(("tasks", "runs"), [(30, 1), (20, 3)])
def test_a_report_without_a_difference_says_so_in_95_of_100_evaluations(tasks: int, runs: int) -> None:
    """Any false verdict among the four comparisons of a report counts; four standard errors for the simulation."""
    random = Random(7)
    times = 4 * EXPERIMENTS
    wrong = sum(any(each.better for each in play(random, [0.6] * 4, tasks, runs)) for _ in range(times))
    print(f"{wrong} of {times} reports have a false verdict")
    assert wrong <= times * (0.05 + 4 * (0.05 * 0.95 / times) ** 0.5)


def test_words_agree_with_the_p_value() -> None:
    random, words = Random(11), set[str]()
    for gain in (0.0, 0.15, 0.4):
        for each in (one for _ in range(40) for one in play(random, [0.4, 0.4, 0.4 + gain, 0.4 + gain], 20, 2)):
            words.add(said := describe_comparison(each).rpartition("passes")[1])
            assert (said == "passes") == (each.adjusted_p < 0.05)
            assert each.adjusted_p >= each.pairs.p_value
    assert words == {"passes", ""}, "both verdicts occur"


def test_a_planted_difference_is_still_found() -> None:
    comparisons = play(Random(3), [0.2, 0.2, 0.9, 0.9], 30, 3)
    assert [each.better.split(" ")[0] for each in comparisons] == ["new", "new", "", ""]
