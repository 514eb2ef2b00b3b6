import ast
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

FILES = {
    "access.log": (Path(__file__).parent / "files" / "access.log").read_text("utf-8"),
    "empty.log": "",
    "no end.log": "10.0.0.1 GET /a 200\n10.0.0.2 GET /B 404\n10.0.0.2 GET /a 200",
    "ties.log": "1 GET /b 200\n1 GET /a 200\n2 GET /B 200\n2 GET /_ 200\n3 GET /a?x=1 200\n3 GET /a/b 200\n",
    "odd.log": "# hello\n\n   \n1 POST /form 201\n  2   GET\t/a   500 \n3 GET\n4 GET /a\n5 get /a 200\n6 GET /b x\n",
    "many.log": "".join(f"{n % 7} GET /{n % 23} {200 + n % 3 * 100}\n" for n in range(300)),
}
ARGUMENTS = [
    ["access.log"],
    ["-n", "2", "access.log"],
    ["-n", "100", "many.log"],
    ["many.log"],
    ["-n", "0", "many.log"],
    ["empty.log"],
    ["no end.log"],
    ["ties.log"],
    ["odd.log"],
    ["access.log", "many.log", "odd.log"],
    ["-n", "3", "ties.log", "no end.log", "empty.log"],
    ["no such.log"],
    ["access.log", "no such.log"],
    [],
    ["-n", "2"],
    ["-n", "two", "access.log"],
    ["-n", "-1", "access.log"],
    ["-n", "", "access.log"],
    ["-n"],
]
SHELL = Path(__file__).parent / "files" / "visits.sh"


def program_does_the_same(workspace: Path, answer: str) -> None:
    """Run the original script and the program with the same arguments, and compare."""
    with TemporaryDirectory() as folder:
        for name, content in FILES.items():
            Path(folder, name).write_text(content, "utf-8")
        for arguments in ARGUMENTS:
            wanted = run(folder, "sh", str(SHELL), *arguments)
            found = run(folder, sys.executable, "-BS", str(workspace / "visits.py"), *arguments)
            assert found.stdout == wanted.stdout, f"{arguments}: {found.stdout}{found.stderr}"
            assert found.stderr == wanted.stderr.replace("visits.sh", "visits.py"), f"{arguments}: {found.stderr}"
            assert found.returncode == wanted.returncode, f"{arguments}: exit code {found.returncode}"


def program_starts_no_other(workspace: Path, answer: str) -> None:
    for path in workspace.rglob("*.py"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"subprocess", "pty", "ctypes"} & set(modules), f"{path.name} imports {modules}"
            if isinstance(node, ast.Attribute):
                starts = node.attr in ("system", "popen", "fork") or node.attr.startswith(
                    ("exec", "spawn", "posix_spawn")
                )
                assert not starts, f"{path.name} calls {node.attr}"


def run(folder: str, *command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", timeout=60)
    except subprocess.TimeoutExpired:
        raise AssertionError("the program did not end within 60 seconds") from None


def parse(path: Path) -> ast.Module:
    """Parse a file of the workspace; raise AssertionError where it is absent, or is not Python."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise AssertionError(f"{path.name} cannot be parsed: {error}") from None
