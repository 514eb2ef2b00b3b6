"""Make the markers that shorten the view of a log, and find the places in a log that they may name."""

from collections.abc import Sequence

from crow_core.messages.message import Message, get_id
from crow_core.messages.view import View

from crow_compact.read_output import TOOL

SHRUNK_CHARACTERS = 2_000
"""Characters that remain of an old tool output."""


def make_compaction_marker(summary: str, start: str, pins: Sequence[str]) -> Message:
    """Return a marker that puts a summary in the place of the entries before the id `start`, except the pinned ids."""
    return {"crow": {"kind": "compaction", "summary": summary, "from": start, "pinned": list(pins)}}


def make_shrink_marker(upto: str, pins: Sequence[str]) -> Message:
    """Return a marker that cuts the tool results before the id `upto`, except the pinned ids.

    If `upto` is "", it cuts all results before the marker.
    """
    limit = SHRUNK_CHARACTERS
    return {"crow": {"kind": "shrink", "upto": upto, "limit": limit, "tool": TOOL, "pinned": list(pins)}}


def find_start(entries: Sequence[Message]) -> int:
    """Return the index of the entry that a summary would follow: the last summary or, without one, the first prompt."""
    prompts = [at for at, entry in enumerate(entries) if entry.get("role") == "user"]
    first = prompts[0] if prompts else len(entries)
    return next((at for at in prompts if not get_id(entries[at])), first)  # only a summary has no id


def find_cuts(entries: Sequence[Message]) -> list[int]:
    """Return the indexes of the user's and the model's messages before which every tool call is answered."""
    cuts: list[int] = []
    waiting: set[str] = set()
    for at, entry in enumerate(entries):
        if entry.get("role") in ("user", "assistant") and not waiting and get_id(entry):
            cuts.append(at)
        waiting |= {tool_call["id"] for tool_call in entry.get("tool_calls", ())}
        waiting.discard(entry.get("tool_call_id", ""))
    return cuts


def find_pinned(view: View) -> list[str]:
    """Return the ids of the pinned entries, and of the results of their tool calls."""
    ids = {marker.get("crow", {}).get("entry") for marker in view.find_kind("pin")}
    if not ids:
        return []
    entries = view.entries()
    tool_calls = {
        tool_call["id"] for entry in entries if get_id(entry) in ids for tool_call in entry.get("tool_calls", ())
    }
    return [get_id(e) for e in entries if "role" in e and (get_id(e) in ids or e.get("tool_call_id") in tool_calls)]


def find_earlier_summary(view: View) -> tuple[str, str]:
    """Return the summary of the last compaction and the id of the entry that follows it; two "" if there is none."""
    earlier = next(view.find_markers("compaction", "from"), None)
    return (earlier[0].get("summary", ""), earlier[0].get("from", "")) if earlier else ("", "")
