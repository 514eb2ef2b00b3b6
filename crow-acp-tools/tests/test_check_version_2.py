"""`crow acp check` on agents that speak ACP version 2, alone or beside version 1."""

import asyncio
import sys
from pathlib import Path

import pytest
from crow_acp_tools.check.check_report import to_json, to_text
from crow_acp_tools.check.conversation import CheckOptions
from crow_acp_tools.check.requirements import REQUIREMENTS
from crow_acp_tools.check.runner import CheckReport, check_agent

pytestmark = pytest.mark.anyio

SUBJECT = (sys.executable, "-I", "-S", str(Path(__file__).with_name("subject_v2.py")))
SECOND = {id: requirement for id, requirement in REQUIREMENTS.items() if requirement.version.number == 2}

FAULTS: dict[str, set[str]] = {
    "is nobody": {"V2-INIT-001", "V2-SCHEMA-001"},
    "lists capabilities": {"V2-INIT-001", "V2-SCHEMA-001"},
    "names options as version 1": {"V2-SCHEMA-001", "V2-SESSION-001"},
    "has an impossible value": {"V2-CONFIG-001"},
    "forgets what was set": {"V2-CONFIG-002"},
    "answers as version 1": {"V2-PROMPT-001", "V2-PROMPT-004", "V2-SCHEMA-001"},
    "never becomes idle": {"V2-PROMPT-001"},
    "gives no stop reason": {"V2-PROMPT-001"},
    "shows another id": {"V2-PROMPT-004"},
    "hides the prompt": {"V2-PROMPT-004"},
    "does not say that it runs": {"V2-STATE-001"},
    "streams without ids": {"V2-SCHEMA-001", "V2-PROMPT-002"},
    "has a reserved update": {"V2-SCHEMA-001", "V2-PROMPT-002"},
    "hides that it waits": {"V2-STATE-002"},
    "leaves calls open": {"V2-CALL-001"},
    "invents terminals": {"V2-TERMINAL-001"},
    "cancels no call": {"V2-CALL-002"},
    "ends as if done": {"V2-CANCEL-001"},
    "goes on after cancel": {"V2-CANCEL-002"},
    "resumes aloud": {"V2-RESUME-002"},
    "replays nothing": {"V2-RESUME-003", "V2-RESUME-004"},
    "renames messages": {"V2-RESUME-003", "V2-RESUME-004"},
    "forgets sessions": {"V2-RESUME-004"},
    "lists all folders": {"V2-LIST-002"},
}
"""The faults of the test agent, and the ids of the requirements that have to fail."""


async def check_subject(fault: str, *ids: str, timeout: float = 20.0, quiet: float = 0.5) -> CheckReport:
    options = CheckOptions((*SUBJECT, fault), timeout=timeout, auth_method="key", allow_logout=True, quiet=quiet)
    return await check_agent(options, set(ids), jobs=2)


def verdicts(report: CheckReport, verdict: str) -> dict[str, str]:
    """Return the reasons of the results with this verdict, by the requirements' ids."""
    return {result.requirement.id: result.why for result in report.results if result.verdict == verdict}


@pytest.mark.parametrize("fault", ["", "has an update of its own", "refuses other versions"])
async def test_correct_agent_of_version_2_alone_passes_every_requirement_of_that_version(fault: str) -> None:
    report = await check_subject(fault, *(["V2-SCHEMA-001"] if fault else []))
    expected = {"V2-SCHEMA-001"} if fault else SECOND.keys() - {"V2-AUTH-005"}

    assert verdicts(report, "pass").keys() == expected
    assert report.is_conformant
    assert to_json(report)["protocolVersions"] == [2]
    assert to_text(report).startswith("subject 2.0, checked as ")


async def find_failures(fault: str, limit: asyncio.Semaphore) -> set[str]:
    """Check all requirements of the scenarios in question; return the ids that fail."""
    scenarios = {SECOND[id].scenario for id in FAULTS[fault]}
    ids = [id for id, requirement in SECOND.items() if requirement.scenario in scenarios]
    async with limit:
        quiet = 0.0 if fault == "ends as if done" else 2.0
        timeout = 5 if FAULTS[fault] == {"V2-PROMPT-001"} else 20
        report = await check_subject(fault, *ids, timeout=timeout, quiet=quiet)
    return {result.requirement.id for result in report.results if result.verdict == "fail"}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_fault_of_version_2_fails_its_own_requirements() -> None:
    limit = asyncio.Semaphore(4)
    sets = await asyncio.gather(*[find_failures(fault, limit) for fault in FAULTS])

    assert dict(zip(FAULTS, sets, strict=True)) == FAULTS


def test_every_requirement_that_only_version_2_has_has_a_fault() -> None:
    shared = {id for id in SECOND if id.removeprefix("V2-") in REQUIREMENTS}
    own = SECOND.keys() - shared
    assert own - set().union(*FAULTS.values()) == set()


async def test_agent_of_version_1_is_not_checked_against_version_2() -> None:
    command = (sys.executable, "-I", "-S", str(Path(__file__).with_name("subject.py")))
    report = await check_agent(CheckOptions(command, quiet=0.1), {"INIT-002", "V2-INIT-002"})

    assert [result.requirement.id for result in report.results] == ["INIT-002"]
    assert to_json(report)["protocolVersions"] == [1]
