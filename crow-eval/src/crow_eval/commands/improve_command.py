"""`crow prompts improve`: search for a better prompt, and report on tasks that the search never saw."""

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from crow_cli.console import AS_JSON, escape_line, print_note
from crow_cli.process import fail, hide_memory
from crow_core import __version__
from crow_core.errors import ConfigError

from crow_eval.commands.improvement_output import describe_best, print_improvement
from crow_eval.commands.search_sources import find_runners, find_tasks, is_dataset, load_tasks
from crow_eval.commands.task_runs import AT_ONCE, MODE, match_tasks, noting_stop, open_database, run_and_exit

if TYPE_CHECKING:
    from crow_agent.budget import Budget
    from crow_persistence.database import Database

    from crow_eval.cells import Cell
    from crow_eval.evaluation_store import Evaluation
    from crow_eval.tasks import Task

LIMITS = {"max_cost": "money", "max_tokens": "tokens", "max_requests": "requests", "max_minutes": "minutes"}
"""The limits by the options that set them."""
MAX_RUNS = 60
REPEAT = 2


@click.command()
@click.argument("name", required=False, default="")
@click.option(
    "--on",
    metavar="DATASET|SESSION",
    multiple=True,
    help="A dataset, as for `crow eval`; or the ids of stored sessions, repeatable; or `rated`, those that you rated.",
)
@click.option("-m", "--model", default="", help="The model of the tasks, as for `crow run`.")
@click.option("--proposer", metavar="MODEL", default="", help="The model that proposes; by default that of the tasks.")
@click.option("--judge", metavar="MODEL", default="", help="The model that judges; by default that of the tasks.")
@click.option(
    "--max-runs", type=click.IntRange(min=1), help=f"Runs of tasks for the search, without the report. [{MAX_RUNS}]"
)
@click.option("--repeat", type=click.IntRange(min=1), default=REPEAT, show_default=True, help="Runs for the report.")
@click.option("--max-cost", type=click.FloatRange(0, min_open=True), help="What search and report may cost together.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The tokens that they may take.")
@click.option("--max-requests", type=click.IntRange(min=1), help="The model calls that they may make.")
@click.option("--max-minutes", type=click.FloatRange(0, min_open=True), help="The minutes that the command may take.")
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the parts of the dataset.")
@AT_ONCE
@MODE
@click.option("--resume", metavar="ID", default="", help="Go on with a search that was stopped or killed.")
@AS_JSON
def improve(name: str, on: tuple[str, ...], resume: str, as_json: bool, **options: Any) -> None:
    """Search for a better version of the prompt NAME, and compare it with today's on tasks that the search never saw.

    Half of the tasks are kept for that report. A model reads runs that failed and proposes another text; GEPA chooses
    which candidates go on. Each is stored as a version of the prompt: crow prompts promote NAME@N uses one. Nothing is
    changed by itself.

    NAME is `system`, `compaction`, `judge`, a tool's description such as tool.terminal, a stored version such as
    system@2, or the path of an AGENTS.md or SKILL.md.

    Tools work as in `crow eval`, on this machine. A search uses at most half of each limit, and the report the rest.
    The same search goes on with --resume, and pays for nothing twice.

    Exit codes: 0 the report is there, also if nothing better was found, 1 it stopped before, 2 wrong usage.

    Example: crow prompts improve system --on tasks --max-cost 5
    """
    if bool(resume) == bool(name) or bool(name) != bool(on):
        fail("give the NAME of a prompt with --on, or --resume with the id of a search.")
    limits = {what: options.pop(option) for option, what in LIMITS.items()}
    given = {what: limit for what, limit in limits.items() if limit is not None}
    run_and_exit(lambda: improve_prompt(name, on, resume, given, as_json=as_json, **options))


async def improve_prompt(
    name: str,
    on: Sequence[str],
    resume: str,
    limits: dict[str, float],
    *,
    as_json: bool,
    at_once: int,
    **options: Any,
) -> int:
    """Search, print the report, and return the exit code. Raises ConfigError, ModelError, StoreError, AgentError."""
    try:
        from crow_eval.improvement import Improvement
    except ModuleNotFoundError as error:
        if error.name != "gepa":
            raise
        fail(
            "the search is made by GEPA, and gepa is not installed: uv tool install ./crow --with gepa installs both, "
            "with the path of crow's repository."
        )
    from crow_agent.budget import Budget
    from crow_agent.errors import AgentError, BudgetSpent
    from crow_agent.settings.home import Home

    from crow_eval import runs
    from crow_eval.evaluation_store import load, locked
    from crow_eval.task_parts import find_quoted

    env = os.environ
    hide_memory()
    database = open_database(env)
    if resume:
        evaluation, tasks = load_search(database, resume)
    else:
        evaluation, tasks = await begin_search(database, name, on, limits, at_once, env, **options)
    settings, notes = evaluation.settings, evaluation.settings.search
    assert notes
    notes.limits |= limits
    notes.max_runs = (options["max_runs"] if resume else None) or notes.max_runs
    budget = Budget(setting="--max-cost")
    for what, limit in notes.limits.items():
        setattr(budget, what, limit)
    await runs.check_prices([*settings.models, *filter(None, [notes.proposer])], settings.judge, tasks, budget, env)
    runners = await find_runners(database, evaluation.dataset, settings, tasks, budget, env)
    reason, go_on = "", f"crow prompts improve --resume {evaluation.id[:8]}"
    with locked(Home.find(env).data, evaluation.id):
        evaluation.cells[:] = load(database, evaluation.id).cells
        count_spent(budget, evaluation)
        with reporting(evaluation) as report, noting_stop(go_on):
            work = Improvement(evaluation, tasks, database, runners, budget, env, at_once, report)
            try:
                budget.start()
                await work.run()
            except (AgentError, BudgetSpent) as error:
                reason = str(error)
    print_improvement(load(database, evaluation.id), as_json=as_json)
    if quoted := find_quoted(tasks, settings.prompts[notes.winner or 0].template, settings.prompts[0].template):
        best = settings.prompts[notes.winner or 0].label
        print_note(
            f"Warning: {best} quotes the text that a check expects of {len(quoted)} tasks, so it may not help with "
            f"others: {', '.join(quoted)}."
        )
    if reason:
        print_note(f"{reason} Go on with: {go_on}")
    return 1 if reason else 0


