"""`crow` and the commands that work with a model; the others are imported when they run (groups.py).

`__main__` starts `crow acp` without this module, to answer its client sooner.
"""

import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn

import click
from crow_core import __version__
from crow_core.errors import ConfigError, ModelError, StoreError

from crow_cli.client_config import CLIENTS, print_client_config
from crow_cli.console import brings_prompts
from crow_cli.groups import AcpGroup, CrowGroup
from crow_cli.own_tree import guard
from crow_cli.process import NO_FOLDER, fail, run_to_end
from crow_cli.run_command import read_schema, run, told_as

MODEL = click.option("-m", "--model", default="", help="A configured model, or the endpoint's name for one.")


@click.group(
    cls=CrowGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    epilog="Documentation: https://github.com/odellus/crow/tree/main/docs",
)
@click.version_option(__version__, "--version", prog_name="crow", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """crow: a coding agent that speaks ACP to its client and MCP to its tools.

    Without a command, opens a session in the terminal, as `crow chat` does; -c continues the last one, -r any, -w opens
    one in a git worktree of its own.
    """
    if context.invoked_subcommand is None:  # `__main__` has started a session, where a person is there
        if brings_prompts():
            from crow_cli.start_chat import chat

            sys.exit(chat())
        click.echo(context.get_help())
        return
    try:
        os.getcwd()
    except OSError:
        fail(NO_FOLDER)


@cli.group(cls=AcpGroup, invoke_without_command=True)
@MODEL
@click.option("--unstable", is_flag=True, help="Also speak the parts of ACP that may still change.")
@click.option(
    "--print-config", type=click.Choice(list(CLIENTS)), help="Print the settings that make this client start crow."
)
@click.pass_context
def acp(context: click.Context, model: str, unstable: bool, print_config: str | None) -> None:
    """Speak ACP on standard input and output, for an editor. The commands below work with any agent and client."""
    if print_config:
        print_client_config(print_config, model)
    elif context.invoked_subcommand is None:
        from crow_cli.acp import serve

        serve(model, unstable=unstable)


@cli.command()
@MODEL
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=2769, show_default=True, help="The port; 0 chooses a free one."
)
@click.option(
    "--token", default="", help="The token that clients have to send. Other users can see it in the list of processes."
)
@click.option("--token-file", type=click.Path(path_type=Path), help="A file that holds the token.")
@click.option(
    "--allow-origin",
    "origins",
    metavar="ORIGIN",
    multiple=True,
    help="Let web pages of this origin connect; repeatable.",
)
@click.option("--max-connections", type=click.IntRange(min=1), default=32, show_default=True, help="Clients at a time.")
@click.option("--allow-remote", is_flag=True, help="Allow a --host that other machines can reach.")
def serve(**options: Any) -> None:
    """Speak ACP over WebSocket and HTTP, with many clients at once.

    Prints the address and the header to send. Without --token and --token-file, the header holds a new token.
    """
    from crow_cli.serve import serve

    run_and_exit(serve(**options))


@cli.command()
@click.argument("prompt", required=False, default="")
@MODEL
@click.option("--cwd", type=click.Path(exists=True, file_okay=False), default=".", help="The folder to work in.")
@click.option("--agent", metavar="COMMAND", default="", help="Another ACP agent, such as 'opencode acp'.")
@click.option(
    "--connect", "url", metavar="URL", default="", help="An agent at a ws://, wss://, http:// or https:// address."
)
@click.option("--token", default="", envvar="CROW_TOKEN", help="The token for --connect; $CROW_TOKEN by default.")
@click.option("-c", "--continue", "go_on", is_flag=True, help="Continue the last session of this folder.")
@click.option(
    "-r",
    "--resume",
    metavar="ID",
    default="",
    is_flag=False,
    flag_value="?",
    help="Continue a session; the beginning of its id is enough. Without ID, choose one of this folder.",
)
@click.option(
    "-w",
    "--worktree",
    metavar="NAME",
    is_flag=False,
    flag_value="",
    help="Work in a git worktree with a branch of its own. Without NAME, the name is made of PROMPT or the date.",
)
@click.option("--theme", type=click.Choice(["dark", "light", "vivid", "mono"]), help="The colours; $CROW_THEME.")
@click.option("--plain", is_flag=True, help="Print whole lines only, for screen readers.")
def chat(prompt: str, model: str, go_on: bool, resume: str, **options: Any) -> None:
    """Open a session in the terminal, with PROMPT as the first prompt.

    /help shows the keys and the commands. The same as `crow` alone. With --agent and --connect, the terminal shows any
    other ACP agent.
    """
    from crow_cli.start_chat import chat

    others = bool(options["agent"] or options["url"])
    if others and model:
        fail("-m chooses a model of crow: it does not go with --agent and --connect.")
    if options["url"] and options["worktree"] is not None:
        fail("-w makes a worktree on this machine: it does not go with --connect.")
    if go_on and resume:
        fail("-c continues the last session, -r the session that you name: give one of them.")
    sys.exit(chat(prompt=prompt, model=model, resume=resume, last=go_on, **options))


