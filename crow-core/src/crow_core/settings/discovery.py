"""Which model to ask: the one configured, the one the environment names, or one that runs on this machine."""

import asyncio
from collections.abc import Mapping

import msgspec

from crow_core.errors import ConfigError, ModelError
from crow_core.models.chat import ChatModel, Model
from crow_core.models.listing import first_model, list_models
from crow_core.models.quirks import known
from crow_core.settings.config import Config, ModelSettings

LOCAL = {
    "Ollama": "http://127.0.0.1:11434/v1",
    "LM Studio": "http://127.0.0.1:1234/v1",
    "llama.cpp": "http://127.0.0.1:8080/v1",
    "vLLM": "http://127.0.0.1:8000/v1",
}
"""Where the usual local servers listen."""

PATIENCE = 0.7
"""Seconds a local server may take to list its models."""


NOTHING = """No model is configured, and no local server (Ollama, LM Studio, llama.cpp, vLLM) answers.
Set OPENAI_BASE_URL and CROW_MODEL, for example http://localhost:11434/v1 and qwen3:8b,
or OPENAI_API_KEY and CROW_MODEL for OpenAI, or write [models.NAME] into ~/.config/crow/config.toml.
`crow demo` works right now, without any model."""


async def find_models(config: Config, env: Mapping[str, str], wanted: str = "") -> dict[str, Model]:
    """The models a user can choose from, the default first. `wanted` overrides every setting.

    Raises ModelError, with what to set, when there is none.
    """
    models: dict[str, Model] = {name: from_settings(name, settings) for name, settings in config.models.items()}
    name = wanted or env.get("CROW_MODEL", "") or config.model
    base_url, key = env.get("OPENAI_BASE_URL", ""), env.get("OPENAI_API_KEY", "")
    if name in models:
        return {name: models[name], **models}
    if base_url or (key and name):
        base_url = base_url or "https://api.openai.com/v1"
        name = name or await first_model(base_url, key)
        return {name: plain(name, base_url, key), **models}
    if models and not name:
        return models
    if models:
        raise ModelError(f"There is no model {name!r}. Configured are: {', '.join(models)}.")
    if key:
        raise ModelError("OPENAI_API_KEY is set, but no model is named. Set CROW_MODEL, or pass -m.")
    return await probe(name)


def takes_audio(config: Config, env: Mapping[str, str], wanted: str = "") -> bool:
    """Whether a model that may be asked is known to take audio, as far as one knows without asking anybody."""
    settings = [known(each.base_url, each.model, each.quirks) for each in config.models.values()]
    name = wanted or env.get("CROW_MODEL", "")
    return any(quirks.audio for quirks in (*settings, known(env.get("OPENAI_BASE_URL", ""), name)))


def from_settings(name: str, settings: ModelSettings) -> ChatModel:
    """A configured model. Raises ConfigError."""
    try:
        quirks = known(settings.base_url, settings.model, settings.quirks)
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


def plain(name: str, base_url: str, key: str = "") -> ChatModel:
    """A model of which nothing is configured but where it is."""
    return ChatModel(name=name, base_url=base_url, api_key=key, quirks=known(base_url, name))


async def probe(name: str) -> dict[str, Model]:
    """The models of the first local server that answers. Raises ModelError when none does."""
    listings = await asyncio.gather(*(list_models(url, patience=PATIENCE) for url in LOCAL.values()))
    found = dict(zip(LOCAL.values(), listings, strict=True))
    for base_url, names in found.items():
        if names and (not name or name in names):
            return {each: plain(each, base_url) for each in [name or names[0], *names]}
    offered = ", ".join(each for names in found.values() for each in names)
    if name and offered:
        raise ModelError(f"No server on this machine offers the model {name!r}. They offer: {offered}.")
    raise ModelError(f"There is no model {name!r} to ask. {NOTHING}" if name else NOTHING)
