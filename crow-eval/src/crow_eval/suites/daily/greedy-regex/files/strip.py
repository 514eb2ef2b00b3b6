"""Take links out of Markdown, and comments out of CSS."""

import re

LINK = re.compile(r"\[(.*)\]\((.*)\)")
COMMENT = re.compile(r"/\*.*\*/", re.DOTALL)


def find_links(text):
    """Return the text and the address of each link, such as [text](address)."""
    return LINK.findall(text)


def remove_comments(text):
    """Return the text without what is between /* and */."""
    return COMMENT.sub("", text)
