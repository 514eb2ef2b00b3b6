"""The type of what starts a program in a sandbox: crow starts servers so, and extensions the commands of hooks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

Limit = Callable[[Sequence[str], Mapping[str, str], str], AbstractAsyncContextManager[tuple[list[str], dict[str, str]]]]
"""Takes the arguments, the environment and the folder of a program, and yields those that start it in a sandbox. The
block runs as long as the program does. It raises OSError where there is none."""