async def begin_search(
    database: "Database",
    name: str,
    on: Sequence[str],
    limits: dict[str, float],
    at_once: int,
    env: Mapping[str, str],
    *,
    model: str,
    proposer: str,
    judge: str,
    max_runs: int | None,
    repeat: int,
    seed: int,
    mode: str,
) -> "tuple[Evaluation, list[Task]]":
    """Store a search that begins, after a look for all that can be wrong with it before anything runs.

    Raises ConfigError, ModelError, StoreError, WorkspaceError.
    """
    from crow_eval import runs
    from crow_eval.cells import Candidate, EvaluationSettings, SearchNotes, TaskName
    from crow_eval.current_prompts import find_current
    from crow_eval.evaluation_store import create
    from crow_eval.improvement import load_first
    from crow_eval.task_parts import split_tasks

    names = await runs.find_model_names([model, *filter(None, [proposer])], env)
    first = load_first(database, await find_current(name, model, database, env, runs=is_dataset(on)))
    dataset, tasks = await find_tasks(database, on, first, at_once, env)
    parts = split_tasks(tasks, seed, max_runs or MAX_RUNS)
    search = SearchNotes(
        target=first.name,
        train=parts.train,
        validation=parts.validation,
        test=parts.test,
        seed=seed,
        max_runs=max_runs or MAX_RUNS,
        proposer=proposer,
        limits=limits,
        candidates=[Candidate()],
    )
    settings = EvaluationSettings(
        tasks=[TaskName(task.id, task.digest) for task in tasks],
        prompts=[first],
        models=[model],
        names=names[:1],
        repeat=repeat,
        mode=mode,
        judge=judge,
        crow=__version__,
        search=search,
    )
    return create(database, dataset, settings), tasks


def load_search(database: "Database", id: str) -> "tuple[Evaluation, list[Task]]":
    """Load a search and its tasks. Raises StoreError, and ConfigError if it is none or a task was changed."""
    from crow_eval.evaluation_store import load

    evaluation = load(database, id)
    if evaluation.settings.search is None:
        raise ConfigError(f"{evaluation.id[:8]} is no search. Go on with it: crow eval --resume {evaluation.id[:8]}")
    return evaluation, match_tasks(evaluation, load_tasks(database, evaluation))


def count_spent(budget: "Budget", evaluation: "Evaluation") -> None:
    """Count what the stored runs and proposals of a search took."""
    assert evaluation.settings.search
    for cell in evaluation.cells:
        spend(budget, cell.cost, cell.input + cell.output, cell.requests)
    for each in evaluation.settings.search.proposals:
        spend(budget, each.cost, each.tokens, each.requests)


def spend(budget: "Budget", cost: float | None, tokens: int, requests: int) -> None:
    """Count what a run or a proposal took."""
    for what, amount in (("money", cost or 0.0), ("tokens", tokens), ("requests", requests)):
        budget.spend(what, amount)


@contextmanager
def reporting(evaluation: "Evaluation") -> "Generator[Callable[[Cell], None]]":
    """Yield a function that shows the progress after each run, with the best candidate so far."""
    from rich.console import Console  # imported here because few commands show a bar
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    notes, settings = evaluation.settings.search, evaluation.settings
    assert notes
    hidden = {*notes.test}

    def count() -> int:
        return sum(cell.task not in hidden for cell in evaluation.cells)

    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=notes.max_runs, completed=count())
        last = ""

        def show(cell: "Cell") -> None:
            nonlocal last
            if cell.task in hidden:
                done = sum(each.task in hidden for each in evaluation.cells)
                said = f"report: {done} of {len(hidden) * settings.repeat * 2} runs"
            else:
                said = describe_best(evaluation)
            progress.update(bar, completed=count(), description=escape_line(said))
            if not sys.stderr.isatty() and said.partition(":")[0] != last:
                last = said.partition(":")[0]
                click.echo(f"{count():,} of {notes.max_runs:,} runs, {said}", err=True)

        yield show
