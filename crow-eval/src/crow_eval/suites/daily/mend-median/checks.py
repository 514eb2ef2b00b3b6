import subprocess
import sys
from pathlib import Path

CODE = """
from stats import mean, median, spread

assert mean([1, 2, 6]) == 3
assert median([5, 1, 3]) == 3
assert median([4, 1, 3, 2]) == 2.5
assert median([7]) == 7
assert median([10, 20]) == 15
assert median([-5, -1, -3, 8, 0, 2]) == -0.5
assert spread([3, 9, 4]) == 6

values = [9, 1, 5]
median(values)
assert values == [9, 1, 5], "median must not change its argument"
for function in (mean, median, spread):
    try:
        function([])
    except ValueError:
        pass
    else:
        raise AssertionError(f"{function.__name__} of nothing raises ValueError")
"""


def functions_are_right(workspace: Path, answer: str) -> None:
    run_code(workspace, CODE)


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
