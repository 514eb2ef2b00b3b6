import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ORIGINAL = (Path(__file__).parent / "files" / "export.py").read_text("utf-8")

CODE = """
import random
from export import as_csv, as_html, as_markdown

original = {}
exec(compile(ORIGINAL, "original.py", "exec"), original)
functions = (as_csv, as_html, as_markdown)


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return type(error), str(error)


dice = random.Random(5)
sales = [[]]
for _ in range(60):
    sales.append([
        {
            "region": dice.choice(["North", "south", "", None, "a|b", "<x>", 'say "hi", you', "  East "]),
            "pieces": dice.randint(-2, 9),
            "price": dice.choice([0, 5, 2.5, 19.99]),
            "returned": dice.random() < 0.2,
        }
        for _ in range(dice.randrange(9))
    ])
sales.append([{"region": "North", "pieces": 1}])
sales.append([{"region": "North", "pieces": 1, "price": 2}])
for rows in sales:
    for minimum in (0, 10):
        for function in functions:
            before = repr(rows)
            wanted = outcome(original[function.__name__], rows, minimum)
            assert outcome(function, rows, minimum) == wanted, (function.__name__, rows, minimum, wanted)
            assert repr(rows) == before
    assert as_csv(sales=rows, minimum=3) == as_csv(rows, 3) if len(rows) != 1 else True
for function in functions:
    assert function([]) == original[function.__name__]([])
"""


def results_are_the_same(workspace: Path, answer: str) -> None:
    """Compare with the original functions, for many inputs and for errors."""
    run_code(workspace, f"ORIGINAL = {ORIGINAL!r}\n{CODE}")


def nothing_is_written_twice(workspace: Path, answer: str) -> None:
    """No larger statement is there twice, whatever its names, and the code is shorter by a third."""
    trees = [parse(path) for path in workspace.rglob("*.py")]
    counts = Counter(shape(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.stmt))
    twice = [text for text, count in counts.items() if count > 1 and text.count("(") > 25]
    assert not twice, f"{len(twice)} statements are there more than once"
    before = len([*ast.walk(ast.parse(ORIGINAL))])
    after = sum(len([*ast.walk(tree)]) for tree in trees)
    assert after < 0.7 * before, f"the code has {after} nodes, and had {before}"


def shape(node: ast.stmt) -> str:
    """Return a statement as text, with all variables alike."""
    copy = ast.parse(ast.unparse(node))
    for part in ast.walk(copy):
        if isinstance(part, ast.Name):
            part.id = "x"
    return ast.dump(copy)


def parse(path: Path) -> ast.Module:
    """Parse a file of the workspace; raise AssertionError where it is absent, or is not Python."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise AssertionError(f"{path.name} cannot be parsed: {error}") from None


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
