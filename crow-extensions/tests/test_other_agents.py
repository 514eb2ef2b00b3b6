"""Other ACP agents as tools: real processes, which the client sees through the call."""

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.decoding import encode
from crow_core.acp.schema import (
    BlockContent,
    ClientCapabilities,
    ClientSessionCapabilities,
    CreateElicitationResponse,
    DiffContent,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
    ElicitationUrlCapabilities,
    FileSystemCapabilities,
    NoticeCapabilities,
    NoticeUpdate,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SetSessionModeRequest,
    TerminalOutputRequest,
    TextBlock,
    ToolCall,
    ToolCallUpdate,
)
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.masking import MASK
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_extensions import agent_requests
from crow_extensions import other_agents as module
from crow_extensions.agent_settings import AgentSettings
from crow_extensions.budgets import budgets
from crow_extensions.commands import commands
from crow_extensions.mask_secrets import mask_secrets
from crow_extensions.other_agents import other_agents
from crow_extensions.sub_agent import REPORT
from crow_extensions.subagents import subagents
from crow_extensions.undo import undo
from crow_extensions.usage import usage
from crow_permissions.extension import permissions
from crow_permissions.taint import taint
from crow_testing.clock import advance_clock
from crow_testing.process_states import is_alive

pytestmark = pytest.mark.anyio

ALL = ClientCapabilities(
    fs=FileSystemCapabilities(read_text_file=True, write_text_file=True),
    terminal=True,
    elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()),
)


def puppet(fault: str = "", **more: Any) -> AgentSettings:
    settings: dict[str, Any] = {
        "command": sys.executable,
        "args": ["-m", "crow_testing.agent_without_model", fault],
        **more,
    }
    return AgentSettings(**settings)


def ask(*lines: str, id: str = "one", name: str = "ask_puppet") -> Reply:
    return Reply(tool_calls=[{"name": name, "arguments": {"prompt": "\n".join(lines)}, "id": id}])


def make(
    *replies: Reply,
    agent: AgentSettings | None = None,
    hidden: tuple[str, ...] = (),
    permit: Callable[[Crow], object] = lambda crow: None,
) -> tuple[Crow, ScriptedModel]:
    model = ScriptedModel(replies)
    settings = {"puppet": agent or puppet()}
    permit(crow := Crow(model))
    return crow.use(other_agents, find=lambda session: settings, env=os.environ, hidden=hidden), model


def answer(model: ScriptedModel) -> str:
    """The answer that the model got to its last call."""
    return model.requests[-1]["messages"][-1]["content"]


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_model_gives_work_to_another_agent_and_gets_its_last_message(tmp_path: Path):
    crow, model = make(ask("say I look.", "call a", "done a", "say Found ", "say it."), Reply("Good."))
    async with connect(crow) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "go")
    assert answer(model) == "Found it."
    (schema,) = model.requests[0]["tools"]
    assert schema["function"]["name"] == "ask_puppet"
    assert list(schema["function"]["parameters"]["properties"]) == ["prompt"]
    assert editor.calls() == {"one": ["pending", "in_progress", "completed"], "one/a": ["pending", "completed"]}
    titles = [update.title for update in editor.of(ToolCallUpdate) if update.tool_call_id == "one" and update.title]
    assert titles[-1] == "puppet: say I look."


