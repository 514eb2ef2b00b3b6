"""Export a session as JSON lines: the session, then each entry of the log, then the model calls."""

import json
from typing import Any

from crow_persistence.export.transcript import Transcript

VERSION = 1
"""Version of this format."""

LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Characters that some readers take for the end of a line, and their escapes."""


def to_jsonl(transcript: Transcript) -> str:
    """Return a session as JSON lines."""
    return "".join(f"{to_json(line)}\n" for line in to_records(transcript))


def to_records(transcript: Transcript) -> list[Any]:
    """Return the values of all lines. Entries are as in the log: an object with only `crow` is a marker."""
    summary, record = transcript.summary, transcript.record
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
    calls = [{"kind": "call", **model_call} for model_call in transcript.model_calls]
    return [{"crow": head}, *record.log, *({"crow": call} for call in calls)]


def to_json(value: Any) -> str:
    """Encode a value as one line of JSON; if it has unpaired surrogates, in ASCII."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text.translate(LINE_BREAKS)
