import subprocess
import sys
from pathlib import Path

START = """
import threading, time
from bank import Bank, Store


class SlowStore(Store):
    def read(self, name):
        amount = super().read(name)
        time.sleep(0.0005)
        return amount


def run_threads(*functions):
    '''Run functions in threads, at most for 20 seconds.'''
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    for thread in threads:
        thread.join(max(0, until - time.monotonic()))
        assert not thread.is_alive(), "a transfer hangs"
"""

RULES = """
bank = Bank(Store({"ann": 100, "bob": 50}))


def refused(*arguments):
    try:
        bank.transfer(*arguments)
    except ValueError:
        return True


def check():
    bank.transfer("ann", "bob", 30)
    assert (bank.balance("ann"), bank.balance("bob")) == (70, 80)
    assert refused("ann", "bob", 71)
    assert refused("ann", "bob", 0)
    assert refused("ann", "bob", -5)
    assert (bank.balance("ann"), bank.balance("bob")) == (70, 80)
    bank.transfer("ann", "ann", 70)
    assert refused("ann", "ann", 71)
    assert (bank.balance("ann"), bank.balance("bob")) == (70, 80)
    for names in (("ann", "eve"), ("eve", "ann")):
        try:
            bank.transfer(*names, 1)
        except KeyError:
            pass
        else:
            raise AssertionError("an unknown account raises KeyError")
    bank.transfer("ann", "bob", 70)
    assert (bank.balance("ann"), bank.balance("bob"), bank.total()) == (0, 150, 150)
    done.append(True)


done = []
run_threads(check)
assert done
"""

MONEY = """
names = ["a", "b", "c"]
bank = Bank(SlowStore(dict.fromkeys(names, 1000)))


def move(source, target):
    for _ in range(10):
        bank.transfer(source, target, 5)


pairs = [(source, target) for source in names for target in names]
run_threads(*[lambda pair=pair: move(*pair) for pair in pairs])
assert {name: bank.balance(name) for name in names} == dict.fromkeys(names, 1000)

bank = Bank(SlowStore({"rich": 100, "poor": 0}))
refusals = []


def take():
    for _ in range(4):
        try:
            bank.transfer("rich", "poor", 10)
        except ValueError:
            refusals.append(1)


run_threads(*[take] * 4)
assert (bank.balance("rich"), bank.balance("poor"), len(refusals)) == (0, 100, 6)
"""

TOGETHER = """
meeting = threading.Barrier(2)


class MeetingStore(Store):
    '''Let both transfers go on only when both are under way.'''

    def write(self, name, amount):
        if name in ("a", "c"):
            meeting.wait(10)
        super().write(name, amount)


bank = Bank(MeetingStore({"a": 10, "b": 0, "c": 10, "d": 0}))
run_threads(lambda: bank.transfer("a", "b", 1), lambda: bank.transfer("c", "d", 2))
assert not meeting.broken, "a transfer waits for one of other accounts"
assert [bank.balance(name) for name in "abcd"] == [9, 1, 8, 2]
"""


def rules_are_kept(workspace: Path, answer: str) -> None:
    run_code(workspace, START + RULES)


def no_money_is_lost(workspace: Path, answer: str) -> None:
    run_code(workspace, START + MONEY)


def other_transfers_do_not_wait(workspace: Path, answer: str) -> None:
    run_code(workspace, START + TOGETHER)


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
