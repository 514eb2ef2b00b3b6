"""Tests of the order in which several system prompts count."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
from crow_agent.app import build
from crow_core.session.prompts import Prompt
from crow_core.testing import Reply, ScriptedModel
from crow_core.testing.wire import connect_raw
from crow_persistence.extension import persistence

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio


async def find_system_prompt(machine: "Machine", system: Prompt | None = None, **params: Any) -> str:
    """Return what the model reads first in a new session: `system` is the program's, `params` are the client's."""
    model = ScriptedModel([Reply("Yes.")])
    crow = await build(machine.env, models={"scripted": model}, without=[persistence], system=system)
    async with connect_raw(crow, unstable=True) as wire:
        await wire.ask("initialize", {"protocolVersion": 1, "clientCapabilities": {}})
        opened = await wire.ask("session/new", {"cwd": str(machine.project), "mcpServers": [], **params})
        text: Mapping[str, str] = {"type": "text", "text": "hi"}
        await wire.ask("session/prompt", {"sessionId": opened["result"]["sessionId"], "prompt": [text]})
    return model.requests[0]["messages"][0]["content"]


def from_client(text: str, mode: str) -> dict[str, Any]:
    return {"systemPrompt": {"mode": mode, "content": [{"type": "text", "text": text}]}}


async def test_each_system_prompt_counts_more_than_those_for_more_sessions(machine: "Machine") -> None:
    theirs = machine.project / ".crow" / "prompts" / "system.md.j2"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("The project's.{{ instructions }}")
    assert (await machine.crow("trust", "--yes")).code == 0
    theirs.unlink()

    added = from_client("Be brief.", "append")
    packaged = await find_system_prompt(machine, **added)
    assert packaged.startswith("You are crow")
    assert "Be brief." in packaged

    file = machine.configure("").parent / "prompts" / "system.md.j2"
    file.parent.mkdir()
    file.write_text("The user's file.{{ instructions }}")
    assert await find_system_prompt(machine, **added) == "The user's file.['Be brief.']"

    (file.parent.parent / "mine.md.j2").write_text("The user's setting.{{ instructions }}")
    machine.configure('[prompts]\nsystem = "mine.md.j2"\n')
    assert await find_system_prompt(machine, **added) == "The user's setting.['Be brief.']"

    theirs.write_text("Another one.{{ instructions }}")
    assert await find_system_prompt(machine, **added) == "The user's setting.['Be brief.']", "it is not trusted"
    theirs.write_text("The project's.{{ instructions }}")
    assert await find_system_prompt(machine, **added) == "The project's.['Be brief.']"

    program = Prompt("system", "The program's.{{ instructions }}")
    assert await find_system_prompt(machine, program, **added) == "The program's.['Be brief.']"

    assert await find_system_prompt(machine, program, **from_client("The client's.", "override")) == "The client's."
