"""`crow acp check`: a correct agent passes, and each fault is reported under the id of its requirement."""

import asyncio
import copy
import json
import re
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_acp_tools.check import validation
from crow_acp_tools.check.check_report import to_json, to_text
from crow_acp_tools.check.conversation import CannotContinue, CheckOptions, Conversation
from crow_acp_tools.check.requirements import FIRST, REQUIREMENTS
from crow_acp_tools.check.runner import CheckReport, check_agent
from crow_core.acp.schema import AGENT_METHODS, CLIENT_METHODS
from crow_core.testing import Reply, ScriptedCall, ScriptedServer
from jsonschema import Draft202012Validator

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine, PipeReader

pytestmark = pytest.mark.anyio

OpenPipe = Callable[[str], Awaitable["PipeReader"]]

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
    "speaks version 2": {"INIT-001", "INIT-002"},  # its answer is valid in neither version
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
    "refuses session/load": {"LOAD-001", "LOAD-004"},
    "forgets sessions": {"LOAD-004"},
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
"""The faults of the test agent, and the ids of the requirements that have to fail."""

TIMEOUTS: dict[str, dict[str, float]] = {
    "drops id 0": {"timeout": 15},
    "does not answer prompts": {"timeout": 15},
    "ignores cancel": {"timeout": 15},
    "ignores extensions": {"timeout": 15},
    "answers notifications": {"quiet": 5},
    "goes on after cancel": {"quiet": 5},
    "replays too late": {"quiet": 5},
    "does not leave": {"grace": 0.5},
}
"""Seconds to wait where a fault shows only by a missing or a late message."""

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
"""Attacks of a hostile agent on its client."""


async def check_subject(
    fault: str,
    *ids: str,
    pipe: str = "",
    timeout: float = 60.0,
    quiet: float = 0.5,
    grace: float = 60.0,
    login: str = "",
    jobs: int = 2,
) -> CheckReport:
    command = (*SUBJECT, fault, pipe) if pipe else (*SUBJECT, fault)
    options = CheckOptions(command, timeout=timeout, auth_method=login, allow_logout=True, quiet=quiet, grace=grace)
    return await check_agent(options, set(ids), jobs=jobs)


def verdicts(report: CheckReport, verdict: str) -> dict[str, str]:
    """Return the reasons of the results with this verdict, by the requirements' ids."""
    return {result.requirement.id: result.why for result in report.results if result.verdict == verdict}


async def test_correct_agent_passes_every_requirement() -> None:
    report = await check_subject("", login="key")

    assert verdicts(report, "pass").keys() == FIRST.keys() - {"AUTH-005"}
    assert verdicts(report, "skipped") == {"AUTH-005": "there are methods"}
    assert report.is_conformant


async def find_failures(fault: str, limit: asyncio.Semaphore) -> set[str]:
    """Check all requirements of the scenarios in question; return the ids that fail, each with a reason and lines."""
    expected = FAULTS[fault]
    scenarios = {REQUIREMENTS[id].scenario for id in expected}
    ids = [id for id, requirement in FIRST.items() if requirement.scenario in scenarios]
    async with limit:
        login = "key" if "AUTH-003" in expected else ""
        report = await check_subject(fault, *ids, login=login, **TIMEOUTS.get(fault, {}))
    failed = [result for result in report.results if result.verdict == "fail"]
    assert all(result.why and (result.lines or result.requirement.id == "SHUTDOWN-001") for result in failed)
    serious = {id for id in expected if REQUIREMENTS[id].level in ("mandatory", "capability")}
    assert report.is_conformant is not bool(serious)
    return {result.requirement.id for result in failed}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_each_fault_fails_its_own_requirements_and_no_others() -> None:
    limit = asyncio.Semaphore(4)
    sets = await asyncio.gather(*[find_failures(fault, limit) for fault in FAULTS])

    assert dict(zip(FAULTS, sets, strict=True)) == FAULTS


def test_every_requirement_that_can_fail_has_a_fault() -> None:
    informational = {id for id, requirement in FIRST.items() if requirement.level == "informational"}
    assert set().union(*FAULTS.values()) == FIRST.keys() - informational


