"""The versions of prompts, with what came of each."""

from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

from crow_core.errors import PromptError, StoreError
from crow_eval import plots
from crow_persistence import prompt_versions
from crow_persistence.intervals import wilson
from markupsafe import Markup
from sqlalchemy import Connection
from starlette.requests import Request

from crow_web.pages import Pages, read_number

USED = 30
"""Sessions that a prompt's page lists, those that used it last."""


def show_prompts(pages: Pages, connection: Connection, request: Request) -> str:
    """Show every prompt, and every version of it with what came of it."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for version in prompt_versions.list_stats(connection):
        by_name.setdefault(version["name"], []).insert(0, version)
    used = {name: versions for name, versions in by_name.items() if any(map(was_used, versions))}
    return pages.render("prompts.html", prompts=used, unused=sorted(by_name.keys() - used.keys()), rates=draw_rates)


def was_used(version: Mapping[str, Any]) -> bool:
    """Return whether a model call, a rating or a task tells anything about a version."""
    return any(version[name] for name in ("calls", "good", "bad", "passed", "not_passed"))


def draw_rates(versions: list[dict[str, Any]]) -> Markup:
    """Draw the share of good ratings and of passed tasks of each version, with its interval; "" if there are none."""
    rows: list[plots.Estimate] = []
    for version in versions:
        for word, good, bad in (("rated good", "good", "bad"), ("passed", "passed", "not_passed")):
            count = version[good] + version[bad]
            if count:
                interval = wilson(version[good], count)
                label = f"@{version['number']} {word}"
                rate, note = version[good] / count, f"{version[good]} of {count}"
                rows.append(plots.Estimate(label, rate, interval.low, interval.high, note))
    title = "Ratings and pass rates with 95 % intervals"
    return Markup(plots.plot_intervals(rows, 0.0, 1.0, title=title) if rows else "")


def show_prompt(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the versions of a prompt as differences, an example of each as it was rendered, and where it was used."""
    name = request.path_params["name"]
    chosen = prompt_versions.find_version(connection, name)
    versions = prompt_versions.list_versions(connection, chosen.name)
    diffs = {
        new.number: prompt_versions.diff_versions(
            connection, f"{chosen.name}@{old.number}", f"{chosen.name}@{new.number}"
        )
        for old, new in pairwise(versions)
    }
    used = prompt_versions.list_renders(connection, chosen.name, USED)
    stats = {each["number"]: each for each in prompt_versions.list_stats(connection, chosen.name)}
    number = read_number(request.query_params.get("version", "")) or chosen.number
    return pages.render(
        "prompt.html",
        name=chosen.name,
        number=number,
        versions=versions[::-1],
        diffs=diffs,
        stats=stats,
        rates=draw_rates(list(stats.values())[::-1]),
        example=find_example(connection, f"{chosen.name}@{number}"),
        used=used,
    )


def find_example(connection: Connection, reference: str) -> str:
    """Return the text that a version was rendered to last; "" if there is none."""
    with suppress(StoreError, PromptError):
        if used := prompt_versions.list_renders(connection, reference, 1):
            return prompt_versions.load_text(connection, used[0].message)
        return prompt_versions.render_again(connection, prompt_versions.find_version(connection, reference))
    return ""
