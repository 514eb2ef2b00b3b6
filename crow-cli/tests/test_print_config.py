"""`crow acp --print-config`: the client can read the settings, and they start this crow from any folder."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_cli.client_config import CLIENTS
from crow_cli.process import find_command
from crow_core.acp.schema import ClientCapabilities
from crow_core.acp.transports import spawn
from crow_core.testing import Editor

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

PYTHON = [sys.executable, "-m", "crow_cli", "acp"]
TOKENS_FOLDER = re.compile(r"""\s+|;[^\n]*|(?P<string>"(?:\\.|[^"\\])*")|(?P<mark>['()])|(?P<word>[^\s'()"]+)""", re.S)


async def printed(machine: "Machine", client: str, *more: str) -> str:
    done = await machine.crow("acp", "--print-config", client, *more)
    assert done.code == 0
    assert done.err.count("\n") == 1  # where to put it
    return done.out


async def starts(agent: list[str], env: dict[str, str]) -> None:
    """Tell whether a command line starts crow in an empty environment."""
    editor = Editor(await spawn(agent[0], agent[1:], {"PATH": "/usr/bin:/bin", "HOME": env["HOME"]}, "/"))
    async with editor.serving():
        greeting = await editor.initialize("editor", ClientCapabilities())
    assert greeting.agent_info
    assert greeting.agent_info.name == "crow"


@pytest.mark.parametrize(
    ("client", "path"),
    [
        ("zed", ["agent_servers", "crow"]),
        ("jetbrains", ["agent_servers", "crow"]),
        ("vscode", ["acp.agents", "Crow"]),
    ],
)
async def test_editors_with_json_settings_get_an_absolute_command(
    machine: "Machine", client: str, path: list[str]
) -> None:
    agent: Any = json.loads(await printed(machine, client))
    for key in path:
        agent = agent[key]

    assert [agent["command"], *agent["args"]] == PYTHON
    assert agent["env"] == {"CROW_HOME": machine.env["CROW_HOME"]}
    assert agent.get("type") == ("custom" if client == "zed" else None)
    await starts([agent["command"], *agent["args"]], machine.env)


async def test_acpx_gets_its_arguments_one_by_one(machine: "Machine") -> None:
    assert json.loads(await printed(machine, "acpx")) == {"agents": {"crow": {"argv": PYTHON}}}


async def test_toad_gets_a_line_for_its_shell(machine: "Machine") -> None:
    toad, acp, line, folder = shlex.split(await printed(machine, "toad"))

    assert (toad, acp, folder) == ("toad", "acp", ".")
    assert shlex.split(line) == PYTHON


def expressions(text: str) -> Iterator[Any]:
    """Parse Emacs Lisp to lists of strings and symbols; a quote is `["quote", …]`. Unbalanced parentheses raise."""
    stack: list[list[Any]] = [[]]
    at = 0
    while at < len(text):
        token = TOKENS_FOLDER.match(text, at)
        assert token, text[at:]
        at = token.end()
        match token.lastgroup, token.group():
            case "string", string:
                stack[-1].append(json.loads(string))
            case "mark", "(":
                stack.append([])
            case "mark", ")":
                inner = stack.pop()
                stack[-1].append(inner)
            case "word", word:
                stack[-1].append(word)
            case _:
                pass
    [whole] = stack
    yield from whole


def keyword(form: list[Any], name: str) -> Any:
    """Return the value after a keyword, at any depth; None if there is no such keyword."""
    for place, item in enumerate(form):
        if item == name:
            return form[place + 1]
        if isinstance(item, list) and (found := keyword(item, name)) is not None:
            return found
    return None


async def test_agent_shell_gets_valid_lisp(machine: "Machine") -> None:
    [form] = expressions(await printed(machine, "agent-shell", "-m", 'the "fast" one'))

    assert form[:2] == ["defun", "crow"]
    agent = [keyword(form, ":command"), *keyword(form, ":command-params")]
    assert agent == [*PYTHON, "-m", 'the "fast" one']
    assert keyword(form, ":environment-variables") == [f"CROW_HOME={machine.env['CROW_HOME']}"]


async def test_codecompanion_gets_valid_lua(machine: "Machine") -> None:
    lua = await printed(machine, "codecompanion")

    strings = [json.loads(string) for string in re.findall(r'"(?:\\.|[^"\\])*"', lua)]
    assert [item for item in strings if item in PYTHON] == PYTHON
    assert machine.env["CROW_HOME"] in strings
    code = re.sub(r'"(?:\\.|[^"\\])*"', "", lua)
    while (reduced := re.sub(r"\(\s*[^(){}]*\)|\{[^(){}]*\}|\bfunction\b[^(){}]*?\bend\b", "", code)) != code:
        code = reduced
    assert re.fullmatch(r"[\w.\s]*", code), code


async def test_model_name_with_special_characters_is_quoted_for_each_client(machine: "Machine", tmp_path: Path) -> None:
    machine.env["CROW_HOME"] = str(tmp_path / 'so "odd" \\ a home')
    zed = json.loads(await printed(machine, "zed"))
    [form] = expressions(await printed(machine, "agent-shell"))

    assert zed["agent_servers"]["crow"]["env"]["CROW_HOME"] == machine.env["CROW_HOME"]
    assert keyword(form, ":environment-variables") == [f"CROW_HOME={machine.env['CROW_HOME']}"]


def linked(folder: Path) -> Path:
    """Make a link to the script crow, as `uv tool` does."""
    folder.mkdir()
    link = folder / "crow"
    link.symlink_to(Path(sys.executable).with_name("crow"))
    return link


def test_script_is_named_by_its_absolute_path_without_resolving_links(tmp_path: Path) -> None:
    link = linked(tmp_path / "bin")

    assert find_command(sys.executable, "") == [sys.executable]
    assert find_command(os.path.relpath(link), sys.executable) == [str(link)]
    assert find_command("/usr/lib/crow_cli/__main__.py", "/opt/python") == ["/opt/python", "-m", "crow_cli"]


async def test_a_linked_script_starts_crow(machine: "Machine", tmp_path: Path) -> None:
    await starts([*find_command(str(linked(tmp_path / "bin")), ""), "acp"], machine.env)


async def test_unknown_client_is_wrong_usage_and_lists_the_known_ones(machine: "Machine") -> None:
    done = await machine.crow("acp", "--print-config", "notepad")

    assert done.code == 2
    assert all(client in done.err for client in CLIENTS)
