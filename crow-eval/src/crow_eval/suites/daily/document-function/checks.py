import ast
import subprocess
import sys
from pathlib import Path

ORIGINAL = Path(__file__).parent / "files" / "ranges.py"

CHANGES = {
    "numbers may be in any order": ("sorted(set(numbers))", "list(dict.fromkeys(numbers))"),
    "a number that is there twice counts once": ("sorted(set(numbers))", "sorted(numbers)"),
    "two neighbours are no range": ("> 1:", "> 0:"),
    "three neighbours are a range": ("> 1:", "> 2:"),
    "a negative number raises ValueError": ("number < 0", "number < -1000"),
    "zero is allowed": ("number < 0", "number <= 0"),
    "no numbers give an empty text": ('return ",".join(parts)', 'return ",".join(parts) or "-"'),
    "the last number counts": ("[*ordered, None]", "[*ordered[:-1], None]"),
    "a comma without a space separates": ('return ",".join(parts)', 'return ", ".join(parts)'),
}
"""Each property of the function with a change of its code that takes it away."""

CODE = """
import doctest

example = doctest.DocTestParser().get_doctest(docstring, {}, "fold", None, 0)
assert len(example.examples) >= 3, "the docstring has less than three examples"


def failures(code):
    names = {}
    exec(compile(code, "ranges.py", "exec"), names)
    test = doctest.DocTest(example.examples, names, "fold", None, 0, docstring)
    return doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed


assert not failures(original), "an example is wrong"
missed = [name for name, code in changed.items() if not failures(code)]
assert not missed, f"no example shows this: {'; '.join(missed)}"
"""


def code_is_unchanged(workspace: Path, answer: str) -> None:
    trees = [parse(path) for path in (workspace / "ranges.py", ORIGINAL)]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.Module) and ast.get_docstring(node) is not None:
            del node.body[0]
    assert ast.dump(trees[0]) == ast.dump(trees[1]), "the code has changed"


def examples_are_right(workspace: Path, answer: str) -> None:
    docstring = read_docstring(workspace)
    assert "ValueError" in docstring, "the docstring does not name the error"
    run_code(workspace, start(docstring, {}) + CODE)


def examples_notice_changes(workspace: Path, answer: str) -> None:
    original = ORIGINAL.read_text("utf-8")
    changed = {name: original.replace(old, new) for name, (old, new) in CHANGES.items()}
    run_code(workspace, start(read_docstring(workspace), changed) + CODE)


def start(docstring: str, changed: dict[str, str]) -> str:
    values = {"docstring": docstring, "original": ORIGINAL.read_text("utf-8"), "changed": changed}
    return "".join(f"{name} = {value!r}\n" for name, value in values.items())


def read_docstring(workspace: Path) -> str:
    tree = parse(workspace / "ranges.py")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "fold"]
    assert functions, "there is no function fold"
    docstring = ast.get_docstring(functions[0])
    assert docstring, "fold has no docstring"
    return docstring


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
