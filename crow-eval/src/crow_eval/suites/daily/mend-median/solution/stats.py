"""Small statistics for lists of numbers."""


def mean(values):
    """Return the arithmetic mean."""
    require(values)
    return sum(values) / len(values)


def median(values):
    """Return the value in the middle, or the mean of the two in the middle."""
    require(values)
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def spread(values):
    """Return the distance from the least value to the greatest."""
    require(values)
    return max(values) - min(values)


def require(values):
    if not values:
        raise ValueError("there are no values")
