"""What `web_search` answers, whoever searched."""

from typing import NotRequired

from typing_extensions import TypedDict

PROVIDER_KEYS = ("BRAVE_API_KEY", "TAVILY_API_KEY", "EXA_API_KEY")
"""Variables that commands are not to see."""


class WebSearchResult(TypedDict):
    title: str
    url: str
    snippet: str
    date: NotRequired[str]
    """As the provider has it."""


class WebSearchResults(TypedDict):
    provider: str
    """"" when none had an answer."""
    results: list[WebSearchResult]
