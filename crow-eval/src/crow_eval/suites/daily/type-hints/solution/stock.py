"""The stock of a shop: a dict of the pieces of each article, by its name."""

import json
from collections.abc import Iterator
from pathlib import Path


def read_stock(path: Path) -> dict[str, int]:
    """Return the stock that is in a JSON file at a pathlib.Path."""
    return json.loads(path.read_text("utf-8"))


def find_missing(stock: dict[str, int], wanted: list[str]) -> list[str]:
    """Return a list of the articles in the list `wanted` of which we have none."""
    return [article for article in wanted if not stock.get(article)]


def largest(stock: dict[str, int]) -> str | None:
    """Return the article of which we have most pieces, or None where there is no stock."""
    return max(stock, key=lambda article: stock[article], default=None)


def take(stock: dict[str, int], article: str, pieces: int = 1) -> None:
    """Take pieces of an article, a whole number, out of the stock."""
    if stock.get(article, 0) < pieces:
        raise ValueError(f"there are not {pieces} pieces of {article}")
    stock[article] -= pieces


def price_of(stock: dict[str, int], prices: dict[str, float], discount: float | None = None) -> float:
    """Return what the stock costs, a float.

    `prices` is a dict with the price of each article in euros, a float. `discount` is a float such as 0.2, or None.
    """
    total = sum((prices[article] * pieces for article, pieces in stock.items()), 0.0)
    return total if discount is None else total * (1 - discount)


def shelves(articles: list[str], size: int) -> Iterator[list[str]]:
    """Yield lists of `size` articles, of a list of all; the last one may be shorter."""
    for start in range(0, len(articles), size):
        yield articles[start : start + size]
