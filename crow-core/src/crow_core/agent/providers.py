"""The endpoints that a client sets in place of the configured ones (ACP, `providers/*`)."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from msgspec import UNSET

from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    INVALID_PARAMS,
    DisableProviderRequest,
    DisableProviderResponse,
    ListProvidersRequest,
    ListProvidersResponse,
    ProviderCurrentConfig,
    ProviderInfo,
    SetProviderRequest,
    SetProviderResponse,
)
from crow_core.models.chat_model import ChatModel
from crow_core.models.listing import discover_models
from crow_core.models.model_call import Model

PROTOCOL = "openai"
"""The protocol for model calls."""
PROVIDER_ID = "main"
"""The id of the only provider that can be set."""


@dataclass
class ClientProvider:
    """The endpoint of one client. Its headers are secrets, which stay in memory."""

    base_url: str
    headers: Mapping[str, str] = field(repr=False)
    cached_models: dict[str, Model] = field(default_factory=dict[str, Model])
    """The endpoint's models; empty until a session needs them."""

    async def load_models(self, preferred_names: Collection[str]) -> dict[str, Model]:
        """Return the endpoint's models in the order of `discover_models`. Raises ModelError."""
        self.cached_models = self.cached_models or await discover_models(self.base_url, self.headers, preferred_names)
        return self.cached_models

    async def close(self) -> None:
        for model in self.cached_models.values():
            if isinstance(model, ChatModel):
                await model.close()


class ClientProviders:
    """The endpoints of one client, and the requests that set them."""

    def __init__(self) -> None:
        self.current: ClientProvider | None = None
        """The endpoint for the sessions that the client opens from now on; None for the configured models."""
        self._set: list[ClientProvider] = []
        """Every endpoint that the client has set."""

    async def list_providers(self, params: ListProvidersRequest) -> ListProvidersResponse:
        provider = self.current
        current = ProviderCurrentConfig(api_type=PROTOCOL, base_url=provider.base_url) if provider else UNSET
        info = ProviderInfo(provider_id=PROVIDER_ID, supported=[PROTOCOL], required=False, current=current)
        return ListProvidersResponse(providers=[info])

    async def set_provider(self, params: SetProviderRequest) -> SetProviderResponse:
        if params.provider_id != PROVIDER_ID:
            raise RpcError(INVALID_PARAMS, "Unknown provider", details=f"The only provider is {PROVIDER_ID!r}.")
        if params.api_type != PROTOCOL:
            raise RpcError(INVALID_PARAMS, "Unknown protocol", details=f"crow speaks {PROTOCOL!r} with models.")
        if not is_shareable_url(params.base_url):
            why = "It takes an http or https address without a password or a query: a key belongs into the headers."
            raise RpcError(INVALID_PARAMS, "Unusable base URL", details=why)
        self.current = ClientProvider(params.base_url, dict(params.headers or {}))
        self._set.append(self.current)
        return SetProviderResponse()

    async def disable_provider(self, params: DisableProviderRequest) -> DisableProviderResponse:
        """Use the configured models again; does nothing if no provider was set."""
        if params.provider_id == PROVIDER_ID:
            self.current = None
        return DisableProviderResponse()

    async def close(self) -> None:
        """Close the connections to all endpoints."""
        await asyncio.gather(*(provider.close() for provider in self._set))


def is_shareable_url(url: str) -> bool:
    """Return whether a URL is one of HTTP without user, password and query, which may be secret."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or "@" in parts.netloc)
    except ValueError:
        return False
