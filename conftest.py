"""Options and hooks for the tests of all packages.

Tests that take long by nature are marked `slow`. Of a test marked `sampled(n)`, every n-th case runs; the others count
as slow. These are skipped, unless `--slow` or the variable CROW_TEST_ALL=1 asks for them, which `.ci/run` sets.
CROW_TEST_ALL=1 also turns skips for lack of a program into failures, and runs property tests with all their examples.
Tests marked `posix(reason)` are skipped on Windows.
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

if sys.platform == "win32":  # without pseudo-terminals, these cannot be imported
    collect_ignore = ["crow-cli/tests/test_chat.py", "crow-terminal/tests"]

TEST_ALL = os.environ.get("CROW_TEST_ALL") == "1"

settings.register_profile("quick", settings.get_profile("ci"), max_examples=20)
settings.load_profile("ci" if TEST_ALL else "quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", default=TEST_ALL, help="run the tests that are marked slow, too")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Choose the number of workers: none for a single file, else one more than processors, as many tests wait.

    Workers take longer to start than most files take to run.
    """
    if len(config.args) == 1 and Path(config.args[0].partition("::")[0]).is_file():
        return 0
    return min(8, len(os.sched_getaffinity(0)) + 1) if hasattr(os, "sched_getaffinity") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a `sampled` test that a quick run leaves out as slow."""
    cases: Counter[str] = Counter()
    for item in items:
        if sampled := item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            if cases[name] % sampled.args[0]:
                item.add_marker("slow")
            cases[name] += 1


@pytest.fixture(scope="session", autouse=True)
def inherited_signals() -> Iterator[None]:
    """Let programs that tests start receive SIGINT and SIGHUP, which are ignored under `nohup` and in the background.

    Programs inherit that a signal is ignored, but not a handler.
    """
    names = ("SIGINT", "SIGHUP")
    ignored = [number for name in names if (number := getattr(signal, name, None)) and is_ignored(number)]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else do_nothing)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def do_nothing(number: int, frame: object) -> None: ...


def is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.config.getoption("slow"):
        pytest.skip("slow; `uv run pytest --slow` runs it, and so does .ci/run")
    if sys.platform == "win32" and (posix := item.get_closest_marker("posix")):
        pytest.skip(f"not on Windows: {posix.args[0]}")
