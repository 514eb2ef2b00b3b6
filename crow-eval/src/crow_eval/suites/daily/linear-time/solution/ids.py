"""Lists of ids."""


def unique(ids):
    """Return each id once, in the order in which they appear first."""
    return list(dict.fromkeys(ids))


def common(left, right):
    """Return each id of `left` that is in `right`, too, once, in the order of `left`."""
    others = set(right)
    return [one for one in unique(left) if one in others]
