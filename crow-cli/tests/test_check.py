"""`crow acp check`: an agent that is right passes, and whatever is wrong is found under its own id."""

import asyncio
import copy
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_cli.check import validity
from crow_cli.check.examination import Report, examine
from crow_cli.check.report import as_json, as_text
from crow_cli.check.requirements import REQUIREMENTS
from crow_cli.check.talk import Options
from crow_core.acp.schema import AGENT_METHODS, CLIENT_METHODS
from crow_core.testing import Reply, ScriptedCall, ScriptedServer
from jsonschema import Draft202012Validator

if TYPE_CHECKING:
    from conftest import Ear, Machine

pytestmark = pytest.mark.anyio

Listen = Callable[[str], Awaitable["Ear"]]

SUBJECT = (sys.executable, "-I", "-S", str(Path(__file__).with_name("subject.py")))
SCHEMA = Path(__file__).parents[2] / "crow-core" / "schema" / "schema.json"

FAULTS: dict[str, set[str]] = {
    "prints a banner": {"TRANSPORT-001"},
    "logs to standard output": {"TRANSPORT-001"},
    "prints an empty line": {"TRANSPORT-001"},
    "sends a batch": {"TRANSPORT-001"},
    "says goodbye": {"TRANSPORT-001"},
    "has no last newline": {"TRANSPORT-001"},
    "writes Latin-1": {"TRANSPORT-002"},
    "turns ids to text": {"JSONRPC-001", "INIT-001"},
    "numbers its answers": {"JSONRPC-001"},
    "drops id 0": {"JSONRPC-001"},
    "answers twice": {"JSONRPC-001"},
    "gives result and error": {"JSONRPC-002"},
    "gives neither": {"JSONRPC-002", "JSONRPC-005", "SESSION-001"},
    "names errors": {"JSONRPC-002"},
    "has bare errors": {"JSONRPC-002"},
    "answers notifications": {"JSONRPC-003"},
    "has one code for all": {"JSONRPC-004"},
    "leaves after an error": {"JSONRPC-005"},
    "refuses initialize": {"INIT-001"},
    "gives invalid capabilities": {"INIT-001", "SCHEMA-001"},
    "speaks version 2": {"INIT-002"},
    "agrees to every version": {"INIT-003"},
    "refuses other versions": {"INIT-003"},
    "is nobody": {"INIT-004"},
    "sends bare text": {"SCHEMA-001", "PROMPT-002"},
    "invents updates": {"SCHEMA-001", "PROMPT-002"},
    "invents methods": {"SCHEMA-001"},
    "adds its own keys": {"SCHEMA-002"},
    "offers the same login twice": {"AUTH-001"},
    "offers a terminal login": {"AUTH-002"},
    "never lets in": {"AUTH-003"},
    "refuses logout": {"AUTH-004"},
    "wants a login and offers none": {"AUTH-005", "SESSION-001"},
    "refuses session/new": {"SESSION-001"},
    "gives empty ids": {"SESSION-001", "SESSION-002"},
    "has one session": {"SESSION-002"},
    "refuses session/prompt": {"PROMPT-001"},
    "ends in its own words": {"PROMPT-001", "SCHEMA-001"},
    "does not answer prompts": {"PROMPT-001"},
    "writes elsewhere": {"PROMPT-002"},
    "refuses resource_link": {"PROMPT-003"},
    "fails when cancelled": {"CANCEL-001", "CLOSE-002"},
    "ends as if done": {"CANCEL-001", "CLOSE-002"},
    "ignores cancel": {"CANCEL-001"},
    "goes on after cancel": {"CANCEL-002"},
    "refuses session/load": {"LOAD-001"},
    "replays too late": {"LOAD-002"},
    "replays nothing": {"LOAD-002"},
    "loads null": {"LOAD-003"},
    "needs mcpServers": {"RESUME-001"},
    "resumes aloud": {"RESUME-002"},
    "refuses session/list": {"LIST-001", "LIST-002"},
    "lists null": {"LIST-001", "LIST-002", "SCHEMA-001"},
    "lists all folders": {"LIST-002"},
    "refuses session/delete": {"DELETE-001", "DELETE-002"},
    "keeps what is deleted": {"DELETE-001"},
    "deletes what is there only": {"DELETE-002"},
    "refuses session/close": {"CLOSE-001"},
    "takes no folders": {"ADDDIRS-001"},
    "dreams of a mode": {"MODES-001"},
    "refuses session/set_mode": {"MODES-002"},
    "misnames the mode": {"MODES-002", "SCHEMA-001"},
    "has an impossible value": {"CONFIG-001"},
    "gives what was set only": {"CONFIG-002"},
    "forgets what was set": {"CONFIG-002"},
    "offers a switch": {"CONFIG-003"},
    "refuses image": {"PROMPTCAP-001"},
    "refuses audio": {"PROMPTCAP-002"},
    "refuses resource": {"PROMPTCAP-003"},
    "reads the client's files": {"CLIENTCAP-001"},
    "uses the client's terminal": {"CLIENTCAP-002"},
    "questions the client": {"CLIENTCAP-003"},
    "ignores extensions": {"EXT-001"},
    "refuses _meta": {"META-001"},
    "explains at length": {"ERROR-001"},
    "does not leave": {"SHUTDOWN-001"},
}
"""What is wrong with an agent, and the ids that have to say so."""

