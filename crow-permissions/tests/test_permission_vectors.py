"""Commands and edits, with rules and a mode, and the decision about each: permission_vectors.toml."""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import crow_mcp_server
import pytest
from crow_core.app import Crow
from crow_core.mcp.result import ToolResult
from crow_core.mcp.server import Server
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session
from crow_core.testing import Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall
from crow_permissions.extension import permissions
from crow_permissions.judgement import Mode

pytestmark = pytest.mark.anyio

DATA: dict[str, Any] = tomllib.loads((Path(__file__).parent / "permission_vectors.toml").read_text("utf-8"))
"""`[[group]]`: `about` says why; `rules` names a table of `[rules]`; `modes` lists modes; `ask`, `deny` and `allow`
list the vectors with this verdict. A vector is a command, or a path after `write:` or `read:`."""
CASES = [(group, mode) for group in DATA["group"] for mode in group["modes"]]


def to_call(text: str) -> ScriptedCall:
    """Convert a vector to a tool call."""
    kind, colon, path = text.partition(":")
    if colon and kind == "write":
        return {"name": "file_editor", "arguments": {"command": "create", "path": path, "file_text": "x\n"}}
    if colon and kind == "read":
        return {"name": "file_editor", "arguments": {"command": "view", "path": path}}
    return {"name": "terminal", "arguments": {"command": text}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with links, and a folder beside it."""
    folder = tmp_path_factory.mktemp("vectors")
    for name in ("project/src", "project/secrets", "project/tests", "project/.git", "outside"):
        (folder / name).mkdir(parents=True)
    for name in ("project/src/a.py", "project/secrets/key", "project/.env", "project/notes.txt", "outside/b.txt"):
        (folder / name).write_text("text\n")
    (folder / "project/link").symlink_to("secrets")
    (folder / "project/dots").symlink_to(".git")
    (folder / "project/out").symlink_to("../outside")
    return folder / "project"


def run_nothing(crow: Crow) -> None:
    """Refuse every call that is allowed. Use it after `permissions`."""

    @crow.before_tool.last
    def refuse(session: Session, tool_call: ToolCall) -> ToolResult | None:
        return ToolResult.error("It would have run.")


async def decide(folder: Path, mode: str, rules: dict[str, list[str]], texts: Sequence[str]) -> list[str]:
    """Let the model make these calls, of which none runs; return what was decided about each."""
    model = ScriptedModel([Reply(tool_calls=[to_call(text) for text in texts]), Reply("Done.")])
    definitions = crow_mcp_server.tools()
    for definition in definitions:  # the commands are those of a POSIX shell, also on Windows; none of them runs
        definition["_meta"].pop("crow/shell", None)
    server = Server("crow", crow_mcp_server.create_server, definitions=definitions, built_in=True, shared=True)
    crow = Crow(model, servers=[server])
    crow.use(
        permissions, mode=cast(Mode, mode), protected=["deploy/**"], trusted=lambda folder: True, **cast(Any, rules)
    )
    crow.use(run_nothing)
    async with connect(crow, permit="allow_once") as editor:
        opened = await editor.new_session(str(folder))
        await editor.prompt(opened.session_id, "go")
        (session,) = crow.sessions.values()
        notes = [entry.get("crow", {}) for entry in session.log]
        verdicts = {note["call"]: note["is"] for note in notes if note.get("kind") == "decision"}
        asked = {question.tool_call.tool_call_id for question in editor.questions}
        calls = [use["id"] for entry in session.log for use in cast(Any, entry).get("tool_calls", [])]
    return ["ask" if call in asked else verdicts[call] for call in calls]


def list_vectors(group: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each text of a group, and its verdict."""
    for verdict in ("allow", "ask", "deny"):
        for text in group.get(verdict, ()):
            yield text, verdict


@pytest.mark.parametrize(("group", "mode"), CASES, ids=[f"{group['about'][:50]}-{mode}" for group, mode in CASES])
async def test_each_call_is_decided_as_listed(group: dict[str, Any], mode: str, folder: Path) -> None:
    texts, expected = zip(*list_vectors(group), strict=True)
    found = await decide(folder, mode, DATA["rules"][group["rules"]], texts)
    wrong = [each for each in zip(texts, expected, found, strict=True) if each[1] != each[2]]
    assert not wrong, "\n".join(map(str, wrong))


def test_there_are_many_vectors() -> None:
    assert sum(len(list(list_vectors(group))) for group in DATA["group"]) >= 1000


@pytest.mark.parametrize(("mode", "questions"), [("ask", 44), ("accept-edits", 40)])
async def test_day_of_ordinary_commands_asks_this_often(mode: str, questions: int, folder: Path) -> None:
    assert len(DATA["day"]) == 60
    found = await decide(folder, mode, DATA["rules"]["readme"], DATA["day"])
    assert found.count("ask") == questions
