"""Arguments as models write them that were trained with the tools of other agents."""

import json
from typing import Any

import crow_mcp_server
import pytest
from crow_mcp_server import create_server
from crow_system.arguments import fit_arguments, to_key
from fastmcp import Client
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.anyio

TOOLS = {tool["name"]: tool for tool in crow_mcp_server.tools()}


def fit(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return fit_arguments(arguments, TOOLS[tool]["inputSchema"], TOOLS[tool]["_meta"]["crow/arguments"])


CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # Claude Code: Read, Edit, MultiEdit, Write
    (
        "file_editor",
        {"command": "view", "file_path": "a", "offset": 10, "limit": 5},
        {"command": "view", "path": "a", "view_range": [10, 15]},
    ),
    ("file_editor", {"command": "view", "file_path": "a", "limit": "5"}, {"view_range": [1, 5]}),
    (
        "file_editor",
        {"file_path": "a", "old_string": "x", "new_string": "", "replace_all": "false"},
        {"command": "str_replace", "path": "a", "old_str": "x", "new_str": "", "replace_all": False},
    ),
    (
        "file_editor",
        {"command": "edit", "file_path": "a", "edits": [{"old_string": "x", "new_string": "y", "replace_all": True}]},
        {"command": "str_replace", "edits": [{"old_str": "x", "new_str": "y", "replace_all": True}]},
    ),
    (
        "file_editor",
        {"command": "Write", "file_path": "a", "content": "x"},
        {"command": "create", "path": "a", "file_text": "x"},
    ),
    # Anthropic's text editor, OpenHands
    (
        "file_editor",
        {"command": "insert", "path": "a", "insert_line": "3", "insert_text": "x"},
        {"insert_line": 3, "new_str": "x"},
    ),
    ("file_editor", {"command": "view", "path": "a", "view_range": "[1, 2]"}, {"view_range": [1, 2]}),
    ("file_editor", {"command": "view", "path": "a", "view_range": "1-20"}, {"view_range": [1, 20]}),
    ("file_editor", {"command": "view", "path": "a", "view_range": "10, -1"}, {"view_range": [10, -1]}),
    ("file_editor", {"command": "view", "path": "a", "view_range": ["1", "2"]}, {"view_range": [1, 2]}),
    (
        "file_editor",
        {
            "command": "view",
            "path": "a",
            "security_risk": "LOW",
            "view_range": None,
            "old_str": None,
            "insert_line": "",
        },
        {"command": "view", "path": "a"},
    ),
    ("file_editor", {"command": "undo", "path": "a"}, {"command": "undo_edit"}),
    # Gemini CLI, Qwen Code
    (
        "file_editor",
        {"command": "replace", "absolute_path": "/a", "old_string": "x", "new_string": "y", "instruction": "Do it."},
        {"command": "str_replace", "path": "/a", "old_str": "x", "new_str": "y"},
    ),
    (
        "file_editor",
        {"command": "read_file", "absolute_path": "/a", "start_line": 3, "end_line": 9},
        {"command": "view", "view_range": [3, 9]},
    ),
    (
        "file_editor",
        {"file_path": "a", "old_string": "x", "new_string": "y", "expected_replacements": 1},
        {"command": "str_replace", "old_str": "x", "new_str": "y"},
    ),
    (
        "file_editor",
        {"file_path": "a", "old_string": "x", "new_string": "y", "allow_multiple": True},
        {"replace_all": True},
    ),
    # opencode, Kilo: camelCase
    (
        "file_editor",
        {"command": "str_replace", "filePath": "a", "oldString": "x", "newString": "y", "replaceAll": True},
        {"path": "a", "old_str": "x", "new_str": "y", "replace_all": True},
    ),
    # Cline, Roo, Cursor, Windsurf
    ("file_editor", {"command": "view", "target_file": "a", "explanation": "Look"}, {"path": "a"}),
    ("file_editor", {"command": "view", "TargetFile": "a", "StartLine": 1, "EndLine": 2}, {"view_range": [1, 2]}),
    (
        "file_editor",
        {"command": "str_replace", "path": "a", "search": "x", "replace": "y"},
        {"old_str": "x", "new_str": "y"},
    ),
    # Lists and objects as JSON text, as what Python prints, and a single object in place of a list
    (
        "file_editor",
        {"command": "str_replace", "path": "a", "edits": '[{"old_str": "x", "new_str": "[1]"}]'},
        {"edits": [{"old_str": "x", "new_str": "[1]"}]},
    ),
    (
        "file_editor",
        {"command": "str_replace", "path": "a", "edits": "[{'old_str': 'x', 'new_str': 'it\\'s'}]"},
        {"edits": [{"old_str": "x", "new_str": "it's"}]},
    ),
    (
        "file_editor",
        {"command": "str_replace", "path": "a", "edits": {"old_text": "x", "new_text": "y"}},
        {"edits": [{"old_str": "x", "new_str": "y"}]},
    ),
    # The text of a file stays as it is, whatever it looks like
    ("file_editor", {"command": "create", "path": "a", "file_text": '["5", null]'}, {"file_text": '["5", null]'}),
    ("file_editor", {"command": "create", "path": "a", "file_text": "null"}, {"file_text": "null"}),
    ("file_editor", {"command": "create", "path": "a", "file_text": "5"}, {"file_text": "5"}),
    ("file_editor", {"command": "create", "path": "a", "file_text": 5}, {"file_text": "5"}),
    # Codex: shell, exec_command
    (
        "terminal",
        {"command": ["bash", "-lc", "ls -la | head"], "workdir": "/a", "timeout_ms": 10000, "justification": "Look"},
        {"command": "ls -la | head", "cwd": "/a", "timeout": 10},
    ),
    (
        "terminal",
        {"cmd": "ls", "yield_time_ms": "1500", "max_output_tokens": 5, "login": True},
        {"command": "ls", "wait": 1.5},
    ),
    ("terminal", {"command": ["git", "commit", "-m", "It's done"]}, {"command": "git commit -m 'It'\"'\"'s done'"}),
    ("terminal", {"command": '["bash", "-lc", "ls"]'}, {"command": "ls"}),
    ("terminal", {"command": "[ -f a ] && echo yes"}, {"command": "[ -f a ] && echo yes"}),
    # Claude Code's Bash, OpenHands' execute_bash, Cline's execute_command, Gemini CLI's run_shell_command
    (
        "terminal",
        {"command": "ls", "description": "List files", "timeout": "120", "run_in_background": False},
        {"command": "ls", "timeout": 120},
    ),
    ("terminal", {"command": "ls", "is_input": "false", "security_risk": "LOW"}, {"command": "ls"}),
    ("terminal", {"CommandLine": "ls", "Cwd": "/a", "SafeToAutoRun": True}, {"command": "ls", "cwd": "/a"}),
    ("terminal", {"command": "ls", "session": 1, "wait": None}, {"command": "ls", "session": "1"}),
    # grep
    (
        "grep",
        {"pattern": "x", "output_mode": "files_with_matches", "-i": True, "-n": True, "-C": "2", "head_limit": 10},
        {"pattern": "x", "mode": "files", "ignore_case": True, "context": 2},
    ),
    ("grep", {"query": "x", "include_pattern": "*.py", "explanation": "Find"}, {"pattern": "x", "glob": "*.py"}),
    ("grep", {"pattern": "x", "dir_path": "src", "include": "*.py"}, {"pattern": "x", "path": "src", "glob": "*.py"}),
    ("grep", {"regex": "x", "file_pattern": "*.py", "case_sensitive": True}, {"pattern": "x", "glob": "*.py"}),
    ("grep", {"pattern": "x", "regex": True, "path": ""}, {"pattern": "x", "path": ""}),
    # glob, tree
    ("glob", {"glob_pattern": "*.py", "target_directory": "src"}, {"pattern": "*.py", "path": "src"}),
    ("glob", {"pattern": "*.py", "case_sensitive": True, "respect_git_ignore": "true"}, {"pattern": "*.py"}),
    ("tree", {"relative_workspace_path": "src", "recursive": True, "maxDepth": "2"}, {"path": "src", "depth": 2}),
    # the web
    ("fetch", {"link": "https://a.example", "prompt": "Sum it up"}, {"url": "https://a.example"}),
    (
        "fetch",
        {"url": "https://a.example", "start_index": 5, "max_length": 9, "raw": "True"},
        {"start": 5, "raw": True},
    ),
    ("fetch", {"url": "https://a.example", "format": "markdown", "start": None}, {"url": "https://a.example"}),
    ("web_search", {"search_term": "x", "numResults": "5"}, {"query": "x", "count": 5}),
    # plan, ask_user
    (
        "plan",
        {"todos": '[{"content": "x", "status": "todo", "activeForm": "Doing x", "id": "1"}]'},
        {"entries": [{"content": "x", "status": "pending", "activeForm": "Doing x", "id": "1"}]},
    ),
    (
        "plan",
        {"explanation": "Now", "plan": [{"step": "x", "status": "In-Progress"}, {"step": "y", "status": "done"}]},
        {"entries": [{"content": "x", "status": "in_progress"}, {"content": "y", "status": "completed"}]},
    ),
    ("ask_user", {"prompt": "Which?", "options": '["a", "b"]'}, {"question": "Which?", "choices": ["a", "b"]}),
]


