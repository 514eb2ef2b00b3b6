"""`crow setup`: choose a model, store its key, test it, and write the settings. Editors start it to log in."""

import asyncio
import difflib
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from textwrap import fill
from typing import Any, Literal, NoReturn

import click
from crow_agent.settings.config import load_environment
from crow_agent.settings.discovery import LOCAL_SERVERS, add_scheme, list_local_models, to_chat_model
from crow_agent.settings.home import Home
from crow_agent.settings.structs import ModelSettings
from crow_core.errors import ConfigError
from crow_core.masking import find_secrets, mask
from crow_core.models.endpoint import is_local, to_display_url
from crow_core.models.listing import asks_for_key, list_models
from crow_core.text import escape_controls
from crow_system.shortening import format_count

from crow_cli.console import escape_line, print_diff, print_note, shorten_path
from crow_cli.local_models import recommend
from crow_cli.menu import ask_text, choose, choose_text, has_terminal
from crow_cli.process import fail
from crow_cli.settings_file import Change, FileEdit, edit_config, edit_env

Store = Literal["keyring", "file"]

ADVICE = {
    "Ollama": "Start it (`ollama serve`), and load a model (`ollama pull qwen3:8b`).",
    "LM Studio": "Start its server (Developer, or `lms server start`), and download a model.",
    "llama.cpp": "Start it: llama-server -m MODEL.gguf --jinja",
    "vLLM": "Start it: vllm serve MODEL",
}
"""The remedy when a local server does not answer."""


@dataclass(frozen=True)
class Provider:
    """A server of models."""

    id: str
    title: str
    base_url: str
    key: str = ""
    """The variable that usually holds the key; "" for a server that needs none."""
    page: str = ""
    """The page that issues keys."""
    models: tuple[str, ...] = ()
    """The models that it lists, as far as it was asked."""


@dataclass(frozen=True)
class Key:
    """The key of a model, and the setting that leads to it."""

    value: str = ""
    setting: str = ""
    """The value of `api_key` in `config.toml`; "" for no key."""
    store: Store | None = None
    """The place in which it is not yet stored; None for a variable of the environment."""


def setup(**options: Any) -> None:
    """Run the command."""
    try:
        Setup(Home.find(os.environ), **options).run()
    except ConfigError as error:
        fail(str(error))
    except (KeyboardInterrupt, EOFError, click.Abort):
        print_note("\nNothing was written.")
        sys.exit(130)


