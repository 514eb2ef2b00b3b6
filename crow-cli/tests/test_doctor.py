"""`crow doctor` against good and bad servers: what it finds, what it prints, what it saves."""

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
from crow_cli.doctor import PROBES, RED, Patient, Report, append_table, examine, table
from crow_core.errors import ConfigError
from crow_core.models.quirks import Quirks
from crow_core.settings.config import ModelSettings
from crow_core.settings.discovery import to_chat_model
from crow_core.testing import Reply, ScriptedServer
from crow_core.testing.chaos import CHAOS

if TYPE_CHECKING:
    from conftest import Machine

pytestmark = pytest.mark.anyio

PAGES = {"/v1/models": {"data": [{"id": "m", "max_model_len": 32768}, {"id": "scripted", "max_model_len": 32768}]}}


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    with stamina.set_testing(True, attempts=100, cap=True):
        yield


def good() -> Callable[[dict[str, Any]], Reply]:
    """A server that does all that it is asked, and remembers what it has read."""
    read: set[str] = set()

    def script(request: dict[str, Any]) -> Reply:
        *_, last = request["messages"]
        text = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
        tools = [tool["function"]["name"] for tool in request.get("tools") or ()]
        if last["role"] == "tool":
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


def patient(url: str, **settings: Any) -> Patient:
    return Patient(name="m", base_url=url, attempts=3, **settings)


async def examined(chaos: Any = None, pages: Any = PAGES, **settings: Any) -> Report:
    script = good()
    async with ScriptedServer(chaos(script) if chaos else script, pages=pages) as server:
        return await examine(patient(server.url, **settings))


def verdicts(report: Report) -> dict[str, str]:
    """All that is not as it should be."""
    return {name: finding.verdict for name, finding in report.findings.items() if finding.verdict != "ok"}


async def test_a_good_server_is_found_to_be_one() -> None:
    report = await examined(api_key="k")
    assert verdicts(report) == {}
    assert list(report.findings) == list(PROBES)
    assert (report.code, report.quirks) == (0, {})
    assert report.findings["window"].sentence == "32,768 tokens fit, the server says."
    assert "came from the cache" in report.findings["cache"].sentence
    assert "comes as reasoning_content" in report.findings["reasoning"].sentence


COPES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
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
"""With what crow copes: what is not ok, and what is to be set."""

NO_TOOLS = {"tool calls": "no", "parallel calls": "no", "ids and index": "partly"}

FAILS: dict[str, dict[str, str]] = {
    "calls printed as text": {**NO_TOOLS, "nested schemas": "partly"},
    "refuses tools": {**NO_TOOLS, "nested schemas": "no", "reasoning": "no"},
    "cut prompt": {"long prompts": "no"},
}
"""Where something does not work."""

HOPELESS = {
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
    "empty reply": "says nothing",
    "empty body": "closed the connection without an answer",
    "web page": "it sent a web page",
}
"""Where nothing else can be asked, with what is said."""

SILENT = {"stops at half a call", "ends after the first token"}
"""Ways of which the first answer already is too short to judge more than that all is survived."""


def test_the_tables_speak_of_every_way() -> None:
    assert COPES.keys() | FAILS.keys() | HOPELESS.keys() | SILENT == CHAOS.keys()


@pytest.mark.parametrize("name", COPES)
async def test_what_crow_copes_with_is_found_and_its_quirk_is_named(name: str) -> None:
    expected, quirks = COPES[name]
    report = await examined(CHAOS[name])
    found = verdicts(report)
    if "usage" in expected:  # then only time tells of a cache, and on a busy machine it may tell anything
        found["cache"] = "partly"
    assert found == expected
    assert report.code == 0
    assert {key: report.quirks.get(key) for key in quirks} == quirks
    assert set(report.quirks) <= {*quirks, "reasoning"}


@pytest.mark.parametrize("name", FAILS)
async def test_what_does_not_work_is_found(name: str) -> None:
    report = await examined(CHAOS[name])
    found = verdicts(report)
    assert {key: found.get(key) for key in FAILS[name]} == FAILS[name]
    assert report.code == 1


@pytest.mark.parametrize("name", HOPELESS)
async def test_where_nothing_can_be_asked_it_stops_and_says_why(name: str) -> None:
    report = await examined(CHAOS[name])
    assert report.code == 2
    assert list(report.findings) == ["address", "key and model"]
    sentence = report.findings["key and model"].sentence
    assert HOPELESS[name] in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("name", sorted(SILENT))
