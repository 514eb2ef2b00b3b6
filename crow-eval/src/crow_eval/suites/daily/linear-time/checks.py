import subprocess
import sys
from pathlib import Path

RESULTS = """
import random
from ids import common, unique

assert unique([]) == []
assert unique([3, 1, 3, 2, 1]) == [3, 1, 2]
assert unique(["b", "a", "b"]) == ["b", "a"]
assert unique(iter("hello")) == ["h", "e", "l", "o"]
assert common([], [1]) == []
assert common([1, 2, 2, 3], [2, 3, 3, 4]) == [2, 3]
assert common(["c", "a", "b", "a"], ["a", "c"]) == ["c", "a"]
dice = random.Random(1)
for _ in range(50):
    left, right = ([dice.randrange(20) for _ in range(dice.randrange(30))] for _ in range(2))
    before = list(left), list(right)
    assert unique(left) == [item for place, item in enumerate(left) if item not in left[:place]]
    assert common(left, right) == [
        item for place, item in enumerate(left) if item in right and item not in left[:place]
    ]
    assert (left, right) == before, "the arguments must not change"
"""

COMPARISONS = """
from ids import common, unique


class Id:
    comparisons = 0

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        Id.comparisons += 1
        return self.number == other.number

    def __lt__(self, other):
        Id.comparisons += 1
        return self.number < other.number


def ids(start, stop):
    return [Id(number) for number in range(start, stop)]


def count(function, *arguments):
    Id.comparisons = 0
    function(*arguments)
    return Id.comparisons


length = 400
for function, arguments in (
    (unique, [ids(0, length)]),
    (unique, [ids(0, length) + ids(0, length)]),
    (common, [ids(0, length), ids(length, 2 * length)]),
    (common, [ids(0, length), ids(0, length)[::-1]]),
    (common, [ids(0, length) * 2, ids(length // 2, length) * 2]),
):
    comparisons = count(function, *arguments)
    assert comparisons <= 10 * length, f"{function.__name__} compares {comparisons} times for {length} ids"
"""


def results_are_the_same(workspace: Path, answer: str) -> None:
    run_code(workspace, RESULTS)


def comparisons_grow_linearly(workspace: Path, answer: str) -> None:
    """Count comparisons of ids: a quadratic function makes at least 79,800, a linear one some 1,000."""
    run_code(workspace, COMPARISONS)


def run_code(workspace: Path, code: str) -> None:
    """Run code in the workspace, in a process of its own; raise AssertionError unless it reaches its end."""
    command = [sys.executable, "-BS", "-c", code + "\nprint('reached the end')"]
    try:
        done = subprocess.run(
            command, cwd=workspace, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("the code did not end within 60 seconds") from None
    assert done.stdout.endswith("reached the end\n"), done.stderr[-2000:]
