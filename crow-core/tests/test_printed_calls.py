"""Calls that a server sends as text: in which forms they are run, and which texts are answers."""

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import pytest
from crow_core.acp.schema import (
    ClientCapabilities,
    ClientSessionCapabilities,
    NoticeCapabilities,
    NoticeUpdate,
    ToolCall,
)
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.messages.passes import view
from crow_core.models.chat_model import ChatModel
from crow_core.models.held_text import PrintedCallReader
from crow_core.models.printed import MAX_CALLS, find_printed_calls, get_tools
from crow_core.models.quirks import Quirks, find_quirks
from crow_core.models.reply import ReplyBuilder
from crow_core.testing import Reply, ScriptedModel, ScriptedServer, connect
from crow_extensions.printed_calls import printed_calls
from fastmcp import FastMCP
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT.parent / "shared" / "recordings"
NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "unit": {"type": "string"}}, "required": ["city"]},
    "write": {"properties": {"path": {}, "text": {}}, "required": ["path", "text"]},
    "list": {"properties": {"path": {"type": "string"}}},
    "shell": {"properties": {"command": {}}},
}
PARIS: list[Any] = [("get_weather", {"city": "Paris"})]
TWO: list[Any] = [*PARIS, ("get_weather", {"city": "Oslo"})]
NAMED = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
OTHER = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
OBJECT = '{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}'

