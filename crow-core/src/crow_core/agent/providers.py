"""An endpoint that a client sets in place of the configured ones (ACP, `providers/*`)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

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
        """Close the connections."""
        for model in self.cached_models.values():
            if isinstance(model, ChatModel):
                await model.close()


def is_shareable_url(url: str) -> bool:
    """Return whether a URL is one of HTTP without user, password and query, which may be secret."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or "@" in parts.netloc)
    except ValueError:
        return False
