"""The examination's report, for a person and for a program."""

import base64
from collections import Counter
from typing import Any

import click

from crow_cli.check.examination import Finding, Report
from crow_cli.check.requirements import Level
from crow_cli.check.talk import Line
from crow_cli.screen import spelled_out

COLOURS = {"pass": "green", "fail": "red", "not tested": "yellow", "skipped": None}
LEVELS: dict[Level, str] = {
    "mandatory": "Mandatory",
    "capability": "Capabilities, where they are advertised",
    "advisory": "Advisory",
    "informational": "Good to know",
}
WIDTH = 400
"""Characters of a line that a person is shown."""


def as_text(report: Report) -> str:
    """Lines for a terminal, with colours; nothing of the agent's can steer it."""
    parts = [f"{agent_name(report)}, examined as {spelled_out(' '.join(report.options.command))}"]
    for level, title in LEVELS.items():
        if found := [finding for finding in report.findings if finding.requirement.level == level]:
            parts += ["", click.style(title, bold=True)]
            for before, finding in zip([None, *found], found, strict=False):
                parts += finding_as_text(finding, repeated=before is not None and before.why == finding.why)
    counts = Counter((finding.requirement.level, finding.word) for finding in report.findings)
    failed, untested = counts["mandatory", "fail"], counts["mandatory", "not tested"]
    sum_up = f"{counts['mandatory', 'pass']} mandatory requirements passed, {failed} failed, {untested} not tested; "
    sum_up += f"{counts['capability', 'fail']} advertised capabilities failed."
    verdict = "Conformant" if report.conformant else "Not conformant"
    parts += ["", click.style(verdict, bold=True, fg="green" if report.conformant else "red") + f": {sum_up}"]
    return "\n".join(parts)


def finding_as_text(finding: Finding, *, repeated: bool) -> list[str]:
    """A finding in some lines; a reason that is the one before's is not said again."""
    word = click.style(f"{finding.word:<10}", fg=COLOURS[finding.word])
    why = "" if repeated and finding.word != "fail" else spelled_out(finding.why)
    remark = click.style(f" ({why})", dim=True) if why and finding.word in ("pass", "skipped") else ""
    lines = [f"  {word} {finding.requirement.id:<23} {finding.requirement.sentence}{remark}"]
    indent = " " * 13
    if why and not remark:
        lines.append(indent + why)
    for line in finding.lines:
        lines.append(f"{indent}{'→' if line.sender == 'client' else '←'} {shortened(spelled_out(text(line)))}")
    if finding.stderr.strip():
        lines += [f"{indent}standard error: {spelled_out(words)}" for words in finding.stderr.strip().splitlines()[-5:]]
    return lines


def agent_name(report: Report) -> str:
    info = report.facts.greeting.member("agentInfo") if report.facts.greeting else None
    match info:
        case {"name": str(name), "version": str(version)}:
            return spelled_out(f"{name} {version}")
        case _:
            return "An agent without a name"


def text(line: Line) -> str:
    return line.raw.decode(errors="backslashreplace")


def shortened(words: str) -> str:
    return words if len(words) <= WIDTH else f"{words[: WIDTH - 100]} … {words[-80:]}"


def as_json(report: Report) -> dict[str, Any]:
    """The whole of it. A line that is no UTF-8 comes as base64, under `bytes`."""
    greeting = report.facts.greeting
    return {
        "conformant": report.conformant,
        "protocolVersion": 1,
        "command": list(report.options.command),
        "agentInfo": greeting.member("agentInfo") if greeting else None,
        "agentCapabilities": greeting.member("agentCapabilities") if greeting else None,
        "requirements": [finding_as_json(finding) for finding in report.findings],
    }


def finding_as_json(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.requirement.id,
        "level": finding.requirement.level,
        "sentence": finding.requirement.sentence,
        "verdict": finding.word,
        "why": finding.why,
        "lines": [line_as_json(line) for line in finding.lines],
        "stderr": finding.stderr,
    }


def line_as_json(line: Line) -> dict[str, Any]:
    said: dict[str, Any] = {"at": round(line.at, 6), "from": line.sender}
    try:
        return {**said, "line": line.raw.decode()}
    except UnicodeDecodeError:
        return {**said, "bytes": base64.b64encode(line.raw).decode()}
