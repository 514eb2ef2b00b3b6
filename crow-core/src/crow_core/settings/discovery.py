"""Which model to ask: the one configured, the one the environment names, or one that runs on this machine."""

import asyncio
from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec
from msgspec import Struct

from crow_core.models.chat import ChatModel, Model, endpoint, http_client
from crow_core.models.quirks import known
from crow_core.models.stream import ModelError
from crow_core.settings.config import Config, ConfigError, ModelSettings

LOCAL = {
    "Ollama": "http://127.0.0.1:11434/v1",
    "LM Studio": "http://127.0.0.1:1234/v1",
    "llama.cpp": "http://127.0.0.1:8080/v1",
    "vLLM": "http://127.0.0.1:8000/v1",
}
"""Where the usual local servers listen."""

PATIENCE = 0.7
"""Seconds a local server may take to list its models."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

NOTHING = """No model is configured, and no local server (Ollama, LM Studio, llama.cpp, vLLM) answers.
Set OPENAI_BASE_URL and CROW_MODEL, for example http://localhost:11434/v1 and qwen3:8b,
or OPENAI_API_KEY and CROW_MODEL for OpenAI, or write [models.NAME] into ~/.config/crow/config.toml.
`crow demo` works right now, without any model."""


class Listed(Struct):
    id: str


class Listing(Struct):
    """What `/v1/models` answers."""

    data: list[Listed]


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


def hears(config: Config, env: Mapping[str, str], wanted: str = "") -> bool:
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


async def first_model(base_url: str, key: str) -> str:
    """The first model an endpoint lists. Raises ModelError."""
    found = await list_models(base_url, key)
    if not found:
        raise ModelError(f"No model is named, and {base_url} does not list any. Set CROW_MODEL, or pass -m.")
    return found[0]


async def models_at(base_url: str, headers: Mapping[str, str], known_names: Collection[str]) -> dict[str, Model]:
    """The models of an endpoint of which nothing is configured: those it lists, the `known_names` among them first;
    where it lists none, these. Raises ModelError when there is neither."""
    listed = await list_models(base_url, headers=headers)
    names = sorted(listed, key=lambda name: name not in known_names) or known_names
    if not names:
        raise ModelError(f"{base_url} does not list its models, and none is named. Set CROW_MODEL.")
    return {n: ChatModel(name=n, base_url=base_url, headers=headers, quirks=known(base_url, n)) for n in names}


async def list_models(
    base_url: str, key: str = "", patience: float = 10.0, headers: Mapping[str, str] = NO_HEADERS
) -> list[str]:
    """The models an endpoint says it has; none when it does not answer as such an endpoint."""
    import httpx2  # as in model.py: not before it is needed

    try:
        async with http_client(base_url, key, patience, headers) as http:
            response = await http.get(endpoint(base_url, "models"))
        listing = msgspec.json.decode(response.content, type=Listing)
    except (httpx2.HTTPError, httpx2.InvalidURL, msgspec.DecodeError, UnicodeError):
        return []
    return [model.id for model in listing.data]
