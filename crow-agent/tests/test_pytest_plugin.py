"""The pytest plugin, in runs of pytest inside of tests: scripts, assertions about tool calls, and cassettes."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from crow_agent import tool
from crow_agent.cassette import replace_in_pieces
from crow_agent.testing import CrowFixture, call, fits
from crow_core.testing import Failure, Raw, Reply, ScriptedServer
from hypothesis import given
from hypothesis import strategies as st

pytest_plugins = ("pytester",)

TOOL = '''
import asyncio
import pytest
import re
from pathlib import Path
from crow_agent import Agent, Budget, tool
from crow_agent.testing import call

@tool
async def population(city: str) -> int:
    """Say how many people live in a city."""
    return {"Rome": 2_750_000, "Paris": 2_100_000}[city]

@tool
async def write(path: str) -> str:
    """Write a file."""
    Path(path).write_text("done")
    return f"{path} is written"
'''
"""The begin of a user's test file."""


@pytest.fixture(scope="module", autouse=True)
def loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load what a run of pytest loads late. pytester drops modules that such a run has loaded, and their classes."""
    for module in ("crow_agent.cassette", "httpcore2"):
        import_module(module)

    @tool
    def ping() -> str:
        """Answer."""
        return "pong"

    crow = CrowFixture(tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b"))
    crow.model.plays(call("ping"), "1")
    assert crow.prompt("Go.", tools=[ping], output=int).output == 1
    crow.close()


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run pytest with a test file."""
    monkeypatch.setenv("HOME", str(pytester.path))
    for name in ("CROW_HOME", "CROW_MODEL", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(code: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=TOOL + code)
        return pytester.runpytest_inprocess("-p", "no:xdist", "-p", "no:cacheprovider", "-W", "error", *options)

    return run


@contextmanager
def serving(script: Any) -> Iterator[ScriptedServer]:
    """Serve a script in a thread of its own: a run of pytest blocks the test's."""
    server, started, ended = ScriptedServer(script), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with server:
            started.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loops[0].call_soon_threadsafe(ended.set)
        thread.join()


@pytest.fixture
def record(run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run pytest with a test file, and record its cassettes from a scripted endpoint."""

    def record(code: str, *replies: Any, script: Any = None) -> ScriptedServer:
        with serving(script or replies) as server:
            monkeypatch.setenv("OPENAI_BASE_URL", server.url)
            monkeypatch.setenv("OPENAI_API_KEY", "sk-4711-very-secret")
            monkeypatch.setenv("CROW_MODEL", "recorded")
            run(code, "--crow-record").assert_outcomes(passed=len(re.findall(r"^ *(?:async )?def test_", code, re.M)))
        for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "CROW_MODEL"):
            monkeypatch.delenv(name)
        return server

    return record


def test_script_plays_a_call_and_then_a_text(run: Any) -> None:
    run("""
def test_population(crow):
    crow.model.plays(call("population", city="Rome"), "2.75 million.")
    result = crow.prompt("How many people live in Rome?", tools=[population])
    assert result.text == "2.75 million."
    assert crow.called("population", city="Rome")
    assert crow.called("population", city="Rome")[0].result == "2750000"
    assert crow.no_tool("terminal")
    assert not crow.no_tool()
    assert result.cost is None or result.cost < 0.01
    assert crow.cost == 0
""").assert_outcomes(passed=1)


def test_example_of_the_readme_runs(pytester: pytest.Pytester, record: Any) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    examples = re.findall(r"^```py\n(.*?)^```", readme, re.M | re.S)
    script, cassette = (example for example in examples if "def test_" in example)
    record(f"{script}\n\n{cassette}", ROME, Reply("2.75 million."))
    pytester.runpytest_inprocess("-p", "no:xdist").assert_outcomes(passed=2)


def test_values_play_their_json(run: Any) -> None:
    run("""
from dataclasses import dataclass
from pydantic import BaseModel

@dataclass
class City:
    name: str

class Country(BaseModel):
    cities: list[str]

@pytest.mark.parametrize("value", [City("Rome"), Country(cities=["Rome"]), [1, 2], {"a": None}])
def test_value(crow, value):
    crow.model.plays(value)
    wanted = type(value) if not isinstance(value, (list, dict)) else {}
    assert crow.prompt("Rome?", output=wanted).output == value

def test_reply_with_text_and_two_calls(crow):
    crow.model.plays(["Let me look.", call("population", city="Rome"), call("population", city="Paris")], "Rome.")
    crow.prompt("Which is larger?", tools=[population])
    assert [made.arguments["city"] for made in crow.called("population")] == ["Rome", "Paris"]

def test_nothing_that_cannot_be_json(crow):
    with pytest.raises(TypeError, match="cannot play"):
        crow.model.plays(object())
""").assert_outcomes(passed=6)


def test_function_answers_every_request(run: Any) -> None:
    run("""
def test_map(crow):
    crow.model.answers(lambda request: request["messages"][-1]["content"].upper())

    async def main():
        async with crow.agent() as agent:
            return await agent.map(["a", "b", "c"])

    assert [result.output for result in crow.run(main())] == ["A", "B", "C"]
""").assert_outcomes(passed=1)


def test_failed_assertion_of_a_function_fails_the_test(run: Any) -> None:
    result = run("""
def test_request(crow):
    def answer(request):
        assert request["messages"] == "nothing"
    crow.model.plays(answer)
    crow.prompt("Hello")
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert request*messages*nothing*"])


def test_error_is_raised_by_the_prompt(run: Any) -> None:
    run("""
from crow_agent import PromptFailed

def test_busy(crow):
    crow.model.plays(RuntimeError("The endpoint is busy."))
    with pytest.raises(PromptFailed, match="is busy"):
        crow.prompt("Hello")
""").assert_outcomes(passed=1)


def test_missing_call_is_shown_beside_the_nearest(run: Any) -> None:
    result = run("""
def test_called(crow):
    crow.model.plays([call("population", city="Paris"), call("population", city="Rom")], "Many.")
    crow.prompt("Rome?", tools=[population])
    assert crow.called("population", city="Rome")
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *assert <population(city='Rome') was not called, but population(city='Rom')*>",
            "*- tool calls -*",
            "  1. population(city='Paris')",
            "  2. population(city='Rom')*",
            "- city = 'Rome'",
            "+ city = 'Rom'",
        ]
    )


def test_call_of_a_refused_tool_is_shown(run: Any) -> None:
    result = run("""
def test_none(crow):
    crow.model.plays(call("terminal", command="rm -r /"), "No.")
    result = crow.prompt("Clean up.")
    assert crow.called("terminal")[0].denied and result.denied
    assert crow.no_tool("terminal", command=re.compile("^rm"))
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *assert <terminal(command=matches '^rm') was called: terminal(*rm -r /*(denied)>"])


def test_answers_that_were_not_played_fail_the_test(run: Any) -> None:
    result = run("""
def test_unplayed(crow):
    crow.model.plays("One.", call("population", city="Rome"), "Two.")
    crow.prompt("Hello")
""")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["Model calls: 1. *never played:", "  population(city='Rome')", "  'Two.'"])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


def test_request_without_an_answer_fails_the_test_also_if_it_hides_the_error(run: Any) -> None:
    result = run("""
def test_hidden(crow):
    async def main():
        async with crow.agent() as agent:
            return await agent.map(["first"])
    crow.run(main())

def test_shown(crow):
    crow.prompt("second")
""")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*no answer for model call 1, after the user's message 'first'*"])
    result.stdout.fnmatch_lines([">*crow.prompt(*second*)", "E *no answer for model call 1, *'second'*"])


def test_failed_test_says_nothing_about_the_rest_of_its_script(run: Any) -> None:
    result = run("""
def test_it(crow):
    crow.model.plays("One.")
    assert 1 == 2
""")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*never played*")


def test_agent_of_a_module_is_used_by_several_tests(run: Any) -> None:
    run("""
AGENT = Agent("qwen3:8b", tools=[population], budget=Budget(requests=2), store="postgresql://nowhere/x", cwd="/")

async def ask() -> str:
    return (await AGENT.prompt("Rome?")).text

@pytest.mark.parametrize("number", [1, 2])
def test_ask(crow, number):
    crow.use(AGENT)
    crow.model.plays(call("population", city="Rome"), str(number))
    assert crow.run(ask()) == str(number)
    assert AGENT.budget.spent["requests"] == 2

def test_afterwards():
    assert AGENT.model == "qwen3:8b" and not AGENT.budget.spent

def test_other_program(crow):
    with pytest.raises(TypeError, match="another program"):
        crow.use(Agent.connect("opencode acp"))
""").assert_outcomes(passed=4)


def test_class_that_makes_agents_can_be_replaced(run: Any) -> None:
    run("""
async def summarize(text):
    async with Agent("gpt-5", tools=[]) as agent:
        return (await agent.prompt(text)).text

def test_summarize(crow, monkeypatch):
    monkeypatch.setattr("test_it.Agent", crow.agent)
    crow.model.plays("Short.")
    assert crow.run(summarize("Long.")) == "Short."
    assert crow.model.requests[0]["messages"][-1]["content"] == "Long."
""").assert_outcomes(passed=1)


def test_async_test_awaits_the_agent(run: Any) -> None:
    run("""
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_async(crow):
    crow.model.plays("Four.", "Five.")
    async with crow.agent() as agent:
        assert (await agent.prompt("2 + 2?")).text == "Four."
    left_open = crow.agent()
    assert (await left_open.prompt("2 + 3?")).text == "Five."
    with pytest.raises(RuntimeError, match="await crow.agent"):
        crow.prompt("Hello")
""").assert_outcomes(passed=1)


def test_agent_sees_nothing_of_the_users_configuration(run: Any, pytester: pytest.Pytester) -> None:
    (pytester.mkdir(".config") / "crow").mkdir()
    (pytester.path / ".config" / "crow" / "config.toml").write_text('[permissions]\ndeny = ["terminal"]\n')
    run("""
def test_folders(crow, tmp_path):
    (tmp_path / "a.txt").write_text("one")
    crow.model.plays(call("terminal", command="cat a.txt"), "Done.")
    crow.prompt("Look.", permissions="allow")
    (made,) = crow.called("terminal")
    assert not made.denied and "one" in made.result
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
""").assert_outcomes(passed=1)


def test_start_of_pytest_loads_nothing_of_crow() -> None:
    code = "import sys, crow_agent.pytest_plugin; print([m for m in sys.modules if m.startswith(('crow', 'msgspec'))])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert eval(shown) == ["crow_agent", "crow_agent.pytest_plugin"]


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        *[(..., None), (int, 3), (re.compile("b"), "abc"), (lambda n: n > 2, 3), ({"a": [..., 2]}, {"a": [1, 2]})],
        *[(Path("/a"), "/a"), (None, None), (1.0, 1)],
    ],
)
def test_argument_fits(wanted: Any, value: Any) -> None:
    assert fits(wanted, value)


@pytest.mark.parametrize(
    ("wanted", "value"),
    [(int, "3"), (re.compile("b"), 7), (lambda n: n > 2, 1), ({"a": 1}, {"a": 1, "b": 2}), ([1], [1, 2]), ("a", None)],
)
def test_argument_does_not_fit(wanted: Any, value: Any) -> None:
    assert not fits(wanted, value)


CITY = """
@pytest.mark.crow_cassette("city")
def test_city(crow):
    result = crow.prompt("How many people live in Rome?", tools=[population])
    assert result.text == "2.75 million."
    assert crow.called("population", city="Rome")
"""
ROME = Reply(tool_calls=[{"name": "population", "arguments": {"city": "Rome"}}])


def test_cassette_is_replayed_without_the_endpoint(run: Any, record: Any, pytester: pytest.Pytester) -> None:
    server = record(CITY, ROME, Reply("2.75 million."))
    assert server.headers[0]["authorization"] == "Bearer sk-4711-very-secret"
    file = pytester.path / "cassettes" / "city.jsonl"
    lines = file.read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["crow_cassette", "model", "request", "request"]
    assert "secret" not in file.read_text()
    assert "uthorization" not in file.read_text()
    assert str(pytester.path) not in file.read_text()
    assert '"delta": {"content": "2.75"}' in file.read_text()
    run(CITY).assert_outcomes(passed=1)
    assert file.read_text().splitlines() == lines


def test_request_that_was_not_recorded_fails_with_a_diff(run: Any, record: Any) -> None:
    record(CITY, ROME, Reply("2.75 million."))
    result = run(CITY.replace("live in Rome", "live in Paris"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "city.jsonl has no such request; *record it anew: pytest --crow-record test_it.py::test_city",
            "--- recorded",
            "+++ sent",
            '-*"How many people live in Rome?"*',
            '+*"How many people live in Paris?"*',
        ]
    )


def test_request_that_is_not_sent_any_more_fails_the_test(run: Any, record: Any) -> None:
    record(CITY, ROME, Reply("2.75 million."))
    result = run('\n@pytest.mark.crow_cassette("city")\ndef test_city(crow):\n    pass\n')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["2 of the 2 requests in city.jsonl were never sent*", "  user: How many people*"])


def test_request_that_is_sent_once_more_fails_the_test(run: Any, record: Any) -> None:
    code = '\n@pytest.mark.crow_cassette\ndef test_hello(crow):\n    crow.prompt("Hello", tools=[])\n'
    record(code, Reply("Hello."))
    result = run(code + '    crow.prompt("Hello", tools=[])\n')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["test_it.test_hello.jsonl has no answer left for a request that is sent more often than before.*"]
    )


def test_many_sessions_are_replayed_in_any_order(run: Any, record: Any) -> None:
    code = """
@pytest.mark.crow_cassette
def test_map(crow):
    async def main():
        async with crow.agent(tools=[population], store=False) as agent:
            return await agent.map([f"word {n}" for n in range(AMOUNT)], at_once=9)
    assert [result.output for result in crow.run(main())] == [f"WORD {n}" for n in range(AMOUNT)]
""".replace("AMOUNT", "20")
    record(code, script=lambda request: Reply(request["messages"][-1]["content"].upper()))
    run(code).assert_outcomes(passed=1)
    backwards = code.replace("for n in range(20)], at_once", "for n in reversed(range(20))], at_once")
    run(backwards.replace("for n in range(20)]\n", "for n in reversed(range(20))]\n")).assert_outcomes(passed=1)


def test_folder_of_the_test_is_that_of_the_replay(run: Any, record: Any, pytester: pytest.Pytester) -> None:
    code = """
@pytest.mark.crow_cassette
def test_write(crow, tmp_path):
    crow.prompt("Write it.", tools=[write])
    assert (tmp_path / "out.txt").read_text() == "done"
"""

    def answer(request: Any) -> Reply:
        cwd = re.search(r"Working directory: (\S+)", request["messages"][0]["content"])
        wanted: Any = {"name": "write", "arguments": {"path": f"{cwd[1] if cwd else ''}/out.txt"}}
        return Reply("Done.") if len(request["messages"]) > 2 else Reply(tool_calls=[wanted])

    record(code, script=answer)
    assert "<tmp_path>/out" in (pytester.path / "cassettes" / "test_it.test_write.jsonl").read_text()
    run(code, "--basetemp", str(pytester.path / "elsewhere")).assert_outcomes(passed=1)


def test_temporary_file_with_a_long_output_is_that_of_the_replay(run: Any, record: Any) -> None:
    code = """
class TestTerminal:
    @pytest.mark.crow_cassette
    def test_long(self, crow):
        crow.prompt("Count.", permissions="allow")
        assert "29999" in crow.called("terminal", command=re.compile("^tail"))[0].result
"""

    def answer(request: Any) -> Reply:
        path = re.search(r"it is in (\S+):", str(request["messages"][-1]["content"]))
        commands = ["seq 30000", f"tail -n 2 {path[1] if path else ''}"]
        done = len(request["messages"]) // 2 - 1
        arguments: Any = {"command": commands[min(done, 1)]}
        return Reply("Done.") if done > 1 else Reply(tool_calls=[{"name": "terminal", "arguments": arguments}])

    record(code, script=answer)
    run(code).assert_outcomes(passed=1)


def test_refusals_and_odd_streams_are_replayed(run: Any, record: Any) -> None:
    code = """
@pytest.mark.crow_cassette
def test_hello(crow):
    assert crow.prompt("Hello", tools=[]).text == "Grüße 🐦"
"""
    odd = Raw(
        [
            b": waiting\r\n\r\n",
            'data:{"choices": [{"index": 0, "delta": {"content": "Grüße "}}]}\r\n\r\n'.encode(),
            b'data: {"choices": [{"index": 0, "delta": {"content": "\\ud83d"}}]}\n\n',
            b'data: {"choices": [{"index": 0, "delta": {"content": "\\udc26"}, "finish_reason": "stop"}]}\n\n',
            b"data: [DONE]\n\n",
        ]
    )
    busy = Failure(429, {"error": {"message": "Too many requests"}}, {"retry-after": "0"})
    record(code, busy, odd)
    run(code).assert_outcomes(passed=1)


def test_answers_that_break_off_or_hang_are_replayed(run: Any, record: Any) -> None:
    code = """
from crow_core.acp.schema import AgentMessageChunk

@pytest.mark.crow_cassette
def test_broken(crow):
    assert crow.prompt("Count.", tools=[]).text.endswith("two.")

@pytest.mark.crow_cassette
def test_hanging(crow):
    async def read_first():
        async with crow.agent(tools=[]) as agent:
            async for update in agent.stream("Count."):
                if isinstance(update, AgentMessageChunk):
                    return update.content.text

    assert crow.run(read_first()) == "One"
"""
    record(code, Reply("One ", error=RuntimeError()), Reply("two."), Reply("One", hang=True))
    run(code).assert_outcomes(passed=2)


def test_texts_that_vary_can_be_ignored(run: Any, record: Any) -> None:
    code = """
@pytest.mark.crow_cassette(ignore=[r"\\d+ seconds"])
def test_time(crow):
    crow.prompt("It took 4711 seconds.", tools=[])
"""
    record(code, Reply("Long."))
    run(code.replace("4711", "12")).assert_outcomes(passed=1)
    run(code.replace("4711 seconds", "a week")).assert_outcomes(failed=1)


def test_prices_of_the_recorded_model_count(run: Any, record: Any, pytester: pytest.Pytester) -> None:
    code = """
@pytest.mark.crow_cassette
def test_cost(crow):
    result = crow.prompt("Hello", model="dear", tools=[])
    assert 0.9 < result.cost < 1.1
    assert crow.cost == result.cost
"""
    reply = Reply("Hello.", usage={"prompt_tokens": 500_000, "completion_tokens": 0, "total_tokens": 500_000})
    config = pytester.path / ".config" / "crow" / "config.toml"
    config.parent.mkdir(parents=True)
    with serving([reply]) as server:
        config.write_text(
            f'[models.dear]\nmodel = "big"\nbase_url = "{server.url}"\nprices = {{ input = 2.0, output = 8.0 }}\n'
        )
        run(code, "--crow-record").assert_outcomes(passed=1)
    config.unlink()
    run(code).assert_outcomes(passed=1)


def test_failed_test_leaves_a_recorded_cassette_as_it_is(run: Any, record: Any, pytester: pytest.Pytester) -> None:
    record(CITY, ROME, Reply("2.75 million."))
    file = pytester.path / "cassettes" / "city.jsonl"
    before = file.read_text()
    run(CITY, "--crow-record").assert_outcomes(failed=1)
    assert file.read_text() == before


def test_recording_without_a_model_says_so_and_writes_nothing(run: Any, pytester: pytest.Pytester) -> None:
    (pytester.mkdir(".config") / "crow").mkdir()
    (pytester.path / ".config" / "crow" / "config.toml").write_text("model = 7\n")
    result = run(CITY, "--crow-record")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *CassetteError: There is no model to record: *config.toml*"])
    assert not (pytester.path / "cassettes").exists()


def test_cassette_that_misses_is_shown_where_another_failure_follows(run: Any, record: Any) -> None:
    code = """
@pytest.mark.crow_cassette
def test_hello(crow):
    with pytest.raises(ValueError):
        crow.run(crow.agent(tools=[]).map(["Hello"]))
        raise ValueError
"""
    record(code, Reply("Hello."))
    result = run(code.replace('["Hello"]', '["Bye"]').replace("raise ValueError", "pass"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*has no such request*", '-*"Hello"*', '+*"Bye"*'])


def test_script_beside_a_cassette_is_refused(run: Any, record: Any) -> None:
    code = """
@pytest.mark.crow_cassette
def test_hello(crow):
    crow.prompt("Hello", tools=[])
"""
    record(code, Reply("Hello."))
    result = run(code + '    crow.model.plays("Hello.")\n')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["A test with a cassette cannot have a script, too.*", "  'Hello.'"])


def test_two_tests_do_not_record_the_same_cassette(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code = '\n@pytest.mark.crow_cassette("one")\ndef test_{}(crow):\n    pass\n'
    result = run(code.format("a") + code.format("b"), "--crow-record")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*is recorded by test_it.py::test_a already*"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "There is no cassette *city.jsonl. Record it: pytest --crow-record test_it.py::test_city"),
        ('{"crow_cassette": 9}\n', "*has the format 9 of another version*"),
        ("", "*city.jsonl, line 1, is no line of a cassette*"),
        ('{"crow_cassette": 1}\n{"model": 7}\n', "*city.jsonl, line 2, is no line of a cassette*"),
        ('{"crow_cassette": 1}\n{"request": {}, "ans', "*city.jsonl, line 2, is no line of a cassette*"),
        ('{"crow_cassette": 1}\n', "*city.jsonl has no model ''; it has none. Record it anew*"),
        (b"\xff\xfe", "*city.jsonl cannot be read*"),
        ("[" * 100_000, "*city.jsonl, line 1, is no line of a cassette*"),
    ],
)
def test_cassette_that_cannot_be_used_is_named(
    run: Any, pytester: pytest.Pytester, content: str | bytes | None, sentence: str
) -> None:
    file = pytester.mkdir("cassettes") / "city.jsonl"
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    result = run(CITY)
    result.stdout.fnmatch_lines([sentence])
    assert result.ret == 1
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


@given(st.lists(st.text("ab/", max_size=6), max_size=6), st.text("ab/", min_size=1, max_size=3))
def test_text_is_replaced_wherever_it_is_cut(pieces: list[str], old: str) -> None:
    changed = replace_in_pieces(pieces, old, "<x>")
    assert "".join(changed) == "".join(pieces).replace(old, "<x>")
    assert len(changed) == len(pieces)
