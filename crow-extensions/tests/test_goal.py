"""Turns go on until a goal is reached: until a command succeeds, or a judge says so, or a limit is reached."""

from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.acp.schema import ResumeSessionRequest
from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.mcp.server import Server
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import Prices
from crow_core.testing import Editor, MemoryStore, Reply, ScriptedModel, ScriptedServer, connect
from crow_extensions.commands import commands
from crow_extensions.goal import allow_command, goal

pytestmark = pytest.mark.anyio

TOOLS = Server("crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True)
CHECK = "cat answer; grep -q 42 answer || exit 3"
ALWAYS = {"every_turn": True}


def write(text: str) -> Reply:
    return Reply(
        tool_calls=[{"name": "file_editor", "arguments": {"command": "create", "path": "answer", "file_text": text}}]
    )


def app(model: ScriptedModel, **options: Any) -> Crow:
    return Crow(model, servers=[TOOLS]).use(commands).use(goal, **options)


async def turn(folder: Path, model: ScriptedModel, *prompts: str, **options: Any) -> tuple[Editor, str]:
    async with connect(app(model, **options)) as editor:
        session = await editor.new_session(str(folder))
        answers = [await editor.prompt(session.session_id, prompt) for prompt in prompts]
    return editor, answers[-1].stop_reason


def list_user_messages(model: ScriptedModel) -> list[str]:
    """Return the user messages in the last request."""
    return [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "user"]


async def test_turn_goes_on_until_the_command_of_the_goal_succeeds(tmp_path: Path):
    model = ScriptedModel([write("41"), Reply("Done."), write("42"), Reply("Now it is done."), Reply("Hello.")])
    editor, reason = await turn(tmp_path, model, "/goal Find the answer.", "hi", until=CHECK)
    assert reason == "end_turn"
    assert editor.text == "Done.Now it is done.Hello."
    first, told, _ = list_user_messages(model)
    assert first == "Find the answer."
    assert told.startswith(f"You are not done: `{CHECK}` failed (exit code 3).")
    assert told.endswith("\n\n41")
    assert "failed (exit code 3). Going on (2 of 50 requests)." in editor.thoughts
    assert "The goal is reached: " in editor.thoughts


async def test_judge_is_asked_without_a_command_and_its_verdict_is_shown(tmp_path: Path):
    replies = [Reply("I did it."), Reply("NO: nothing was run."), Reply("It runs."), Reply("Yes: the tests passed.")]
    model = ScriptedModel(replies)
    editor, _ = await turn(tmp_path, model, "/goal The tests pass.")
    assert "Judge whether this goal is reached" in model.requests[1]["messages"][-1]["content"]
    assert list_user_messages(model)[1] == ("The goal is not reached yet. nothing was run. Go on with what is missing.")
    assert editor.text == "I did it.It runs."
    assert "The judge says no: nothing was run. Going on (2 of 50 requests)." in editor.thoughts
    assert "The goal is reached: the judge says: the tests passed." in editor.thoughts


async def test_goal_that_can_never_hold_ends_at_its_limit_with_one_sentence(tmp_path: Path):
    model = ScriptedModel([*[Reply("Done.")] * 3, Reply("Hello.")])
    async with connect(app(model, until="false")) as editor:
        session = await editor.new_session(str(tmp_path))
        answer = await editor.prompt(session.session_id, "/goal Never requests=3")
        assert answer.stop_reason == "max_turn_requests"
        sentence = "The goal was not reached. The budget is used up: 3 of 3 requests. The last check: false failed"
        assert sentence in editor.text
        assert editor.text.endswith("/goal go tries again.")
        assert (await editor.prompt(session.session_id, "hi")).stop_reason == "end_turn"
    assert editor.text.endswith("Hello.")


@pytest.mark.parametrize(("limit", "used"), [("money=0.25", "0.3 of 0.25 money"), ("minutes=0.0001", " minutes")])
async def test_goal_ends_at_its_limit_of_money_and_of_time(tmp_path: Path, limit: str, used: str):
    usage = {"prompt_tokens": 90, "completion_tokens": 10}
    async with ScriptedServer(lambda request: Reply("Done.", usage=usage)) as server:
        model = ChatModel(name="m", base_url=server.url, prices=Prices(input=1000, output=1000))
        async with connect(Crow(model, servers=[TOOLS]).use(commands).use(goal, until="false")) as editor:
            session = await editor.new_session(str(tmp_path))
            answer = await editor.prompt(session.session_id, f"/goal Never {limit}")
    assert answer.stop_reason == "max_turn_requests"
    assert "The goal was not reached. The budget is used up: " in editor.text
    assert used in editor.text
    assert len(server.requests) == 3 if "money" in limit else len(server.requests) <= 1


async def test_goal_goes_on_after_a_restart_with_what_it_has_used(tmp_path: Path):
    store = MemoryStore()

    def restarted(*replies: Reply) -> Crow:
        crow = app(ScriptedModel(replies), until="test -e done")
        crow.store = store
        return crow

    async with connect(restarted(Reply("One."), Reply(error=ModelError("The model is down.")))) as editor:
        id = (await editor.new_session(str(tmp_path))).session_id
        with pytest.raises(Exception, match="down"):
            await editor.prompt(id, "/goal Make the file. requests=5")
    async with connect(restarted(Reply("Two."), Reply("Three."))) as editor:
        await editor.request("session/resume", ResumeSessionRequest(session_id=id, cwd=str(tmp_path), mcp_servers=[]))
        await editor.prompt(id, "/goal")
        assert "The goal: Make the file." in editor.text
        assert "Used: 2 of 5 requests." in editor.text
        (tmp_path / "done").touch()
        assert (await editor.prompt(id, "/goal go")).stop_reason == "end_turn"
        await editor.prompt(id, "/goal")
    assert "There is no goal." in editor.text


@pytest.mark.parametrize("allowed", [True, False])
async def test_command_of_a_goal_is_asked_about_unless_the_user_has_named_it(tmp_path: Path, allowed: bool):
    model = ScriptedModel([Reply("Done.")])
    crow = app(model).use(allow_command, command="true" if allowed else "false")
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        await editor.prompt(session.session_id, "/goal Do it. until = true")
    assert ("you did not allow `true`" in editor.text) is not allowed
    assert len(model.requests) == allowed


async def test_goal_that_was_given_up_is_tried_again_with_its_limits_anew(tmp_path: Path):
    model = ScriptedModel([Reply("One."), Reply("Two."), Reply("Three."), Reply("Four.")])
    check = 'echo >> tries; test "$(wc -l < tries)" -gt 3'
    editor, reason = await turn(tmp_path, model, "/goal Count on. requests=2", "/goal go", "/goal go", until=check)
    assert reason == "end_turn"
    assert list_user_messages(model)[2] == "Go on to the goal: Count on."
    assert editor.thoughts.count("Going on (1 of 2 requests).") == 2
    assert "The goal is reached: " in editor.thoughts
    assert "There is no goal." in editor.text


@pytest.mark.parametrize("words", ["requests=0", "until = true"])
async def test_program_reads_why_a_goal_is_not_set(tmp_path: Path, words: str):
    async with connect(app(ScriptedModel([])), permit="reject_once") as editor:
        session = await editor.new_session(str(tmp_path))
        answer = await editor.prompt(session.session_id, f"/goal Do it. {words}")
    sentence = (
        "A limit of a goal has to be above 0." if "0" in words else "The goal is not set: you did not allow `true`"
    )
    assert answer.meta
    assert answer.meta["crow"]["stopped"]["by"] == "goal"
    assert answer.meta["crow"]["stopped"]["reason"].startswith(sentence)


async def test_a_check_that_times_out_has_failed(tmp_path: Path):
    model = ScriptedModel([Reply("Done."), Reply("Done.")])
    await turn(tmp_path, model, "/goal Do it.", until="sleep 60", requests=2, timeout=0.05)
    assert "it took more than 0.05 seconds" in list_user_messages(model)[-1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("check", "timeout", "told"),
    [
        ("false", 60, "You are not done: `false` failed (exit code 1). It printed no text."),
        ("echo; exit 3", 60, "You are not done: `echo; exit 3` failed (exit code 3). It printed no text."),
        ("no-such-program", 60, "not found"),
        ("echo 7 of 9; sleep 60", 5, "(it took more than 5 seconds). The end of its output:\n\n7 of 9"),
    ],
)
async def test_the_model_reads_the_end_of_the_output_or_that_there_is_none(
    tmp_path: Path, check: str, timeout: float, told: str
):
    model = ScriptedModel([Reply("Done."), Reply("Done.")])
    await turn(tmp_path, model, "/goal Do it.", until=check, requests=2, timeout=timeout)
    assert list_user_messages(model)[-1].endswith(told)


async def test_every_turn_with_tool_calls_is_checked_and_no_other(tmp_path: Path):
    model = ScriptedModel([write("41"), Reply("Done."), write("42"), Reply("Done."), Reply("Hello.")])
    await turn(tmp_path, model, "go", "hi", until="grep -q 42 answer && rm answer", **ALWAYS)
    assert len(model.requests) == 5
    assert len(list_user_messages(model)) == 3


async def test_turns_end_by_themselves_after_goal_off(tmp_path: Path):
    model = ScriptedModel([write("41"), Reply("Done.")])
    await turn(tmp_path, model, "/goal off", "go", until="false", **ALWAYS)
    assert len(model.requests) == 2
