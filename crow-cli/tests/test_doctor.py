"""`crow doctor` against good and bad servers: its results, its output, and the quirks that it saves."""

import base64
import json
import re
import socket
import tomllib
from collections.abc import Callable, Iterator
from datetime import date
from typing import TYPE_CHECKING, Any

import pytest
import stamina
from crow_agent.settings.discovery import to_chat_model
from crow_agent.settings.structs import ModelSettings
from crow_cli.doctor import DoctorReport, append_table, run_probes, to_toml
from crow_cli.examined_model import ExaminedModel
from crow_cli.probes import PROBES, RED_IMAGE, ProbeResult
from crow_core.errors import ConfigError
from crow_core.models.quirks import Quirks
from crow_core.testing import Failure, Reply, ScriptedServer
from crow_testing.chaos import CHAOS

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

PAGES = {"/v1/models": {"data": [{"id": "m", "max_model_len": 32768}, {"id": "scripted", "max_model_len": 32768}]}}


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    with stamina.set_testing(True, attempts=100, cap=True):
        yield


def good() -> Callable[[dict[str, Any]], Reply]:
    """Return the script of a server that passes every probe and caches prompts."""
    read: set[str] = set()

    def script(request: dict[str, Any]) -> Reply:
        *_, last = request["messages"]
        text = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
        tools = [tool["function"]["name"] for tool in request.get("tools") or ()]
        if last["role"] == "tool" or text.startswith("<tool_response>"):
            return Reply("It is sunny in Paris.", reasoning="There it is.")
        if "weather" in tools:
            cities = [city for city in ("Paris", "Oslo") if city in text]
            return Reply(reasoning="Hm.", tool_calls=[{"name": "weather", "arguments": {"city": c}} for c in cities])
        if "forecast" in tools:
            place = {"city": "Oslo", "country": "Norway"}
            return Reply(tool_calls=[{"name": "forecast", "arguments": {"place": place, "days": 3}}])
        if "colour" in text:
            return Reply("Red." if "image_url" in json.dumps(last) else "I see no picture.")
        if "password" in text:
            tokens = len(text) // 4
            usage = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": tokens if text in read else 0}}
            read.add(text)
            return Reply("HERON", usage=usage)
        if "PELICAN" in json.dumps(request["messages"]):
            return Reply("Pelican.")
        if "300" in text:
            return Reply("1, 2, 3, 4, 5", finish_reason="length")
        return Reply("Hello, one two three.", reasoning="A greeting.")

    return script


def make_model(url: str, **settings: Any) -> ExaminedModel:
    return ExaminedModel(name="m", base_url=url, attempts=3, **settings)


async def examine(chaos: Any = None, pages: Any = PAGES, **settings: Any) -> DoctorReport:
    script = good()
    async with ScriptedServer(chaos(script) if chaos else script, pages=pages) as server:
        return await run_probes(make_model(server.url, **settings))


def verdicts(report: DoctorReport) -> dict[str, str]:
    """Return the verdicts that are not ok, by probe."""
    return {name: result.verdict for name, result in report.results.items() if result.verdict != "ok"}


async def test_good_server_passes_every_probe() -> None:
    report = await examine(api_key="k")
    assert verdicts(report) == {}
    assert list(report.results) == list(PROBES)
    assert (report.code, report.quirks) == (0, {})
    assert report.results["window"].sentence == "32,768 tokens fit, the server says."
    assert "came from the cache" in report.results["cache"].sentence
    assert "comes as reasoning_content" in report.results["reasoning"].sentence


@pytest.mark.parametrize(
    ("replies", "quirks", "said"),
    [
        ("all", {"structured_output": "with_tools"}, "also in requests with tools"),
        ("ignored with tools", {"structured_output": "alone"}, "in requests without tools"),
        ("refused with tools", {"structured_output": "alone"}, "in requests without tools"),
        ("refused", {}, "are refused"),
        ("refused in other words", {}, "are refused"),
    ],
)
async def test_structured_output_is_probed_without_tools_and_with_them(
    replies: str, quirks: dict[str, Any], said: str
) -> None:
    whole = good()

    def script(request: dict[str, Any]) -> Any:
        if "response_format" not in request:
            return whole(request)
        if replies == "refused" or (replies == "refused with tools" and "tools" in request):
            return Failure(400, {"error": {"message": "response_format json_schema is not supported here"}})
        if replies == "refused in other words":
            return Failure(400, {"error": {"message": "bad request"}})
        if "tools" not in request:
            return Reply('{"colour": "blue", "certain": true}')
        if request["messages"][-1]["role"] == "tool":
            return Reply('{"city": "Paris", "degrees": 21}')
        return Reply('{"city": "", "degrees": 0}') if replies == "ignored with tools" else whole(request)

    async with ScriptedServer(script, pages=PAGES) as server:
        report = await run_probes(make_model(server.url))
    assert said in report.results["structured output"].sentence
    assert (verdicts(report), report.quirks, report.code) == ({}, quirks, 0)


