"""Measure the CPU time of reading a command for permissions: the first, which loads tables and parser, and later ones.

uv run benchmarks/permissions.py
"""

from collections.abc import Callable
from time import process_time

from crow_permissions.command_tables import get_tables
from crow_permissions.compositions import read_composition
from crow_permissions.simple_commands import read_command_line

COMMANDS = [
    "git status",
    "git status && git diff 2>&1 | head -20",
    "grep -rn 'a b' src | sort | wc -l > out.txt",
    "docker compose -f a.yml run --rm service bash -c 'cd a && npm test'",
    "echo " + "a b; echo " * 500 + "c",
]


def measure(run: Callable[[], object], times: int) -> float:
    """Return the CPU time of a call in microseconds."""
    start = process_time()
    for _ in range(times):
        run()
    return (process_time() - start) / times * 1e6


def read(command: str) -> None:
    """Read a command for the rules that deny, and for those that allow, as if it was new."""
    read_command_line.cache_clear()
    read_composition.cache_clear()
    read_command_line(command)
    read_composition(command)


def main() -> None:
    print(f"{measure(get_tables, 1):10.0f} µs  the tables, once")
    print(f"{measure(lambda: read('ls | wc'), 1):10.0f} µs  the parser, once")
    for command in COMMANDS:
        print(f"{measure(lambda command=command: read(command), 200):10.0f} µs  {command[:60]}")


if __name__ == "__main__":
    main()
