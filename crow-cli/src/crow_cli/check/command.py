"""`crow acp check`."""

import json
import shutil
import sys

import click

from crow_cli.ending import complete, wrong


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--only", multiple=True, metavar="ID", help="A requirement, or how several begin; repeatable.")
@click.option("--timeout", type=click.FloatRange(min=1), default=60, show_default=True, help="Seconds for an answer.")
@click.option("--cancel-prompt", default="", help="What keeps the agent busy until it is cancelled.")
@click.option("--auth-method", default="", metavar="ID", help="Log in with this one of the agent's methods.")
@click.option("--allow-logout", is_flag=True, help="Try logout too; it may cost you your login.")
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
    """Examine whether an agent conforms to ACP, version 1.

    COMMAND starts the agent on standard input and output, as in: crow acp check -- opencode acp

    It is started some thirty times, asked some fifteen short prompts, and permitted what it asks for: to read a small
    file in a temporary folder and to print a word. Its messages are held against the stable schema, except for the
    ranges of numbers and the formats of texts.

    Exit codes: 0 conformant, 1 not, 2 it cannot be started.
    """
    from crow_cli.check.requirements import REQUIREMENTS

    ids = {id for id in REQUIREMENTS if any(id.startswith(wanted.upper().removeprefix("ACP-")) for wanted in only)}
    if only and not ids:
        wrong(f"--only: no requirement begins with {' or '.join(only)}; there are {', '.join(REQUIREMENTS)}.")
    if shutil.which(command[0]) is None:
        wrong(f"the agent cannot be started: there is no command {command[0]}.")
    try:
        sys.exit(complete(examined(command, as_json, ids, timeout, cancel_prompt, auth_method, allow_logout, jobs)))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # nobody reads the report on: Click knows what to do
        raise
    except OSError as error:
        wrong(f"the agent cannot be started: {error}.")


async def examined(
    command: tuple[str, ...],
    as_json: bool,
    ids: set[str],
    timeout: float,
    cancel_prompt: str,
    auth_method: str,
    allow_logout: bool,
    jobs: int | None,
) -> int:
    from crow_cli.check import report
    from crow_cli.check.examination import examine
    from crow_cli.check.talk import Options

    options = Options(
        command,
        timeout=timeout,
        cancel_prompt=cancel_prompt or Options.cancel_prompt,
        auth_method=auth_method,
        allow_logout=allow_logout,
    )

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{done} of {of} conversations", file=sys.stderr, nl=done == of)

    found = await examine(options, ids, jobs=jobs or 0, progress=progress)
    click.echo(json.dumps(report.as_json(found), indent=2) if as_json else report.as_text(found))
    return 0 if found.conformant else 1
