"""Every session of this folder ends as its file says, and keeps what holds for all sessions."""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine, Prefork

    from conftest import Play

pytestmark = pytest.mark.anyio

FILES = sorted(Path(__file__).parent.glob("*.toml"))
QUICK = {
    *("budget", "cancel_command", "compact_command", "editor_files", "failing_test", "hooks", "killed_in_a_reply"),
    *("many_calls_at_once", "permission_denied", "rename_across_files", "skill", "subagents", "undo", "goal"),
}
"""One session of each kind: played also without `--slow`, and in processes of their own in `.ci/run`."""
STEP = 1 if os.environ.get("CROW_SOAK") else 3
SURVIVORS = [file for file in FILES if "\nrestarts = false" not in file.read_text()][::STEP]
"""Sessions that end in the same way if the agent is killed: every third one, and all with CROW_SOAK=1."""
LEGAL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


PlaySession = Callable[..., Awaitable["Play"]]


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=pytest.mark.processes if file.stem in QUICK else pytest.mark.slow)
        for file in FILES
    ],
)
async def test_session_ends_as_its_file_says(
    file: Path, machine: "Machine", play_session: PlaySession, forks: "Prefork | None"
) -> None:
    play = await play_session(file)
    machine.prefork = forks  # for the commands that check
    await check_play(play, machine)


@pytest.mark.slow
@pytest.mark.parametrize("file", SURVIVORS, ids=[file.stem for file in SURVIVORS])
async def test_session_ends_in_the_same_way_if_the_agent_is_killed_after_every_tool_call(
    file: Path, machine: "Machine", play_session: PlaySession, forks: "Prefork | None"
) -> None:
    machine.prefork = forks  # always, for many starts
    await check_play(await play_session(file, kills=True), machine)


async def check_play(play: "Play", machine: "Machine") -> None:
    assert play.faults == []
    assert [expected.where for expected in play.expected.values() if expected.holds or expected.lacks] == []
    check_files(play)
    for request in play.server.requests:
        check_request(request)
    for before, loaded in play.loads:
        assert loaded == before
    assert machine.stderr.read_text() == ""
    await check_nothing_is_left(machine)
    check_calls(play)
    for command in (("db", "check"), ("audit", "verify")):
        checked = await machine.crow(*command)
        assert checked.code == 0, checked.out


def check_files(play: "Play") -> None:
    """Check that the project holds the files of the start, with the differences that the file names."""
    project = play.machine.project
    found = {
        str(path.relative_to(project)): path.read_bytes().decode(errors="replace")
        for path in project.rglob("*")
        if path.is_file() and not {".git", "__pycache__"} & set(path.parts)
    }
    wanted: dict[str, Any] = play.fill({**play.file.files, **play.file.after})
    for name, text in wanted.items():
        if text is True:
            wanted[name] = found.get(name)
    assert found == {name: text for name, text in wanted.items() if text is not False}
    if play.file.check:
        play.run_command(play.file.check)


def check_request(request: dict[str, Any]) -> None:
    """Check that a strict endpoint would take a request."""
    names = [tool["function"]["name"] for tool in request.get("tools", [])]
    assert len(set(names)) == len(names)
    assert all(tool["function"]["parameters"]["type"] == "object" for tool in request.get("tools", []))
    system, *messages = request["messages"]
    assert system["role"] == "system"
    assert messages[0]["role"] == "user"
    assert messages[-1]["role"] in ("user", "tool")
    ids: list[str] = []
    waiting: list[str] = []
    before = "system"
    for message in messages:
        role = message["role"]
        assert message.keys() <= {"role", "content", "reasoning_content", "tool_calls", "tool_call_id"}
        if role == "tool":
            assert waiting.pop(0) == message["tool_call_id"]
            assert isinstance(message["content"], str)
        else:
            assert not waiting
            assert role != before
        if role == "assistant":
            calls = message.get("tool_calls", [])
            assert calls or message["content"]
            for call in calls:
                names.append(call["function"]["name"])
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
            waiting = [call["id"] for call in calls]
            ids += waiting
        before = role
    assert not waiting
    assert all(LEGAL_NAME.fullmatch(name) for name in names)
    assert len(set(ids)) == len(ids)


async def check_nothing_is_left(machine: "Machine") -> None:
    """Check that all processes of the agent have ended, and that the folder of temporary files is empty."""
    mark = f"HOME={machine.home}".encode()

    def list_processes() -> list[str]:
        left: list[str] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    left.append((folder / "cmdline").read_text().replace("\0", " "))
            except OSError:  # it has ended, or belongs to someone else
                continue
        return left

    async with asyncio.timeout(60):
        while list_processes():
            await asyncio.sleep(0.02)
    assert os.listdir(machine.env["TMPDIR"]) == []


def check_calls(play: "Play") -> None:
    """Check that the database has every request as it was sent, and the token counts of every reply."""
    rows = play.query("SELECT digest, usage FROM calls ORDER BY started")
    assert play.query("SELECT * FROM drafts") == []
    assert play.query("SELECT id FROM sessions WHERE owner IS NOT NULL") == []
    lacking = {hashlib.sha256(body).hexdigest() for body in play.server.bodies} - {digest for digest, _ in rows}
    assert len(lacking) <= play.kills  # of a request that the kill came next after
    counts = [json.loads(usage) for _, usage in rows if usage]
    assert [count for count in play.usages if count not in counts] == []