async def test_description_of_the_agent_is_for_the_model(tmp_path: Path):
    crow, model = make(Reply("Good."), agent=puppet(description="Writes plays."))
    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    assert model.requests[0]["tools"][0]["function"]["description"].startswith("Writes plays.\n\nGive this agent")


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_its_diffs_questions_files_and_terminals_are_those_of_our_client(tmp_path: Path):
    (tmp_path / "a.txt").write_text("on the disk")
    lines = ("diff b.txt", "ask b", "read a.txt", "write c.txt sea", "run echo loud", "form")
    crow, model = make(ask(*lines), Reply("Good."))
    async with connect(crow, capabilities=ALL) as editor:
        editor.buffers[str(tmp_path / "a.txt")] = "in the editor. "
        editor.answer = CreateElicitationResponse(action="accept", content={"name": "Ada"})
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "go")
    assert (tmp_path / "c.txt").read_text() == "sea"
    assert answer(model) == "loud\naccept {'name': 'Ada'}"
    (diff,) = (update for update in editor.of(ToolCall) if update.tool_call_id == "one/diff")
    assert isinstance(diff.content, list)
    assert isinstance(diff.content[0], DiffContent)
    (question,) = editor.questions
    assert (question.session_id, question.tool_call.tool_call_id) == (id, "one/b")
    assert {params.session_id for _, params in editor.requests} == {id}
    (form,) = editor.forms
    assert form.session_id == id
    assert not editor.terminals
    assert not editor.missing_terminals


SECRET = "sk-ak47f9b1c3d5e7"


async def test_what_the_client_sees_of_it_has_no_secrets(tmp_path: Path):
    """Also where a secret comes in pieces, in a question, a title, a diff, or a form."""
    pieces = [f"say {'x' * 600} {SECRET[:7]}", f"say {SECRET[7:]} {'y' * 600}"]
    lines = [*pieces, f"diff {SECRET}.txt", f"ask {SECRET}", f"form {SECRET}"]
    crow, model = make(ask(*lines), Reply("Good."), permit=lambda crow: crow.use(mask_secrets, known=[SECRET]))
    async with connect(crow, capabilities=ALL) as editor:
        editor.answer = CreateElicitationResponse(action="accept", content={"name": "Ada"})
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    shown = [update for update in editor.updates if not is_own(update)]
    for seen in (shown, editor.questions, editor.forms, [answer(model)]):
        text = encode(seen).decode()
        assert SECRET[:7] not in text
        assert MASK in text or seen == [answer(model)]


def is_own(update: Any) -> bool:
    """Whether an update repeats the arguments of our model's own call, whose words stay as they are."""
    return isinstance(update, ToolCall | ToolCallUpdate) and update.tool_call_id == "one" and bool(update.raw_input)


async def test_its_edits_through_the_client_can_be_undone(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\r\n")
    (tmp_path / "b.txt").write_text("as before")
    crow, _ = make(
        ask("write a.txt one", "write a.txt two", "write new.txt sea", "write b.txt as before"), Reply("Good.")
    )
    crow.use(commands).use(undo)
    async with connect(crow, capabilities=ALL) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "go")
        assert (tmp_path / "a.txt").read_text() == "two"
        await editor.prompt(id, "/undo")
        assert f"`{tmp_path / 'new.txt'}`: will be removed" in editor.text
        assert "b.txt" not in editor.text
        await editor.prompt(id, "/undo yes")
    assert (tmp_path / "a.txt").read_bytes() == b"caf\xe9\r\n"
    assert not (tmp_path / "new.txt").exists()


async def test_its_edit_of_a_file_that_somebody_has_changed_since_is_not_undone(tmp_path: Path):
    crow, _ = make(ask("write a.txt one"), Reply("Good."))
    crow.use(commands).use(undo)
    async with connect(crow, capabilities=ALL) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "go")
        (tmp_path / "a.txt").write_text("mine")
        await editor.prompt(id, "/undo yes")
        assert "has been changed by somebody else since" in editor.text
    assert (tmp_path / "a.txt").read_text() == "mine"


async def test_its_edit_is_known_although_the_turn_was_cancelled(tmp_path: Path):
    crow, _ = make(ask("write a.txt one", "wait"))
    crow.use(commands).use(undo)
    async with connect(crow, capabilities=ALL) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "go"))
        await wait_until(lambda: (tmp_path / "a.txt").exists())
        await editor.cancel(id)
        await turn
        await editor.prompt(id, "/undo yes")
    assert not (tmp_path / "a.txt").exists()


async def test_it_is_offered_only_what_our_client_has(tmp_path: Path):
    crow, model = make(ask("read a.txt", "write a.txt x", "run echo", "form"), Reply("Good."))
    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    assert not editor.requests
    assert answer(model).count("Method not found") == 4


