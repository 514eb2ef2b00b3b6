"""`crow eval`: run tasks by prompts and models, and report and compare what came of it."""

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click
from crow_cli.console import AS_JSON, escape_line, format_time, limit_option, print_json, print_note, print_table
from crow_cli.process import fail, hide_memory, run_to_end
from crow_core import __version__
from crow_core.errors import ConfigError, ModelError, PromptError, StoreError
from crow_core.text import escape_controls
from crow_system.files import make_private_folder

if TYPE_CHECKING:
    from crow_persistence.database import Database

    from crow_eval.cells import Cell
    from crow_eval.evaluation_report import Comparison, EvaluationReport
    from crow_eval.evaluation_store import Evaluation
    from crow_eval.runs import TaskFault
    from crow_eval.tasks import Task

REPORT_INTERVAL = 10.0
"""Seconds between two lines about the progress, if standard error is not a terminal."""
MAX_GROUPS = 5
"""Groups of failures that the terminal shows."""
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
@click.option("--at-once", type=click.IntRange(min=1), default=4, show_default=True, help="Runs at a time.")
@click.option(
    "--mode",
    type=click.Choice(["accept-edits", "plan", "yolo"]),
    default="accept-edits",
    show_default=True,
    help="Which tool calls may run. All others that need a permission are denied.",
)
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


def run_and_exit(function: Callable[[], Any]) -> None:
    """Run a coroutine function to its end and exit with its code; print an error as a message."""
    from crow_agent.errors import AgentError

    from crow_eval.workspaces import WorkspaceError

    try:
        sys.exit(run_to_end(function()))
    except KeyboardInterrupt:
        sys.exit(130)
    except (AgentError, ConfigError, ModelError, PromptError, StoreError, WorkspaceError) as error:
        fail(str(error))


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
    from crow_eval.evaluation_store import EvaluationRunsError, load
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
    try:
        with reporting(evaluation) as report:
            await runs.run_evaluation(
                evaluation, tasks, database, env=env, at_once=at_once, report=report, budget=budget
            )
    except BudgetSpent as error:
        reason = str(error)
    except EvaluationRunsError:
        raise
    except BaseException:
        print_note(f"Stopped. Go on with: crow eval --resume {evaluation.id[:8]}")
        raise
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


def open_database(env: Mapping[str, str]) -> "Database":
    """Open the database of the configuration, which is made if there is none. Raises ConfigError."""
    from crow_agent.settings.config import get_database_url, load_config
    from crow_agent.settings.home import Home
    from crow_persistence.database import Database

    home = Home.find(env)
    make_private_folder(home.data)
    return Database(get_database_url(load_config(home, env), home), home.data)


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


def match_tasks(evaluation: "Evaluation", tasks: "Sequence[Task]") -> "list[Task]":
    """Return the tasks of an evaluation, in its order. Raises ConfigError if one is gone or was changed since."""
    by_id = {task.id: task for task in tasks}
    for name in evaluation.settings.tasks:
        if name.id not in by_id:
            raise ConfigError(f"{evaluation.dataset} has no task {name.id} any more. Begin a new evaluation.")
        if by_id[name.id].digest != name.digest:
            raise ConfigError(
                f"{by_id[name.id].source}: the task {name.id} was changed since the evaluation began. Begin a new one."
            )
    return [by_id[name.id] for name in evaluation.settings.tasks]


@contextmanager
def reporting(evaluation: "Evaluation") -> "Generator[Callable[[Cell], None]]":
    """Yield a function that shows a cell that has ended, as a bar where there is a terminal."""
    total, states = evaluation.cells_wanted, [cell.state for cell in evaluation.finished.values()]

    def describe() -> str:
        return ", ".join(
            f"{states.count(state):,} {name}"
            for state, name in (("passed", "passed"), ("failed", "failed"), ("error", "errors"))
            if states.count(state)
        )

    if not sys.stderr.isatty():
        last = monotonic()

        def report(cell: "Cell") -> None:
            nonlocal last
            states.append(cell.state)
            if monotonic() - last > REPORT_INTERVAL:
                last = monotonic()
                click.echo(f"{len(states):,} of {total:,} runs have ended: {describe()}", err=True)

        yield report
        return
    from rich.console import Console  # imported here because few commands show a bar
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(describe(), total=total, completed=len(states))

        def advance(cell: "Cell") -> None:
            states.append(cell.state)
            progress.update(bar, completed=len(states), description=describe())

        yield advance


def print_report(evaluation: "Evaluation", *, as_json: bool, page: Path | None) -> None:
    """Print the report of an evaluation, and write its page. Raises ConfigError for a file that cannot be written."""
    from crow_eval.evaluation_report import make_report, to_json

    report = make_report(evaluation)
    if page is not None:
        from crow_eval.page import to_page
        from crow_eval.search_page import to_search

        try:
            page.write_text(to_page(report, to_search(evaluation)), "utf-8")
        except OSError as error:
            raise ConfigError(f"--html: {page} cannot be written: {error.strerror}.") from error
    if evaluation.settings.search:
        from crow_eval.commands.improvement_output import print_improvement

        print_improvement(evaluation, as_json=as_json)
    elif as_json:
        print_json(to_json(report))
    else:
        print_tables(report)
    if page is not None:
        print_note(f"The report is in {page}.")


