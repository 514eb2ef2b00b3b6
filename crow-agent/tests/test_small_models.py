"""The profile for small models: its tools, its prompt, and the sessions with it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from crow_agent.app import build
from crow_core.acp.schema import ClientCapabilities, ClientSessionCapabilities, NoticeCapabilities, NoticeUpdate
from crow_core.app import Crow
from crow_core.models.chat_model import ChatModel
from crow_core.models.quirks import find_quirks
from crow_core.testing import Reply, ScriptedServer, connect
from crow_core.testing.script import ScriptedCall
from crow_extensions import early_search

pytestmark = pytest.mark.anyio

NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))


def use(name: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=[ScriptedCall(name=name, arguments=arguments)])


async def make_crow(tmp_path: Path, url: str, name: str = "qwen2.5:1.5b", **quirks: Any) -> Crow:
    model = ChatModel(name=name, base_url=url, quirks=find_quirks(url, name, quirks))
    env = {"CROW_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)}
    return await build(env, models={name: model}, mode="yolo")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "report.py").write_text("price, tax = 100, 10\nprint(price - tax)\n")
    return folder


async def test_small_model_is_offered_seven_tools_and_a_short_prompt(tmp_path: Path, project: Path):
    async with ScriptedServer([Reply("Hello.")]) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow, capabilities=NOTICES) as editor:
            session = await editor.new_session(str(project))
            await editor.prompt(session.session_id, "Hi.")
        (request,) = server.requests
    functions = [tool["function"] for tool in request["tools"]]
    system = request["messages"][0]["content"]
    assert {function["name"] for function in functions} == {
        "read",
        "write",
        "replace",
        "append",
        "list",
        "search",
        "run",
    }
    assert all(len(function["parameters"]["properties"]) <= 3 for function in functions)
    assert len(system.split()) <= 250
    assert (len(system) + len(json.dumps(request["tools"]))) / 4 <= 900
    assert request["parallel_tool_calls"] is False
    assert any("is a small model" in str(notice.title) for notice in editor.of(NoticeUpdate))


@pytest.mark.parametrize(("name", "quirks"), [("qwen2.5:1.5b", {"profile": "full"}), ("gpt-oss-20b", {})])
async def test_profile_is_switched_off_by_the_quirk_and_for_larger_models(
    name: str, quirks: dict[str, Any], tmp_path: Path, project: Path
):
    async with ScriptedServer([Reply("Hello.")]) as server:
        crow = await make_crow(tmp_path, server.url, name, **quirks)
        async with connect(crow) as editor:
            session = await editor.new_session(str(project))
            await editor.prompt(session.session_id, "Hi.")
    names = {tool["function"]["name"] for tool in server.requests[0]["tools"]}
    assert {"file_editor", "terminal", "grep"} <= names
    assert "read" not in names


async def test_small_window_chooses_the_profile(tmp_path: Path, project: Path):
    async with ScriptedServer([Reply("Hello.")]) as server:
        crow = await make_crow(tmp_path, server.url, "unknown")
        for model in crow.models.values():
            model.window = 4096
        async with connect(crow) as editor:
            session = await editor.new_session(str(project))
            await editor.prompt(session.session_id, "Hi.")
    assert len(server.requests[0]["tools"]) == 7


async def test_session_opens_before_the_server_has_answered_and_the_prompt_waits_for_it(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(early_search, "ANSWER_LIMIT", 30)
    opened = asyncio.Event()

    async def list_models() -> dict[str, Any]:
        await opened.wait()
        return {"data": [{"id": "unknown", "meta": {"n_params": 1_777_088_000}}]}

    pages = {"/props": {"default_generation_settings": {"n_ctx": 16384}}, "/v1/models": list_models}
    async with ScriptedServer(lambda request: Reply("Hello."), pages=pages) as server:
        crow = await make_crow(tmp_path, server.url, "unknown")
        async with connect(crow) as editor:
            session = await editor.new_session(str(project))
            opened.set()
            await editor.prompt(session.session_id, "Hi.")
    assert len(server.requests[-1]["tools"]) == 7


async def test_simple_tools_do_the_work_of_the_full_ones(tmp_path: Path, project: Path):
    script = [
        use("list"),
        use("read", path="report.py"),
        use("replace", path="report.py", old="print(price - tax)", new="print(price + tax)"),
        use("append", path="report.py", text="# end"),
        use("search", pattern="price"),
        use("write", path="note.txt", content="fixed\n"),
        use("run", command="cat note.txt"),
        Reply("Done."),
    ]
    async with ScriptedServer(script) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow) as editor:
            session = await editor.new_session(str(project))
            answer = await editor.prompt(session.session_id, "The total is wrong. Fix it.")
    assert answer.stop_reason == "end_turn"
    assert (project / "report.py").read_text().endswith("print(price + tax)\n# end\n")
    assert (project / "note.txt").read_text() == "fixed\n"
    results = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert all("answer" in result.rpartition("\n")[2] for result in results)
    assert "report.py" in results[0]
    assert results[6].startswith("fixed")
    names = [m["tool_calls"][0]["function"]["name"] for m in server.requests[-1]["messages"] if m.get("tool_calls")]
    assert names == ["list", "read", "replace", "append", "search", "write", "run"]


async def test_file_is_shown_in_place_of_its_first_change(tmp_path: Path, project: Path):
    change = use("replace", path="report.py", old_text="print(price - tax)", new_text="print(price + tax)")
    async with ScriptedServer([change, change, Reply("Done.")]) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow) as editor:
            session = await editor.new_session(str(project))
            await editor.prompt(session.session_id, "The total is wrong. Fix it.")
    first, second = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert first.startswith("Nothing was changed yet")
    assert "print(price - tax)" in first
    assert "[The task: The total is wrong. Fix it.\n" in first
    assert first.endswith("new_text is that line as it shall be.]")
    assert second.startswith("Edited report.py")
    assert (project / "report.py").read_text().endswith("print(price + tax)\n")


async def test_file_that_exists_is_shown_before_it_is_overwritten(tmp_path: Path, project: Path):
    write = use("write", path="report.py", content="print(110)\n")
    async with ScriptedServer([write, write, Reply("Done.")]) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow) as editor:
            session = await editor.new_session(str(project))
            await editor.prompt(session.session_id, "Print 110.")
    first, second = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert "print(price - tax)" in first
    assert first.endswith("or write with all of its new text.]")
    assert second.startswith("Overwrote report.py")


async def test_search_goes_through_the_folder_where_its_place_is_invented_and_lists_files_where_nothing_is_found(
    tmp_path: Path, project: Path
):
    script = [use("search", pattern="tax", path="src/main"), use("search", pattern=r"report\.py$"), Reply("Done.")]
    async with ScriptedServer(script) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow) as editor:
            session = await editor.new_session(str(project))
            await editor.prompt(session.session_id, "Where is the tax?")
    found, nothing = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert found.startswith("report.py\n1:price, tax")
    assert nothing.startswith("Nothing matches in .")
    assert "  report.py" in nothing
    assert str(project) not in found + nothing


async def run_script(tmp_path: Path, project: Path, script: list[Reply], **quirks: Any) -> list[dict[str, Any]]:
    """Run a prompt with these replies, and return the requests."""
    async with ScriptedServer([*script, Reply("Done.")]) as server:
        crow = await make_crow(tmp_path, server.url, **quirks)
        async with connect(crow) as editor:
            session = await editor.new_session(str(project))
            await editor.prompt(session.session_id, "Do it.")
    return server.requests


def get_results(requests: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]


async def test_part_of_a_line_is_replaced_only_if_the_model_insists(tmp_path: Path, project: Path):
    config = project / "config.ini"
    config.write_text("retries = 30\ntimeout = 30\n")
    change = use("replace", path="config.ini", old_text="timeout", new_text="wait")
    requests = await run_script(tmp_path, project, [use("read", path="config.ini"), change, change])
    _, first, second = get_results(requests)
    assert first.startswith(
        "Nothing was changed: old_text has to be a whole line of the file. It is a part of:\ntimeout"
    )
    assert second.startswith("Edited config.ini")
    assert config.read_text() == "retries = 30\nwait = 30\n"


@pytest.mark.parametrize(("line", "rest"), [("A=1", "B=2\nC=3\n"), ("C=3", "A=1\nB=2\n")])
async def test_line_that_is_replaced_by_nothing_is_removed_with_its_end(
    line: str, rest: str, tmp_path: Path, project: Path
):
    settings = project / "settings.env"
    settings.write_text("A=1\nB=2\nC=3\n")
    change = use("replace", path="settings.env", old_text=line, new_text="")
    await run_script(tmp_path, project, [use("read", path="settings.env"), change])
    assert settings.read_text() == rest


async def test_short_file_is_read_as_a_whole_and_a_long_one_in_parts(tmp_path: Path, project: Path):
    (project / "long.txt").write_text("".join(f"line {number}\n" for number in range(1, 101)))
    script = [use("read", path=name, start_line=1, end_line=1) for name in ("report.py", "long.txt")]
    short, long = get_results(await run_script(tmp_path, project, script))
    assert "     2\tprint(price - tax)" in short
    assert "line 1" in long
    assert "line 2" not in long


async def test_lines_are_appended_to_a_file_that_was_not_read_and_to_a_new_one(tmp_path: Path, project: Path):
    (project / "todo.txt").write_text("milk\n\neggs\n")
    (project / "empty.txt").touch()
    script = [use("append", path=name, text="bread") for name in ("todo.txt", "empty.txt", "new.txt")]
    await run_script(tmp_path, project, script)
    assert [(project / name).read_text() for name in ("todo.txt", "empty.txt", "new.txt")] == [
        "milk\n\neggs\nbread\n",
        "bread\n",
        "bread",
    ]


async def test_line_that_is_replaced_by_itself_is_not_changed_and_no_line_break_is_added_behind_a_line(
    tmp_path: Path, project: Path
):
    changes = [
        use("replace", path="report.py", old_text="print(price - tax)", new_text="print(price - tax)\n"),
        use("replace", path="report.py", old_text="print(price - tax)", new_text="print(price + tax)\n"),
    ]
    results = get_results(await run_script(tmp_path, project, [use("read", path="report.py"), *changes]))
    assert results[1].startswith("Nothing was changed: new_text is the same as old_text.")
    assert (project / "report.py").read_text() == "price, tax = 100, 10\nprint(price + tax)\n"


async def test_model_that_claims_a_change_which_it_did_not_make_is_asked_once(tmp_path: Path, project: Path):
    claim = Reply("The line with the tax has been removed from report.py.")
    requests = await run_script(tmp_path, project, [use("read", path="report.py"), claim, claim])
    assert len(requests) == 3
    assert requests[-1]["messages"][-1]["content"].startswith("But no file was changed.")


async def test_model_that_has_made_the_change_may_say_so(tmp_path: Path, project: Path):
    work = [use("write", path="new.txt", content="1"), Reply("The file new.txt has been created.")]
    assert len(await run_script(tmp_path, project, work)) == 2


async def test_search_ignores_case_and_counts_the_lines_and_shows_the_file_in_which_it_finds_nothing(
    tmp_path: Path, project: Path
):
    script = [use("search", pattern="PRICE", path="report.py"), use("search", pattern="total", path="report.py")]
    found, nothing = get_results(await run_script(tmp_path, project, script))
    assert "2:print(price - tax)" in found
    assert "[2 lines match.]" in found
    assert "     1\tprice, tax = 100, 10" in nothing


async def test_model_that_is_held_to_a_schema_chooses_the_line_to_replace_among_those_of_the_file(
    tmp_path: Path, project: Path
):
    decision = json.dumps({"use_tool": True, "name": "read", "arguments": {"path": "report.py"}})
    first, second = await run_script(tmp_path, project, [Reply(decision)], call_form="schema")
    formats = [json.dumps(request["response_format"]) for request in (first, second)]
    assert '"old_text": {"type": "string"}' in formats[0]
    assert '"path": {"enum": ["report.py"]}' in formats[1]
    assert '"old_text": {"enum": ["price, tax = 100, 10", "print(price - tax)"]}' in formats[1]
    assert first["messages"][0] == second["messages"][0], "the tools' description stays in the cache"


FAULTS: list[tuple[Reply, list[str]]] = [
    (use("read"), ['A correct call: {"name":"read","arguments":{"path":"<path>"}}']),
    (use("read", path="missing.py"), ['A correct call: {"name":"list","arguments":{}}']),
    (
        use("fly", to="Paris"),
        ["There is no tool 'fly'. The tools are: read, write, replace, append, list, search, run."],
    ),
]


@pytest.mark.parametrize("at", range(len(FAULTS)))
async def test_error_spells_a_correct_call_out(at: int, tmp_path: Path, project: Path):
    reply, said = FAULTS[at]
    async with ScriptedServer([reply, Reply("Hm.")]) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow) as editor:
            session = await editor.new_session(str(project))
            await editor.prompt(session.session_id, "Do it.")
    result = server.requests[-1]["messages"][-1]["content"]
    assert all(text in result for text in said), result


async def test_printed_call_of_a_simple_tool_is_run(tmp_path: Path, project: Path):
    printed = '```json\n{"name": "run", "arguments": {"command": "echo printed > out.txt"}}\n```'
    async with ScriptedServer([Reply(printed), Reply("Done.")]) as server:
        crow = await make_crow(tmp_path, server.url)
        async with connect(crow) as editor:
            session = await editor.new_session(str(project))
            await editor.prompt(session.session_id, "Write it.")
    assert (project / "out.txt").read_text() == "printed\n"
    assert editor.text == "Done."
