"""An address book: names in a file, one a line."""

import unicodedata


def load(path):
    """Return the names that are in a file; blank lines do not count."""
    with open(path, encoding="utf-8-sig") as file:
        return [line.strip() for line in file if line.strip()]


def fold(text):
    """Return a text such that texts which differ only in case, or in how an accent is typed, are equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def find(names, query):
    """Return the names that contain the query, in upper or lower case."""
    wanted = fold(query)
    return [name for name in names if wanted in fold(name)]


if __name__ == "__main__":
    import sys

    for name in find(load("people.txt"), sys.argv[1]):
        print(name)
