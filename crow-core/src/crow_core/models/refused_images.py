"""The images that an endpoint refuses. Its words seldom name one, so their order and their sizes count, too."""

import re
from collections.abc import Iterable, Sequence

from crow_core.messages.message import Message, to_digest, to_parts

ABOUT_IMAGES = re.compile(r"\bimages?\b|image_(url|file|parse|format|too|size|content)|\bbase64\b|\bpictures?\b", re.I)
"""Matches words of an endpoint that are about an image."""
PLACE = re.compile(r"messages?\W{1,2}(\d+)\W{1,3}content\W{1,2}(\d+)", re.I)
"""Matches the place of a part in the request, as `messages[1].content[2]` or `messages.1.content.2`."""
ABOUT_SIZE = re.compile(r"exceed|too (large|big|long)|larger than|at most|max(imum)?\b|limit", re.I)
"""Matches a complaint about the size of an image."""


def find_refused_images(said: str, messages: Sequence[Message], *, unexplained: bool = False) -> list[str]:
    """Find the digests of the images that an endpoint may refuse: its words are about images, or about a place where
    one is. For an `unexplained` refusal, the images after the last reply are suspected whatever the words are.

    An endpoint that has answered a request takes its images, so those after the last reply are refused, if there are
    any. Of several, that whose place the words name is refused, or the largest where it is about their size.
    """
    replies = (at for at in range(len(messages) - 1, -1, -1) if messages[at].get("role") == "assistant")
    last = next(replies, -1)
    new = [*iterate_images(messages[last + 1 :])]
    images = new or [*iterate_images(messages)]
    place = PLACE.search(said)
    named = find_image_at(messages, int(place[1]), int(place[2])) if place else ""
    if not (named or ABOUT_IMAGES.search(said) or (unexplained and new)):
        return []
    if named:
        images = [image for image in images if image[0] == named] or images
    elif images and ABOUT_SIZE.search(said):
        images = [max(images, key=lambda image: image[1])]
    return [*dict.fromkeys(digest for digest, _ in images)]


def find_image_at(messages: Sequence[Message], message: int, part: int) -> str:
    """Find the digest of the image at a place; "" if there is none."""
    parts = to_parts(messages[message].get("content")) if message < len(messages) else []
    return to_digest(parts[part]) if part < len(parts) else ""


def iterate_images(messages: Iterable[Message]) -> Iterable[tuple[str, int]]:
    """Iterate over the images of messages: the digest and the length of each."""
    for message in messages:
        for part in to_parts(message.get("content")):
            if digest := to_digest(part):
                yield digest, len(part["image_url"]["url"])
