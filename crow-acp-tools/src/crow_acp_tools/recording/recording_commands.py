"""The commands `crow acp record` and `crow acp replay`."""

import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Literal

import click
from crow_system.files import make_private_folder
from crow_system.signals import run_until_signal
from platformdirs import user_data_path

from crow_acp_tools.failure import fail


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="The file to write.")
def record(command: tuple[str, ...], output: Path | None) -> None:
    """Start an agent and record all messages between it and its client.

    In the client's settings, put `crow acp record --` before the agent's command. Messages are not changed. Without
    -o, recordings are written to the folder acp-tools/recordings of the user's data. They contain all messages, secrets
    included.
    """
    from crow_acp_tools.recording import recorder

    if shutil.which(command[0]) is None:
        fail(f"the agent cannot be started: there is no command {command[0]}.")
    try:
        if output is None:
            folder = user_data_path("acp-tools") / "recordings"
            make_private_folder(folder)
            output = folder / f"{datetime.now():%Y%m%d-%H%M%S}-{Path(command[0]).name}.jsonl"
        recorder.record(command, output)
    except OSError as error:
        fail(f"the agent cannot be recorded: {error}.")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("command", nargs=-1)
@click.option(
    "--method", default="*", metavar="PATTERN", help="Show only these methods and their answers, as in 'session/*'."
)
@click.option("--session", default="", metavar="ID", help="Show only this session; the beginning of its id is enough.")
@click.option("--full", is_flag=True, help="Show messages whole.")
@click.option(
    "--speed", type=click.FloatRange(min=0, min_open=True), help="Keep the recorded pauses, divided by this number."
)
@click.option("--step", is_flag=True, help="Wait for a key after each message; q quits.")
@click.option(
    "--as", "side", type=click.Choice(["agent", "client"]), help="Play this side against a real client or agent."
)
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

    With --as agent, the command acts as the recorded agent, for a client to start. With --as client, it acts as the
    recorded client and starts the agent: crow acp replay FILE --as client -- COMMAND
    """
    from crow_acp_tools.recording.file import read_recording
    from crow_acp_tools.recording.player import play_side
    from crow_acp_tools.recording.viewer import RecordingViewer, print_recording

    if (side == "client") != bool(command):
        fail("--as client needs the agent's command, and only --as client takes one: --as client -- COMMAND.")
    viewer = RecordingViewer(method, session, full)
    try:
        recording = list(read_recording(file))
        if side is None:
            print_recording(recording, viewer, speed or 0.0, step=step)
        else:
            sys.exit(run_until_signal(play_side(recording, side, command, viewer, speed or 0.0)))
    except BrokenPipeError:  # the reader closed the output: Click handles it
        raise
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be replayed: {error}.")
    except KeyboardInterrupt:
        sys.exit(130)
