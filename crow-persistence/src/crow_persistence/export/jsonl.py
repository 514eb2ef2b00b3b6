"""A session as JSON lines: the first says which session it is, then one for each entry of the log, then the calls."""

import json
from typing import Any

from crow_persistence.export.transcript import Story

VERSION = 1
"""Of this format."""

BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""What some readers take for the end of a line."""


def jsonl(story: Story) -> str:
    return "".join(f"{spelled(line)}\n" for line in lines(story))


def lines(story: Story) -> list[Any]:
    """Every entry as it is in the log; what is not a message is a marker: an object with only `crow`."""
    summary, record = story.summary, story.record
    head = {
        "kind": "session",
        "version": VERSION,
        "id": summary.id,
        "cwd": summary.cwd,
        "roots": list(summary.roots),
        "title": summary.title,
        "created": summary.created,
        "updated": summary.updated,
        "options": record.options,
        "damage": record.damage,
    }
    calls = [{"kind": "call", **call} for call in story.calls]
    return [{"crow": head}, *record.log, *({"crow": call} for call in calls)]


def spelled(value: Any) -> str:
    """JSON in one line; halves of surrogate pairs are spelled out."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text.translate(BREAKS)
