"""`crow calls`: list the model calls with their tokens, time and cost, and print the exact body of a request."""

import sys
from typing import Any

import click
from crow_core.text import escape_controls

from crow_cli.console import (
    AS_JSON,
    escape_line,
    format_time,
    is_terminal,
    limit_option,
    print_json,
    print_note,
    print_table,
)
from crow_cli.storage import connect


@click.group()
def calls() -> None:
    """List and show the requests to models. The beginning of an ID is enough."""


@calls.command("list")
@click.argument("session", required=False)
@limit_option(20)
@AS_JSON
def list_(session: str | None, limit: int, as_json: bool) -> None:
    """List the requests to models, the latest first; with SESSION, only its own."""
    from crow_persistence.loader import find_session
    from crow_persistence.requests import list_model_calls

    with connect(lists=True, as_json=as_json) as connection:
        found = list_model_calls(connection, find_session(connection, session).number if session else None, limit)
    if as_json:
        print_json([to_json(call) for call in found])
    elif found:
        heads = ("ID", "STARTED", "PURPOSE", "IN", "CACHED", "OUT", "SECONDS", "COST", "MODEL")
        print_table(heads, [to_row(call) for call in found])
    else:
        print_note("No model has been asked yet.")


def to_row(model_call: Any) -> tuple[str, ...]:
    """Convert a model call to a row of the table."""
    tokens = (model_call.input, model_call.cached, model_call.output)
    counts = [f"{number:,}" if number is not None else "-" for number in tokens]
    seconds = f"{model_call.total / 1000:.1f}" if model_call.total is not None else "cut off"
    cost = f"{model_call.cost:.4f}" if model_call.cost is not None else "-"
    model = f"{model_call.model} FAILED" if model_call.error else model_call.model
    started = format_time(model_call.started)[5:]
    return (model_call.id[:8], started, model_call.purpose, *counts, seconds, cost, model)


@calls.command()
@click.argument("call", metavar="ID")
@click.option("--request", is_flag=True, help="Print the body of the request instead, byte for byte.")
@AS_JSON
def show(call: str, request: bool, as_json: bool) -> None:
    """Show a model call: its purpose, model, tokens, time and cost.

    With --request, the exit code is 1 when the body cannot be restored exactly as it was sent.
    """
    from crow_core.models.chat_model import encode_json
    from crow_persistence.requests import find_model_call, rebuild_request

    with connect() as connection:
        found = find_model_call(connection, call)
        asked, exact = rebuild_request(connection, found.id) if request else ({}, True)
    if as_json and not request:
        print_json(to_json(found))
    elif request and is_terminal():
        click.echo(escape_controls(encode_json(asked).decode()))
    elif request:  # without a line end, so that the bytes have the digest that is stored
        click.echo(encode_json(asked), nl=False)
    else:
        for name, value in to_facts(found):
            click.echo(f"{click.style(f'{name:10}', dim=True)}{escape_line(str(value))}")
    if not exact:
        print_note("This differs from what was sent: one of crow's own secrets was in it, or a part of it is lost.")
        sys.exit(1)


def to_facts(model_call: Any) -> list[tuple[str, str]]:
    """List the facts of a model call as names and values, for a person."""
    tokens = (
        f"{model_call.input:,} in ({model_call.cached:,} cached), {model_call.output:,} out"
        if model_call.input is not None
        else ""
    )
    took = f"{model_call.total / 1000:.2f} s" if model_call.total is not None else "cut off, or still under way"
    first = f", {model_call.first / 1000:.2f} s until the first fragment" if model_call.first is not None else ""
    facts = [
        ("Call", model_call.id),
        ("Session", model_call.of),
        ("Purpose", model_call.purpose),
        ("Prompt", f"{model_call.prompt}@{model_call.version}" if model_call.prompt else ""),
        ("Model", model_call.model),
        ("Endpoint", model_call.endpoint),
        ("Sampling", model_call.sampling),
        ("Tools", f"sha256 {model_call.tools}"),
        ("Started", format_time(model_call.started)),
        ("Took", took + first),
        ("Tokens", f"{tokens}{'' if model_call.usage else ' (estimated)'}" if tokens else ""),
        ("Cost", f"{model_call.cost:.6f} {model_call.currency}" if model_call.cost is not None else ""),
        ("Ended", model_call.stop_reason or ""),
        ("Error", model_call.error or ""),
        ("crow", model_call.crow),
        ("Body", f"sha256 {model_call.digest}"),
    ]
    return [(name, value) for name, value in facts if value]


def to_json(model_call: Any) -> dict[str, Any]:
    """Convert a model call to JSON, for programs."""
    from crow_persistence.export.transcript import model_call_to_dict

    return {**model_call_to_dict(model_call), "session": model_call.of}
