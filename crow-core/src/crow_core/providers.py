"""An endpoint that a client brings along, in place of the configured ones (ACP, `providers/*`)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from crow_core.models.chat import ChatModel, Model
from crow_core.models.listing import models_at

API = "openai"
"""The protocol we speak with models."""
MAIN = "main"
"""The id of the only provider that can be set."""


@dataclass
class Provider:
    """One client's endpoint; its headers are secrets, kept in memory alone."""

    base_url: str
    headers: Mapping[str, str] = field(repr=False)
    found: dict[str, Model] = field(default_factory=dict[str, Model])
    """Its models, once a session needed them."""

    async def models(self, known_names: Collection[str]) -> dict[str, Model]:
        """What can be asked there, as `models_at` orders it. Raises ModelError."""
        self.found = self.found or await models_at(self.base_url, self.headers, known_names)
        return self.found

    async def close(self) -> None:
        """Let go of the connections."""
        for model in self.found.values():
            if isinstance(model, ChatModel):
                await model.close()


def is_endpoint(url: str) -> bool:
    """Whether it is a web address that can be shown to anyone: no password, nothing behind a question mark."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or "@" in parts.netloc)
    except ValueError:
        return False
