"""Test sessions longer than the window, with a model that refuses requests that are too long."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from crow_compact.extension import compact
from crow_core.acp.connection import RpcError
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.mcp.server import Server
from crow_core.messages.message import marker_kind
from crow_core.session.prompts import Prompt
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.commands import commands
from fastmcp import FastMCP
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

WINDOW = 16_000
TURNS = 200
LONG_TURN = 120
"""The number of the turn that makes 60 tool calls."""

Request = dict[str, Any]

FILES = FastMCP("files")


@FILES.tool
def look(number: int) -> str:
    return f"File {number}.\n" + f"line of file {number}\n" * 300


def tokens(request: Request) -> int:
    return len(json.dumps([request["messages"], request.get("tools")])) // 4


def text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def is_compaction(request: Request) -> bool:
    return "Write a summary that you will go on from" in text(request["messages"][-1])


class Worker:
    """A script that reads a file each turn. Its summaries repeat the facts in the request, so unseen facts are lost."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self, request: Request) -> Reply:
        assert_valid(request)
        if tokens(request) > WINDOW:
            return Reply(error=ModelError("The context length is exceeded.", too_long=True))
        if is_compaction(request):
            said = "\n".join(map(text, request["messages"]))
            facts = sorted(set(re.findall(r"The word for \w+ is \w+\.", said)))
            return Reply(" ".join(["What I remember:", *facts, "We have looked at files."]))
        last = request["messages"][-1]
        asked = 60 if f"Turn {LONG_TURN}." in text(request["messages"][-1]) else 1
        if last["role"] == "user":
            self.looks = asked
        if self.looks:
            self.looks -= 1
            return Reply(tool_calls=[{"name": "files_look", "arguments": {"number": self.looks}}])
        return Reply("Seen.")


def assert_valid(request: Request) -> None:
    """Check that roles alternate, that each tool call is answered right after it, and that no reply is empty."""
    waiting: list[str] = []
    before = "system"
    for message in request["messages"][1:]:
        role = message["role"]
        if role == "tool":
            assert message["tool_call_id"] == waiting.pop(0)
        else:
            assert not waiting
            assert role != before or role == "assistant"
        if role == "assistant":
            waiting = [call["id"] for call in message.get("tool_calls", [])]
            assert waiting or message["content"]
        before = role
    assert not waiting
    assert before in ("user", "tool")


def goes_on(before: Request, after: Request) -> bool:
    """Return whether a request begins with the messages of the one before it, except its last, which may have grown."""
    return after["messages"][: len(before["messages"]) - 1] == before["messages"][:-1]


async def test_session_of_200_turns_fits_a_small_window_and_keeps_its_facts():
    model = ScriptedModel(Worker(), window=WINDOW)
    crow = Crow(model, servers=[Server("files", lambda: FILES, shared=True)])
    crow.use(commands).use(compact)
    planted = {3: "red is rouge", 40: "blue is bleu", 90: "green is vert"}
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        for turn in range(TURNS):
            fact = f" The word for {planted[turn]}." if turn in planted else ""
            answer = await editor.prompt(session.session_id, f"Turn {turn}.{fact} " + "Look at the next file. " * 10)
            assert answer.stop_reason == "end_turn"
        (log,) = (open.log for open in crow.sessions.values())
    breaks = [entry.get("crow", {}) for entry in log if marker_kind(entry) in ("shrink", "compaction")]
    summaries = [request for request in model.requests if is_compaction(request)]
    asked = [request for request in model.requests if not is_compaction(request)]

    assert len(asked) == 2 * TURNS + 59, "nothing was asked twice"
    assert max(map(tokens, model.requests)) <= WINDOW, "nothing was refused"
    assert all(notes["after"] < notes["before"] for notes in breaks)
    departures = sum(not goes_on(*pair) for pair in pairwise(asked))
    assert departures == len(breaks), "between compactions a request begins like the one before"
    assert {notes["kind"] for notes in breaks} == {"shrink", "compaction"}
    at = [model.requests.index(request) for request in summaries]
    assert all(goes_on(model.requests[n - 1], model.requests[n]) for n in at), "a summary is asked on the same prefix"
    assert all(fact in str(asked[-1]["messages"]) for fact in planted.values())
    assert "Turn 0." in text(asked[-1]["messages"][1]), "the first words stay"
    looked = sum(entry.get("role") == "tool" for entry in log)
    assert looked == TURNS + 59, "the log has everything"


TURN = st.tuples(st.integers(1, 4_000), st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=2), max_size=3))
"""The characters of a prompt, and for each of its replies the lines that its tool calls read."""
SUMMARIES = [
    Reply("All went well."),
    Reply(""),
    Reply("Let me look.", tool_calls=[{"name": "files_look", "arguments": {"number": 1}}]),
    Reply("It is long. " * 100),
    Reply("Half", finish_reason="length"),
]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(TURN, min_size=1, max_size=6),
    st.sampled_from([1_500, 3_000, 6_000]),
    st.lists(st.sampled_from(SUMMARIES), min_size=1, max_size=4),
    st.booleans(),
)
async def test_every_request_is_valid_and_every_prompt_that_fits_is_answered(
    turns: list[tuple[int, list[list[int]]]], window: int, summaries: list[Reply], counts: bool
):
    steps: list[list[int]] = []
    said: list[str] = []
    server = FastMCP("files")

    @server.tool
    def look(number: int) -> str:
        return "a line that was looked at\n" * number

    def speak(request: Request) -> Reply:
        assert_valid(request)
        if tokens(request) > window:
            return Reply(error=ModelError("The context length is exceeded.", too_long=True))
        if is_compaction(request):
            summaries.append(summaries.pop(0))
            return summaries[-1]
        calls: list[Use] = [{"name": "files_look", "arguments": {"number": n}} for n in (steps.pop(0) if steps else [])]
        return Reply("" if calls else "Well.", tool_calls=calls, usage=None if counts else {})

    model = ScriptedModel(speak, window=window)
    crow = Crow(model, servers=[Server("files", lambda: server, shared=True)], system=Prompt("system", "You are crow."))
    crow.use(compact)
    async with connect(crow) as editor:
        session = await editor.new_session("/")
        for size, looks in turns:
            steps[:] = [list(step) for step in looks]
            try:
                assert (await editor.prompt(session.session_id, "x" * size)).stop_reason == "end_turn"
            except RpcError as error:
                said.append(str(error.data))
        (log,) = (open.log for open in crow.sessions.values())
    assert all("context length" in words for words in said), "nothing else goes wrong"
    assert sum(entry.get("role") == "user" for entry in log) == len(turns), "the log has everything"
