"""How many tokens really fit, as the server tells it: a local server's setting, not what the model could take."""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec

from crow_core.models.chat import ChatModel
from crow_core.models.endpoint import endpoint, http_client, is_local

PATIENCE = 3.0
"""Seconds for each question."""

KEYS = ("context_length", "max_model_len", "context_window", "max_context_length", "max_input_tokens")
"""What servers call it in `/v1/models`: OpenRouter, vLLM, Groq, LM Studio and Mistral, LiteLLM."""


async def find_window(model: ChatModel) -> int | None:
    """Tokens that fit into one request and its reply; None when the server does not tell.

    A server nearby is asked for what it has loaded: llama.cpp's `/props`, Ollama's `/api/ps` and `/api/show`, LM
    Studio's `/api/v0/models`. Then `/v1/models`.
    """
    import httpx2  # as in model.py

    if not model.base_url:
        return None
    try:
        async with http_client(model.base_url, model.api_key, PATIENCE, model.headers) as http:
            root = endpoint(model.base_url, "").partition("?")[0].rstrip("/").removesuffix("/v1")
            if is_near(model.base_url):
                found = from_props(await get(http, f"{root}/props"))
                found = found or from_ps(await get(http, f"{root}/api/ps"), model.name)
                found = found or from_show(await post(http, f"{root}/api/show", {"model": model.name}))
                found = found or from_loaded(await get(http, f"{root}/api/v0/models"), model.name)
                if found:
                    return found
            return from_models(await get(http, endpoint(model.base_url, "models")), model.name)
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeEncodeError):
        return None


def is_near(url: str) -> bool:
    """Whether it is a server on this machine or in its own network, as people run them themselves."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if is_local(url) or "." not in host or host.endswith((".local", ".lan", ".internal")):
        return True
    try:
        return ip_address(host).is_private
    except ValueError:
        return False


async def get(http: Any, url: str) -> Mapping[str, Any]:
    return read(await http.get(url))


async def post(http: Any, url: str, body: dict[str, Any]) -> Mapping[str, Any]:
    return read(await http.post(url, content=msgspec.json.encode(body)))


def read(response: Any) -> Mapping[str, Any]:
    """A JSON object, or an empty one for whatever else came."""
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any]) if response.status_code == 200 else {}
    except (msgspec.DecodeError, RecursionError):
        return {}


def objects(listing: Any) -> list[dict[str, Any]]:
    """The objects in a list; none in what is no list."""
    return [each for each in listing if isinstance(each, dict)] if isinstance(listing, list) else []  # pyright: ignore[reportUnknownVariableType]


def from_props(props: Mapping[str, Any]) -> int | None:
    """llama.cpp: the context of one slot."""
    (settings,) = objects([props.get("default_generation_settings")]) or [{}]
    return whole(settings.get("n_ctx"))


def from_ps(listing: Mapping[str, Any], name: str) -> int | None:
    """Ollama: the context with which a model is loaded."""
    loaded = objects(listing.get("models"))
    return next((whole(each.get("context_length")) for each in loaded if is_same(each, name)), None)


def from_show(shown: Mapping[str, Any]) -> int | None:
    """Ollama: `num_ctx` if the model's file sets it. What the model could take says nothing about what it gets."""
    match = re.search(r"^num_ctx\s+(\d+)", str(shown.get("parameters") or ""), re.M)
    return int(match[1]) if match else None


def from_loaded(listing: Mapping[str, Any], name: str) -> int | None:
    """LM Studio: the context with which a model is loaded."""
    loaded = objects(listing.get("data"))
    return next((whole(each.get("loaded_context_length")) for each in loaded if each.get("id") == name), None)


def from_models(listing: Mapping[str, Any], name: str) -> int | None:
    """`/v1/models`, under the names that servers have for it."""
    for entry in objects(listing.get("data")):
        if is_same({"name": entry.get("id")}, name):
            (meta,) = objects([entry.get("meta")]) or [{}]
            return next((n for key in KEYS if (n := whole(entry.get(key)))), None) or whole(meta.get("n_ctx"))
    return None


def is_same(entry: Mapping[str, Any], name: str) -> bool:
    """Whether an entry is of the model; Ollama adds `:latest`."""
    names = {str(entry.get("name") or ""), str(entry.get("model") or "")}
    return bool(names & {name, f"{name}:latest"})


def whole(value: Any) -> int | None:
    """A positive number of tokens, else None."""
    return value if isinstance(value, int) and value > 1 else None
