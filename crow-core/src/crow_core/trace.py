"""W3C trace context: taken from a prompt, and sent with every MCP call of its turn."""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

TRACE_KEYS = ("traceparent", "tracestate", "baggage")
"""The keys of `_meta` that ACP and MCP reserve for the trace context."""
MAX_VALUE_LENGTH = 8192
"""The most characters of one value, which is the limit of baggage; a longer value is dropped."""
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
PRINTABLE = re.compile(r"[ -~]+")

TRACE: ContextVar[Mapping[str, str]] = ContextVar("trace", default=MappingProxyType({}))
"""The trace context of the running turn, or of the tool call in it."""


def extract_trace(meta: Mapping[str, Any]) -> dict[str, str]:
    """Return the well-formed part of the trace context in a `_meta`."""
    trace = {key: str(meta[key]) for key in TRACE_KEYS if is_header_value(meta.get(key))}
    if not TRACEPARENT.fullmatch(trace.get("traceparent", "")):
        trace.pop("traceparent", None)
        trace.pop("tracestate", None)
    return trace


def is_header_value(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_VALUE_LENGTH and PRINTABLE.fullmatch(value) is not None
