"""Ask a server about a model: how many tokens fit, by the settings of a local server, and how large the model is."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from crow_core.models.chat_model import ChatModel, ServerFacts
from crow_core.models.endpoint import create_http_client, is_on_private_network, join_url

ANSWER_TIMEOUT = 3.0
"""Seconds that each request may take."""

WINDOW_KEYS = ("context_length", "max_model_len", "context_window", "max_context_length", "max_input_tokens")
"""Keys of the window in `/v1/models`: of OpenRouter, vLLM, Groq, LM Studio and Mistral, LiteLLM."""


async def find_window(model: ChatModel) -> int | None:
    """Return the tokens that fit into one request and its reply; None if the server does not tell."""
    return (await ask_server(model)).window


async def ask_server(model: ChatModel) -> ServerFacts:
    """Ask the server of a model about it.

    On a private network, llama.cpp's `/props`, Ollama's `/api/ps` and `/api/show` and LM Studio's `/api/v0/models` are
    asked first, for the window of the loaded model. `/v1/models` comes last.
    """
    import httpx2  # see endpoint.py

    facts = ServerFacts()
    if not model.base_url:
        return facts
    try:
        async with create_http_client(
            model.base_url, model.api_key, ANSWER_TIMEOUT, model.headers, model.transport
        ) as http:
            root = join_url(model.base_url, "").partition("?")[0].rstrip("/").removesuffix("/v1")
            if is_on_private_network(model.base_url):
                facts.window = read_llama_cpp_props(await get_object(http, f"{root}/props"))
                facts.is_loaded = facts.shows_progress = facts.window is not None
                if not facts.shows_progress:
                    loaded = read_ollama_ps(await get_object(http, f"{root}/api/ps"), model.name)
                    details = await post_object(http, f"{root}/api/show", {"model": model.name})
                    facts.is_loaded = loaded is not None
                    facts.window, facts.size = loaded or read_ollama_show(details), read_ollama_size(details)
                facts.window = facts.window or read_lm_studio_models(
                    await get_object(http, f"{root}/api/v0/models"), model.name
                )
            if facts.window is None or facts.shows_progress:
                listing = await get_object(http, join_url(model.base_url, "models"))
                facts.window = facts.window or read_models(listing, model.name)
                facts.size = facts.size or read_size(listing, model.name)
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeEncodeError):
        pass
    return facts


async def get_object(http: Any, url: str) -> Mapping[str, Any]:
    return parse_response(await http.get(url))


async def post_object(http: Any, url: str, body: dict[str, Any]) -> Mapping[str, Any]:
    return parse_response(await http.post(url, content=msgspec.json.encode(body)))


def parse_response(response: Any) -> Mapping[str, Any]:
    """Return a response's JSON object; an empty one for any other response."""
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any]) if response.status_code == 200 else {}
    except (msgspec.DecodeError, RecursionError):
        return {}


def filter_objects(listing: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; none if the value is not a list."""
    return [each for each in listing if isinstance(each, dict)] if isinstance(listing, list) else []  # pyright: ignore[reportUnknownVariableType]


def read_llama_cpp_props(props: Mapping[str, Any]) -> int | None:
    """Return the context of one slot of llama.cpp."""
    (settings,) = filter_objects([props.get("default_generation_settings")]) or [{}]
    return to_token_count(settings.get("n_ctx"))


def read_ollama_ps(listing: Mapping[str, Any], name: str) -> int | None:
    """Return the context with which Ollama has loaded a model."""
    loaded = filter_objects(listing.get("models"))
    return next((to_token_count(each.get("context_length")) for each in loaded if is_entry_of(each, name)), None)


def read_ollama_show(details: Mapping[str, Any]) -> int | None:
    """Return `num_ctx` if Ollama's model file sets it. The model's own context length says nothing about its use."""
    match = re.search(r"^num_ctx\s+(\d+)", str(details.get("parameters") or ""), re.M)
    return int(match[1]) if match else None


def read_ollama_size(details: Mapping[str, Any]) -> int | None:
    """Return the number of parameters of a model of Ollama."""
    (info,) = filter_objects([details.get("model_info")]) or [{}]
    return to_token_count(info.get("general.parameter_count"))


def read_lm_studio_models(listing: Mapping[str, Any], name: str) -> int | None:
    """Return the context with which LM Studio has loaded a model."""
    loaded = filter_objects(listing.get("data"))
    return next((to_token_count(each.get("loaded_context_length")) for each in loaded if each.get("id") == name), None)


def read_models(listing: Mapping[str, Any], name: str) -> int | None:
    """Return the window in a `/v1/models` answer, under any server's key for it."""
    for entry in filter_objects(listing.get("data")):
        if is_entry_of({"name": entry.get("id")}, name):
            (meta,) = filter_objects([entry.get("meta")]) or [{}]
            sizes = map(to_token_count, (*map(entry.get, WINDOW_KEYS), meta.get("n_ctx")))
            return next(filter(None, sizes), None)
    return None


def read_size(listing: Mapping[str, Any], name: str) -> int | None:
    """Return the number of parameters in llama.cpp's `/v1/models` answer. It has one model, whatever it is called."""
    entries = filter_objects(listing.get("data"))
    named = [entry for entry in entries if entry.get("id") == name] or entries[:1]
    (meta,) = filter_objects([entry.get("meta") for entry in named]) or [{}]
    return to_token_count(meta.get("n_params"))


def is_entry_of(entry: Mapping[str, Any], name: str) -> bool:
    """Return whether an entry is one of the named model, to which Ollama adds `:latest`."""
    names = {str(entry.get("name") or ""), str(entry.get("model") or "")}
    return bool(names & {name, f"{name}:latest"})


def to_token_count(value: Any) -> int | None:
    """Return a number of tokens greater than 1, else None."""
    return value if isinstance(value, int) and value > 1 else None
