"""Skills: which there are, when the model is told of one, and what hostile ones can do: nothing."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from crow_core.acp.schema import UserMessageChunk
from crow_core.app import Crow
from crow_core.content import replay
from crow_core.extensions.commands import commands
from crow_core.messages import kind_of
from crow_core.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_skills.extension import skills

pytestmark = pytest.mark.anyio

PDF = """---
name: pdf
description: Reads PDF files. Use when the user has one.
metadata:
  triggers: invoice, "tax form"
---
# PDF

Run scripts/read.py. {{ 7*7 }}
"""


@dataclass
class Talk:
    editor: Editor
    session: Session
    model: ScriptedModel

    async def say(self, text: str) -> None:
        await self.editor.prompt(self.session.id, text)

    @property
    def system(self) -> str:
        return self.model.requests[-1]["messages"][0]["content"]

    @property
    def told(self) -> str:
        """The last message of the last request."""
        return self.model.requests[-1]["messages"][-1]["content"]

    def renders(self, purpose: str) -> list[dict[str, Any]]:
        notes = [entry.get("crow", {}) for entry in self.session.log if kind_of(entry) == "render"]
        return [render for render in notes if render["purpose"] == purpose]


@asynccontextmanager
async def talk(cwd: Path, crow: Crow) -> AsyncGenerator[Talk]:
    async with connect(crow) as editor:
        opened = await editor.new_session(str(cwd))
        model = next(iter(crow.models.values()))
        assert isinstance(model, ScriptedModel)
        yield Talk(editor, crow.sessions[opened.session_id], model)


def app(**options: Any) -> Crow:
    return Crow(ScriptedModel(lambda request: Reply("Good."))).use(commands).use(skills, **options)


def everybody(folder: Path) -> bool:
    return True


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / ".git").mkdir(parents=True)
    return folder


def skill(folder: Path, text: str = PDF, name: str = "pdf") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "SKILL.md").write_text(text)
    return folder / name


async def test_names_and_descriptions_stand_once_in_the_system_prompt(project: Path):
    file = skill(project / ".crow/skills") / "SKILL.md"
    async with talk(project, app(trusted=everybody)) as it:
        await it.say("Hi!")
        await it.say("Hi again!")
        assert it.system.count("- pdf: Reads PDF files. Use when the user has one.") == 1
        assert f"Read: {file}" in it.system
        assert "scripts/read.py" not in str(it.model.requests)
        assert len(it.renders("skills")) == 1


@pytest.mark.parametrize(
    ("words", "trigger"),
    [
        ("What is in this pdf?", "pdf"),
        ("An INVOICE came.", "invoice"),
        ("/skill:pdf what does it say?", "/skill:pdf"),
        ("Please use /skill:pdf here", "/skill:pdf"),
    ],
)
async def test_the_body_comes_after_the_words_that_call_for_it(project: Path, words: str, trigger: str):
    folder = skill(project / ".agents/skills")
    async with talk(project, app(trusted=everybody)) as it:
        await it.say(words)
        assert it.told.startswith(f'{words}\n\n<skill name="pdf">\nThe request above has {trigger} in it')
        assert (
            f"Paths in it are relative to {folder}\n\n# PDF\n\nRun scripts/read.py. {{{{ 7*7 }}}}\n</skill>" in it.told
        )
        (render,) = it.renders("skill")
        assert render["text"] in it.told
        shown = [update for update in replay(it.session.log, "/") if isinstance(update, UserMessageChunk)]
        assert [update.content.text for update in shown] == [words]
