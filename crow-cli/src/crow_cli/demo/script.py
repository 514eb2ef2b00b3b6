"""A model played by a script: it believes only what the tools show, so a broken tool makes a broken demo."""

import re
import shlex
import sys
from typing import Any, NamedTuple

from crow_core.testing.script import Reply

TESTS = f"{shlex.quote(sys.executable)} -m unittest -q"
"""The shell command that runs the project's tests, with an interpreter that exists."""

TASK = (
    f"One test of this small project fails. Run the tests with `{TESTS}`, find the bug and fix it in the code, not in "
    "the test. Then run the tests again and tell me in a few sentences what was wrong."
)
"""What the person asks; it is enough for a real model too."""

PACE = 0.007
"""Seconds between fragments: alive to the eye, over within a few seconds."""

FILE = "pancakes.py"
BUG = "people // SERVES"
FIX = "people / SERVES"
FAILING = "test_six_people_need_half_as_much_again"

RAN = re.compile(r"^Ran (\d+) tests? in ", re.M)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class FirstRun(NamedTuple):
    ran: str
    """How many tests ran."""
    difference: str
    """What the assertion said."""


class Surprise(Exception):
    """A tool did not show what it has to show before the next step makes sense."""

    def __init__(self, what: str, said: str) -> None:
        super().__init__(f"{what}, so I stop here. {_quote(said)}")


def play(request: dict[str, Any]) -> Reply:
    """The next reply to a chat-completions request: run, read, fix, run again, report."""
    try:
        _expect_tools(request)
        match _results(request):
            case []:
                return _say("I run the tests first, to see what fails.", "terminal", command=TESTS)
            case [tests]:
                failure = _failure(tests)
                words = f"One of {failure.ran} tests fails, with `{failure.difference}`. I look at `{FILE}`."
                return _say(words, "file_editor", command="view", path=FILE)
            case [_, code]:
                _expect_bug(code)
                words = f"There it is: `{BUG}` counts whole recipes only. One character too many."
                return _say(words, "file_editor", command="str_replace", path=FILE, old_str=BUG, new_str=FIX)
            case [_, _, edit]:
                _expect_edit(edit)
                return _say("Now the tests again.", "terminal", command=TESTS)
            case results:
                tests, _, _, again, *_ = results
                failure = _failure(tests)
                _expect_success(again, failure.ran)
                return Reply(_report(failure), pace=PACE)
    except Surprise as surprise:
        return Reply(str(surprise), pace=PACE)


def _say(words: str, tool: str, **arguments: str) -> Reply:
    return Reply(words, tool_calls=[{"name": tool, "arguments": arguments}], pace=PACE)


def _results(request: dict[str, Any]) -> list[str]:
    """What the tools returned since the person last spoke, oldest first."""
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
        raise Surprise(f"I was not given the tool {' nor '.join(sorted(missing))}", ", ".join(sorted(offered)))


def _failure(tests: str) -> FirstRun:
    """What the first run shows, which has to be the one failure."""
    ran = RAN.search(tests)
    if not ran:
        raise Surprise("The terminal tool did not show a run of the tests", tests)
    difference = re.search(r"^AssertionError: (\S.*?)\s*$", tests, re.M)
    if f"FAIL: {FAILING} " not in tests or "FAILED (failures=1)" not in tests or not difference:
        raise Surprise("The terminal tool did not show the one failing test that I was asked to fix", tests)
    return FirstRun(ran[1], difference[1])


def _expect_bug(code: str) -> None:
    if BUG not in code:
        raise Surprise(f"The file_editor tool did not show the line with `{BUG}` in `{FILE}`", code)


def _expect_edit(edit: str) -> None:
    if FIX not in edit:
        raise Surprise(f"The file_editor tool did not show `{FILE}` with `{FIX}` after the edit", edit)


def _expect_success(tests: str, before: str) -> None:
    ran = RAN.search(tests)
    if not ran:
        raise Surprise("The terminal tool did not show the second run of the tests", tests)
    if not re.search(r"^OK\s*$", tests, re.M) or "[exit code" in tests:
        raise Surprise("The tests do not pass after the edit", tests)
    if ran[1] != before:
        raise Surprise(f"The first run had {before} tests and the second {ran[1]}", tests)


def _report(failure: FirstRun) -> str:
    return (
        f"**Fixed.** `{FAILING}` failed with `{failure.difference}`: `{BUG}` throws the remainder away, so six people "
        f"got the eggs of four. With `{FIX}` they get one and a half times the recipe.\n\n"
        f"Before, one of {failure.ran} tests failed. Now **all {failure.ran} pass**."
    )


def _quote(said: str) -> str:
    """A tool's words as Markdown, the end of them: that is where errors stand."""
    said = said.strip()
    return f"What I got:\n\n```\n{said[-600:]}\n```" if said else "I got nothing."
