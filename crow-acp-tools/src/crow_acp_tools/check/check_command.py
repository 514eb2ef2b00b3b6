"""The command `crow acp check`."""

import json
import shutil
import sys

import click
from crow_system.signals import run_until_signal

from crow_acp_tools.failure import fail


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--only", multiple=True, metavar="ID", help="Check only requirements whose ids begin with this; repeatable."
)
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=60, show_default=True, help="Seconds to wait for an answer."
)
@click.option("--cancel-prompt", default="", help="A prompt that keeps the agent busy until it is cancelled.")
@click.option("--auth-method", default="", metavar="ID", help="Log in with this method of the agent.")
@click.option("--allow-logout", is_flag=True, help="Also test logout; you may have to log in again.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes of the agent at a time.")
def check(
    command: tuple[str, ...],
    as_json: bool,
    only: tuple[str, ...],
    timeout: float,
    cancel_prompt: str,
    auth_method: str,
    allow_logout: bool,
    jobs: int | None,
) -> None:
    """Check whether an agent conforms to ACP: version 1, and version 2, a draft, if the agent offers it.

    COMMAND starts the agent on standard input and output, as in: crow acp check -- opencode acp

    For each version, the agent is started about thirty times and sent about fifteen short prompts. It gets every
    permission that it asks for: the prompts let it read a small file in a temporary folder and print a word. Its
    messages are checked against the schema, except for the ranges of numbers and the formats of texts.

    Exit codes: 0 conformant, 1 not conformant, 2 the agent cannot be started.
    """
    from crow_acp_tools.check.requirements import REQUIREMENTS

    ids = {id for id in REQUIREMENTS if any(id.startswith(wanted.upper().removeprefix("ACP-")) for wanted in only)}
    if only and not ids:
        fail(f"--only: no requirement begins with {' or '.join(only)}; there are {', '.join(REQUIREMENTS)}.")
    if shutil.which(command[0]) is None:
        fail(f"the agent cannot be started: there is no command {command[0]}.")
    try:
        sys.exit(
            run_until_signal(run_check(command, as_json, ids, timeout, cancel_prompt, auth_method, allow_logout, jobs))
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader closed the output: Click handles it
        raise
    except OSError as error:
        fail(f"the agent cannot be started: {error}.")


async def run_check(
    command: tuple[str, ...],
    as_json: bool,
    ids: set[str],
    timeout: float,
    cancel_prompt: str,
    auth_method: str,
    allow_logout: bool,
    jobs: int | None,
) -> int:
    from crow_acp_tools.check import check_report as report
    from crow_acp_tools.check.conversation import CheckOptions
    from crow_acp_tools.check.runner import check_agent

    options = CheckOptions(
        command,
        timeout=timeout,
        cancel_prompt=cancel_prompt or CheckOptions.cancel_prompt,
        auth_method=auth_method,
        allow_logout=allow_logout,
    )

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{done} of {of} conversations", file=sys.stderr, nl=done == of)

    found = await check_agent(options, ids, jobs=jobs or 0, progress=progress)
    click.echo(json.dumps(report.to_json(found), indent=2) if as_json else report.to_text(found))
    return 0 if found.is_conformant else 1
