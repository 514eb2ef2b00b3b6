import ast
import re
import subprocess
import sys
from pathlib import Path

CODE = """
import subprocess, sys
from shop import cart, catalog, discounts

assert catalog.unit_price("tea") == 350
assert catalog.get_price_list() == {"tea": 350, "milk": 120, "rice": 275}
assert cart.total({"tea": 2, "rice": 3}) == 1525
assert cart.articles() == ["milk", "rice", "tea"]
assert discounts.reduced_price("rice", 20) == 220
assert not hasattr(catalog, "get_price")
for command, output in (
    (["get_price", "milk"], "120\\n"),
    (["get_price_list"], "milk 120\\nrice 275\\ntea 350\\n"),
):
    done = subprocess.run([sys.executable, "-BS", "-m", "shop.shell", *command], capture_output=True, text=True)
    assert done.stdout == output, (command, done.stdout, done.stderr)
done = subprocess.run([sys.executable, "-BS", "-m", "shop.shell", "unit_price", "milk"], capture_output=True, text=True)
assert done.returncode != 0, "the command keeps its name"
"""


def old_name_is_gone(workspace: Path, answer: str) -> None:
    for path in workspace.rglob("*.py"):
        for node in ast.walk(parse(path)):
            names = [getattr(node, field, None) for field in ("id", "attr", "name", "asname", "arg")]
            assert "get_price" not in names, f"{path.name} uses get_price"
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != "get_price":
                assert not re.search(r"\bget_price\b", node.value), f"{path.name} has get_price in a text"


def shop_works_as_before(workspace: Path, answer: str) -> None:
    run_code(workspace, CODE)


def readme_names_function_and_command(workspace: Path, answer: str) -> None:
    text = read(workspace / "README.md")
    assert "get_price(" not in text, "the README has the old name"
    assert "unit_price(" in text, "the README has not the new name"
    assert "shop.shell get_price tea" in text
    assert "get_price_list()" in text


def parse(path: Path) -> ast.Module:
    """Parse a file of the workspace; raise AssertionError where it is absent, or is not Python."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise AssertionError(f"{path.name} cannot be parsed: {error}") from None


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