@pytest.mark.parametrize(("tool", "sent", "expected"), CALLS)
def test_arguments_of_other_agents_tools_become_ours(tool: str, sent: dict[str, Any], expected: dict[str, Any]):
    fitted = fit(tool, sent)
    assert {name: fitted.get(name) for name in expected} == expected
    assert set(fitted) <= TOOLS[tool]["inputSchema"]["properties"].keys()


@pytest.mark.parametrize(
    ("tool", "sent", "says"),
    [
        ("file_editor", {"command": "view", "path": "a", "file_path": "b"}, "path and file_path are the same argument"),
        ("file_editor", {"command": "view", "file": "a", "filename": "b"}, "file and filename are the same argument"),
        ("terminal", {"cmd": "rm a", "command": "ls"}, "cmd and command are the same argument"),
        (
            "terminal",
            {"command": "ls", "is_input": True},
            "There is no argument 'is_input'. The arguments are: command,",
        ),
        ("terminal", {"command": "ls", "run_in_background": True}, "There is no argument 'run_in_background'"),
        ("grep", {"pattern": "x", "multiline": True, "xyz": 1}, "There is no argument 'multiline', 'xyz'."),
        ("file_editor", {"command": "view", "path": "a", "start_line": "x"}, "Give view_range as [first, last]."),
        ("file_editor", {"command": "view", "path": "a", "limit": 5, "view_range": [1, 2]}, "Give view_range as"),
        ("file_editor", {"command": "str_replace", "path": "a", "expected_replacements": 3}, "'expected_replacements'"),
    ],
)
async def test_what_cannot_be_understood_is_refused_with_the_valid_names(tool: str, sent: dict[str, Any], says: str):
    async with Client(create_server()) as client:
        answer = await client.call_tool_mcp(tool, sent)
    assert answer.is_error
    assert answer.content[0].text.startswith(f"{tool} was not run. ")
    assert says in answer.content[0].text