cli.add_command(run)


@cli.command()
@click.argument("tasks", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file of the results.")
@click.option("--at-once", type=click.IntRange(min=1), default=4, show_default=True, help="Tasks at a time.")
@MODEL
@click.option("--mode", type=click.Choice(["ask", "accept-edits", "plan", "yolo"]), help="Which tool calls may run.")
@click.option("--cwd", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".", help="The folder.")
@click.option(
    "--output-schema",
    metavar="FILE",
    help="A JSON schema that each answer must fit: a file, or the schema itself. The answer is in `output` then.",
)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="The seconds that a task may take.")
@click.option("--max-requests", type=click.IntRange(min=1), help="How many requests to the model a task may take.")
@click.option("--max-cost", type=click.FloatRange(0, min_open=True), help="What all tasks may cost.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The tokens that all tasks may take.")
@click.option("--max-minutes", type=click.FloatRange(0, min_open=True), help="The minutes that the command may take.")
@click.option("--retry-failed", is_flag=True, help="Also run the tasks again whose result is an error.")
def batch(tasks: Path, cwd: Path, output_schema: str | None, **options: Any) -> None:
    """Run many TASKS and write one result for each.

    Each task has a session of its own. Each line of TASKS is a JSON object with `prompt`, and maybe `id` and `cwd`, or
    a JSON string, which is the prompt. A line of the results has `id`, `session_id`, `text` or `output`, `stop_reason`,
    `usage`, `cost` and `error`. It has `stopped_by` if crow ended the turn without an answer, and `denied` if tool
    calls were denied.

    A tool call that needs a permission is denied, as nobody is asked. The same command goes on with the tasks that have
    no result, also after it was stopped or killed. --max-cost and --max-tokens also count the results that are there.

    Exit codes: 0 all tasks succeeded, 1 some failed or have no result, 2 wrong usage.
    """
    from crow_cli.batch_run import batch

    schema = read_schema(output_schema) if output_schema is not None else None
    run_and_exit(batch(tasks, cwd=cwd.absolute(), output_schema=schema, **options))


@cli.command()
@MODEL
def demo(model: str) -> None:
    """Watch crow fix a small bug, offline. The model is a script, everything else is real."""
    from crow_cli.demo import run_demo

    run_and_exit(run_demo(os.environ, model))


@cli.command()
@MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--save", is_flag=True, help="Append the quirks found to the model's settings.")
@click.option("--machine", is_flag=True, help="Look at this machine only, and send no request.")
def doctor(model: str, as_json: bool, save: bool, machine: bool) -> None:
    """Look for what is wrong on this machine, and test what the model's endpoint can do.

    Says what to do about each fault. Sends about twenty short requests and two long ones to the model; with --model,
    it does only that.

    Exit codes: 0 crow can work, 1 something does not work, 2 the endpoint cannot be reached, or there is no model.
    """
    from crow_cli.doctor import doctor

    if machine and (model or save):
        fail("--machine sends no request: leave out --model and --save.")
    run_and_exit(doctor(os.environ, model, as_json=as_json, save=save, machine_only=machine))


def run_and_exit(coroutine: Coroutine[Any, Any, int]) -> NoReturn:
    """Run a coroutine to its end and exit with its code; print a ConfigError, ModelError or StoreError as a message."""
    try:
        sys.exit(run_to_end(coroutine))
    except KeyboardInterrupt:
        sys.exit(130)
    except (ConfigError, ModelError, StoreError) as error:
        fail(str(error))


guard(cli, told_as)