async def test_replies_that_stop_early_are_survived(name: str) -> None:
    assert (await examined(CHAOS[name])).findings["address"].verdict == "ok"


async def test_nobody_there_is_one_sentence() -> None:
    with socket.socket() as deaf:  # holds the port, so that nobody else listens there
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        report = await examine(patient(url))
    assert report.code == 2
    assert report.findings["address"].sentence.startswith(f"Nothing answers at {url}.")


async def test_another_model_than_those_listed_is_named() -> None:
    report = await examined(pages={"/v1/models": {"data": [{"id": "qwen3:8b"}]}})
    assert "lists other models than this one: qwen3:8b" in report.findings["address"].sentence
    assert "Set window" in report.findings["window"].sentence


@pytest.mark.parametrize("pages", [{"/v1/models": "<html>"}, {"/v1/models": {"data": "none"}}, {"/v1/models": []}])
async def test_a_server_that_lists_nothing_is_examined_all_the_same(pages: Any) -> None:
    report = await examined(pages=pages)
    assert report.findings["address"].verdict == "partly"
    assert report.findings["cache"].verdict == "ok"


async def test_window_smaller_than_configured_is_told() -> None:
    report = await examined(window=100_000)
    assert report.findings["window"].sentence == "32,768 tokens fit, and not 100,000 as the settings say."


async def test_a_model_that_takes_images_and_does_not_see_is_found_out() -> None:
    script = good()

    def blind(request: dict[str, Any]) -> Reply:
        return Reply("Blue.") if "image_url" in json.dumps(request["messages"]) else script(request)

    async with ScriptedServer(blind, pages=PAGES) as server:
        report = await examine(patient(server.url))
    assert verdicts(report) == {"images": "partly"}
    assert report.quirks == {"images": False}


async def test_what_is_found_makes_the_next_examination_a_clean_one() -> None:
    """The quirks it names are those that the endpoint needs."""

    def strict(script: Any) -> Any:
        names = ["stream options", "temperature", "images", "schemas", "a system role"]
        for name in names:
            script = CHAOS[f"refuses {name}"](script)
        return CHAOS["wants reasoning back"](script)

    first = await examined(strict)
    settings = tomllib.loads(table("local", first.quirks))["models"]["local"]["quirks"]
    model = to_chat_model("local", ModelSettings(base_url="http://x/v1", model="m", quirks=settings))
    assert isinstance(model.quirks, Quirks)
    second = await examined(strict, quirks=model.quirks)
    assert second.quirks == {}
    assert not any("On the way" in finding.sentence for finding in second.findings.values())


def test_the_red_picture_is_a_picture() -> None:
    assert base64.b64decode(RED.partition(",")[2], validate=True).startswith(b"\x89PNG")


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
    assert any(row.startswith("partly  images          Images are refused.") for row in rows)
    assert "[models.local.quirks]" in done.out
    assert "images = false" in done.out
    assert "(--save writes it there)" in done.out


async def test_json_is_one_object_with_all_findings(machine: "Machine") -> None:
    begun = date.today()
    async with ScriptedServer(CHAOS["calls printed as text"](good()), pages=PAGES) as server:
        machine.configure(settings(server.url))
        done = await machine.crow("doctor", "--json")
    report = json.loads(done.out)
    assert done.code == 1
    assert (report["model"], report["endpoint"]) == ("local", server.url)
    assert begun <= date.fromisoformat(report["date"]) <= date.today()
    assert [finding["probe"] for finding in report["findings"]] == list(PROBES)
    assert "--jinja" in next(f["sentence"] for f in report["findings"] if f["probe"] == "tool calls")


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
        append_table(file, table("local", {"images": False}))
    assert file.read_bytes() == before


@pytest.mark.parametrize("text", ["[models.x]\r\nmodel = 'm'\r\n", "[models.x]\nmodel = 'm'", ""])
def test_a_table_is_appended_in_the_files_own_line_ends(tmp_path: Any, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(text.encode())
    append_table(file, table("gpt-5.1 ü", {"efforts": ("low", "high"), "images": False, "window": 9, "echo": "never"}))
    after = file.read_bytes().decode()
    assert after.startswith(text)
    assert ("\r\n" in after) == (re.sub("\r\n", "", after).count("\n") == 0)
    quirks = tomllib.loads(after)["models"]["gpt-5.1 ü"]["quirks"]
    assert quirks == {"efforts": ["low", "high"], "images": False, "window": 9, "echo": "never"}