SEEN_BY_TIME: dict[str, dict[str, float]] = {
    "drops id 0": {"timeout": 15},
    "does not answer prompts": {"timeout": 15},
    "ignores cancel": {"timeout": 15},
    "ignores extensions": {"timeout": 15},
    "answers notifications": {"quiet": 5},
    "goes on after cancel": {"quiet": 5},
    "replays too late": {"quiet": 5},
    "does not leave": {"grace": 0.5},
}
"""How long to wait for what does not come, or comes when all seems over; nothing else depends on time."""

HOSTILE = [
    "exits",
    "hangs",
    "hangs and is deaf",
    "floods",
    "floods with junk",
    "begins a line and never ends it",
    "floods standard error",
    "nests deeply",
    "closes its input",
    "leaves a child behind",
    "asks for everything",
]
"""What agents may do to the tester."""


async def examined(
    fault: str,
    *ids: str,
    pipe: str = "",
    timeout: float = 60.0,
    quiet: float = 0.5,
    grace: float = 60.0,
    login: str = "",
) -> Report:
    command = (*SUBJECT, fault, pipe) if pipe else (*SUBJECT, fault)
    options = Options(command, timeout=timeout, auth_method=login, allow_logout=True, quiet=quiet, grace=grace)
    return await examine(options, set(ids), jobs=2)


def verdicts(report: Report, word: str) -> dict[str, str]:
    """The reasons of one verdict, by the requirements' ids."""
    return {finding.requirement.id: finding.why for finding in report.findings if finding.word == word}


async def test_an_agent_that_does_everything_right_passes_everything() -> None:
    report = await examined("", login="key")

    assert verdicts(report, "pass").keys() == REQUIREMENTS.keys() - {"AUTH-005"}
    assert verdicts(report, "skipped") == {"AUTH-005": "there are methods"}
    assert report.conformant


async def found(fault: str, places: asyncio.Semaphore) -> set[str]:
    """The ids that fail of all those that are judged by the exchanges in question; each says why, and shows it."""
    expected = FAULTS[fault]
    exchanges = {REQUIREMENTS[id].exchange for id in expected}
    ids = [id for id, requirement in REQUIREMENTS.items() if requirement.exchange in exchanges]
    async with places:
        login = "key" if "AUTH-003" in expected else ""
        report = await examined(fault, *ids, login=login, **SEEN_BY_TIME.get(fault, {}))
    failed = [finding for finding in report.findings if finding.word == "fail"]
    assert all(finding.why and (finding.lines or finding.requirement.id == "SHUTDOWN-001") for finding in failed)
    serious = {id for id in expected if REQUIREMENTS[id].level in ("mandatory", "capability")}
    assert report.conformant is not bool(serious)
    return {finding.requirement.id for finding in failed}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_fault_is_found_under_its_own_ids_and_no_others() -> None:
    places = asyncio.Semaphore(4)
    sets = await asyncio.gather(*[found(fault, places) for fault in FAULTS])

    assert dict(zip(FAULTS, sets, strict=True)) == FAULTS


def test_there_is_a_fault_for_every_requirement_that_can_be_broken() -> None:
    informational = {id for id, requirement in REQUIREMENTS.items() if requirement.level == "informational"}
    assert set().union(*FAULTS.values()) == REQUIREMENTS.keys() - informational


async def test_an_agent_that_can_do_nothing_but_talk_is_conformant() -> None:
    report = await examined("can do nothing")

    assert report.conformant
    assert not verdicts(report, "not tested")
    assert {REQUIREMENTS[id].level for id in verdicts(report, "skipped")} == {"capability", "advisory"}


