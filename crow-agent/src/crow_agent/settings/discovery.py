"""Find the models to use: configured ones, one that the environment names, or those of a server on this machine."""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from crow_core.errors import ConfigError, ModelError
from crow_core.models.chat_model import ChatModel
from crow_core.models.endpoint import is_on_private_network
from crow_core.models.listing import find_first_model, list_models
from crow_core.models.model_call import Model
from crow_core.models.quirks import find_quirks

from crow_agent.settings.keys import read_key
from crow_agent.settings.structs import Config, ModelSettings, UnusableModel

LOCAL_SERVERS = {
    "Ollama": "http://127.0.0.1:11434/v1",
    "LM Studio": "http://127.0.0.1:1234/v1",
    "llama.cpp": "http://127.0.0.1:8080/v1",
    "vLLM": "http://127.0.0.1:8000/v1",
}
"""The default URLs of local servers."""

LISTING_TIMEOUT = 0.7
"""Seconds that a local server may take to list its models."""

FALLBACK_ATTEMPTS = 3
"""The most times that a busy endpoint is sent one request, about 12 seconds, before a fallback answers."""

NO_MODEL_MESSAGE = """No model is configured, and no local server (Ollama, LM Studio, llama.cpp, vLLM) answers.
Run `crow setup`, or set OPENAI_BASE_URL, OPENAI_API_KEY and CROW_MODEL. `crow demo` works without a model."""

OPENAI_URL = "https://api.openai.com/v1"


class FoundModels(NamedTuple):
    """The models to choose from."""

    models: dict[str, Model]
    """By name; the first is the default."""
    reason: str
    """The setting, variable or server that made the first one the default."""
    guessed: bool = False
    """True if no setting names the default model: a server's list decided."""

    def describe_guess(self) -> str:
        """Make the sentence that tells which model was chosen without a setting; "" if one was named."""
        if not self.guessed:
            return ""
        return f"Using the model {next(iter(self.models))}: {self.reason}. `crow setup` chooses another."


async def find_models(config: Config, env: Mapping[str, str], wanted: str = "") -> dict[str, Model]:
    """Return the models of `search_models`."""
    return (await search_models(config, env, wanted)).models


async def search_models(config: Config, env: Mapping[str, str], wanted: str = "") -> FoundModels:
    """Find the models to choose from. `wanted` names a model and overrides all settings.

    Raises ModelError, which names the settings to make, if there is none, and ConfigError for a key that cannot be
    read.
    """
    unusable = {name: one.error for name, one in config.models.items() if isinstance(one, UnusableModel)}
    models: dict[str, Model] = {
        name: to_chat_model(name, settings) for name, settings in config.models.items() if name not in unusable
    }
    name = wanted or env.get("CROW_MODEL", "") or config.model
    source = "-m" if wanted else "CROW_MODEL" if env.get("CROW_MODEL") else "model in config.toml"
    base_url, key = add_scheme(env.get("OPENAI_BASE_URL", "")), env.get("OPENAI_API_KEY", "")
    if name in unusable:
        raise ConfigError(unusable[name])
    if name in models:
        return await load_keys(FoundModels({name: models[name], **models}, f"{source} names it"))
    if base_url:
        if name:
            return await load_keys(
                FoundModels(
                    {name: create_model(name, base_url, key), **models},
                    f"{source} names it, OPENAI_BASE_URL the endpoint",
                )
            )
        name = await find_first_model(base_url, key)
        reason = "the first one that OPENAI_BASE_URL lists"
        return await load_keys(FoundModels({name: create_model(name, base_url, key), **models}, reason, guessed=True))
    if key and name:
        if (local := await find_local_server(name)) is not None:
            server, url = local
            reason = (
                f"{server} on this machine offers it, so it is not asked for at OpenAI, although OPENAI_API_KEY is set"
            )
            return await load_keys(FoundModels({name: create_model(name, url), **models}, reason, guessed=True))
        reason = f"{source} names it, OPENAI_API_KEY makes OpenAI the endpoint"
        return await load_keys(FoundModels({name: create_model(name, OPENAI_URL, key), **models}, reason))
    if unusable and not name and (first := next(iter(config.models))) in unusable:
        raise ConfigError(unusable[first])
    if models and not name:
        return await load_keys(FoundModels(models, "the first of [models] in config.toml"))
    if config.models:
        raise ModelError(f"There is no model {name!r}. Configured are: {', '.join(config.models)}.")
    if key:
        raise ModelError("OPENAI_API_KEY is set, but no model is named. Set CROW_MODEL, pass -m, or run `crow setup`.")
    return await find_local_models(name, source)


