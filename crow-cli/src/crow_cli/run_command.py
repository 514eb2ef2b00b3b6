"""The command `crow run`, also spelled `crow -p`: its options, and the errors for unusable ones."""

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from crow_core.errors import ConfigError, ModelError, StoreError

from crow_cli.process import UsageFailure, fail, hide_memory, run_to_end

if TYPE_CHECKING:
    from crow_agent import Budget
    from crow_core.acp.schema import McpServer, SystemPrompt
    from crow_core.app import Crow

STYLES = ("text", "json", "stream-json")


class RunCommand(click.Command):
    """A command that tells wrong usage as JSON, too, if JSON is asked for."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        style = find_style(args)
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            tell(style, error.format_message(), 2)
            raise


def find_style(args: Sequence[str]) -> str:
    """Find the output format among arguments that may be wrong."""
    given = [after for arg, after in pairwise(args) if arg == "--output-format"]
    given += [arg.partition("=")[2] for arg in args if arg.startswith("--output-format=")]
    return given[-1] if given and given[-1] in STYLES else "text"


def to_run_arguments(args: Sequence[str]) -> list[str]:
    """Convert the arguments of `crow -p PROMPT …` to those of `crow run PROMPT …`; return any others unchanged."""
    options = list(args)
    for flag in ("-p", "--print"):
        if flag in options and options[0].startswith("-"):
            options.remove(flag)
            return ["run", *options]
    return options


@contextmanager
def told_as(style: str) -> Generator[None]:
    """Tell a failure of the block in the output format, and end the process with its exit code."""
    try:
        try:
            yield
        except (ConfigError, ModelError, StoreError) as error:
            fail(str(error))
    except UsageFailure as failure:
        tell(style, failure.sentence, 2)
        raise
    except KeyboardInterrupt:
        tell(style, "Cancelled.", 130)
        sys.exit(130)
    except BrokenPipeError:
        raise
    except Exception as error:
        tell(style, f"{type(error).__name__}: {error}. This is a fault in crow.", 1)
        raise


def tell(style: str, sentence: str, code: int) -> None:
    """Print the outcome of a command that failed before its prompt was sent, unless the output is text."""
    if style != "text":
        from crow_cli.outcome import Outcome  # imports what only a prompt needs

        Outcome(exit_code=code, error=sentence).print()


@click.command(cls=RunCommand)
@click.argument("prompt", required=False)
@click.option("-m", "--model", default="", help="A configured model, or the endpoint's name for one.")
@click.option("--cwd", type=click.Path(), default=".", help="The folder to work in.")
@click.option("--add-dir", "roots", metavar="FOLDER", multiple=True, help="A further folder to work in; repeatable.")
@click.option("--yolo", is_flag=True, help="Ask for no permission; short for --mode yolo.")
@click.option("--mode", type=click.Choice(["ask", "accept-edits", "plan", "yolo"]), help="When to ask for permission.")
@click.option(
    "--allow", metavar="RULE", multiple=True, help="Allow tool calls, such as 'terminal:git status'; repeatable."
)
@click.option(
    "--deny", metavar="RULE", multiple=True, help="Deny tool calls, such as 'terminal:git push*'; repeatable."
)
@click.option(
    "--tools", metavar="NAMES", help="crow's own tools to offer, such as 'file_editor,grep' or 'read'; '' for none."
)
@click.option(
    "--mcp-config", metavar="FILE", multiple=True, help="MCP servers: a file like .mcp.json, or its JSON; repeatable."
)
@click.option(
    "--output-format", type=click.Choice(STYLES), default="text", show_default=True, help="The format of the output."
)
@click.option(
    "--output-schema",
    metavar="FILE",
    help="Print only a result that fits a JSON schema: of a file, of standard input for -, or of the argument itself.",
)
@click.option("--goal", is_flag=True, help="Go on until the prompt's goal is reached, as a judge says; see --until.")
@click.option("--until", metavar="COMMAND", help="Go on until this shell command succeeds; implies --goal.")
@click.option("--max-requests", type=click.IntRange(min=1), help="How many requests to the model the prompt may take.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), help="How many tokens it may take, input and output together."
)
@click.option("--max-cost", type=click.FloatRange(0, min_open=True), help="What it may cost, by the model's `prices`.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="The seconds after which it is cancelled.")
@click.option("-c", "--continue", "go_on", is_flag=True, help="Continue the last session of this folder.")
@click.option("-r", "--resume", metavar="ID", default="", help="Continue a session; the beginning of its id is enough.")
@click.option("--no-session", is_flag=True, help="Do not store the session.")
@click.option("--system-prompt", metavar="TEXT", help="The system prompt in place of crow's own.")
@click.option("--append-system-prompt", metavar="TEXT", help="Text to add to the system prompt.")
def run(prompt: str | None, output_format: Any, **given: Any) -> None:
    """Send one PROMPT and print the answer. `crow -p PROMPT` is the same.

    Text from standard input is added after the prompt. crow asks on the terminal about a tool call that needs a
    permission, also while standard input is piped. Without a terminal, the call is denied, and a sentence names the
    option that would allow it.

    With --output-format json, standard output is one JSON object, whatever happens; with stream-json, it is one object
    a line: a start, the updates of ACP, and that object last.

    Exit codes: 0 done, 1 an error, 2 wrong usage or configuration, 130 interrupted. With 3, a tool call needed a
    permission that nobody gave. With 4, a limit of requests, tokens, cost or time was reached, or the model repeated a
    tool call without a new result. With 75, the model's endpoint failed in a way that may pass.
    """
    with told_as(output_format):
        if given["go_on"] and given["resume"]:
            fail("-c continues the last session, -r the session that you name: give one of them.")
        if given["yolo"] and given["mode"] not in (None, "yolo"):
            fail(f"--yolo is short for --mode yolo, and --mode {given['mode']} asks for another: give one of them.")
        if given["no_session"] and (given["go_on"] or given["resume"]):
            fail("--no-session stores nothing, and -c and -r continue what is stored: give one of them.")
        if given["system_prompt"] is not None and given["append_system_prompt"] is not None:
            fail("--system-prompt replaces the system prompt, --append-system-prompt adds to it: give one of them.")
        given["mode"] = "yolo" if given["yolo"] else given["mode"]
        given["output_schema"] = read_schema(given["output_schema"]) if given["output_schema"] is not None else None
        given["tools"] = choose_tools(given["tools"]) if given["tools"] is not None else None
        given["cwd"] = find_folder("--cwd", given["cwd"])
        given["roots"] = [find_folder("--add-dir", root) for root in given["roots"]]
        text = read_prompt(prompt)
        if given["goal"] or given["until"]:
            text = f"/goal {text}" + (f" until = {given['until']}" if given["until"] else "")
        sys.exit(run_to_end(send_prompt(text, output_format, given)))


async def send_prompt(text: str, style: Any, given: Mapping[str, Any]) -> int:
    """Build the app and send the prompt. Raises ConfigError, ModelError, StoreError."""
    from crow_cli.run import LAST_SESSION, RunOptions, find_terminal, run

    hide_memory()
    servers = [server for source in given["mcp_config"] for server in read_mcp_config(source)]
    crow, budget = await build_app(given)
    resume: str = given["resume"]
    folder: str = given["cwd"]
    if resume:
        from crow_cli.storage import find_session_to_continue

        resume, folder = find_session_to_continue(os.environ, resume, folder)
    options = RunOptions(
        style=style,
        terminal=find_terminal(),
        resume=LAST_SESSION if given["go_on"] else resume,
        mode=given["mode"],
        output_schema=given["output_schema"],
        timeout=given["timeout"],
        servers=servers,
        roots=given["roots"],
        system=find_system_prompt(given),
        budget=budget,
        is_stored=not given["no_session"],
    )
    return await run(crow, text, folder, options)


async def build_app(given: Mapping[str, Any]) -> "tuple[Crow, Budget | None]":
    """Build the app, and the limits that it keeps to, if there are any. Raises ConfigError, ModelError."""
    from crow_agent.app import build
    from crow_extensions.ask_user import ask_user
    from crow_persistence.extension import persistence

    crow = await build(
        os.environ,
        model=given["model"],
        mode=given["mode"],
        max_requests=given["max_requests"],
        without=[ask_user, *([persistence] if given["no_session"] else [])],
        tools=given["tools"],
        allow=check_rules("--allow", given["allow"]),
        deny=check_rules("--deny", given["deny"]),
    )
    if given["until"]:
        from crow_extensions.goal import allow_command

        crow.use(allow_command, command=given["until"].strip())
    if not given["max_tokens"] and not given["max_cost"]:
        return crow, None
    from crow_agent.budget import Budget, limit_spending

    budget = Budget(tokens=given["max_tokens"], money=given["max_cost"], setting="--max-cost")
    budget.check_prices(next(iter(crow.models.values())))
    crow.use(limit_spending, budget=budget)
    return crow, budget


def check_rules(option: str, rules: Sequence[str]) -> Sequence[str]:
    """Return permission rules. Raises ConfigError for one that cannot be used."""
    from crow_permissions.rules import parse_rules

    try:
        parse_rules(rules)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}.") from error
    return rules


def choose_tools(names: str) -> list[str]:
    """Return the names of crow's own tools that a list of tools and groups means."""
    from crow_agent.chosen_tools import choose_builtin_tools

    wanted = [name.strip().removeprefix("builtin:") for name in names.split(",") if name.strip()]
    try:
        return choose_builtin_tools(["builtin" if name == "builtin" else f"builtin:{name}" for name in wanted])
    except ValueError as error:
        fail(f"--tools: {error}")


