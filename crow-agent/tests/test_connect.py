"""Agents of other programs, through `Agent.connect`: real processes, and one made with the official Python SDK."""

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crow_agent.agent as agent_module
import crow_agent.agent_client as client_module
import crow_agent.session as session_module
import pytest
from crow_agent import Agent, AgentClosed, AgentError, AgentLost, Budget, PromptFailed, PromptTimeout
from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_agent.settings.project_files import take_snapshot
from crow_agent.settings.trust import TrustedFolders
from crow_core.acp.schema import AgentMessageChunk, ReadTextFileRequest
from crow_core.testing import Reply, ScriptedServer
from crow_testing.process_states import is_alive

pytestmark = pytest.mark.anyio

SDK_AGENT = """
import asyncio
import acp
from acp.schema import *


class Echo(acp.Agent):
    def on_connect(self, conn):
        self.client, self.count = conn, 0

    async def initialize(self, protocol_version, **kwargs):
        return InitializeResponse(protocol_version=acp.PROTOCOL_VERSION)

    async def new_session(self, cwd, **kwargs):
        self.count += 1
        return NewSessionResponse(session_id=f"echo-{self.count}")

    async def prompt(self, session_id, prompt, **kwargs):
        text = prompt[0].text
        await self.client.session_update(session_id, acp.update_agent_message_text("I begin."))
        await self.client.session_update(session_id, acp.start_tool_call("c", "Say it", kind="other"))
        options = [PermissionOption(option_id="go", name="Go", kind="allow_once")]
        answer = await self.client.request_permission(session_id, ToolCallUpdate(tool_call_id="c", title="c"), options)
        await self.client.session_update(session_id, acp.update_tool_call("c", status="completed"))
        for piece in (text, ", ", answer.outcome.option_id):
            await self.client.session_update(session_id, acp.update_agent_message_text(piece))
        return PromptResponse(stop_reason="end_turn")


asyncio.run(acp.run_agent(Echo()))
"""


def puppet(fault: str = "", **options: Any) -> Agent:
    return Agent.connect([sys.executable, "-m", "crow_testing.agent_without_model", fault], **options)


async def test_twenty_tasks_through_an_agent_made_with_the_python_sdk(tmp_path: Path) -> None:
    agent = Agent.connect([sys.executable, "-c", SDK_AGENT], cwd=tmp_path, permissions="allow")
    async with agent:
        results = await agent.map([f"task {n}" for n in range(20)], at_once=5)
    assert [result.text for result in results] == [f"task {n}, go" for n in range(20)]
    assert {len(result.tool_calls) for result in results} == {1}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("fault", "words", "code"),
    [
        ("exit", "ended with exit code 1. It said: There is no key. Set PUPPET_KEY.", 1),
        ("silent", "did not answer initialize within 1 seconds. Is it an ACP agent?", None),
        ("flood", "did not answer initialize within 1 seconds. Is it an ACP agent?", None),
        ("no session", "did not answer session/new within 1 seconds.", None),
    ],
)
async def test_agent_that_does_not_start_is_lost(
    monkeypatch: pytest.MonkeyPatch, fault: str, words: str, code: int | None
) -> None:
    for module in (client_module, agent_module):
        monkeypatch.setattr(module, "START_TIMEOUT", 60.0 if fault == "exit" else 1.0)
        if fault == "no session":
            monkeypatch.setattr(client_module, "START_TIMEOUT", 60.0)
    agent = puppet(fault)
    with pytest.raises(AgentLost, match=words) as caught:
        await agent.prompt("say Hi.")
    assert caught.value.exit_code == code
    await agent.close()


@pytest.mark.parametrize("command", ["no-such-agent acp", "", "'open"])
async def test_command_that_cannot_start_is_lost(command: str) -> None:
    with pytest.raises(AgentLost, match=r"cannot be started: .*\.$"):
        await Agent.connect(command).prompt("Hi.")


async def test_rubbish_beside_the_protocol_is_ignored() -> None:
    async with puppet("rubbish") as agent:
        assert (await agent.prompt("print Now what?\nsay Done.")).text == "Done."


