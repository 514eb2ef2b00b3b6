"""Build every package, and check what would be published.

    uv run --group release scripts/check_packages.py                   # metadata and contents
    uv run --group release scripts/check_packages.py 3.11 3.12 3.13    # and install: each package alone, all together
    uv run --group release scripts/check_packages.py --dist dist       # and keep the files

A Python that is not on this machine is named and left out.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORT = """
import importlib, pkgutil, sys
name, *extras = sys.argv[1:]
package = importlib.import_module(name)
for module in pkgutil.walk_packages(package.__path__, name + "."):
    if any(part in module.name for part in (".__main__", ".suites", ".demo.project", ".migrations.", ".windows")):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        cause = error.name or getattr(error.__cause__, "name", None) or ""
        if cause.partition(".")[0] not in extras:
            raise
"""
EXTRAS = ["dbos", "gepa", "inspect_ai", "pytest", "sqlalchemy", "_winapi", "msvcrt", "winreg"]
"""Modules that only an extra, a test runner or Windows brings."""


def run(*command: str | Path, **variables: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def read_packages() -> dict[str, Path]:
    """Return the folder of each distribution that may be published."""
    found: dict[str, Path] = {}
    for file in sorted(ROOT.glob("crow-*/pyproject.toml")):
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        if "Private :: Do Not Upload" not in project["classifiers"]:
            found[project["name"]] = file.parent
    return found


def module_of(folder: Path) -> str:
    return folder.name.replace("-", "_")


def build(packages: dict[str, Path], dist: Path) -> None:
    for name in packages:
        run("uv", "build", "--quiet", "--package", name, "--out-dir", dist, ROOT)


def check_contents(packages: dict[str, Path], dist: Path) -> list[str]:
    """Return what is wrong with the built archives."""
    files = sorted([*dist.glob("*.whl"), *dist.glob("*.tar.gz")])
    run("twine", "check", "--strict", *files)
    run("check-wheel-contents", "--config", ROOT / "pyproject.toml", *dist.glob("*.whl"))
    faults: list[str] = []
    for name, folder in packages.items():
        (wheel,) = dist.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
        (sdist,) = dist.glob(f"{name.replace('-', '_')}-[0-9]*.tar.gz")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        with tarfile.open(sdist) as archive:
            sources = [member.partition("/")[2] for member in archive.getnames()]
        module = module_of(folder)
        faults += [f"{wheel.name}: no {module}/py.typed"] if f"{module}/py.typed" not in names else []
        faults += [f"{wheel.name}: no licence"] if not any(one.endswith("licenses/LICENSE") for one in names) else []
        faults += [f"{wheel.name}: {one} is not the package's" for one in names if not is_expected(one, module)]
        faults += [f"{sdist.name}: no LICENSE"] if "LICENSE" not in sources else []
        faults += [f"{sdist.name}: {one}" for one in sources if one.startswith("tests/")]
    return faults


def is_expected(name: str, module: str) -> bool:
    top = name.partition("/")[0]
    return (top == module or top.endswith(".dist-info")) and not name.endswith((".pyc", ".db"))


def find_python(version: str) -> Path | None:
    """Return the interpreter of a version, as uv or pyenv has it."""
    command = ["uv", "python", "find", "--no-python-downloads", "--no-project", version]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return Path(found.stdout.strip())
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return next(iter(sorted(root.glob(f"versions/{version}.*/bin/python"))), None)


def install(python: Path, folder: Path, dist: Path, *names: str) -> Path:
    """Install distributions into a new environment, ours from `dist`, and return its `bin` folder."""
    run("uv", "venv", "--quiet", "--clear", "--python", python, folder)
    target = folder / "bin" / "python"
    run("uv", "pip", "install", "--quiet", "--python", target, "--find-links", dist, *names)
    return folder / "bin"


def check_installs(packages: dict[str, Path], dist: Path, version: str, scratch: Path) -> None:
    """Import all modules of each package where nothing else is installed, then run the demo where everything is."""
    python = find_python(version)
    if python is None:
        print(f"Python {version}: not on this machine, nothing was tried")
        return
    for name, folder in packages.items():
        programs = install(python, scratch / "alone", dist, name)
        run(programs / "python", "-I", "-W", "error", "-c", IMPORT, module_of(folder), *EXTRAS)
    programs = install(python, scratch / "together", dist, *packages)
    home = {"HOME": str(scratch / "home"), "CROW_HOME": str(scratch / "home")}
    run(programs / "crow", "--version", **home)
    run(programs / "crow", "demo", **home)
    print(f"Python {version}: each of {len(packages)} packages alone, then all together and the demo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, help="a folder that keeps what was built; it has to be new or empty")
    parser.add_argument("version", nargs="*", help="a version of Python, such as 3.13")
    options = parser.parse_args()
    packages = read_packages()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        dist: Path = options.dist or scratch / "dist"
        build(packages, dist)
        if faults := check_contents(packages, dist):
            sys.exit("\n".join(faults))
        print(f"{len(packages)} wheels and {len(packages)} source archives are as they should be")
        for version in options.version:
            check_installs(packages, dist, version, scratch)


if __name__ == "__main__":
    main()
