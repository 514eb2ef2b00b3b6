"""Run the scenarios that the requirements need, each with a new process of the agent, and collect the verdicts."""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from crow_acp_tools.check import scenarios
from crow_acp_tools.check.conversation import CheckOptions, Conversation
from crow_acp_tools.check.requirement import CheckVerdict, NotPassed, Requirement, Unanswered
from crow_acp_tools.check.requirements import ANSWERED_BY, REQUIREMENTS
from crow_acp_tools.check.scenarios import AgentFacts, Scenario, create_files
from crow_acp_tools.check.versions import VERSION_1, VERSION_2, VERSIONS, ProtocolVersion, answers_in_version
from crow_acp_tools.check.wire_lines import CheckRequest, Flaw, WireLine

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
    """The results of all requirements on the versions that the agent offers."""

    options: CheckOptions
    facts: Sequence[AgentFacts]
    """The facts of each version that was checked."""
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


class CheckRun:
    """A check of one agent. All its conversations share a temporary folder and a limit of processes."""

    def __init__(self, options: CheckOptions, root: str, jobs: int, progress: Callable[[int, int], None]) -> None:
        self.options = options
        self._root = root
        self._places = asyncio.Semaphore(jobs)
        self._progress = progress
        self._done = self._total = 0

    def plan(self, conversations: int) -> None:
        """Count conversations that are still to come."""
        self._total += conversations

    async def hold(self, scenario: Scenario, version: ProtocolVersion) -> Conversation:
        """Have the conversation of a scenario with a new process of the agent. Raises OSError if it cannot start."""
        async with self._places:
            folder = Path(self._root, f"{version.number}-{self._done}-{id(scenario)}")
            create_files(folder)
            conversation = Conversation(self.options, folder, version)
            async with conversation:
                await scenario(conversation)
            self._done += 1
            self._progress(self._done, max(self._total, self._done))
            return conversation


async def check_agent(
    options: CheckOptions,
    only: Collection[str] = (),
    *,
    jobs: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> CheckReport:
    """Check an agent against all requirements on the versions of ACP that it offers, or only against those in `only`.

    At most `jobs` processes run at a time; 0 means one for each processor, at most four. `progress` is called with the
    number of finished conversations and their total. Raises OSError if the agent cannot be started.
    """
    wanted = [requirement for id, requirement in REQUIREMENTS.items() if not only or id in only]
    facts, results = list[AgentFacts](), list[RequirementResult]()
    with TemporaryDirectory(prefix="crow-check-") as folder:
        root = os.path.realpath(folder)  # noqa: ASYNC240, it takes no time; agents compare paths
        run = CheckRun(options, root, jobs or min(4, os.cpu_count() or 1), progress)
        greetings = {
            version: await run.hold(scenarios.initializing, version)
            for version in VERSIONS
            if version is VERSION_1 or any(requirement.version is version for requirement in wanted)
        }
        asked = {requirement.version for requirement in wanted}
        for version in choose_versions(greetings) if len(asked) > 1 else asked:
            known, found = await check_version(
                run, greetings[version], [requirement for requirement in wanted if requirement.version is version]
            )
            facts.append(known)
            results += found
    return CheckReport(options, facts, results)


def choose_versions(greetings: dict[ProtocolVersion, Conversation]) -> list[ProtocolVersion]:
    """List the versions to check: the second if it is offered, and the first unless only the second is."""
    second = greetings.get(VERSION_2)
    if second is None or answers_in_version(second.requests[0].result) != VERSION_2.number:
        return [VERSION_1]
    first = greetings[VERSION_1].requests[0]
    is_refused = first.error is not None or answers_in_version(first.result) == VERSION_2.number
    return [VERSION_2] if is_refused else [VERSION_1, VERSION_2]


async def check_version(
    run: CheckRun, greeting: Conversation, wanted: Sequence[Requirement]
) -> tuple[AgentFacts, list[RequirementResult]]:
    """Check the requirements on one version. `greeting` is the conversation that initializes it."""
    version = greeting.version
    facts, conversations = AgentFacts(version), {scenarios.initializing: greeting}
    learn_facts("initialize", greeting, facts)
    needed = [requirement.scenario for requirement in wanted]
    run.plan(len({*needed, *BASIC_SCENARIOS.values()}))
    for need, basic in BASIC_SCENARIOS.items():
        if need != "prompt" or basic in needed or any(scenario.needs == need for scenario in needed):
            if find_obstacle(basic, facts):
                break
            if basic not in conversations:
                conversations[basic] = await run.hold(basic, version)
            learn_facts(need, conversations[basic], facts)
    testable = [
        requirement.scenario
        for requirement in wanted
        if not find_obstacle(requirement.scenario, facts) and not is_unadvertised(requirement, facts)
    ]
    missing = [scenario for scenario in dict.fromkeys(testable) if scenario not in conversations]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {scenario: group.create_task(run.hold(scenario, version)) for scenario in missing}
    except* OSError as failures:
        raise OSError(str(failures.exceptions[0])) from None
    conversations |= {scenario: task.result() for scenario, task in tasks.items()}
    counted = [conversation for scenario, conversation in conversations.items() if scenario.counts_flaws]
    flaws = [(flaw, conversation) for conversation in counted for flaw in conversation.flaws]
    return facts, [to_result(requirement, conversations, flaws, facts) for requirement in wanted]


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
            end = conversation.find_end(first[0]) if first else None
            if end is None or first[0].error or (end is first[0].answer and first[0].member("stopReason") is None):
                facts.broken[need] = why or f"a plain prompt failed; see {facts.version.prefix}PROMPT-001"


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
    see = requirement.id
    if request.method in ANSWERED_BY:
        see = facts.version.prefix + ANSWERED_BY[request.method]
    is_slow = request.method in facts.unanswered or (request.late_answer and not request.interrupted)
    return see if is_slow and see != requirement.id else ""


def decode_stderr(conversation: Conversation) -> str:
    return bytes(conversation.stderr).decode(errors="replace")
