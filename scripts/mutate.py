"""Mutation testing with mutmut: change the code in many small ways, and see which changes no test notices.

    uv run --group mutation scripts/mutate.py [NAME...]     # hooks, react, ...; all without a name

Works in a copy, which it makes anew in `.mutation/`. Prints each mutant that the tests do not kill as a diff, and the
share of those that they kill.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = {
    "hooks": ("crow-core/src/crow_core/hooks.py", ["crow-core/tests/test_hooks.py"]),
    "react": (
        "crow-core/src/crow_core/react.py",
        [
            "crow-core/tests/test_react.py",
            "crow-core/tests/test_hooks.py",
            "crow-core/tests/test_cancel.py",
            "crow-core/tests/test_model.py",
        ],
    ),
    "messages": ("crow-core/src/crow_core/messages/message.py", ["crow-core/tests/test_messages.py"]),
    "reply": ("crow-core/src/crow_core/models/reply.py", ["crow-core/tests/test_messages.py"]),
    "permissions": (
        "crow-permissions/src/crow_permissions/judgement.py",
        ["crow-permissions/tests/test_permissions.py"],
    ),
    "compaction": (
        "crow-compact/src/crow_compact/compaction.py",
        ["crow-compact/tests/test_compaction.py", "crow-compact/tests/test_long_sessions.py"],
    ),
    "summary": ("crow-compact/src/crow_compact/summary.py", ["crow-compact/tests/test_compaction.py"]),
}
"""What is mutated, and the tests of the same package that should notice."""

SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = [{source}]
also_copy = ["tests"]
pytest_add_cli_args = ["--numprocesses=0", "--import-mode=importlib", "-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
use_git_change_detection = false

[tool.pytest.ini_options]
timeout = 30
markers = ["slow: see the project's own settings", "posix: see there", "sampled: see there"]
filterwarnings = ["error"]
"""


def prepare(name: str) -> Path:
    """Copy all packages to `src`, and the tests of a target's package to `tests`."""
    source, tests = TARGETS[name]
    folder = ROOT / ".mutation" / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "mutants" / "src").mkdir(parents=True, exist_ok=True)  # first on the path: there from the start
    for packages in ROOT.glob("crow-*/src"):
        shutil.copytree(packages, folder / "src", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / tests[0].partition("/tests/")[0] / "tests", folder / "tests")
    shutil.copy(ROOT / "conftest.py", folder / "tests" / "..")
    selected = [test[test.index("tests/") :] for test in tests]
    mutated = source[source.index("src/") :]
    (folder / "pyproject.toml").write_text(SETTINGS.format(source=json.dumps(mutated), tests=json.dumps(selected)))
    return folder


def main() -> None:
    """Run the targets that are named on the command line, or all."""
    for name in sys.argv[1:] or TARGETS:
        folder = prepare(name)
        env = os.environ | {"PYTHONPATH": str(folder / "mutants" / "src")}

        def mutmut(*args: str, folder: Path = folder, env: dict[str, str] = env) -> str:
            command = [sys.executable, "-m", "mutmut", *args]
            return subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout

        subprocess.run([sys.executable, "-m", "mutmut", "run"], cwd=folder, env=env, check=True)
        mutmut("export-cicd-stats")
        stats = json.loads((folder / "mutants" / "mutmut-cicd-stats.json").read_text())
        survivors = [line.split(":")[0].strip() for line in mutmut("results").splitlines() if "survived" in line]
        for survivor in survivors:
            print(mutmut("show", survivor))
        killed = stats["killed"] + stats["timeout"] + stats["segfault"]
        print(f"{name}: {killed} of {stats['total']} mutants killed ({killed / stats['total']:.0%}).")


if __name__ == "__main__":
    main()
