"""Run an evaluation: every cell that has no outcome yet, some at a time."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import msgspec
from crow_agent.agent import Agent
from crow_agent.app import find_key_variables
from crow_agent.budget import Budget
from crow_agent.errors import AgentError, BudgetSpent, OutputError, PromptTimeout
from crow_agent.result import Result
from crow_agent.settings.config import load_config, load_environment
from crow_agent.settings.discovery import search_models
from crow_agent.settings.home import Home
from crow_core.app import Crow
from crow_core.errors import ConfigError, StoreError
from crow_core.masking import find_secrets, mask
from crow_core.session.prompts import Prompt
from crow_persistence.database import Database

from crow_eval.cells import LIMIT, Cell, CellOutcome, EvaluationSettings, Variant
from crow_eval.checks import CheckResult, Judge, Work, run_checks
from crow_eval.compared_prompts import replace_prompts
from crow_eval.context_files import give_file, is_file_name
from crow_eval.evaluation_store import CellWriter, Evaluation, load, locked, now
from crow_eval.judging import Judges
from crow_eval.meter import Meter, SessionCounts, measure, to_spending
from crow_eval.tasks import JudgeCheck, Task
from crow_eval.workspaces import WorkspaceError, open_workspace

ANSWER_LIMIT = 20_000
"""Characters of an answer that are kept with its cell, from its end; the session has all of it."""

Report = Callable[[Cell], None]
"""Is called with each cell that has ended."""


class CellRunner(Protocol):
    """Runs the cells of one variant."""

    async def run(self, cell: Cell, task: Task) -> None:
        """Run a cell and give it its outcome. Raises StoreError, BudgetSpent."""
        ...


Runners = Callable[[Sequence[Variant]], AbstractAsyncContextManager[Mapping[int, CellRunner]]]
"""Starts the runners of variants, by their numbers. Raises AgentError."""


@dataclass(frozen=True)
class TaskFault:
    """A check of a task that does not tell the start from the solution."""

    task: str
    check: str
    sentence: str
    is_fatal: bool = True
    """True if the task is wrong: a single check may pass on the start if it guards what is right there."""


async def find_model_names(models: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the names of models; "" means the configured one. Raises ConfigError and ModelError for a missing one."""
    home = Home.find(env)
    config, whole = load_config(home, env), load_environment(home, env)
    names: list[str] = []
    for model in models:
        found = await search_models(config, whole, model)
        names.append(model or next(iter(found.models)))
    return names


async def check_prices(
    models: Sequence[str], judge: str, tasks: Sequence[Task], budget: Budget, env: Mapping[str, str]
) -> None:
    """Raises ConfigError if the budget or a task limits money and a model of its calls has no prices.

    "" means the configured model, and for `judge` the first of the models. Raises ModelError for a missing one.
    """
    home = Home.find(env)
    config, whole = load_config(home, env), load_environment(home, env)
    judges = [check.model or judge for task in tasks for check in task.checks if isinstance(check, JudgeCheck)]
    limited = [to_spending(task.limits, task.id) for task in tasks]
    for model in dict.fromkeys([*models, *filter(None, judges)]):
        found = next(iter((await search_models(config, whole, model)).models.values()))
        for spending in [budget, *(limited if model in models else ())]:
            spending.check_prices(found)


def find_hidden(env: Mapping[str, str]) -> list[str]:
    """List the variables that hold crow's own keys, which no command of a task inherits. Raises ConfigError."""
    home = Home.find(env)
    return find_key_variables(load_environment(home, env), load_config(home, env))


async def find_untouched(tasks: Sequence[Task], at_once: int, hidden: Collection[str]) -> list[TaskFault]:
    """Run the checks of tasks on their untouched starts; return those that pass. Raises WorkspaceError.

    A check that a model judges is left out.
    """
    return await gather_faults(tasks, at_once, partial(check_start, hidden=hidden))


async def validate(tasks: Sequence[Task], at_once: int, hidden: Collection[str]) -> list[TaskFault]:
    """Run the checks of tasks on their starts and on their reference solutions; return those that end wrong.

    Raises WorkspaceError.
    """
    starts = await gather_faults(tasks, at_once, partial(check_start, hidden=hidden))
    return starts + await gather_faults(tasks, at_once, partial(check_solution, hidden=hidden))


