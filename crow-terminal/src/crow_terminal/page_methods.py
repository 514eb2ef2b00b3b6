"""The methods beyond ACP between the terminal and its page; `PageLink` answers them."""

from collections.abc import Mapping
from typing import Any

JOIN_METHOD = "_crow/join"
"""The page asks for what has happened since the last turn began, and for what happens from then on."""
TURN_METHOD = "_crow/turn"
"""Tells the page that a turn of the terminal has begun, or ended with a `stopReason`."""
OPENED_METHOD = "_crow/opened"
"""Tells the page that the terminal has opened another session, or that the session is to be read again."""


def describe_taking_back(answer: Mapping[str, Any], folder: str) -> str:
    """Say what taking back a turn would change, from the answer to a `_session/rewind` that only tries."""
    files = ", ".join(path.removeprefix(f"{folder}/") for path in answer["files"]["filesChanged"])
    what = f"restores {files}" if files else "changes no file"
    stays = ", ".join(map(str, answer.get("_meta", {}).get("crow", {}).get("stays", [])))
    return f"{what}; what these did stays: {stays}" if stays else what