TOLERABLE: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "missing ids": ({"ids and index": "partly"}, {}),
    "empty ids": ({"ids and index": "partly"}, {}),
    "same ids": ({}, {}),
    "repeated ids": ({"ids and index": "partly"}, {}),
    "same index": ({"ids and index": "partly"}, {}),
    "missing index": ({"ids and index": "partly"}, {}),
    "neither ids nor index": ({"ids and index": "partly"}, {}),
    "null fields": ({}, {}),
    "arguments as an object": ({}, {}),
    "reasoning in another field": ({}, {}),
    "think tags": ({}, {}),
    "only the closing think tag": ({}, {}),
    "no usage": ({"usage": "partly", "cache": "partly"}, {}),
    "usage on every chunk": ({}, {}),
    "strange usage": ({"usage": "partly", "cache": "partly"}, {}),
    "split characters": ({}, {}),
    "all at once": ({}, {}),
    "carriage returns": ({}, {}),
    "no space after data": ({}, {}),
    "comments between": ({}, {}),
    "gzip encoded": ({}, {}),
    "no done": ({"streaming": "partly"}, {}),
    "not streamed": ({"streaming": "partly", "ids and index": "partly"}, {}),
    "slow": ({}, {}),
    "429 and then well": ({"key and model": "partly"}, {}),
    "500 and then well": ({"key and model": "partly"}, {}),
    "502 as a web page, and then well": ({"key and model": "partly"}, {}),
    "breaks off once": ({"key and model": "partly"}, {}),
    "refuses stream options": (
        {"key and model": "partly", "usage": "partly", "cache": "partly"},
        {"stream_usage": False},
    ),
    "refuses temperature": ({"key and model": "partly"}, {"temperature": False}),
    "refuses images": ({"images": "partly"}, {"images": False}),
    "refuses schemas": ({"nested schemas": "partly"}, {"schemas": "plain"}),
    "refuses a system role": ({"instructions": "partly"}, {"system_role": "user"}),
    "wants reasoning back": ({"reasoning": "partly"}, {"echo": "always"}),
}
"""Faults that crow can work with: the verdicts that are not ok, and the quirks to set."""

NO_TOOLS = {"tool calls": "no", "parallel calls": "no", "ids and index": "partly"}

FATAL: dict[str, dict[str, str]] = {
    "calls printed as text": {**NO_TOOLS, "nested schemas": "partly", "reasoning": "partly"},
    "refuses tools": {**NO_TOOLS, "nested schemas": "no", "reasoning": "no"},
    "cut prompt": {"long prompts": "no"},
}
"""Faults with which something does not work, with the verdicts."""

UNUSABLE = {
    "429 for good": "is limiting requests",
    "500 for good": "CUDA error: out of memory",
    "wrong key": "refused the key (401): Incorrect API key provided",
    "unknown model": "has no model 'm'",
    "context too long": "maximum context length",
    "error in mid stream": "the model has crashed",
    "error instead of a stream": "out of memory",
    "breaks off before the first token": "broke off",
    "breaks off after the first token": "broke off",
    "half an event": "not JSON",
    "events of another kind": "something unknown",
    "empty reply": "the answer is empty",
    "empty body": "closed the connection without an answer",
    "web page": "it sent a web page",
}
"""Faults with which nothing else can be tested, with a part of the message."""

CUT_SHORT = {"stops at half a call", "ends after the first token"}
"""Faults that cut even the first answer: only that every probe ends can be tested."""


def test_tables_contain_every_fault() -> None:
    assert TOLERABLE.keys() | FATAL.keys() | UNUSABLE.keys() | CUT_SHORT == CHAOS.keys()


@pytest.mark.parametrize("name", TOLERABLE)
async def test_tolerable_fault_is_found_and_its_quirk_is_reported(name: str) -> None:
    expected, quirks = TOLERABLE[name]
    report = await examine(CHAOS[name])
    found = verdicts(report)
    if "usage" in expected:  # then a cache is detected by time, which is unreliable on a busy machine
        found["cache"] = "partly"
    assert found == expected
    assert report.code == 0
    assert {key: report.quirks.get(key) for key in quirks} == quirks
    assert set(report.quirks) <= {*quirks, "reasoning"}


