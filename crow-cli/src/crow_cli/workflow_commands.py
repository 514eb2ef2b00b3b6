"""`crow worker` and `crow workflows`: run durable workflows, list them, and answer what they wait for."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click
from crow_core.errors import ConfigError
from crow_core.text import escape_controls

from crow_cli.console import AS_JSON, escape_line, limit_option, print_json, print_note, print_table, shorten
from crow_cli.process import fail, run_to_end
from crow_cli.storage import end_with_empty_list

if TYPE_CHECKING:
    from crow_agent.workflows import WaitingApproval, WorkflowStatus, WorkflowStep

T = TypeVar("T")
STATES = ("queued", "running", "done", "failed", "cancelled")
RESULT_WIDTH = 80
"""The most columns of a step's result that are shown."""
WORKFLOW = click.argument("workflow", metavar="ID")


@click.command()
@click.argument("programs", metavar="FILE|MODULE...", nargs=-1, required=True)
@click.option("--queue", "queues", metavar="NAME", multiple=True, help="Take work from this queue alone; repeatable.")
@click.option("--concurrency", type=click.IntRange(min=1), help="The most workflows of each queue at a time.")
@click.option(
    "--health",
    metavar="FILE|PORT",
    default="",
    help="Write a file every second as long as the worker can work, or answer HTTP at a port of this machine.",
)
def worker(programs: tuple[str, ...], queues: tuple[str, ...], concurrency: int | None, health: str) -> None:
    """Run the durable workflows of Python programs: a file such as pipelines.py, or a module such as shop.pipelines.

    Any number of workers share the work if [database] url names PostgreSQL. When one ends, dies or freezes, another
    takes over within seconds. SIGTERM and SIGINT suspend what runs and end the worker with code 0.
    """
    import sys

    from crow_cli.worker import work  # not above: the other commands do not need it

    try:
        sys.exit(run_to_end(work(programs, queues, concurrency, health)))
    except KeyboardInterrupt:
        sys.exit(0)
    except ConfigError as error:
        fail(str(error))


@click.group()
def workflows() -> None:
    """List durable workflows; approve, cancel, resume and fork them."""


@workflows.command("list")
@click.option("--state", "states", type=click.Choice(STATES), multiple=True, help="Only these; repeatable.")
@click.option("--waiting", "only_waiting", is_flag=True, help="Only those that wait for an approval.")
@limit_option(20)
@AS_JSON
def list_(states: tuple[str, ...], only_waiting: bool, limit: int, as_json: bool) -> None:
    """List workflows, the newest first."""
    from crow_agent.workflows import list_workflows
    from crow_agent.workflows.answers import list_asked

    async def read() -> "tuple[list[WorkflowStatus], list[WaitingApproval]]":
        return await list_workflows(states=states, limit=None if only_waiting else limit), await list_asked()

    found, waiting = run_here(read, lists=True, as_json=as_json)
    asked = {each.workflow_id for each in waiting if each.answer is None}
    answered = {each.workflow_id for each in waiting} - asked
    found = [each for each in found if each.id in asked or not only_waiting][:limit]
    if as_json:
        print_json([{**asdict(each), "waiting": each.id in asked, "answered": each.id in answered} for each in found])
        return
    if not found:
        print_note("No workflow waits for an approval." if only_waiting else "There are no such workflows.")
        return
    rows = [
        (
            each.id,
            each.name,
            each.version,
            describe_state(each, is_asked=each.id in asked, is_answered=each.id in answered),
            each.queue,
            f"{each.updated:%Y-%m-%d %H:%M}" if each.updated else "",
        )
        for each in found
    ]
    print_table(("ID", "WORKFLOW", "VERSION", "STATE", "QUEUE", "UPDATED"), rows)


def describe_state(status: "WorkflowStatus", *, is_asked: bool, is_answered: bool) -> str:
    """Say in words what a workflow does, or waits for."""
    if is_asked:
        state = "waits for approval"
    elif is_answered:
        state = f"answered, waits for a worker with version {status.version}"
    else:
        state = status.state
    return state + (" (stranded)" if status.is_stranded else "")