async def test_call_needs_a_permission(tmp_path: Path):
    crow, model = make(ask("say Done."), Reply("Good."), permit=permissions)
    async with connect(crow, permit="reject_once") as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    (question,) = editor.questions
    assert question.tool_call.kind == "execute"
    assert "the user rejected it" in answer(model)


async def test_plan_mode_starts_no_agent(tmp_path: Path):
    crow, model = make(ask("say Done."), Reply("Good."), permit=partial(permissions, mode="plan"))
    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    assert "plan mode only reads" in answer(model)


async def test_mode_yolo_asks_nothing(tmp_path: Path):
    crow, model = make(ask("ask b"), Reply("Good."), permit=partial(permissions, mode="yolo"))
    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    assert not editor.questions
    assert answer(model) == "b: go. "


async def test_questions_of_two_agents_come_one_at_a_time(tmp_path: Path):
    calls = [*ask("call a", "ask a", id="one").tool_calls, *ask("call b", "ask b", id="two").tool_calls]
    crow, model = make(Reply(tool_calls=calls), Reply("Good."))
    async with connect(crow) as editor:
        open_questions: list[int] = []
        waiting, answered = 0, editor.connection._requests["session/request_permission"]

        async def slow(question: Any) -> Any:
            nonlocal waiting
            waiting += 1
            open_questions.append(waiting)
            await editor.until(lambda it: {"one", "two"} <= {id.partition("/")[0] for id in it.calls() if "/" in id})
            waiting -= 1
            return await answered[0](question)

        editor.connection._requests["session/request_permission"] = slow, answered[1]
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    assert open_questions == [1, 1]
    assert [message["content"] for message in model.requests[-1]["messages"][-2:]] == ["a: go. ", "b: go. "]


async def test_long_text_is_shown_as_content_of_the_call(tmp_path: Path):
    crow, _ = make(ask("say " + "x" * 500, "wait"), Reply("Good."))
    async with connect(crow) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "go"))
        await editor.until(lambda it: shown(it) == ["x" * 500])
        await editor.cancel(id)
        assert (await turn).stop_reason == "cancelled"


def shown(editor: Editor) -> list[str]:
    return [
        part.content.text
        for update in editor.of(ToolCallUpdate)
        if update.tool_call_id == "one"
        for part in update.content or []
        if isinstance(part, BlockContent) and isinstance(part.content, TextBlock)
    ]


@pytest.mark.posix("the commands are those of a POSIX shell")
@pytest.mark.parametrize("stuck", ["wait", "deaf"])
async def test_cancel_ends_the_turn_and_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: str):
    monkeypatch.setattr(module, "CANCEL_GRACE", 0.5)
    crow, _ = make(ask("call a", "spawn", "say " + " " * 500, stuck), Reply("Good."))
    async with connect(crow) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "go"))
        await editor.until(shown)
        pid = int(shown(editor)[0])
        assert is_alive(pid)
        await editor.cancel(id)
        assert (await turn).stop_reason == "cancelled"
        assert editor.calls()["one/a"][-1] == "failed"
        assert editor.calls()["one"][-1] == "failed"
    await wait_until(lambda: not is_alive(pid))


