"""The hooks, and turns whose hooks fail."""

import asyncio
import pydoc
import textwrap
from collections.abc import Callable
from typing import Any

import crow_core
import pytest
from anyio import wait_all_tasks_blocked
from crow_core import api
from crow_core.acp import schema
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import AgentMessageChunk, StopReason, ToolCallUpdate
from crow_core.app import Crow
from crow_core.errors import EndTurn, ModelError, StoreError
from crow_core.hooks import Collect, First, Hook, Observe, Pipe, Unwind
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.messages.message import INTERRUPTED, Message
from crow_core.models.chat_model import ChatModel, encode_json
from crow_core.models.model_call import ModelCall, ModelRequest
from crow_core.session import log as log_module
from crow_core.session.session import Hooks, Session
from crow_core.testing import Editor, Failure, MemoryStore, Reply, ScriptedModel, ScriptedServer, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_permissions.extension import permissions
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio

USE_ECHO = Reply("Looking.", tool_calls=[{"name": "demo_echo", "arguments": {"text": "as asked"}}])

TURN_HOOKS = (
    "before_prompt",
    "instructions",
    "before_model",
    "message",
    "before_tool",
    "after_tool",
    "after_model",
    "before_end",
)


def echo_server() -> Server:
    server = FastMCP("demo")

    @server.tool
    def echo(text: str) -> str:
        return text

    return Server("demo", lambda: server, shared=True)


def crow_with(model: ScriptedModel) -> Crow:
    return Crow(model, servers=[echo_server()])


def only_session(crow: Crow) -> Session:
    (session,) = crow.sessions.values()
    return session


def get_user_message(request: dict[str, Any]) -> str:
    """Return the last user message of a request."""
    return next(message["content"] for message in reversed(request["messages"]) if message["role"] == "user")


def assert_valid(request: dict[str, Any]) -> None:
    """Each tool call has exactly one answer directly behind it, and there are no other tool messages."""
    open_calls: list[str] = []
    for message in request["messages"]:
        if message["role"] == "tool":
            assert message["tool_call_id"] == open_calls.pop(0)
            continue
        assert not open_calls
        open_calls = [call["id"] for call in message.get("tool_calls", [])]
        assert message["role"] != "assistant" or message["content"] or open_calls
    assert not open_calls


def make_note_taker(notes: list[str], what: str) -> Callable[..., None]:
    """Make a function for any hook that appends `what` to `notes`."""

    def function(*_: object) -> None:
        notes.append(what)

    return function


def join(crow: Crow, moment: str, act: Any) -> None:
    """Register a function that calls `act()` in a hook, with any arguments."""

    async def function(*_: Any) -> None:
        act()

    getattr(crow, moment)(function)


HOOKS = [name for name, hook in vars(Hooks).items() if isinstance(hook, Hook)]


@pytest.mark.parametrize("name", HOOKS)
def test_help_shows_the_contract_of_a_hook_and_its_example_runs(name: str):
    hook = getattr(Crow, name)
    shown = pydoc.render_doc(hook, renderer=pydoc.plaintext)
    assert all(line in shown for line in hook.contract.splitlines())
    assert f"{type(hook).__name__}: {hook.kind}" in shown
    _, at, example = hook.contract.partition(f"    @crow.{name}\n")
    assert at, "no example"
    crow = Crow(ScriptedModel([]))
    names = {name: getattr(crow_core, name) for name in vars(api) if not name.startswith("_")}
    exec(textwrap.dedent(at + example), {**names, "crow": crow})
    own = name in ("options", "turn_end")  # the app has registered a function itself
    assert len(getattr(crow, name).functions) == 1 + own


