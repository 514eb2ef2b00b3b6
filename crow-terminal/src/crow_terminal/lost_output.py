"""The end of a terminal or a pipe that crow writes to. Only a terminal that controls crow sends SIGHUP at its end."""

import asyncio
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress


@contextmanager
def watch_output(lose: Callable[[], None]) -> Generator[None]:
    """Call `lose` in the block once nobody reads standard output any more. Only Linux tells it before a write."""
    if sys.platform != "linux":
        yield
        return
    from select import epoll  # other systems have none

    loop = asyncio.get_running_loop()
    with epoll() as poll:
        with suppress(OSError):  # standard output is a file
            poll.register(1, 0)  # with no event asked for, it reports the end alone
        loop.add_reader(poll.fileno(), lose)
        try:
            yield
        finally:
            loop.remove_reader(poll.fileno())


def discard_output() -> None:
    """Discard all that is written from now on, since nobody reads it: a failed write would end the clean-up."""
    null = os.open(os.devnull, os.O_WRONLY)
    shares = os.path.sameopenfile(1, 2)
    os.dup2(null, 1)
    if shares:
        os.dup2(null, 2)
    os.close(null)
