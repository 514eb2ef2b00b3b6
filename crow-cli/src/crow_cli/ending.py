"""How a command's process ends: in good order, with its exit code, and with a sentence where something is wrong."""

import asyncio
import gc
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, NoReturn


def complete(work: Coroutine[Any, Any, int]) -> int:
    """Run to the end; gives the exit code, which after SIGTERM or SIGHUP is 128 and the signal's number.

    The first such signal cancels the work, so that it cleans up; the second ends the process at once. Raises
    KeyboardInterrupt.
    """
    sys.setswitchinterval(0.0005)  # threads write and load beside the loop, which they would keep waiting 5 ms a time
    try:
        return asyncio.run(heeding_signals(work))
    finally:
        gc.freeze()  # else the interpreter takes half a second to look through every module before it ends


async def heeding_signals(work: Coroutine[Any, Any, int]) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    received: list[int] = []

    def end(number: int) -> None:
        loop.remove_signal_handler(number)
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup, a hang-up is ignored
            with suppress(NotImplementedError):  # on this platform
                loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


def wrong(sentence: str) -> NoReturn:
    """Wrong usage or configuration: say it, exit code 2."""
    import click  # not above: `crow acp` uses this file, and does without

    click.secho(f"crow: {sentence}", fg="red", err=True)
    sys.exit(2)
