"""Test that each package declares the distributions that its source imports."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("crow-*/pyproject.toml"))
OPTIONAL = {
    "pydantic": "imported only with FastMCP, whose requests are of its types",
    "pytest": "imported only by pytest itself, as its plugin",
    "openai": "imported only after the caller has passed a client of this SDK",
    "opentelemetry": "imported only after the host program or the user has loaded it",
}


def normalize(name: str) -> str:
    """Return the name of a distribution as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_modules(source: Path) -> Iterator[str]:
    """Yield the top-level modules that a package imports, except those of the standard library."""
    for path in source.rglob("*.py"):
        if {"project", "suites"} & {*path.relative_to(source).parts}:  # the demo's project and the suites are data
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Import(names=names):
                    modules = [name.name for name in names]
                case ast.ImportFrom(module=str(module)):
                    modules = [module]
                case _:
                    modules = []
            yield from {module.partition(".")[0] for module in modules} - sys.stdlib_module_names


@pytest.mark.parametrize("package", PACKAGES)
def test_package_declares_what_it_imports(package: str):
    folder = ROOT / package
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = [package, *project["dependencies"]]
    for extra in project.get("optional-dependencies", {}).values():
        requirements += extra
    # the distribution of crow-cli is crow-acp
    requirements += ["crow-cli"] if "crow-acp==0.1.0" in requirements else []
    declared = {normalize(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}
    distributions = packages_distributions()
    undeclared = {
        module
        for module in imported_modules(folder / "src")
        # A distribution may provide a module through another one, as fastmcp does, so the module's name counts, too.
        if declared.isdisjoint({normalize(name) for name in (module, *distributions.get(module, ()))})
    }
    assert not undeclared - OPTIONAL.keys()
