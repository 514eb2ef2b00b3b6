"""`crow reask`: ask stored sessions again, with another prompt, model or sampling."""

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from crow_cli.console import AS_JSON, escape_line, print_json, print_table
from crow_cli.process import fail, hide_memory, run_to_end
from crow_cli.storage import open_database
from crow_core.text import escape_controls

if TYPE_CHECKING:
    from collections.abc import Callable

    from crow_core.models.model_call import Model
    from crow_core.session.prompts import Prompt
    from crow_persistence.database import Database
    from sqlalchemy import Connection

    from crow_eval.reask import Changes, Reasked, StoredRequest, StoredSession

MAX_DEPARTURES_SHOWN = 3
MAX_LIVE_REQUESTS = 100
"""Model calls that a session makes at most if its tools run."""


@click.command()
@click.argument("sessions", nargs=-1, required=True, metavar="SESSION...")
@click.option("--prompt", default="", help="A file with a template, or a stored version such as system@3.")
@click.option("-m", "--model", default="", help="A configured model, or the endpoint's name for one.")
@click.option(
    "--from-request", "start", type=click.IntRange(min=1), default=1, help="Keep the replies before this one."
)
@click.option(
    "-s", "--sampling", multiple=True, metavar="NAME=VALUE", help="A parameter of each request; null removes it."
)
@click.option(
    "--tools",
    type=click.Choice(["stored", "live"]),
    default="stored",
    show_default=True,
    help="Take the results of tools from the log, or run the tools in a copy of the folder at its start.",
)
@click.option(
    "--mode",
    type=click.Choice(["accept-edits", "plan", "yolo"]),
    help="With --tools live: which tool calls may run (accept-edits). All others that need a permission are denied.",
)
@click.option(
    "--max-requests", type=click.IntRange(min=1), help="With --tools live: the most model calls of a session (100)."
)
@click.option(
    "--max-cost", type=click.FloatRange(0, min_open=True), help="With --tools live: what all sessions may cost."
)
@click.option("--at-once", type=click.IntRange(1, 500), default=8, show_default=True, help="Sessions at a time.")
@AS_JSON
def reask(
    sessions: Sequence[str],
    prompt: str,
    model: str,
    start: int,
    sampling: Sequence[str],
    tools: str,
    mode: str | None,
    max_requests: int | None,
    max_cost: float | None,
    at_once: int,
    as_json: bool,
) -> None:
    """Ask stored sessions again, request by request. No tool is run, except with --tools live.

    Tool results come from the log while the new replies call the same tools with the same arguments. The first reply
    that does not is shown next to the old one, and ends its session. The new replies are stored in sessions of their
    own; a second start asks only what has no reply yet. The exit code is 1 if a session could not be asked to its end.

    With --tools live, the prompts of a session are sent to a new one. Its tools run in a copy of the folder as it was
    recorded when the session began, and it continues after a departure. Permissions are not a sandbox there, either.

    Example: crow reask 3fa9 81c2 --prompt new.md.j2 -s temperature=0
    """
    from crow_core.errors import ConfigError, ModelError, PromptError, StoreError

    live = {"mode": mode, "max_requests": max_requests, "max_cost": max_cost} if tools == "live" else None
    if live is None and (mode or max_requests or max_cost):
        fail("--mode, --max-requests and --max-cost are for --tools live, which runs tools.")
    if live is not None and start > 1:
        fail("--from-request does not go with --tools live, which sends all prompts.")
    try:
        code = run_to_end(
            reask_sessions(sessions, prompt, model, start, parse_sampling(sampling), at_once, as_json, live)
        )
    except (ConfigError, ModelError, PromptError, StoreError) as error:
        fail(str(error))
    raise SystemExit(code)


