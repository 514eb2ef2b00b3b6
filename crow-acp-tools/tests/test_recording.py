"""`crow acp record` and `crow acp replay`: messages are not changed, none is lost, and they can be replayed."""

import asyncio
import json
import os
import random
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_acp_tools.recording.file import RecordedLine, parse_message, read_recording
from crow_acp_tools.recording.viewer import RecordingViewer
from crow_core.acp.schema import ClientCapabilities
from crow_core.acp.transports import spawn
from crow_core.testing import Editor, Reply, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

SUBJECT = (sys.executable, "-I", "-S", str(Path(__file__).with_name("subject.py")))


async def start(machine: "Machine", file: Path, *command: str) -> Process:
    """Start a command under the recorder, in a new process group."""
    crow = (sys.executable, "-m", "crow_cli", "acp", "record", "-o", str(file), "--")
    return await asyncio.create_subprocess_exec(
        *crow, *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=machine.env, start_new_session=True
    )


def read_side(file: Path, side: str) -> bytes:
    """Return everything that one side wrote, from the recording."""
    return b"\n".join(line.raw for line in read_recording(file) if line.side == side)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_all_bytes_pass_unchanged_and_are_recorded(machine: "Machine", tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    pieces = [b"\n", b"\r\n", b"\xff\xfe", b"\0", "é\u2028".encode(), b'{"jsonrpc":"2.0"}', chance.randbytes(1 << 16)]
    sent = b"".join(chance.choices(pieces, k=200))
    process = await start(machine, tmp_path / "wire.jsonl", "cat")
    came, _ = await process.communicate(sent)

    assert process.returncode == 0
    assert came == sent
    assert (
        read_side(tmp_path / "wire.jsonl", "client")
        == read_side(tmp_path / "wire.jsonl", "agent")
        == sent.removesuffix(b"\n")
    )


@pytest.mark.slow
async def test_a_line_of_many_megabytes_passes(machine: "Machine", tmp_path: Path) -> None:
    sent = b"a" * (40 << 20) + b"\nb"
    process = await start(machine, tmp_path / "wire.jsonl", "cat")
    came, _ = await process.communicate(sent)

    assert came == sent
    assert [len(line.raw) for line in read_recording(tmp_path / "wire.jsonl") if line.side == "agent"] == [40 << 20, 1]


async def test_the_first_half_of_a_line_does_not_wait_for_the_second(machine: "Machine", tmp_path: Path) -> None:
    process = await start(machine, tmp_path / "wire.jsonl", "cat")
    assert process.stdin
    assert process.stdout
    process.stdin.write(b'{"jsonrpc"')

    assert await process.stdout.readexactly(10) == b'{"jsonrpc"'
    await process.communicate(b"")


async def test_exit_code_is_the_agents(machine: "Machine", tmp_path: Path) -> None:
    process = await start(machine, tmp_path / "wire.jsonl", "sh", "-c", "echo bye; echo oh >&2; exit 7")

    assert await process.communicate(b"") == (b"bye\n", b"oh\n")
    assert process.returncode == 7


async def test_signal_reaches_the_agent_and_its_last_output_is_recorded(machine: "Machine", tmp_path: Path) -> None:
    script = "trap 'echo last words; exit 3' TERM; echo ready; while :; do sleep 0.1; done"
    process = await start(machine, tmp_path / "wire.jsonl", "sh", "-c", script)
    assert process.stdout
    await process.stdout.readline()
    os.killpg(process.pid, signal.SIGTERM)
    came, _ = await process.communicate(b"")

    assert (process.returncode, came) == (3, b"last words\n")
    assert read_side(tmp_path / "wire.jsonl", "agent") == b"ready\nlast words"


async def test_output_before_the_agent_is_killed_is_recorded(machine: "Machine", tmp_path: Path) -> None:
    process = await start(machine, tmp_path / "wire.jsonl", "sh", "-c", "read line; echo got $line; sleep 600")
    assert process.stdin
    assert process.stdout
    process.stdin.write(b"this\n")
    await process.stdout.readline()
    os.killpg(process.pid, signal.SIGKILL)
    await process.communicate(b"")

    assert process.returncode == -signal.SIGKILL
    assert read_side(tmp_path / "wire.jsonl", "client") == b"this"
    assert read_side(tmp_path / "wire.jsonl", "agent") == b"got this"


async def test_an_agent_whose_client_is_gone_ends_as_it_would_without_a_recorder(
    machine: "Machine", tmp_path: Path
) -> None:
    process = await start(machine, tmp_path / "wire.jsonl", "yes")
    assert process.stdout
    await process.stdout.readline()
    process.stdout._transport.close()  # type: ignore[attr-defined]

    assert await process.wait() == -signal.SIGPIPE


async def write_until_closed(stdin: asyncio.StreamWriter) -> None:
    """Write until the other side closes."""
    while True:
        stdin.write(b"hello?\n" * 10_000)
        await stdin.drain()


async def test_client_notices_that_its_agent_closed_its_input(machine: "Machine", tmp_path: Path) -> None:
    process = await start(machine, tmp_path / "wire.jsonl", "sh", "-c", "exec <&-; echo deaf; read line; sleep 600")
    assert process.stdin
    assert process.stdout
    await process.stdout.readline()

    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        await write_until_closed(process.stdin)
    os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def test_conversation_continues_when_the_recording_cannot_be_written(machine: "Machine", tmp_path: Path) -> None:
    record = f"{sys.executable} -m crow_cli acp record -o {tmp_path / 'wire.jsonl'} -- cat"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f"ulimit -f 64; exec {record}", stdin=PIPE, stdout=PIPE, stderr=PIPE, env=machine.env
    )
    sent = b"0123456789abcdef\n" * 100_000
    came, err = await process.communicate(sent)

    assert (process.returncode, came == sent) == (0, True)
    assert err == b"crow: the recording ends here: File too large.\n"
    assert set(read_side(tmp_path / "wire.jsonl", "client").split(b"\n")) == {b"0123456789abcdef"}


