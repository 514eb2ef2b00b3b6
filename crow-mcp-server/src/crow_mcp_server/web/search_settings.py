"""The settings of `web_search`, which a host reads at its start: importing this module imports nothing heavy."""

from collections.abc import Mapping
from importlib.util import find_spec

PROVIDER_KEYS = ("BRAVE_API_KEY", "TAVILY_API_KEY", "EXA_API_KEY")
"""Environment variables with the providers' keys; commands do not see them."""
PROVIDER_VARIABLES = ("SEARXNG_URL", *PROVIDER_KEYS)
"""Environment variables that each configure a provider."""


def has_search_provider(env: Mapping[str, str]) -> bool:
    """Return whether these variables, or an installed library, give `web_search` a provider."""
    return any(map(env.get, PROVIDER_VARIABLES)) or has_ddgs()


def has_ddgs() -> bool:
    """Return whether the library for DuckDuckGo is installed."""
    return find_spec("ddgs") is not None
