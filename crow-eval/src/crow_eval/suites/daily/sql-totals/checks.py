import subprocess
import sys
from pathlib import Path

SCHEMA = (Path(__file__).parent / "files" / "schema.sql").read_text("utf-8")

CODE = """
import random, sqlite3
from report import report

CITIES = ["Rome", "L'Aquila", "", 'No "city"', "rome"]


def expected(city, customers, orders, items, payments):
    '''Compute the report without SQL.'''
    rows = []
    for customer, name, place in customers:
        if place == city:
            mine = [order for order, owner, state in orders if owner == customer and state != "cancelled"]
            cost = sum(pieces * price for order, pieces, price in items if order in mine)
            paid = sum(amount for owner, amount in payments if owner == customer)
            rows.append((name, len(mine), cost, paid, cost - paid))
    return sorted(rows, key=lambda row: (-row[4], row[0]))


def check(*tables):
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    for table, rows in zip(("customers", "orders", "items", "payments"), tables):
        for row in rows:
            marks = ", ".join("?" * len(row))
            columns = "(customer, amount)" if table == "payments" else "(purchase, pieces, price)" * (table == "items")
            connection.execute(f"INSERT INTO {table} {columns} VALUES ({marks})", row)
    for city in CITIES:
        rows = [tuple(row) for row in report(connection, city)]
        assert rows == expected(city, *tables), (city, rows, expected(city, *tables))
    connection.close()


check([], [], [], [])
check([(1, "Ann", "Rome")], [], [], [])
check([(1, "Ann", "Rome")], [], [], [(1, 50)])
check([(1, "Ann", "Rome"), (2, "Ann", "Rome")], [(1, 1, "sent"), (2, 2, "sent")], [(1, 1, 10), (2, 1, 10)], [])
check(
    [(1, "Ann", "Rome"), (2, "Bob", "L'Aquila"), (3, "Cem", "Rome"), (4, "Dora", "Rome")],
    [(1, 1, "sent"), (2, 1, "new"), (3, 1, "cancelled"), (4, 2, "sent"), (5, 3, "new")],
    [(1, 2, 100), (1, 1, 50), (2, 1, 300), (3, 9, 900), (4, 3, 70)],
    [(1, 100), (1, 100), (1, 20), (2, 10), (4, 5)],
)
dice = random.Random(3)
for _ in range(25):
    customers = [(number, dice.choice("ABCDEFG"), dice.choice(CITIES)) for number in range(1, 7)]
    orders = [
        (number, dice.randint(1, 6), dice.choice(["new", "sent", "sent", "cancelled"])) for number in range(1, 9)
    ]
    items = [(dice.randint(1, 8), dice.randint(1, 3), dice.choice([10, 20, 25])) for _ in range(dice.randrange(14))]
    payments = [(dice.randint(1, 6), dice.choice([10, 20, 30])) for _ in range(dice.randrange(10))]
    check(customers, orders, items, payments)
"""


def report_is_right(workspace: Path, answer: str) -> None:
    run_code(workspace, f"SCHEMA = {SCHEMA!r}\n{CODE}")


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