@pytest.mark.slow
async def test_agent_without_any_capability_is_conformant() -> None:
    report = await check_subject("can do nothing")

    assert report.is_conformant
    assert not verdicts(report, "not tested")
    assert {REQUIREMENTS[id].level for id in verdicts(report, "skipped")} == {"capability", "advisory"}


async def test_untested_requirement_says_which_option_would_test_it() -> None:
    report = await check_subject("is too quick", "CANCEL-001", "CANCEL-002", "CLOSE-002", "AUTH-003", quiet=2)

    untested = verdicts(report, "not tested")
    assert untested.keys() == {"CANCEL-001", "CANCEL-002", "CLOSE-002", "AUTH-003"}
    assert all("give --cancel-prompt" in untested[id] for id in ("CANCEL-001", "CANCEL-002", "CLOSE-002"))
    assert untested["AUTH-003"] == "give --auth-method with one of: key, other"
    assert not report.is_conformant


@pytest.mark.slow
async def test_agent_that_needs_a_login_is_tested_after_a_login() -> None:
    without = await check_subject("wants a login")
    with_login = await check_subject("wants a login", login="key")

    assert not verdicts(without, "fail")
    assert not without.is_conformant
    assert "give --auth-method with one of" in verdicts(without, "not tested")["PROMPT-001"]
    assert with_login.is_conformant


async def test_refused_login_is_reported_as_the_reason() -> None:
    report = await check_subject("", "PROMPT-001", "AUTH-003", login="nobody's")

    assert set(verdicts(report, "not tested").values()) == {
        'authenticate with nobody\'s was refused: -32602 "No such method"'
    }


@pytest.mark.parametrize(
    ("method", "id", "timeout"),
    [
        ("initialize", "INIT-001", 1),  # the first request of all: no other has to be answered in this time
        pytest.param("session/new", "SESSION-001", 5, marks=pytest.mark.slow),
        pytest.param("session/prompt", "PROMPT-001", 5, marks=pytest.mark.slow),
    ],
)
async def test_slow_agent_fails_one_requirement_which_says_how_slow_it_is(method: str, id: str, timeout: int) -> None:
    login_hint = "give --auth-method with one of: key, other"
    report = await check_subject(f"answers {method} too late", timeout=timeout)

    failed = verdicts(report, "fail")
    assert failed.keys() == {id}
    assert re.fullmatch(rf"{method} was too slow \(\d+(\.\d)? s; --timeout is {timeout} s\)", failed[id])
    [result] = [result for result in report.results if result.verdict == "fail"]
    assert [line.sender for line in result.lines] == ["client", "agent"]
    untested = verdicts(report, "not tested")
    reasons = (f"{method} was too slow (", f"{method} was not answered within {timeout} s; see ", login_hint)
    assert all(any(reason in why for reason in reasons) for why in untested.values())
    assert not report.is_conformant


@pytest.mark.parametrize(
    ("method", "id", "timeout"),
    [
        ("initialize", "INIT-001", 1),
        pytest.param("session/new", "SESSION-001", 5, marks=pytest.mark.slow),
    ],
)
async def test_agent_that_never_answers_a_request_fails_one_requirement(method: str, id: str, timeout: int) -> None:
    report = await check_subject(f"never answers {method}", timeout=timeout)

    assert verdicts(report, "fail") == {id: f"{method} was not answered within {timeout} s"}


@pytest.mark.slow
async def test_conversation_that_takes_too_long_gives_a_reason_for_each_verdict() -> None:
    report = await check_subject("takes its time", timeout=0.5, jobs=40)

    assert any("the conversation took longer than 1.5 s" in result.why for result in report.results)
    assert all(result.why for result in report.results if result.verdict in ("fail", "not tested"))