async def test_each_recording_has_its_own_private_file(machine: "Machine", tmp_path: Path) -> None:
    for _ in range(3):
        await (await start(machine, tmp_path / "wire.jsonl", "true")).communicate(b"")
    default = await machine.crow("acp", "record", "--", "true")

    assert default.code == 0
    files = {name: os.stat(Path(folder, name)) for folder, _, names in os.walk(tmp_path) for name in names}
    recordings = {name: found.st_mode & 0o777 for name, found in files.items() if name.endswith(".jsonl")}
    kept = next(name for name in recordings if name.endswith("-true.jsonl"))
    assert recordings == dict.fromkeys(["wire.jsonl", "wire-2.jsonl", "wire-3.jsonl", kept], 0o600)


async def test_missing_command_is_one_sentence(machine: "Machine", tmp_path: Path) -> None:
    process = await start(machine, tmp_path / "wire.jsonl", "no-such-agent")

    assert (await process.communicate(b""))[1] == (
        b"crow: the agent cannot be started: there is no command no-such-agent.\n"
    )
    assert process.returncode == 2
    assert not (tmp_path / "wire.jsonl").exists()


async def record_conversation(machine: "Machine", file: Path) -> None:
    """Record an editor with the test agent: two sessions, a command, and a turn that is cancelled."""
    command = (sys.executable, "-m", "crow_cli", "acp", "record", "-o", str(file), "--", *SUBJECT)
    ear, mouth = os.pipe()
    with os.fdopen(mouth, "wb") as stderr:
        editor = Editor(await spawn(command[0], command[1:], machine.env, stderr=stderr))
    async with editor.serving():
        await editor.initialize("editor", ClientCapabilities())
        one, two = [(await editor.new_session(str(machine.project))).session_id for _ in range(2)]
        await editor.prompt(one, "Run the command `echo crow`.")
        turn = asyncio.create_task(editor.prompt(two, "Count."))
        await editor.until(lambda editor: editor.text == "Hello.one")
        await editor.cancel(two)
        assert (await turn).stop_reason == "cancelled"
    with os.fdopen(ear, "rb") as stderr:
        assert await asyncio.to_thread(stderr.read) == b""  # which ends with the recorder


