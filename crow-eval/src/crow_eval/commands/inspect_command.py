"""`crow eval import`: import logs of Inspect as evaluations."""

import os
from pathlib import Path

import click
from crow_cli.console import AS_JSON, escape_line, print_json
from crow_cli.process import fail
from crow_core.errors import ConfigError, StoreError
from crow_core.text import escape_controls
from crow_system.files import make_private_folder


@click.command("import")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--scorer", metavar="NAME", default="", help="The only scorer that counts; by default all have to pass.")
@click.option("--pass-at", "least", type=float, help="The least score that passes; by default 1.")
@AS_JSON
def import_logs(logs: tuple[Path, ...], scorer: str, least: float | None, as_json: bool) -> None:
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