def parse_sampling(given: Sequence[str]) -> dict[str, Any]:
    """Parse parameters; a value that is not JSON is a text."""
    found: dict[str, Any] = {}
    for text in given:
        name, mark, value = text.partition("=")
        if not mark or not name or name in ("messages", "tools", "model", "stream", "stream_options"):
            fail(f"--sampling {text}: write the name of a sampling parameter and its value, such as temperature=0.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


async def reask_sessions(
    prefixes: Sequence[str],
    prompt: str,
    model: str,
    start: int,
    sampling: dict[str, Any],
    at_once: int,
    as_json: bool,
    live: Mapping[str, Any] | None,
) -> int:
    """Ask sessions again, print the outcome, and return the exit code. `live` has the options of --tools live.

    Raises ConfigError, ModelError, PromptError, StoreError.
    """
    from crow_agent.settings.config import get_database_url, load_config
    from crow_agent.settings.discovery import search_models
    from crow_agent.settings.home import Home
    from crow_core.app import Crow
    from crow_persistence.extension import persistence

    from crow_eval.reask import Changes, load_stored, reask_all

    env = os.environ
    home = Home.find(env)
    config = load_config(home, env)
    database = open_database(env)
    with database.begin_read() as connection:
        stored = [load_stored(connection, prefix) for prefix in prefixes]
        template = load_prompt(connection, prompt) if prompt else None
    hide_memory()
    models = (await search_models(config, env, model or find_only_model(stored, env))).models
    changes = Changes(template, next(iter(models.values())) if model else None, sampling, start)
    if live is not None:
        outcomes = await reask_live(database, stored, models, changes, at_once, live)
        return print_result(outcomes, as_json=as_json)
    app = Crow(models).use(persistence, url=get_database_url(config, home), folder=home.data)
    try:
        with reporting(stored) as report:
            outcomes = await reask_all(
                app, database, stored, changes, lambda request: choose_model(models, changes, request), at_once, report
            )
    finally:
        await app.shut_down()
    return print_result(outcomes, as_json=as_json)


async def reask_live(
    database: "Database",
    stored: "Sequence[StoredSession]",
    models: "Mapping[str, Model]",
    changes: "Changes",
    at_once: int,
    live: Mapping[str, Any],
) -> "list[Reasked]":
    """Ask sessions again with tools that run. Raises ConfigError, ModelError, StoreError."""
    from crow_agent.budget import Budget

    from crow_eval.live_reask import LiveSettings, find_faults, reask_all_live

    if faults := find_faults(stored):
        fail("\n".join(faults))

    def choose(one: "StoredSession") -> str:
        chosen = choose_model(models, changes, one.requests[0])
        return next(name for name, model in models.items() if model is chosen)

    budget = Budget(money=live["max_cost"], setting="--max-cost")
    for one in stored:
        budget.check_prices(choose_model(models, changes, one.requests[0]))
    mode, most = live["mode"] or "accept-edits", live["max_requests"] or MAX_LIVE_REQUESTS
    settings = LiveSettings(changes, mode, most, os.environ, budget)
    with reporting(stored) as report:
        return await reask_all_live(database, stored, choose, settings, at_once, report)


def print_result(outcomes: "Sequence[Reasked]", *, as_json: bool) -> int:
    """Print outcomes, and return the exit code."""
    if as_json:
        print_json([msgspec.to_builtins(outcome) for outcome in outcomes])
    else:
        print_outcomes(outcomes)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def load_prompt(connection: "Connection", reference: str) -> "Prompt":
    """Load the template of a file, or of a stored version. Raises StoreError."""
    from crow_core.session.prompts import Prompt
    from crow_persistence.prompt_versions import find_version

    if (path := Path(reference)).is_file():
        try:
            return Prompt.from_file("system", path)
        except (OSError, UnicodeDecodeError) as error:
            fail(f"{reference} cannot be read: {error}.")
    version = find_version(connection, reference)
    return Prompt(version.name, version.template)


def find_only_model(stored: Sequence["StoredSession"], env: Mapping[str, str]) -> str:
    """Return the model that all requests were sent to, where the environment names the endpoint and no model."""
    names = {request.model for one in stored for request in one.requests}
    return names.pop() if len(names) == 1 and env.get("OPENAI_BASE_URL") and not env.get("CROW_MODEL") else ""


def choose_model(models: "Mapping[str, Model]", changes: "Changes", request: "StoredRequest") -> "Model":
    """Return the model of the changes, or else the configured one that a request was sent to. Raises ModelError."""
    from crow_core.errors import ModelError

    if changes.model:
        return changes.model
    fitting = [one for one in models.values() if one.name == request.model]
    for one in fitting:
        if getattr(one, "display_url", "") == request.endpoint:
            return one
    if fitting:
        return fitting[0]
    if not request.model:
        raise ModelError("An imported session does not say how its model is reached. Name one with --model.")
    raise ModelError(f"The model {request.model} at {request.endpoint} is not configured. Name one with --model.")


@contextmanager
def reporting(stored: "Sequence[StoredSession]") -> "Generator[Callable[[Reasked], None]]":
    """Yield a function that shows on standard error how many sessions are done."""
    from rich.console import Console  # imported here because few commands show a bar
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    departed = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len({one.id for one in stored}))

        def report(outcome: "Reasked") -> None:
            nonlocal departed
            departed += outcome.departure is not None
            progress.update(bar, advance=1, description=f"{departed} departed")

        yield report