async def test_what_could_not_be_provoked_is_not_tested_and_says_how_it_could_be() -> None:
    report = await examined("is too quick", "CANCEL-001", "CANCEL-002", "CLOSE-002", "AUTH-003", quiet=5)

    untested = verdicts(report, "not tested")
    assert untested.keys() == {"CANCEL-001", "CANCEL-002", "CLOSE-002", "AUTH-003"}
    assert all("give --cancel-prompt" in untested[id] for id in ("CANCEL-001", "CANCEL-002", "CLOSE-002"))
    assert untested["AUTH-003"] == "give --auth-method with one of: key, other"
    assert not report.conformant


async def test_an_agent_that_wants_a_login_is_tested_once_it_gets_one() -> None:
    without = await examined("wants a login")
    with_login = await examined("wants a login", login="key")

    assert not verdicts(without, "fail")
    assert not without.conformant
    assert "give --auth-method with one of" in verdicts(without, "not tested")["PROMPT-001"]
    assert with_login.conformant


async def test_a_login_that_is_refused_is_the_reason_given() -> None:
    report = await examined("", "PROMPT-001", "AUTH-003", login="nobody's")

    assert set(verdicts(report, "not tested").values()) == {
        'authenticate with nobody\'s was refused: -32602 "No such method"'
    }


@pytest.mark.parametrize("fault", HOSTILE)
async def test_a_hostile_agent_is_judged_and_nothing_of_it_is_left(fault: str, listen: Listen) -> None:
    ear = await listen("ear")
    report = await examined(fault, "INIT-001", "PROMPT-001", pipe=str(ear.path), timeout=1, grace=0.5)

    await ear.silence()
    assert {finding.word for finding in report.findings} <= {"pass", "fail", "not tested"}
    assert as_text(report)
    json.dumps(as_json(report))


@pytest.mark.parametrize("_", range(8))
async def test_an_agent_that_says_anything_at_all_is_judged(_: int) -> None:
    report = await examined("babbles", timeout=1)

    assert len(report.findings) == len(REQUIREMENTS)
    assert as_text(report)
    json.dumps(as_json(report))


async def test_an_interrupted_examination_leaves_nothing_behind(machine: "Machine", listen: Listen) -> None:
    ear = await listen("ear")
    process = await machine.start("acp", "check", "--", *SUBJECT, "hangs and is deaf", str(ear.path))
    assert await ear.line() == "started"
    process.send_signal(signal.SIGTERM)
    await process.communicate()

    assert process.returncode == 128 + signal.SIGTERM
    await ear.silence()


async def test_nothing_that_the_agent_says_steers_the_terminal(machine: "Machine") -> None:
    done = await machine.crow("acp", "check", "--only=TRANSPORT", "--", *SUBJECT, "steers the terminal")

    assert done.code == 1
    assert r"← \u001b]0;owned\u0007\u202e" in done.out
    assert r"standard error: \u001b[2J" in done.out
    assert not [letter for letter in done.out + done.err if ord(letter) < 32 and letter != "\n"]


async def test_the_report_for_programs_has_every_verdict_and_what_was_said(machine: "Machine") -> None:
    done = await machine.crow("acp", "check", "--json", "--only=INIT-002", "--", *SUBJECT, "speaks version 2")

    report = json.loads(done.out)
    [finding] = report["requirements"]
    sent, came = finding.pop("lines")
    assert finding == {
        "id": "INIT-002",
        "level": "mandatory",
        "sentence": "Asked for version 1, the agent answers 1.",
        "verdict": "fail",
        "why": "it answers 2",
        "stderr": "",
    }
    assert (sent["from"], json.loads(sent["line"])["method"]) == ("client", "initialize")
    assert (came["from"], json.loads(came["line"])["result"]["protocolVersion"]) == ("agent", 2)
    assert (done.code, report["conformant"], report["agentInfo"]["name"]) == (1, False, "subject")
    assert report["command"] == [*SUBJECT, "speaks version 2"]


async def test_some_requirements_can_be_chosen_by_their_beginning(machine: "Machine") -> None:
    done = await machine.crow("acp", "check", "--json", "--only=ACP-INIT", "--only=list", "--", *SUBJECT)

    assert done.code == 0
    ids = [finding["id"] for finding in json.loads(done.out)["requirements"]]
    assert ids == ["INIT-001", "INIT-002", "INIT-003", "INIT-004", "LIST-001", "LIST-002"]


