"""A turn goes on until a check succeeds, or until the model has checked its own work."""

from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_extensions.commands import commands
from crow_extensions.until_done import QUESTION, until_done

pytestmark = pytest.mark.anyio

TOOLS = Server("crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True)


def write(text: str) -> Reply:
    return Reply(
        tool_calls=[{"name": "file_editor", "arguments": {"command": "create", "path": "answer", "file_text": text}}]
    )


async def turn(folder: Path, model: ScriptedModel, *prompts: str, **options: Any) -> tuple[Editor, str]:
    crow = Crow(model, servers=[TOOLS]).use(commands).use(until_done, **options)
    async with connect(crow) as editor:
        session = await editor.new_session(str(folder))
        for prompt in prompts or ("go",):
            answer = await editor.prompt(session.session_id, prompt)
    return editor, answer.stop_reason


def list_user_messages(model: ScriptedModel) -> list[str]:
    """Return the user messages in the last request."""
    return [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "user"]


async def test_a_turn_goes_on_until_the_check_succeeds(tmp_path: Path):
    model = ScriptedModel([write("41"), Reply("Done."), write("42"), Reply("Now it is done.")])
    editor, reason = await turn(tmp_path, model, check="cat answer; grep -q 42 answer || exit 3")
    assert reason == "end_turn"
    assert editor.text == "Done.Now it is done."
    (_, told) = list_user_messages(model)
    assert told.startswith("You are not done: `cat answer; grep -q 42 answer || exit 3` failed (exit code 3).")
    assert told.endswith("\n\n41")
    assert "failed; going on (1 of 5)." in editor.thoughts


async def test_a_turn_ends_after_the_allowed_number_of_rounds(tmp_path: Path):
    model = ScriptedModel([write("41"), *[Reply("Done.")] * 3])
    editor, reason = await turn(tmp_path, model, check="false", times=2)
    assert reason == "end_turn"
    assert len(model.requests) == 4
    assert "Not done after 2 more rounds" in editor.thoughts


async def test_a_check_that_times_out_has_failed(tmp_path: Path):
    model = ScriptedModel([write("41"), Reply("Done."), Reply("Done.")])
    await turn(tmp_path, model, check="sleep 60", times=1, timeout=0.05)
    assert "it took more than 0.05 seconds" in list_user_messages(model)[-1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("check", "told"),
    [
        ("false", "You are not done: `false` failed (exit code 1). It printed no text."),
        ("echo; exit 3", "You are not done: `echo; exit 3` failed (exit code 3). It printed no text."),
        ("no-such-program", "not found"),
        ("echo 7 of 9; sleep 60", "(it took more than 2 seconds). The end of its output:\n\n7 of 9"),
    ],
)
async def test_the_model_reads_the_end_of_the_output_or_that_there_is_none(tmp_path: Path, check: str, told: str):
    model = ScriptedModel([write("41"), Reply("Done."), Reply("Done.")])
    await turn(tmp_path, model, check=check, times=1, timeout=2)
    assert list_user_messages(model)[-1].endswith(told)


async def test_a_turn_without_tool_calls_is_not_checked(tmp_path: Path):
    model = ScriptedModel([write("1"), Reply("Done."), Reply("Hello.")])
    await turn(tmp_path, model, "go", "hi", check="test $(cat answer) = 1 && rm answer")
    assert len(model.requests) == 3


@pytest.mark.parametrize("word", ["DONE", "All is well. DONE."])
async def test_without_a_check_the_model_is_asked_whether_it_is_done(tmp_path: Path, word: str):
    model = ScriptedModel([write("41"), Reply("DONE"), write("42"), Reply("Better."), Reply(word)])
    await turn(tmp_path, model)
    assert list_user_messages(model) == ["go", QUESTION, QUESTION]


async def test_until_done_can_be_switched_off(tmp_path: Path):
    model = ScriptedModel([write("41"), Reply("Done.")])
    await turn(tmp_path, model, "/until_done off", "go", check="false")
    assert len(model.requests) == 2
