"""The examination: every exchange that is needed, each with a fresh process, and the verdicts."""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from crow_cli.check import exchanges
from crow_cli.check.exchanges import Exchange, Facts, furnish
from crow_cli.check.requirements import REQUIREMENTS, Judged, Requirement, Word
from crow_cli.check.talk import Flaw, Line, Options, Talk

FOUNDATIONS = {"initialize": exchanges.greeting, "session": exchanges.sessions, "prompt": exchanges.everyday}
"""The exchanges that show whether what others need works at all, in order."""
SHOWN = 3
"""Flaws of one kind that are shown."""


@dataclass(frozen=True)
class Finding:
    """The verdict on one requirement."""

    requirement: Requirement
    word: Word
    why: str
    """The reason, or a remark on a pass."""
    lines: Sequence[Line] = ()
    """What shows it."""
    stderr: str = ""
    """The end of what a failed agent said on standard error."""


@dataclass(frozen=True)
class Report:
    """What came of it."""

    options: Options
    facts: Facts
    findings: Sequence[Finding] = field(default_factory=list[Finding])

    @property
    def conformant(self) -> bool:
        """No mandatory requirement failed or could not be tested, and no capability that is advertised failed."""
        return not any(
            finding.word == "fail" and finding.requirement.level in ("mandatory", "capability")
            for finding in self.findings
        ) and not any(
            finding.word == "not tested" and finding.requirement.level == "mandatory" for finding in self.findings
        )


async def examine(
    options: Options,
    only: Collection[str] = (),
    *,
    jobs: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Report:
    """Judge an agent by all requirements, or only those with these ids.

    At most `jobs` processes run at a time; 0 means as the machine has processors, up to four. `progress` hears how many
    conversations are over, of how many. Raises OSError if the agent cannot be started.
    """
    wanted = [requirement for id, requirement in REQUIREMENTS.items() if not only or id in only]
    facts, talks = Facts(), dict[Exchange, Talk]()
    places = asyncio.Semaphore(jobs or min(4, os.cpu_count() or 1))
    with TemporaryDirectory(prefix="crow-check-") as folder:
        root = os.path.realpath(folder)  # noqa: ASYNC240, a moment; agents compare paths

        async def hold(exchange: Exchange) -> None:
            async with places:
                talks[exchange] = talk = Talk(options, Path(root, str(len(talks))))
                talk.folder.mkdir()
                furnish(talk.folder)
                async with talk:
                    await exchange(talk)
                progress(len(talks), total)

        needed = [requirement.exchange for requirement in wanted]
        total = len({*needed, *FOUNDATIONS.values()})
        for need, foundation in FOUNDATIONS.items():
            if need != "prompt" or foundation in needed or any(exchange.needs == need for exchange in needed):
                if broken(foundation, facts):
                    break
                await hold(foundation)
                look(need, talks[foundation], facts)
        testable = [
            requirement.exchange
            for requirement in wanted
            if not broken(requirement.exchange, facts) and not unadvertised(requirement, facts)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for exchange in dict.fromkeys(testable):
                    if exchange not in talks:
                        group.create_task(hold(exchange))
        except* OSError as failures:
            raise OSError(str(failures.exceptions[0])) from None
    flaws = [(flaw, talk) for exchange, talk in talks.items() if exchange.watched for flaw in talk.flaws]
    return Report(options, facts, [find(requirement, talks, flaws, facts) for requirement in wanted])


def look(need: str, talk: Talk, facts: Facts) -> None:
    """Learn from a foundation what the others need to know."""
    first = [step for step in talk.steps if step.method == {"session": "session/new"}.get(need, f"session/{need}")]
    match need:
        case "initialize":
            facts.greeting = talk.steps[0]
            if talk.stopped:
                facts.broken[need] = talk.stopped
        case "session":
            if not first or not isinstance(first[0].member("sessionId"), str):
                facts.broken[need] = talk.stopped
        case _:
            if not first or first[0].member("stopReason") is None:
                facts.broken[need] = talk.stopped or "a plain prompt failed; see PROMPT-001"


def broken(exchange: Exchange, facts: Facts) -> str:
    """Why an exchange cannot be held."""
    order = ["", *FOUNDATIONS]
    needs = order[: order.index(exchange.needs) + 1]
    return next((facts.broken[need] for need in needs if need in facts.broken), "")


def unadvertised(requirement: Requirement, facts: Facts) -> bool:
    return bool(requirement.capability) and not facts.advertises(requirement.capability)


def find(
    requirement: Requirement,
    talks: dict[Exchange, Talk],
    flaws: Sequence[tuple[Flaw, Talk]],
    facts: Facts,
) -> Finding:
    if mine := [(flaw, talk) for flaw, talk in flaws if flaw.id == requirement.id]:
        flaw, talk = mine[0]
        why = flaw.why + (f" (and {len(mine) - 1} more)" if len(mine) > 1 else "")
        lines = [flaw.line for flaw, _ in mine[:SHOWN] if flaw.line]
        return Finding(requirement, "fail", why, lines, last_words(talk))
    if unadvertised(requirement, facts) and "initialize" not in facts.broken:
        return Finding(requirement, "skipped", f"{requirement.capability} is not advertised")
    if (talk := talks.get(requirement.exchange)) is None:
        return Finding(requirement, "not tested", broken(requirement.exchange, facts))
    try:
        return Finding(requirement, "pass", requirement.judge(talk) or "")
    except Judged as judged:
        stderr = last_words(talk) if judged.word == "fail" else ""
        return Finding(requirement, judged.word, str(judged), judged.lines, stderr)


def last_words(talk: Talk) -> str:
    return bytes(talk.stderr).decode(errors="replace")
