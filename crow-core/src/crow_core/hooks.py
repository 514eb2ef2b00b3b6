"""Hooks: the moments of an app and its sessions that extensions can join.

A hook is a list of functions, plain or async, called in the order in which they were registered. A function that
returns None leaves things as they are. The class of a hook, which stands where the hook is declared in `Hooks`, says
what becomes of the other answers.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

if TYPE_CHECKING:
    from crow_core.acp.schema import StopReason
    from crow_core.errors import ModelError
    from crow_core.mcp.server import Server
    from crow_core.mcp.tool import ToolCall, ToolResult
    from crow_core.messages import Message
    from crow_core.models.chat import ModelCall, Request
    from crow_core.options import Option
    from crow_core.session import Command, Session
    from crow_core.store import Page, Record

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

logger = logging.getLogger("crow")

Function = Callable[P, Awaitable[R | None]] | Callable[P, R | None]


class Hook(Generic[P, R]):
    """A moment that functions can join: `@crow.before_tool` above a function registers the function.

    Declared on a class, a hook is a descriptor: each instance of the class gets a hook of its own at first use.
    """

    kind = ""
    """What becomes of the answers, as a sentence; added to the documentation of each hook."""

    def __init__(self, contract: str = "") -> None:
        self.contract = inspect.cleandoc(contract)
        self.__doc__ = f"{self.contract}\n\n{type(self).__name__}: {self.kind}"
        self.name = ""
        self.functions: list[Function[P, R]] = []
        self.closed = False
        """True once the first session has opened: a function registered later would miss earlier moments."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: Any = None) -> Self:
        if instance is None:
            return self
        hook = type(self)(self.contract)
        hook.name = self.name
        vars(instance)[self.name] = hook  # found before this descriptor from now on
        return hook

    def __call__(self, function: Function[P, R]) -> Function[P, R]:
        """Register a function. Raises RuntimeError once a session has opened."""
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
    kind = "every function is called; answers are ignored, and an exception ends the turn."

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for function in self.functions:
            await call_function(function, *args, **kwargs)


class Unwind(Hook[P, None]):
    kind = "every function is called, the last registered first; an exception is logged, and the others still run."

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for function in reversed(self.functions):
            try:
                await call_function(function, *args, **kwargs)
            except Exception:
                logger.exception("%r failed", function)


class Collect(Hook[P, R]):
    kind = "every function may answer; the answers are kept in order."

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        answers: list[R | None] = [await call_function(function, *args, **kwargs) for function in self.functions]
        return [answer for answer in answers if answer is not None]


class First(Hook[P, R]):
    kind = "the first answer that is not None counts; the functions after it are not called."

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> R | None:
        for function in self.functions:
            if (answer := await call_function(function, *args, **kwargs)) is not None:
                return answer
        return None


class Pipe(Hook[Concatenate[V, P], V], Generic[V, P]):
    kind = "each function receives the value as the one before it returned it; None leaves the value as it is."

    async def run(self, value: V, *args: P.args, **kwargs: P.kwargs) -> V:
        for function in self.functions:
            answer: V | None = await call_function(function, value, *args, **kwargs)
            value = value if answer is None else answer
        return value


