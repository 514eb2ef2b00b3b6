"""List the models that an endpoint offers (`GET /models`)."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec
from msgspec import Struct

from crow_core.errors import ModelError
from crow_core.models.chat import ChatModel, Model
from crow_core.models.endpoint import endpoint, http_client
from crow_core.models.quirks import known

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Listed(Struct):
    id: str


class Listing(Struct):
    """What `/v1/models` answers."""

    data: list[Listed]


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