def read_mcp_config(source: str) -> "list[McpServer]":
    """Return the MCP servers in a file, or in the JSON itself. Raises ConfigError."""
    from crow_agent.settings.config import load_environment
    from crow_agent.settings.home import Home
    from crow_agent.settings.mcp_servers import to_mcp_server
    from crow_agent.settings.reading import parse_servers, read_servers

    env = load_environment(Home.find(os.environ), os.environ)
    if source.lstrip().startswith("{"):
        servers = parse_servers(Path("--mcp-config.json"), source, env)
    elif (file := Path(source).expanduser()).is_file():
        servers = read_servers(file, env)
    else:
        raise ConfigError(f"--mcp-config: there is no file {source}.")
    try:
        return [to_mcp_server(name, settings) for name, settings in servers.items() if not settings.disabled]
    except ConfigError as error:
        raise ConfigError(f"--mcp-config {source}: {error}") from error


def find_system_prompt(given: Mapping[str, Any]) -> "SystemPrompt | None":
    """Return the system prompt that an option gives."""
    from crow_cli.run import make_system_prompt

    for option, alone in (("system_prompt", True), ("append_system_prompt", False)):
        if given[option] is not None:
            return make_system_prompt(given[option], alone=alone)
    return None


def find_folder(option: str, name: str) -> str:
    """Return the absolute path of a folder."""
    try:
        folder = Path(name).expanduser().resolve(strict=True)
    except (OSError, RuntimeError) as error:
        fail(f"{option}: the folder {name} does not exist ({error}).")
    if not folder.is_dir():
        fail(f"{option}: {folder} is not a folder.")
    return str(folder)


def read_schema(source: str) -> dict[str, Any]:
    """Return the JSON schema in a file, on standard input for `-`, or in the argument itself."""
    from crow_core.session.output import check_schema
    from crow_core.text import decode_json

    try:
        text = source if source.lstrip().startswith("{") else click.open_file(source, encoding="utf-8").read()
        check_schema(schema := decode_json(text))
    except OSError as error:
        fail(f"--output-schema: {source} cannot be read ({error.strerror}).")
    except ValueError as error:
        fail(f"--output-schema: the JSON schema cannot be used: {error}.")
    return schema


def read_prompt(prompt: str | None) -> str:
    """Return the prompt, followed by the text from standard input unless that is a terminal."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    text = "\n\n".join(part for part in (prompt, piped.strip()) if part)
    if not text:
        fail('nothing to say. Give a prompt: crow run "explain this project"')
    return text
