"""Typed results: the tool, the endpoint's own structured output, the types, and what does not fit."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar

import msgspec
import pydantic
import pytest
from crow_agent import Agent, OutputError, PromptFailed, tool
from crow_core.acp.schema import AgentMessageChunk
from crow_core.testing import Reply, ScriptedCall, ScriptedServer

Make = Callable[..., Agent]
T = TypeVar("T")


def call(name: str, arguments: Any) -> Reply:
    return Reply(tool_calls=[ScriptedCall(name=name, arguments=arguments)])


def give(arguments: Any) -> Reply:
    return call("give_result", arguments)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class City:
    name: str
    people: int
    colour: Colour = Colour.RED


@dataclass
class Node:
    name: str
    children: "list[Node]" = field(default_factory=list["Node"])


class Person(pydantic.BaseModel):
    name: str
    age: int
    friend: "Person | None" = None

    @pydantic.field_validator("age")
    @classmethod
    def check_age(cls, age: int) -> int:
        if age % 2:
            raise ValueError("the age must be even")
        return age


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Place(TypedDict):
    city: str
    at: tuple[float, float]


class Cat(msgspec.Struct, tag=True):
    lives: int


class Dog(msgspec.Struct, tag=True):
    tricks: list[str]


SCHEMA = {
    "type": "object",
    "properties": {"who": {"$ref": "#/$defs/Name"}},
    "required": ["who"],
    "additionalProperties": False,
    "$defs": {"Name": {"type": "string", "minLength": 2}},
}
CASES: list[tuple[Any, Any, Any]] = [
    (City, {"name": "Rome", "people": 3, "colour": "blue"}, City("Rome", 3, Colour.BLUE)),
    (Person, {"name": "Ann", "age": 40}, Person(name="Ann", age=40)),
    (Place, {"city": "Rome", "at": [41.9, 12.5]}, {"city": "Rome", "at": (41.9, 12.5)}),
    (Cat, {"type": "Cat", "lives": 9}, Cat(9)),
    (SCHEMA, {"who": "Ann"}, {"who": "Ann"}),
    ({"$ref": "#/$defs/N", "$defs": {"N": {"type": "integer"}}}, {"result": 4}, 4),
    ({"type": "array", "items": {"$ref": "#"}}, {"result": [[], [[]]]}, [[], [[]]]),
    ({}, {"result": {"any": None}}, {"any": None}),
    ({"type": "object", "additionalProperties": {"type": "string"}}, {"a_b": "", "aB": "x"}, {"a_b": "", "aB": "x"}),
    (int | None, {"result": None}, None),
    (Literal["yes", "no"], {"result": "yes"}, "yes"),
    (Colour, {"result": "red"}, Colour.RED),
    (list[City], {"result": [{"name": "Rome", "people": 3}]}, [City("Rome", 3)]),
    (list[Person], {"result": [{"name": "Ann", "age": 2}]}, [Person(name="Ann", age=2)]),
    (int, {"result": 5}, 5),
    (bool, {"result": True}, True),
    (dict[str, list[int]], {"a": [1], "b": []}, {"a": [1], "b": []}),
    (dict[int, str], {"1": "one"}, {1: "one"}),
    (City | int, {"result": 7}, 7),
    (City | None, {"result": {"name": "Rome", "people": 3}}, City("Rome", 3)),
    (Cat | Dog, {"result": {"type": "Dog", "tricks": ["sit"]}}, Dog(["sit"])),
    (datetime, {"result": "2026-01-02T03:04:05Z"}, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
    (Node, {"name": "a", "children": [{"name": "b", "children": []}]}, Node("a", [Node("b")])),
    (Page[int], {"items": [1, 2]}, Page[int](items=[1, 2])),
    (tuple[int, str], {"result": [1, "a"]}, (1, "a")),
    (str, {"result": "\ttab\r\n\x1b[31m \x9b \u202e"}, "\ttab\r\n\x1b[31m \x9b \u202e"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("wanted", "arguments", "value"), CASES, ids=lambda case: str(case)[:40])
def test_result_is_given_by_the_tool_and_has_the_type(
    make_agent: Make, wanted: Any, arguments: Any, value: Any
) -> None:
    async def main() -> None:
        async with make_agent(give(arguments)) as agent:
            result = await agent.prompt("Go.", output=wanted)
        assert result.output == value
        assert type(result.output) is type(value)
        parameters = agent.model.requests[0]["tools"][-1]["function"]["parameters"]
        assert parameters["type"] == "object"
        assert [call.status for call in result.tool_calls] == ["completed"]

    asyncio.run(main())


@pytest.mark.parametrize(("wanted", "arguments", "value"), CASES, ids=lambda case: str(case)[:40])
def test_result_may_be_written_as_text(make_agent: Make, wanted: Any, arguments: Any, value: Any) -> None:
    async def main() -> None:
        async with make_agent(Reply(f"Here it is:\n```json\n{json.dumps(arguments)}\n```\n")) as agent:
            assert (await agent.prompt("Go.", output=wanted)).output == value

    asyncio.run(main())


def test_call_that_does_not_fit_is_answered_with_each_fault_and_its_place(make_agent: Make) -> None:
    async def main() -> None:
        wrong = give({"result": [{"name": "Rome", "people": "many"}, {"people": 3}]})
        async with make_agent(wrong, give({"result": []})) as agent:
            assert (await agent.prompt("Go.", output=list[City])).output == []
        said = agent.model.requests[1]["messages"][-1]["content"]
        assert "[0].people: 'many' is not of type 'integer'" in said
        assert "[1]: 'name' is a required property" in said

    asyncio.run(main())


def test_result_that_never_fits_is_an_error_with_all_faults(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(give({}), give("[1]"), Reply("It is Rome."), give({"name": "Rome"})) as agent:
            with pytest.raises(OutputError, match="did not fit City in 3 attempts") as raised:
                await agent.prompt("Go.", output=City)
            assert len(agent.model.requests) == 3
            assert ["name" in raised.value.faults[0], "JSON" in raised.value.faults[1]] == [True, True]
            assert raised.value.faults[2] == "it is not JSON"

    asyncio.run(main())


@dataclass
class Room:
    beds: list[Annotated[int, pydantic.Field(ge=3)]]


@pytest.mark.parametrize("wanted", [Room, list[Room], dict[str, Room | None]])
def test_constraints_of_pydantic_inside_other_types_count(make_agent: Make, wanted: Any) -> None:
    def wrap(room: Any) -> Reply:
        return give(room if wanted is Room else {"result": [room]} if wanted == list[Room] else {"a": room})

    async def main() -> None:
        async with make_agent(wrap({"beds": [1]}), wrap({"beds": [3]})) as agent:
            result = await agent.prompt("Go.", output=wanted)
        assert "1 is less than the minimum of 3" in agent.model.requests[1]["messages"][-1]["content"]
        assert "Room(beds=[3])" in repr(result.output)

    asyncio.run(main())


def test_no_retries_means_one_attempt(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(give({}), give({"name": "Rome", "people": 3})) as agent:
            with pytest.raises(OutputError, match="in 1 attempt:"):
                await agent.prompt("Go.", output=City, retries=0)

    asyncio.run(main())


def test_validator_of_a_model_asks_again_with_its_words(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(give({"name": "Ann", "age": 3}), give({"name": "Ann", "age": 4})) as agent:
            result = await agent.prompt("Go.", output=Person)
        assert result.output == Person(name="Ann", age=4)
        (again,) = [m["content"] for m in agent.model.requests[1]["messages"][-1:]]
        assert "age: Value error, the age must be even" in again
        assert "give_result" in again
        assert agent.model.requests[0]["tools"] == agent.model.requests[1]["tools"]

    asyncio.run(main())


def test_validator_counts_as_an_attempt(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(*[give({"name": "Ann", "age": 3})] * 4) as agent:
            with pytest.raises(OutputError, match="in 2 attempts") as raised:
                await agent.prompt("Go.", output=Person, retries=1)
        assert len(agent.model.requests) == len(raised.value.faults) == 2

    asyncio.run(main())


def test_tool_stays_in_the_session_and_the_prefix_with_it(make_agent: Make) -> None:
    async def main() -> None:
        replies = [give({"name": "Rome", "people": 3}), give({}), Reply("Hello."), give({"name": "Oslo", "people": 1})]
        async with make_agent(*replies) as agent:
            session = await agent.session()
            await session.prompt("One.", output=City)
            assert (await session.prompt("Say hello.")).text == "Hello."
            assert (await session.prompt("Two.", output=City)).output.name == "Oslo"
        requests = agent.model.requests
        assert all(request["tools"] == requests[0]["tools"] for request in requests)
        assert requests[2]["messages"][-1]["content"].startswith("No result is asked for")
        for before, after in pairwise(requests):
            assert after["messages"][: len(before["messages"])] == before["messages"]

    asyncio.run(main())


def test_another_type_changes_the_tool(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("Hi."), give({"result": 1}), give({"result": [2]})) as agent:
            session = await agent.session()
            await session.prompt("Hello.")
            assert (await session.prompt("One.", output=int)).output == 1
            assert (await session.prompt("Two.", output=list[int])).output == [2]
        first, second, third = ([t["function"] for t in request["tools"]] for request in agent.model.requests)
        assert [t["name"] for t in first].count("give_result") == 0
        assert (second[:-1], third[:-1]) == (first, first)
        assert third[-1]["parameters"]["properties"]["result"]["type"] == "array"

    asyncio.run(main())


def test_stored_session_goes_on_with_its_tool(make_agent: Make) -> None:
    async def main() -> None:
        replies = [give({"result": 1}), give({"result": 2}), give({"result": 3}), Reply("Well.")]
        async with make_agent(*replies) as agent:
            id = (await agent.prompt("One.", output=int)).session_id
            session = await agent.session(id)
            assert (await session.prompt("Two.", output=int)).output == 2
            await session.close()
            session = await agent.session(id)
            assert (await session.prompt("Three.")).text == "Well."
        assert agent.model.requests[0]["tools"] == agent.model.requests[-1]["tools"]
        assert "No result is asked for" in agent.model.requests[-1]["messages"][-1]["content"]

    asyncio.run(main())


def test_function_of_the_same_name_keeps_it(make_agent: Make) -> None:
    @tool
    def give_result(text: str) -> str:
        """Publish a text."""
        return f"published {text}"

    async def main() -> None:
        first = give({"text": "a"})
        async with make_agent(first, call("give_result_2", {"result": 4}), tools=[give_result]) as agent:
            assert (await agent.prompt("Go.", output=int)).output == 4
        assert agent.model.requests[1]["messages"][-1]["content"] == "published a"

    asyncio.run(main())


def test_turn_that_is_cut_has_no_output(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("It is", finish_reason="length")) as agent:
            result = await agent.prompt("Go.", output=int)
        assert (result.text, result.stop_reason) == ("It is", "max_tokens")
        with pytest.raises(OutputError, match="'max_tokens'"):
            _ = result.output

    asyncio.run(main())


def test_command_gives_no_result(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(Reply("Hi."), give({"result": 1})) as agent:
            session = await agent.session()
            with pytest.raises(OutputError, match="There is no int: the turn ended without an answer"):
                await session.prompt("/help", output=int)
            assert (await session.prompt("Hello.")).text == "Hi."

    asyncio.run(main())


def test_undo_takes_the_request_for_a_result_with_the_turn(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(give({"result": 1}), Reply("Hi.")) as agent:
            session = await agent.session()
            await session.prompt("One.", output=int)
            await session.prompt("/undo yes")
            assert (await session.prompt("Hello.")).text == "Hi."
        _, user = agent.model.requests[-1]["messages"]
        assert user["content"] == "Hello."

    asyncio.run(main())


def test_schema_is_stored_with_the_message_and_the_title_is_the_user_s(make_agent: Make, home: Path) -> None:
    async def main() -> None:
        logs: list[Any] = []

        def keep(crow: Any) -> None:
            @crow.session_end
            def look(session: Any) -> None:
                logs.append((session.log.title, [*session.log]))

        async with make_agent(give({"result": 1}), extensions=[keep]) as agent:
            id = (await agent.prompt("Count the birds.", output=int)).session_id
            await (await agent.session(id)).close()
        (title, log), (_, restored) = logs
        assert title == "Count the birds."
        (user,) = [entry for entry in log if entry.get("role") == "user"]
        assert user["crow"]["output"] == {"schema": {"type": "integer"}, "retries": 2}
        assert restored == log

    asyncio.run(main())


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "'strin' is not valid"),
        ({"$ref": "#/$defs/Gone"}, "'#/\\$defs/Gone', which it does not have"),
        ({"$ref": "https://example.com/schema.json"}, "only references such as"),
        ({"$ref": "file:///etc/passwd"}, "only references such as"),
        ({"type": "string", "pattern": "("}, "is not a 'regex'"),
        ({"enum": ["x" * 70_000]}, "more than 64,000 bytes"),
        ({"enum": [object()]}, "it is not JSON"),
    ],
)
def test_unusable_schema_is_refused_before_any_model_call(make_agent: Make, schema: Any, reason: str) -> None:
    async def main() -> None:
        async with make_agent(Reply("Never.")) as agent:
            with pytest.raises(ValueError, match=f"The JSON schema of the output cannot be used: .*{reason}"):
                await agent.prompt("Go.", output=schema)
            with pytest.raises(ValueError, match="cannot be used"):
                await agent.map(["Go."], output=schema)
            assert agent.model.requests == []

    asyncio.run(main())


class Secret:
    pass


@pytest.mark.parametrize("wanted", [Secret, list[Secret], Secret(), 5, Callable[[int], int]])
def test_type_without_a_schema_is_refused_before_any_model_call(make_agent: Make, wanted: Any) -> None:
    async def main() -> None:
        async with make_agent(Reply("Never.")) as agent:
            with pytest.raises(TypeError, match="cannot be the type of an output: ") as raised:
                await agent.prompt("Go.", output=wanted)
            assert "\n" not in str(raised.value)
            assert agent.model.requests == []

    asyncio.run(main())


def test_stream_and_map_have_typed_results(make_agent: Make) -> None:
    def answer(request: Any) -> Reply:
        return Reply("Hm.", tool_calls=give({"result": len(request["messages"][1]["content"].split()[0])}).tool_calls)

    async def main() -> None:
        async with make_agent(answer) as agent:
            stream = agent.stream("abc", output=int)
            texts = [update.content.text async for update in stream if isinstance(update, AgentMessageChunk)]
            assert "".join(texts) == "Hm."
            assert stream.result is not None
            assert stream.result.output + 1 == 4
            results = await agent.map(["a", "ab"], output=int)
        assert [result.output for result in results] == [1, 2]

    asyncio.run(main())


def test_result_is_inferred(make_agent: Make) -> None:
    async def main() -> None:
        async with make_agent(give({"name": "Rome", "people": 3})) as agent:
            session = await agent.session()
            city: City = (await session.prompt("Go.", output=City)).output
        assert city.people + 1 == 4

    asyncio.run(main())


def test_extension_that_is_off_is_not_announced(make_agent: Make, home: Path) -> None:
    (home / "crow").mkdir()
    (home / "crow" / "config.toml").write_text("[extensions]\nstructured_output = false\n")

    async def main() -> None:
        async with make_agent(Reply("no"), Reply('{"result": 1}'), Reply("1")) as agent:
            assert (await agent.prompt("Go.", output=int)).output == 1
        assert "must fit this JSON schema" in agent.model.requests[0]["messages"][-1]["content"]

    asyncio.run(main())


def test_goal_looks_at_the_work_before_the_result_counts(make_agent: Make, home: Path, tmp_path: Path) -> None:
    (home / "crow").mkdir()
    (home / "crow" / "config.toml").write_text('[extensions.goal]\nevery_turn = true\nuntil = "test -e done"\n')

    def answer(request: Any) -> Reply:
        if len([m for m in request["messages"] if m["role"] == "assistant"]) == 1:
            (tmp_path / "done").touch()
            return give({"result": 2})
        return give({"result": 1})

    async def main() -> None:
        async with make_agent(answer) as agent:
            assert (await agent.prompt("Go.", output=int)).output == 2

    asyncio.run(main())


def test_subagent_gives_no_result_of_its_own(make_agent: Make, home: Path) -> None:
    (home / "crow").mkdir()
    (home / "crow" / "config.toml").write_text("[extensions]\nsubagents = {}\n")

    async def main() -> None:
        task = call("agent", {"description": "count", "prompt": "Count."})
        async with make_agent(task, give({"result": 1}), Reply("Five."), give({"result": 5})) as agent:
            assert (await agent.prompt("Go.", output=int)).output == 5
        assert "No result is asked for" in agent.model.requests[2]["messages"][-1]["content"]

    asyncio.run(main())


def test_secret_in_a_schema_is_masked(home: Path) -> None:
    key = "sk-1234567890abcdef"

    async def main() -> None:
        logs: list[Any] = []

        def keep(crow: Any) -> None:
            @crow.session_end
            def look(session: Any) -> None:
                logs.extend(session.log)

        async with ScriptedServer([Reply("{}"), give({"word": "x"})]) as server:
            configure(home, server.url, "off", f'api_key = "{key}"')
            schema = {"type": "object", "properties": {"word": {"type": "string", "description": f"not {key}"}}}
            async with make_configured(home, extensions=[keep]) as agent:
                await agent.prompt("Go.", output=schema)
        assert key not in json.dumps([logs, server.requests])

    asyncio.run(main())


# The endpoint's own structured output.


def configure(home: Path, url: str, quirk: str, *more: str) -> None:
    (home / "crow").mkdir(exist_ok=True)
    lines = [f'base_url = "{url}"', 'model = "scripted"', f'quirks = {{ structured_output = "{quirk}" }}', *more]
    (home / "crow" / "config.toml").write_text("\n".join(["[models.m]", *lines]))


def make_configured(home: Path, **options: Any) -> Agent:
    env = {"HOME": str(home), "CROW_HOME": str(home / "crow"), "PATH": "/usr/bin:/bin"}
    return Agent("m", env=env, cwd=home, **options)


@pytest.mark.parametrize(
    ("quirk", "tools", "constrained"),
    [("off", [], False), ("alone", [], True), ("alone", None, False), ("with_tools", None, True)],
)
def test_structured_output_of_the_endpoint_is_used_where_it_works(
    home: Path, quirk: str, tools: Any, constrained: bool
) -> None:
    async def main() -> None:
        async with ScriptedServer([Reply('{"result": [1]}')]) as server:
            configure(home, server.url, quirk)
            async with make_configured(home, tools=tools) as agent:
                assert (await agent.prompt("Go.", output=list[int])).output == [1]
        (request,) = server.requests
        names = [each["function"]["name"] for each in request.get("tools", ())]
        assert ("response_format" in request, "give_result" in names) == (constrained, not constrained)
        if constrained:
            form = request["response_format"]
            assert form["type"] == "json_schema"
            assert form["json_schema"]["schema"]["properties"]["result"]["type"] == "array"
            assert "must fit this JSON schema" in request["messages"][-1]["content"]

    asyncio.run(main())


def test_structured_output_holds_for_the_calls_of_the_turn_alone(home: Path) -> None:
    async def main() -> None:
        look = call("glob", {"pattern": "*.md"})
        async with ScriptedServer([look, Reply("[]"), Reply('{"result": 4}'), Reply("Hi.")]) as server:
            configure(home, server.url, "with_tools")
            async with make_configured(home) as agent:
                session = await agent.session()
                assert (await session.prompt("Go.", output=int)).output == 4
                assert (await session.prompt("Hello.")).text == "Hi."
        assert ["response_format" in request for request in server.requests] == [True, True, True, False]
        assert "is not of type 'integer'" in server.requests[2]["messages"][-1]["content"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "message",
    [
        "This response_format type is unavailable now",
        "Function calling with a response mime type: 'application/json' is unsupported",
        "json mode cannot be combined with tool/function calling",
        "'response_format.type' must be 'json_object' or 'text', json_schema is not supported",
    ],
)
def test_endpoint_that_refuses_a_schema_is_asked_by_text_then_by_the_tool(home: Path, message: str) -> None:
    from crow_core.testing import Failure

    def answer(request: Any) -> Any:
        if "response_format" in request:
            return Failure(400, {"error": {"message": message}})
        names = [each["function"]["name"] for each in request.get("tools", ())]
        return give({"result": 2}) if "give_result" in names else Reply('{"result": 1}')

    async def main() -> None:
        async with ScriptedServer(answer) as server:
            configure(home, server.url, "with_tools")
            async with make_configured(home) as agent:
                assert [r.output for r in await agent.map(["a", "b"], output=int, at_once=1)] == [1, 2]
        assert len(server.requests) == 3

    asyncio.run(main())


def test_summary_is_asked_for_as_text_and_the_result_still_fits(home: Path) -> None:
    def answer(request: Any) -> Reply:
        if "response_format" not in request:
            return Reply(
                "The user wants to count the birds on the roof, and has not said anything else until now. " * 3
            )
        asked = [m for m in request["messages"] if m["role"] == "user"]
        return Reply('{"result": 7}') if "[The summary ends here" in json.dumps(asked) else Reply("many birds " * 400)

    async def main() -> None:
        async with ScriptedServer(answer) as server:
            configure(home, server.url, "with_tools", "window = 100_000", "[extensions.compact]", "threshold = 4500")
            async with make_configured(home, tools=[]) as agent:
                assert (await agent.prompt("Count the birds.", output=int, retries=4)).output == 7
        assert ["response_format" in request for request in server.requests].count(False) == 1

    asyncio.run(main())


def test_refused_request_of_another_client_is_a_sentence(make_agent: Make) -> None:
    from crow_core.acp.schema import PromptRequest, TextBlock

    async def main() -> None:
        async with make_agent(Reply("Never.")) as agent:
            session = await agent.session()
            for wrong in (
                {"outputSchema": 5},
                {"outputSchema": {"type": 3}},
                {"outputSchema": {}, "outputRetries": "x"},
            ):
                with pytest.raises(PromptFailed, match=r"cannot be used|outputRetries"):
                    await agent.request(
                        "session/prompt",
                        PromptRequest(session_id=session.id, prompt=[TextBlock(text="Go.")], meta={"crow": wrong}),
                    )
            assert agent.model.requests == []

    asyncio.run(main())


@pytest.mark.anyio
async def test_typed_result_shows_its_value(make_agent: Any) -> None:
    given = Reply(tool_calls=[{"name": "give_result", "arguments": {"result": [1, 2]}}])
    async with make_agent(given) as agent:
        result = await agent.prompt("Count.", output=list[int])
    assert str(result) == "[1, 2]"
    assert result.to_markdown().startswith("```\n[1, 2]\n```")
