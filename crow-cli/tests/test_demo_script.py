"""The script that plays the demo's model, with good tools and with broken ones."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from crow_cli.demo import demo_script as script
from crow_cli.demo.demo_script import BUG, FAILING, FIX, TASK, TESTS, next_reply
from crow_core.testing.script import Reply, to_deltas

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("file_editor", "terminal")]

RED = f"""\
======================================================================
FAIL: {FAILING} (test_pancakes.Pancakes.{FAILING})
----------------------------------------------------------------------
Traceback (most recent call last):
  File "/tmp/demo/test_pancakes.py", line 13, in {FAILING}
    self.assertEqual(pancakes.amounts(6)["eggs"], 3)
AssertionError: 2 != 3

----------------------------------------------------------------------
Ran 7 tests in 0.001s

FAILED (failures=1)
[exit code 1]"""
GREEN = "----------------------------------------------------------------------\nRan 7 tests in 0.001s\n\nOK\n"
CODE = f"    12\t    return {{name: amount * ({BUG}) for name, amount in RECIPE.items()}}"
EDITED = f"Edited /tmp/demo/pancakes.py:\n{CODE.replace(BUG, FIX)}"


def after(*results: Any, earlier: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return a request in which the tools have returned these results."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are crow."}, *earlier]
    messages.append({"role": "user", "content": TASK})
    for number, result in enumerate(results):
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "any", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return {"model": "scripted", "tools": TOOLS, "stream": True, "messages": messages}


def test_first_reply_runs_the_tests() -> None:
    assert next_reply(after()).tool_calls == [{"name": "terminal", "arguments": {"command": TESTS}}]


def test_reply_to_the_failure_reads_the_code() -> None:
    reply = next_reply(after(RED))

    assert reply.content == "One of 7 tests fails, with `2 != 3`. I look at `pancakes.py`."
    assert reply.tool_calls == [{"name": "file_editor", "arguments": {"command": "view", "path": "pancakes.py"}}]


def test_reply_to_the_code_edits_the_line() -> None:
    assert next_reply(after(RED, CODE)).tool_calls == [
        {
            "name": "file_editor",
            "arguments": {"command": "str_replace", "path": "pancakes.py", "old_str": BUG, "new_str": FIX},
        }
    ]


def test_reply_to_the_edit_runs_the_tests_again() -> None:
    assert next_reply(after(RED, CODE, EDITED)).tool_calls == [{"name": "terminal", "arguments": {"command": TESTS}}]


def test_last_reply_reports_the_results() -> None:
    reply = next_reply(after(RED, CODE, EDITED, GREEN))

    assert reply.tool_calls == []
    assert "`2 != 3`" in reply.content
    assert reply.content.endswith("Before, one of 7 tests failed. Now **all 7 pass**.")


def test_results_with_parts_colours_and_carriage_returns_are_parsed() -> None:
    red = [{"type": "text", "text": RED.replace("FAIL:", "\x1b[1;31mFAIL\x1b[0m:").replace("\n", "\r\n")}]
    green = [{"type": "text", "text": GREEN.replace("OK", "\x1b[1;32mOK\x1b[0m").replace("\n", "\r\n")}]

    assert "all 7 pass" in next_reply(after(red, CODE, EDITED, green)).content


def test_results_of_an_earlier_turn_are_ignored() -> None:
    earlier = after(RED, CODE, EDITED, GREEN)["messages"][1:]

    assert next_reply(after(earlier=earlier)).tool_calls == next_reply(after()).tool_calls


@pytest.mark.parametrize(
    ("results", "complaint"),
    [
        (["bash: python3: command not found\n[exit code 127]"], "The terminal tool did not show a run of the tests"),
        ([""], "The terminal tool did not show a run of the tests"),
        ([GREEN], "The terminal tool did not show the one failing test"),
        ([RED.replace(FAILING, "test_other")], "The terminal tool did not show the one failing test"),
        ([RED.replace("failures=1", "failures=2")], "The terminal tool did not show the one failing test"),
        ([RED, "def amounts(people): ..."], f"The file_editor tool did not show the line with `{BUG}`"),
        ([RED, CODE, f"old_str is not in pancakes.py. The closest lines are:\n{CODE}"], "The file_editor tool did not"),
        ([RED, CODE, "The user rejected this call."], f"The file_editor tool did not show `pancakes.py` with `{FIX}`"),
        ([RED, CODE, EDITED, ""], "The terminal tool did not show the second run"),
        ([RED, CODE, EDITED, RED], "The tests do not pass after the edit"),
        ([RED, CODE, EDITED, GREEN + "[exit code 1]"], "The tests do not pass after the edit"),
        ([RED, CODE, EDITED, GREEN.replace("7", "3")], "The first run had 7 tests and the second 3"),
    ],
)
def test_broken_tool_ends_the_demo_with_an_explanation(results: list[str], complaint: str) -> None:
    reply = next_reply(after(*results))

    assert reply.tool_calls == []
    assert reply.content.startswith(complaint)
    assert ", so I stop here." in reply.content
    assert results[-1].strip()[-50:] in reply.content
    assert "Fixed" not in reply.content


def test_missing_tool_is_named() -> None:
    reply = next_reply(after() | {"tools": TOOLS[:1]})

    assert reply.content == ("I was not given the tool terminal, so I stop here. What I got:\n\n```\nfile_editor\n```")


def test_packaged_project_is_fixed_by_the_scripts_tool_calls(tmp_path: Path) -> None:
    shutil.copytree(Path(script.__file__).parent / "project", tmp_path, dirs_exist_ok=True)
    results: list[str] = []
    replies: list[Reply] = []
    while not replies or replies[-1].tool_calls:
        replies.append(next_reply(after(*results)))
        results += [run_tool(call["arguments"], tmp_path) for call in replies[-1].tool_calls]

    assert "Now **all 4 pass**." in replies[-1].content
    assert FIX in (tmp_path / "pancakes.py").read_text()
    assert sum(reply.pace for turn, reply in enumerate(replies) for _ in to_deltas(reply, turn)) < 4


def run_tool(arguments: Any, folder: Path) -> str:
    """Run a tool call of the script with the standard library alone."""
    match arguments:
        case {"command": "view", "path": str(path)}:
            return (folder / path).read_text()
        case {"command": "str_replace", "path": str(path), "old_str": str(old), "new_str": str(new)}:
            text = (folder / path).read_text()
            assert text.count(old) == 1
            (folder / path).write_text(text.replace(old, new))
            return f"Edited {path}:\n{(folder / path).read_text()}"
        case {"command": str(command)}:
            done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=False)
            return done.stdout + done.stderr + (f"\n[exit code {done.returncode}]" if done.returncode else "")
        case _:
            raise AssertionError(arguments)
