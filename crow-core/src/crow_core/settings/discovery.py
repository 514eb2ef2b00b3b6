"""Find the models to use: configured ones, one that the environment names, or those of a server on this machine."""

import asyncio
from collections.abc import Mapping

import msgspec

from crow_core.errors import ConfigError, ModelError
from crow_core.models.chat import ChatModel, Model
from crow_core.models.listing import find_first_model, list_models
from crow_core.models.quirks import find_quirks
from crow_core.settings.config import Config, ModelSettings

LOCAL_SERVERS = {
    "Ollama": "http://127.0.0.1:11434/v1",
    "LM Studio": "http://127.0.0.1:1234/v1",
    "llama.cpp": "http://127.0.0.1:8080/v1",
    "vLLM": "http://127.0.0.1:8000/v1",
}
"""The default URLs of local servers."""

LISTING_TIMEOUT = 0.7
"""Seconds that a local server may take to list its models."""

NO_MODEL_MESSAGE = """No model is configured, and no local server (Ollama, LM Studio, llama.cpp, vLLM) answers.
Set OPENAI_BASE_URL and CROW_MODEL, for example http://localhost:11434/v1 and qwen3:8b,
or OPENAI_API_KEY and CROW_MODEL for OpenAI, or write [models.NAME] into ~/.config/crow/config.toml.
`crow demo` works right now, without any model."""


async def find_models(config: Config, env: Mapping[str, str], wanted: str = "") -> dict[str, Model]:
    """Return the models to choose from by name, the default first. `wanted` names a model and overrides all settings.

    Raises ModelError, which names the settings to make, if there is none.
    """
    models: dict[str, Model] = {name: to_chat_model(name, settings) for name, settings in config.models.items()}
    name = wanted or env.get("CROW_MODEL", "") or config.model
    base_url, key = env.get("OPENAI_BASE_URL", ""), env.get("OPENAI_API_KEY", "")
    if name in models:
        return {name: models[name], **models}
    if base_url or (key and name):
        base_url = base_url or "https://api.openai.com/v1"
        name = name or await find_first_model(base_url, key)
        return {name: create_model(name, base_url, key), **models}
    if models and not name:
        return models
    if models:
        raise ModelError(f"There is no model {name!r}. Configured are: {', '.join(models)}.")
    if key:
        raise ModelError("OPENAI_API_KEY is set, but no model is named. Set CROW_MODEL, or pass -m.")
    return await find_local_models(name)


def takes_audio(config: Config, env: Mapping[str, str], wanted: str = "") -> bool:
    """Return whether the quirks of any configured or named model say that it takes audio; no server is asked."""
    settings = [find_quirks(each.base_url, each.model, each.quirks) for each in config.models.values()]
    name = wanted or env.get("CROW_MODEL", "")
    return any(quirks.audio for quirks in (*settings, find_quirks(env.get("OPENAI_BASE_URL", ""), name)))


def to_chat_model(name: str, settings: ModelSettings) -> ChatModel:
    """Make a model from its settings. Raises ConfigError."""
    try:
        quirks = find_quirks(settings.base_url, settings.model, settings.quirks)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.toml, [models.{name}.quirks]: {error}.") from error
    return ChatModel(
        name=settings.model,
        base_url=settings.base_url,
        api_key=settings.api_key,
        headers=settings.headers,
        parameters=settings.parameters,
        window=settings.window,
        idle_timeout=settings.idle_timeout,
        quirks=quirks,
        prices=settings.prices,
    )


def create_model(name: str, base_url: str, key: str = "") -> ChatModel:
    """Make a model that has no settings."""
    return ChatModel(name=name, base_url=base_url, api_key=key, quirks=find_quirks(base_url, name))


async def find_local_models(name: str) -> dict[str, Model]:
    """Return the models of the first local server that offers the named one, or any if `name` is empty.

    Raises ModelError if there is none.
    """
    listings = await asyncio.gather(*(list_models(url, timeout=LISTING_TIMEOUT) for url in LOCAL_SERVERS.values()))
    found = dict(zip(LOCAL_SERVERS.values(), listings, strict=True))
    for base_url, names in found.items():
        if names and (not name or name in names):
            return {each: create_model(each, base_url) for each in [name or names[0], *names]}
    offered = ", ".join(each for names in found.values() for each in names)
    if name and offered:
        raise ModelError(f"No server on this machine offers the model {name!r}. They offer: {offered}.")
    raise ModelError(f"There is no model {name!r} to ask. {NO_MODEL_MESSAGE}" if name else NO_MODEL_MESSAGE)