@pytest.mark.parametrize("name", FATAL)
async def test_fatal_fault_is_found(name: str) -> None:
    report = await examine(CHAOS[name])
    found = verdicts(report)
    assert {key: found.get(key) for key in FATAL[name]} == FATAL[name]
    assert report.code == 1


@pytest.mark.parametrize("name", UNUSABLE)
async def test_doctor_stops_with_a_reason_when_the_endpoint_cannot_answer(name: str) -> None:
    report = await examine(CHAOS[name])
    assert report.code == 2
    assert list(report.results) == ["address", "key and model"]
    sentence = report.results["key and model"].sentence
    assert UNUSABLE[name] in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("name", sorted(CUT_SHORT))
async def test_replies_that_stop_early_do_not_stop_the_doctor(name: str) -> None:
    assert (await examine(CHAOS[name])).results["address"].verdict == "ok"


async def test_empty_answer_where_no_tool_was_called_is_not_blamed_on_a_tools_result() -> None:
    def talk(request: dict[str, Any]) -> Reply:
        *_, last = request["messages"]
        return Reply("" if last["role"] == "assistant" else "It is sunny.", reasoning="Hm.")

    async with ScriptedServer(talk, pages=PAGES) as server:
        report = await run_probes(make_model(server.url))
    assert report.results["reasoning"] == ProbeResult(
        "partly",
        "Reasoning comes as reasoning_content. No tool was called, so nothing tells whether it must be sent back.",
    )


async def test_unreachable_endpoint_is_one_sentence() -> None:
    with socket.socket() as deaf:  # holds the port, so that nobody else listens there
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        report = await run_probes(make_model(url))
    assert report.code == 2
    assert report.results["address"].sentence.startswith(f"Nothing answers at {url}.")


async def test_list_without_the_model_is_reported() -> None:
    report = await examine(pages={"/v1/models": {"data": [{"id": "qwen3:8b"}]}})
    assert "lists other models: qwen3:8b" in report.results["address"].sentence
    assert "Set window" in report.results["window"].sentence


@pytest.mark.parametrize("pages", [{"/v1/models": "<html>"}, {"/v1/models": {"data": "none"}}, {"/v1/models": []}])
async def test_server_without_a_list_of_models_is_still_examined(pages: Any) -> None:
    report = await examine(pages=pages)
    assert report.results["address"].verdict == "partly"
    assert report.results["cache"].verdict == "ok"


async def test_window_smaller_than_configured_is_reported() -> None:
    report = await examine(window=100_000)
    assert report.results["window"].sentence == "32,768 tokens fit, and not 100,000 as the settings say."


async def test_model_that_ignores_images_is_detected() -> None:
    script = good()

    def blind(request: dict[str, Any]) -> Reply:
        return Reply("Blue.") if "image_url" in json.dumps(request["messages"]) else script(request)

    async with ScriptedServer(blind, pages=PAGES) as server:
        report = await run_probes(make_model(server.url))
    assert verdicts(report) == {"images": "partly"}
    assert report.quirks == {"images": False}


async def test_reported_quirks_make_the_next_run_clean() -> None:
    """Settings with the quirks that the first run reports make the second run report none."""

    def strict(script: Any) -> Any:
        names = ["stream options", "temperature", "images", "schemas", "a system role"]
        for name in names:
            script = CHAOS[f"refuses {name}"](script)
        return CHAOS["wants reasoning back"](script)

    first = await examine(strict)
    settings = tomllib.loads(to_toml("local", first.quirks))["models"]["local"]["quirks"]
    model = to_chat_model("local", ModelSettings(base_url="http://x/v1", model="m", quirks=settings))
    assert isinstance(model.quirks, Quirks)
    second = await examine(strict, quirks=model.quirks)
    assert second.quirks == {}
    assert not any("Meanwhile" in result.sentence for result in second.results.values())


def test_the_red_picture_is_a_picture() -> None:
    assert base64.b64decode(RED_IMAGE.partition(",")[2], validate=True).startswith(b"\x89PNG")


# The command.

BLIND = CHAOS["refuses images"]


def settings(url: str, more: str = "") -> str:
    return f'# mine\nmodel = "local"\n\n[models.local]\nbase_url = "{url}"   # a comment\nmodel = "scripted"\n{more}'


