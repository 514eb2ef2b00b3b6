import ast
import subprocess
import sys
from pathlib import Path

CODE = """
from clinic import bills, patients, visits

assert visits.Visit is bills.Visit is patients.Visit
assert patients.Patient is visits.Patient is bills.Patient
assert patients.age_group is visits.age_group
assert visits.latest is patients.latest
assert visits.FEES == {"child": 10, "adult": 30, "senior": 20}
ann = patients.Patient("Ann", 1990)
zoe = patients.Patient("Zoe", 2020)
old = patients.Patient("Otto", 1950)
first = visits.Visit(ann, 2024, "cough")
second = visits.Visit(ann, 2025, "knee")
assert ann.visits == [first, second] and zoe.visits == []
assert visits.latest(ann) is second and visits.latest(zoe) is None
assert patients.describe(ann) == "Ann, born 1990, last here in 2025: knee"
assert patients.describe(zoe) == "Zoe, born 2020, never here"
assert [patients.age_group(ann, year) for year in (1995, 2007, 2008, 2054, 2055)] == [
    "child", "child", "adult", "adult", "senior"
]
assert first.fee() == 30 and visits.Visit(zoe, 2025, "ear").fee() == 10 and visits.Visit(old, 2025, "hip").fee() == 20
assert bills.bill(ann) == "2024 cough 30\\n2025 knee 30\\ntotal 60"
assert bills.bill(patients.Patient("New", 2000)) == "total 0"
assert patients.owes(ann) == 60 and patients.owes(old) == 20
assert bills.total(zoe) == 10
"""


def each_module_can_be_imported_first(workspace: Path, answer: str) -> None:
    modules = find_modules(workspace)
    assert {"clinic.patients", "clinic.visits", "clinic.bills"} <= modules.keys()
    for module in modules:
        run_code(workspace, f"import {module}")


def no_imports_in_a_circle(workspace: Path, answer: str) -> None:
    modules = find_modules(workspace)
    imports: dict[str, set[str]] = {}
    for module, path in modules.items():
        tree = parse(path)
        everywhere = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert all(node in tree.body for node in everywhere), f"{path.name} does not import at its top"
        text = ast.unparse(tree)
        assert "import_module" not in text, f"{path.name} imports while it runs"
        assert "__import__" not in text, f"{path.name} imports while it runs"
        imports[module] = set()
        for node in everywhere:
            names = {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                base = ".".join([*["clinic"] * bool(node.level), node.module or ""]).strip(".")
                names = {f"{base}.{name}" for name in names} | {base}
            imports[module] |= names & modules.keys() - {module}
    while leaves := {module for module, used in imports.items() if not used & imports.keys()}:
        imports = {module: used for module, used in imports.items() if module not in leaves}
    assert not imports, f"these import each other: {', '.join(sorted(imports))}"


def names_are_where_they_were(workspace: Path, answer: str) -> None:
    run_code(workspace, CODE)


def find_modules(workspace: Path) -> dict[str, Path]:
    """Return the modules of the package, by their names."""
    paths = (workspace / "clinic").glob("*.py")
    return {f"clinic.{path.stem}": path for path in paths if path.stem not in ("__init__", "__main__")}


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