async def test_agent_that_dies_in_a_turn_is_lost_with_what_it_said() -> None:
    async with puppet() as agent:
        with pytest.raises(AgentLost, match=r"exit code 3. It said: Segfault") as caught:
            await agent.prompt("say Half.\ndie 3 Segfault")
        assert caught.value.result is not None
        assert caught.value.result.text == "Half."
        with pytest.raises(AgentLost, match="exit code 3"):
            await agent.prompt("say Hi.")


async def test_agent_that_never_answers_a_cancel_or_a_close_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "CANCEL_TIMEOUT", 0.5)
    monkeypatch.setattr(session_module, "CLOSE_TIMEOUT", 0.5)
    async with puppet("slow close") as agent:
        with pytest.raises(PromptTimeout):
            await agent.prompt("deaf", timeout=1)


async def test_log_in_is_asked_for_and_done() -> None:
    async with puppet("login") as agent:
        with pytest.raises(PromptFailed, match=r"It wants a log-in first .* Its methods: key: Set PUPPET_KEY."):
            await agent.prompt("say Hi.")
        with pytest.raises(AgentError, match=r"no log-in method 'other'. It offers: key."):
            await agent.login("other")
        await agent.login()
        assert (await agent.prompt("say Hi.")).text == "Hi."


async def test_version_2_is_spoken_with_an_agent_that_offers_it(tmp_path: Path) -> None:
    use = Reply("Look.", tool_calls=[{"name": "terminal", "arguments": {"command": "echo $((6 * 7)) > made"}}])
    async with ScriptedServer([use, Reply("It is 42."), Reply("Yes.")]) as model:
        env = {
            "CROW_HOME": str(tmp_path / "crow"),
            "CROW_SANDBOX": "off",
            "OPENAI_BASE_URL": model.url,
            "OPENAI_API_KEY": "key",
            "CROW_MODEL": "scripted",
        }
        command = [sys.executable, "-m", "crow_cli", "acp"]
        async with Agent.connect(command, version=2, permissions="allow", cwd=tmp_path, env=env) as agent:
            session = await agent.session()
            result = await session.prompt("go")
            assert (result.text, result.stop_reason) == ("It is 42.", "end_turn")
            assert (tmp_path / "made").read_text() == "42\n"
            id = session.id
            await session.close()
            again = await agent.session(id)
            assert (await again.prompt("Sure?")).text == "Yes."


async def test_an_agent_without_version_2_is_spoken_to_in_the_first() -> None:
    async with puppet(version=2) as agent:
        assert (await agent.prompt("say Hi.")).text == "Hi."


async def test_what_an_agent_does_not_offer_is_a_sentence() -> None:
    async with puppet() as agent:
        session = await agent.session()
        assert session.modes is not None
        await session.set_mode("loud")
        assert session.modes.current_mode_id == "loud"
        for attempt, words in (
            (session.set_mode("no"), "no mode 'no'. It has: loud, soft."),
            (session.set_option("x", "y"), "no option 'x'. It has: none."),
            (session.fork(), "cannot fork a session"),
            (session.steer("Left."), "takes no words while a prompt runs"),
            (session.background(), "has no background"),
            (agent.session("puppet-9"), "offers neither resume nor load"),
        ):
            with pytest.raises(AgentError, match=words):
                await attempt


async def test_two_agents_and_their_starts_do_not_mix_and_leave_no_process() -> None:
    async with puppet() as one, puppet() as two:
        found = await asyncio.gather(one.prompt("spawn"), one.prompt("spawn"), two.prompt("spawn"))
        pids = [int(result.text) for result in found]
        assert all(map(is_alive, pids))
    async with asyncio.timeout(60):
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.01)


HOLDS_BACK = """
import json, sys
for at, line in enumerate(sys.stdin):
    if at < int(sys.argv[1]):
        answer = {"jsonrpc": "2.0", "id": json.loads(line)["id"], "result": {"protocolVersion": 1}}
        print(json.dumps(answer), flush=True)
"""
"""An agent that answers so many requests, and no more."""


