"""Measure what the sandbox adds to a command, and the time of reading and applying its changes, beside bare runs.

uv run benchmarks/sandbox.py [--runs 40]
"""

import argparse
import asyncio
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from crow_sandbox.policy import Policy
from crow_sandbox.sandbox import Sandbox

SHELL = "/bin/bash"
SMALL, LARGE = 10, 20_000
"""Files of the two folders, one of which is larger than what a command changes."""


def time_ms(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return (perf_counter() - start) * 1000


def start(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
    subprocess.run(arguments, env=env, cwd=cwd, check=True)


def make_folder(place: Path, files: int) -> Path:
    for number in range(files):
        folder = place / str(number // 100)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.txt").write_text("one\n")
    return place


async def measure(folder: Path, sandbox: Sandbox, command: str, runs: int) -> dict[str, float]:
    """Return the medians in milliseconds of the parts of a reviewed command, and of a bare one."""
    env, times = dict(os.environ), dict[str, list[float]]()

    def add(part: str, run: Callable[[], object]) -> None:
        times.setdefault(part, []).append(time_ms(run))

    policy = Policy("review", (str(folder),))
    for _ in range(runs):
        add("bare", lambda: start([SHELL, "-c", "true"], env, folder))
        begin = perf_counter()
        run = await sandbox.begin(policy)
        arguments, changed = run.wrap([SHELL, "-c", command], env, str(folder), ())
        begun = (perf_counter() - begin) * 1000
        times.setdefault("begin and wrap", []).append(begun)
        add("run", lambda arguments=arguments, changed=changed: start(arguments, changed, folder))
        add("read changes", run.read_changes)
        add("apply", lambda run=run: run.apply(run.read_changes()))
        add("remove", run.remove)
    return {part: median(values) for part, values in times.items()}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        place = Path(name)
        sandbox = Sandbox(place / "sandbox")
        print((await sandbox.prove("review")).says)
        for files in (SMALL, LARGE):
            folder = make_folder(place / str(files), files)
            for command in ("true", "for n in $(seq 100); do echo $RANDOM > new$n.txt; done"):
                found = await measure(folder, sandbox, command, runs)
                over = found["begin and wrap"] + found["run"] + found["read changes"] + found["remove"] - found["bare"]
                parts = ", ".join(f"{part} {value:.1f}" for part, value in found.items())
                print(f"{files:>6} files, {command[:20]:20}  {over:6.1f} ms over bare: {parts}")
        await sandbox.close()


if __name__ == "__main__":
    asyncio.run(main())