async def test_cancel_answers_its_question_and_withdraws_ours(tmp_path: Path):
    crow, _ = make(ask("ask a"), Reply("Good."))
    async with connect(crow, permit=None) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "go"))
        await editor.until(lambda it: it.questions)
        await editor.cancel(id)
        assert (await turn).stop_reason == "cancelled"
        await editor.until(lambda it: it.cancelled_questions)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fault", "lines", "words"),
    [
        ("exit", "", "ended with exit code 1. It said: There is no key. Set PUPPET_KEY."),
        ("silent", "", "did not answer within 1 seconds. Is it an ACP agent?"),
        ("flood", "", "did not answer within 1 seconds. Is it an ACP agent?"),
        ("no session", "", "did not answer within 1 seconds."),
        ("version", "", "It speaks version 99 of ACP, not 1."),
        ("login", "", "It wants a log-in first (Authentication required). Log in with its own command"),
        ("", "say Half.\ndie 3 Segfault", "ended with exit code 3. It said: Segfault\n\nIts last words:\n\nHalf."),
        ("", "refuse Too much.", "failed: Too much."),
        ("", "say Half.\nstop max_tokens", "it did not come to its end (max_tokens).\n\nIts last words:\n\nHalf."),
        ("", "", "the prompt is empty"),
    ],
)
async def test_agent_that_fails_is_an_error_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, lines: str, words: str
):
    slow = fault in ("silent", "flood", "no session")
    monkeypatch.setattr(module, "START_TIMEOUT", 1.0 if slow else 60.0)
    prompt = lines if lines or not fault else "say Hello."
    crow, model = make(ask(prompt), Reply("Good."), agent=puppet(fault))
    async with connect(crow) as editor:
        response = await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
        assert response.stop_reason == "end_turn"
        assert editor.calls()["one"][-1] == "failed"
    assert words in answer(model)


async def test_rubbish_beside_the_protocol_is_ignored(tmp_path: Path):
    crow, model = make(ask("print Now what?", "print {}", "say Done."), Reply("Good."), agent=puppet("rubbish"))
    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    assert answer(model) == "Done."


async def test_command_that_does_not_exist_is_an_error_for_the_model(tmp_path: Path):
    crow, model = make(ask("say Hi."), Reply("Good."), agent=AgentSettings(command="no-such-agent"))
    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    assert "The agent puppet failed: no-such-agent cannot be started: " in answer(model)


async def test_task_that_takes_too_long_is_cancelled(tmp_path: Path):
    crow, model = make(ask("say Half." + " " * 500, "wait"), Reply("Good."), agent=puppet(timeout=300))
    async with connect(crow) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        turn = asyncio.ensure_future(editor.prompt(id, "go"))
        await editor.until(shown)
        advance_clock(300)
        await turn
    assert "it was not done within 300 seconds, and was cancelled.\n\nIts last words:\n\nHalf." in answer(model)


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_terminal_that_it_leaves_is_released_and_its_open_calls_fail(tmp_path: Path):
    crow, _ = make(ask("open sleep 600", "say Done."), Reply("Good."))
    async with connect(crow, capabilities=ALL) as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
        assert editor.opened_terminals == 1
        assert not editor.terminals
        assert editor.calls()["one/run"] == ["failed"]


async def test_its_cost_and_tokens_count_in_our_budget_and_totals(tmp_path: Path):
    crow, _ = make(ask("cost 0.25", "cost 0.75", "say Done."), Reply("Good."), Reply("Never."))
    crow.use(usage).use(budgets, money=0.5)
    async with connect(crow, permit="reject_once") as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        response = await editor.prompt(id, "go")
        totals = await editor.request("_crow/usage", {"sessionId": id})
    assert response.stop_reason == "max_turn_requests"
    assert "0.75 of 0.5 money" in editor.text
    assert totals["cost"] == {"amount": 0.75, "currency": "USD"}
    assert totals["inputTokens"] > 100


async def test_its_environment_is_ours_without_our_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUR_KEY", "secret-of-ours")
    monkeypatch.setenv("SOME", "some. ")
    settings = puppet(env={"ITS_KEY": "its. "}, cwd="sub")
    (tmp_path / "sub").mkdir()
    crow, model = make(
        ask("env OUR_KEY", "env SOME", "env ITS_KEY", "cwd"), Reply("Good."), agent=settings, hidden=("OUR_KEY",)
    )
    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    assert answer(model) == f"unsetsome. its. {tmp_path / 'sub'} {tmp_path}"