@pytest.mark.parametrize("kind", [Observe, Unwind, Collect, First, Pipe])
async def test_hooks_pass_positional_and_keyword_arguments_to_their_functions(kind: type[Hook[..., Any]]):
    class Moments:
        moment = kind(
            """Called at a moment.

            Indented as its class.
            """
        )

    moments, calls = Moments(), list[tuple[tuple[Any, ...], dict[str, Any]]]()
    assert not moments.moment

    @moments.moment
    def function(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    assert moments.moment
    await getattr(moments.moment, "run")("value", 1, name="two")  # noqa: B009  # each kind has types of its own
    assert calls == [(("value", 1), {"name": "two"})]
    assert (Moments.moment.name, Moments.moment.contract) == ("moment", "Called at a moment.\n\nIndented as its class.")
    assert Moments.moment.__doc__ == f"{Moments.moment.contract}\n\n{kind.__name__}: {kind.kind}"
    assert not Moments.moment, "functions belong to an instance"
    assert kind().contract == ""


async def test_pipe_calls_plain_and_async_functions_in_the_order_of_registration():
    model = ScriptedModel([Reply("Hello.")])
    crow = Crow(model)

    @crow.before_prompt
    def first(message: Message, session: Session) -> Message:
        return {**message, "content": f"{message.get('content')} one"}

    @crow.before_prompt
    def silent(message: Message, session: Session) -> None:
        """None leaves the value as it is."""

    @crow.before_prompt
    async def second(message: Message, session: Session) -> Message:
        await asyncio.sleep(0)
        return {**message, "content": f"{message.get('content')} two"}

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "zero")
    assert get_user_message(model.requests[0]) == "zero one two"


async def test_the_first_answer_of_before_tool_replaces_the_tool():
    model = ScriptedModel([USE_ECHO, Reply("Done.")])
    crow = crow_with(model)
    asked_in_vain: list[str] = []

    @crow.before_tool
    def silent(session: Session, tool_call: ToolCall) -> None: ...

    @crow.before_tool
    async def answer(session: Session, tool_call: ToolCall) -> ToolResult:
        return ToolResult.text("from the hook")

    @crow.before_tool
    def too_late(session: Session, tool_call: ToolCall) -> None:
        asked_in_vain.append(tool_call.id)

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert model.requests[1]["messages"][-1]["content"] == "from the hook"
    assert asked_in_vain == []
    assert list(editor.calls().values()) == [["pending", "completed"]]


async def test_functions_that_judge_last_are_called_after_all_others_in_the_order_of_use():
    crow, called = Crow(ScriptedModel([])), list[str]()

    def use(name: str, register: Any) -> None:
        @register
        def note(session: Session, tool_call: ToolCall) -> None:
            called.append(name)

    use("last", crow.before_tool.last)
    use("first", crow.before_tool)
    use("very last", crow.before_tool.last)
    use("second", crow.before_tool)
    anything: Any = object()
    assert await crow.before_tool.run(anything, anything) is None
    assert called == ["first", "second", "last", "very last"]


async def test_handler_runs_its_tool_with_the_session_and_the_call():
    def greet(session: Session, tool_call: ToolCall) -> ToolResult:
        return ToolResult.text(f"Hello {tool_call.arguments['name']}, in {session.cwd}")

    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    server = Server("own", definitions=[{"name": "greet", "inputSchema": schema}], handlers={"greet": greet})
    model = ScriptedModel([Reply(tool_calls=[{"name": "own_greet", "arguments": {"name": "Ada"}}]), Reply("Done.")])
    async with connect(Crow(model, servers=[server])) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert model.requests[1]["messages"][-1]["content"] == "Hello Ada, in /"
    assert list(editor.calls().values()) == [["pending", "in_progress", "completed"]]


async def test_after_tool_can_replace_the_result_for_client_and_model():
    model = ScriptedModel([USE_ECHO, Reply("Done.")])
    crow = crow_with(model)

    @crow.after_tool
    def shout(result: ToolResult, session: Session, tool_call: ToolCall) -> ToolResult:
        return ToolResult.text(result.content[0]["text"].upper())

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert model.requests[1]["messages"][-1]["content"] == "AS ASKED"
    assert "AS ASKED" in repr(editor.of(ToolCallUpdate)[-1].content)


async def test_before_model_can_change_the_request_but_not_the_log():
    model = ScriptedModel([Reply("Hello.")])
    crow = Crow(model)

    @crow.before_model
    def cooler(request: ModelRequest, session: Session) -> ModelRequest:
        return {"temperature": 0, **request}

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
        assert "temperature" not in repr(only_session(crow).log)
    assert model.requests[0]["temperature"] == 0