@pytest.mark.parametrize("how", ["prompt", "stream", "map"])
@pytest.mark.parametrize("answered", ["0", "1"])
async def test_timeout_covers_the_start_of_the_agent_and_of_its_session(how: str, answered: str) -> None:
    agent = Agent.connect([sys.executable, "-c", HOLDS_BACK, answered])

    async def send() -> None:
        match how:
            case "prompt":
                await agent.prompt("Go.", timeout=1.5)
            case "stream":
                await agent.stream("Go.", timeout=1.5)
            case _:
                (result,) = await agent.map(["Go."], timeout=1.5)
                raise result.error or AssertionError

    try:
        with pytest.raises(PromptTimeout, match=r"not done within 1\.5 seconds"):
            async with asyncio.timeout(60):
                await send()
    finally:
        await agent.close()


async def test_limit_of_a_cost_that_an_agent_does_not_tell_is_an_error() -> None:
    async with puppet(budget=Budget(money=1)) as agent:
        with pytest.raises(AgentError, match="does not tell the money of a turn") as raised:
            await agent.prompt("say Done.")
        assert raised.value.result is not None
        assert raised.value.result.text == "Done."


async def test_budget_counts_the_cost_of_each_turn_once() -> None:
    budget = Budget(money=10)
    async with puppet(budget=budget) as agent:
        session = await agent.session()
        costs = [(await session.prompt(f"cost {total}\nsay 1")).cost for total in (0.25, 0.75)]
    assert costs == [0.25, 0.5]
    assert budget.spent["money"] == 0.75


async def test_prompt_after_the_end_says_that_the_agent_is_closed() -> None:
    agent = puppet()
    session = await agent.session()
    await agent.close()
    with pytest.raises(AgentClosed):
        await session.prompt("say Hi.")


