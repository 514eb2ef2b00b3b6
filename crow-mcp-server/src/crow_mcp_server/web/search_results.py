"""The results of `web_search`, the same for all providers. Importing this module does not import HTTP."""

from typing import NotRequired

from typing_extensions import TypedDict


class WebSearchResult(TypedDict):
    title: str
    url: str
    snippet: str
    date: NotRequired[str]
    """The date in the provider's format."""


class WebSearchResults(TypedDict):
    provider: str
    """The name of the provider that found the results; "" when nothing was found."""
    results: list[WebSearchResult]
