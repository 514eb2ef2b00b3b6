"""`crow eval`: run tasks by prompts and models, and report and compare what came of it."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from crow_cli.console import AS_JSON, format_time, limit_option, print_json, print_note, print_table
from crow_cli.process import fail, hide_memory
from crow_core import __version__
from crow_core.errors import ConfigError, StoreError
from crow_core.text import escape_controls

from crow_eval.commands.evaluation_output import print_comparisons, print_report, reporting
from crow_eval.commands.inspect_command import import_logs
from crow_eval.commands.task_runs import AT_ONCE, MODE, match_tasks, noting_stop, open_database, run_and_exit

if TYPE_CHECKING:
    from crow_persistence.database import Database

    from crow_eval.evaluation_store import Evaluation
    from crow_eval.runs import TaskFault
    from crow_eval.tasks import Task

HTML = click.option(
    "--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="Write the report to this file."
)


class EvalGroup(click.Group):
    """The commands; `crow eval DATASET` is `crow eval run DATASET`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "-h", "--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group("eval", cls=EvalGroup)
def evaluate() -> None:
    """Run tasks by prompts and models, and compare what came of it: crow eval DATASET runs one.

    A dataset that is called like a command is given with its folder: ./list.
    """


@evaluate.command()
@click.argument("dataset", required=False, default="")
@click.option(
    "--prompt",
    "prompts",
    metavar="FILE|NAME@N",
    multiple=True,
    help="A template in place of the system prompt, a stored version of a prompt, or `current`; repeatable.",
)
@click.option("-m", "--model", "models", multiple=True, help="A model, as for `crow run`; repeatable.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each task.")
@AT_ONCE
@MODE
@click.option("--judge", metavar="MODEL", default="", help="The model that judges; by default the first of -m.")
@click.option("--max-cost", type=click.FloatRange(0, min_open=True), help="What all runs may cost.")
@click.option("--resume", metavar="ID", default="", help="Go on with an evaluation: run what has no outcome yet.")
@click.option("--validate", is_flag=True, help="Only run the checks on each start and each reference solution.")
@HTML
@AS_JSON
def run(dataset: str, resume: str, validate: bool, as_json: bool, page: Path | None, **options: Any) -> None:
    """Run the tasks of DATASET: a folder of tasks, one task, a .jsonl file, or a suite of crow's own (`daily`,
    `first-steps`).

    Each run has a copy of the task's files and a stored session. Tools work there as in any session. Permissions are
    not a sandbox, and --mode yolo lets the model run any command on this machine. With --resume, an evaluation that was
    stopped or killed continues, and cells that ended with an error run again.

    Exit codes: 0 every run has an outcome, 1 some have none or ended with an error, 2 wrong usage. With --validate: 1 a
    task passes on its untouched start, or a check fails on the reference solution.
    """
    if bool(dataset) == bool(resume):
        fail("give a DATASET, or --resume with the id of an evaluation.")
    if resume and (validate or options["prompts"] or options["models"]):
        fail("--resume goes on with what was begun: leave out --validate, --prompt and --model.")
    run_and_exit(lambda: run_dataset(dataset, resume, validate, as_json=as_json, page=page, **options))


async def run_dataset(
    dataset: str,
    resume: str,
    validate: bool,
    *,
    as_json: bool,
    page: Path | None,
    at_once: int,
    max_cost: float | None,
    **options: Any,
) -> int:
    """Run a dataset, or go on with an evaluation; print the report and return the exit code.

    Raises ConfigError, ModelError, StoreError, AgentError, WorkspaceError.
    """
    from crow_agent.budget import Budget
    from crow_agent.errors import BudgetSpent

    from crow_eval import runs
    from crow_eval.evaluation_store import load
    from crow_eval.tasks import load_dataset

    env = os.environ
    hide_memory()
    if validate:
        return await validate_dataset(load_dataset(dataset), at_once, env)
    database = open_database(env)
    budget = Budget(money=max_cost, setting="--max-cost")
    if resume:
        evaluation, tasks = load_begun(database, resume)
        await runs.check_prices(evaluation.settings.models, evaluation.settings.judge, tasks, budget, env)
    else:
        tasks = load_dataset(dataset)
        await runs.check_prices(options["models"] or [""], options["judge"], tasks, budget, env)
        evaluation = await begin(database, dataset, tasks, at_once, env, **options)
    budget.spend("money", sum(cell.cost or 0 for cell in evaluation.cells))
    reason = ""
    with reporting(evaluation) as report, noting_stop(f"crow eval --resume {evaluation.id[:8]}"):
        try:
            await runs.run_evaluation(
                evaluation, tasks, database, env=env, at_once=at_once, report=report, budget=budget
            )
        except BudgetSpent as error:
            reason = str(error)
    evaluation = load(database, evaluation.id)
    print_report(evaluation, as_json=as_json, page=page)
    left = evaluation.cells_wanted - len(evaluation.finished)
    if left:
        print_note(" ".join([reason, f"{left:,} runs have no outcome: crow eval --resume {evaluation.id[:8]}"]).strip())
    return 1 if left else 0


