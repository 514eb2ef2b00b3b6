"""Run the scenarios that the requirements need, each with a new process of the agent, and collect the verdicts."""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from crow_acp_tools.check import scenarios
from crow_acp_tools.check.conversation import CheckOptions, CheckRequest, Conversation, Flaw, WireLine
from crow_acp_tools.check.requirement import CheckVerdict, NotPassed, Requirement, Unanswered
from crow_acp_tools.check.requirements import ANSWERED_BY, REQUIREMENTS
from crow_acp_tools.check.scenarios import AgentFacts, Scenario, create_files

BASIC_SCENARIOS = {"initialize": scenarios.initializing, "session": scenarios.sessions, "prompt": scenarios.one_prompt}
"""The scenarios on which others depend, in order. They show whether the others can run at all."""
MAX_FLAWS_SHOWN = 3
"""Lines that are shown for one requirement that failed in several scenarios."""


@dataclass(frozen=True)
class RequirementResult:
    """The result of checking one requirement."""

    requirement: Requirement
    verdict: CheckVerdict
    why: str
    """The reason of the verdict, or a remark on a pass."""
    lines: Sequence[WireLine] = ()
    """The lines that show it."""
    stderr: str = ""
    """The end of the agent's standard error, after a failure."""


@dataclass(frozen=True)
class CheckReport:
    """The results of all requirements."""

    options: CheckOptions
    facts: AgentFacts
    results: Sequence[RequirementResult] = field(default_factory=list[RequirementResult])

    @property
    def is_conformant(self) -> bool:
        """True if every mandatory requirement was tested and none failed, and no advertised capability failed."""
        return not any(
            result.verdict == "fail" and result.requirement.level in ("mandatory", "capability")
            for result in self.results
        ) and not any(
            result.verdict == "not tested" and result.requirement.level == "mandatory" for result in self.results
        )


async def check_agent(
    options: CheckOptions,
    only: Collection[str] = (),
    *,
    jobs: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> CheckReport:
    """Check an agent against all requirements, or only against those with the ids in `only`.

    At most `jobs` processes run at a time; 0 means one for each processor, at most four. `progress` is called with the
    number of finished conversations and their total. Raises OSError if the agent cannot be started.
    """
    wanted = [requirement for id, requirement in REQUIREMENTS.items() if not only or id in only]
    facts, conversations = AgentFacts(), dict[Scenario, Conversation]()
    places = asyncio.Semaphore(jobs or min(4, os.cpu_count() or 1))
    with TemporaryDirectory(prefix="crow-check-") as folder:
        root = os.path.realpath(folder)  # noqa: ASYNC240, it takes no time; agents compare paths

        async def run(scenario: Scenario) -> None:
            async with places:
                conversations[scenario] = conversation = Conversation(options, Path(root, str(len(conversations))))
                conversation.folder.mkdir()
                create_files(conversation.folder)
                async with conversation:
                    await scenario(conversation)
                progress(len(conversations), total)

        needed = [requirement.scenario for requirement in wanted]
        total = len({*needed, *BASIC_SCENARIOS.values()})
        for need, basic in BASIC_SCENARIOS.items():
            if need != "prompt" or basic in needed or any(scenario.needs == need for scenario in needed):
                if find_obstacle(basic, facts):
                    break
                await run(basic)
                learn_facts(need, conversations[basic], facts)
        testable = [
            requirement.scenario
            for requirement in wanted
            if not find_obstacle(requirement.scenario, facts) and not is_unadvertised(requirement, facts)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for scenario in dict.fromkeys(testable):
                    if scenario not in conversations:
                        group.create_task(run(scenario))
        except* OSError as failures:
            raise OSError(str(failures.exceptions[0])) from None
    counted = [conversation for scenario, conversation in conversations.items() if scenario.counts_flaws]
    flaws = [(flaw, conversation) for conversation in counted for flaw in conversation.flaws]
    return CheckReport(options, facts, [to_result(requirement, conversations, flaws, facts) for requirement in wanted])


def learn_facts(need: str, conversation: Conversation, facts: AgentFacts) -> None:
    """Store what a basic scenario shows about the agent, and why it failed if it did."""
    method = "session/new" if need == "session" else f"session/{need}"
    first = [request for request in conversation.requests if request.method == method]
    why = next((late for request in conversation.requests if (late := request.no_answer_reason)), conversation.stopped)
    facts.unanswered |= {request.method for request in conversation.requests if request.answer is None}
    match need:
        case "initialize":
            facts.initialize = conversation.requests[0]
            if conversation.stopped:
                facts.broken[need] = why
        case "session":
            if not first or not isinstance(first[0].member("sessionId"), str):
                facts.broken[need] = why
        case _:
            if not first or first[0].member("stopReason") is None:
                facts.broken[need] = why or "a plain prompt failed; see PROMPT-001"


def find_obstacle(scenario: Scenario, facts: AgentFacts) -> str:
    """Return why a scenario cannot run; the empty text if it can."""
    order = ["", *BASIC_SCENARIOS]
    needs = order[: order.index(scenario.needs) + 1]
    return next((facts.broken[need] for need in needs if need in facts.broken), "")


def is_unadvertised(requirement: Requirement, facts: AgentFacts) -> bool:
    return bool(requirement.capability) and not facts.advertises(requirement.capability)


def to_result(
    requirement: Requirement,
    conversations: dict[Scenario, Conversation],
    flaws: Sequence[tuple[Flaw, Conversation]],
    facts: AgentFacts,
) -> RequirementResult:
    if mine := [(flaw, conversation) for flaw, conversation in flaws if flaw.id == requirement.id]:
        flaw, conversation = mine[0]
        why = flaw.why + (f" (and {len(mine) - 1} more)" if len(mine) > 1 else "")
        lines = [flaw.line for flaw, _ in mine[:MAX_FLAWS_SHOWN] if flaw.line]
        return RequirementResult(requirement, "fail", why, lines, decode_stderr(conversation))
    if is_unadvertised(requirement, facts) and "initialize" not in facts.broken:
        return RequirementResult(requirement, "skipped", f"{requirement.capability} is not advertised")
    if (conversation := conversations.get(requirement.scenario)) is None:
        return RequirementResult(requirement, "not tested", find_obstacle(requirement.scenario, facts))
    try:
        return RequirementResult(requirement, "pass", requirement.check(conversation) or "")
    except NotPassed as error:
        if isinstance(error, Unanswered) and (see := find_cause(requirement, error.request, facts)):
            return RequirementResult(requirement, "not tested", f"{error}; see {see}")
        stderr = decode_stderr(conversation) if error.verdict == "fail" else ""
        return RequirementResult(requirement, error.verdict, str(error), error.lines, stderr)


def find_cause(requirement: Requirement, request: CheckRequest, facts: AgentFacts) -> str:
    """Return the id of the requirement that an unanswered request fails instead of this one, or an empty string."""
    see = ANSWERED_BY.get(request.method, requirement.id)
    is_slow = request.method in facts.unanswered or (request.late_answer and not request.interrupted)
    return see if is_slow and see != requirement.id else ""


def decode_stderr(conversation: Conversation) -> str:
    return bytes(conversation.stderr).decode(errors="replace")
