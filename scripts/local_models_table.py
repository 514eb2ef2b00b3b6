"""Write a table of pass rates for docs/local-models.md from the results of evaluations.

    crow eval first-steps --model lab --mode yolo --at-once 1 --json > lab.json
    uv run python scripts/local_models_table.py "crow, schema=lab.json" "vibe=peers.json:vibe"

Each argument is a label and a file: one of `crow eval --json`, or of `benchmarks/small_peers.py` with the agent's name
behind a colon. Several files with the same label are joined. The intervals are Wilson's, with 95 %.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import NormalDist


def find_wilson_interval(passed: int, runs: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's interval of a rate."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (passed + z * z / 2) / (runs + z * z)
    half = z / (runs + z * z) * (passed * (runs - passed) / runs + z * z / 4) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def main() -> None:
    outcomes: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for argument in sys.argv[1:]:
        label, _, source = argument.partition("=")
        file, _, agent = source.partition(":")
        for cell in json.loads(Path(file).read_text("utf-8"))["cells"]:
            if cell["state"] in ("passed", "failed") and agent in ("", cell["variant"]):
                outcomes[label].append((cell["task"], cell["state"] == "passed"))
    print("| | tasks | runs | passed | rate | 95 % interval |\n|---|---|---|---|---|---|")
    for label, cells in outcomes.items():
        passed, runs = sum(done for _, done in cells), len(cells)
        low, high = find_wilson_interval(passed, runs)
        tasks = len({task for task, _ in cells})
        print(f"| {label} | {tasks} | {runs} | {passed} | {passed / runs:.0%} | {low:.0%} to {high:.0%} |")


main()