def print_tables(report: "EvaluationReport") -> None:
    """Print the tables of a report."""
    from crow_eval.page import format_number, format_percent, format_seconds

    evaluation = report.evaluation
    click.secho(escape_line(f"{evaluation.dataset}  {evaluation.id[:8]}"), bold=True)
    heads = ("PROMPT", "MODEL", "PASSED", "RATE", "95 %", "TOKENS", "FIRST", "IN ALL", "CACHED", "COST", "ERRORS")
    rows = [
        (
            one.prompt,
            one.model,
            f"{one.passed}/{one.runs}",
            format_percent(one.rate),
            f"{format_percent(one.interval.low)}-{format_percent(one.interval.high)}".replace(" %-", "-"),
            format_number(one.input + one.output),
            format_seconds(one.first),
            format_seconds(one.total),
            format_percent(one.cached_share),
            " ".join(filter(None, [format_number(one.cost), one.currency])),
            str(one.errors),
        )
        for one in report.variants
    ]
    print_table(heads, rows)
    later = [f"pass@{k} {format_percent(rate)}" for one in report.variants for k, rate in one.pass_at.items() if k > 1]
    if later:
        click.echo(f"{', '.join(later)}, in the order above")
    print_comparisons(report.comparisons)
    for title, groups in (
        ("Failures by check", report.by_check),
        ("Failures by last words", report.by_words),
        ("Errors", report.errors),
    ):
        if groups:
            click.secho(f"\n{title}", bold=True)
        for group in groups[:MAX_GROUPS]:
            click.echo(f"{group.count:>4}  {escape_line(group.what)}  ({escape_line(', '.join(group.tasks[:4]))})")
        if len(groups) > MAX_GROUPS:
            click.echo(f"      and {len(groups) - MAX_GROUPS} more")


def print_comparisons(comparisons: "Sequence[Comparison]") -> None:
    """Print a line for each comparison."""
    from crow_eval.page import describe_comparison, describe_test, format_points

    for one in comparisons:
        pairs = one.pairs
        click.echo(
            escape_line(
                f"{one.second} against {one.first}: {format_points(pairs.difference)} points "
                f"({format_points(pairs.interval.low)} to {format_points(pairs.interval.high)}), "
                f"McNemar's exact test p {describe_test(one)}, {pairs.pairs} pairs "
                f"({pairs.only_b} better, {pairs.only_a} worse). {describe_comparison(one)}"
            )
        )


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


@evaluate.command("import")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--scorer", metavar="NAME", default="", help="The only scorer that counts; by default all have to pass.")
@click.option("--pass-at", "least", type=float, help="The least score that passes; by default 1.")
@AS_JSON
def import_(logs: tuple[Path, ...], scorer: str, least: float | None, as_json: bool) -> None:
    """Import logs of Inspect (.eval, .json), each as an evaluation, with the messages of its samples as sessions.

    Samples are tasks, epochs are repetitions. A sample passes if each of its scores is 1, as C, yes and true are; P is
    0.5, and I and N are 0. A sample without a score, or with an error, is an error. A log that was imported before with
    the same options is left as it is. If one of the logs cannot be read, none is imported.
    """
    try:
        from crow_eval.inspect_logs import read_log, store_log
    except ModuleNotFoundError as error:
        fail(
            f"Inspect reads its logs, and {error.name} is not installed: uv tool install ./crow --with inspect-ai "
            "installs both, with the path of crow's repository."
        )
    from crow_agent.settings.config import get_database_url, load_config
    from crow_agent.settings.home import Home
    from crow_persistence.sql_store import BlockingStore

    home = Home.find(os.environ)
    try:
        found = [read_log(path, scorer, least) for path in logs]
        make_private_folder(home.data)
        store = BlockingStore(get_database_url(load_config(home, os.environ), home), home.data)
        try:
            stored = [(log, store_log(store, log)) for log in found]
        finally:
            store.database.close()
    except (ConfigError, StoreError) as error:
        fail(escape_controls(str(error)))
    if as_json:
        print_json(
            [
                {
                    "id": log.id,
                    "known": log.is_known,
                    **{
                        state: sum(cell.state == state for cell in log.cells) for state in ("passed", "failed", "error")
                    },
                    "partial": log.partial,
                    "sessions": imported.sessions,
                    "left_out": dict(imported.left_out),
                }
                for log, imported in stored
            ]
        )
        return
    for log, imported in stored:
        if log.is_known:
            click.echo(f"{log.id[:8]} had been imported before: {escape_line(log.dataset)}")
            continue
        cells, sessions = len(log.cells), len(imported.sessions)
        click.echo(f"{log.id[:8]} {escape_line(log.dataset)}: {cells:,} runs, {sessions:,} new sessions.")
        if log.partial:
            click.echo(f"Failed: {log.partial:,} scores above 0 that are too small to pass; --pass-at sets the least.")
        for what, count in imported.left_out.most_common():
            click.echo(escape_controls(f"Left out: {count:,} {what}."))


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