async def test_before_end_continues_the_turn_as_long_as_it_returns_a_message():
    model = ScriptedModel([Reply("Half."), Reply("Whole.")])
    crow = Crow(model)

    @crow.before_end
    def go_on(session: Session, stop_reason: StopReason) -> Message | None:
        return {"role": "user", "content": "And the rest?"} if session.log[-1].get("content") == "Half." else None

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "do it")
    assert answer.stop_reason == "end_turn"
    assert get_user_message(model.requests[1]) == "And the rest?"
    assert editor.text == "Half.Whole."


async def test_collect_uses_every_answer():
    model = ScriptedModel([Reply("Hello.")])
    crow = Crow(model)
    crow.instructions(lambda session: "First rule.")
    crow.instructions(lambda session: None)
    crow.instructions(lambda session: "Second rule.")
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
    system = model.requests[0]["messages"][0]["content"]
    assert 0 < system.index("First rule.") < system.index("Second rule.")


async def test_every_answer_but_none_counts_also_one_that_is_false():
    """For First, Collect and Pipe."""
    crow = Crow(ScriptedModel([]))
    asked_in_vain: list[str] = []
    message: Any = {}
    answers: dict[Any, Any] = {crow.model_error: False, crow.instructions: "", crow.before_prompt: message}
    for hook, answer in answers.items():
        hook(lambda *_: None)
        hook(lambda *_, answer=answer: answer)
    crow.model_error(make_note_taker(asked_in_vain, "model_error"))
    given: Any = object()
    assert await crow.model_error.run(given, given) is False
    assert asked_in_vain == []
    assert await crow.instructions.run(given) == [""]
    assert await crow.before_prompt.run(given, given) is message


WRONG: list[tuple[str, Any, str]] = [
    ("before_prompt", "text", "Return a dict"),
    ("before_model", 3, "Return a dict"),
    ("before_tool", "no", "Return ToolResult"),
    ("after_tool", "no", "Return ToolResult"),
    ("before_end", "go on", "Return a dict"),
    ("instructions", ["a"], "Return str"),
    ("tools", {}, "Return a list of dict"),
    ("mcp_servers", 3, "Return a list of Server"),
    ("commands", "help", "Return a list of Command"),
    ("options", "x", "Return Option"),
]


@pytest.mark.parametrize(("name", "answer", "advice"), WRONG)
async def test_a_wrong_answer_of_a_hook_names_the_function_and_the_hook(name: str, answer: Any, advice: str):
    def misbehave(*_: Any) -> Any:
        return answer

    crow = Crow(ScriptedModel([USE_ECHO, Reply("Done.")]), servers=[echo_server()])
    getattr(crow, name)(misbehave)

    async def prompt(editor: Editor) -> None:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")

    async with connect(crow) as editor:
        with pytest.raises(RpcError) as raised:
            await prompt(editor)
    data: Any = raised.value.data
    assert f"misbehave in {__name__}, a function of the hook {name}, returned " in data["details"]
    assert advice in data["details"]


async def test_an_extension_that_says_no_to_a_failed_model_call_ends_the_turn():
    model = ScriptedModel([Reply(error=ModelError("Too long.", too_long=True)), Reply("Well.")])
    crow = Crow(model)
    crow.model_error(lambda session, error: False)
    crow.model_error(lambda session, error: True)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError):
            await editor.prompt(session.session_id, "hi")
    assert len(model.requests) == 1


async def test_unwind_runs_in_reverse_and_continues_after_a_failure(caplog: pytest.LogCaptureFixture):
    crow = Crow(ScriptedModel([Reply("Hello.")]))
    order: list[str] = []

    def failing(*_: object) -> None:
        raise ValueError("the disk of the diary is full")

    for hook in (crow.turn_end, crow.session_end):
        hook(make_note_taker(order, "registered first"))
        hook(failing)
        hook(make_note_taker(order, "registered last"))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "hi")
        assert answer.stop_reason == "end_turn"
        assert order == ["registered last", "registered first"]
    assert order == ["registered last", "registered first"] * 2
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", f"{failing!r} failed")
    ] * 2
    assert "ValueError: the disk of the diary is full" in caplog.text


