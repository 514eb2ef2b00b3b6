"""With any path from a model, no file outside of the roots is read or written."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crow_mcp_server import create_server
from fastmcp import Client
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(300)

STARTS = ["", "/", "//", "~/", "./", "{folder}/", "{folder}-twin/", "/proc/self/root{folder}/../", "/dev/fd/"]
NAMES = ["..", ".", "", "sub", "to-parent", "to-twin", "to-root", "project", "project-twin", "PROJECT", "proc", "self"]
NAMES += ["root", "cwd", "a.txt", "é", "a\\..", "%2e%2e", "new"]
PATHS = st.tuples(st.sampled_from(STARTS), st.lists(st.sampled_from(NAMES), max_size=6).map("/".join)).map("".join)
COMMANDS = st.sampled_from(
    [
        {"command": "create", "file_text": "owned"},
        {"command": "str_replace", "old_str": "secret", "new_str": "owned"},
        {"command": "insert", "insert_line": 0, "new_str": "owned"},
        {"command": "view"},
    ]
)


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Calls a tool in a project with many links that lead outside."""
    for name in ("project/sub/a.txt", "project-twin/a.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("inside" if name.startswith("project/") else "secret")
    for link, target in (("to-parent", ".."), ("to-twin", "../project-twin"), ("to-root", "/")):
        (tmp_path / "project" / link).symlink_to(target)
    client = Client(create_server())
    with asyncio.Runner() as runner:
        runner.run(client.__aenter__())

        def call(tool: str, arguments: dict[str, Any]) -> Any:
            meta = {"crow/cwd": str(tmp_path / "project")}
            return runner.run(client.call_tool_mcp(tool, arguments, meta=meta))

        yield call
        runner.run(client.__aexit__(None, None, None))


def outside(tmp_path: Path) -> dict[str, str]:
    """Return the text of all files outside of the project."""
    found: dict[str, str] = {}
    for folder, folders, files in os.walk(tmp_path):
        if folder == str(tmp_path):
            folders.remove("project")
        found |= {os.path.join(folder, name): Path(folder, name).read_text() for name in files}
        found |= {os.path.join(folder, name): "/" for name in folders}
    return found


@given(path=PATHS, command=COMMANDS)
@example(path="/proc/self/root{folder}/../a.txt", command={"command": "create", "file_text": "owned"})
@example(path="to-root{folder}/../a.txt", command={"command": "create", "file_text": "owned"})
@example(path="sub/../to-parent/new", command={"command": "create", "file_text": "owned"})
@settings(
    max_examples=4 * settings.default.max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_path_makes_an_edit_leave_the_roots(tmp_path, call, path, command):
    before = outside(tmp_path)
    result = call("file_editor", command | {"path": path.replace("{folder}", str(tmp_path / "project"))})
    assert outside(tmp_path) == before
    assert "secret" not in result.content[0].text


@given(path=PATHS, tool=st.sampled_from(["grep", "glob", "tree"]))
@settings(
    max_examples=settings.default.max_examples * 3 // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_path_makes_a_search_leave_the_roots(tmp_path, call, path, tool):
    arguments = {"grep": {"pattern": "secret|inside"}, "glob": {"pattern": "**"}, "tree": {}}[tool]
    result = call(tool, arguments | {"path": path.replace("{folder}", str(tmp_path / "project"))})
    if not result.is_error:
        assert "secret" not in result.content[0].text
        assert "twin" not in result.content[0].text
