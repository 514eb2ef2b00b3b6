import subprocess
import sys
from pathlib import Path

FILES = Path(__file__).parent / "files"

CODE = """
from vendor import mailer
import notify, reports

orders = [
    {"number": 7, "mail": "ann@example.org", "days_late": 3},
    {"number": 8, "mail": "bob@example.invalid", "days_late": 1},
    {"number": 9, "mail": "cem@example.org", "days_late": 0},
    {"number": 10, "mail": "dora@example.org", "days_late": 12},
]
assert notify.notify_late(orders) == ["bob@example.invalid"]
assert mailer.DELIVERED == [
    ("shop@example.org", mailer.Message(("ann@example.org",), "Order 7 is late", "It is 3 days late.")),
    ("shop@example.org", mailer.Message(("dora@example.org",), "Order 10 is late", "It is 12 days late.")),
], mailer.DELIVERED
mailer.DELIVERED.clear()
assert notify.notify_late([]) == []

totals = {"tea": 3, "milk": 10}
assert reports.send_report(totals, "ann@example.org, bob@example.org,cem@example.org") is True
[(sender, message)] = mailer.DELIVERED
assert sender == "reports@example.org"
assert message.recipients == ("ann@example.org", "bob@example.org", "cem@example.org"), message
assert message.subject == "Report"
assert message.text == "milk: 10\\ntea: 3"
assert message.html == "<pre>milk: 10\\ntea: 3</pre>"
mailer.DELIVERED.clear()
assert reports.send_report(totals, "ann@example.org,x@example.invalid") is False
assert mailer.DELIVERED == []
try:
    reports.send_report({}, "ann@example.org")
except ValueError:
    pass
else:
    raise AssertionError("a report without totals raises ValueError")
"""


def mails_are_sent(workspace: Path, answer: str) -> None:
    run_code(workspace, CODE)


def library_is_unchanged(workspace: Path, answer: str) -> None:
    original = (FILES / "vendor" / "mailer.py").read_text("utf-8")
    assert read(workspace / "vendor" / "mailer.py") == original, "vendor/mailer.py has changed"


def read(path: Path) -> str:
    """Read a file of the workspace; raise AssertionError where it is absent, or is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise AssertionError(f"{path.name} cannot be read: {error}") from None


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
