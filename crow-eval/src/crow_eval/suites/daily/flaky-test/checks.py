import os
import subprocess
import sys
from pathlib import Path

CODE = """
from tags import headline, most_used, slug

assert slug(["Tea", "Milk", "tea", "Rice"]) == "tea-milk-rice"
assert slug(["zeta", "Alpha", "mid", "ALPHA", "omega", "beta"]) == "zeta-alpha-mid-omega-beta"
assert slug([]) == ""
assert headline(["milk", "tea", "milk"]) == "Milk, Tea"
assert headline(["e", "d", "c", "b", "a", "e"]) == "E, D, C, B, A"
assert most_used(["tea", "milk", "tea"]) == "tea"
assert most_used(["rice", "Milk", "tea", "milk", "Tea"]) == "milk"
assert most_used(["f", "e", "d", "c", "b", "a"]) == "a"
"""


def results_are_always_the_same(workspace: Path, answer: str) -> None:
    """Run with several seeds of the hashes of strings, on which the order of a set depends."""
    for seed in range(4):
        run_code(workspace, CODE, PYTHONHASHSEED=str(seed))


def run_code(workspace: Path, code: str, **variables: str) -> None:
    """Run code in the workspace, in a process of its own, with more environment variables; raise AssertionError
    unless it reaches its end."""
    command = [sys.executable, "-BS", "-c", code + "\nprint('reached the end')"]
    try:
        env = os.environ | variables
        done = subprocess.run(
            command, cwd=workspace, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=60
        )
    except subprocess.TimeoutExpired:
        raise AssertionError("the code did not end within 60 seconds") from None
    assert done.stdout.endswith("reached the end\n"), done.stderr[-2000:]