async def test_examples_of_the_page_on_other_agents_run(home: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text("utf-8")
    (program,) = re.findall(r"^```py\n(.*?)^```", page, re.M | re.S)
    (settings,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    (home / "crow").mkdir()
    (home / "crow" / "config.toml").write_text(settings)
    agents = load_config(Home.find({"HOME": str(home), "CROW_HOME": str(home / "crow")}), {}).agents
    assert agents["opencode"].timeout == 1800
    command = f"{sys.executable} -m crow_testing.agent_without_model"
    for there, here in (("opencode acp", command), ('"plan"', '"loud"'), ("Where are the tests?", "say In tests.")):
        assert there in program
        program = program.replace(there, here)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=tmp_path, stdout=-1, stderr=-1)
    out, errors = await process.communicate()
    assert (out.decode(), errors.decode()) == ("In tests.\n", "")


async def test_nobody_at_the_address() -> None:
    with pytest.raises(AgentLost, match=r"ws://127.0.0.1:9/ cannot be reached"):
        await Agent.connect("ws://127.0.0.1:9/", token="x" * 16).prompt("Hi.")


async def test_agent_reads_writes_and_runs_through_the_program(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    asked: list[Any] = []

    def permit(question: Any) -> bool:
        asked.append(question.tool_call)
        return "b.txt" not in question.tool_call.title or "b.txt stays as it is."

    async with puppet(cwd=tmp_path, permissions=permit) as agent:
        stream = agent.stream("read a.txt\nwrite new/c.txt sea\nwrite b.txt no\nrun sh -c 'pwd; exit 3'")
        said = [update.content.text async for update in stream if isinstance(update, AgentMessageChunk)]
    result = stream.result
    assert said == ["one\ntwo\n", "not written: Not allowed: Write b.txt: b.txt stays as it is.", f"{tmp_path}\n"]
    assert (tmp_path / "new" / "c.txt").read_text() == "sea"
    assert not (tmp_path / "b.txt").exists()
    assert [call.title for call in asked] == ["Write new/c.txt", "Write b.txt", "sh -c 'pwd; exit 3'"]
    assert [call.kind for call in asked] == ["edit", "edit", "execute"]
    assert asked[0].content[0].new_text == "sea"
    assert [call.title for call in result.denied] == ["Write b.txt"]


async def test_agent_works_only_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret.txt")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    async with puppet(cwd=folder, permissions="allow") as agent:
        for name in ("../secret.txt", "link", "missing.txt", "picture.png", "."):
            assert (await agent.prompt(f"read {name}")).text.startswith("not read: "), name
        for name in ("../secret.txt", "link", "."):
            assert (await agent.prompt(f"write {name} gone")).text.startswith("not written: "), name
        assert (await agent.prompt("run no-such-program")).text.startswith("not run: ")
    assert (tmp_path / "secret.txt").read_text() == "secret"


@pytest.mark.parametrize(
    ("options", "offered"),
    [({"permissions": "deny"}, 1), ({"permissions": "allow"}, 3), ({"permissions": "allow", "workspace": False}, 0)],
)
async def test_agent_is_offered_what_it_may_use(tmp_path: Path, options: dict[str, Any], offered: int) -> None:
    (tmp_path / "a.txt").write_text("one")
    async with puppet(cwd=tmp_path, **options) as agent:
        texts = [(await agent.prompt(line)).text for line in ("read a.txt", "write b.txt two", "run echo three")]
    assert sum("Method not found" in text for text in texts) == 3 - offered


async def test_write_that_the_agent_has_asked_about_is_not_asked_about_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def permit(question: Any) -> bool:
        asked.append(question.tool_call.title)
        return True

    async with puppet(cwd=tmp_path, permissions=permit) as agent:
        await agent.prompt("ask a.txt\nwrite a.txt one\nwrite a.txt two")
        await agent.prompt("write a.txt three")
    assert asked == ["Call a.txt", "Write a.txt", "Write a.txt"]


async def test_terminal_that_an_agent_leaves_open_ends_with_its_session(tmp_path: Path) -> None:
    async with puppet(cwd=tmp_path, permissions="allow") as agent:
        async with await agent.session() as session:
            await session.prompt("open sh -c 'setsid sleep 600 & echo $! > pid; wait'")
            async with asyncio.timeout(60):
                while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
                    await asyncio.sleep(0.01)
            pid = int((tmp_path / "pid").read_text())
            assert is_alive(pid)
        async with asyncio.timeout(60):
            while is_alive(pid):
                await asyncio.sleep(0.01)


async def test_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    async with puppet(cwd=tmp_path) as agent, await agent.session() as session:
        client = await agent.open()
        assert client.workspace is not None
        for line, limit, text in ((None, None, "one\ntwo\nthree\n"), (2, None, "two\nthree\n"), (2, 1, "two\n")):
            request = ReadTextFileRequest(session_id=session.id, path=str(tmp_path / "a.txt"), line=line, limit=limit)
            assert (await client.workspace.read(request)).content == text


def write_agents(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    args = '["-m", "crow_testing.agent_without_model"]'
    text = f'[permissions]\nask = []\n[agents.{name}]\ncommand = "{sys.executable}"\nargs = {args}\n'
    (folder / "config.toml").write_text(text)


@pytest.mark.parametrize("trusted", [True, False])
async def test_agents_of_the_configuration_are_tools_and_those_of_a_folder_only_if_it_is_trusted(
    make_agent: Callable[..., Agent], home: Path, tmp_path: Path, trusted: bool
) -> None:
    write_agents(home / "crow", "mine")
    write_agents(tmp_path / ".crow", "theirs")
    if trusted:
        TrustedFolders(home / "crow").add(take_snapshot(tmp_path))
    work = {"name": "ask_mine", "arguments": {"prompt": "call a\ndone a\ncost 0.5\nsay Found it."}}
    budget = Budget(money=1)
    agent = make_agent(Reply(tool_calls=[work]), Reply("Good."), permissions="allow", budget=budget)
    async with agent:
        result = await agent.prompt("Go.")
    request = agent.model.requests[1]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    assert request["messages"][-1]["content"] == "Found it."
    names = {tool["function"]["name"] for tool in request["tools"]}
    assert {name for name in names if name.startswith("ask_")} - {"ask_user"} == (
        {"ask_mine", "ask_theirs"} if trusted else {"ask_mine"}
    )
    assert len(result.tool_calls) == 2
    assert budget.spent["money"] == 0.5
