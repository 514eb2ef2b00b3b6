"""The tags of an article; upper and lower case are the same."""


def unique(tags):
    return list(dict.fromkeys(tag.lower() for tag in tags))


def slug(tags):
    """Return each tag once, in the order of the article, for an address."""
    return "-".join(unique(tags))


def headline(tags):
    """Return each tag once, in the order of the article, for people."""
    return ", ".join(tag.capitalize() for tag in unique(tags))


def most_used(tags):
    """Return the tag that is used most often, of several the first in the alphabet."""
    lower = [tag.lower() for tag in tags]
    return max(sorted(unique(tags)), key=lower.count)