async def validate_dataset(tasks: "Sequence[Task]", at_once: int, env: Mapping[str, str]) -> int:
    """Run the checks of tasks on their starts and solutions; print what is wrong, and return the exit code.

    Raises ConfigError, WorkspaceError.
    """
    from crow_eval import runs

    faults = await runs.validate(tasks, at_once, runs.find_hidden(env))
    for fault in faults:
        click.secho(escape_controls(describe_fault(fault)), fg="red" if fault.is_fatal else None)
    wrong = len({fault.task for fault in faults if fault.is_fatal})
    click.echo(f"{len(tasks) - wrong:,} of {len(tasks):,} tasks are right.")
    return 1 if wrong else 0


def print_untouched(faults: "Sequence[TaskFault]") -> None:
    """Warn about tasks that pass on their untouched starts, and name the single checks that do."""
    for task in dict.fromkeys(fault.task for fault in faults if fault.is_fatal):
        print_note(f"Warning: {task}: every check passes on the untouched start, so it tells nothing.")
    if guards := [fault for fault in faults if not fault.is_fatal]:
        named = "; ".join(f"{fault.task}: {fault.check}" for fault in guards[:3])
        more = f"; and {len(guards) - 3} more, which --validate lists" if len(guards) > 3 else ""
        print_note(f"Checks that pass on the untouched start: {named}{more}.")


def describe_fault(fault: Any) -> str:
    """Say in a line what is wrong with a check."""
    return ": ".join(filter(None, [fault.task, fault.check, fault.sentence]))


async def begin(
    database: "Database",
    dataset: str,
    tasks: "Sequence[Task]",
    at_once: int,
    env: Mapping[str, str],
    *,
    prompts: Sequence[str],
    models: Sequence[str],
    repeat: int,
    mode: str,
    judge: str,
) -> "Evaluation":
    """Store an evaluation that begins, after a look for all that can be wrong with it before anything runs.

    Raises ConfigError, ModelError, StoreError, WorkspaceError.
    """
    from crow_agent.settings.config import load_config
    from crow_agent.settings.home import Home

    from crow_eval import runs
    from crow_eval.cells import EvaluationSettings, TaskName
    from crow_eval.compared_prompts import load_prompts
    from crow_eval.evaluation_store import create
    from crow_eval.tasks import find_dataset

    home = Home.find(env)
    chosen = load_prompts(prompts, load_config(home, env), home, database)
    wanted = list(dict.fromkeys(models)) or [""]
    names = await runs.find_model_names(wanted, env)
    print_untouched(await runs.find_untouched(tasks, at_once, runs.find_hidden(env)))
    return create(
        database,
        find_dataset(dataset),
        EvaluationSettings(
            tasks=[TaskName(task.id, task.digest) for task in tasks],
            prompts=chosen,
            models=wanted,
            names=names,
            repeat=repeat,
            mode=mode,
            judge=judge,
            crow=__version__,
        ),
    )


def load_begun(database: "Database", id: str) -> "tuple[Evaluation, list[Task]]":
    """Load an evaluation and its tasks. Raises StoreError, and ConfigError if a task is gone or was changed since."""
    from crow_eval.evaluation_store import load
    from crow_eval.tasks import load_dataset

    evaluation = load(database, id)
    if by := evaluation.settings.imported:
        raise ConfigError(f"{evaluation.id[:8]} was run by {by}, and cannot go on here.")
    if evaluation.settings.search:
        raise ConfigError(f"It is a search. Go on with it: crow prompts improve --resume {evaluation.id[:8]}")
    return evaluation, match_tasks(evaluation, load_dataset(evaluation.dataset))