class Setup:
    """One run of the command."""

    def __init__(
        self,
        home: Home,
        *,
        provider: str,
        base_url: str,
        model: str,
        key_env: str,
        key_stdin: bool,
        store: Store | None,
        name: str,
        no_test: bool,
        yes: bool,
        listing: bool,
        is_login: bool = False,
    ) -> None:
        """`is_login` is True if a client has started the command, and goes on by itself."""
        self.home, self.env = home, load_environment(home, os.environ)
        self.wanted, self.base_url, self.model, self.name = provider, base_url, model, name
        self.key_env, self.key_stdin = key_env, key_stdin
        self.store: Store | None = store
        self.no_test, self.yes, self.listing, self.is_login = no_test, yes, listing, is_login
        self.interactive = has_terminal()
        """True if the user can be asked."""

    def run(self) -> None:
        if self.listing:
            print_providers(find_local_providers())
            return
        provider = self.find_provider()
        key = self.find_key(provider)
        provider = self.list_models(provider, key)
        if not (key.value or provider.models) and asyncio.run(asks_for_key(provider.base_url)):
            click.echo(escape_line(f"{provider.title} asks for a key."))
            key = self.ask_for_key(provider)
            provider = self.list_models(provider, key)
        if not provider.models:
            self.print_advice(provider)
        model = self.model or self.choose_model(provider)
        name = self.name or provider.id
        works = self.no_test or self.test(provider, model, key)
        if not works and not (self.interactive and click.confirm("Write the settings nevertheless?", default=False)):
            print_note("Nothing was written.")
            sys.exit(1)
        key = replace(key, setting=f"keyring:{name}") if key.store == "keyring" else key
        self.write(name, provider, model, key)

    def find_provider(self) -> Provider:
        """Return the provider that the options name, or let the user choose. Raises ConfigError."""
        known = read_providers()
        if self.base_url:
            url = add_scheme(self.base_url)
            same = next((one for one in known if one.base_url.rstrip("/") == url.rstrip("/")), None)
            return same or Provider(make_id(url), to_display_url(url), url)
        if self.wanted:
            named = next(
                (one for one in [*get_local_providers(), *known] if self.wanted.lower() in names_of(one)), None
            )
            if named is None:
                every = ", ".join(one.id for one in [*get_local_providers(), *known])
                raise ConfigError(f"There is no provider {self.wanted!r}. Known are: {every}. Others take --base-url.")
            return named
        local = find_local_providers()
        if not self.interactive:
            self.explain_options(local)
        for one in local:
            click.echo(escape_line(f"{one.title} runs on this machine, with {format_count(len(one.models), 'model')}."))
        if not local:
            click.echo("No model server (Ollama, LM Studio, llama.cpp, vLLM) answers on this machine.")
        with_key = [one for one in known if self.env.get(one.key)]
        if not (local or with_key):
            print_note(fill(recommend(), shutil.get_terminal_size().columns - 1))
        options: list[tuple[Provider | None, str]] = [
            *((one, f"{one.title}, on this machine") for one in local),
            *((one, f"{one.title} ({one.key} is set)") for one in with_key),
            (None, "A server at another address"),
            *((one, one.title) for one in known if one not in with_key),
        ]
        chosen = choose("Which model server shall crow use?", options)
        if chosen is None:
            self.base_url = ask_text("Its address, such as http://192.168.1.5:8000/v1")
            return self.find_provider()
        return chosen

    def explain_options(self, local: list[Provider]) -> NoReturn:
        """Exit with the command to run where nobody can be asked."""
        first = local[0] if local else None
        example = (
            f"--provider {first.id} --model {first.models[0]}"
            if first
            else "--provider openai --model NAME --key-env OPENAI_API_KEY, "
            "or for another server: --base-url URL --model NAME"
        )
        found = f"{first.title} answers on this machine. " if first else ""
        fail(f"there is no terminal to ask on. {found}Give the answers as options: crow setup {example}")

    def find_key(self, provider: Provider) -> Key:
        """Return the key from where the options say, or ask the user for it. Raises ConfigError."""
        if self.key_env:
            if not re.fullmatch(r"[A-Za-z_]\w*", self.key_env):
                raise ConfigError("--key-env takes the name of a variable, such as OPENAI_API_KEY, not the key itself.")
            if not self.env.get(self.key_env):
                raise ConfigError(f"--key-env: {self.key_env} is not set. Set it, or use --key-stdin.")
            return Key(self.env[self.key_env], f"${{{self.key_env}}}")
        if self.key_stdin:
            return self.place_key(provider, check_key(sys.stdin.readline()))
        if not provider.key and (not self.interactive or is_local(provider.base_url)):
            return Key()
        if not self.interactive:
            if self.env.get(provider.key):
                return Key(self.env[provider.key], f"${{{provider.key}}}")
            raise ConfigError(
                f"{provider.title} needs a key. Set {provider.key} and give --key-env {provider.key}, or --key-stdin."
            )
        if provider.key and self.env.get(provider.key):
            print_note(f"Uses {provider.key}. An editor that is started from the desktop may not have it.")
            return Key(self.env[provider.key], f"${{{provider.key}}}")
        if provider.page:
            click.echo(f"Keys are issued at {provider.page}")
        return self.ask_for_key(provider, optional=not provider.key)

    def ask_for_key(self, provider: Provider, *, optional: bool = False) -> Key:
        """Let the user type a key, or none if it is `optional`. Raises ConfigError where nobody can be asked."""
        if not self.interactive:
            raise ConfigError(
                f"{provider.title} asks for a key. Name the variable that holds it: --key-env NAME, or use --key-stdin."
            )
        while True:
            typed = click.prompt(
                f"Key for {provider.title}{' (empty for none)' if optional else ''}, which is not shown",
                hide_input=True,
                default="",
                show_default=False,
                err=False,
            )
            if optional and not typed.strip():
                return Key()
            try:
                return self.place_key(provider, check_key(typed))
            except ConfigError as error:
                click.secho(escape_line(str(error)), fg="red")

    def place_key(self, provider: Provider, key: str) -> Key:
        """Choose the place for a new key."""
        from crow_agent.settings.keys import has_keyring  # imports keyring, which is slow

        store = self.store
        if store is None:
            store = "keyring" if has_keyring() else "file"
        return Key(key, f"${{{make_variable(self.name or provider.id)}}}", store)

    def list_models(self, provider: Provider, key: Key) -> Provider:
        """Return the provider with the models that it lists, and with `/v1` in its address if it answers there."""
        urls = [provider.base_url]
        if self.base_url and not re.search(r"/v\d", provider.base_url):
            urls.append(f"{provider.base_url.rstrip('/')}/v1")
        for url in urls:
            if names := asyncio.run(list_models(url, key.value)):
                return replace(provider, base_url=url, models=tuple(names))
        return provider

    def print_advice(self, provider: Provider) -> None:
        """Say what may be wrong with a server that lists no models."""
        title, url = provider.title, to_display_url(provider.base_url)
        if title in ADVICE:
            print_note(f"{title} does not answer at {url}, or has no model. {ADVICE[title]}")
        elif not self.model:
            print_note(f"{url} lists no models: it may not answer, refuse the key, or have no list.")

    def choose_model(self, provider: Provider) -> str:
        """Take the only model, or let the user choose one. Raises ConfigError where nobody can be asked."""
        if len(provider.models) == 1:
            return provider.models[0]
        if self.interactive:
            return choose_text(f"Which model of {provider.title}?", provider.models)
        listed = f" It lists: {', '.join(provider.models[:20])}." if provider.models else ""
        raise ConfigError(f"--model: name the model of {provider.title} to use.{listed}")

    def test(self, provider: Provider, model: str, key: Key) -> bool:
        """Send one request to the model, and say how it went."""
        from crow_cli.doctor import COLOURS, run_probe, to_examined  # imports all probes
        from crow_cli.probes import probe_key_and_model

        click.echo(escape_line(f"Asking {model} at {to_display_url(provider.base_url)} to say hello …"))
        settings = ModelSettings(base_url=provider.base_url, model=model, api_key=key.value)
        examined = to_examined(to_chat_model(self.name or provider.id, settings))

        async def ask() -> Any:
            try:
                return await run_probe(examined, probe_key_and_model)
            finally:
                await examined.close()

        result = asyncio.run(ask())
        click.secho(escape_line(result.sentence), fg=COLOURS[result.verdict])
        return result.verdict != "no"

    def write(self, name: str, provider: Provider, model: str, key: Key) -> None:
        """Show the changes, and write them. A user who declines to change a file is obeyed. Raises ConfigError."""
        table = ["models", name]
        changes: list[Change] = [
            (["model"], name),
            ([*table, "base_url"], provider.base_url),
            ([*table, "model"], model),
        ]
        if key.setting or has_key(self.home, name):
            changes.append(([*table, "api_key"], key.setting))
        variable = make_variable(self.name or provider.id)
        known = {**self.env, variable: key.value} if key.store == "file" else self.env
        edit = edit_config(self.home, changes, known)
        secret = edit_env(self.home, variable, key.value) if key.store == "file" else None
        show_edit(edit)
        if key.store == "keyring":
            click.echo(escape_line(f"The key will be stored in the system's keyring, as the entry {name!r} of 'crow'."))
        elif secret:
            click.echo(escape_line(f"The key will be stored in {secret.path}, which only you can read."))
        asks = self.interactive and not self.yes and edit.before is not None
        if asks and not click.confirm("Write this?", default=True):
            print_note("Nothing was written.")
            sys.exit(1)
        if key.store == "keyring":
            from crow_agent.settings import keys  # imports keyring, which is slow

            if not keys.store(name, key.value):
                raise ConfigError("The system's keyring did not store the key. Try again with --store file.")
        if secret:
            secret.write(mode=0o600)
        edit.write()
        click.echo(escape_line(f"Written to {shorten_path(str(edit.path), 60)}. crow uses {model} now."))
        self.print_overrides(name)
        if self.is_login:
            return
        print_note(
            'Ask something:    crow run "What is in this folder?"\n'
            "Open a session:   crow\n"
            "In your editor:   crow acp --print-config zed"
        )

    def print_overrides(self, name: str) -> None:
        """Tell which variables keep crow from using the model."""
        if (other := self.env.get("CROW_MODEL", name)) != name:
            print_note(f"CROW_MODEL={other} is set in the environment, and overrides this choice. Unset it.")
        elif self.env.get("OPENAI_BASE_URL"):
            print_note("OPENAI_BASE_URL is set too; it only counts for models that config.toml does not name.")


