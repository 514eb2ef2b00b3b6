"""`crow run` in scripts: one JSON document in every case, exit codes, limits, rules, and what the session has."""

import asyncio
import json
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crow_system as system
import pytest
from crow_core.testing import Failure, Reply, ScriptedCall, ScriptedServer

with suppress(ImportError):  # Windows has no pseudo-terminals
    import pty

if TYPE_CHECKING:
    from crow_testing.command_fixtures import CommandResult, Machine

pytestmark = pytest.mark.anyio

USAGE = {"prompt_tokens": 100, "completion_tokens": 5}


def command(line: str) -> ScriptedCall:
    return {"name": "terminal", "arguments": {"command": line}}


def read(done: "CommandResult") -> dict[str, Any]:
    """Return the one JSON document on standard output. Its exit code is that of the process."""
    (line,) = done.out.splitlines()
    outcome = json.loads(line)
    assert (outcome["type"], outcome["schema_version"], outcome["exit_code"]) == ("result", 1, done.code)
    assert {"session_id", "model", "stop_reason", "text", "error", "denied", "usage", "cost"} <= outcome.keys()
    assert (outcome["error"] is None) is (done.code == 0)
    return outcome


async def test_outcome_has_tokens_cost_model_and_session(machine: "Machine"):
    async with ScriptedServer([Reply(tool_calls=[command("true")], usage=USAGE), Reply("Hi.", usage=USAGE)]) as server:
        prices = "prices = { input = 1000, output = 10000, currency = 'EUR' }"
        machine.configure(f'[models.one]\nbase_url = "{server.url}"\nmodel = "scripted"\n{prices}\n')
        done = await machine.crow("run", "Hi", "--allow", "terminal:true", "--output-format", "json")
    outcome = read(done)
    assert (done.code, outcome["stop_reason"], outcome["text"]) == (0, "end_turn", "Hi.")
    counted = {"requests": 2, "input_tokens": 200, "output_tokens": 10, "cached_tokens": 0, "total_tokens": 210}
    assert outcome["usage"] == counted
    assert (round(outcome["cost"], 6), outcome["currency"], outcome["model"]) == (0.3, "EUR", "scripted")
    assert len(outcome["session_id"]) == 32
    assert outcome["denied"] == []


async def test_call_that_nobody_could_allow_is_exit_code_3_and_names_the_flag(machine: "Machine"):
    edit = {"name": "file_editor", "arguments": {"command": "create", "path": "a.txt", "file_text": "1"}}
    uses = [command("touch ran"), command("touch one && echo $HOME"), edit, command("echo 'a [b]*'")]
    async with ScriptedServer(lambda _: Reply(tool_calls=uses) if not server.requests[1:] else Reply("No.")) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "Go", "--output-format", "json", "--deny", "terminal:echo *")
    outcome = read(done)
    assert (done.code, outcome["stop_reason"], outcome["text"]) == (3, "end_turn", "No.")
    told = {call["title"]: call["flag"] for call in outcome["denied"]}
    assert told == {
        "touch ran": "--allow 'terminal:touch ran'",
        "touch one && echo $HOME": "",  # a rule denies a part of it
        "create a.txt": "--allow file_editor:a.txt",
        "echo 'a [b]*'": "",
    }
    assert {call["tool"] for call in outcome["denied"]} == {"terminal", "file_editor"}
    assert "--allow 'terminal:touch ran' --allow file_editor:a.txt" in outcome["error"]
    assert list(machine.project.iterdir()) == []


async def test_flag_that_is_named_allows_the_call(machine: "Machine"):
    uses = [command("touch [a]*"), command("touch b; touch c")]

    def reply(body: dict[str, Any]) -> Reply:
        return Reply("No.") if body["messages"][-1]["role"] == "tool" else Reply(tool_calls=uses)

    async with ScriptedServer(reply) as server:
        machine.ask(server.url)
        outcome = read(await machine.crow("run", "Go", "--output-format", "json"))
        flags = [call["flag"] for call in outcome["denied"]]
        assert all(flags)
        words = [word for flag in flags for word in shlex.split(flag)]
        done = await machine.crow("run", "Go", "--output-format", "json", *words)
    assert (done.code, read(done)["denied"]) == (0, [])
    assert {"b", "c"} <= {file.name for file in machine.project.iterdir()}


@pytest.mark.parametrize("mode", ["plan", "ask", "accept-edits"])
async def test_yolo_with_another_mode_is_wrong_usage(machine: "Machine", mode: str):
    done = await machine.crow("run", "Go", "--yolo", "--mode", mode, "--output-format", "json")
    assert (done.code, read(done)["error"], len(done.err.splitlines())) == (2, done.err.strip()[6:], 1)
    assert f"--mode {mode} asks for another: give one of them." in done.err