FORMS: dict[str, tuple[str, list[Any]]] = {
    "Qwen2.5-Coder: bare JSON": (NAMED, PARIS),
    "Qwen2.5-Coder: a fence": (f"```json\n{NAMED}\n```", PARIS),
    "Qwen2.5-Coder: tools": (f"<tools>\n{NAMED}\n</tools>", PARIS),
    "Qwen2.5-Coder: the braces of its template": (
        '<tool_call>\n{{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>',
        PARIS,
    ),
    "Qwen2.5-Coder: OpenAI's object": (OBJECT, PARIS),
    "Qwen2.5-Coder: OpenAI's object in a fence": (f"```json\n{OBJECT}\n```", PARIS),
    "Qwen2.5-Coder by codex: a command as a list": (
        '{"name": "shell", "arguments": {"command": ["ls"]}}',
        [("shell", {"command": ["ls"]})],
    ),
    "Qwen2.5, Hermes": (f"<tool_call>\n{NAMED}\n</tool_call>", PARIS),
    "Hermes: several": (f"<tool_call>\n{NAMED}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>", TWO),
    "Hermes: no end": (f"<tool_call>\n{NAMED}", PARIS),
    "Hermes: after prose": (f"I look it up.\n<tool_call>\n{NAMED}\n</tool_call>", PARIS),
    "Hermes: behind prose": (f"I look it up.<tool_call>{NAMED}</tool_call>", PARIS),
    "Qwen3-Coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        PARIS,
    ),
    "Qwen3-Coder: a file": (
        "<tool_call>\n<function=write>\n<parameter=path>\na.html\n</parameter>\n<parameter=text>\n<p>\n</parameter>x"
        "\n</parameter>\n</function>\n</tool_call>",
        [("write", {"path": "a.html", "text": "<p>\n</parameter>x"})],
    ),
    "Llama 3.1: a function": ('<function=get_weather>{"city": "Paris"}</function>', PARIS),
    "Llama 3.1: parameters": ('{"name": "get_weather", "parameters": {"city": "Paris"}}', PARIS),
    "Llama 3.1: with a token": ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', PARIS),
    "Llama 3.1: several": (f"<|python_tag|>{NAMED}; {OTHER}", TWO),
    "Llama 3.1: a built-in tool": ('<|python_tag|>get_weather.call(city="Paris")', PARIS),
    "Llama 3.2, Llama 4: Python": ('[get_weather(city="Paris"), get_weather(city="Oslo")]', TWO),
    "Llama 4: Python between tokens": ("<|python_start|>[get_weather(city='Paris')]<|python_end|>", PARIS),
    "Llama 4: without values": ("[list()]", [("list", {})]),
    "Mistral: a list": (f"[TOOL_CALLS] [{NAMED}, {OTHER}]", TWO),
    "Mistral: with an id": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]',
        PARIS,
    ),
    "Mistral v11": (
        '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_weather{"city": "Oslo"}',
        TWO,
    ),
    "Mistral v13": ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', PARIS),
    "Mistral, xLAM: behind prose": (f"I'll check the weather for you.[TOOL_CALLS][{NAMED}]", PARIS),
    "xLAM": (f"[{NAMED}, {OTHER}]", TWO),
    "xLAM: a fence": (f"I'll help you with that.\n```json\n[{NAMED}]\n```", PARIS),
    "DeepSeek V2.5, V3, R1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n'
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        TWO,
    ),
    "DeepSeek V3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        PARIS,
    ),
    "Granite 3": (f"<|tool_call|>[{NAMED}]", PARIS),
    "Granite 3.1": (f"<tool_call>[{NAMED}]", PARIS),
    "Granite 20B": (f"<function_call> {NAMED}", PARIS),
    "Phi-4-mini": (f"<|tool_call|>[{NAMED}]<|/tool_call|>", PARIS),
    "Jamba": (f"<tool_calls>[\n  {NAMED}\n]</tool_calls>", PARIS),
    "Nemotron": (f"<TOOLCALL>[{NAMED}]</TOOLCALL>", PARIS),
    "LM Studio": (f"[TOOL_REQUEST]{NAMED}[END_TOOL_REQUEST]", PARIS),
    "Command R": (
        'Action: ```json\n[{"tool_name": "get_weather", "parameters": {"city": "Paris"}}]\n```'.replace(
            ": ```", ":\n```"
        ),
        PARIS,
    ),
    "Command R7B": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}]'
        "<|END_ACTION|>",
        PARIS,
    ),
    "Kimi K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        PARIS,
    ),
    "GLM-4.5": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        PARIS,
    ),
    "MiniMax M2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        PARIS,
    ),
    "Seed-OSS": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        PARIS,
    ),
    "LFM2": ('<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>', PARIS),
    "LFM2: behind prose": ('Let me check that.<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>', PARIS),
    "Gemma": ('```tool_code\nprint(default_api.get_weather(city="Paris"))\n```', PARIS),
    "OLMo 3": ('<function_calls>get_weather(city="Paris")</function_calls>', PARIS),
    "gpt-oss": (
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        PARIS,
    ),
    "arguments as text": (r'{"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}', PARIS),
    "a table of calls": (f'{{"tool_calls": [{OBJECT}]}}', PARIS),
    "quotes of Python": ("{'name': 'get_weather', 'arguments': {'city': 'Paris'}}", PARIS),
    "line breaks in a string": (
        '{"name": "write", "arguments": {"path": "a.py", "text": "x = 1\ny = 2\n"}}',
        [("write", {"path": "a.py", "text": "x = 1\ny = 2\n"})],
    ),
    "a call inside a file": (
        json.dumps({"name": "write", "arguments": {"path": "a.json", "text": NAMED}}),
        [("write", {"path": "a.json", "text": NAMED})],
    ),
    "a fence inside a file": (
        "```json\n" + json.dumps({"name": "write", "arguments": {"path": "a", "text": "```python\nx\n```"}}) + "\n```",
        [("write", {"path": "a", "text": "```python\nx\n```"})],
    ),
    "the same call thirty times": ("\n".join([NAMED] * 30), PARIS),
    "prose around": (f"I'll look up the weather.\n\n```json\n{NAMED}\n```\n\nThen I tell you.", PARIS),
}
"""Replies of models, by model and form, as their documentation, chat templates and users' reports have them."""

ANSWERS: dict[str, str] = {
    "prose": "It is sunny in Paris.",
    "an example": f"For example, it looks like this:\n\n```json\n{NAMED}\n```",
    "what a model does": f"The model answers with a call:\n\n```json\n{NAMED}\n```",
    "what comes then": f"```json\n{NAMED}\n```\n\nThe server then runs it and sends back the result.",
    "among other blocks": f"```json\n{NAMED}\n```\n\n```python\nprint(1)\n```",
    "behind another block": f"First:\n\n```python\nprint(1)\n```\n\nThen:\n\n```json\n{NAMED}\n```",
    "in a list": f"- first\n- second\n\n{NAMED}",
    "below a heading": f"# Weather\n\n{NAMED}",
    "a block of another language": f"```python\n{NAMED}\n```",
    "Python": '```python\nget_weather(city="Paris")\n```',
    "Python without marks": 'get_weather(city="Paris")',
    "inside a sentence": f"You can say `{NAMED}` here.",
    "a mark inside a sentence": "Such models say `<tool_call>` first.",
    "a definition": json.dumps(
        {"name": "get_weather", "description": "The weather", "parameters": {"type": "object", "properties": {}}}
    ),
    "a definition by OpenAI": json.dumps(
        {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {}}}
    ),
    "data": '{"name": "Paris", "country": "France"}',
    "data with a list": '[{"name": "get_weather"}, {"name": "list"}]',
    "data with a tool's name": '{"name": "list", "value": [1, 2]}',
    "a list": "[1, 2, 3]",
    "a link": "[list](list.md)",
    "HTML": "<div>\n<function>get_weather</function>\n</div>",
    "more after it": f"{NAMED}\n\n" + "It rains in Paris all day, so take an umbrella with you. " * 6,
    "long prose before": "I think about the weather, and about the world. " * 20 + f"\n\n{NAMED}",
    "German": f"Ein Beispiel:\n\n```json\n{NAMED}\n```",
    "YAML of a file": "```yaml\nname: get_weather\narguments: {city: Paris}\n```",
}

