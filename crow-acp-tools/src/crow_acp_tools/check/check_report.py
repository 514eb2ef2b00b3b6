"""Format the report of a check as text and as JSON."""

import base64
from collections import Counter
from itertools import product
from typing import Any, Literal

import click
from crow_core.text import escape_controls
from crow_system.shortening import shorten_middle

from crow_acp_tools.check.requirement import Level
from crow_acp_tools.check.runner import CheckReport, RequirementResult
from crow_acp_tools.check.versions import VERSION_1
from crow_acp_tools.check.wire_lines import WireLine

COLOURS = {"pass": "green", "fail": "red", "not tested": "yellow", "skipped": None}
LEVELS: dict[Level, str] = {
    "mandatory": "Mandatory",
    "capability": "Capabilities, where they are advertised",
    "advisory": "Advisory",
    "informational": "Good to know",
}
MAX_LINE_CHARACTERS = 400
"""Characters of a line that the text report shows."""


def to_text(report: CheckReport) -> str:
    """Format a report for a terminal, with colours. Output of the agent cannot control the terminal."""
    parts = [f"{get_agent_name(report)}, checked as {escape_controls(' '.join(report.options.command))}"]
    for facts, (level, title) in product(report.facts, LEVELS.items()):
        of = "" if facts.version is VERSION_1 else f"Version {facts.version.number}, a draft: "
        results = [result for result in report.results if result.requirement.version is facts.version]
        if found := [result for result in results if result.requirement.level == level]:
            parts += ["", click.style(f"{of}{title}", bold=True)]
            for before, result in zip([None, *found], found, strict=False):
                parts += result_to_text(result, repeated=before is not None and before.why == result.why)
    counts = Counter((result.requirement.level, result.verdict) for result in report.results)
    failed, untested = counts["mandatory", "fail"], counts["mandatory", "not tested"]
    sum_up = f"{counts['mandatory', 'pass']} mandatory requirements passed, {failed} failed, {untested} not tested; "
    sum_up += f"{counts['capability', 'fail']} advertised capabilities failed."
    verdict = "Conformant" if report.is_conformant else "Not conformant"
    parts += ["", click.style(verdict, bold=True, fg="green" if report.is_conformant else "red") + f": {sum_up}"]
    return "\n".join(parts)


def result_to_text(result: RequirementResult, *, repeated: bool) -> list[str]:
    """Format a result as lines. With `repeated`, leave out a reason that the result before it has, too."""
    word = click.style(f"{result.verdict:<10}", fg=COLOURS[result.verdict])
    why = "" if repeated and result.verdict != "fail" else escape_controls(result.why)
    remark = click.style(f" ({why})", dim=True) if why and result.verdict in ("pass", "skipped") else ""
    lines = [f"  {word} {result.requirement.id:<23} {result.requirement.sentence}{remark}"]
    indent = " " * 13
    if why and not remark:
        lines.append(indent + why)
    for line in result.lines:
        lines.append(f"{indent}{'→' if line.sender == 'client' else '←'} {show_line(line_text(line))}")
    if result.stderr.strip():
        lines += [
            f"{indent}standard error: {escape_controls(text)}" for text in result.stderr.strip().splitlines()[-5:]
        ]
    return lines


def get_agent_name(report: CheckReport) -> str:
    match get_greeting(report, "info"):
        case {"name": str(name), "version": str(version)}:
            return escape_controls(f"{name} {version}")
        case _:
            return "An agent without a name"


def get_greeting(report: CheckReport, part: Literal["info", "capabilities"]) -> Any:
    """Return a part of the answer to `initialize` in the first version that was checked; None if it lacks that."""
    facts = report.facts[0]
    name = facts.version.info if part == "info" else facts.version.capabilities
    return facts.initialize.member(name) if facts.initialize else None


def line_text(line: WireLine) -> str:
    return line.raw.decode(errors="backslashreplace")


def show_line(text: str) -> str:
    return shorten_middle(escape_controls(text), MAX_LINE_CHARACTERS)


def to_json(report: CheckReport) -> dict[str, Any]:
    """Convert a report to JSON. A line that is not UTF-8 is base64 under `bytes`."""
    return {
        "conformant": report.is_conformant,
        "protocolVersions": [facts.version.number for facts in report.facts],
        "command": list(report.options.command),
        "agentInfo": get_greeting(report, "info"),
        "agentCapabilities": get_greeting(report, "capabilities"),
        "requirements": [result_to_json(result) for result in report.results],
    }


def result_to_json(result: RequirementResult) -> dict[str, Any]:
    return {
        "id": result.requirement.id,
        "level": result.requirement.level,
        "sentence": result.requirement.sentence,
        "verdict": result.verdict,
        "why": result.why,
        "lines": [line_to_json(line) for line in result.lines],
        "stderr": result.stderr,
    }


def line_to_json(line: WireLine) -> dict[str, Any]:
    entry: dict[str, Any] = {"at": round(line.at, 6), "from": line.sender}
    try:
        return {**entry, "line": line.raw.decode()}
    except UnicodeDecodeError:
        return {**entry, "bytes": base64.b64encode(line.raw).decode()}
