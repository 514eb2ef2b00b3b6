"""A script that answers as a model would. It relies on the tools' output, so a broken tool ends the demo."""

import re
import sys
from typing import Any, NamedTuple

import crow_system as system
from crow_core.testing.script import Reply

TESTS_COMMAND = [sys.executable, "-m", "unittest", "-q"]
TESTS = system.join_command(TESTS_COMMAND)
"""The shell command that runs the project's tests, with an interpreter that exists."""

TASK = (
    f"One test of this small project fails. Run the tests with `{TESTS}`, find the bug and fix it in the code, not in "
    "the test. Then run the tests again and tell me in a few sentences what was wrong."
)
"""The prompt of the demo. It contains all that a real model needs, too."""

FRAGMENT_DELAY = 0.007
"""Seconds between the fragments of a reply: visibly streamed, and finished within a few seconds."""

FILE = "pancakes.py"
BUG = "people // SERVES"
FIX = "people / SERVES"
FAILING = "test_six_people_need_half_as_much_again"

RAN = re.compile(r"^Ran (\d+) tests? in ", re.M)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class FirstRun(NamedTuple):
    ran: str
    """The number of tests that ran."""
    difference: str
    """The message of the failed assertion."""


class UnexpectedOutput(Exception):
    """The output of a tool lacks what the next step needs."""

    def __init__(self, problem: str, output: str) -> None:
        super().__init__(f"{problem}, so I stop here. {_quote_output(output)}")


def next_reply(request: dict[str, Any]) -> Reply:
    """Return the reply to a chat-completions request: run the tests, read, fix, run them again, or report."""
    try:
        _expect_tools(request)
        match _results(request):
            case []:
                return _reply("I run the tests first, to see what fails.", "terminal", command=TESTS)
            case [tests]:
                failure = _parse_failure(tests)
                words = f"One of {failure.ran} tests fails, with `{failure.difference}`. I look at `{FILE}`."
                return _reply(words, "file_editor", command="view", path=FILE)
            case [_, code]:
                _expect_bug(code)
                words = f"There it is: `{BUG}` counts whole recipes only. One character too many."
                return _reply(words, "file_editor", command="str_replace", path=FILE, old_str=BUG, new_str=FIX)
            case [_, _, edit]:
                _expect_edit(edit)
                return _reply("Now the tests again.", "terminal", command=TESTS)
            case results:
                tests, _, _, again, *_ = results
                failure = _parse_failure(tests)
                _expect_success(again, failure.ran)
                return Reply(_report(failure), pace=FRAGMENT_DELAY)
    except UnexpectedOutput as surprise:
        return Reply(str(surprise), pace=FRAGMENT_DELAY)


def _reply(words: str, tool: str, **arguments: str) -> Reply:
    return Reply(words, tool_calls=[{"name": tool, "arguments": arguments}], pace=FRAGMENT_DELAY)


def _results(request: dict[str, Any]) -> list[str]:
    """List the results of the tool calls since the last user message, oldest first."""
    results: list[str] = []
    for message in request["messages"]:
        if message["role"] == "user":
            results.clear()
        elif message["role"] == "tool":
            results.append(COLOUR.sub("", _text(message["content"])))
    return results


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _expect_tools(request: dict[str, Any]) -> None:
    tools: list[dict[str, Any]] = request.get("tools") or []
    offered = {tool["function"]["name"] for tool in tools}
    if missing := {"terminal", "file_editor"} - offered:
        raise UnexpectedOutput(f"I was not given the tool {' nor '.join(sorted(missing))}", ", ".join(sorted(offered)))


def _parse_failure(tests: str) -> FirstRun:
    """Parse the first run of the tests, which has to show exactly the one expected failure."""
    ran = RAN.search(tests)
    if not ran:
        raise UnexpectedOutput("The terminal tool did not show a run of the tests", tests)
    difference = re.search(r"^AssertionError: (\S.*?)\s*$", tests, re.M)
    if f"FAIL: {FAILING} " not in tests or "FAILED (failures=1)" not in tests or not difference:
        raise UnexpectedOutput("The terminal tool did not show the one failing test that I was asked to fix", tests)
    return FirstRun(ran[1], difference[1])


def _expect_bug(code: str) -> None:
    if BUG not in code:
        raise UnexpectedOutput(f"The file_editor tool did not show the line with `{BUG}` in `{FILE}`", code)


def _expect_edit(edit: str) -> None:
    if FIX not in edit:
        raise UnexpectedOutput(f"The file_editor tool did not show `{FILE}` with `{FIX}` after the edit", edit)


def _expect_success(tests: str, before: str) -> None:
    ran = RAN.search(tests)
    if not ran:
        raise UnexpectedOutput("The terminal tool did not show the second run of the tests", tests)
    if not re.search(r"^OK\s*$", tests, re.M) or "[exit code" in tests:
        raise UnexpectedOutput("The tests do not pass after the edit", tests)
    if ran[1] != before:
        raise UnexpectedOutput(f"The first run had {before} tests and the second {ran[1]}", tests)


def _report(failure: FirstRun) -> str:
    return (
        f"**Fixed.** `{FAILING}` failed with `{failure.difference}`: `{BUG}` throws the remainder away, so six people "
        f"got the eggs of four. With `{FIX}` they get one and a half times the recipe.\n\n"
        f"Before, one of {failure.ran} tests failed. Now **all {failure.ran} pass**."
    )


def _quote_output(output: str) -> str:
    """Quote the last 600 characters of a tool's output as Markdown: errors are at the end."""
    output = output.strip()
    return f"What I got:\n\n```\n{output[-600:]}\n```" if output else "I got nothing."