FAULTS: dict[str, tuple[str, str]] = {
    "half a call": (NAMED[:-8], "the call is not complete JSON"),
    "half a call in a fence": (f"```json\n{NAMED[:40]}\n```", "the call is not complete JSON"),
    "half XML": ("<function=get_weather>\n<parameter=city> Paris", "the call is incomplete"),
    "a comment": ('{"name": "get_weather", // the tool\n "arguments": {"city": "Paris"}}', "not complete JSON"),
    "a missing argument": ('{"name": "get_weather", "arguments": {}}', "get_weather needs 'city'"),
    "arguments that are text": ('{"name": "get_weather", "arguments": "Paris"}', "are not a JSON object"),
    "an unknown tool": ('<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "there is no tool 'fly'"),
    "too many calls": (
        "\n".join(json.dumps({"name": "list", "arguments": {"path": str(n)}}) for n in range(200)),
        f"these are over {MAX_CALLS} calls",
    ),
    "half Python": ('[get_weather(city="Paris"', "the call is incomplete, or not plain Python"),
}


@pytest.mark.parametrize("name", FORMS)
def test_reply_that_is_a_call_is_one(name: str):
    text, calls = FORMS[name]
    found = find_printed_calls(text, TOOLS)
    assert found
    assert (found.calls, found.fault) == (calls, "")


@pytest.mark.parametrize("name", ANSWERS)
def test_reply_that_is_an_answer_has_no_call(name: str):
    assert find_printed_calls(ANSWERS[name], TOOLS) is None


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_call_is_not_run_and_says_why(name: str):
    text, fault = FAULTS[name]
    found = find_printed_calls(text, TOOLS)
    assert found
    assert fault in found.fault


@pytest.mark.parametrize(
    "prompt",
    [
        "How do tool calls look?",
        f"Explain this: {NAMED}",
        "Show me how a model calls a tool.",
        "Give me an example of a function call as JSON.",
        [{"type": "text", "text": "What is <tool_call>?"}],
    ],
)
def test_answer_to_a_question_about_calls_has_none(prompt: Any):
    tools: list[Any] = [{"type": "function", "function": {"name": "list", "parameters": {}}}]
    messages: list[Any] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "Well."}]
    result = {"role": "user", "content": "<tool_response>\nDone.\n</tool_response>"}
    assert get_tools({"tools": tools, "messages": [*messages, result]}) == {}
    assert get_tools({"tools": tools, "messages": [*messages, {"role": "user", "content": "List it."}]}) != {}


def split_markdown(text: str) -> Iterator[str]:
    """Yield a text, its paragraphs and sections, its blocks of code, and the code alone."""
    yield text
    for pattern in (r"\n\n", r"\n#+ "):
        yield from re.split(pattern, text)
    yield from re.findall(r"^```.*?^```", text, re.M | re.S)
    yield from re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S)


def list_documentation() -> Iterator[str]:
    """Yield the texts of this repository's documentation and of installed packages on models and tools."""
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("crow-*/README.md")]:
        yield from split_markdown(path.read_text("utf-8"))
    for name in ("fastmcp", "mcp", "openai", "pydantic", "jinja2", "hypothesis", "httpx2", "rich", "click"):
        with suppress(PackageNotFoundError):
            yield from split_markdown(str(metadata(name).get_payload()))