async def test_error_for_people_is_logged_by_its_sentence_alone_at_the_end_of_a_turn(
    caplog: pytest.LogCaptureFixture,
):
    crow = Crow(ScriptedModel([Reply("Hello.")]))

    @crow.turn_end
    def store(*_: object) -> None:
        raise StoreError("The disk is full.")

    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session("/")).session_id, "hi")
    assert [(record.message, record.exc_info) for record in caplog.records] == [("The disk is full.", None)]


async def test_what_is_no_error_passes_through_the_hooks_that_end_something():
    """It is raised, not logged."""

    class Halt(BaseException): ...

    crow = Crow(ScriptedModel([]))

    @crow.app_end
    def halt() -> None:
        raise Halt

    with pytest.raises(Halt):
        await crow.shut_down()


@pytest.mark.parametrize("moment", sorted(name for name, hook in vars(Hooks).items() if isinstance(hook, Hook)))
async def test_registration_is_refused_after_the_first_session_has_opened(moment: str):
    crow = Crow(ScriptedModel([]))
    async with connect(crow) as editor:
        await editor.new_session("/")
        with pytest.raises(RuntimeError, match="before the first session opens"):
            getattr(crow, moment)(make_note_taker([], moment))


async def test_two_apps_in_one_process_do_not_share_their_hooks():
    first, second = (Crow(ScriptedModel([Reply("Hello.")])) for _ in range(2))
    heard: list[str] = []
    first.turn_end(make_note_taker(heard, "first"))
    async with connect(first), connect(second) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
    assert heard == []


@pytest.mark.parametrize("moment", TURN_HOOKS)
async def test_an_exception_in_a_hook_ends_the_turn_with_an_error_and_the_next_prompt_works(moment: str):
    model = ScriptedModel(lambda request: Reply("Done.") if request["messages"][-1]["role"] == "tool" else USE_ECHO)
    crow = crow_with(model)
    broken = True

    def fail() -> None:
        if broken:
            raise ValueError(f"{moment} tripped over a cable")

    join(crow, moment, fail)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as caught:
            await editor.prompt(session.session_id, "go")
        assert caught.value.data == {"details": f"{moment} tripped over a cable"}
        assert all(states[-1] in ("completed", "failed") for states in editor.calls().values())
        broken = False
        answer = await editor.prompt(session.session_id, "again")
    assert answer.stop_reason == "end_turn"
    for request in model.requests:
        assert_valid(request)


@pytest.mark.parametrize("moment", TURN_HOOKS)
async def test_any_hook_of_a_turn_can_end_it_with_end_turn(moment: str):
    model = ScriptedModel(lambda request: Reply("Done.") if request["messages"][-1]["role"] == "tool" else USE_ECHO)
    crow = crow_with(model)
    enough = True
    outcomes: list[object] = []

    def end() -> None:
        if enough:
            raise EndTurn("refusal", "That is enough.")

    join(crow, moment, end)
    crow.turn_end(lambda session, outcome: outcomes.append(outcome))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        answer = await editor.prompt(session.session_id, "go")
        assert answer.stop_reason == "refusal"
        assert editor.text.endswith("That is enough.")
        assert outcomes == ["refusal"]
        enough = False
        answer = await editor.prompt(session.session_id, "again")
    assert answer.stop_reason == "end_turn"
    for request in model.requests:
        assert_valid(request)


async def test_turn_end_receives_the_outcome_of_the_turn():
    model = ScriptedModel([Reply("Hello."), Reply("Hel", error=ValueError("cut"))])
    crow = Crow(model)
    outcomes: list[object] = []
    crow.turn_end(lambda session, outcome: outcomes.append(outcome))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "one")
        with pytest.raises(RpcError):
            await editor.prompt(session.session_id, "two")
    assert outcomes[0] == "end_turn"
    assert isinstance(outcomes[1], ValueError)