@evaluate.command("list")
@limit_option(20)
@AS_JSON
def list_(limit: int, as_json: bool) -> None:
    """List evaluations, the newest first."""
    import msgspec

    from crow_eval.cells import EvaluationSettings
    from crow_eval.evaluation_store import list_stored

    rows = read(lambda database: list_stored(database, limit), lists=True, as_json=as_json)
    if as_json:
        names = ("id", "dataset", "created", "ended", "passed", "failed", "error")
        print_json([{name: getattr(row, name) for name in names} for row in rows])
        return
    if not rows:
        print_note("Nothing has been evaluated yet: crow eval daily runs the suite that comes with crow.")
        return
    lines: list[tuple[str, ...]] = []
    for row in rows:
        settings = msgspec.json.decode(row.settings, type=EvaluationSettings)
        variants = ", ".join(variant.label for variant in settings.variants)
        if settings.search:
            variants = f"search: {settings.search.target}, {len(settings.prompts) - 1} candidates"
        state = "ended" if row.ended else "not ended"
        counts = [str(getattr(row, name)) for name in ("passed", "failed", "error")]
        lines.append((row.id[:8], format_time(row.created), *counts, state, Path(row.dataset).name, variants))
    print_table(("ID", "BEGUN", "PASSED", "FAILED", "ERRORS", "STATE", "DATASET", "VARIANTS"), lines)


evaluate.add_command(import_logs)


@evaluate.command()
@click.argument("evaluation", metavar="ID")
@HTML
@AS_JSON
def show(evaluation: str, as_json: bool, page: Path | None) -> None:
    """Show the report of an evaluation."""
    from crow_eval.evaluation_store import load

    loaded = read(lambda database: load(database, evaluation))
    try:
        print_report(loaded, as_json=as_json, page=page)
    except ConfigError as error:
        fail(str(error))


@evaluate.command()
@click.argument("first", metavar="RUN_A")
@click.argument("second", metavar="RUN_B")
@click.option(
    "--fail-below",
    type=click.FloatRange(-1, 1),
    help="End with code 1 if the pass rate has changed by less than this, such as -0.05.",
)
@AS_JSON
def diff(first: str, second: str, fail_below: float | None, as_json: bool) -> None:
    """Compare two evaluations in pairs of runs: B against A.

    Compared are variants with the same prompt and model, or the only variant of each.

    Exit codes: 0 compared, 1 a pass rate fell below the limit, 2 nothing to compare.
    """

    from crow_eval.evaluation_report import compare_evaluations, comparison_to_json, list_changed_tasks
    from crow_eval.evaluation_store import load

    one, two = read(lambda database: (load(database, first), load(database, second)))
    try:
        found = compare_evaluations(one, two)
    except ValueError as error:
        fail(f"{one.id[:8]} and {two.id[:8]} cannot be compared: {error}")
    changed = list_changed_tasks(one, two)
    if as_json:
        print_json({"comparisons": [comparison_to_json(each) for each in found], "changed_tasks": changed})
    else:
        print_comparisons(found)
    if changed:
        print_note(f"Warning: these tasks were changed between the two: {', '.join(changed)}.")
    if fail_below is not None and any(each.pairs.difference < fail_below for each in found):
        print_note(f"The pass rate fell by more than {-fail_below * 100:g} points.")
        sys.exit(1)


def read(function: "Callable[[Database], Any]", *, lists: bool = False, as_json: bool = False) -> Any:
    """Read from the database; print an error as a message and exit with code 2.

    A command that `lists` exits with code 0 if nothing is stored yet: its list is empty, also `as_json`.
    """
    from crow_cli.storage import NothingStored, end_with_empty_list, open_database

    try:
        return function(open_database(os.environ))
    except StoreError as error:
        if lists and isinstance(error, NothingStored):
            end_with_empty_list(str(error), as_json=as_json)
        fail(escape_controls(str(error)))
