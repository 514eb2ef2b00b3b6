"""Confidence intervals of rates."""

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float


def wilson(passed: float, runs: float, confidence: float = 0.95) -> Interval:
    """Return the score interval of a rate. `runs` may be an effective number of runs; the interval of none is 0 to 1.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927), 209-212.
    """
    if runs <= 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = passed / runs
    center = (rate + z * z / (2 * runs)) / (1 + z * z / runs)
    half = z / (1 + z * z / runs) * sqrt(rate * (1 - rate) / runs + z * z / (4 * runs * runs))
    low = 0.0 if passed == 0 else max(center - half, 0.0)
    return Interval(low, 1.0 if passed == runs else min(center + half, 1.0))
