"""Write a table of pass rates for docs/local-models.md from the results of evaluations.

    crow eval first-steps -m lab -m before --mode yolo --at-once 1 --json > lab.json
    uv run python scripts/local_models_table.py "crow=lab.json:current · lab" "pi=peers.json:pi"

Each argument is a label and a file: one of `crow eval --json`, or of `benchmarks/small_peers.py`. The name of a
variant or an agent in it stands behind a colon. Several files with the same label are joined. The rate is the mean of
the tasks' rates, with Wilson's interval of 95 %, in which several runs of a task count less than as many tasks.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from crow_eval.statistics import find_rate, find_rate_interval


def main() -> None:
    outcomes: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    seconds: dict[str, list[float]] = defaultdict(list)
    for argument in sys.argv[1:]:
        label, _, source = argument.partition("=")
        file, _, variant = source.partition(":")
        for cell in json.loads(Path(file).read_text("utf-8"))["cells"]:
            if cell["state"] in ("passed", "failed") and variant in ("", cell["variant"]):
                outcomes[label][cell["task"]].append(int(cell["state"] == "passed"))
                seconds[label].append(cell["seconds"] if "seconds" in cell else cell["total"] / 1000)
    print("| | tasks | runs | passed | rate | 95 % interval | seconds of a run (median) |")
    print("|---|---|---|---|---|---|---|")
    for label, tasks in outcomes.items():
        runs = [run for each in tasks.values() for run in each]
        within = find_rate_interval(tasks)
        numbers = (
            f"{len(tasks)} | {len(runs)} | {sum(runs)} | {find_rate(tasks):.0%} | {within.low:.0%} to {within.high:.0%}"
        )
        print(f"| {label} | {numbers} | {median(seconds[label]):.0f} |")


main()
