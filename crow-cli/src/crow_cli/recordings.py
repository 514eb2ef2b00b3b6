"""`crow acp record` and `crow acp replay`."""

import os
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Literal

import click
from crow_core.settings.config import Home

from crow_cli.ending import complete, wrong


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="The file to write.")
def record(command: tuple[str, ...], output: Path | None) -> None:
    """Stand in for an agent, and write down all that it and its client say.

    In the client's settings, put `crow acp record --` before the agent's command. Nothing is changed on the way.
    Without -o, recordings are in the folder `recordings` of crow's data. They hold all that was said, secrets too.
    """
    from crow_cli import wire

    if shutil.which(command[0]) is None:
        wrong(f"the agent cannot be started: there is no command {command[0]}.")
    try:
        if output is None:
            folder = Home.find(os.environ).data / "recordings"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            output = folder / f"{datetime.now():%Y%m%d-%H%M%S}-{Path(command[0]).name}.jsonl"
        wire.record(command, output)
    except OSError as error:
        wrong(f"the agent cannot be recorded: {error}.")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("command", nargs=-1)
@click.option("--method", default="*", metavar="PATTERN", help="Show these methods and their answers: 'session/*'.")
@click.option("--session", default="", metavar="ID", help="Show this session; the beginning of its id will do.")
@click.option("--full", is_flag=True, help="Show messages whole.")
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), help="Keep the pauses, so many times shorter.")
@click.option("--step", is_flag=True, help="Wait for a key after each message; q ends it.")
@click.option("--as", "side", type=click.Choice(["agent", "client"]), help="Play this side, against a real other one.")
def replay(
    file: Path,
    command: tuple[str, ...],
    method: str,
    session: str,
    full: bool,
    speed: float | None,
    step: bool,
    side: Literal["agent", "client"] | None,
) -> None:
    """Show a recording, or play one side of it.

    With --as agent, this is the agent of the recording, for a client to start. With --as client, COMMAND is the agent
    to talk to, and its conversation is shown: crow acp replay FILE --as client -- COMMAND
    """
    from crow_cli.replay import Viewer, play, show
    from crow_cli.wire import read

    if (side == "client") != bool(command):
        wrong("--as client needs the agent's command, and nothing else takes one: --as client -- COMMAND.")
    viewer = Viewer(method, session, full)
    try:
        recording = list(read(file))
        if side is None:
            show(recording, viewer, speed or 0.0, step=step)
        else:
            sys.exit(complete(play(recording, side, command, viewer, speed or 0.0)))
    except BrokenPipeError:  # nobody reads on: Click knows what to do
        raise
    except (OSError, ValueError) as error:
        wrong(f"{file} cannot be replayed: {error}.")
    except KeyboardInterrupt:
        sys.exit(130)
