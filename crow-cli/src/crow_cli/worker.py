"""`crow worker`: run the workflows of a Python program until a signal comes."""

import asyncio
import importlib
import json
import logging
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

import click
from crow_agent.workflows import Workflow, WorkflowError, WorkflowQueue, open_workflows
from crow_agent.workflows.workflow import WORKFLOWS, import_engine
from crow_core.errors import ConfigError

from crow_cli.process import log_to_stderr

if TYPE_CHECKING:
    from crow_agent.workflows.engine import Engine

HEALTH_INTERVAL = 1.0
"""Seconds between two looks at the worker's health."""
HEALTH_LIMIT = 10.0
"""Seconds without a look after which the worker is not healthy: its event loop does not run."""


async def work(targets: Sequence[str], queues: Sequence[str], concurrency: int | None, health: str) -> int:
    """Run workflows until SIGINT, SIGTERM or SIGHUP; then suspend them, for others to go on, and return 0."""
    log_to_stderr()
    logging.getLogger("crow_agent").setLevel(logging.WARNING)
    workflows = load_workflows(targets)
    limits = choose_queues(workflows, queues, concurrency)
    try:
        import_engine()
        from crow_agent.workflows.takeover import wait_for_server  # imports SQLAlchemy

        async with AsyncExitStack() as stack:

            async def start() -> "Engine":
                opening = open_workflows(workflows, queues=limits, listen=[each.name for each in limits])
                return await stack.enter_async_context(opening)

            engine = await wait_for_server(start)
            with suppress(asyncio.CancelledError), report_health(health, engine) as state:
                names = ", ".join(sorted(each.name for each in workflows))
                click.echo(f"Executor {engine.executor} runs {names}.")
                os.dup2(2, 1)  # libraries and workflows may print: standard output ends with this line
                while True:  # until a signal comes
                    state.look()
                    await asyncio.sleep(HEALTH_INTERVAL)
    except WorkflowError as error:
        raise ConfigError(str(error)) from error
    return 0


def load_workflows(targets: Sequence[str]) -> list[Workflow[..., Any]]:
    """Import Python files and modules; return all workflows that are defined then. Raises ConfigError."""
    for target in targets:
        file = Path(target).absolute()
        is_file = target.endswith(".py") or file.is_file()
        folder, name = (file.parent, file.stem) if is_file else (Path.cwd(), target)
        while is_file and (folder / "__init__.py").exists():  # a module of a package is imported by its full name
            folder, name = folder.parent, f"{folder.name}.{name}"
        sys.path.insert(0, str(folder))
        try:
            importlib.import_module(name)
        except SystemExit:
            raise ConfigError(
                f'{target} cannot be imported: it ends the process. Write if __name__ == "__main__".'
            ) from None
        except Exception as error:  # code of others may raise anything when it is imported
            raise ConfigError(f"{target} cannot be imported: {type(error).__name__}: {error}.") from error
    if not WORKFLOWS:
        raise ConfigError(f"{', '.join(targets)} defines no workflow. Mark an `async def` with @workflow.")
    return [*WORKFLOWS.values()]


def choose_queues(
    workflows: Sequence[Workflow[..., Any]], names: Sequence[str], concurrency: int | None
) -> list[WorkflowQueue]:
    """Return the queues to take work from, by default all that workflows use, with their limits. Raises ConfigError."""
    used = {
        each.queue_name: each.queue if isinstance(each.queue, WorkflowQueue) else WorkflowQueue(each.queue_name)
        for each in sorted(workflows, key=lambda each: isinstance(each.queue, WorkflowQueue))
        if each.queue_name
    }
    if unknown := [name for name in names if name not in used]:
        known = f"They use {', '.join(sorted(used))}." if used else 'None has one: write @workflow(queue="NAME").'
        raise ConfigError(f"--queue: no workflow uses the queue {unknown[0]!r}. {known}")
    chosen = [used[name] for name in names] if names else [*used.values()]
    return [replace(each, concurrency=concurrency) for each in chosen] if concurrency else chosen


class WorkerHealth:
    """The health of a worker, as it was when its event loop looked last."""

    def __init__(self, engine: "Engine", file: Path | None) -> None:
        self._engine = engine
        self._file = file
        self._looked = monotonic()

    def look(self) -> None:
        """Note that the event loop runs; touch the file if the worker can run workflows."""
        self._looked = monotonic()
        if self._file and self._engine.is_alive:
            self._file.write_text(json.dumps(self.describe()) + "\n")

    @property
    def is_good(self) -> bool:
        """True if the worker can run workflows."""
        return self._engine.is_alive and monotonic() - self._looked < HEALTH_LIMIT

    def describe(self) -> dict[str, Any]:
        """Describe the health as JSON values."""
        return {"healthy": self.is_good, "executor": self._engine.executor, "running": self._engine.running}


@contextmanager
def report_health(where: str, engine: "Engine") -> Generator[WorkerHealth]:
    """Report the health of a worker in a file, whose time is then that of the last look, or at a port of this machine.
    Raises ConfigError."""
    if where.isdecimal():
        state = WorkerHealth(engine, None)
        with listen_for_health(int(where), state):
            yield state
        return
    state = WorkerHealth(engine, file := Path(where) if where else None)
    try:
        yield state
    except OSError as error:
        raise ConfigError(f"--health: {where} cannot be written: {error.strerror}.") from error
    finally:
        if file:
            file.unlink(missing_ok=True)


@contextmanager
def listen_for_health(port: int, state: WorkerHealth) -> Generator[int]:
    """Answer HTTP with the health, with the status 200 or 503; 0 chooses a free port. Raises ConfigError."""

    class HealthHandler(BaseHTTPRequestHandler):
        """Answers every GET with the health."""

        def do_GET(self) -> None:
            """Answer."""
            body = json.dumps(state.describe()).encode()
            self.send_response(200 if state.is_good else 503)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), HealthHandler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--health: the port {port} cannot be used ({error}).") from error
    with server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="crow-health", daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