async def test_denied_rule_alone_is_no_missing_permission(machine: "Machine"):
    async with ScriptedServer([Reply(tool_calls=[command("touch ran")]), Reply("No.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "Go", "--yolo", "--deny", "terminal:touch*", "--output-format", "json")
    assert (done.code, [call["title"] for call in read(done)["denied"]]) == (0, ["touch ran"])
    assert not (machine.project / "ran").exists()


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Failure(401, {"error": {"message": "wrong key"}}), 1),
        (Failure(400, {"error": {"message": "bad"}}), 1),
        (Failure(429, {"error": {"message": "slow down"}}, headers={"retry-after": "0"}), 75),
        (Failure(503, {"error": {"message": "overloaded"}}, headers={"retry-after": "0"}), 75),
    ],
)
async def test_failure_that_may_pass_is_exit_code_75(machine: "Machine", failure: Failure, code: int):
    async with ScriptedServer(lambda _: failure) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "Hi", "--output-format", "json")
    outcome = read(done)
    assert (done.code, outcome["stop_reason"]) == (code, None)
    assert outcome["session_id"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-requests", "2"], "--max-requests"),
        (["--max-tokens", "150"], "210 of 150 tokens"),
        (["--max-cost", "0.2"], "0.3 of 0.2 money"),
        (["--timeout", "0.3"], "--timeout"),
    ],
)
async def test_limit_is_exit_code_4(machine: "Machine", options: list[str], said: str):
    line = "sleep 60" if "--timeout" in options else "true"
    async with ScriptedServer(lambda _: Reply(tool_calls=[command(line)], usage=USAGE)) as server:
        prices = "prices = { input = 1000, output = 10000, currency = 'EUR' }"
        machine.configure(f'[models.one]\nbase_url = "{server.url}"\nmodel = "scripted"\n{prices}\n')
        done = await machine.crow("run", "Go", "--yolo", "--output-format", "json", *options)
        assert len(server.requests) <= 2
    assert done.code == 4
    assert said in read(done)["error"]


async def test_cost_that_is_unknown_cannot_be_limited(machine: "Machine"):
    async with ScriptedServer([]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "Go", "--max-cost", "1", "--output-format", "json")
    assert done.code == 2
    assert "--max-cost needs the prices of scripted" in read(done)["error"]


@pytest.mark.usefixtures("no_local_model")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "No model is configured"),
        (["--no-such"], "No such option"),
        (["--max-tokens", "none"], "--max-tokens"),
        (["--cwd", "no/such"], "--cwd: the folder no/such does not exist"),
        (["--add-dir", "no/such"], "--add-dir: the folder no/such does not exist"),
        (["-c", "-r", "x"], "give one of them"),
        (["-c", "--no-session"], "give one of them"),
        (["--system-prompt", "a", "--append-system-prompt", "b"], "give one of them"),
        (["--output-schema", "{"], "--output-schema"),
        (["--tools", "hammer"], "--tools: There is no tool"),
        (["--mcp-config", "no.json"], "--mcp-config: there is no file no.json"),
        (["--mcp-config", "{]"], "is not valid JSON"),
        (["-m", "x", "--allow", ":"], "--allow: "),
    ],
)
async def test_wrong_usage_is_exit_code_2_and_json_too(machine: "Machine", options: list[str], said: str):
    if "--allow" in options:
        machine.ask("http://127.0.0.1:9/v1")
    for style in ("json", "stream-json"):
        done = await machine.crow("run", "Hi", *options, "--output-format", style)
        assert done.code == 2, done.err
        assert said in read(done)["error"]
        assert done.err
    assert (await machine.crow("run", "Hi", *options)).out == ""


@pytest.mark.posix("processes are sent no signals there")
@pytest.mark.parametrize("number", [signal.SIGINT, *system.END_SIGNALS])
async def test_signal_has_its_exit_code_in_json_too(machine: "Machine", number: signal.Signals):
    async with ScriptedServer([Reply("Some.", hang=True)]) as server:
        machine.ask(server.url)
        process = await machine.start("run", "Go", "--output-format", "json")
        await server.until(lambda: bool(server.requests))
        process.send_signal(number)
        done = await machine.finish(process)
    assert done.code == 128 + number
    said = "Cancelled." if number == signal.SIGINT else f"Ended by the signal {number.name}."
    assert (read(done)["stop_reason"], read(done)["error"]) == ("cancelled", said)