async def test_wrong_usage_is_a_sentence(machine: "Machine") -> None:
    unknown = await machine.crow("acp", "check", "--only=NOPE", "--", *SUBJECT)
    missing = await machine.crow("acp", "check", "no-such-agent", "--flag")
    unstartable = await machine.crow("acp", "check", str(machine.project))

    assert (unknown.code, missing.code, unstartable.code) == (2, 2, 2)
    assert unknown.err.startswith("crow: --only: no requirement begins with NOPE; there are TRANSPORT-001, ")
    assert missing.err == "crow: the agent cannot be started: there is no command no-such-agent.\n"
    assert unstartable.err.startswith("crow: the agent cannot be started: ")


def script(request: dict[str, Any]) -> Reply:
    """A model that uses a tool where it is told to, and is busy where it has to count."""
    last = request["messages"][-1]
    text = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
    if last["role"] == "user" and text.startswith("Count"):
        return Reply("one two three", hang=True)
    calls: dict[str, ScriptedCall] = {
        "Read the file": {"name": "file_editor", "arguments": {"command": "view", "path": "notes.txt"}},
        "Run the command": {"name": "terminal", "arguments": {"command": "echo crow"}},
    }
    wanted = [call for words, call in calls.items() if last["role"] == "user" and text.startswith(words)]
    return Reply("Hello.", tool_calls=wanted)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_crow_itself_passes_everything(machine: "Machine") -> None:
    crow = (sys.executable, "-m", "crow_cli", "acp")
    async with ScriptedServer(script) as server:
        machine.ask(server.url)
        done = await machine.crow("acp", "check", "--json", "--auth-method=configured", "--allow-logout", "--", *crow)

    report = json.loads(done.out)
    verdicts = {finding["id"]: (finding["verdict"], finding["why"]) for finding in report["requirements"]}
    assert {id: said for id, said in verdicts.items() if said[0] not in ("pass", "skipped")} == {}
    assert verdicts["CLIENTCAP-001"] == verdicts["CLIENTCAP-002"] == ("pass", "it used tools of its own")
    assert verdicts["STDERR-001"][1] == "0 bytes in a conversation of one prompt"
    assert done.code == 0


# What the structs say, and what the official schema says


CALL: dict[str, Any] = {
    "toolCallId": "call",
    "title": "Title",
    "kind": "read",
    "status": "pending",
    "content": [
        {"type": "content", "content": {"type": "text", "text": "text"}},
        {"type": "diff", "path": "/a", "oldText": None, "newText": "new"},
        {"type": "terminal", "terminalId": "terminal"},
    ],
    "locations": [{"path": "/a", "line": 3}],
    "rawInput": {"a": 1},
}
OPTIONS: list[dict[str, Any]] = [
    {
        "type": "select",
        "id": "model",
        "name": "Model",
        "category": "model",
        "currentValue": "a",
        "options": [{"value": "a", "name": "A"}],
    },
    {
        "type": "select",
        "id": "mode",
        "name": "Mode",
        "currentValue": "a",
        "options": [{"group": "all", "name": "All", "options": [{"value": "a", "name": "A"}]}],
    },
    {"type": "boolean", "id": "fast", "name": "Fast", "currentValue": True},
]
MODES: dict[str, Any] = {"currentModeId": "a", "availableModes": [{"id": "a", "name": "A", "description": None}]}
RESULTS: list[tuple[str, dict[str, Any]]] = [
    (
        "initialize",
        {
            "protocolVersion": 1,
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": True},
                "mcpCapabilities": {"http": True},
                "sessionCapabilities": {"list": {}, "close": {}},
                "auth": {"logout": {}},
            },
            "authMethods": [{"id": "a", "name": "A", "description": "d"}, {"id": "b", "name": "B", "type": "agent"}],
            "agentInfo": {"name": "name", "version": "1", "title": None},
        },
    ),
    ("session/new", {"sessionId": "id", "modes": MODES, "configOptions": OPTIONS}),
    ("session/load", {"modes": MODES, "configOptions": OPTIONS}),
    ("session/list", {"sessions": [{"sessionId": "id", "cwd": "/a", "title": "t"}], "nextCursor": "next"}),
    ("session/prompt", {"stopReason": "end_turn"}),
    ("session/set_config_option", {"configOptions": OPTIONS}),
]
UPDATES: list[dict[str, Any]] = [
    {"sessionUpdate": "agent_message_chunk", "content": {"type": "image", "data": "x", "mimeType": "image/png"}},
    {
        "sessionUpdate": "agent_message_chunk",
        "content": {"type": "resource", "resource": {"uri": "file:///a", "text": "text"}},
        "messageId": "id",
    },
    {"sessionUpdate": "tool_call", **CALL},
    {"sessionUpdate": "tool_call_update", **CALL},
    {"sessionUpdate": "plan", "entries": [{"content": "c", "priority": "high", "status": "pending"}]},
    {"sessionUpdate": "available_commands_update", "availableCommands": [{"name": "n", "description": "d"}]},
    {"sessionUpdate": "current_mode_update", "currentModeId": "id"},
    {"sessionUpdate": "config_option_update", "configOptions": OPTIONS},
    {"sessionUpdate": "session_info_update", "title": "t", "updatedAt": None},
    {"sessionUpdate": "usage_update", "used": 1, "size": 2, "cost": {"amount": 0.5, "currency": "EUR"}},
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "session/request_permission",
        {"sessionId": "id", "toolCall": CALL, "options": [{"optionId": "o", "name": "O", "kind": "allow_once"}]},
    ),
    ("fs/read_text_file", {"sessionId": "id", "path": "/a", "line": 1, "limit": 2}),
    ("terminal/create", {"sessionId": "id", "command": "ls", "args": ["a"], "cwd": "/a", "outputByteLimit": 10}),
    *[("session/update", {"sessionId": "id", "update": update}) for update in UPDATES],
]
SPOILED: list[Any] = [None, True, 0, -1, 1.5, 1.0, "", "x", [], {}, [1], {"a": 1}]
LEFT_OUT = object()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


