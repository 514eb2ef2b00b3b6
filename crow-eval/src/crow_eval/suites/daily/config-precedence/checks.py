import subprocess
import sys
from pathlib import Path

ORDER = """
import itertools
from settings import DEFAULTS, load

defaults = {"host": "localhost", "port": 8000, "retries": 3, "verbose": False}
assert load([], {}, {}) == defaults
assert DEFAULTS == defaults, "load must not change the defaults"
assert load(["--retries", "0"], {"SERVER_RETRIES": "5"}, {"retries": 4})["retries"] == 0
assert load([], {"SERVER_RETRIES": "0"}, {"retries": 4})["retries"] == 0
assert load([], {}, {"retries": 0})["retries"] == 0
assert load(["--host", ""], {"SERVER_HOST": "e"}, {"host": "f"})["host"] == ""
assert load([], {"SERVER_HOST": ""}, {"host": "f"})["host"] == "f", "an empty variable counts as not set"
assert load([], {"SERVER_PORT": ""}, {})["port"] == 8000
assert load([], {}, {"host": ""})["host"] == ""
for flag, variable, kept in itertools.product((None, "1"), (None, "2"), (None, 3)):
    argv = ["--port", flag] if flag else []
    environment = {"SERVER_PORT": variable} if variable else {}
    file = {"port": kept} if kept else {}
    wanted = int(flag or variable or kept or 8000)
    assert load(argv, environment, file)["port"] == wanted, (argv, environment, file)
for text, value in {"true": True, "FALSE": False, "1": True, "0": False, "Yes": True, "no": False}.items():
    assert load([], {"SERVER_VERBOSE": text}, {})["verbose"] is value, text
    assert load([], {"SERVER_VERBOSE": text}, {"verbose": not value})["verbose"] is value, text
assert load(["--no-verbose"], {"SERVER_VERBOSE": "1"}, {"verbose": True})["verbose"] is False
assert load(["--verbose"], {"SERVER_VERBOSE": "0"}, {"verbose": False})["verbose"] is True
assert load([], {}, {"verbose": True})["verbose"] is True
assert load(["--host", "h"], {"SERVER_PORT": "7"}, {"retries": 9, "verbose": True, "colour": "red"}) == {
    "host": "h", "port": 7, "retries": 9, "verbose": True
}
"""

ERRORS = """
from settings import load

for variable in ({"SERVER_PORT": "many"}, {"SERVER_VERBOSE": "maybe"}):
    try:
        load([], variable, {})
    except ValueError as error:
        assert [*variable][0] in str(error), f"{error!r} does not name the variable"
    else:
        raise AssertionError(f"{variable} is no error")
"""


def settings_win_in_the_right_order(workspace: Path, answer: str) -> None:
    run_code(workspace, ORDER)


def wrong_values_are_errors(workspace: Path, answer: str) -> None:
    run_code(workspace, ERRORS)


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