def print_outcomes(outcomes: "Sequence[Reasked]") -> None:
    """Print the first departures side by side, a row for each session, and the sums."""
    for outcome in [one for one in outcomes if one.departure][:MAX_DEPARTURES_SHOWN]:
        print_departure(outcome)
    heads = ("SESSION", "ASKED AGAIN AS", "REQUESTS", "AGREED", "REWORDED", "DEPARTED AT", "NOT ASKED")
    print_table(heads, [to_row(outcome) for outcome in outcomes])
    click.echo()
    agreed = sum(one.agreed for one in outcomes)
    departed = sum(one.departure is not None for one in outcomes)
    went_on = sum(one.went_on for one in outcomes)
    click.echo(
        f"{agreed:,} requests agreed, {departed:,} departed, {sum(one.not_asked for one in outcomes):,} not asked"
        + (f", {went_on:,} behind a departure." if went_on else ".")
    )
    if denied := sum(one.denied for one in outcomes):
        click.echo(f"{denied:,} tool calls were denied.")
    for word, sums, seconds in (
        ("before", [one.before for one in outcomes], sum(one.seconds_before for one in outcomes)),
        ("now", [one.totals for one in outcomes], sum(one.seconds for one in outcomes)),
    ):
        count, tokens_in, cached, out = (
            sum(each.get(name, 0) for each in sums) for name in ("calls", "input", "cached", "output")
        )
        cost: dict[str, float] = {}
        for each in sums:
            for currency, amount in each.get("cost", {}).items():
                cost[currency] = cost.get(currency, 0.0) + amount
        money = "".join(f", {amount:.4f} {escape_line(currency)}" for currency, amount in cost.items())
        took = f"{seconds / count:.2f} s a call" if count else "no calls"
        click.echo(f"{word:7}{tokens_in:,} tokens in ({cached:,} cached), {out:,} out{money}, {took}")
    for outcome in outcomes:
        if outcome.stopped:
            click.echo(escape_line(f"{outcome.origin[:8]}: {outcome.stopped}"))
        if outcome.error:
            click.secho(f"{outcome.origin[:8]}: {escape_line(outcome.error)}", fg="red", err=True)


def to_row(outcome: "Reasked") -> tuple[str, ...]:
    """Convert an outcome to a row of the table."""
    at = f"{outcome.departure.request:,}" if outcome.departure else "FAILED" if outcome.error else "-"
    counts = (f"{outcome.requests:,}", f"{outcome.agreed:,}", f"{outcome.reworded:,}", at, f"{outcome.not_asked:,}")
    return (outcome.origin[:8], outcome.session[:8] or "-", *counts)


def print_departure(outcome: "Reasked") -> None:
    """Print the stored reply and the new one side by side."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    assert outcome.departure
    table = Table(title=f"{outcome.origin[:8]}, request {outcome.departure.request}", title_justify="left", expand=True)
    table.add_column("was", ratio=1, overflow="fold")
    table.add_column("now", ratio=1, overflow="fold")
    was, now = (Text(escape_controls(format_reply(each))) for each in (outcome.departure.was, outcome.departure.now))
    table.add_row(was, now)
    Console().print(table)


def format_reply(reply: Mapping[str, Any]) -> str:
    """Format a reply for reading: its text, then its tool calls with their arguments."""
    parts = [str(reply.get("content") or "")]
    for use in reply.get("tool_calls", []):
        parts.append(f"● {use['function']['name']}\n{format_arguments(use['function']['arguments'])}")
    return "\n\n".join(filter(None, parts)) or "(nothing)"


def format_arguments(text: str) -> str:
    """Format the arguments of a tool call, one a line."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    if not isinstance(found, dict):
        return text
    return "\n".join(f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in sorted(found.items()))  # pyright: ignore
