"""An address book: names in a file, one a line."""


def load(path):
    """Return the names that are in a file; blank lines do not count."""
    with open(path) as file:
        return [line.strip() for line in file if line.strip()]


def find(names, query):
    """Return the names that contain the query, in upper or lower case."""
    return [name for name in names if query.lower() in name.lower()]


if __name__ == "__main__":
    import sys

    for name in find(load("people.txt"), sys.argv[1]):
        print(name)