async def test_sub_agent_may_ask_another_agent(tmp_path: Path):
    task = Reply(tool_calls=[{"name": "agent", "arguments": {"description": "x", "prompt": "y"}, "id": "top"}])
    ours, theirs = [task, Reply("Good.")], [ask("call a", "ask a", "done a"), Reply("It said go.")]

    def play(request: dict[str, Any]) -> Reply:
        is_child = request["messages"][1]["content"].endswith(REPORT)
        return (theirs if is_child else ours).pop(0)

    crow = Crow(ScriptedModel(play)).use(subagents)
    crow.use(other_agents, find=lambda session: {"puppet": puppet()}, env=os.environ)
    async with connect(crow) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "go")
    assert editor.calls()["top/one/a"] == ["pending", "completed"]
    assert [(q.session_id, q.tool_call.tool_call_id) for q in editor.questions] == [(id, "top/one/a")]


async def test_two_agents_work_at_once(tmp_path: Path):
    calls = [*ask("write a x", "say a", id="one").tool_calls, *ask("say b", id="two").tool_calls]
    crow, model = make(Reply(tool_calls=calls), Reply("Good."))
    async with connect(crow) as editor:
        await editor.prompt((await editor.new_session(str(tmp_path))).session_id, "go")
    assert [m["content"] for m in model.requests[-1]["messages"][-2:]][1] == "b"


# Its requests are judged like calls of our own tools

PAGES = ElicitationCapabilities(form=ElicitationFormCapabilities(), url=ElicitationUrlCapabilities())
EVERYTHING = ClientCapabilities(
    fs=FileSystemCapabilities(read_text_file=True, write_text_file=True),
    terminal=True,
    elicitation=PAGES,
    session=ClientSessionCapabilities(notices=NoticeCapabilities()),
)


class Chooser(Editor):
    """An editor whose user allows the tool call itself, and answers the later questions as `later` says."""

    later = "reject_once"

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        self.permit = self.later if self.questions else "allow_once"
        return await super().on_permission(question)


async def give(
    folder: Path, *lines: str, later: str = "reject_once", tainted: bool = False, mode: str = "", **rules: Any
) -> tuple[str, Chooser]:
    """Let the puppet do what the lines say; return its last message and the editor."""

    def use(crow: Crow) -> None:
        crow.use(permissions, **rules)
        if tainted:
            crow.use(taint)

    crow, model = make(ask(*lines), Reply("Good."), permit=use)
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    editor = Chooser(ours)
    editor.later = later
    editor.answer = CreateElicitationResponse(action="accept", content={"name": "Ada"})
    async with editor.serving():
        await editor.initialize("editor", EVERYTHING)
        id = (await editor.new_session(str(folder))).session_id
        if mode:
            await editor.request("session/set_mode", SetSessionModeRequest(session_id=id, mode_id=mode))
        await editor.prompt(id, "go")
    await agent
    await crow.shut_down()
    return answer(model), editor


def seen(editor: Editor) -> set[str]:
    """The methods that the client was asked."""
    return set(editor.list_requested_methods())


async def test_it_reads_and_writes_only_below_the_roots(tmp_path: Path):
    (inside := tmp_path / "project").mkdir()
    (tmp_path / "secret").write_text("canary")
    (inside / "link").symlink_to(tmp_path)
    paths = (tmp_path / "secret", inside / "../secret", inside / "link/secret", Path("/etc/passwd"))
    for path in paths:
        said, editor = await give(inside, f"read {path}", f"write {path} x", later="allow_once")
        assert "is outside of the folders of this session" in said
        assert "canary" not in said
        assert seen(editor) == set()
        assert len(editor.questions) == 1
    assert (tmp_path / "secret").read_text() == "canary"


async def test_rules_protected_files_and_modes_hold_for_its_files(tmp_path: Path):
    (tmp_path / ".env").write_text("canary")
    said, editor = await give(tmp_path, "read .env", "write .env x", deny=["*:.env"], mode="yolo")
    assert "the rule '*:.env' says deny" in said
    assert seen(editor) == set()
    said, editor = await give(tmp_path, "write AGENTS.md x", mode="accept-edits")
    assert "AGENTS.md is not allowed: the user rejected it" in said
    (_, question) = editor.questions
    assert question.tool_call.title == f"The agent puppet: create {tmp_path}/AGENTS.md"
    assert "AGENTS.md" in str(question.tool_call.content)
    assert os.listdir(tmp_path) == [".env"]
    said, editor = await give(tmp_path, "write a.txt x", mode="accept-edits")
    assert len(editor.questions) == 1
    assert (tmp_path / "a.txt").read_text() == "x"


