"""Functions for lines of text."""

import re
import textwrap

VOWELS = "aeiou"


def clean(line):
    """Return the line without superfluous spaces."""
    return " ".join(words(line))


def words(line):
    return line.split()


def count_words(line):
    return len(words(line))


def is_blank(line):
    return not words(line)


def vowels(line):
    return re.findall(f"[{VOWELS}]", line)


def count_vowels(line):
    return len(vowels(line))


def pad(line, width):
    return line.ljust(width)


def shorten(line, width):
    return textwrap.shorten(pad(line, width), width)


def as_title(line):
    return line.title()


def as_shout(line):
    return f"{line.upper()}!"


def bullet(line):
    return f"* {line}"