def list_docstrings() -> Iterator[str]:
    """Yield the docstrings of crow's modules, classes and functions: explanations of code."""
    for path in ROOT.glob("crow-*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def list_replies() -> Iterator[str]:
    """Yield the recorded replies of models, with and without calls."""
    if RECORDINGS.is_dir():
        expected = json.loads((RECORDINGS / "expected.json").read_text("utf-8"))
        yield from (recording["content"] for recording in expected.values() if recording.get("content"))


EXPLANATIONS = (
    "For example, the model writes:\n\n{}",
    "Such models print calls, and the server has no parser for them:\n\n{}\n\nSo crow parses them.",
    "{}\n\nThe server then runs it and sends back the result.",
    "# Tool calls\n\n{}",
    "The syntax is as follows:\n\n{}\n\nNote that the arguments are a JSON object.",
    "- The form of Qwen:\n\n{}\n\n- The form of Llama is another one.",
    "You would get this output:\n\n{}",
    "```python\nprint('first')\n```\n\nThen:\n\n{}",
    "> {}",
    "In the documentation of the API it looks like this:\n\n{}",
    "An assistant would call the tool with these arguments:\n\n{}\n\nIt is only an illustration.",
    "Zum Beispiel:\n\n{}",
)
"""Frames in which a call is an illustration."""


def test_no_documentation_no_docstring_and_no_recorded_reply_is_a_call():
    names = "terminal file_editor grep glob tree fetch plan ask_user read write list search run replace view create"
    tools: dict[str, dict[str, Any]] = {name: {} for name in names.split()}
    texts = {text for text in (*list_documentation(), *list_docstrings(), *list_replies()) if text.strip()}
    assert len(texts) >= 5_000
    assert [text for text in texts if find_printed_calls(text, tools)] == []


def test_no_explanation_of_a_form_is_a_call():
    texts = [frame.format(form) for frame in EXPLANATIONS for form, _ in FORMS.values()]
    assert len(texts) > 600
    assert [text for text in texts if find_printed_calls(text, TOOLS)] == []


REQUEST: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in TOOLS.items()],
    "messages": [{"role": "user", "content": "The weather?"}],
}
TEXTS = [text for text, _ in FORMS.values()] + [*ANSWERS.values()] + [text for text, _ in FAULTS.values()]


def read_pieces(pieces: list[str]) -> tuple[str, Any, str]:
    """Return the content, the calls and the printed text of a reply that arrives in pieces."""
    reader, builder = PrintedCallReader(REQUEST), ReplyBuilder()
    for piece in pieces:
        for delta in reader.feed({"content": piece}):
            builder.add(delta)
    for delta in reader.finish():
        builder.add(delta)
    reply = builder.build()
    uses = [call["function"] for call in reply.get("tool_calls", [])]
    calls = [(use["name"], json.loads(use["arguments"])) for use in uses]
    content = reply.get("content") or ""
    assert isinstance(content, str)
    return content, calls, reply.get("crow", {}).get("printed", "")


@given(st.sampled_from(TEXTS), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_reply_is_read_alike_in_any_pieces_and_no_call_is_shown_as_text(text: str, lengths: list[int]):
    pieces, at = list[str](), 0
    while at < len(text):
        pieces.append(text[at : at + lengths[len(pieces) % len(lengths)]])
        at += len(pieces[-1])
    content, calls, printed = read_pieces(pieces)
    found = find_printed_calls(text, TOOLS)
    if found and not found.fault:
        assert (content, calls, printed) == (text[: found.start], found.calls, text)
    else:
        assert (content, calls, printed) == (text, [], "")


@given(
    st.lists(st.sampled_from([*"`~{}[]<>\n :.|", "tool", "```json\n", NAMED, "[TOOL_CALLS]", "list()", "<tool_call>"]))
)
def test_text_is_neither_lost_nor_doubled(pieces: list[str]):
    content, calls, printed = read_pieces(pieces)
    text = "".join(pieces)
    assert content == text if not calls else (printed == text and text.startswith(content))


def test_plain_text_is_shown_as_it_arrives():
    reader = PrintedCallReader(REQUEST)
    pieces = ("It ", "is `a`", " here.\n", "\n", "So.")
    shown = [delta.get("content") for piece in pieces for delta in reader.feed({"content": piece})]
    assert shown == ["It ", "is `a`", " here.\n", "\n", "So."]


def test_reply_that_was_cut_has_no_call():
    reader = PrintedCallReader(REQUEST)
    deltas = [*reader.feed({"content": NAMED}), *reader.feed({"finish_reason": "length"}), *reader.finish()]
    assert "".join(delta.get("content", "") for delta in deltas) == NAMED
    assert not any("tool_calls" in delta for delta in deltas)


@pytest.mark.parametrize(
    ("url", "runs"),
    [
        ("http://127.0.0.1:8080/v1", True),
        ("http://192.168.1.4:8000/v1", True),
        ("https://ollama.example.com:11434/v1", True),
        ("https://api.openai.com/v1", False),
        ("", False),
    ],
)
def test_printed_calls_run_by_default_on_private_networks(url: str, runs: bool):
    assert find_quirks(url, "m").printed_calls is runs
    assert find_quirks(url, "m", {"printed_calls": not runs}).printed_calls is not runs


SERVER = FastMCP("demo")


@SERVER.tool
def add(a: int, b: int) -> int:
    return a + b


def demo() -> Server:
    return Server("demo", lambda: SERVER, shared=True)


ADD = '```json\n{"name": "demo_add", "arguments": {"a": 1, "b": 2}}\n```'


@pytest.mark.anyio
async def test_printed_call_is_run_shown_and_stored_as_a_call_and_sent_back_as_it_was_written():
    async with ScriptedServer([Reply(f"I add.\n\n{ADD}"), Reply("3."), Reply("Yes.")]) as server:
        crow = Crow(ChatModel(name="m", base_url=server.url, quirks=find_quirks(server.url, "m")), servers=[demo()])
        async with connect(crow.use(printed_calls)) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "1 + 2?")
            await editor.prompt(session.session_id, "Sure?")
            (opened,) = crow.sessions.values()
            reply = next(entry for entry in opened.log if entry.get("tool_calls"))
    assert editor.text == "I add.\n\n3.Yes."
    assert [states[-1] for states in editor.calls().values()] == ["completed"]
    assert [call.raw_input for call in editor.of(ToolCall)] == [{"a": 1, "b": 2}]
    assert reply.get("content") == "I add.\n\n"
    assert reply.get("crow", {}).get("printed") == f"I add.\n\n{ADD}"
    sent: list[Any] = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": f"I add.\n\n{ADD}"},
        {"role": "user", "content": "<tool_response>\n3\n</tool_response>"},
    ]
    assert server.requests[1]["messages"][1:] == sent
    assert server.requests[2]["messages"][1:4] == sent