class Hooks:
    """Every hook of an app, with its contract and an example. `help(Crow.before_tool)` shows one of them."""

    session_start: "Observe[[Session]]" = Observe("""
        Called when a session has opened, while its MCP servers are starting.

            @crow.session_start
            def begin(session: Session) -> None:
                session.state["turns"] = 0
        """)

    session_end: "Unwind[[Session]]" = Unwind("""
        Called when a session closes.

            @crow.session_end
            async def finish(session: Session) -> None:
                session.state.pop("turns")
        """)

    app_end: "Unwind[[]]" = Unwind("""
        Called when the app shuts down, after its last session has closed.

            @crow.app_end
            async def disconnect() -> None: ...
        """)

    mcp_servers: "Collect[[Session], Sequence[Server]]" = Collect("""
        Returns MCP servers to connect for a session.

            @crow.mcp_servers
            def weather(session: Session) -> list[Server]:
                return [Server("weather", lambda: "http://localhost:9000/mcp")]
        """)

    tools: "Pipe[list[dict[str, Any]], [Session]]" = Pipe("""
        Receives the tool list at the start of a turn, before it is frozen; may return another.

        Tools that were sent once should stay, since a changed list makes the model read everything again.

            @crow.tools
            def leave_out(schemas: list[dict], session: Session) -> list[dict]:
                return [schema for schema in schemas if schema["function"]["name"] != "terminal"]
        """)

    instructions: "Collect[[Session], str]" = Collect("""
        Returns text for the system prompt; called once a session.

            @crow.instructions
            def style(session: Session) -> str:
                return "Answer in British English."
        """)

    before_prompt: "Pipe[Message, [Session]]" = Pipe("""
        Receives the user's message before it is appended to the log; may return another, or raise EndTurn.

            @crow.before_prompt
            def greet(message: Message, session: Session) -> None:
                if message.get("content") == "ping":
                    raise EndTurn("end_turn", "pong")
        """)

    before_model: "Pipe[Request, [Session]]" = Pipe("""
        Receives the request to the model before it is sent; may return another, or raise EndTurn.

            @crow.before_model
            def cool_down(request: Request, session: Session) -> Request:
                return {"temperature": 0, **request}
        """)

    after_model: "Observe[[Session, ModelCall]]" = Observe("""
        Called when a reply is complete and its tool calls, if it has any, are answered. May raise EndTurn.

            @crow.after_model
            def count(session: Session, model_call: ModelCall) -> None:
                print(model_call.usage)
        """)

    before_tool: "First[[Session, ToolCall], ToolResult]" = First("""
        Called before a tool runs; a result that is returned here stands in for the tool's.

            @crow.before_tool
            async def refuse(session: Session, tool_call: ToolCall) -> ToolResult | None:
                return ToolResult.error("Reading only.") if tool_call.kind != "read" else None
        """)

    after_tool: "Pipe[ToolResult, [Session, ToolCall]]" = Pipe("""
        Receives the result of a tool call before the client and the model do; may return another.

            @crow.after_tool
            def shorten(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult:
                return ToolResult(result.content[:1], result.is_error, result.meta)
        """)

    message: "Observe[[Session, Message]]" = Observe("""
        Called for each entry that was appended to the log, a message or a marker, in order.

        The client is shown what follows only when all functions have returned: this is where a store writes.

            @crow.message
            async def write(session: Session, entry: Message) -> None:
                print(session.id, entry.get("role", "marker"))
        """)

    draft: "Observe[[Session, Message]]" = Observe("""
        Called with the part of a reply that has arrived, under the id that the reply will keep, while it streams.

        Called at most once in `crow_core.log.DRAFT_INTERVAL` seconds, so that little of a reply is lost on a kill.

            @crow.draft
            async def write(session: Session, reply: Message) -> None: ...
        """)

    model_call: "Observe[[Session, ModelCall]]" = Observe("""
        Called when a request to a model has been sent, and again when it has ended (`model_call.ended`), well or not.

        Unlike `after_model`, it is also called for requests beside the conversation, such as a summary.

            @crow.model_call
            def log_call(session: Session, model_call: ModelCall) -> None:
                print(model_call.purpose, model_call.error or model_call.finish_reason)
        """)

    model_error: "First[[Session, ModelError], bool]" = First("""
        Called when a request of the loop failed; True makes the request anew and sends it once more.

            @crow.model_error
            async def shorten(session: Session, error: ModelError) -> bool | None:
                return True if error.too_long else None
        """)

    before_end: "First[[Session, StopReason], Message]" = First("""
        Called when the model is done; a user message that is returned here makes the turn go on.

            @crow.before_end
            def remind(session: Session, stop_reason: StopReason) -> Message | None:
                return {"role": "user", "content": "Run the tests."} if not session.state.pop("tested", True) else None
        """)

    turn_end: "Unwind[[Session, StopReason | Exception]]" = Unwind("""
        Called when a turn has ended, with its stop reason or with the exception that ended it.

            @crow.turn_end
            def report(session: Session, outcome: StopReason | Exception) -> None:
                print("the turn ended:", outcome)
        """)

    commands: "Collect[[Session], Sequence[Command]]" = Collect("""
        Returns slash commands of a session.

            @crow.commands
            def hello(session: Session) -> list[Command]:
                async def run(session: Session, words: str) -> str:
                    return f"Hello, {words}."

                return [Command("hello", "Say hello", run, hint="[name]")]
        """)

    options: "Collect[[Session], Option]" = Collect("""
        Returns a setting of a session that its user can change; the most important first.

            @crow.options
            def loudness(session: Session) -> Option:
                def get() -> str:
                    return session.state.get("loudness", "off")

                def choose(value: str) -> None:
                    session.state["loudness"] = value

                return Option("loud", "Loud", "_loud", ON_OFF, get, choose, is_switch=True)
        """)

    load_session: "First[[str], Record]" = First("""
        Returns the stored session with this id, which belongs to this process from now on; None if there is none.

        Raises StoreError; SessionBusy if another process has the session open.

            @crow.load_session
            async def load(id: str) -> Record | None: ...
        """)

    fork_session: "First[[str, str, str], Record]" = First("""
        Returns a new session, with the second id, that continues the stored session with the first id.

        It continues at the entry whose id is the third argument, or at the end for "". None if there is no such
        session. Raises StoreError.

            @crow.fork_session
            async def fork(id: str, new_id: str, at: str) -> Record | None: ...
        """)

    list_sessions: "First[[str, str, int], Page]" = First("""
        Returns stored sessions of a folder ("" for all), from a cursor on ("" for the start), at most so many.

        Raises StoreError; ValueError for an unknown cursor.

            @crow.list_sessions
            async def page(cwd: str, cursor: str, limit: int) -> Page | None: ...
        """)

    delete_session: "Observe[[str]]" = Observe("""
        Deletes a stored session; does nothing for an unknown id. Raises StoreError.

            @crow.delete_session
            async def delete(id: str) -> None: ...
        """)

    def seal(self) -> None:
        """Refuse further registrations: a function that is registered now would miss moments that have passed."""
        for name, hook in vars(Hooks).items():
            if isinstance(hook, Hook):
                getattr(self, name).closed = True
