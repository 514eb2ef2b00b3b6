"""`crow calls`: every request to a model, what it cost and took, and its exact body again."""

import sys
from typing import Any

import click

from crow_cli.history import AS_JSON, limited, one_line, print_json, print_table, prints_to_terminal, reading, say, when
from crow_cli.screen import spelled_out


@click.group()
def calls() -> None:
    """Every request to a model. An ID may be given by its beginning."""


@calls.command("list")
@click.argument("session", required=False)
@limited(20)
@AS_JSON
def list_(session: str | None, limit: int, as_json: bool) -> None:
    """The calls of a SESSION, or of all, the latest first."""
    from crow_persistence.loader import find_session
    from crow_persistence.requests import list_model_calls

    with reading() as connection:
        found = list_model_calls(connection, find_session(connection, session).number if session else None, limit)
    if as_json:
        print_json([told(call) for call in found])
    elif found:
        heads = ("ID", "STARTED", "PURPOSE", "IN", "CACHED", "OUT", "SECONDS", "COST", "MODEL")
        print_table(heads, [row(call) for call in found])
    else:
        say("No model has been asked yet.")


def row(call: Any) -> tuple[str, ...]:
    """A call in a table."""
    counted = [f"{number:,}" if number is not None else "-" for number in (call.input, call.cached, call.output)]
    seconds = f"{call.total / 1000:.1f}" if call.total is not None else "cut off"
    cost = f"{call.cost:.4f}" if call.cost is not None else "-"
    model = f"{call.model} FAILED" if call.error else call.model
    return (call.id[:8], when(call.started)[5:], call.purpose, *counted, seconds, cost, model)


@calls.command()
@click.argument("call", metavar="ID")
@click.option("--request", is_flag=True, help="Print the body of the request, byte for byte.")
@AS_JSON
def show(call: str, request: bool, as_json: bool) -> None:
    """What a call asked for and what came of it.

    With --request: exit code 1 when the body can no longer be made again as it was sent.
    """
    from crow_core.models.chat import encode_json
    from crow_persistence.requests import find_model_call, rebuild_request

    with reading() as connection:
        found = find_model_call(connection, call)
        asked, exact = rebuild_request(connection, found.id) if request else ({}, True)
    if as_json and not request:
        print_json(told(found))
    elif request:
        text = encode_json(asked).decode()
        click.echo(spelled_out(text) if prints_to_terminal() else text)
    else:
        for name, value in facts(found):
            click.echo(f"{click.style(f'{name:10}', dim=True)}{one_line(str(value))}")
    if not exact:
        say("This is not what was sent, to the byte: a secret of crow's own was in it, or something of it is lost.")
        sys.exit(1)


def facts(call: Any) -> list[tuple[str, str]]:
    """A call for a person."""
    tokens = f"{call.input:,} in ({call.cached:,} cached), {call.output:,} out" if call.input is not None else ""
    took = f"{call.total / 1000:.2f} s" if call.total is not None else "cut off, or still under way"
    first = f", {call.first / 1000:.2f} s until the first fragment" if call.first is not None else ""
    told = [
        ("Call", call.id),
        ("Session", call.of),
        ("Purpose", call.purpose),
        ("Prompt", f"{call.prompt}@{call.version}" if call.prompt else ""),
        ("Model", call.model),
        ("Endpoint", call.endpoint),
        ("Sampling", call.sampling),
        ("Tools", f"sha256 {call.tools}"),
        ("Started", when(call.started)),
        ("Took", took + first),
        ("Tokens", f"{tokens}{'' if call.usage else ' (estimated)'}" if tokens else ""),
        ("Cost", f"{call.cost:.6f} {call.currency}" if call.cost is not None else ""),
        ("Ended", call.stop_reason or ""),
        ("Error", call.error or ""),
        ("crow", call.crow),
        ("Body", f"sha256 {call.digest}"),
    ]
    return [(name, value) for name, value in told if value]


def told(call: Any) -> dict[str, Any]:
    """A call for programs."""
    from crow_persistence.export.transcript import model_call_to_dict

    return {**model_call_to_dict(call), "session": call.of}