async def gather_faults(tasks: Sequence[Task], at_once: int, check: Callable[[Task], Any]) -> list[TaskFault]:
    """Check tasks, some at once; return their faults in order."""
    found: dict[str, list[TaskFault]] = {}
    waiting = iter(tasks)

    async def work() -> None:
        for task in waiting:
            found[task.id] = await check(task)

    await run_together(work() for _ in range(min(at_once, len(tasks))))
    return [fault for task in tasks for fault in found[task.id]]


async def check_start(task: Task, hidden: Collection[str]) -> list[TaskFault]:
    """Return the checks of a task that pass on its untouched start. Raises WorkspaceError."""
    async with open_workspace(task, hidden) as folder:
        results = await run_checks(task, Work(folder), hidden)
    is_fatal = all(each.passed for each in results) and len(results) == len(task.checks)
    return [TaskFault(task.id, each.name, "passes on the untouched start", is_fatal) for each in results if each.passed]


async def check_solution(task: Task, hidden: Collection[str]) -> list[TaskFault]:
    """Return the checks of a task that fail on its reference solution. Raises WorkspaceError."""
    if not task.has_solution:
        return [TaskFault(task.id, "", "there is no reference solution (a folder solution)")]
    async with open_workspace(task, hidden, solved=True) as folder:
        results = await run_checks(task, Work(folder, task.answer), hidden)
    return [
        TaskFault(task.id, each.name, f"fails on the reference solution: {each.reason}")
        for each in results
        if not each.passed
    ]


async def run_evaluation(
    evaluation: Evaluation,
    tasks: Sequence[Task],
    database: Database,
    *,
    env: Mapping[str, str],
    at_once: int,
    report: Report,
    budget: Budget | None = None,
    model: Any = None,
) -> None:
    """Run the cells of an evaluation that have not passed or failed, and store each when it ends.

    `budget` is of the evaluation as a whole; with it, BudgetSpent is raised before the first cell that it does not
    cover. `model` is an object that takes the place of all models, for programs.
    Raises AgentError for an agent that cannot be started, StoreError if an outcome cannot be written,
    EvaluationRunsError if another process runs the evaluation.
    """
    with locked(Home.find(env).data, evaluation.id):
        evaluation.cells[:] = load(database, evaluation.id).cells  # another process may have run some until now
        settings = evaluation.settings
        runners = partial(open_runners, settings, tasks, env, budget, find_hidden(env), model)
        cells = plan_cells(settings)
        await run_cells(
            evaluation, cells, tasks, database, runners, env=env, at_once=at_once, report=report, budget=budget
        )


async def run_cells(
    evaluation: Evaluation,
    cells: Iterable[Cell],
    tasks: Sequence[Task],
    database: Database,
    runners: Runners,
    *,
    env: Mapping[str, str],
    at_once: int,
    report: Report,
    budget: Budget | None = None,
) -> None:
    """Run those of the cells that have not passed or failed, as `run_evaluation` does, whose lock the caller holds.

    The evaluation ends with the last of its cells.
    """
    secrets = find_own_secrets(env)
    writer, done = CellWriter(database, evaluation), evaluation.finished
    evaluation.cells[:] = done.values()  # errors are run again
    by_id = {task.id: task for task in tasks}
    left = [cell for cell in cells if cell.key not in done]
    waiting = iter(left)
    wanted = {cell.variant for cell in left}
    variants = [variant for variant in evaluation.settings.variants if variant.number in wanted]
    async with runners(variants) as by_variant:

        async def work() -> None:
            for cell in waiting:
                if budget is not None:
                    budget.check()
                await by_variant[cell.variant].run(cell, by_id[cell.task])
                cell.outcome = msgspec.convert(mask(msgspec.to_builtins(cell.outcome), secrets), CellOutcome)
                if budget is not None and cell.state == "failed":
                    budget.check()  # it may have ended the turn: the cell has no outcome then
                await writer.write(cell)
                evaluation.cells.append(cell)
                report(cell)

        ended = False
        try:
            await run_together(work() for _ in range(at_once))
            ended = evaluation.has_all_cells
        finally:
            await writer.close(ended=ended)


def find_own_secrets(env: Mapping[str, str]) -> frozenset[str]:
    """Find the secrets of crow's settings, which a check may print."""
    home = Home.find(env)
    return find_secrets(load_config(home, env), load_environment(home, env))