@workflows.command()
@WORKFLOW
@AS_JSON
def show(workflow: str, as_json: bool) -> None:
    """Show a workflow: its steps with the numbers that `fork --step` takes, its result, and what it waits for."""
    from crow_agent.workflows import WorkflowHandle, list_steps
    from crow_agent.workflows.answers import list_asked
    from crow_agent.workflows.location import find_url

    async def read() -> "tuple[WorkflowStatus, list[WorkflowStep], list[WaitingApproval]]":
        status = await WorkflowHandle[Any](workflow, find_url()[0]).status()
        return status, await list_steps(workflow), await list_asked(workflow)

    found, steps, waiting = run_here(read)
    if as_json:
        waits = [asdict(each) for each in waiting if each.answer is None]
        answered = [asdict(each) for each in waiting if each.answer is not None]
        told = {"steps": [asdict(each) for each in steps], "waiting": waits, "answered": answered}
        print_json({**asdict(found), **told})
        return
    lines = {
        "id": found.id,
        "workflow": f"{found.name} (version {found.version})",
        "state": found.state,
        "queue": found.queue,
        "executor": found.executor,
        "parent": found.parent,
        "fork of": found.forked_from,
        "created": f"{found.created:%Y-%m-%d %H:%M:%S}" if found.created else "",
        "updated": f"{found.updated:%Y-%m-%d %H:%M:%S}" if found.updated else "",
        "arguments": json.dumps(found.arguments, ensure_ascii=False),
        "error": found.error,
        "result": json.dumps(found.result, ensure_ascii=False) if found.state == "done" else "",
    }
    for name, value in lines.items():
        if value:
            click.echo(f"{name:<10} {escape_controls(value)}")
    if steps:
        print_steps(steps)
    for each in waiting:
        if each.answer is None:
            value = each.value if isinstance(each.value, str) else json.dumps(each.value, ensure_ascii=False, indent=2)
            click.secho(f"waits for an approval at step {each.label}:", bold=True)
            click.echo(escape_controls(value))
        else:
            verdict = "approved" if each.answer else "rejected"
            note = f" ({each.answer.note})" if each.answer.note else ""
            click.secho(f"step {each.label} is answered: {verdict}{escape_controls(note)}.", bold=True)
            click.echo(
                f"It goes on when a worker runs {escape_controls(found.name)} in version "
                f"{escape_controls(found.version)}. `crow workflows fork --version` moves it to another one."
            )


def show_value(value: Any) -> str:
    """Return a JSON value as text; empty for null."""
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def print_steps(steps: "Sequence[WorkflowStep]") -> None:
    """Print steps as a table, each with its number for `fork --step`."""
    rows = [
        (
            each.label or "in a branch",
            each.name,
            each.state,
            shorten(escape_line(each.error or show_value(each.result)), RESULT_WIDTH),
        )
        for each in steps
    ]
    print_table(("STEP", "NAME", "STATE", "RESULT"), rows)


@workflows.command()
@WORKFLOW
@click.option("--reject", is_flag=True, help="Answer no.")
@click.option("--step", "label", metavar="STEP", default="", help="The step, if it waits for several answers.")
@click.option("--note", default="", help="A note that is kept with the answer.")
def approve(workflow: str, reject: bool, label: str, note: str) -> None:
    """Answer what a workflow waits for. The first answer counts. `crow workflows show` shows the question.

    Below crow itself it is refused: a model must not approve its own work.
    """
    from crow_agent.workflows import answer

    run_here(lambda: answer(workflow, not reject, note, label=label, by="the user, by command"))
    print_note(f"{'Rejected' if reject else 'Approved'}: {workflow}.")


@workflows.command()
@WORKFLOW
def cancel(workflow: str) -> None:
    """Cancel a workflow: what runs is interrupted, and nothing runs after it."""
    from crow_agent.workflows import WorkflowError, WorkflowHandle
    from crow_agent.workflows.location import find_url

    async def end() -> None:
        handle = WorkflowHandle[Any](workflow, find_url()[0])
        if (state := (await handle.status()).state) not in ("queued", "running"):
            raise WorkflowError(f"Workflow {workflow} is {state}: there is nothing to cancel.")
        await handle.cancel()

    run_here(end)
    print_note(f"Cancelled: {workflow}.")


@workflows.command()
@WORKFLOW
def resume(workflow: str) -> None:
    """Go on with a workflow that was cancelled or has failed."""
    from crow_agent.workflows import resume

    run_here(lambda: resume(workflow))
    print_note(f"Resumed: {workflow}. A worker goes on with it.")


@workflows.command()
@WORKFLOW
@click.option("--step", type=int, help="The first step to do again, as `show` numbers them; by default after the last.")
@click.option("--id", "new_id", metavar="ID", default="", help="The id of the fork.")
@click.option("--version", default="", help="The version of the workflow in the programs that shall do it.")
def fork(workflow: str, step: int | None, new_id: str, version: str) -> None:
    """Start a new workflow with the results and the sessions of another one; print its id.

    So an unfinished one is moved to programs with another version of the workflow. Cancel the old one then.
    """
    from crow_agent.workflows import fork

    handle = run_here(lambda: fork(workflow, step=step, id=new_id, version=version))
    click.echo(escape_controls(handle.id))


def run_here(function: Callable[[], Awaitable[T]], *, lists: bool = False, as_json: bool = False) -> T:
    """Run a function of the workflows' library; print its error as a message and exit.

    A command that `lists` exits with code 0 before the first workflow: its list is empty, also `as_json`.
    """
    from crow_agent.workflows import WorkflowError
    from sqlalchemy.exc import DBAPIError

    async def run() -> T:
        return await function()

    try:
        return asyncio.run(run())
    except (ConfigError, WorkflowError) as error:
        fail(str(error))
    except DBAPIError as error:
        if "workflow_status" in str(error.orig):
            sentence = "Nothing has been stored yet: the tables are made with the first workflow."
            if lists:
                end_with_empty_list(sentence, as_json=as_json)
            fail(sentence)
        fail(f"the database of the workflows does not answer: {' '.join(str(error.orig).split())}.")
    except ModuleNotFoundError as error:
        fail(f"durable workflows need a library ({error}). Install crow-agent[workflows] where crow is installed.")
