"""Run a Python program of the model in Monty, an interpreter without files, network, processes and environment.

The interpreter is a process of its own. It stops at each call of a tool, and goes on with the tool's result.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_monty import AsyncMonty

CallTool = Callable[[str, tuple[Any, ...], dict[str, Any]], Awaitable[Any]]
"""Calls the tool of a function with the arguments of a call. An exception that is a ProgramError is for the program."""

PRINTED_LIMIT = 1_000_000
"""Characters that a program may print."""


class ProgramError(Exception):
    """The reason why a function failed, which the program can catch as a RuntimeError."""


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one program."""

    seconds: float = 10.0
    """Seconds that it may compute, without the time in which it waits for tools."""
    memory: int = 100_000_000
    """Bytes."""
    calls: int = 100
    """Calls of tools."""


@dataclass
class ProgramOutcome:
    """The result of a program."""

    printed: str = ""
    value: Any = None
    """The value of its last line, if that is an expression."""
    error: str = ""
    """Why it failed, with the line; empty if it did not."""


@dataclass
class Interpreter:
    """Runs programs. Its worker process starts with the first one."""

    limits: ProgramLimits
    _pool: "asyncio.Task[AsyncMonty] | None" = None
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def run(self, code: str, functions: Mapping[str, Any], call: CallTool) -> ProgramOutcome:
        """Run a program that may call `functions`, by their names. Only exceptions of `call` are raised."""
        from pydantic_monty import MontyError, MontyRuntimeError, MontySyntaxError  # here because few sessions need it

        run = ProgramRun(functions, call, self.limits, is_async(code))
        try:
            await run.feed(await self._start(), code)
        except (MontySyntaxError, MontyRuntimeError) as error:
            run.outcome.error = error.display().replace('File "<python-input-0>", ', "")
        except MontyError as error:
            run.outcome.error = f"The interpreter ended: {error}"
        finally:
            await run.cancel()
        return run.outcome

    async def _start(self) -> "AsyncMonty":
        from pydantic_monty import AsyncMonty

        if self._pool is None:
            self._pool = asyncio.ensure_future(self._stack.enter_async_context(AsyncMonty()))
        return await asyncio.shield(self._pool)

    async def close(self) -> None:
        """End the worker process."""
        await self._stack.aclose()
        self._pool = None


@dataclass
class ProgramRun:
    """A program that runs."""

    functions: Mapping[str, Any]
    call: CallTool
    limits: ProgramLimits
    is_async: bool
    """True if it awaits the results of functions; otherwise they return them."""
    outcome: ProgramOutcome = field(default_factory=ProgramOutcome)
    calls: int = 0
    tasks: "dict[int, asyncio.Task[Any]]" = field(default_factory=dict[int, "asyncio.Task[Any]"])
    """The calls that the program awaits, by their ids in the interpreter."""

    async def feed(self, pool: "AsyncMonty", code: str) -> None:
        """Run the program. Raises MontyError."""
        from pydantic_monty import AsyncFunctionSnapshot, AsyncNameLookupSnapshot, MontyComplete

        async with pool.checkout(
            limits={
                "max_feed_duration_secs": self.limits.seconds,
                "max_memory": self.limits.memory,
                "max_suspensions": 1_000 + 20 * self.limits.calls,
            },
            os_policy={"sleep": "zero"},
        ) as session:
            state = await session.feed_start(code, print_callback=self.add_printed)
            while not isinstance(state, MontyComplete):
                match state:
                    case AsyncFunctionSnapshot(is_os_function=True):
                        state = await state.resume_not_handled()
                    case AsyncFunctionSnapshot():
                        state = await state.resume(await self.answer_call(state))
                    case AsyncNameLookupSnapshot(variable_name=name) if name in self.functions:
                        state = await state.resume(value=make_stub(name))
                    case AsyncNameLookupSnapshot():
                        state = await state.resume()
                    case _:
                        state = await state.resume(await self.settle(state.pending_call_ids))
            self.outcome.value = state.output

    def add_printed(self, stream: str, text: str) -> None:
        """Keep what the program prints, up to a limit."""
        self.outcome.printed += text[: max(PRINTED_LIMIT - len(self.outcome.printed), 0)]

    async def answer_call(self, state: Any) -> Any:
        """Answer a call of a function: with its result, or with a future if the program awaits it."""
        self.calls += 1
        if self.calls > self.limits.calls:
            return {"exception": RuntimeError(f"the program has made {self.limits.calls} calls, which is the limit")}
        if state.function_name not in self.functions:
            return {"exception": NameError(f"name {state.function_name!r} is not defined; it is no function of a tool")}
        running = asyncio.ensure_future(self.call(state.function_name, state.args, state.kwargs))
        self.tasks[state.call_id] = running
        if self.is_async:
            return {"future": ...}
        return (await self.settle([state.call_id]))[state.call_id]

    async def settle(self, ids: list[int]) -> dict[int, Any]:
        """Wait until one of several calls has ended; return the results of those that have."""
        done, _ = await asyncio.wait([self.tasks[id] for id in ids], return_when=asyncio.FIRST_COMPLETED)
        return {id: to_answer(self.tasks.pop(id)) for id in ids if self.tasks[id] in done}

    async def cancel(self) -> None:
        """Cancel the calls whose results nobody awaits any more."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def to_answer(task: "asyncio.Task[Any]") -> dict[str, Any]:
    """Convert the end of a call to the answer for the interpreter. Raises what is not for the program."""
    try:
        return {"return_value": task.result()}
    except ProgramError as error:
        return {"exception": RuntimeError(str(error))}


def make_stub(name: str) -> Callable[..., None]:
    """Make a function that stands for a tool in the interpreter, which only takes its name."""

    def stub() -> None: ...

    stub.__name__ = name
    return stub


def is_async(code: str) -> bool:
    """Return whether a program awaits anything; False if it cannot be parsed."""
    import ast  # here because few sessions need it

    try:
        return any(isinstance(node, ast.Await) for node in ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