async def run_together(work: Iterable[Any]) -> None:
    """Run coroutines until all have ended; raise the first error, after the others were cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def plan_cells(settings: EvaluationSettings) -> list[Cell]:
    """List the cells of an evaluation, so that each task is run by all variants before any is repeated."""
    variants = settings.variants
    return [
        Cell(task=task.id, variant=variant.number, repetition=repetition)
        for repetition in range(1, settings.repeat + 1)
        for task in settings.tasks
        for variant in variants
    ]


@dataclass
class Runner:
    """Runs the cells of one variant."""

    agent: Agent
    meter: Meter
    hidden: Collection[str]
    judge: Judge

    async def run(self, cell: Cell, task: Task) -> None:
        """Run a cell and give it its outcome. A failure of the endpoint, the workspace or a judge is its error."""
        cell.started = now()
        try:
            async with open_workspace(task, self.hidden) as folder:
                await self.run_in(cell, task, folder)
        except (StoreError, BudgetSpent):
            raise
        except (AgentError, WorkspaceError, ConfigError, OSError) as error:
            cell.state, cell.outcome.error = "error", str(error)
        cell.ended = now()

    async def run_in(self, cell: Cell, task: Task, folder: Path) -> None:
        """Send the prompt of a task, and check what became of the folder. Raises AgentError, WorkspaceError."""
        schema, limits = task.find_schema(), task.limits
        outcome, fault, limit = cell.outcome, "", ""
        session = await self.agent.session(cwd=folder)
        cell.session = session.id
        counts = self.meter.counts[session.id] = SessionCounts(to_spending(limits, task.id))
        began = monotonic()
        try:
            result: Result[Any] = await session.prompt(task.prompt, output=schema, timeout=limits.timeout)
            fault = str(result.error or "")
        except PromptTimeout as error:
            result, limit = error.result or Result(session.id), f"The limit of {limits.timeout:g} seconds is reached."
        except OutputError as error:
            result, fault = error.result or Result(session.id), str(error)
        finally:
            cell.total = (monotonic() - began) * 1000
            await session.close()
            take_counts(cell, self.meter.counts.pop(session.id, counts))
        outcome.answer, outcome.stop_reason = result.text[-ANSWER_LIMIT:], result.stop_reason
        outcome.denied, outcome.tool_calls = [call.title for call in result.denied], len(result.tool_calls)
        if result.stop_reason == "cancelled":
            raise AgentError("The turn was cancelled.")
        if limit := limit or counts.reached:
            outcome.checks.append(CheckResult(name="limit", kind=LIMIT, passed=False, reason=limit))
        work = Work(folder, result.text, result.value, fault)
        outcome.checks += await run_checks(task, work, self.hidden, None if limit else self.judge)
        cell.state = "passed" if all(check.passed for check in outcome.checks) else "failed"


def take_counts(cell: Cell, counts: SessionCounts) -> None:
    """Give a cell what its session took."""
    for name in ("requests", "input", "output", "cached", "cost", "currency", "first"):
        setattr(cell, name, getattr(counts, name))


@asynccontextmanager
async def open_runners(
    settings: EvaluationSettings,
    tasks: Sequence[Task],
    env: Mapping[str, str],
    budget: Budget | None,
    hidden: Collection[str],
    model: Any,
    variants: Sequence[Variant],
) -> AsyncGenerator[Mapping[int, CellRunner]]:
    """Start the agents of the variants, by their numbers, and of the judges. Raises AgentError."""
    async with AsyncExitStack() as stack:
        judges = Judges(model or settings.judge or settings.models[0], {"env": env, "budget": budget}, hidden)
        stack.push_async_callback(judges.close)
        runners: dict[int, CellRunner] = {}
        for variant in variants:
            meter = Meter()
            agent = make_agent(variant, settings, meter, env, budget, model)
            await stack.enter_async_context(agent)
            runners[variant.number] = Runner(agent, meter, hidden, judges.judge)
        await judges.open(tasks)
        yield runners


def make_agent(
    variant: Variant,
    settings: EvaluationSettings,
    meter: Meter,
    env: Mapping[str, str],
    budget: Budget | None,
    model: Any,
) -> Agent:
    prompt = Prompt(variant.prompt.name, variant.prompt.template)

    def use(crow: Crow) -> None:
        if is_file_name(prompt.name):
            crow.use(give_file, name=prompt.name, text=prompt.template)
        else:
            crow.use(replace_prompts, prompts={prompt.name: prompt})
        crow.use(measure, meter=meter)

    mode: Any = settings.mode
    return Agent(model or variant.model, mode=mode, extensions=[use], budget=budget, env=env)
