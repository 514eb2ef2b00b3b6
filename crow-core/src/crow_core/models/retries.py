"""Retries, with stamina. crow tells of each of its own retries, so stamina's log lines about them are dropped."""

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

NAME = "crow"
"""The name of crow's retries in stamina's log and hooks."""


def is_of_others(record: logging.LogRecord) -> bool:
    """Test whether a log line of stamina is about a retry of another part of the program."""
    return getattr(record, "stamina.callable", "") != NAME


def attempt_again(on: Callable[[Exception], Any], attempts: int | None, **options: Any) -> AsyncIterator[Any]:
    """Return stamina's attempts; the last one raises its error again. `on` and `options` are those of stamina."""
    import stamina  # loaded when a request is sent

    logging.getLogger("stamina").addFilter(is_of_others)
    return stamina.retry_context(on, attempts, **options).with_name(NAME, (), {})
