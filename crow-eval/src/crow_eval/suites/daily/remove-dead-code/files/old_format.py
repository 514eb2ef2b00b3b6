"""The format of notes before 2019."""

from text import clean, is_blank


def legacy_format(lines):
    return ";".join(clean(line) for line in lines if not is_blank(line))
