"""The cart of a customer: how many pieces of which article."""

from shop.catalog import get_price, get_price_list


def total(cart):
    return sum(get_price(article) * pieces for article, pieces in cart.items())


def articles():
    return sorted(get_price_list())
