"""Reduced prices."""

from shop import catalog


def reduced_price(article, percent):
    """Return the price of one piece, less a discount."""
    return catalog.get_price(article) * (100 - percent) // 100