async def test_crows_own_files_are_asked_about(tmp_path: Path):
    own = tmp_path / "crow"
    own.mkdir()
    said, editor = await give(tmp_path, "write crow/config.toml x", mode="accept-edits", own=[str(own)])
    assert "is not allowed" in said
    assert "crow's own files" in str(editor.questions[-1].tool_call.content)


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_its_commands_are_asked_about_unless_a_rule_allows_them(tmp_path: Path):
    said, editor = await give(tmp_path, "run touch made")
    assert "not run: " in said
    assert [str(question.tool_call.title) for question in editor.questions[1:]] == ["The agent puppet: touch made"]
    assert os.listdir(tmp_path) == []
    said, editor = await give(tmp_path, "run touch made", "run rm made", allow=["terminal:*"], deny=["terminal:rm *"])
    assert "says deny" in said
    assert os.listdir(tmp_path) == ["made"]
    said, editor = await give(tmp_path, "run sh -c 'rm made'", allow=["terminal"], deny=["terminal:rm *"])
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.posix("the commands are those of a POSIX shell")
async def test_what_it_reads_taints_the_session(tmp_path: Path):
    (tmp_path / ".env").write_text("canary ")
    lines = ("read .env", "run curl http://127.0.0.1:9/")
    said, editor = await give(tmp_path, *lines, tainted=True, allow=["terminal:curl *"])
    assert said.startswith("canary")
    (_, question) = editor.questions
    assert "has read private data" in str(question.tool_call.content)
    assert "terminal/create" not in seen(editor)


async def test_its_forms_and_pages_are_checked_and_named(tmp_path: Path):
    lines = ("secret", "say  ", "page javascript:alert(1)", "say  ", "page http://example.org/")
    said, editor = await give(tmp_path, *lines)
    assert editor.forms == []
    assert said == "decline decline decline"
    assert editor.of(NoticeUpdate)[0].title.startswith("A question of the agent puppet was declined: ")
    said, editor = await give(tmp_path, "form", "page https://example.org/")
    assert [form.message for form in editor.forms] == ["The agent puppet: Your name?", "The agent puppet: Log in"]
    assert said == "accept {'name': 'Ada'}accept"


async def test_it_asks_a_limited_number_of_questions(tmp_path: Path):
    _, editor = await give(tmp_path, *["form"] * 30)
    assert len(editor.forms) == agent_requests.QUESTIONS_LIMIT
    assert len([notice for notice in editor.of(NoticeUpdate) if "declined" in notice.title]) == 1


async def test_it_uses_no_terminal_that_it_did_not_create(tmp_path: Path):
    task = agent_requests.AgentRequests.__new__(agent_requests.AgentRequests)
    task.terminals = {"terminal-1"}
    request = TerminalOutputRequest(session_id="s", terminal_id="terminal-2")
    with pytest.raises(RpcError, match="Not found"):
        await task.use_terminal("terminal/output", request)


async def test_its_question_keeps_the_title_of_its_call_and_names_it(tmp_path: Path):
    said, editor = await give(tmp_path, "call a", "choose allow_once reject_once", later="allow_once")
    assert editor.questions[-1].tool_call.title == "The agent puppet: Call a"
    assert "'0'" in said


async def test_question_without_options_is_refused(tmp_path: Path):
    said, editor = await give(tmp_path, "choose ")
    assert said == "not asked: The question has no options."
    assert len(editor.questions) == 1


async def test_flood_of_its_notices_is_cut(tmp_path: Path):
    _, editor = await give(tmp_path, "notices 300")
    titles = [notice.title for notice in editor.of(NoticeUpdate)]
    assert titles[0] == "The agent puppet: notice 0"
    assert titles[-1] == "The agent puppet: further notices of this task are not shown."
    assert len(titles) == 21