async def load_keys(found: FoundModels) -> FoundModels:
    """Read the keys of the models from the system's keyring where they are stored there. Raises ConfigError."""
    for name, model in found.models.items():
        if isinstance(model, ChatModel):
            model.api_key = await read_key(model.api_key, f"[models.{name}]")
    return found


def takes_audio(config: Config, env: Mapping[str, str], wanted: str = "") -> bool:
    """Return whether the quirks of any configured or named model say that it takes audio; no server is asked."""
    settings = [find_quirks(each.base_url, each.model, each.quirks) for each in config.models.values()]
    name = wanted or env.get("CROW_MODEL", "")
    return any(quirks.audio for quirks in (*settings, find_quirks(env.get("OPENAI_BASE_URL", ""), name)))


def add_scheme(url: str) -> str:
    """Begin an address that has no scheme with `http://` on a private network and this machine, else `https://`."""
    if not url or "://" in url:
        return url
    return f"{'http' if is_on_private_network(f'//{url}') else 'https'}://{url}"


def to_chat_model(name: str, settings: ModelSettings) -> ChatModel:
    """Make a model from its settings. Raises ConfigError."""
    base_url = add_scheme(settings.base_url)
    try:
        quirks = find_quirks(base_url, settings.model, settings.quirks)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.toml, [models.{name}.quirks]: {error}.") from error
    return ChatModel(
        name=settings.model,
        base_url=base_url,
        api_key=settings.api_key,
        headers=settings.headers,
        parameters=settings.parameters,
        window=settings.window,
        idle_timeout=settings.idle_timeout,
        quirks=quirks,
        prices=settings.prices,
        attempts=FALLBACK_ATTEMPTS if settings.fallback else ChatModel.attempts,
    )


def create_model(name: str, base_url: str, key: str = "") -> ChatModel:
    """Make a model that has no settings."""
    return ChatModel(name=name, base_url=base_url, api_key=key, quirks=find_quirks(base_url, name))


async def list_local_models() -> dict[str, list[str]]:
    """Return the models of each local server that answers, by the server's name."""
    listings = await asyncio.gather(*(list_models(url, timeout=LISTING_TIMEOUT) for url in LOCAL_SERVERS.values()))
    return {server: names for server, names in zip(LOCAL_SERVERS, listings, strict=True) if names}


async def find_local_server(name: str) -> tuple[str, str] | None:
    """Return the name and the URL of the first local server that offers a model; None if there is none."""
    found = await list_local_models()
    return next(((server, LOCAL_SERVERS[server]) for server, names in found.items() if name in names), None)


async def find_local_models(name: str, source: str) -> FoundModels:
    """Return the models of the first local server that offers the named one, or any if `name` is empty.

    Raises ModelError if there is none.
    """
    found = await list_local_models()
    for server, names in found.items():
        if not name or name in names:
            url = LOCAL_SERVERS[server]
            models: dict[str, Model] = {each: create_model(each, url) for each in [name or names[0], *names]}
            if name:
                return FoundModels(models, f"{source} names it, {server} on this machine offers it")
            return FoundModels(models, f"the first one of {server}, which runs on this machine", guessed=True)
    offered = ", ".join(each for names in found.values() for each in names)
    if name and offered:
        raise ModelError(f"No server on this machine offers the model {name!r}. They offer: {offered}.")
    raise ModelError(f"There is no model {name!r} to ask. {NO_MODEL_MESSAGE}" if name else NO_MODEL_MESSAGE)