async def test_the_table_has_a_line_for_each_probe(machine: "Machine") -> None:
    async with ScriptedServer(BLIND(good()), pages=PAGES) as server:
        machine.configure(settings(server.url))
        done = await machine.crow("doctor", "--model", "local")
    assert (done.code, done.err) == (0, "")
    rows = [line for line in done.out.splitlines() if line.startswith(("ok ", "partly ", "no "))]
    assert len(rows) == len(PROBES)
    assert any(row.startswith("partly  images            Images are refused.") for row in rows)
    assert "[models.local.quirks]" in done.out
    assert "images = false" in done.out
    assert "(--save writes it there)" in done.out


async def test_json_is_one_object_with_all_findings(machine: "Machine") -> None:
    begun = date.today()
    async with ScriptedServer(CHAOS["calls printed as text"](good()), pages=PAGES) as server:
        machine.configure(settings(server.url))
        done = await machine.crow("doctor", "--json")
    report = json.loads(done.out)
    assert done.code == 0
    assert (report["model"], report["endpoint"]) == ("local", server.url)
    assert begun <= date.fromisoformat(report["date"]) <= date.today()
    assert [finding["probe"] for finding in report["findings"]] == list(PROBES)
    sentence = next(f["sentence"] for f in report["findings"] if f["probe"] == "tool calls")
    assert sentence.startswith("The server sends tool calls as text, and crow runs them. Start llama.cpp with --jinja")


async def test_save_appends_the_quirks_with_a_date_and_touches_no_other_byte(machine: "Machine") -> None:
    async with ScriptedServer(BLIND(good()), pages=PAGES) as server:
        file = machine.configure(settings(server.url, "\n[permissions]\nmode = 'ask'"))
        file.chmod(0o600)
        before = file.read_bytes()
        done = await machine.crow("doctor", "--model", "local", "--save")
        assert done.code == 0
        after = file.read_bytes()
        assert after.startswith(before)
        assert re.search(r"# found by crow doctor on \d{4}-\d\d-\d\d\n", after.decode())
        assert tomllib.loads(after.decode())["models"]["local"]["quirks"] == {"images": False}
        assert file.stat().st_mode & 0o777 == 0o600
        assert [each.name for each in file.parent.iterdir() if each.name.startswith("config")] == ["config.toml"]

        again = await machine.crow("doctor", "--model", "local", "--save")
        assert (again.code, file.read_bytes()) == (2, after)
        assert "has quirks for 'local' already" in again.err

        clean = await machine.crow("doctor", "--model", "local")
        assert "There is nothing to set." in clean.out


async def test_save_needs_a_configured_model(machine: "Machine") -> None:
    async with ScriptedServer(good(), pages=PAGES) as server:
        machine.ask(server.url)
        done = await machine.crow("doctor", "--save")
        assert server.requests == []
    assert done.code == 2
    assert "has no [models.scripted]" in done.err


async def test_an_endpoint_that_cannot_be_asked_is_exit_code_2(machine: "Machine") -> None:
    async with ScriptedServer(CHAOS["wrong key"](good()), pages=PAGES) as server:
        machine.ask(server.url)
        done = await machine.crow("doctor")
    assert done.code == 2
    assert "no      key and model" in done.out


def test_a_file_that_cannot_take_a_table_is_left_alone(tmp_path: Any) -> None:
    file = tmp_path / "config.toml"
    file.write_text('models = { local = { base_url = "http://x", model = "m" } }\n')
    before = file.read_bytes()
    with pytest.raises(ConfigError, match=r"Add this by hand:\n\[models\.local\.quirks\]"):
        append_table(file, to_toml("local", {"images": False}))
    assert file.read_bytes() == before


@pytest.mark.parametrize("text", ["[models.x]\r\nmodel = 'm'\r\n", "[models.x]\nmodel = 'm'", ""])
def test_a_table_is_appended_in_the_files_own_line_ends(tmp_path: Any, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(text.encode())
    append_table(
        file, to_toml("gpt-5.1 ü", {"efforts": ("low", "high"), "images": False, "window": 9, "echo": "never"})
    )
    after = file.read_bytes().decode()
    assert after.startswith(text)
    assert ("\r\n" in after) == (re.sub("\r\n", "", after).count("\n") == 0)
    quirks = tomllib.loads(after)["models"]["gpt-5.1 ü"]["quirks"]
    assert quirks == {"efforts": ["low", "high"], "images": False, "window": 9, "echo": "never"}
