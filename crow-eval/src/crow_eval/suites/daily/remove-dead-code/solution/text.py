"""Functions for lines of text."""


def clean(line):
    """Return the line without superfluous spaces."""
    return " ".join(words(line))


def words(line):
    return line.split()


def count_words(line):
    return len(words(line))


def as_title(line):
    return line.title()


def as_shout(line):
    return f"{line.upper()}!"


def bullet(line):
    return f"* {line}"