@pytest.mark.posix("the agent is a shell script")
async def test_conversation_ends_once_with_an_agent_that_cannot_be_started_again(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\nrm "$0"\nexec {shlex.join(SUBJECT)}\n')
    agent.chmod(0o755)
    async with Conversation(CheckOptions((str(agent),), grace=60), tmp_path) as conversation:
        await conversation.initialize()
        with pytest.raises(CannotContinue, match="could not be started again"):
            await conversation.restart()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", HOSTILE)
async def test_hostile_agent_gets_a_report_and_leaves_no_process(fault: str, open_pipe: OpenPipe) -> None:
    pipe = await open_pipe("pipe")
    report = await check_subject(fault, "INIT-001", "PROMPT-001", pipe=str(pipe.path), timeout=1, grace=0.5)

    await pipe.wait_for_close()
    assert {result.verdict for result in report.results} <= {"pass", "fail", "not tested"}
    assert to_text(report)
    json.dumps(to_json(report))


@pytest.mark.parametrize("_", [0, 1, *(pytest.param(number, marks=pytest.mark.slow) for number in range(2, 8))])
async def test_agent_that_sends_random_messages_gets_a_report(_: int) -> None:
    report = await check_subject("babbles", timeout=1)

    assert len(report.results) == len(FIRST)
    assert to_text(report)
    json.dumps(to_json(report))


@pytest.mark.slow
async def test_interrupted_check_leaves_no_process(machine: "Machine", open_pipe: OpenPipe) -> None:
    pipe = await open_pipe("pipe")
    process = await machine.start("acp", "check", "--", *SUBJECT, "hangs and is deaf", str(pipe.path))
    assert await pipe.line() == "started"
    process.send_signal(signal.SIGTERM)
    await process.communicate()

    assert process.returncode == 128 + signal.SIGTERM
    await pipe.wait_for_close()


async def test_output_of_the_agent_does_not_control_the_terminal(machine: "Machine") -> None:
    done = await machine.crow("acp", "check", "--only=TRANSPORT", "--", *SUBJECT, "steers the terminal")

    assert done.code == 1
    assert r"← \u001b]0;owned\u0007\u202e" in done.out
    assert r"standard error: \u001b[2J" in done.out
    assert not [letter for letter in done.out + done.err if ord(letter) < 32 and letter != "\n"]


async def test_json_report_has_the_verdict_and_the_lines(machine: "Machine") -> None:
    done = await machine.crow("acp", "check", "--json", "--only=INIT-002", "--", *SUBJECT, "speaks version 2")

    report = json.loads(done.out)
    [result] = report["requirements"]
    sent, came = result.pop("lines")
    assert result == {
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


async def test_only_selects_requirements_by_their_beginning(machine: "Machine") -> None:
    done = await machine.crow("acp", "check", "--json", "--only=ACP-INIT", "--only=list", "--", *SUBJECT)

    assert done.code == 0
    ids = [result["id"] for result in json.loads(done.out)["requirements"]]
    assert ids == ["INIT-001", "INIT-002", "INIT-003", "INIT-004", "LIST-001", "LIST-002"]


async def test_wrong_usage_is_one_sentence(machine: "Machine") -> None:
    unknown = await machine.crow("acp", "check", "--only=NOPE", "--", *SUBJECT)
    missing = await machine.crow("acp", "check", "no-such-agent", "--flag")
    unstartable = await machine.crow("acp", "check", str(machine.project))

    assert (unknown.code, missing.code, unstartable.code) == (2, 2, 2)
    assert unknown.err.startswith("crow: --only: no requirement begins with NOPE; there are TRANSPORT-001, ")
    assert missing.err == "crow: the agent cannot be started: there is no command no-such-agent.\n"
    assert unstartable.err.startswith("crow: the agent cannot be started: ")


def answer(request: dict[str, Any]) -> Reply:
    """Answer as a model that uses a tool when told to, and that stays busy when it has to count."""
    last = request["messages"][-1]
    text = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
    if last["role"] == "user" and text.startswith("Count"):
        return Reply("one two three", hang=True)
    calls: dict[str, ScriptedCall] = {
        "Read the file": {"name": "file_editor", "arguments": {"command": "view", "path": "notes.txt"}},
        "Run the command `sleep": {"name": "terminal", "arguments": {"command": "sleep 60"}},
        "Run the command `echo": {"name": "terminal", "arguments": {"command": "echo crow"}},
    }
    wanted = [call for words, call in calls.items() if last["role"] == "user" and text.startswith(words)]
    return Reply("Hello.", tool_calls=wanted)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_crow_passes_every_requirement(machine: "Machine") -> None:
    crow = (sys.executable, "-m", "crow_cli", "acp")
    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("acp", "check", "--json", "--auth-method=configured", "--allow-logout", "--", *crow)

    report = json.loads(done.out)
    verdicts = {result["id"]: (result["verdict"], result["why"]) for result in report["requirements"]}
    assert {id: said for id, said in verdicts.items() if said[0] not in ("pass", "skipped")} == {
        "V2-STATE-002": ("not tested", "the agent asked for no permission")
    }
    assert verdicts["CLIENTCAP-001"] == verdicts["CLIENTCAP-002"] == ("pass", "it used tools of its own")
    assert verdicts.keys() == REQUIREMENTS.keys()
    assert verdicts["V2-CALL-002"] == ("pass", "cancelled")
    assert verdicts["STDERR-001"][1] == "0 bytes in a conversation of one prompt"
    assert done.code == 0


# The structs compared with the official schema


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
CORRUPT_VALUES: list[Any] = [None, True, 0, -1, 1.5, 1.0, "", "x", [], {}, [1], {"a": 1}]
MISSING = object()


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything inside a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from paths(item, (*path, key))


def corrupt(value: Any) -> Iterator[tuple[list[Any], Any, Any]]:
    """Yield copies of a value in which one thing is replaced or missing: the path, the new value, and the copy."""
    for *path, last in paths(value):
        for other in (*CORRUPT_VALUES, MISSING):
            whole = place = copy.deepcopy(value)
            for key in path:
                place = place[key]
            if other is MISSING:
                del place[last]
            else:
                place[last] = other
            yield [*path, last], other, whole


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("method", "value", "side"),
    [*[(method, value, "result") for method, value in RESULTS], *[(*call, "params") for call in CALLS]],
    ids=lambda value: value if isinstance(value, str) else value.get("update", {}).get("sessionUpdate", ""),
)
def test_structs_accept_what_the_official_schema_accepts(method: str, value: dict[str, Any], side: str) -> None:
    """Each message is corrupted in every place. Only ranges of numbers and 1.0 are checked differently."""
    definitions = json.loads(SCHEMA.read_text("utf-8"))["$defs"]
    end = "Response" if side == "result" else ("Request", "Notification")
    names = [name for name, found in definitions.items() if found.get("x-method") == method and name.endswith(end)]
    validator = Draft202012Validator({"$ref": f"#/$defs/{names[0]}", "$defs": definitions})
    known = (AGENT_METHODS if side == "result" else CLIENT_METHODS)[method]
    type = known.result if side == "result" else known.params
    assert type is not None

    assert (validation.find_flaw(value, type, method), list(validator.iter_errors(value))) == ("", [])
    for path, other, whole in corrupt(value):
        ours, theirs = validation.find_flaw(whole, type, method), list(validator.iter_errors(whole))
        assert (bool(ours) == bool(theirs)) is not is_known_difference(path, other), (path, other, ours, theirs)


def is_known_difference(path: list[Any], other: Any) -> bool:
    """Tell whether the structs and the schema are known to differ in this value."""
    if path[-1] in ("line", "limit", "outputByteLimit", "used", "size", "protocolVersion"):
        return (type(other), other) in [(int, -1), (float, 1.0)]
    return path[-3:] == ["options", 0, "options"] and other is MISSING  # a group of choices without any


def test_unknown_key_is_found_at_any_depth() -> None:
    call = {**CALL, "content": [{"type": "diff", "path": "/a", "newText": "n", "mine": 1}], "own": 2, "_meta": {"x": 1}}
    update = {"sessionId": "id", "update": {"sessionUpdate": "tool_call", **call}, "extra": 3}
    message = {"jsonrpc": "2.0", "method": "session/update", "params": update, "top": 4}

    assert validation.find_call_flaw(message) == ""
    assert validation.find_unknown_keys(message, "session/update") == [
        "top",
        "params.update.content[0].mine",
        "params.update.own",
        "params.extra",
    ]
