"""List the models that an endpoint offers (`GET /models`)."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec
from msgspec import Struct

from crow_core.errors import ModelError
from crow_core.models.chat_model import ChatModel
from crow_core.models.endpoint import create_http_client, join_url, to_display_url
from crow_core.models.model_call import Model
from crow_core.models.quirks import find_quirks

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
LISTING_TIMEOUT = 10.0
"""Seconds that an endpoint may take to list its models."""


class ListedModel(Struct):
    """An entry of a `/v1/models` answer."""

    id: str


class ModelListing(Struct):
    """The answer of `/v1/models`."""

    data: list[ListedModel]


async def find_first_model(base_url: str, key: str) -> str:
    """Return the first model that an endpoint lists. Raises ModelError if it lists none."""
    names = await list_models(base_url, key)
    if not names:
        raise ModelError(
            f"No model is named, and {to_display_url(base_url)} does not list any. Set CROW_MODEL, or pass -m."
        )
    return names[0]


async def discover_models(
    base_url: str, headers: Mapping[str, str], preferred_names: Collection[str]
) -> dict[str, Model]:
    """Return the models of an endpoint without configuration, by their names: those it lists, `preferred_names` first.

    An endpoint that lists none has the `preferred_names`. Raises ModelError if there are none either.
    """
    listed = await list_models(base_url, headers=headers)
    names = sorted(listed, key=lambda name: name not in preferred_names) or preferred_names
    if not names:
        raise ModelError(f"{to_display_url(base_url)} does not list its models, and none is named. Set CROW_MODEL.")
    return {n: ChatModel(name=n, base_url=base_url, headers=headers, quirks=find_quirks(base_url, n)) for n in names}


async def asks_for_key(base_url: str) -> bool:
    """Return whether an endpoint refuses to list its models without a key."""
    import httpx2  # see endpoint.py

    try:
        async with create_http_client(base_url, "", LISTING_TIMEOUT, NO_HEADERS) as http:
            return (await http.get(join_url(base_url, "models"))).status_code in (401, 403)
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return False


async def list_models(
    base_url: str, key: str = "", timeout: float = LISTING_TIMEOUT, headers: Mapping[str, str] = NO_HEADERS
) -> list[str]:
    """Return the names of the models that an endpoint lists; none if it does not answer or answers something else."""
    import httpx2  # see endpoint.py

    try:
        async with create_http_client(base_url, key, timeout, headers) as http:
            response = await http.get(join_url(base_url, "models"))
        listing = msgspec.json.decode(response.content, type=ModelListing)
    except (httpx2.HTTPError, httpx2.InvalidURL, msgspec.DecodeError, UnicodeError):
        return []
    return [model.id for model in listing.data]
