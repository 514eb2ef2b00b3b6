"""Show a long list in pages, which are counted from 1."""


def page_count(items, size=10):
    """Return how many pages the items need."""
    return len(items) // size


def page(items, number, size=10):
    """Return the items of a page; raise IndexError where there is no such page."""
    if not 1 <= number <= page_count(items, size):
        raise IndexError(f"there is no page {number}")
    start = (number - 1) * size
    return items[start : start + size]
