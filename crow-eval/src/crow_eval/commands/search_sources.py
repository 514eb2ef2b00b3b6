"""The tasks of a search: a dataset, or stored sessions that are asked again; and what runs them."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from crow_cli.console import print_note
from crow_core.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from crow_agent.budget import Budget
    from crow_persistence.database import Database

    from crow_eval.cells import EvaluationSettings
    from crow_eval.compared_prompts import PromptVersion
    from crow_eval.evaluation_store import Evaluation
    from crow_eval.runs import Runners
    from crow_eval.tasks import Task

SESSIONS = "stored sessions"
"""The dataset of a search on sessions."""


async def find_tasks(
    database: "Database", given: Sequence[str], first: "PromptVersion", at_once: int, env: Mapping[str, str]
) -> "tuple[str, list[Task]]":
    """Return the name and the tasks of what `--on` gives: one dataset, ids of sessions, or `rated`.

    Tasks that pass on their untouched start are left out, and those that give their answers away named.
    Raises ConfigError, StoreError, PromptError, WorkspaceError.
    """
    from crow_eval import runs
    from crow_eval.compared_prompts import JUDGE
    from crow_eval.session_tasks import RATED, find_rated, load_sessions, to_task
    from crow_eval.task_parts import find_leaks
    from crow_eval.tasks import find_dataset, load_dataset

    if first.name == JUDGE and is_dataset(given):
        raise ConfigError("The prompt of judges is compared with your ratings: give --on rated, or ids of sessions.")
    if first.name not in ("system", JUDGE) and not is_dataset(given):
        raise ConfigError(f"Stored sessions are asked again with a system prompt. For {first.name}, give a dataset.")
    if not is_dataset(given):
        with database.begin_read() as connection:
            ids = find_rated(connection) if [*given] == [RATED] else given
            if not ids:
                raise ConfigError("No session is rated yet. Rate answers with /good or /bad.")
            try:
                return SESSIONS, [to_task(stored) for stored in load_sessions(connection, ids, first)]
            except StoreError as error:
                also = "" if ids != given or len(given) > 1 else f" Nor is there a dataset {given[0]!r}."
                raise StoreError(f"{error}{also}") from error
    tasks = load_dataset(given[0])
    faults = await runs.find_untouched(tasks, at_once, runs.find_hidden(env))
    if useless := {fault.task for fault in faults if fault.is_fatal}:
        print_note(f"Left out, as every check passes on the untouched start: {', '.join(sorted(useless))}.")
    tasks = [task for task in tasks if task.id not in useless]
    if leaks := find_leaks(tasks):
        print_note(f"Warning: the prompts of these tasks hold the text that a check expects: {', '.join(leaks)}.")
    return find_dataset(given[0]), tasks


def is_dataset(given: Sequence[str]) -> bool:
    """Return True if `--on` gives a dataset, not sessions."""
    from crow_eval.tasks import list_suites

    (name, *others) = given
    return not others and (name in list_suites() or Path(name).expanduser().exists() or not name.isalnum())


def load_tasks(database: "Database", evaluation: "Evaluation") -> "list[Task]":
    """Load the tasks of a stored search. Raises ConfigError, StoreError, PromptError."""
    from crow_eval.session_tasks import load_sessions, to_task
    from crow_eval.tasks import load_dataset

    settings = evaluation.settings
    if evaluation.dataset != SESSIONS:
        return load_dataset(evaluation.dataset)
    with database.begin_read() as connection:
        ids = [task.id for task in settings.tasks]
        return [to_task(stored) for stored in load_sessions(connection, ids, settings.prompts[0])]


async def find_runners(
    database: "Database",
    dataset: str,
    settings: "EvaluationSettings",
    tasks: "Sequence[Task]",
    budget: "Budget",
    env: Mapping[str, str],
) -> "Runners":
    """Return what starts the runners of a search's tasks. Raises ConfigError, ModelError, StoreError, PromptError."""
    from crow_eval import runs

    if dataset != SESSIONS:
        return partial(runs.open_runners, settings, tasks, env, budget, runs.find_hidden(env), None)
    from crow_agent.settings.config import get_database_url, load_config
    from crow_agent.settings.discovery import search_models
    from crow_agent.settings.home import Home
    from crow_core.app import Crow
    from crow_persistence.extension import persistence

    from crow_eval.commands.reask_command import choose_model, find_only_model
    from crow_eval.compared_prompts import JUDGE
    from crow_eval.reask import Changes
    from crow_eval.session_tasks import load_sessions, open_rating_runners, open_session_runners

    home, model = Home.find(env), settings.models[0]
    config = load_config(home, env)
    with database.begin_read() as connection:
        stored = load_sessions(connection, [task.id for task in tasks], settings.prompts[0])
    by_id = {one.id: one for one in stored}
    if settings.prompts[0].name == JUDGE:
        return partial(open_rating_runners, by_id, settings.judge or model, env, budget)
    models = (await search_models(config, env, model or find_only_model(stored, env))).models
    changes = Changes(model=next(iter(models.values())) if model else None)
    for one in stored:
        budget.check_prices(choose_model(models, changes, one.requests[0]))

    def make_app() -> Crow:
        return Crow(models).use(persistence, url=get_database_url(config, home), folder=home.data)

    return partial(
        open_session_runners,
        make_app,
        database,
        by_id,
        lambda request: choose_model(models, changes, request),
        settings.judge or model,
        env,
        budget,
    )
