"""Print the part of CHANGELOG.md about a version, after a check that every place names that version.

uv run scripts/release_notes.py v0.1.0
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def find_faults(version: str) -> list[str]:
    """Return each place that names another version, or none at all."""
    faults: list[str] = []
    for file in [ROOT / "pyproject.toml", *sorted(ROOT.glob("crow-*/pyproject.toml"))]:
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        place = file.relative_to(ROOT)
        faults += [f"{place} has {project['version']}"] if project["version"] != version else []
        faults += [
            f"{place} depends on {one}"
            for one in project.get("dependencies", [])
            if one.startswith("crow-") and "==" in one and not one.endswith(f"=={version}")
        ]
    (file,) = ROOT.glob("registry/*/agent.json")
    entry = json.loads(file.read_text("utf-8"))
    faults += [f"{file.relative_to(ROOT)} has {entry['version']}"] if entry["version"] != version else []
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", read_changelog(), re.M):
        faults.append(f'CHANGELOG.md has no heading "## {version} (YEAR-MONTH-DAY)"')
    return faults


def read_changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text("utf-8")


def read_notes(version: str) -> str:
    """Return the text under the heading of a version; only its part "In short" if there is one."""
    found = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", read_changelog(), re.M | re.S)
    text = found[1].strip() if found else ""
    short = re.match(r"### In short\n(.*?)(?=^### |\Z)", text, re.M | re.S)
    return short[1].strip() if short else text


def main() -> None:
    version = sys.argv[1].removeprefix("v")
    if faults := find_faults(version):
        sys.exit("\n".join(faults))
    print(read_notes(version))


if __name__ == "__main__":
    main()
