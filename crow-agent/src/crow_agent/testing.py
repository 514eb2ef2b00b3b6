"""Tests of agents: a model that plays a script, and the tool calls that were made.

The pytest plugin passes a `CrowFixture` to every test that has a parameter `crow`.
"""

import asyncio
import os
import re
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, is_dataclass
from difflib import SequenceMatcher, ndiff
from inspect import iscoroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast, overload

import msgspec
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.hooks import call_function
from crow_core.mcp.result import ToolResult
from crow_core.mcp.tool import ToolCall
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.models.token_usage import find_price
from crow_core.session.session import Session
from crow_core.testing.model import ScriptedModel
from crow_core.testing.script import Reply
from crow_system.shortening import shorten_middle

from crow_agent.agent import Agent
from crow_agent.content import PromptContent
from crow_agent.errors import AgentError
from crow_agent.result import Result

if TYPE_CHECKING:
    from crow_agent.cassette import Cassette

__all__ = ["CallSearch", "CrowFixture", "MadeCall", "ModelError", "PlannedCall", "PlayedModel", "Reply", "call"]

T = TypeVar("T")

VALUE_LIMIT = 120
"""The most characters of one argument in a description."""
INHERITED = re.compile(r"(?!CROW_|OPENAI_|XDG_|HOME$)")
"""Matches the variables of the environment that agents in tests see."""


@dataclass(frozen=True)
class PlannedCall:
    """A tool call for a model to make; `call` makes one."""

    name: str
    arguments: Mapping[str, Any]

    def __repr__(self) -> str:
        return describe_call(self.name, self.arguments)


def call(name: str, /, **arguments: Any) -> PlannedCall:
    """Make a tool call for a scripted model: `call("population", city="Rome")`."""
    return PlannedCall(name, arguments)


Answer: TypeAlias = Any
"""A text, a tool call, a list with tool calls for one reply, a `Reply`, an exception, or a function that gets the
request and returns one of these. Any other value is played as JSON: a dataclass, a pydantic model, a dict."""


def to_reply(answer: Answer) -> Reply:
    """Convert an answer to a model's reply. Raises TypeError for a value that cannot be JSON."""
    match answer:
        case Reply():
            return answer
        case str():
            return Reply(answer)
        case BaseException():
            error = answer if isinstance(answer, ModelError) else ModelError(str(answer) or type(answer).__name__)
            return Reply(error=error)
        case PlannedCall():
            return to_reply([answer])
        case [*parts] if any(isinstance(part, PlannedCall) for part in parts):
            calls = [part for part in parts if isinstance(part, PlannedCall)]
            texts = [part for part in parts if isinstance(part, str)]
            if len(calls) + len(texts) < len(parts):
                raise TypeError(f"A reply with tool calls can hold texts beside them, and nothing else: {parts!r}")
            uses = [{"name": each.name, "arguments": to_json_value(dict(each.arguments))} for each in calls]
            return Reply("\n\n".join(texts), tool_calls=uses)  # pyright: ignore[reportArgumentType]
        case _:
            return Reply(msgspec.json.encode(to_json_value(answer)).decode())


def to_json_value(value: Any) -> Any:
    """Convert a value to one of JSON, also with pydantic models inside. Raises TypeError."""

    def convert(inner: Any) -> Any:
        if hasattr(inner, "model_dump"):
            return inner.model_dump(mode="json")
        if isinstance(inner, Path):
            return str(inner)
        raise TypeError(f"A model cannot play {inner!r}: it is no text, no tool call, and nothing that can be JSON.")

    return msgspec.to_builtins(value, enc_hook=convert, str_keys=True)


class PlayedModel(ScriptedModel):
    """A model that plays the answers of a test."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.missing: list[str] = []
        """A sentence about each model call that there was no answer for."""
        self.fault: BaseException | None = None
        """The error of one of the test's functions."""
        self._waiting: deque[Answer] = deque()
        self._function: Callable[[ModelRequest], Any] | None = None

    def plays(self, *answers: Answer) -> None:
        """Add answers, one for each model call, after those that wait already.

        An answer is a text, a tool call, a list of texts and tool calls for one reply, a `Reply`, or an exception to
        raise. It can also be a function that gets the request and returns any of these, or a value whose JSON is the
        text. Raises TypeError for a value that cannot be JSON.
        """
        for answer in answers:
            if not is_function(answer):
                to_reply(answer)
            self._waiting.append(answer)

    def answers(self, function: Callable[[ModelRequest], Any]) -> None:
        """Let a function answer every model call that no answer of `plays` waits for; it gets the request."""
        self._function = function

    @property
    def unplayed(self) -> list[Reply | Callable[..., Any]]:
        """The answers of `plays` that no model call has asked for."""
        return [answer if is_function(answer) else to_reply(answer) for answer in self._waiting]

    async def _answer(self, request: ModelRequest) -> Reply:
        answer = self._waiting.popleft() if self._waiting else self._function
        if answer is None:
            self.missing.append(
                f"The script has no answer for model call {len(self.requests)}, {describe_request(request)}. "
                "Add one to crow.model.plays(...)."
            )
            raise ModelError(self.missing[-1])
        try:
            if is_function(answer):
                answer = await call_function(answer, request)
            return to_reply(answer)
        except Exception as error:  # the test fails with it, even if the tested code hides the ModelError
            self.fault = self.fault or error
            raise ModelError(f"A function of the test failed: {type(error).__name__}: {error}.") from error


