"""Retries, with stamina: when a failed request is sent again. crow tells of each of its own retries, so stamina's log
lines about them are dropped."""

import logging
from random import random
from typing import Any

from crow_core.errors import ModelError
from crow_core.models.failures import MAX_RETRY_WAIT

PATIENCE = 3.0
"""Seconds before the first retry for an endpoint that limits requests; each later wait is as many times longer."""
NAME = "crow"
"""The name of crow's retries in stamina's log and hooks."""


def is_of_others(record: logging.LogRecord) -> bool:
    """Test whether a log line of stamina is about a retry of another part of the program."""
    return getattr(record, "stamina.callable", "") != NAME


def attempt_again(on: Any, attempts: int | None, **options: Any) -> Any:
    """Return stamina's attempts, for a loop with or without `async`; the last one raises its error again.

    `on` and `options` are those of stamina.
    """
    import stamina  # loaded when a request is sent

    logging.getLogger("stamina").addFilter(is_of_others)
    return stamina.retry_context(on, attempts, **options).with_name(NAME, (), {})


def get_retry_wait(error: Exception) -> bool | float:
    """Return the seconds to wait before a failed request is sent again; True lets stamina choose them."""
    after = error.retry_after if isinstance(error, ModelError) else None
    return True if after is None else after


def be_patient(error: ModelError, attempt: int) -> None:
    """Choose the wait before the next attempt for an endpoint that limits requests and gives no time."""
    if error.patient and error.retry_after is None:
        error.retry_after = min(PATIENCE**attempt + random(), MAX_RETRY_WAIT)
