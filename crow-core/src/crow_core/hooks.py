"""The five kinds of hooks; `Hooks` in `session.py` declares every hook, with its contract and an example.

A hook is a list of functions, plain or async, called in the order in which they were registered. A function that
returns None leaves things as they are. The class of a hook says what becomes of the other answers.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from types import UnionType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, get_args, get_origin, is_typeddict

from crow_core.errors import ConfigError, ModelError, PromptError, StoreError

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

logger = logging.getLogger("crow")

Function = Callable[P, Awaitable[R | None]] | Callable[P, R | None]


class Hook(Generic[P, R]):
    """A list of functions that are called at one point: `@crow.before_tool` above a function registers it.

    Declared on a class, a hook is a descriptor: each instance of the class gets a hook of its own at first use.
    """

    answer_at = -1
    """The place of the answer's type among the arguments of the hook's class."""
    kind = ""
    """A sentence about what becomes of the answers; added to the documentation of each hook."""

    def __init__(self, contract: str = "") -> None:
        self.contract = inspect.cleandoc(contract)
        self.__doc__ = f"{self.contract}\n\n{type(self).__name__}: {self.kind}"
        self.name = ""
        self.answer_type: Any = Any
        """The type of the answers, from the declaration of the hook."""
        self.functions: list[Function[P, R]] = []
        self.late = 0
        """The number of functions at the end of the list that `First.last` registered."""
        self.closed = False
        """True once the first session has opened: a function that is registered later has missed calls."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        if arguments := get_args(owner.__annotations__.get(name)):
            self.answer_type = arguments[self.answer_at]

    def __get__(self, instance: object, owner: Any = None) -> Self:
        if instance is None:
            return self
        hook = copy(self)
        hook.functions = []
        vars(instance)[self.name] = hook  # found before this descriptor from now on
        return hook

    def __call__(self, function: Function[P, R]) -> Function[P, R]:
        """Register a function. Raises RuntimeError once a session has opened."""
        if self.closed:
            raise RuntimeError(f"register {function!r} before the first session opens")
        self.functions.insert(len(self.functions) - self.late, function)
        return function

    def __bool__(self) -> bool:
        return bool(self.functions)

    def check(self, function: Any, answer: Any) -> Any:
        """Return the answer of a function. Raises ConfigError for one that the hook does not take."""
        if is_instance(answer, self.answer_type):
            return answer
        name = getattr(function, "__qualname__", repr(function))
        module = getattr(function, "__module__", "")
        raise ConfigError(
            f"{name} in {module}, a function of the hook {self.name}, returned {type(answer).__name__}. "
            f"Return {describe_type(self.answer_type)}, or None to leave things as they are."
        )


def is_instance(value: Any, hint: Any) -> bool:
    """Test whether a value has the outer type of a type hint; True for a hint that no value can be compared with."""
    origin = get_origin(hint) or hint
    if origin is UnionType:
        return any(is_instance(value, each) for each in get_args(hint))
    if is_typeddict(origin):
        return isinstance(value, dict)
    if not isinstance(origin, type):
        return True
    return isinstance(value, origin) and not (isinstance(value, str) and origin is Sequence)


def describe_type(hint: Any) -> str:
    """Describe the type of an answer in words: `list of Server`, `ToolResult`."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is UnionType:
        return " or ".join(map(describe_type, arguments))
    name = "a dict" if is_typeddict(origin) or origin is dict else f"{getattr(origin, '__name__', origin)}"
    named = {"Sequence": "a list", "list": "a list"}.get(name, name)
    of = getattr(get_origin(arguments[0]) or arguments[0], "__name__", "") if arguments and named == "a list" else ""
    return f"{named} of {of}" if of else named


async def call_function(function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """Call a function that may be plain or async."""
    answer = function(*args, **kwargs)
    return await answer if inspect.isawaitable(answer) else answer


class Observe(Hook[P, None]):
    kind = "every function is called; answers are ignored, and an exception ends the turn."

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for function in self.functions:
            if inspect.isawaitable(answer := function(*args, **kwargs)):
                await answer


class Unwind(Hook[P, None]):
    kind = "every function is called, the last registered first; an exception is logged, and the others still run."

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for function in reversed(self.functions):
            try:
                if inspect.isawaitable(answer := function(*args, **kwargs)):
                    await answer
            except (ConfigError, ModelError, PromptError, StoreError) as error:
                logger.warning("%s", error)
            except Exception:
                logger.exception("%r failed", function)


class Collect(Hook[P, R]):
    kind = "every function may return an answer; all answers are used, in order."

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        answers: list[R] = []
        for function in self.functions:
            if inspect.isawaitable(answer := function(*args, **kwargs)):
                answer = await answer
            if answer is not None:
                answers.append(self.check(function, answer))
        return answers


class First(Hook[P, R]):
    kind = "the first answer that is not None counts; the functions after it are not called."

    def last(self, function: Function[P, R]) -> Function[P, R]:
        """Register a function to be called after all that are registered without `last`, whatever the order of use."""
        self(function)
        self.functions.append(self.functions.pop(-1 - self.late))
        self.late += 1
        return function

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> R | None:
        for function in self.functions:
            if inspect.isawaitable(answer := function(*args, **kwargs)):
                answer = await answer
            if answer is not None:
                return self.check(function, answer)
        return None


class Pipe(Hook[Concatenate[V, P], V], Generic[V, P]):
    answer_at = 0
    kind = "each function receives the value as the one before it returned it; None leaves the value as it is."

    async def run(self, value: V, *args: P.args, **kwargs: P.kwargs) -> V:
        for function in self.functions:
            if inspect.isawaitable(answer := function(value, *args, **kwargs)):
                answer = await answer
            if answer is not None:
                value = self.check(function, answer)
        return value