def spoil(value: Any) -> Iterator[tuple[list[Any], Any, Any]]:
    """Each way to spoil or leave out one thing: its path, what stands there now, and the whole."""
    for *path, last in places(value):
        for other in (*SPOILED, LEFT_OUT):
            whole = place = copy.deepcopy(value)
            for key in path:
                place = place[key]
            if other is LEFT_OUT:
                del place[last]
            else:
                place[last] = other
            yield [*path, last], other, whole


@pytest.mark.parametrize(
    ("method", "value", "side"),
    [*[(method, value, "result") for method, value in RESULTS], *[(*call, "params") for call in CALLS]],
    ids=lambda value: value if isinstance(value, str) else value.get("update", {}).get("sessionUpdate", ""),
)
def test_the_structs_judge_as_the_official_schema_does(method: str, value: dict[str, Any], side: str) -> None:
    """Each message is spoiled in every place; they differ in the range of numbers, and in 1.0."""
    definitions = json.loads(SCHEMA.read_text("utf-8"))["$defs"]
    end = "Response" if side == "result" else ("Request", "Notification")
    names = [name for name, found in definitions.items() if found.get("x-method") == method and name.endswith(end)]
    judge = Draft202012Validator({"$ref": f"#/$defs/{names[0]}", "$defs": definitions})
    known = (AGENT_METHODS if side == "result" else CLIENT_METHODS)[method]
    type = known.result if side == "result" else known.params
    assert type is not None

    assert (validity.flaw(value, type, method), list(judge.iter_errors(value))) == ("", [])
    for path, other, whole in spoil(value):
        ours, theirs = validity.flaw(whole, type, method), judge.is_valid(whole)
        assert (ours == "") == (theirs != differs(path, other)), (path, other, ours, theirs)


def differs(path: list[Any], other: Any) -> bool:
    """Whether the structs take what the schema does not, or the other way round."""
    if path[-1] in ("line", "limit", "outputByteLimit", "used", "size", "protocolVersion"):
        return (type(other), other) in [(int, -1), (float, 1.0)]
    return path[-3:] == ["options", 0, "options"] and other is LEFT_OUT  # a group of choices without any


def test_a_key_of_ones_own_is_found_at_any_depth() -> None:
    call = {**CALL, "content": [{"type": "diff", "path": "/a", "newText": "n", "mine": 1}], "own": 2, "_meta": {"x": 1}}
    update = {"sessionId": "id", "update": {"sessionUpdate": "tool_call", **call}, "extra": 3}
    message = {"jsonrpc": "2.0", "method": "session/update", "params": update, "top": 4}

    assert validity.call_flaw(message) == ""
    assert validity.strangers(message, "session/update") == [
        "top",
        "params.update.content[0].mine",
        "params.update.own",
        "params.extra",
    ]