async def test_after_model_is_called_when_the_tool_calls_are_answered():
    model = ScriptedModel([USE_ECHO, Reply("Done.")])
    crow = crow_with(model)
    logs: list[list[str | None]] = []

    @crow.after_model
    def look(session: Session, model_call: ModelCall) -> None:
        logs.append([entry.get("role") for entry in session.log if "role" in entry])

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    assert logs == [["user", "assistant", "tool"], ["user", "assistant", "tool", "assistant"]]


async def test_the_model_is_asked_while_the_message_hooks_still_run():
    asked_for_one = asyncio.Event()

    def script(request: dict[str, Any]) -> Reply:
        asked_for_one.set()
        return Reply("Hello.")

    crow = Crow(ScriptedModel(script))

    @crow.message
    async def slow(session: Session, entry: Message) -> None:
        if entry.get("role") == "user":
            await asked_for_one.wait()

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
    assert editor.text == "Hello."


async def test_updates_wait_until_the_entries_before_them_are_written():
    """The hooks of one entry run after those of the entry before, and updates are sent after both."""
    crow = crow_with(ScriptedModel([USE_ECHO, Reply("Done.")]))
    waiting: asyncio.Queue[tuple[Message, asyncio.Event]] = asyncio.Queue()
    writing = 0

    @crow.message
    async def write(session: Session, entry: Message) -> None:
        nonlocal writing
        assert writing == 0, "two entries are written at once"
        writing += 1
        release = asyncio.Event()
        waiting.put_nowait((entry, release))
        await release.wait()
        writing -= 1

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        shown_before: dict[str, int] = {}
        while not turn.done():
            getting = asyncio.ensure_future(waiting.get())
            await asyncio.wait([turn, getting], return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                break
            entry, release = getting.result()
            await wait_all_tasks_blocked()
            name = entry.get("role") or entry.get("crow", {})["kind"]
            shown_before.setdefault(name, count_updates(editor))
            release.set()
        await turn
        roles = [entry.get("role") or entry.get("crow", {})["kind"] for entry in only_session(crow).log]
    assert roles == ["tools", "user", "render", "assistant", "tool", "assistant"]
    chunks = len("Looking.") // 4
    # Neither the first text before the user's words, nor the call before the reply, nor its end before its answer.
    assert shown_before["user"] == shown_before["render"] == 0
    assert shown_before["assistant"] == chunks
    assert shown_before["tool"] == chunks + 2  # pending, in progress


def count_updates(editor: Editor) -> int:
    """Count the text fragments and the states of tool calls that were sent."""
    return len([*editor.of(AgentMessageChunk), *editor.of(schema.ToolCall), *editor.of(ToolCallUpdate)])


async def test_a_turn_fails_if_an_entry_cannot_be_written_even_at_its_end():
    """Also if the first entry that cannot be written is appended in `turn_end`."""
    crow = Crow(ScriptedModel([Reply("Hello."), Reply("Welcome back.")]))
    broken = True

    @crow.message
    async def write(session: Session, entry: Message) -> None:
        if broken and entry.get("role") == "assistant":
            raise OSError("no space left")

    @crow.turn_end
    async def last_word(session: Session, outcome: object) -> None:
        await session.say("Bye.")

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as caught:
            await editor.prompt(session.session_id, "hi")
        assert caught.value.data == {"details": "no space left"}
        broken = False
        answer = await editor.prompt(session.session_id, "again")
    assert answer.stop_reason == "end_turn"


async def test_entries_after_a_failed_write_are_still_passed_to_the_hooks():
    """A store can write them later."""
    crow = Crow(ScriptedModel([Reply("Hello.")]))
    seen: list[str] = []

    @crow.message
    async def write(session: Session, entry: Message) -> None:
        seen.append(entry.get("role") or entry.get("crow", {})["kind"])
        if seen[-1] == "user":
            raise OSError("no space left")

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError):
            await editor.prompt(session.session_id, "hi")
        assert seen == [entry.get("role") or entry.get("crow", {})["kind"] for entry in only_session(crow).log]
    assert seen[:2] == ["user", "render"]


