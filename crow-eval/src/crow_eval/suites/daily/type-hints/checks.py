import ast
import subprocess
import sys
from pathlib import Path

ORIGINAL = Path(__file__).parent / "files" / "stock.py"

CODE = """
import typing
import stock

PATHS = {"Path"}
STRINGS = {"list[str]", "Iterable[str]", "Sequence[str]", "Collection[str]"}
COUNTS = {"dict[str, int]", "Mapping[str, int]"}
WRITABLE = {"dict[str, int]", "MutableMapping[str, int]"}
expected = {
    "read_stock": ({"path": PATHS}, {"dict[str, int]"}),
    "find_missing": ({"stock": COUNTS, "wanted": STRINGS}, {"list[str]"}),
    "largest": ({"stock": COUNTS}, {"str | None", "None | str"}),
    "take": ({"stock": WRITABLE, "article": {"str"}, "pieces": {"int"}}, {"None"}),
    "price_of": (
        {
            "stock": COUNTS,
            "prices": {"dict[str, float]", "Mapping[str, float]"},
            "discount": {"float | None", "None | float"},
        },
        {"float"},
    ),
    "shelves": (
        {"articles": STRINGS, "size": {"int"}},
        {"Iterator[list[str]]", "Generator[list[str]]", "Generator[list[str], None, None]", "Iterable[list[str]]"},
    ),
}


def show(hint):
    if hint is type(None):
        return "None"
    if typing.get_origin(hint) is None:
        return hint.__name__
    arguments = typing.get_args(hint)
    names = [show(argument) for argument in arguments]
    if typing.get_origin(hint) is typing.Union or type(hint).__name__ in ("Union", "UnionType"):
        return " | ".join(names)
    return f"{typing.get_origin(hint).__name__}[{', '.join(names)}]"


for name, (arguments, result) in expected.items():
    hints = typing.get_type_hints(getattr(stock, name))
    for argument, allowed in (arguments | {"return": result}).items():
        assert argument in hints, f"{name} has no hint for {argument}"
        assert show(hints[argument]) in allowed, f"{name}: {argument} is {show(hints[argument])}"
"""


def hints_are_right(workspace: Path, answer: str) -> None:
    """Compare the hints with those that fit, abstract ones included."""
    run_code(workspace, CODE)


def code_is_unchanged(workspace: Path, answer: str) -> None:
    assert without_hints(workspace / "stock.py") == without_hints(ORIGINAL)


def without_hints(path: Path) -> str:
    """Return the code of a file without annotations, imports and comments."""
    tree = parse(path)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.unparse(tree)


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
