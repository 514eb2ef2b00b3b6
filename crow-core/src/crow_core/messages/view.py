"""The view of a growing log: the same as `messages.view` of the whole log, at a cost that does not grow with it."""

from collections.abc import Iterator, Sequence

from crow_core.messages.message import Message, is_reply, marker_kind
from crow_core.messages.notes import Notes
from crow_core.messages.passes import (
    SELECTING_MARKERS,
    SHAPING_PASSES,
    apply_passes,
    drop_rewound,
    locate_markers,
    replace_refused,
    shorten_answers,
    to_summary,
)


class View:
    """The view of one growing log, which reads each entry once: its cost does not depend on the length of the log.

    Messages before the last reply are final: their tool calls are answered or never will be, and no later message is
    joined to them. Only a selecting marker changes them; then what it leaves is computed again.
    """

    def __init__(self, log: Sequence[Message]) -> None:
        self._log = log
        self._read = 0
        """The number of log entries that have been read."""
        self._entries: list[Message] = []
        """Those entries that were not rewound."""
        self._places: dict[str, int] = {}
        """Their indexes, by id."""
        self._markers: dict[str, list[int]] = {}
        """The indexes of the markers among them, by kind."""
        self._selected: list[Message] = []
        """Those entries that the selecting passes leave."""
        self._final: list[Message] = []
        """Their shaped messages, as far as they cannot change."""
        self._upto = 0
        """The number of entries of `_selected` that are in `_final`."""

    def messages(self, *markers: Message) -> list[Message]:
        """Return `view([*log, *markers])`, with no `rewind` among the markers."""
        if markers:
            return apply_passes(SHAPING_PASSES, self.select(*markers))
        self._read_log()
        replies = (at for at in range(len(self._selected) - 1, self._upto, -1) if is_reply(self._selected[at]))
        if last := next(replies, 0):
            self._final += apply_passes(SHAPING_PASSES, self._selected[self._upto : last])
            self._upto = last
        return [*self._final, *apply_passes(SHAPING_PASSES, self._selected[self._upto :])]

    def select(self, *markers: Message) -> list[Message]:
        """Return `select_entries([*log, *markers])`, with no `rewind` among the markers."""
        self._read_log()
        if not markers:
            return [*self._selected]
        for marker in markers:
            self._add(marker)
        try:
            return self._apply_markers()
        finally:
            for marker in markers:
                self._entries.pop()
                self._markers[marker_kind(marker)].pop()
                self._places.pop(marker.get("crow", {}).get("id", ""), None)

    def entries(self) -> Sequence[Message]:
        """Return `drop_rewound(log)`, the same list every time."""
        self._read_log()
        return self._entries

    def find_kind(self, kind: str) -> list[Message]:
        """Return the markers of a kind that were not rewound, oldest first."""
        self._read_log()
        return [self._entries[at] for at in self._markers.get(kind, ())]

    def find_markers(self, kind: str, key: str) -> Iterator[tuple[Notes, int]]:
        """Return `find_markers(entries, kind, key)`."""
        self._read_log()
        return self._find_markers(kind, key)

    def find(self, id: str) -> int:
        """Return the index in `entries` of the entry with this id. Raises KeyError."""
        self._read_log()
        return self._places[id]

    def _read_log(self) -> None:
        new = self._log[self._read :]
        self._read += len(new)
        kinds = {self._add(entry) for entry in new}
        if "rewind" in kinds:  # rare, and it may restore what an earlier one dropped
            self._entries, self._places, self._markers = [], {}, {}
            for entry in drop_rewound(self._log):
                self._add(entry)
        if kinds & SELECTING_MARKERS:
            self._selected, self._final, self._upto = self._apply_markers(), [], 0
        else:
            self._selected += new

    def _find_markers(self, kind: str, key: str) -> Iterator[tuple[Notes, int]]:
        return locate_markers(self._entries, self._markers.get(kind, ()), self._places, key)

    def _add(self, entry: Message) -> str:
        """Add an entry at the end, and return its kind if it is a marker."""
        if kind := marker_kind(entry):
            self._markers.setdefault(kind, []).append(len(self._entries))
        if id := entry.get("crow", {}).get("id"):
            self._places[id] = len(self._entries)
        self._entries.append(entry)
        return kind

    def _apply_markers(self) -> list[Message]:
        """Return what `shrink_tool_results` and `apply_compaction` leave of the entries, without reading all."""
        entries = self._entries
        shrink, end = next(self._find_markers("shrink", "upto"), (Notes(), 0))
        refusals = [
            (at, frozenset(entries[at].get("crow", {}).get("refused", ()))) for at in self._markers.get("images", ())
        ]

        def read_entry(at: int) -> Message:
            """Return the entry at a place without the images that a later marker names."""
            entry = entries[at]
            for marker, refused in refusals:
                entry = replace_refused(entry, refused) if at < marker else entry
            return entry

        def read(places: Sequence[int]) -> list[Message]:
            """Return the entries at these places, which ascend."""
            old, new = ([read_entry(at) for at in places if (at < end) is is_old] for is_old in (True, False))
            return [*shorten_answers(old, shrink), *new]

        first = next((at for at, entry in enumerate(entries) if entry.get("role") == "user"), len(entries))
        for notes, start in self._find_markers("compaction", "from"):
            if start <= first:
                continue
            pinned = sorted({self._places.get(str(id), first) for id in notes.get("pinned", ())})
            kept = [first, *(at for at in pinned if first < at < start and "role" in entries[at])]
            return [*read(kept), to_summary(notes), *read(range(start, len(entries)))]
        return read(range(len(entries)))
