"""Values as the pages show them: times, counts, costs, durations, paths."""

import os
from collections.abc import Mapping
from datetime import UTC, date, datetime

from crow_persistence.export.html import replace_invalid
from crow_persistence.search import MATCH_END, MATCH_START
from markupsafe import Markup, escape


def format_time(at: int | None) -> str:
    return f"{datetime.fromtimestamp(at / 1000, UTC).astimezone():%Y-%m-%d %H:%M:%S}" if at else ""


def format_moment(at: datetime | None) -> str:
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}" if at else ""


def format_clock(at: int | None) -> str:
    return f"{datetime.fromtimestamp(at / 1000, UTC).astimezone():%H:%M}" if at else ""


def format_day(day: date) -> str:
    """Return a day as a reader names it."""
    days = (datetime.now().astimezone().date() - day).days
    return {0: "Today", 1: "Yesterday"}.get(days) or f"{day:%A, %Y-%m-%d}"


def to_date(at: int) -> date:
    """Return the day of a time, in the time zone of this machine."""
    return datetime.fromtimestamp(at / 1000, UTC).astimezone().date()


def to_start(text: str) -> int:
    """Return the time at which a day such as 2026-11-27 begins here, in milliseconds since 1970; 0 for other texts."""
    try:
        return round(datetime.combine(date.fromisoformat(text), datetime.min.time()).astimezone().timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        return 0


def format_count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def format_tokens(number: int | None) -> str:
    """Return a number of tokens in few characters."""
    if number is None:
        return ""
    for least, name in ((1_000_000, "M"), (1_000, "k")):
        if number >= least:
            short = number / least
            return f"{short:.1f} {name}" if short < 10 else f"{short:,.0f} {name}"
    return str(number)


def format_cost(cost: Mapping[str, float] | float | None, currency: str = "") -> str:
    if cost is None:
        return ""
    amounts = cost if isinstance(cost, Mapping) else {currency: cost}
    return ", ".join(f"{amount:.{2 if amount >= 1 else 4}f} {name}".strip() for name, amount in amounts.items())


def format_duration(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s" if ms < 60_000 else f"{ms / 60_000:.1f} min"


def mark_snippet(text: str) -> Markup:
    """Return a line that a search found, with its matches marked."""
    safe = str(escape(replace_invalid(text)))
    return Markup(safe.replace(MATCH_START, "<mark>").replace(MATCH_END, "</mark>"))


def shorten_home(path: str) -> str:
    home = os.path.expanduser("~")
    return f"~{path.removeprefix(home)}" if path == home or path.startswith(f"{home}/") else path
