"""Charts of the use of models and tools."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

from crow_eval.plots import Bar, plot_bars, plot_strip
from markupsafe import Markup
from sqlalchemy import Connection
from starlette.requests import Request

from crow_web import queries
from crow_web.formats import shorten_home
from crow_web.pages import Pages, read_number
from crow_web.queries import DAY, DayUsage

DAYS = 30
"""Days that the charts show if nothing else is asked for."""
NAMES = 5
"""Models or folders with a colour of their own; the others share one."""
OTHERS = "others"

SUMS: Sequence[tuple[str, Callable[[DayUsage], float]]] = (
    ("Cost", lambda it: it.cost),
    ("Tokens sent", lambda it: it.input),
    ("Tokens answered", lambda it: it.output),
    ("Model calls", lambda it: it.calls),
    ("Failed calls", lambda it: it.errors),
    ("Minutes of model calls", lambda it: it.total / 60_000),
)
"""Charts of sums: the bar of a day has a part for each model or folder."""
MEANS: Sequence[tuple[str, Callable[[DayUsage], float], Callable[[DayUsage], float]]] = (
    ("Cached, % of the tokens sent", lambda it: it.cached * 100, lambda it: it.input),
    ("Seconds until the first token", lambda it: it.first / 1000, lambda it: it.calls),
)
"""Charts of means: numerators and denominators."""


def show_charts(pages: Pages, connection: Connection, request: Request) -> str:
    """Show tokens, cost, calls, failures and times by day, and by model or folder."""
    days = min(read_number(request.query_params.get("days", "")) or DAYS, 366)
    by_folder = request.query_params.get("by") == "folder"
    since = int(time.time() * 1000) // DAY * DAY - (days - 1) * DAY
    usage = queries.list_usage(connection, since, by_folder=by_folder)
    most = Counter[str]()
    for each in usage:
        most[each.name] += each.input + each.output
    names = [name for name, _ in most.most_common(NAMES)] + ([OTHERS] if len(most) > NAMES else [])
    length = 7 if days > DAYS * 3 else 1
    first = since // DAY
    by_day: dict[int, list[DayUsage]] = {}
    for each in usage:
        by_day.setdefault(each.day - (each.day - first) % length, []).append(each)
    shown = range(first, first + days, length) if by_day else range(0)
    charts = [(title, draw_sums(title, shown, by_day, names, value)) for title, value in SUMS]
    charts += [(title, draw_means(title, shown, by_day, value, parts)) for title, value, parts in MEANS]
    tools = queries.list_tools(connection, since)
    return pages.render(
        "charts.html",
        days=days,
        by_folder=by_folder,
        names=[shorten_home(name) for name in names],
        usage=usage,
        charts=charts,
        tools=tools,
        bars=[draw_tool(each, tools[0].all) for each in tools],
    )


def draw_sums(
    title: str,
    days: range,
    by_day: dict[int, list[DayUsage]],
    names: Sequence[str],
    value: Callable[[DayUsage], float],
) -> Markup:
    """Draw a sum by day, with a part of the bar for each name."""
    bars: list[Bar] = []
    for day in days:
        parts = dict.fromkeys(names, 0.0)
        for each in by_day.get(day, []):
            parts[each.name if each.name in parts else OTHERS] += value(each)
        bars.append(make_bar(day, days.step, list(parts.values())))
    return Markup(plot_bars(bars, title=title))


def draw_means(
    title: str,
    days: range,
    by_day: dict[int, list[DayUsage]],
    value: Callable[[DayUsage], float],
    count: Callable[[DayUsage], float],
) -> Markup:
    """Draw a mean by day."""
    bars: list[Bar] = []
    for day in days:
        own = by_day.get(day, [])
        number = sum(map(count, own))
        bars.append(make_bar(day, days.step, [sum(map(value, own)) / number if number else 0.0]))
    return Markup(plot_bars(bars, title=title))


def make_bar(day: int, length: int, parts: Sequence[float]) -> Bar:
    """Make the bar of some days, which leads to their sessions."""
    date, last = queries.to_utc_day(day), queries.to_utc_day(day + length - 1)
    return Bar(date[5:], parts, f"{date}: {sum(parts):,.4g}", f"/?since={date}&until={last}")


def draw_tool(tool: queries.ToolUsage, most: int) -> Markup:
    """Draw the calls of a tool: completed, denied, failed."""
    ends = list(accumulate((tool.completed, tool.denied, tool.failed), initial=0))
    kinds = zip(("c0", "c5", "c3"), ends, ends[1:], strict=False)
    return Markup(plot_strip([(kind, start, end) for kind, start, end in kinds if end > start], most))
