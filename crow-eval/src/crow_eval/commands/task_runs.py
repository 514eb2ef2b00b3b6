"""The parts that the commands which run tasks share: options, the database, stored tasks, and the end."""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from crow_cli.console import print_note
from crow_cli.process import fail, run_to_end
from crow_core.errors import ConfigError, ModelError, PromptError, StoreError
from crow_system.files import make_private_folder

if TYPE_CHECKING:
    from crow_persistence.database import Database

    from crow_eval.evaluation_store import Evaluation
    from crow_eval.tasks import Task

AT_ONCE = click.option("--at-once", type=click.IntRange(min=1), default=4, show_default=True, help="Runs at a time.")
MODE = click.option(
    "--mode",
    type=click.Choice(["accept-edits", "plan", "yolo"]),
    default="accept-edits",
    show_default=True,
    help="Which tool calls may run. All others that need a permission are denied.",
)


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


@contextmanager
def noting_stop(command: str) -> Generator[None]:
    """Print the command that goes on if an error or a signal ends the block, unless another process runs the tasks."""
    from crow_eval.evaluation_store import EvaluationRunsError

    try:
        yield
    except EvaluationRunsError:
        raise
    except BaseException:
        print_note(f"Stopped. Go on with: {command}")
        raise


def open_database(env: Mapping[str, str]) -> "Database":
    """Open the database of the configuration, which is made if there is none. Raises ConfigError."""
    from crow_agent.settings.config import get_database_url, load_config
    from crow_agent.settings.home import Home
    from crow_persistence.database import Database

    home = Home.find(env)
    make_private_folder(home.data)
    return Database(get_database_url(load_config(home, env), home), home.data)


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
