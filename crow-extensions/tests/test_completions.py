"""Tests of completions: arguments of prompts and URIs of resources, offered by the MCP servers that have them."""

from typing import Any

import pytest
from crow_core.acp.complete_method import COMPLETE_METHOD, Completion, can_complete, read_completions
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import AvailableCommandsUpdate
from crow_core.app import Crow
from crow_core.mcp.argument_values import find_variable
from crow_core.mcp.server import Server
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_extensions.commands import commands
from crow_extensions.completions import completions
from crow_extensions.mcp import mcp
from crow_extensions.resources import resources
from fastmcp import FastMCP
from mcp_types import PromptReference

pytestmark = pytest.mark.anyio

BIRDS = ["crow", "crane", "heron", "great tit"]


def aviary(asked: list[Any] | None = None) -> FastMCP:
    """Make a server that completes; it appends to `asked` what it is asked."""
    server = FastMCP("birds")
    server.resource("birds://readme", name="readme", description="About the birds")(lambda: "Read me.")

    @server.prompt
    def describe(bird: str, language: str = "English") -> str:
        return f"Describe the {bird} in {language}."

    @server.resource("bird://{bird}/{season}")
    def bird(bird: str, season: str) -> str:
        return f"{bird} in {season}"

    @server.completion
    def complete(reference: Any, argument: Any, context: Any) -> list[str]:
        if asked is not None:
            asked.append((reference, argument.name, argument.value, (context and context.arguments) or {}))
        if argument.name == "season":
            return ["spring", "winter"]
        if argument.value == "broken":
            raise ValueError("no such thing")
        return [each for each in BIRDS if each.startswith(argument.value)]

    return server


async def typed(editor: Editor, id: str, text: str) -> list[tuple[str, int]]:
    """Return the completions of a text: what each inserts, and how many characters it replaces."""
    answer = await editor.request(COMPLETE_METHOD, {"sessionId": id, "text": text})
    return [(one.text, one.replaces) for one in read_completions(answer, text)]


def app(*servers: Server) -> Crow:
    model = ScriptedModel(lambda request: Reply("Hello."))
    return Crow(model, servers=servers).use(commands).use(mcp).use(resources).use(completions)


def server(fastmcp: FastMCP, **options: Any) -> Server:
    return Server("birds", lambda: fastmcp, shared=True, **options)


def has_prompt(update: AvailableCommandsUpdate) -> bool:
    return any(command.name == "birds:describe" for command in update.available_commands)


async def open_session(editor: Editor) -> str:
    session = await editor.new_session("/")
    await editor.prompt(session.session_id, "hello")
    await editor.until(lambda editor: any(map(has_prompt, editor.of(AvailableCommandsUpdate))))
    return session.session_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/birds:describe ", [("crow", 0), ("crane", 0), ("heron", 0), ("'great tit'", 0)]),
        ("/birds:describe cr", [("crow", 2), ("crane", 2)]),
        ("/birds:describe bird=he", [("heron", 2)]),
        ("/birds:describe crow her", [("heron", 3)]),
        ("/birds:describe crow English more", []),
        ("/birds:describe broken", []),
        ("/unknown cr", []),
        ("look at @bi", [("@birds:", 3)]),
        ("look at @birds:", [("birds://readme", 0), ("bird://", 0)]),
        ("look at @birds:READ", [("birds://readme", 4)]),
        ("look at @birds:bird://cr", [("bird://crow", 9), ("bird://crane", 9)]),
        ("look at @birds:bird://crow/", [("bird://crow/spring", 12), ("bird://crow/winter", 12)]),
        ("look at @nobody:x", []),
        ("a.b@birds", []),
    ],
)
async def test_text_is_completed_by_the_server_that_knows_it(text: str, expected: list[tuple[str, int]]):
    async with connect(app(server(aviary()))) as editor:
        assert await typed(editor, await open_session(editor), text) == expected


async def test_server_is_told_the_arguments_before():
    asked: list[Any] = []
    async with connect(app(server(aviary(asked)))) as editor:
        await typed(editor, await open_session(editor), "/birds:describe crow Ger")
    assert asked == [(PromptReference(name="describe"), "language", "Ger", {"bird": "crow"})]


def describe(bird: str) -> str:
    return f"Describe the {bird}."


async def test_server_without_completions_is_not_asked():
    silent = FastMCP("birds")
    silent.prompt(describe)
    async with connect(app(server(silent))) as editor:
        assert await typed(editor, await open_session(editor), "/birds:describe cr") == []


async def test_secrets_and_control_characters_of_a_server_are_not_offered():
    evil = FastMCP("birds")
    evil.prompt(describe)

    @evil.completion
    def complete(reference: Any, argument: Any, context: Any) -> list[str]:
        return ["key-1234567", "two\nlines", "\x1b[2J", "x" * 501, "crow"]

    async with connect(app(server(evil, secrets={"key-1234567"}))) as editor:
        assert await typed(editor, await open_session(editor), "/birds:describe ") == [("crow", 0)]


async def test_text_has_to_be_a_string():
    async with connect(app()) as editor:
        session = await editor.new_session("/")
        with pytest.raises(RpcError, match="text"):
            await editor.request(COMPLETE_METHOD, {"sessionId": session.session_id, "text": 5})


def test_client_leaves_out_what_cannot_be_inserted():
    answer = {
        "completions": [
            {"text": "fine", "replaces": 2, "more": 1},
            {"text": "\x1b[2J", "replaces": 0},
            {"text": "too far", "replaces": 9},
            {"text": "back", "replaces": -1},
        ],
        "unknown": True,
    }
    assert read_completions(answer, "four") == [Completion("fine", 2)]
    assert read_completions("nonsense", "four") == []
    assert can_complete({"methods": [COMPLETE_METHOD]})
    assert not can_complete({"methods": COMPLETE_METHOD})


PLACES: list[tuple[str, str, tuple[str, str, dict[str, str]] | None]] = [
    ("a://{x}", "a://", ("x", "", {})),
    ("a://{+path}", "a://b/c", ("path", "b/c", {})),
    ("a://{x}/{y}", "a://b", ("x", "b", {})),
    ("a://{x}/{y}.txt", "a://b/c", ("y", "c", {"x": "b"})),
    ("a://{x}", "b://c", None),
    ("a://{?x,y}", "a://b", None),
    ("a://fixed", "a://fixed", None),
]


@pytest.mark.parametrize(("template", "typed", "expected"), PLACES)
def test_variable_of_a_template_is_found_by_its_place(template: str, typed: str, expected: Any):
    assert find_variable(template, typed) == expected