async def test_a_session_that_a_hook_refuses_leaves_nothing_behind():
    crow = Crow(ScriptedModel([]))
    ended: list[str] = []

    @crow.session_start
    def refuse(session: Session) -> None:
        raise ValueError("the archive is closed")

    crow.session_end(lambda session: ended.append(session.id))
    async with connect(crow) as editor:
        with pytest.raises(RpcError) as caught:
            await editor.new_session("/")
        assert caught.value.data == {"details": "the archive is closed"}
        assert crow.sessions == {}
        assert len(ended) == 1


async def test_a_hook_that_fails_for_one_tool_call_ends_the_others_and_all_are_answered():
    """Calls that run are interrupted, calls that have ended keep their results, and the client sees each end."""
    one: Use = {"name": "demo_echo", "arguments": {"text": "as asked"}}
    two: Use = {"name": "demo_wait", "arguments": {"text": "for ever"}}
    model = ScriptedModel([Reply(tool_calls=[one, two, one]), Reply("Done.")])
    server, waiting, never = FastMCP("demo"), asyncio.Event(), asyncio.Event()

    @server.tool
    def echo(text: str) -> str:
        return text

    @server.tool
    async def wait(text: str) -> None:
        waiting.set()
        await never.wait()

    crow = Crow(model, servers=[Server("demo", lambda: server, shared=True)])
    seen: list[str] = []

    @crow.after_tool
    async def trip(result: ToolResult, session: Session, tool_call: ToolCall) -> None:
        await waiting.wait()
        seen.append(tool_call.id)
        if len(seen) == 2:
            raise ValueError("tripped over a cable")

    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError, match="Internal error"):
            await editor.prompt(session.session_id, "go")
        assert sorted(states[-1] for states in editor.calls().values()) == ["completed", "failed", "failed"]
        await editor.prompt(session.session_id, "again")
    assert_valid(model.requests[1])
    said = [message["content"] for message in model.requests[1]["messages"] if message["role"] == "tool"]
    assert sorted(said) == sorted(["as asked", INTERRUPTED, INTERRUPTED])


@pytest.mark.parametrize("fails", ["decision", "tool"])
async def test_tool_calls_end_on_the_client_even_if_writing_fails(fails: str):
    """A decision that needs nobody is written with the reply; without it, the calls are neither shown nor run."""
    model = ScriptedModel([Reply(tool_calls=[USE_ECHO.tool_calls[0]] * 3), Reply("Done.")])
    crow = crow_with(model).use(permissions, mode="yolo")
    broken = True

    @crow.message
    async def write(session: Session, entry: Message) -> None:
        await asyncio.sleep(0)
        if broken and fails in (entry.get("role"), entry.get("crow", {}).get("kind")):
            raise OSError("no space left")

    ran: list[str] = []
    crow.after_tool(lambda result, session, tool_call: ran.append(tool_call.id))
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError) as caught:
            await editor.prompt(session.session_id, "go")
        assert caught.value.data == {"details": "no space left"}
        if fails == "decision":
            assert editor.calls() == {}
            assert ran == []
        else:
            assert [(states[0], states[-1]) for states in editor.calls().values()] == [("pending", "failed")] * 3
        broken = False
        await editor.prompt(session.session_id, "again")
    assert_valid(model.requests[1])


