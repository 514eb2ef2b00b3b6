"""A model as a judge: it reads the task, the answer and the changes, and answers a question about them."""

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from crow_agent.agent import Agent
from crow_agent.errors import AgentError
from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_core.session.prompts import Prompt

from crow_eval.checks import CheckResult, Work
from crow_eval.compared_prompts import load_judge_prompt, replace_prompts
from crow_eval.tasks import PASS_RULE, JudgeCheck, Task, describe_check, read_text
from crow_eval.workspaces import describe_changes, open_workspace

COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq}
VERDICTS: dict[str, Any] = {"verdict": {"enum": ["yes", "no"]}}
SCORES: dict[str, Any] = {"score": {"type": "number", "minimum": 0, "maximum": 10}}


class Judges:
    """The agents that judge, one for each model and prompt. They have no tools."""

    def __init__(self, model: str, options: dict[str, Any], hidden: Collection[str]) -> None:
        self._model = model
        self._options = options
        self._hidden = hidden
        self._agents: dict[tuple[str, str], Agent] = {}

    def _find_own(self) -> Prompt:
        """Return the prompt of checks that name none. Raises ConfigError."""
        home = Home.find(self._options["env"])
        return load_judge_prompt(load_config(home, self._options["env"]), home)

    def find_agent(self, task: Task, check: JudgeCheck) -> Agent:
        """Return the agent for a check. Raises ConfigError."""
        template = read_text(task.folder / check.prompt) if check.prompt else self._find_own().template
        model = check.model or self._model
        if (agent := self._agents.get((model, template))) is None:
            system = Prompt("judge", template)

            def use(crow: Any) -> None:
                crow.use(replace_prompts, prompts={"system": system})

            agent = Agent(model, tools=[], extensions=[use], **self._options)
            self._agents[model, template] = agent
        return agent

    async def open(self, tasks: Sequence[Task]) -> None:
        """Start the agents of all checks, so that a missing model is named before anything runs. Raises AgentError."""
        for task in tasks:
            for check in task.checks:
                if isinstance(check, JudgeCheck):
                    await self.find_agent(task, check).open()

    async def close(self) -> None:
        for agent in self._agents.values():
            await agent.close()

    async def judge(self, task: Task, check: JudgeCheck, work: Work) -> CheckResult:
        """Ask a model whether a check passes. Raises AgentError, WorkspaceError."""
        async with open_workspace(task, self._hidden) as start:
            changes = describe_changes(start, work.workspace)
        is_score = check.passes not in ("yes", "no")
        parts = {"task": task.prompt, "answer": work.answer, "changes": changes or "none"}
        given, session = await ask_judge(self.find_agent(task, check), parts, check.question, is_score=is_score)
        verdict = given["score" if is_score else "verdict"]
        return CheckResult(
            name=describe_check(check),
            kind="judge",
            passed=passes(check.passes, verdict),
            reason=f"{verdict}: {given['reason']}",
            session=session,
        )


async def ask_judge(
    agent: Agent, parts: Mapping[str, str], question: str, *, is_score: bool = False
) -> tuple[dict[str, Any], str]:
    """Ask a judge a question about material; return its reason and its verdict or score, and the id of its session.

    Raises AgentError.
    """
    material = "\n\n".join(f"<{name}>\n{text}\n</{name}>" for name, text in parts.items())
    how = "Give a score from 0 (not at all) to 10 (fully)." if is_score else "Answer yes or no."
    kind = SCORES if is_score else VERDICTS
    schema = {
        "type": "object",
        "properties": {"reason": {"type": "string"}, **kind},
        "required": ["reason", *kind],
        "additionalProperties": False,
    }
    result = await agent.prompt(f"{material}\n\nThe question: {question}\n{how}", output=schema)
    if result.error is not None:
        raise AgentError(f"The judge gave no verdict: {result.error}")
    return result.output, result.session_id


def passes(rule: str, verdict: str | float) -> bool:
    """Return whether a judge's verdict or score passes."""
    match = PASS_RULE.fullmatch(rule)
    assert match is not None
    word, comparison, number = match.groups()
    return verdict == word if word else COMPARISONS[comparison](float(verdict), float(number))