def is_function(answer: Answer) -> bool:
    """Return whether an answer is a function to call with the request."""
    return callable(answer) and not isinstance(answer, (type, Reply, PlannedCall)) and not is_data(answer)


def is_data(value: Any) -> bool:
    """Return whether a value holds fields."""
    return is_dataclass(value) or isinstance(value, msgspec.Struct) or hasattr(value, "model_dump")


def describe_request(request: ModelRequest) -> str:
    """Say in a few words which request it is: `after the user's message 'Rome?'`."""
    messages: list[dict[str, Any]] = request.get("messages") or [{}]
    last = messages[-1]
    sender = {"tool": "a tool's result", "user": "the user's message"}.get(str(last.get("role")), "a message")
    return f"after {sender} {describe_data(last.get('content'))}"


@dataclass(eq=False)
class MadeCall:
    """A tool call that a model made."""

    name: str
    arguments: Mapping[str, Any]
    """As the tool takes them."""
    session_id: str
    result: str | None = None
    """The text of the result; None if the call has not ended."""
    failed: bool = False
    denied: bool = False
    """True if a permission was denied."""

    def __repr__(self) -> str:
        end = " (denied)" if self.denied else " (failed)" if self.failed else ""
        return describe_call(self.name, self.arguments) + end


def describe_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Make one line of a tool call."""
    return f"{name}({', '.join(f'{key}={describe_value(value)}' for key, value in arguments.items())})"


def describe_value(value: Any) -> str:
    """Make one line of an argument or of what it must fit."""
    match value:
        case re.Pattern():
            return f"matches {cast(Any, value).pattern!r}"
        case _ if value is ...:
            return "..."
        case type():
            return value.__name__
        case _ if callable(value) and not is_data(value):
            return f"fits {getattr(value, '__name__', 'a function')}"
        case _:
            return describe_data(value)


def describe_data(value: Any) -> str:
    """Return the representation of a value, without its middle if it is long."""
    return shorten_middle(repr(value), VALUE_LIMIT)


def fits(wanted: Any, value: Any) -> bool:
    """Return whether an argument is what a test wants.

    `...` fits any value, a type its instances, a regular expression a text in which it is found, a function the values
    for which it returns true. Lists and dicts may contain all of these. Anything else fits its equal, or the JSON that
    it becomes.
    """
    match wanted:
        case _ if wanted is ...:
            return True
        case re.Pattern():
            return isinstance(value, str) and cast("re.Pattern[str]", wanted).search(value) is not None
        case type():
            return isinstance(value, wanted)
        case _ if callable(wanted) and not is_data(wanted):
            return bool(cast(Any, wanted)(value))
        case {**inner} if isinstance(value, Mapping):
            given = cast(Mapping[str, Any], value)
            return inner.keys() == given.keys() and all(fits(inner[key], given[key]) for key in given)
        case [*items] if isinstance(value, list):
            values = cast("list[Any]", value)
            return len(items) == len(values) and all(map(fits, items, values))
        case _:
            return wanted == value or ((isinstance(wanted, Path) or is_data(wanted)) and to_json_value(wanted) == value)


class CallSearch(Sequence[MadeCall]):
    """The tool calls that fit, oldest first. It is true if there are as many as the test expects."""

    def __init__(
        self, calls: Sequence[MadeCall], name: str | None, arguments: Mapping[str, Any], *, expected: bool
    ) -> None:
        self._calls, self._name, self._arguments, self._expected = [*calls], name, arguments, expected
        self.found = [made for made in calls if name is None or (made.name == name and self._fits_all(made))]

    def _fits_all(self, made: MadeCall) -> bool:
        given = made.arguments
        return all(key in given and fits(wanted, given[key]) for key, wanted in self._arguments.items())

    @overload
    def __getitem__(self, index: int, /) -> MadeCall: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[MadeCall]: ...
    def __getitem__(self, index: int | slice, /) -> MadeCall | list[MadeCall]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __bool__(self) -> bool:
        return bool(self.found) is self._expected

    @property
    def wanted(self) -> str:
        """The calls that are looked for, in one line."""
        if self._name is None or not self._arguments:
            return self._name or "a tool"
        return describe_call(self._name, self._arguments)

    def __repr__(self) -> str:
        if self.found:
            return f"<{self.wanted} was called: {', '.join(map(repr, self.found))}>"
        nearest = self.find_nearest()
        return f"<{self.wanted} was not called{f', but {nearest!r}' if nearest else ''}>"

    def find_nearest(self) -> MadeCall | None:
        """Return the call of the same tool whose arguments are most like the wanted ones; None if there is none."""

        def rate(made: MadeCall) -> float:
            return sum(
                1.0
                if fits(wanted, made.arguments[key])
                else SequenceMatcher(None, describe_value(wanted), describe_data(made.arguments[key])).ratio() * 0.9
                for key, wanted in self._arguments.items()
                if key in made.arguments
            )

        return max((made for made in self._calls if made.name == self._name), key=rate, default=None)

    def describe(self) -> str:
        """List the calls that there were, and how the nearest one differs."""
        made = [f"  {number}. {each!r}" for number, each in enumerate(self._calls, 1)]
        lines = ["The tool calls were:", *made] if made else ["There were no tool calls."]
        nearest = None if self else self.find_nearest()
        if self._expected and nearest:
            given = {key: nearest.arguments[key] for key in self._arguments if key in nearest.arguments}
            # What fits is shown as the value that was given, so that the diff shows the rest alone.
            shown = {
                key: describe_value(given[key] if key in given and fits(wanted, given[key]) else wanted)
                for key, wanted in self._arguments.items()
            }
            before = [f"{key} = {text}" for key, text in shown.items()]
            after = [f"{key} = {describe_value(value)}" for key, value in given.items()]
            diff = [line.rstrip() for line in ndiff(before, after)]
            lines += ["", f"{self.wanted} was not called. The nearest call (- wanted, + made):", *diff]
        elif self._expected and not self:
            lines += ["", f"{self.wanted} was not called, nor any call of {self._name!r} with other arguments."]
        return "\n".join(lines)


class CrowFixture:
    """Agents in a test: their model plays a script or a cassette, their home and folder are the test's own."""

    def __init__(self, folder: Path, home: Path, cassette: "Cassette | None" = None) -> None:
        self.model = PlayedModel()
        """The model that plays the test's script."""
        self.folder = folder
        """The folder that the agents work in: pytest's `tmp_path`."""
        self.home = home
        """The folder of their configuration, `config.toml` and so on, and of their database."""
        self.calls: list[MadeCall] = []
        """All tool calls, oldest first."""
        self.cost = 0.0
        """The cost of all model calls, in the currency of the model's prices; 0 if it has none."""
        self.last_search: CallSearch | None = None
        """The last search for tool calls, for the report of a failed test."""
        self._cassette = cassette
        self._agents: dict[Agent, asyncio.AbstractEventLoop | None] = {}
        """The agents of the test, and the event loop that each has started in."""
        self._overrides = ExitStack()
        self._runner: asyncio.Runner | None = None

    def agent(self, model: Any = "", **options: Any) -> Agent:
        """Make an agent for the test; the options are those of `Agent`. Its model is replaced as by `use`."""
        return self.use(Agent(model, **options), cwd=options.get("cwd"))

    def use(self, agent: Agent, *, cwd: str | Path | None = None) -> Agent:
        """Let an agent play the test's script or cassette until the test ends; then it is what it was before.

        It works in the test's folder, or in `cwd`, and with the test's home in place of the user's configuration.
        Raises TypeError for an agent of `Agent.connect`.
        """
        if agent in self._agents:
            return agent
        env = {name: value for name, value in os.environ.items() if INHERITED.match(name)}
        env |= {"HOME": str(self.home), "CROW_HOME": str(self.home)}
        model = self.model if self._cassette is None else self._cassette.get_model(agent.model)

        def watch(crow: Crow) -> None:
            self._agents[agent] = asyncio.get_running_loop()
            self._watch(crow)

        override = agent.override(model=model, env=env, cwd=cwd or self.folder, extensions=[watch])
        self._overrides.enter_context(override)
        self._agents[agent] = None
        return agent

    def _watch(self, crow: Crow) -> None:
        """Note the sessions, tool calls and costs of an app."""
        running: dict[str, MadeCall] = {}

        @crow.session_start
        def begin(session: Session) -> None:
            if self._cassette is not None:
                self._cassette.replacements[session.id] = "<session>"

        @crow.before_announcement
        def note(session: Session, tool_call: ToolCall) -> None:
            running[tool_call.id] = made = MadeCall(tool_call.name, dict(tool_call.arguments), session.id)
            self.calls.append(made)

        @crow.after_tool
        def end(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
            if made := running.pop(tool_call.id, None):
                made.result = "\n".join(str(block.get("text", "")) for block in result.content)
                made.failed, made.denied = result.is_error, "crow/denied" in result.meta

        @crow.model_call
        def count(session: Session, model_call: ModelCall) -> None:
            if model_call.ended and (price := find_price(model_call)):
                self.cost += price[0]

    def prompt(
        self,
        prompt: PromptContent,
        *,
        output: Any = None,
        retries: int = 2,
        timeout: float | None = None,
        **options: Any,
    ) -> Result[Any]:
        """Send a prompt to an agent with these options, wait for the end of the turn, and return its result.

        The arguments are those of `Agent.prompt` and of `Agent`. In an async test, await `crow.agent(…).prompt(…)`.
        """
        refuse_running_loop("await crow.agent(…).prompt(…)")

        async def run() -> Result[Any]:
            async with self.agent(**options) as agent:
                return await agent.prompt(prompt, output=output, retries=retries, timeout=timeout)

        __tracebackhide__ = True
        try:
            return self.run(run())
        except AgentError as error:
            raise error.with_traceback(None) from None  # its text says all, and the frames of crow say nothing more

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; all of a test run in the same event loop."""
        try:
            refuse_running_loop("await it")
        except RuntimeError:
            coroutine.close()
            raise
        if not iscoroutine(coroutine):
            raise TypeError(f"crow.run takes a coroutine, the value of a call of an async function, not {coroutine!r}.")
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(coroutine)

    def called(self, name: str, /, **arguments: Any) -> CallSearch:
        """Return the calls of a tool with these arguments; others may be among theirs.

        An argument is a value, `...` for any, a type, a regular expression, or a function that returns whether it fits.
        """
        return self._search(name, arguments, expected=True)

    def no_tool(self, name: str | None = None, /, **arguments: Any) -> CallSearch:
        """Return whether no such call was made; without a name, none at all. The arguments are those of `called`."""
        return self._search(name, arguments, expected=False)

    def _search(self, name: str | None, arguments: Mapping[str, Any], *, expected: bool) -> CallSearch:
        self.last_search = CallSearch(self.calls, name, arguments, expected=expected)
        return self.last_search

    def find_fault(self) -> str:
        """Return why the cassette could not answer; empty if it could. Raises the error of a function of the test."""
        if self.model.fault is not None:
            raise self.model.fault
        return "" if self._cassette is None else next(iter(self._cassette.misses), "")

    def describe_unplayed(self) -> str:
        """Say what the model was asked for in vain, or which answers it never played; empty if there is neither."""
        if self._cassette is not None and (text := self._cassette.describe_waiting()):
            return text
        if self.model.missing:
            return self.model.missing[0]
        if not (unplayed := self.model.unplayed):
            return ""
        lines = [f"  {describe_answer(answer)}" for answer in unplayed]
        head = f"Model calls: {len(self.model.requests)}. These answers of the script were never played:"
        if self._cassette is not None:
            head = "A test with a cassette cannot have a script, too. These answers were never played:"
        return "\n".join([head, *lines])

    def describe_calls(self) -> str:
        """List the tool calls for the report of a failed test; empty if it looked for none."""
        return "" if self.last_search is None else self.last_search.describe()

    def close(self) -> None:
        """Close the agents, and give them back what they had before."""
        with self._overrides:
            for agent, loop in self._agents.items():
                if loop is not None and not loop.is_closed():
                    loop.run_until_complete(agent.close())
            if self._runner is not None:
                self._runner.close()


def describe_answer(answer: Reply | Callable[..., Any]) -> str:
    """Make one line of an answer in a script."""
    if not isinstance(answer, Reply):
        return describe_value(answer)
    calls = [describe_call(each["name"], cast(Any, each["arguments"])) for each in answer.tool_calls]
    texts = [describe_data(answer.content)] if answer.content or not calls else []
    return "error: " + str(answer.error) if answer.error else ", ".join([*texts, *calls])


def refuse_running_loop(instead: str) -> None:
    """Raise RuntimeError if an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"An event loop is running: {instead} in an async test.")
