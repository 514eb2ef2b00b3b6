"""Agent Plugins: folders with a plugin.json, skills and servers; their bad input; and trust."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from crow_agent.app import build
from crow_agent.settings.home import Home
from crow_agent.settings.plugins import MCP_SCHEMA, PLUGIN_SCHEMA, Plugins, find_plugins
from crow_agent.settings.project_files import list_settings, take_snapshot
from crow_agent.settings.trust import TrustedFolders
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_persistence.extension import persistence

pytestmark = pytest.mark.anyio
PYTHON = os.path.realpath(sys.executable)

SERVER = """
import json, os, sys

def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

for line in sys.stdin:
    message = json.loads(line)
    id = message.get("id")
    match message.get("method"):
        case "initialize":
            send(id=id, result={"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                                "serverInfo": {"name": "validator", "version": "1"}})
        case "tools/list":
            send(id=id, result={"tools": [{"name": "where", "inputSchema": {"type": "object"}}]})
        case "tools/call":
            with open(os.path.join(os.environ["PLUGIN_DATA"], "kept"), "a") as file:
                file.write("x")
            texts = [os.path.basename(os.environ["PLUGIN_ROOT"]), os.path.basename(os.getcwd()), os.environ["SAYS"]]
            send(id=id, result={"content": [{"type": "text", "text": " ".join(texts)}]})
        case _ if id is not None:
            send(id=id, error={"code": -32601, "message": "Method not found"})
"""
SKILL = "---\nname: {name}\ndescription: Summarizes reports.\n---\n\nBe brief.\n"


class Place:
    """A home of crow, and a project."""

    def __init__(self, base: Path) -> None:
        self.project, self.env = base / "project", {**os.environ, "HOME": str(base), "CROW_HOME": str(base / "crow")}
        self.home = Home.find(self.env)
        self.user = self.home.config / "plugins"
        self.project.mkdir()

    def trust(self) -> None:
        TrustedFolders(self.home.data).add(take_snapshot(self.project, keep=True))

    def find(self) -> Plugins:
        return find_plugins(self.home, self.env, self.project, TrustedFolders(self.home.data))

    async def run(self, *replies: Reply) -> tuple[Editor, ScriptedModel]:
        """Run a turn in the project."""
        model = ScriptedModel([*replies, Reply("Done.")])
        crow = await build(self.env, models={"scripted": model}, mode="yolo", without=[persistence])
        async with connect(crow) as editor:
            session = (await editor.new_session(str(self.project))).session_id
            await editor.prompt(session, "/skills")
            await editor.prompt(session, "Go.")
            return editor, model


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def write_plugin(
    folder: Path, *, servers: dict[str, Any] | None = None, skills: tuple[str, ...] = (), **manifest: Any
) -> Path:
    """Write a plugin into a folder of plugins; its name is that of its own folder unless `manifest` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plugin.json").write_text(json.dumps({"$schema": PLUGIN_SCHEMA, "name": folder.name, **manifest}))
    for name in skills:
        (folder / "skills" / name).mkdir(parents=True, exist_ok=True)
        (folder / "skills" / name / "SKILL.md").write_text(SKILL.format(name=name))
    if servers is not None:
        (folder / "mcp.json").write_text(json.dumps({"$schema": MCP_SCHEMA, "mcpServers": servers}))
    return folder


def validator(**more: Any) -> dict[str, Any]:
    args = ["${PLUGIN_ROOT}/server.py", "${HOME}"]
    return {
        "type": "stdio",
        "command": os.path.basename(PYTHON),
        "args": args,
        "env": {"SAYS": "${PLUGIN_DATA}!"},
        **more,
    }


@pytest.mark.parametrize("of_project", [False, True])
async def test_skills_and_servers_of_a_plugin_are_used(
    of_project: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of a project runs in a sandbox where there is one; the folder for its data is there all the same."""
    monkeypatch.setenv("PATH", os.pathsep.join([os.path.dirname(PYTHON), os.environ["PATH"]]))
    folder = place.project / ".crow/plugins" if of_project else place.user
    plugin = write_plugin(folder / "reports", skills=("summarize",), servers={"validator": validator()})
    (plugin / "server.py").write_text(SERVER)
    place.trust()
    editor, model = await place.run(Reply(tool_calls=[{"name": "reports_validator_where", "arguments": {}}]))
    assert "- **summarize** (plugin reports): Summarizes reports." in editor.text
    assert "did not start" not in editor.thoughts
    (answer,) = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    (data,) = sorted((place.home.data / "plugin-data").iterdir())
    assert answer == f"reports reports {data}!"
    assert (data / "kept").read_text() == "x"
    assert place.find().plugins[0].servers["reports.validator"].args[1] == "${HOME}", "no other variable is expanded"


async def test_plugins_of_a_project_are_used_when_it_is_trusted(place: Place) -> None:
    write_plugin(place.project / ".crow/plugins/reports", skills=("summarize",))
    write_plugin(place.project / ".agents/plugins/other", skills=("other",))
    editor, _ = await place.run()
    assert ".crow/plugins and .agents/plugins" in editor.thoughts
    assert "ignored until you trust it" in editor.thoughts
    assert "summarize" not in editor.text
    place.trust()
    assert [plugin.name for plugin in place.find().plugins] == ["reports", "other"]
    editor, _ = await place.run()
    assert "**summarize** (plugin reports)" in editor.text
    (place.project / ".crow/plugins/reports/skills/summarize/run.sh").write_text("rm -rf /")
    assert place.find().plugins == [], "a changed file ends the trust"


def test_file_of_the_project_that_a_plugin_starts_counts_for_trust(place: Place) -> None:
    write_plugin(place.project / ".crow/plugins/reports", servers={"one": validator(args=["../../../tools/one.py"])})
    (place.project / "tools").mkdir()
    (place.project / "tools/one.py").write_text("pass")
    assert "tools/one.py" in take_snapshot(place.project).files
    assert list_settings(place.project) == [".crow/plugins"]


def test_plugin_of_the_user_hides_one_of_the_project_with_its_name(place: Place) -> None:
    first = write_plugin(place.user / "reports", servers={"one": validator()})
    second = write_plugin(place.project / ".crow/plugins/mine", name="reports", servers={"two": validator()})
    place.trust()
    found = place.find()
    assert list(found.find_servers(of_project=False)) == ["reports.one"]
    assert found.find_servers(of_project=True) == {}
    assert found.faults == [f"{second / 'plugin.json'} is left out: the plugin reports is in {first} already."]


async def test_skill_with_a_taken_name_is_hidden(place: Place) -> None:
    write_plugin(place.user / "a", skills=("summarize",))
    write_plugin(place.user / "b", skills=("summarize",))
    editor, _ = await place.run()
    assert "(plugin a)" in editor.text
    assert f"b/skills/summarize/SKILL.md is hidden by {place.user}/a/skills/summarize/SKILL.md" in editor.text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not valid JSON: "),
        ("[]", "is not a JSON object."),
        ('{"name": "a"}', "is not used: $schema is null, and crow knows https://agent-plugins.org/schemas/1.0.0/"),
        ('{"$schema": "https://agent-plugins.org/schemas/2.0.0/plugin.schema.json", "name": "a"}', "is not used"),
        (json.dumps({"$schema": PLUGIN_SCHEMA}), "does not keep to Agent Plugins 1.0.0: "),
        (json.dumps({"$schema": PLUGIN_SCHEMA, "name": "A b"}), "does not keep to Agent Plugins 1.0.0: "),
        (json.dumps({"$schema": PLUGIN_SCHEMA, "name": "a--b"}), "does not keep to Agent Plugins 1.0.0: "),
        (json.dumps({"$schema": PLUGIN_SCHEMA, "name": "a", "author": {"x": "y"}}), "does not keep to Agent Plugins"),
        (json.dumps({"$schema": PLUGIN_SCHEMA, "name": "a", "version": None}), "does not keep to Agent Plugins"),
    ],
)
async def test_broken_manifest_is_one_sentence_and_nothing_of_the_plugin_is_used(
    text: str, why: str, place: Place
) -> None:
    plugin = write_plugin(place.user / "broken", skills=("summarize",))
    (plugin / "plugin.json").write_text(text)
    write_plugin(place.user / "whole")
    found = place.find()
    assert [each.name for each in found.plugins] == ["whole"]
    (fault,) = found.faults
    assert fault.startswith(f"{plugin / 'plugin.json'} {why}")
    editor, _ = await place.run()
    assert fault in editor.thoughts


def test_unknown_fields_of_a_manifest_are_ignored_and_reported(place: Place) -> None:
    plugin = write_plugin(place.user / "a.b", hooks={}, extensions=7, version="", author={"name": "Ada"})
    found = place.find()
    assert [each.name for each in found.plugins] == ["a.b"]
    assert found.faults == [
        f"{plugin / 'plugin.json'}: unknown hooks ignored.",
        f"{plugin / 'plugin.json'}: extensions ignored, as it is not an object.",
    ]


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (validator(command="../run"), "has the command '../run': it has to be a name, or begin with ./"),
        (validator(command="./../run"), "has the command './../run', which is no file in the plugin"),
        (validator(command="/bin/sh"), "has the command '/bin/sh': it has to be a name, or begin with ./"),
        (validator(cwd="data"), "has the cwd 'data': it has to begin with ./, ${PLUGIN_ROOT} or ${PLUGIN_DATA}"),
        (validator(cwd="./../.."), "has the cwd './../..', which leads out of the plugin"),
        (validator(cwd="${PLUGIN_DATA}/../x"), "has the cwd '${PLUGIN_DATA}/../x', which leads out of the plugin"),
        (validator(env={"PLUGIN_ROOT": "/"}), "sets PLUGIN_ROOT, which crow sets"),
        (validator(trust=True), "does not keep to Agent Plugins 1.0.0: Object contains unknown field `trust`"),
        ({"command": "python"}, "does not keep to Agent Plugins 1.0.0: "),
        ({"type": "streamable-http", "url": "http://a.example"}, "has a url that is no https address"),
        ({"type": "streamable-http", "url": "https://me:pw@a.example"}, "has a url that is no https address"),
        ({"type": "sse", "url": "https://a.example", "headers": {"a": "1", "A": "2"}}, "has headers that are not"),
        ("python", "does not keep to Agent Plugins 1.0.0: "),
    ],
)
def test_invalid_server_is_left_out_and_the_others_are_used(server: Any, why: str, place: Place) -> None:
    remote = {"type": "streamable-http", "url": "http://127.0.0.1:1/mcp"}
    plugin = write_plugin(place.user / "reports", servers={"bad": server, "good": validator(), "remote": remote})
    found = place.find()
    assert list(found.plugins[0].servers) == ["reports.good", "reports.remote"]
    (fault,) = found.faults
    assert fault.startswith(f"{plugin / 'mcp.json'}: the server 'bad' is left out, as it {why}")


@pytest.mark.posix("links need no rights")
def test_links_out_of_a_plugin_are_not_followed(place: Place, tmp_path: Path) -> None:
    outside = write_plugin(tmp_path / "outside", skills=("secret",))
    plugin = write_plugin(place.user / "reports")
    (plugin / "skills").symlink_to(outside / "skills")
    (plugin / "mcp.json").symlink_to(outside / "plugin.json")
    found = place.find()
    assert found.faults == [
        f"{plugin / 'skills'} is not used: it is no folder in the plugin reports.",
        f"{plugin / 'mcp.json'} is not used: leads out of {plugin}.",
    ]