class DraftStore(MemoryStore):
    """A store that keeps the drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts: asyncio.Queue[Message] = asyncio.Queue()

    async def write_draft(self, session: Session, reply: Message) -> None:
        self.drafts.put_nowait(reply)


async def test_a_streaming_reply_is_drafted_under_its_final_id():
    """Text that was shown is drafted soon, even if no more text arrives for a long time."""
    crow = Crow(ScriptedModel([Reply("Half a sent", reasoning="Hm.", hang=True)]))
    crow.store = store = DraftStore()
    drafts = store.drafts
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "hi"))
        while (draft := await drafts.get()).get("content") != "Half a sent":
            pass  # a part of the reply, on a busy machine
        await editor.cancel(session.session_id)
        await turn
        kept = only_session(crow).log[-1]
        assert drafts.empty()  # no draft follows once the reply is in the log
    assert (draft.get("reasoning_content"), draft.get("content")) == ("Hm.", "Half a sent")
    assert draft.get("crow", {})["id"] == kept.get("crow", {})["id"]
    assert kept.get("content") == "Half a sent"


async def test_text_that_was_shown_is_drafted_after_a_fifth_of_a_second(monkeypatch: pytest.MonkeyPatch):
    """By the event loop's clock, which the test puts forward."""
    crow = Crow(ScriptedModel([Reply("Half a sent", hang=True)]))
    crow.store = store = DraftStore()
    loop, ahead = asyncio.get_running_loop(), 0.0
    read_clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: read_clock() + ahead)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "hi"))
        await editor.until(lambda editor: editor.text == "Half a sent")
        ahead = 0.2
        for _ in range(10):
            await asyncio.sleep(0)
        drafts = [store.drafts.get_nowait() for _ in range(store.drafts.qsize())]
        assert "".join(str(draft.get("content")) for draft in drafts) == "Half a sent"
        await editor.cancel(session.session_id)
        await turn


async def test_a_fast_reply_needs_no_draft(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_module, "DRAFT_INTERVAL", 3600)  # the reply comes before that
    crow = Crow(ScriptedModel([Reply("All of it.")]))
    crow.store = store = DraftStore()
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hi")
    assert store.drafts.empty()


async def test_model_call_is_called_when_a_request_is_sent_and_when_it_has_ended():
    """With its exact body, between the entries it was made of and its reply; also if it fails."""
    told: list[Any] = []
    async with ScriptedServer([Reply("Hello."), Failure(400, "no")]) as server:
        crow = Crow(ChatModel(name="m", base_url=server.url, parameters={"temperature": 0}))

        @crow.message
        def entry(session: Session, entry: Message) -> None:
            told.append(entry.get("role") or entry.get("crow", {})["kind"])

        @crow.model_call
        def call(session: Session, model_call: ModelCall) -> None:
            told.append(("ended" if model_call.ended else "sent", bool(model_call.error)))
            assert server.bodies == [] or encode_json(model_call.sent) == server.bodies[-1]

        async with connect(crow) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "hi")
            with pytest.raises(RpcError):
                await editor.prompt(session.session_id, "and?")
    first = ["user", "render", ("sent", False), "assistant", ("ended", False)]
    assert told == [*first, "user", ("sent", False), ("ended", True)]


async def test_a_sent_request_is_not_reported_as_ended_to_a_hook_that_runs_after_a_slow_one():
    """Else a function that counts the ended calls counts a quick one twice."""
    ended: list[bool] = []
    async with ScriptedServer([Reply(tool_calls=[{"name": "none", "arguments": {}}]), Reply("Done.")]) as server:
        crow = Crow(ChatModel(name="m", base_url=server.url))

        @crow.model_call
        async def write_slowly(session: Session, model_call: ModelCall) -> None:
            while not ended and not any(entry.get("role") == "assistant" for entry in session.log):
                await asyncio.sleep(0.01)

        crow.model_call(lambda session, model_call: ended.append(bool(model_call.ended)))
        async with connect(crow) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "hi")
    assert ended == [False, True] * 2


async def test_parallel_tool_calls_are_written_as_they_end():
    """A call that the client saw completed is in the log, whatever happens to the other."""
    release = asyncio.Event()
    server = FastMCP("demo")

    @server.tool
    async def slow() -> str:
        await release.wait()
        return "slow"

    @server.tool
    def quick() -> str:
        return "quick"

    uses: list[Use] = [{"name": "demo_slow", "arguments": {}}, {"name": "demo_quick", "arguments": {}}]
    model = ScriptedModel([Reply(tool_calls=uses), Reply("Done.")])
    crow = Crow(model, servers=[Server("demo", lambda: server, shared=True)])
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        turn = asyncio.ensure_future(editor.prompt(session.session_id, "go"))
        await editor.until(lambda editor: "completed" in editor.calls().get("call_1_1", []))
        assert only_session(crow).log[-1].get("content") == "quick"
        release.set()
        await turn
    assert [message["content"] for message in model.requests[1]["messages"][-2:]] == ["slow", "quick"]
