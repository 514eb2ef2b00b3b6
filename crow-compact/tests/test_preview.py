"""The user sees a summary before it counts, edits it, or discards it."""

from collections.abc import Mapping
from typing import Any

import pytest
from crow_core.acp.schema import (
    ClientCapabilities,
    CreateElicitationRequest,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationFormCapabilities,
)
from crow_core.testing import Editor

from .test_compaction import LONG, Speaker, Talk, talking

pytestmark = pytest.mark.anyio

HAS_FORMS = ClientCapabilities(elicitation=ElicitationCapabilities(form=ElicitationFormCapabilities()))


def answer_forms(
    editor: Editor, action: Any, content: Mapping[str, Any] | None = None
) -> list[CreateElicitationRequest]:
    """Answer each form in one way. Return the list of the forms."""
    editor.answer = CreateElicitationResponse(action=action, content=dict(content) if content else None)
    return editor.forms


def summaries(talk: Talk) -> list[str]:
    return [marker["summary"] for marker in talk.markers() if marker["kind"] == "compaction"]


async def test_a_preview_shows_the_summary_and_what_stays_and_takes_an_edited_one():
    async with talking(Speaker(), capabilities=HAS_FORMS) as talk:
        for turn in range(4):
            await talk.say(f"Turn {turn}. {LONG}")
        await talk.say("/pin Turn 1")
        forms = answer_forms(talk.editor, "accept", {"summary": "Everything is blue."})
        await talk.say("/compact --preview keep the word for red")
        (form,) = forms
        await talk.say("And now?")
    assert form.requested_schema
    assert form.requested_schema.properties["summary"].default == "All went well."
    assert "- you: Turn 0. These are words" in form.message
    assert "- you: Turn 1. These are words" in form.message
    assert summaries(talk) == ["Everything is blue."]
    assert "keep the word for red" in talk.summaries()[0]["messages"][-1]["content"]
    assert "Everything is blue." in str(talk.asked()[-1]["messages"])


@pytest.mark.parametrize(
    ("action", "content", "said"),
    [
        ("decline", None, "You discarded the summary."),
        ("cancel", None, "You discarded the summary."),
        ("accept", {"summary": " \n"}, "The summary was edited to nothing."),
    ],
)
async def test_a_discarded_summary_changes_nothing(action: str, content: dict[str, Any] | None, said: str):
    async with talking(Speaker(), capabilities=HAS_FORMS) as talk:
        for _ in range(4):
            await talk.say(LONG)
        answer_forms(talk.editor, action, content)
        await talk.say("/compact --preview")
    assert talk.editor.text.endswith(f"Nothing was compacted. {said}")
    assert talk.markers() == []


@pytest.mark.parametrize(("permit", "worked"), [("allow_once", True), ("reject_once", False)])
async def test_a_client_without_forms_shows_the_summary_and_takes_yes_or_no(permit: str, worked: bool):
    async with talking(Speaker()) as talk:
        for _ in range(4):
            await talk.say(LONG)
        talk.editor.permit = permit
        await talk.say("/compact --preview")
    assert "The summary: All went well." in talk.editor.thoughts
    assert summaries(talk) == (["All went well."] if worked else [])


async def test_with_the_setting_each_summary_is_shown():
    async with talking(Speaker(), capabilities=HAS_FORMS, ask=True) as talk:
        forms = answer_forms(talk.editor, "accept", {"summary": "Short."})
        for _ in range(9):
            await talk.say(LONG)
    assert len(forms) == len(summaries(talk)) > 0
    assert set(summaries(talk)) == {"Short."}


async def test_with_the_setting_a_client_without_forms_is_not_asked():
    async with talking(Speaker(), ask=True) as talk:
        for _ in range(9):
            await talk.say(LONG)
    assert talk.editor.questions == []
    assert set(summaries(talk)) == {"All went well."}
