"""The commands about crow's own settings: `crow setup`, `status`, `config` and `completion`.

Their code is imported when one of them runs, so that the others start as fast as without them.
"""

from collections.abc import Callable
from typing import Any

import click
from crow_core.errors import ConfigError, StoreError

from crow_cli.console import AS_JSON
from crow_cli.process import fail


@click.command()
@click.option("--provider", metavar="NAME", default="", help="A local server or a provider; --list shows all.")
@click.option("--base-url", metavar="URL", default="", help="The address of any other OpenAI-compatible endpoint.")
@click.option("--model", metavar="NAME", default="", help="The model's name at the endpoint.")
@click.option("--key-env", metavar="VARIABLE", default="", help="Use the key in this variable; it is stored nowhere.")
@click.option("--key-stdin", is_flag=True, help="Read the key from standard input, and store it.")
@click.option(
    "--store",
    type=click.Choice(["keyring", "file"]),
    help="Where to store a key: the system's keyring, or .env in crow's folder. Default: the keyring where it works.",
)
@click.option("--name", metavar="NAME", default="", help="The name of the model's table; by default the provider's.")
@click.option("--no-test", is_flag=True, help="Send no request to the model.")
@click.option("-y", "--yes", is_flag=True, help="Write without asking.")
@click.option("--list", "listing", is_flag=True, help="List the local servers that answer, and the providers.")
def setup(**options: Any) -> None:
    """Choose the model that crow uses: a local one, or a provider's with a key.

    Finds Ollama, LM Studio, llama.cpp and vLLM on this machine, tests the model with one request, shows what it will
    write into config.toml, and makes the model the default. Keys are never printed. Without a terminal, the options
    answer all questions.

    Exit codes: 0 the model is set up, 1 it did not answer or you declined, 2 wrong usage or configuration.
    """
    from crow_cli.setup import setup

    setup(**options)


def log_in(**options: Any) -> None:
    """Run `crow setup` for a client, which goes on by itself."""
    from crow_cli.setup import setup

    setup(**options, is_login=True)


acp_setup = click.Command("setup", callback=log_in, params=setup.params, help=setup.help, hidden=True)
"""An editor that logs in on a terminal adds `setup` to the command line with which it starts the agent."""


@click.command()
@AS_JSON
def status(as_json: bool) -> None:
    """Show which model crow uses and why, the files it reads, rules, servers, data, and the cost of today."""
    from crow_cli.status import print_status

    with_faults(print_status, as_json)


@click.group()
def config() -> None:
    """Show and change the settings in config.toml."""


@config.command()
@click.option("--all", "everything", is_flag=True, help="Also show the settings that have their default value.")
@AS_JSON
def show(everything: bool, as_json: bool) -> None:
    """Show all settings, and the file and line, or the variable, that each comes from. Keys are masked."""
    from crow_cli.config_values import print_settings

    with_faults(print_settings, everything, as_json)


@config.command()
@click.argument("key")
@AS_JSON
def get(key: str, as_json: bool) -> None:
    """Print the value of one setting, such as permissions.mode, or of a table. Its place goes to standard error.

    Exit codes: 0 there is a value, 1 there is none, 2 there is no such setting.
    """
    from crow_cli.config_values import print_setting

    with_faults(print_setting, key, as_json)


@config.command("set")
@click.argument("key")
@click.argument("value")
def set_(key: str, value: str) -> None:
    """Set a setting in config.toml, whose comments stay. Nothing is written that crow could not use.

    VALUE is written as in TOML; quotes around a text may be left out.

    Example: crow config set permissions.mode accept-edits
    """
    from crow_cli.config_values import change_setting

    with_faults(change_setting, key, value)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes crow's commands and options in a SHELL.

    \b
    bash, in ~/.bashrc:                      eval "$(crow completion bash)"
    zsh, in ~/.zshrc, after compinit:        eval "$(crow completion zsh)"
    fish:  crow completion fish > ~/.config/fish/completions/crow.fish
    """
    from click.shell_completion import BashComplete, get_completion_class

    class AnyBash(BashComplete):
        """Prints the script without starting bash to ask for its version."""

        @staticmethod
        def _check_version() -> None: ...

    found = AnyBash if shell == "bash" else get_completion_class(shell)
    assert found
    click.echo(found(context.find_root().command, {}, "crow", "_CROW_COMPLETE").source())


def with_faults(work: Callable[..., None], *args: Any) -> None:
    """Run a function; print a ConfigError or a StoreError as a message and exit with code 2."""
    try:
        work(*args)
    except (ConfigError, StoreError) as error:
        fail(str(error))
