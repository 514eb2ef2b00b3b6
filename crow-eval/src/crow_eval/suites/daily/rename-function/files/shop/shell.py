"""The commands that people type."""

import sys

from shop.catalog import get_price, get_price_list

COMMANDS = {
    "get_price": lambda article: str(get_price(article)),
    "get_price_list": lambda: "\n".join(f"{article} {price}" for article, price in sorted(get_price_list().items())),
}

if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    print(COMMANDS[command](*arguments))
