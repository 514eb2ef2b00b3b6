"""The four ways an extension may answer, and no others.

A hook is a list of functions, plain or async, called in the order they were registered. `None` always means: leave it
be.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

log = logging.getLogger("crow")

Function = Callable[P, Awaitable[R | None]] | Callable[P, R | None]


class Hook(Generic[P, R]):
    """A moment that functions can join: `@crow.before_tool` above a function registers it."""

    def __init__(self) -> None:
        self.functions: list[Function[P, R]] = []
        self.closed = False
        """True once the first session has opened: a latecomer would miss moments that have passed."""

    def __call__(self, function: Function[P, R]) -> Function[P, R]:
        if self.closed:
            raise RuntimeError(f"register {function!r} before the first session opens")
        self.functions.append(function)
        return function

    def __bool__(self) -> bool:
        return bool(self.functions)


async def call_function(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """Call a function that may be plain or async."""
    answer = function(*args, **kwargs)
    return await answer if inspect.isawaitable(answer) else answer


class Observe(Hook[P, None]):
    """Everyone is told."""

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for function in self.functions:
            await call_function(function, *args, **kwargs)

    async def run_all(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """For the moments that end something: last registered first, and a failure is logged, not raised."""
        for function in reversed(self.functions):
            try:
                await call_function(function, *args, **kwargs)
            except Exception:
                log.exception("%r failed", function)


class Collect(Hook[P, R]):
    """Everyone may answer; the answers stay in order."""

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        answers: list[R | None] = [await call_function(function, *args, **kwargs) for function in self.functions]
        return [answer for answer in answers if answer is not None]


class First(Hook[P, R]):
    """The first answer settles it."""

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> R | None:
        for function in self.functions:
            if (answer := await call_function(function, *args, **kwargs)) is not None:
                return answer
        return None


class Pipe(Hook[Concatenate[V, P], V], Generic[V, P]):
    """A value passes from hand to hand; each may replace it."""

    async def run(self, value: V, *args: P.args, **kwargs: P.kwargs) -> V:
        for function in self.functions:
            answer: V | None = await call_function(function, value, *args, **kwargs)
            value = value if answer is None else answer
        return value