@pytest.mark.anyio
async def test_faulty_call_is_answered_with_one_sentence_at_most_twice_a_turn():
    half = '{"name": "demo_add", "arguments": {"a": 1,'
    async with ScriptedServer([Reply(half)] * 3) as server:
        model = ChatModel(name="m", base_url=server.url, quirks=Quirks(printed_calls=True))
        async with connect(Crow(model, servers=[demo()]).use(printed_calls), capabilities=NOTICES) as editor:
            session = await editor.new_session("/")
            answer = await editor.prompt(session.session_id, "1 + 2?")
    sentence = "Nothing was run: the call is not complete JSON. Write the whole call again, and nothing else."
    assert answer.stop_reason == "end_turn"
    assert [request["messages"][-1]["content"] for request in server.requests] == ["1 + 2?", sentence, sentence]
    assert [notice.title for notice in editor.of(NoticeUpdate)] == [
        f"The model printed a call that cannot be run. {sentence}"
    ] * 3
    assert editor.of(ToolCall) == []


@pytest.mark.anyio
async def test_connection_that_breaks_in_a_held_call_asks_again_and_shows_nothing():
    broken = Reply(ADD[:30], error=ConnectionError("cut"))
    async with ScriptedServer([broken, Reply("Three.")]) as server:
        model = ChatModel(name="m", base_url=server.url, quirks=Quirks(printed_calls=True))
        async with connect(Crow(model, servers=[demo()])) as editor:
            session = await editor.new_session("/")
            await editor.prompt(session.session_id, "1 + 2?")
    assert "demo_add" not in editor.text
    assert editor.text.endswith("Three.")


@pytest.mark.anyio
async def test_printed_calls_of_a_model_without_the_quirk_are_text():
    model = ScriptedModel([Reply(ADD)])
    async with connect(Crow(model, servers=[demo()])) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "1 + 2?")
    assert editor.text == ADD
    assert editor.of(ToolCall) == []


def test_view_sends_several_results_of_printed_calls_in_one_message():
    def use(id: str) -> Any:
        return {"id": id, "type": "function", "function": {"name": "list", "arguments": "{}"}}

    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    log: list[Any] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [use("a"), use("b")], "crow": {"id": "1", "printed": "list, list"}},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "one"}, image]},
        {"role": "user", "content": "Well?"},
    ]
    _, reply, results = [dict[str, Any](message) for message in view(log)]
    assert reply == {"role": "assistant", "content": "list, list"}
    texts = [part.get("text", "image") for part in results["content"]]
    assert "".join(texts) == "<tool_response>oneimage</tool_response><tool_response>\ntwo\n</tool_response>Well?"