def read_providers() -> list[Provider]:
    """Read the providers that crow knows."""
    data = tomllib.loads(files("crow_cli").joinpath("providers.toml").read_text("utf-8"))
    return [Provider(id, **fields) for id, fields in data.items()]


def get_local_providers() -> list[Provider]:
    """Return the local servers, which may not run."""
    return [Provider(title.lower().replace(" ", "-"), title, url) for title, url in LOCAL_SERVERS.items()]


def find_local_providers() -> list[Provider]:
    """Return the local servers that answer, with their models."""
    found = asyncio.run(list_local_models())
    return [replace(one, models=tuple(found[one.title])) for one in get_local_providers() if one.title in found]


def print_providers(local: list[Provider]) -> None:
    """Print the local servers that answer, with their models, then the providers."""
    for one in local:
        click.echo(escape_line(f"{one.id}: {to_display_url(one.base_url)}, {', '.join(one.models)}"))
    print_note(recommend())
    for one in read_providers():
        click.echo(f"{one.id}: {one.base_url}, {one.key}{' is set' if os.environ.get(one.key) else ''}")


def names_of(provider: Provider) -> set[str]:
    """Return the names by which a provider can be chosen."""
    return {provider.id, provider.title.lower(), provider.title.lower().replace(" ", "")}