@pytest.mark.parametrize("words", [["-p", "Hi"], ["--print", "Hi"], ["--yolo", "-p", "Hi"], ["-p", "--yolo", "Hi"]])
async def test_p_is_short_for_run(machine: "Machine", words: list[str]):
    async with ScriptedServer([Reply("Hello.")]) as server:
        machine.ask(server.url)
        done = await machine.crow(*words, stdin="and more\n")
    assert (done.code, done.out) == (0, "Hello.\n")
    assert server.requests[0]["messages"][-1]["content"] == "Hi\n\nand more"


async def test_no_session_stores_nothing(machine: "Machine"):
    async with ScriptedServer([Reply("Hello.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "Hi", "--no-session", "--output-format", "json")
    assert (done.code, read(done)["session_id"]) == (0, None)
    assert not (machine.home / "crow" / "crow.db").exists()


async def test_system_prompt_is_replaced_or_added_to(machine: "Machine"):
    async with ScriptedServer(lambda _: Reply("Hello.")) as server:
        machine.ask(server.url)
        await machine.crow("run", "Hi", "--system-prompt", "You are {{ a }} bird.")
        await machine.crow("run", "Hi", "--append-system-prompt", "Sing.")
    alone, added = (request["messages"][0]["content"] for request in server.requests)
    assert alone == "You are {{ a }} bird."
    assert "Sing." in added
    assert len(added) > 500


async def test_tools_are_those_that_are_named(machine: "Machine"):
    async with ScriptedServer(lambda _: Reply("Hello.")) as server:
        machine.ask(server.url)
        for names in ("grep,terminal", "", "read"):
            assert (await machine.crow("run", "Hi", "--no-session", "--tools", names)).code == 0
    few, none, group = ({tool["function"]["name"] for tool in body.get("tools", [])} for body in server.requests)
    assert {"grep", "terminal"} <= few
    assert "file_editor" not in few | none
    assert "grep" in group
    assert not {"terminal", "grep"} & none


SERVER = """
from fastmcp import FastMCP

server = FastMCP("birds")
server.tool(lambda: "tweet", name="sing")
server.run(show_banner=False)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inline", [True, False])
async def test_mcp_config_adds_servers(machine: "Machine", tmp_path: Path, inline: bool):
    (tmp_path / "birds.py").write_text(SERVER)
    config = json.dumps({"mcpServers": {"birds": {"command": sys.executable, "args": [str(tmp_path / "birds.py")]}}})
    (tmp_path / "servers.json").write_text(config)
    sing: ScriptedCall = {"name": "birds_sing", "arguments": {}}
    async with ScriptedServer([Reply(tool_calls=[sing]), Reply("Sung.")]) as server:
        machine.ask(server.url)
        named = config if inline else str(tmp_path / "servers.json")
        done = await machine.crow("run", "Sing", "--mcp-config", named, "--allow", "birds_sing")
    assert (done.code, done.out) == (0, "Sung.\n"), done.err
    assert "tweet" in server.requests[1]["messages"][-1]["content"]


async def test_edits_in_an_added_folder_are_those_of_the_project(machine: "Machine", tmp_path: Path):
    (further := tmp_path / "further").mkdir()
    edit = {"command": "create", "path": str(further / "a.txt"), "file_text": "1"}
    uses: list[ScriptedCall] = [{"name": "file_editor", "arguments": edit}]
    async with ScriptedServer([Reply(tool_calls=uses), Reply("Done.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "Go", "--mode", "accept-edits", "--add-dir", str(further))
    assert done.code == 0, done.err
    assert (further / "a.txt").read_text().strip() == "1"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("style", ["text", "json"])
async def test_question_goes_to_the_terminal_while_standard_input_is_piped(machine: "Machine", style: str):
    async with ScriptedServer([Reply(tool_calls=[command("touch ran")]), Reply("Done.")]) as server:
        machine.ask(server.url)
        here, there = pty.openpty()
        # A shell without a terminal that opens one gets it as its own.
        line = f'exec "$0" -m crow_cli run "Touch it:" --output-format {style} 2<>{os.ttyname(there)}'
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", line, sys.executable),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=machine.env,
            cwd=machine.project,
            start_new_session=True,
        )
        assert process.stdin
        process.stdin.write(b"ran\n")
        process.stdin.close()
        shown = b""
        while b"lways in this session: " not in shown:
            ready = asyncio.Event()
            asyncio.get_running_loop().add_reader(here, ready.set)
            await ready.wait()
            asyncio.get_running_loop().remove_reader(here)
            shown += os.read(here, 4096)
        os.write(here, b"y\n")
        assert process.stdout
        out = (await process.stdout.read()).decode()
        assert await process.wait() == 0
        os.close(there)
        os.close(here)
    assert out == "Done.\n" if style == "text" else json.loads(out)["text"] == "Done."
    assert server.requests[0]["messages"][-1]["content"] == "Touch it:\n\nran"
    assert (machine.project / "ran").exists()
