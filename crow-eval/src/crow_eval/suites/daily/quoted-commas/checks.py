import subprocess
import sys
from pathlib import Path

CODE = r"""
import tempfile
from pathlib import Path
from orders import load_orders, total_quantity

path = Path(tempfile.mkdtemp()) / "orders.csv"


def load(text):
    path.write_bytes(text.encode())
    return load_orders(path)


def order(customer, article, quantity):
    return {"customer": customer, "article": article, "quantity": quantity}


assert load("customer,article,quantity\nAnn,tea,2\nBob,milk,1\n") == [order("Ann", "tea", 2), order("Bob", "milk", 1)]
assert load("customer,article,quantity\n") == []
assert load('customer,article,quantity\n"Miller, Jane",tea,3\n') == [order("Miller, Jane", "tea", 3)]
assert load('customer,article,quantity\nAnn,"tea, ""green"", loose","4"\n') == [order("Ann", 'tea, "green", loose', 4)]
assert load('customer,article,quantity\r\n"Ann","two\nlines",5\r\nBob,,6\r\n') == [
    order("Ann", "two\nlines", 5),
    order("Bob", "", 6),
]
assert load('quantity,"customer",article\n7,"A, B","c"\n') == [order("A, B", "c", 7)]
assert total_quantity(load('customer,article,quantity\n"a,b",c,1\nd,"e,f",20\n')) == 21
path.unlink()
path.parent.rmdir()
"""


def orders_are_read(workspace: Path, answer: str) -> None:
    run_code(workspace, CODE)


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
