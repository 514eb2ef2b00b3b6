import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

RIGHT = Path(__file__).parent / "files" / "bookings.py"

REWRITTEN = """
class Conflict(Exception):
    pass


class Room:
    def __init__(self, opens=8, closes=18):
        self.hours = {hour: None for hour in range(opens, closes)}
        self.number = 0

    def book(self, name, start, end):
        wanted = range(start, end)
        if not wanted or any(hour not in self.hours for hour in wanted):
            raise ValueError("these are no hours of the room")
        if any(self.hours[hour] for hour in wanted):
            raise Conflict("taken")
        self.number += 1
        self.hours.update(dict.fromkeys(wanted, (self.number, name, start, end)))

    def cancel(self, name):
        mine = [hour for hour, booking in self.hours.items() if booking and booking[1] == name]
        bookings = {self.hours[hour] for hour in mine}
        self.hours.update(dict.fromkeys(mine))
        return len(bookings)

    def plan(self):
        bookings = dict.fromkeys(booking for booking in self.hours.values() if booking)
        return [(start, end, name) for _, name, start, end in bookings]

    def gaps(self):
        found = []
        for hour, booking in self.hours.items():
            if booking is None and found and found[-1][1] == hour:
                found[-1] = (found[-1][0], hour + 1)
            elif booking is None:
                found.append((hour, hour + 1))
        return found
"""

BUGS = {
    "a booking may begin where another ends": (
        "start < taken_end and taken_start < end",
        "start <= taken_end and taken_start < end",
    ),
    "a booking may end where another begins": (
        "start < taken_end and taken_start < end",
        "start < taken_end and taken_start <= end",
    ),
    "a booking around another one conflicts": (
        "start < taken_end and taken_start < end",
        "taken_start <= start < taken_end or taken_start < end <= taken_end",
    ),
    "a booking inside another one conflicts": (
        "start < taken_end and taken_start < end",
        "start <= taken_start < end or start < taken_end <= end",
    ),
    "an empty booking is an error": ("if start >= end", "if start > end"),
    "the opening hour can be booked": ("start < self.opens", "start <= self.opens"),
    "hours before the opening are an error": ("start < self.opens or ", ""),
    "the last hour can be booked": ("end > self.closes", "end >= self.closes"),
    "hours after the closing are an error": (" or end > self.closes", ""),
    "a booking that fails changes nothing": (
        "        for taken_start, taken_end, _ in self.bookings:\n",
        "        self.bookings.append((start, end, name))\n"
        "        for taken_start, taken_end, _ in self.bookings[:-1]:\n",
    ),
    "cancel returns how many bookings it took away": (
        "return before - len(self.bookings)",
        "return int(before > len(self.bookings))",
    ),
    "cancel leaves the bookings of others": ("if booking[2] != name", "if name not in booking[2]"),
    "the plan is in the order of the day": ("return sorted(self.bookings)", "return list(self.bookings)"),
    "there may be a gap in the morning": ("last = self.opens", "last = min(self.bookings, default=(self.opens,))[0]"),
    "there may be a gap in the evening": ("if last < self.closes", "if last < self.closes and not self.bookings"),
    "there is no gap between bookings that touch": ("if last < start", "if last <= start"),
}
"""Each rule with a change of the right code that breaks it."""


def tests_pass_on_right_code(workspace: Path, answer: str) -> None:
    right = RIGHT.read_text("utf-8")
    assert read(workspace / "bookings.py") == right, "bookings.py has changed"
    for code in (right, REWRITTEN):
        passed, output = run_tests(workspace, code)
        assert passed, output[-2000:]


def tests_fail_on_each_bug(workspace: Path, answer: str) -> None:
    right = RIGHT.read_text("utf-8")
    assert any(workspace.glob("test*.py")), "there are no tests"
    missed: list[str] = []
    for rule, (old, new) in BUGS.items():
        if run_tests(workspace, right.replace(old, new))[0]:
            missed.append(rule)
    assert not missed, f"no test fails where this is broken: {'; '.join(missed)}"


def run_tests(workspace: Path, code: str) -> tuple[bool, str]:
    """Run the tests of the workspace on some code; return whether at least one ran and all passed, and the output."""
    with TemporaryDirectory() as folder:
        for path in workspace.glob("test*.py"):
            shutil.copy(path, folder)
        Path(folder, "bookings.py").write_text(code, "utf-8")
        command = [sys.executable, "-BS", "-m", "unittest"]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", timeout=60
            )
        except subprocess.TimeoutExpired:
            return False, "the tests did not end within 60 seconds"
    return done.returncode == 0 and bool(re.search(r"^Ran [1-9]", done.stderr, re.MULTILINE)), done.stderr


def read(path: Path) -> str:
    """Read a file of the workspace; raise AssertionError where it is absent, or is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise AssertionError(f"{path.name} cannot be read: {error}") from None