def test_same_value_under_two_names_is_no_conflict():
    assert fit("terminal", {"cmd": "ls", "command": "ls"}) == {"command": "ls"}
    assert fit("terminal", {"command": None, "cmd": "ls"}) == {"command": "ls"}
    assert fit("terminal", {"cmd": None, "command": "ls"}) == {"command": "ls"}


@pytest.mark.parametrize("tool", TOOLS)
def test_no_synonym_stands_for_two_arguments(tool: str):
    table, properties = TOOLS[tool]["_meta"]["crow/arguments"], TOOLS[tool]["inputSchema"]["properties"]
    names = [name for others in table.get("synonyms", {}).values() for name in others]
    names += [name for parts in table.get("ranges", {}).values() for keys in parts.values() for name in keys]
    assert len(names) == len(set(names))
    assert names == [to_key(name) for name in names]
    assert list(table["ignored"]) == [to_key(name) for name in table["ignored"]]
    assert not set(names) & properties.keys()
    assert not {name for name, values in table["ignored"].items() if not values} & {*names, *properties}


def test_no_tool_of_another_agent_is_replaced_by_two_of_ours():
    names = [name for tool in TOOLS.values() for name in tool["_meta"]["crow/replaces"]]
    assert len(names) == len(set(names))
    assert not set(names) & TOOLS.keys()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bash", "Use terminal, whose arguments are: command, "),
        ("str_replace_editor", "Use file_editor, whose arguments are: command, path, "),
        ("Edit", "Use file_editor"),
        ("MultiEdit", "Use file_editor"),
        ("TodoWrite", "Use plan"),
        ("LS", "Use tree"),
        ("container.exec", "Use terminal"),
        ("xyzzy", "The tools are: ask_user, fetch, "),
    ],
)
async def test_tool_of_another_agent_is_refused_with_the_name_of_ours(name: str, says: str):
    async with Client(create_server()) as client:
        answer = await client.call_tool_mcp(name, {"command": "ls"})
    assert answer.is_error
    assert answer.content[0].text.startswith(f"There is no tool {name!r}.")
    assert says in answer.content[0].text


