"""The tool `plan`: its updates, its errors, and a loaded session."""

from typing import Any

import pytest
from crow_core.acp.schema import LoadSessionRequest, PlanEntry, PlanUpdate, ToolCall, ToolCallUpdate
from crow_core.app import Crow
from crow_core.session.session import Session
from crow_core.session.store import Record
from crow_core.testing import Editor, MemoryStore, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_extensions.plan import plan
from crow_permissions.extension import permissions

pytestmark = pytest.mark.anyio

LOOK = {"content": "Look around", "status": "completed", "priority": "low"}
MEND = {"content": "Mend it", "status": "in_progress"}


def make_model(*plans: Any) -> ScriptedModel:
    """Make a model that writes one plan after another, then ends."""
    replies = [Reply(tool_calls=[Use(name="plan", arguments=each)]) for each in plans]
    return ScriptedModel([*replies, Reply("Done.")])


async def turn(crow: Crow) -> Editor:
    async with connect(crow, permit=None) as editor:
        session = await editor.new_session("/")
        await editor.prompt(session.session_id, "go")
    return editor


def get_answer(model: ScriptedModel) -> str:
    return model.requests[-1]["messages"][-1]["content"]


@pytest.mark.parametrize("mode", ["ask", "plan"])
async def test_each_plan_is_shown_whole_without_a_permission_question(mode: Any):
    model = make_model({"entries": [LOOK, MEND]}, {"entries": [LOOK, {**MEND, "status": "completed"}]})
    editor = await turn(Crow(model).use(permissions, mode=mode).use(plan))
    first, second = editor.of(PlanUpdate)
    assert first.entries == [
        PlanEntry(content="Look around", priority="low", status="completed"),
        PlanEntry(content="Mend it", priority="medium", status="in_progress"),
    ]
    assert [entry.status for entry in second.entries] == ["completed", "completed"]
    assert get_answer(model) == "The user sees the plan: 2 of 2 steps completed."
    assert {states[-1] for states in editor.calls().values()} == {"completed"}
    assert editor.of(ToolCall)[0].title == "plan(2 entries)"


async def test_a_plan_whose_entries_are_json_text_is_parsed():
    editor = await turn(Crow(make_model({"entries": '[{"content": "Mend it", "status": "pending"}]'})).use(plan))
    assert [entry.content for update in editor.of(PlanUpdate) for entry in update.entries] == ["Mend it"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "entries is a list of objects"),
        ({"entries": "Look around"}, "entries is a list of objects"),
        ({"entries": ["Look around"]}, "entries is a list of objects"),
        ({"entries": [LOOK, {"content": "Mend it"}]}, "entries[1].status: required, but missing"),
        ({"entries": [{**LOOK, "status": "perhaps"}]}, "entries[0].status: expected one of"),
        ({"entries": [{**LOOK, "content": ["7"]}]}, "entries[0].content: expected str"),
    ],
)
async def test_an_invalid_plan_is_an_error_for_the_model_and_is_not_shown(wrong: Any, why: str):
    model = make_model(wrong)
    editor = await turn(Crow(model).use(plan))
    assert editor.of(PlanUpdate) == []
    assert why in get_answer(model)
    assert editor.of(ToolCallUpdate)[-1].status == "failed"


async def test_a_loaded_session_shows_its_plans_again():
    crow = Crow(make_model({"entries": [LOOK]}, {"entries": []}, {"entries": [MEND]})).use(plan)
    kept: list[Any] = []

    @crow.session_end
    def keep(session: Session) -> None:
        kept.extend(session.log)

    await turn(crow)
    later = Crow(make_model()).use(plan)
    later.store = MemoryStore(Record("s", kept))
    async with connect(later) as editor:
        await editor.request("session/load", LoadSessionRequest(session_id="s", cwd="/", mcp_servers=[]))
        shown = [[entry.content for entry in update.entries] for update in editor.of(PlanUpdate)]
    assert shown == [["Look around"], [], ["Mend it"]]