def make_id(url: str) -> str:
    """Make the name of a table from an address: its host, or `local`."""
    if is_local(url):
        return "local"
    host = re.sub(r"^[a-z]+://|[:/].*$", "", url).removeprefix("api.").removeprefix("www.")
    return re.sub(r"[^A-Za-z0-9]+", "-", host).strip("-") or "model"


def make_variable(name: str) -> str:
    """Make the name of the variable that holds a model's key in `.env`. No other program uses it."""
    return f"CROW_KEY_{re.sub(r'[^A-Z0-9]+', '_', name.upper())}"


def check_key(text: str) -> str:
    """Return a key without the characters that were copied with it. Raises ConfigError for a text that is not a key."""
    key = re.sub(r"^(export\s+)?[A-Z_]+=|^Bearer\s+", "", text.strip()).strip("\"'")
    if not key:
        raise ConfigError("No key was given.")
    if not re.fullmatch(r"[!-&(-~]+", key):
        raise ConfigError("This is no key: it holds spaces, quotes or letters that no HTTP header can hold.")
    return key


def has_key(home: Home, name: str) -> bool:
    """True if the model's table in `config.toml` has an `api_key` already, which then has to be replaced."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        data: Mapping[str, Any] = tomllib.loads((home.config / "config.toml").read_text("utf-8-sig"))
        return "api_key" in data["models"][name]
    return False


def show_edit(edit: FileEdit) -> None:
    """Print the lines that an edit changes, with secrets masked."""
    if edit.before == edit.after:
        click.echo(escape_line(f"{shorten_path(str(edit.path), 60)} says so already."))
        return
    name = shorten_path(str(edit.path), 60)
    click.echo(f"\n{escape_line(name)}{' (new)' if edit.before is None else ''}:")
    diff = difflib.unified_diff(edit.old.splitlines(), edit.new.splitlines(), lineterm="", n=1)
    lines = [line for line in [*diff][2:] if not line.startswith("@@")]
    secrets = find_secrets(tomllib.loads(edit.old.replace("\r\n", "\n")), tomllib.loads(edit.new.replace("\r\n", "\n")))
    secrets = {one for one in secrets if not one.startswith(("keyring:", "${"))}
    print_diff(escape_controls(str(mask("\n".join(lines), secrets))))
    click.echo()