async def test_replay_shows_sides_messages_and_times(machine: "Machine", tmp_path: Path) -> None:
    file = tmp_path / "wire.jsonl"
    await record_conversation(machine, file)
    done = await machine.crow("acp", "replay", str(file))

    assert done.code == 0
    shown = [line.split(maxsplit=2)[1:] for line in done.out.splitlines()]
    heads = [(arrow, " ".join(words.split()[:2])) for arrow, words in shown]
    assert heads == [
        ("→", "initialize #1"),
        ("←", "initialize #1"),
        ("→", "session/new #2"),
        ("←", "session/new #2"),
        ("→", "session/new #3"),
        ("←", "session/new #3"),
        ("→", "session/prompt #4"),
        ("←", "session/update tool_call"),
        ("←", 'session/request_permission #"mine-1"'),
        ("→", 'session/request_permission #"mine-1"'),
        ("←", "session/update tool_call_update"),
        ("←", "session/update agent_message_chunk"),
        ("←", "session/prompt #4"),
        ("→", "session/prompt #5"),
        ("←", "session/update agent_message_chunk"),
        ("→", 'session/cancel {"sessionId":"session-1"}'),
        ("←", "session/prompt #5"),
    ]
    answers = [words for arrow, words in shown if words.startswith("session/prompt") and arrow == "←"]
    assert all(re.search(r" after \d+(\.\d)? m?s  ", words) for words in answers)


async def test_replay_can_be_filtered_by_method_and_session_and_show_whole_messages(
    machine: "Machine", tmp_path: Path
) -> None:
    file = tmp_path / "wire.jsonl"
    await record_conversation(machine, file)
    prompts = await machine.crow("acp", "replay", str(file), "--method", "session/p*")
    session = await machine.crow("acp", "replay", str(file), "--session", "session-1")
    full = await machine.crow("acp", "replay", str(file), "--method", "session/cancel", "--full")

    assert len(prompts.out.splitlines()) == 4
    assert [line.split()[2] for line in session.out.splitlines()] == [
        "session/new",
        "session/prompt",
        "session/update",
        "session/cancel",
        "session/prompt",
    ]
    head, *rest = full.out.splitlines()
    assert head.endswith("session/cancel")
    assert json.loads("".join(rest))["params"] == {"sessionId": "session-1"}


def make_line(raw: bytes, side: Any = "agent") -> RecordedLine:
    return RecordedLine(1.0, side, raw, parse_message(raw))


def test_replay_marks_requests_without_answer_and_answers_without_request() -> None:
    viewer = RecordingViewer()
    viewer.render(make_line(b'{"jsonrpc":"2.0","id":1,"method":"initialize"}', "client"))
    viewer.render(make_line(b'{"jsonrpc":"2.0","id":2,"method":"session/new"}', "client"))
    once, again, stray, junk = [
        viewer.render(make_line(raw))
        for raw in (
            b'{"jsonrpc":"2.0","id":1,"result":{}}',
            b'{"jsonrpc":"2.0","id":1,"result":{}}',
            b'{"jsonrpc":"2.0","id":"1","result":{}}',
            b"Welcome!",
        )
    ]

    assert " again" not in once
    assert " again" in again
    assert "an answer to no request" in stray
    assert "no message" in junk
    assert "Welcome!" in junk
    [missing] = viewer.list_unanswered()
    assert missing.endswith("session/new #2 was not answered")


