"""The extensions for endpoints: resuming cut answers, reasoning effort, tokens, cost, and the cached prefix."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import stamina
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    AgentMessageChunk,
    ClientCapabilities,
    ClientSessionCapabilities,
    ConfigOptionUpdate,
    Cost,
    NoticeCapabilities,
    NoticeUpdate,
    SelectConfigOption,
    ToolCall,
    UsageUpdate,
)
from crow_core.app import Crow
from crow_core.mcp.toolbox import Server
from crow_core.messages.message import Message
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import ModelRequest, Prices
from crow_core.models.quirks import Quirks
from crow_core.session.session import Session
from crow_core.testing import Editor, Failure, Raw, Reply, ScriptedModel, ScriptedServer, connect
from crow_extensions.broken_replies import REQUEST, broken_replies
from crow_extensions.commands import commands
from crow_extensions.empty_replies import empty_replies
from crow_extensions.printed_calls import printed_calls
from crow_extensions.reasoning_effort import reasoning_effort
from crow_extensions.usage import usage
from fastmcp import FastMCP

pytestmark = pytest.mark.anyio

NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))
TOOLS = FastMCP("demo")


@TOOLS.tool
def add(a: int, b: int) -> int:
    return a + b


def demo() -> Server:
    return Server("demo", lambda: TOOLS, shared=True)


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    with stamina.set_testing(True, attempts=100, cap=True):
        yield


def notices(editor: Editor) -> list[str]:
    return [notice.title for notice in editor.of(NoticeUpdate) if isinstance(notice.title, str)]


def log_of(crow: Crow) -> list[Message]:
    (session,) = crow.sessions.values()
    return [
        {key: value for key, value in entry.items() if key != "crow"}  # type: ignore[misc]
        for entry in session.log
        if "role" in entry
    ]


# Resuming.

CUT = ConnectionError("cut")


async def test_cut_answer_is_resumed_and_no_text_is_repeated() -> None:
    async with ScriptedServer([Reply("It will be ", error=CUT), Reply("sunny.")]) as server:
        crow = Crow(ChatModel(name="m", base_url=server.url)).use(broken_replies).use(empty_replies)
        async with connect(crow, capabilities=NOTICES) as editor:
            session = await editor.new_session("/")
            answer = await editor.prompt(session.session_id, "The weather?")
            assert answer.stop_reason == "end_turn"
            assert editor.text == "It will be sunny."
            assert log_of(crow) == [
                {"role": "user", "content": "The weather?"},
                {"role": "assistant", "content": "It will be "},
                {"role": "user", "content": REQUEST},
                {"role": "assistant", "content": "sunny."},
            ]
            (notice,) = notices(editor)
            assert notice.startswith(f"{server.url} broke off (")
            assert notice.endswith("). If that goes on, look into the server's log. Asking the model to go on.")
            assert len({chunk.message_id for chunk in editor.of(AgentMessageChunk)}) == 2
    assert server.requests[1]["messages"][1:] == [
        {"role": "user", "content": "The weather?"},
        {"role": "assistant", "content": "It will be "},
        {"role": "user", "content": REQUEST},
    ]


@pytest.mark.parametrize("reason", ["error", "abort", "insufficient_system_resource"])
async def test_answer_whose_finish_reason_says_that_it_failed_is_resumed(reason: str) -> None:
    """Its calls are not run; an answer without text is asked for again."""
    calls: list[Any] = [{"name": "demo_add", "arguments": {"a": 1, "b": 2}}]
    answers = [Reply(finish_reason=reason), Reply("It ", tool_calls=calls, finish_reason=reason), Reply("rains.")]
    async with ScriptedServer(answers) as server:
        crow = Crow(ChatModel(name="m", base_url=server.url), servers=[demo()]).use(broken_replies)
        async with connect(crow, capabilities=NOTICES) as editor:
            session = await editor.new_session("/")
            answer = await editor.prompt(session.session_id, "The weather?")
            assert (answer.stop_reason, editor.text) == ("end_turn", "It rains.")
            said = f"{server.url} broke off its answer ({reason}). Try again, or choose another model. "
            assert notices(editor) == [said + "Asking again now.", said + "Asking the model to go on."]
            assert [entry for entry in log_of(crow) if entry.get("tool_calls") or entry.get("role") == "tool"] == []
    assert server.bodies[0] == server.bodies[1]


@pytest.mark.parametrize("reason", ["model_length", "MAX_TOKENS"])
async def test_answer_that_fills_the_window_ends_the_turn_with_max_tokens(reason: str) -> None:
    server = ScriptedServer([Reply("It ", finish_reason=reason)])
    async with server, connect(Crow(ChatModel(name="m", base_url=server.url))) as editor:
        session = await editor.new_session("/")
        assert (await editor.prompt(session.session_id, "The weather?")).stop_reason == "max_tokens"


async def test_unknown_finish_reason_is_shown() -> None:
    async with ScriptedServer([Reply("It rains.", finish_reason="eternity")]) as server:
        model = ChatModel(name="m", base_url=server.url)
        async with connect(Crow(model), capabilities=NOTICES) as editor:
            session = await editor.new_session("/")
            assert (await editor.prompt(session.session_id, "The weather?")).stop_reason == "end_turn"
            assert notices(editor) == [f"{server.url} ended its answer for the reason 'eternity'; it may be cut short."]


@pytest.mark.parametrize(
    "odd", [True, "many", ["many"], {"prompt_tokens": True, "completion_tokens": "7"}, {"a": [[]]}]
)
async def test_usage_of_another_form_does_not_end_a_turn(odd: Any) -> None:
    events: list[Any] = [
        {"choices": [{"delta": {"content": "It rains."}}], "usage": odd, "timings": odd},
        {"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": {"cache_n": odd}},
        {"choices": [], "usage": odd},
    ]
    sent = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    async with ScriptedServer([Raw(sent), Reply("Yes.")]) as server:
        prices = Prices(input=1, output=1)
        crow = Crow(ChatModel(name="m", base_url=server.url, prices=prices)).use(usage)
        async with connect(crow) as editor:
            session = await editor.new_session("/")
            for _ in range(2):
                assert (await editor.prompt(session.session_id, "The weather?")).stop_reason == "end_turn"
            assert editor.text == "It rains.Yes."


async def test_key_that_the_endpoint_quotes_in_mid_answer_is_neither_shown_nor_stored() -> None:
    key = "sk-c4n4ry/Q+x9=Zr"
    half = b'data: {"choices": [{"delta": {"content": "It will be "}}]}\n\n'
    error = f'event: error\ndata: {{"message": "overloaded for {key}"}}\n\n'.encode()
    async with ScriptedServer([Raw([half, error]), Reply("sunny.")]) as server:
        crow = Crow(ChatModel(name="m", base_url=server.url, api_key=key)).use(broken_replies)
        async with connect(crow, capabilities=NOTICES) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "The weather?")
            assert editor.text == "It will be sunny."
            (notice,) = notices(editor)
            assert "reported an error: overloaded for [secret]. " in notice
            assert key not in repr(editor.updates) + repr(log_of(crow))


async def test_answer_is_resumed_at_most_twice_before_the_error_ends_the_turn() -> None:
    broken = [Reply(f"{n} ", error=CUT) for n in range(3)]
    async with ScriptedServer([*broken, Reply("4 ", error=CUT), Reply("5")]) as server:
        crow = Crow(ChatModel(name="m", base_url=server.url)).use(broken_replies)
        async with connect(crow) as editor:
            session = await editor.new_session("/")
            with pytest.raises(RpcError) as caught:
                await editor.prompt(session.session_id, "go")
            assert "broke off" in caught.value.data["details"]
            assert [m["content"] for m in log_of(crow) if m["role"] == "assistant"] == ["0 ", "1 ", "2 "]
            answer = await editor.prompt(session.session_id, "again")
            assert answer.stop_reason == "end_turn"
            assert log_of(crow)[-1]["content"] == "5"
    assert len(server.requests) == 5


async def test_tool_calls_of_a_cut_answer_are_not_run() -> None:
    half = Reply("I add. ", tool_calls=[{"name": "demo_add", "arguments": {"a": 1, "b": 1}}], error=CUT)
    whole = Reply("", tool_calls=[{"name": "demo_add", "arguments": {"a": 2, "b": 3}}])
    async with ScriptedServer([half, whole, Reply("Five.")]) as server:
        crow = Crow(ChatModel(name="m", base_url=server.url), servers=[demo()]).use(broken_replies)
        async with connect(crow) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "2 + 3?")
        assert [call.raw_input for call in editor.of(ToolCall)] == [{"a": 2, "b": 3}]
        assert editor.text == "I add. Five."
    assert "tool_calls" not in server.requests[1]["messages"][2]


# Reasoning effort.


def thinking(url: str, parameter: str, **more: Any) -> ChatModel:
    return ChatModel(name="m", base_url=url, quirks=Quirks(effort=parameter, **more))


def levels(options: Any) -> dict[str, tuple[str, list[str]]]:
    return {
        option.id: (option.current_value, [entry.value for entry in option.options])
        for option in options
        if isinstance(option, SelectConfigOption) and option.category == "thought_level"
    }


@pytest.mark.parametrize(
    ("parameter", "sent"),
    [("reasoning_effort", {"reasoning_effort": "high"}), ("reasoning.effort", {"reasoning": {"effort": "high"}})],
)
async def test_effort_is_sent_under_the_endpoints_parameter(parameter: str, sent: dict[str, Any]) -> None:
    async with (
        ScriptedServer(lambda request: Reply("Hi")) as server,
        connect(Crow(thinking(server.url, parameter)).use(reasoning_effort)) as editor,
    ):
        session = await editor.new_session("/")
        assert levels(session.config_options) == {"thought_level": ("default", ["default", "low", "medium", "high"])}
        await editor.prompt(session.session_id, "hello")
        response = await editor.set_option(session.session_id, "thought_level", "high")
        assert levels(response.config_options)["thought_level"][0] == "high"
        await editor.prompt(session.session_id, "think")
    first, second = server.requests
    assert not first.keys() & {"reasoning", "reasoning_effort"}
    assert {key: second[key] for key in sent} == sent
    assert list(second)[-1] == "messages"


async def test_efforts_are_offered_only_for_models_that_have_them() -> None:
    async with ScriptedServer(lambda request: Reply("Hi")) as server:
        models = {
            "plain": ChatModel(name="plain", base_url=server.url),
            "thinker": thinking(server.url, "reasoning_effort", efforts=("minimal", "high")),
        }
        async with connect(Crow(models).use(commands).use(reasoning_effort)) as editor:
            session = await editor.new_session("/")
            assert levels(session.config_options) == {}
            await editor.prompt(session.session_id, "/model thinker")
            (update,) = editor.of(ConfigOptionUpdate)
            assert levels(update.config_options) == {"thought_level": ("default", ["default", "minimal", "high"])}
            await editor.set_option(session.session_id, "thought_level", "minimal")
            await editor.prompt(session.session_id, "hello")
            await editor.prompt(session.session_id, "/model plain")
            await editor.prompt(session.session_id, "hello")
    assert [request.get("reasoning_effort") for request in server.requests] == ["minimal", None]


async def test_refused_effort_is_not_offered_again() -> None:
    def script(request: ModelRequest) -> Reply | Failure:
        refusal = {"error": {"message": "Unsupported parameter: 'reasoning_effort' is not supported with this model."}}
        return Failure(400, refusal) if "reasoning_effort" in request else Reply("Hi")

    async with ScriptedServer(script) as server:
        crow = Crow(thinking(server.url, "reasoning_effort")).use(reasoning_effort)
        async with connect(crow, capabilities=NOTICES) as editor:
            session = await editor.new_session("/")
            await editor.set_option(session.session_id, "thought_level", "high")
            await editor.prompt(session.session_id, "hello")
            assert "does not take reasoning_effort" in notices(editor)[0]
            again = await editor.new_session("/")
            assert levels(again.config_options) == {}


# Tokens, cost, prefix.


@pytest.mark.parametrize(
    "cached",
    [
        {"prompt_tokens_details": {"cached_tokens": 750}},
        {"prompt_cache_hit_tokens": 750, "prompt_cache_miss_tokens": 250},
        {"cached_tokens": 750},
        {"cache_read_input_tokens": 750, "prompt_tokens_details": None},
    ],
    ids=["OpenAI", "DeepSeek", "Moonshot", "Anthropic behind a gateway"],
)
async def test_cached_tokens_are_counted_and_cost_less_under_all_their_keys(cached: dict[str, Any]) -> None:
    counts = {"prompt_tokens": 1000, "completion_tokens": 100, **cached}
    async with ScriptedServer(lambda request: Reply("Hi", usage=counts)) as server:
        model = ChatModel(name="m", base_url=server.url, prices=Prices(input=4.0, output=10.0, cached=0.4))
        async with connect(Crow(model).use(commands).use(usage)) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "hello")
            (update,) = editor.of(UsageUpdate)
            assert isinstance(update.cost, Cost)
            assert (round(update.cost.amount, 6), update.cost.currency) == (0.0023, "USD")
            await editor.prompt(session.session_id, "/usage")
    assert "1,000 tokens in (750 from the server's cache, 75%), 100 out." in editor.text
    assert "Cost: 0.0023 USD." in editor.text


async def test_cached_tokens_of_llama_cpp_are_read_from_its_timings() -> None:
    chunk = b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\n'
    last = b'data: {"choices": [], "usage": {"prompt_tokens": 10}, "timings": {"cache_n": 8, "prompt_n": 2}}\n\n'
    async with ScriptedServer([Raw([chunk, last, b"data: [DONE]\n\n"])]) as server:
        model = ChatModel(name="m", base_url=server.url)
        async with connect(Crow(model).use(commands).use(usage)) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "hello")
            await editor.prompt(session.session_id, "/usage")
    assert "10 tokens in (8 from the server's cache, 80%)" in editor.text


async def test_without_prices_no_cost_is_reported() -> None:
    async with connect(Crow(ScriptedModel([Reply("Hi")])).use(commands).use(usage)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "hello")
        assert not isinstance(editor.of(UsageUpdate)[0].cost, Cost)
        await editor.prompt(session.session_id, "/usage")
    assert "Cost" not in editor.text


async def test_usage_says_that_the_prefix_is_unchanged() -> None:
    model = ScriptedModel(lambda request: Reply("Hi"))
    async with connect(Crow(model).use(commands).use(usage)) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "one")
        await editor.prompt(session.session_id, "/usage")
        assert "last request" not in editor.text
        await editor.prompt(session.session_id, "two")
        await editor.prompt(session.session_id, "/usage")
    assert "The last request began like the one before it" in editor.text


@pytest.mark.parametrize("changed", ["message", "tools"])
async def test_usage_names_the_change_of_the_prefix(changed: str) -> None:
    def spoil(crow: Crow) -> None:
        @crow.before_model
        def change(request: ModelRequest, session: Session) -> ModelRequest:
            volatile = len(model.requests)
            if changed == "tools":
                tool = {"type": "function", "function": {"name": f"f{volatile}", "parameters": {"type": "object"}}}
                return {"tools": [tool], **request}
            first, second, *rest = request["messages"]
            return {**request, "messages": [first, {**second, "content": f"at {volatile}"}, *rest]}

    model = ScriptedModel(lambda request: Reply("Hi"))
    async with connect(Crow(model).use(spoil).use(commands).use(usage)) as editor:
        session = await editor.new_session("/")
        for prompt in ("one", "two", "three", "/usage"):
            await editor.prompt(session.session_id, prompt)
    where = "message 2 of 4" if changed == "message" else "its tools"
    assert f"The last request departed from the one before it at {where}." in editor.text


# Calls printed as text.

PRINTED = [
    '[TOOL_CALLS][{"name": "demo_add", "arguments": {"a": 1, "b": 2}}]',
    'I add.\n<tool_call>\n{"name": "demo_add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "<function=demo_add>\n<parameter=a>\n1\n</parameter>\n</function>",
    '```\n<tool_call>{"name": "demo_add"}</tool_call>\n```',
    '<|python_tag|>{"name": "demo_add", "parameters": {"a": 1}}',
]


@pytest.mark.parametrize("text", PRINTED)
async def test_tool_call_printed_as_text_is_reported_once_with_the_missing_flag(text: str) -> None:
    model = ScriptedModel([Reply(text), Reply(text)])
    crow = Crow(model, servers=[demo()]).use(printed_calls)
    async with connect(crow, capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "1 + 2?")
        await editor.prompt(session.session_id, "1 + 2?")
        assert editor.of(ToolCall) == []
        (notice,) = notices(editor)
    assert "--jinja" in notice
    assert "--enable-auto-tool-choice" in notice
    assert "--tool-call-parser" in notice


@pytest.mark.parametrize("text", ["Such models say `<tool_call>` first.", "Fine.", "if a <function=b> c"])
async def test_text_about_tool_calls_is_not_reported(text: str) -> None:
    crow = Crow(ScriptedModel([Reply(text)]), servers=[demo()]).use(printed_calls)
    async with connect(crow, capabilities=NOTICES) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "Explain.")
        assert notices(editor) == []