async def test_server_runs_a_call_with_the_arguments_of_another_agent(tools, folder):
    (folder / "a").write_text("one\ntwo\nthree\n")
    view = await tools.call("file_editor", {"command": "read", "filePath": "a", "view_range": "[2,2]", "reason": "x"})
    assert view.text.splitlines()[1:] == ["     2\ttwo"]
    ran = await tools.call("terminal", {"cmd": ["bash", "-lc", "echo $((6*7))"], "description": "Count"})
    assert ran.text == "42\n"
    made = await tools.call("file_editor", {"file_path": "b", "content": '{"a": 1}'})
    assert not made.is_error
    assert (folder / "b").read_text() == '{"a": 1}'


WORDS = st.sampled_from(
    [
        "",
        "a",
        "null",
        "5",
        "true",
        "[1, 2]",
        "1-2",
        '["bash", "-c", "[\\"x\\"]"]',
        '["x"]',
        "view",
        "Write",
        "content",
        "{'a': 1}",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(0, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    tool = draw(st.sampled_from(sorted(TOOLS)))
    table, properties = TOOLS[tool]["_meta"]["crow/arguments"], TOOLS[tool]["inputSchema"]["properties"]
    names = [*properties, *table["ignored"], *(name for others in table["synonyms"].values() for name in others)]
    names += [name for parts in table.get("ranges", {}).values() for keys in parts.values() for name in keys]
    return tool, draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=5))


@given(calls())
def test_converting_twice_changes_nothing_more(call: tuple[str, dict[str, Any]]):
    """A host that has judged the converted arguments must know that the tool takes the same."""
    tool, arguments = call
    before = json.dumps(arguments)
    try:
        once = fit(tool, arguments)
    except ValueError:
        return
    assert fit(tool, once) == once
    assert json.dumps(arguments) == before
    assert all(
        once.get(name) == value for name, value in arguments.items() if isinstance(value, str) and is_text(tool, name)
    )


def is_text(tool: str, name: str) -> bool:
    """Return whether an argument is any text that is passed on as it is."""
    schema = TOOLS[tool]["inputSchema"]["properties"].get(name, {})
    return schema.get("type") == "string" and "enum" not in schema and (tool, name) != ("terminal", "command")