@pytest.mark.parametrize("full", [False, True])
def test_replay_does_not_control_the_terminal(full: bool) -> None:
    evil = "\x1b[2J\x07\u202e"
    viewer = RecordingViewer(full=full)
    update = {"sessionUpdate": evil, "content": {"text": evil}}
    messages: list[dict[str, Any]] = [
        {"jsonrpc": "2.0", "id": evil, "method": evil, "params": {"sessionId": evil, "update": update}},
        {"jsonrpc": "2.0", "id": evil, "result": {evil: evil}},
        {"jsonrpc": "2.0", "id": evil, "error": {"message": evil}},
    ]
    raw = [json.dumps(message, ensure_ascii=False).encode() for message in messages] + [evil.encode(), b"\x9b\xff"]
    shown = [
        viewer.render(make_line(line, side)) for line in raw for side in ("client", "agent")
    ] + viewer.list_unanswered()

    assert len(shown) >= 10
    ours = ("\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[36m", "\x1b[0m", "\n")
    for line in shown:
        for style in ours:
            line = line.replace(style, "")
        assert not any(ord(letter) < 32 or letter in "\x9b\u202e" for letter in line), repr(line)


async def test_incomplete_recording_is_shown_as_far_as_possible(machine: "Machine", tmp_path: Path) -> None:
    file = tmp_path / "wire.jsonl"
    await record_conversation(machine, file)
    file.write_bytes(file.read_bytes()[:-60])
    cut = await machine.crow("acp", "replay", str(file))
    (tmp_path / "other.txt").write_text("Dear diary\n")
    other = await machine.crow("acp", "replay", str(tmp_path / "other.txt"))

    assert (cut.code, cut.err) == (0, "")
    assert len(cut.out.splitlines()) >= 16
    assert other.code == 2
    assert other.err == f"crow: {tmp_path / 'other.txt'} cannot be replayed: it does not begin as a recording does.\n"


async def test_a_recorded_agent_can_be_played_to_an_editor(machine: "Machine", tmp_path: Path) -> None:
    file = tmp_path / "wire.jsonl"
    await record_conversation(machine, file)
    crow = ["-m", "crow_cli", "acp", "replay", str(file), "--as", "agent"]
    with (tmp_path / "stderr").open("wb") as stderr:
        editor = Editor(await spawn(sys.executable, crow, machine.env, stderr=stderr))
        async with editor.serving():
            await editor.initialize("another editor", ClientCapabilities())
            one, two = [(await editor.new_session("/elsewhere")).session_id for _ in range(2)]
            assert (await editor.prompt(one, "Anything else.")).stop_reason == "end_turn"
            turn = asyncio.create_task(editor.prompt(two, "More."))
            await editor.until(lambda editor: editor.text == "Hello.one")
            await editor.cancel(two)

            assert (await turn).stop_reason == "cancelled"
    assert (one, two) == ("session-0", "session-1")
    assert editor.calls() == {"call-1": ["pending", "completed"]}
    assert len(editor.questions) == 1


async def test_recorded_client_can_be_played_to_an_agent_with_other_ids(machine: "Machine", tmp_path: Path) -> None:
    file = tmp_path / "wire.jsonl"
    await record_conversation(machine, file)
    async with ScriptedServer([Reply("As you say."), Reply("one two", hang=True), Reply()]) as server:
        machine.ask(server.url)
        crow = (sys.executable, "-m", "crow_cli", "acp")
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if "mine-1" not in line))  # crow will not ask
        done = await machine.crow("acp", "replay", str(file), "--as", "client", "--speed", "1", "--", *crow)

    assert (done.code, done.err) == (0, "")
    assert "← session/prompt #5 after" in done.out
    assert done.out.rstrip().endswith('{"stopReason":"cancelled"}')
    assert "session-0" not in done.out


async def test_client_that_differs_from_the_recording_is_reported(machine: "Machine", tmp_path: Path) -> None:
    file = tmp_path / "wire.jsonl"
    await record_conversation(machine, file)
    agent = await machine.start("acp", "replay", str(file), "--as", "agent", stdin=PIPE)
    done = await machine.finish(agent, b'{"jsonrpc":"2.0","id":1,"method":"session/new","params":{}}\n')

    assert done.code == 1
    assert done.err.endswith(
        "crow: the conversation differs from the recording: the client ended before initialize came.\n"
    )
