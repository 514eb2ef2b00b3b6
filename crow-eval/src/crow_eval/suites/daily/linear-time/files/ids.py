"""Lists of ids."""


def unique(ids):
    """Return each id once, in the order in which they appear first."""
    found = []
    for one in ids:
        if one not in found:
            found.append(one)
    return found


def common(left, right):
    """Return each id of `left` that is in `right`, too, once, in the order of `left`."""
    return [one for one in unique(left) if right.count(one) > 0]
