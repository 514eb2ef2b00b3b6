"""W3C trace context: what a prompt carries of it goes along with every MCP call of its turn."""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

KEYS = ("traceparent", "tracestate", "baggage")
"""The keys of `_meta` that ACP and MCP reserve for it."""
LONGEST = 8192
"""Characters of one of them, as baggage may have; a longer one is dropped."""
PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
PRINTABLE = re.compile(r"[ -~]+")

TRACE: ContextVar[Mapping[str, str]] = ContextVar("trace", default=MappingProxyType({}))
"""The trace context of the running turn, or of the tool call in it."""


def find_trace(meta: Mapping[str, Any]) -> dict[str, str]:
    """The trace context in a `_meta`; nothing of it that is malformed."""
    found = {key: str(meta[key]) for key in KEYS if is_header(meta.get(key))}
    if not PARENT.fullmatch(found.get("traceparent", "")):
        found.pop("traceparent", None)
        found.pop("tracestate", None)
    return found


def is_header(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST and PRINTABLE.fullmatch(value) is not None
