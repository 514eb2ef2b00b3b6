"""The command line, except for the short way of `crow acp`."""

import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn

import click
from crow_core import __version__
from crow_core.errors import ConfigError, ModelError, StoreError
from crow_core.settings.config import Home
from crow_core.settings.trust import TrustedFolders, list_project_files

from crow_cli.audit import audit
from crow_cli.calls import calls
from crow_cli.check.command import check
from crow_cli.db import db
from crow_cli.ending import complete, wrong
from crow_cli.mcp import mcp
from crow_cli.printed import CLIENTS, show
from crow_cli.prompts import prompts
from crow_cli.recordings import record, replay
from crow_cli.sessions import sessions
from crow_cli.skills import skills
from crow_cli.undo import undo

MODEL = click.option("-m", "--model", default="", help="A configured model, or the endpoint's name for one.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="crow", message="%(prog)s %(version)s")
def cli() -> None:
    """crow: an agent between two protocols, ACP outside and MCP inside."""
    try:
        os.getcwd()
    except OSError:
        wrong("the folder that you are in is gone, or closed to you. Go to another one.")


cli.add_command(sessions)
cli.add_command(prompts)
cli.add_command(calls)
cli.add_command(audit)
cli.add_command(db)
cli.add_command(undo)
cli.add_command(mcp)
cli.add_command(skills)


@cli.group(invoke_without_command=True)
@MODEL
@click.option("--unstable", is_flag=True, help="Speak what ACP may still change, too.")
@click.option("--print-config", type=click.Choice(list(CLIENTS)), help="Print what makes this client start crow.")
@click.pass_context
def acp(context: click.Context, model: str, unstable: bool, print_config: str | None) -> None:
    """Speak ACP on standard input and output, for an editor. The commands below are for any agent and client."""
    if print_config:
        show(print_config, model)
    elif context.invoked_subcommand is None:
        from crow_cli.acp import serve

        serve(model, unstable=unstable)


acp.add_command(check)
acp.add_command(record)
acp.add_command(replay)


@cli.command()
@MODEL
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=2769, show_default=True, help="0 is any free one.")
@click.option("--token", default="", help="What clients have to know. Others can see it in the list of processes.")
@click.option("--token-file", type=click.Path(path_type=Path), help="A file that holds the token.")
@click.option("--allow-origin", "origins", metavar="ORIGIN", multiple=True, help="Let this origin's web pages connect.")
@click.option("--max-connections", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--allow-remote", is_flag=True, help="Listen on an address that other machines can reach.")
def serve(**options: Any) -> None:
    """Speak ACP over WebSocket, with many clients at once.

    Prints the address, and the header to send along; without --token and --token-file, it holds a new token.
    """
    from crow_cli.serve import serve

    leave(serve(**options))


@cli.command()
@click.argument("prompt", required=False)
@MODEL
@click.option("--cwd", type=click.Path(), default=".", help="The folder to work in.")
@click.option("--yolo", is_flag=True, help="Ask for no permission.")
@click.option("--mode", type=click.Choice(["ask", "accept-edits", "plan", "yolo"]), help="What is asked for.")
@click.option("--output-format", type=click.Choice(["text", "json", "stream-json"]), default="text", show_default=True)
@click.option("--max-requests", type=click.IntRange(min=1), help="Model requests the prompt may take.")
@click.option("-c", "--continue", "go_on", is_flag=True, help="Go on with the last session in this folder.")
@click.option("-r", "--resume", metavar="ID", default="", help="Go on with a session; the beginning of its id will do.")
def run(
    prompt: str | None,
    model: str,
    cwd: str,
    yolo: bool,
    mode: Any,
    output_format: Any,
    max_requests: int | None,
    go_on: bool,
    resume: str,
) -> None:
    """Say one PROMPT and print the answer. What is piped in comes after the prompt."""
    words = whole_prompt(prompt)
    try:
        folder = Path(cwd).expanduser().resolve(strict=True)
    except (OSError, RuntimeError) as error:
        wrong(f"--cwd: the folder {cwd} does not exist ({error}).")
    if not folder.is_dir():
        wrong(f"--cwd: {folder} is not a folder.")
    if go_on and resume:
        wrong("-c goes on with the last session, -r with the one you name: give one of them.")
    mode = "yolo" if yolo else mode
    leave(run_prompt(words, str(folder), model, mode, output_format, max_requests, "last" if go_on else resume))


async def run_prompt(
    words: str, cwd: str, model: str, mode: Any, style: Any, max_requests: int | None, resume: str
) -> int:
    from crow_cli.house import build
    from crow_cli.run import LAST, is_interactive, run

    crow = await build(os.environ, model=model, mode=mode, max_requests=max_requests, asks=False)
    if resume and resume != LAST:
        from crow_cli.history import whole_id

        resume = whole_id(os.environ, resume)
    return await run(crow, words, cwd, style, interactive=is_interactive(), resume=resume, mode=mode)


@cli.command()
@MODEL
def demo(model: str) -> None:
    """Watch crow fix a small bug. Offline: the model is a script, everything else is real."""
    from crow_cli.demo import show

    leave(show(os.environ, model))


@cli.command()
@MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--save", is_flag=True, help="Write what was found into the model's settings.")
def doctor(model: str, as_json: bool, save: bool) -> None:
    """Try out what a model's endpoint can do. Asks it some twenty short questions and two long ones.

    Exit codes: 0 crow can work with it, 1 something does not work, 2 it cannot be asked.
    """
    from crow_cli.doctor import doctor

    leave(doctor(os.environ, model, as_json=as_json, save=save))


@cli.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
def trust(folder: Path) -> None:
    """Let a FOLDER's settings count, as they are now.

    They are its .mcp.json and .crow/config.toml, its prompts, its skills with all that lies beside them, its commands.
    """
    from crow_cli.screen import spelled_out

    folder = folder.absolute()
    try:
        files = list_project_files(folder)
        for file in files:
            data = file.read_bytes()
            text = f"({len(data):,} bytes that are not text)" if b"\0" in data else data.decode("utf-8", "replace")
            click.echo(spelled_out(f"--- {file}\n{text.rstrip()}"))
        if not files:
            wrong(
                f"{folder} has no .mcp.json, .crow/config.toml, prompts, skills or commands: there is nothing to trust."
            )
        TrustedFolders(Home.find(os.environ).data).add(folder)
    except OSError as error:
        wrong(spelled_out(f"{error.filename}: {error.strerror}. Nothing was trusted."))
    click.echo(spelled_out(f"Trusted as they are now; after a change you are asked again: {folder}"))


def whole_prompt(prompt: str | None) -> str:
    """The prompt's words, with what was piped in behind them."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    words = "\n\n".join(part for part in (prompt, piped.strip()) if part)
    if not words:
        wrong('nothing to say. Give a prompt: crow run "explain this project"')
    return words


def leave(work: Coroutine[Any, Any, int]) -> NoReturn:
    """Run to the end and exit with its code; what a person has to know is one sentence."""
    try:
        sys.exit(complete(work))
    except KeyboardInterrupt:
        sys.exit(130)
    except (ConfigError, ModelError, StoreError) as error:
        wrong(str(error))
