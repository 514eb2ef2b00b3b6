"""`crow memory` as a real process, and the notes in a session of `crow run`."""

import json
from typing import TYPE_CHECKING

import pytest
from crow_core.testing import Reply, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = [pytest.mark.anyio, pytest.mark.posix("the editor is a POSIX shell script")]


def edit_by(machine: "Machine", script: str) -> None:
    """Make a shell script the user's editor; the file is its first argument."""
    editor = machine.home / "editor"
    editor.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    editor.chmod(0o755)
    machine.env["EDITOR"] = str(editor)


async def test_notes_are_written_listed_read_and_forgotten(machine: "Machine") -> None:
    nothing = await machine.crow("memory", "list")
    edit_by(machine, 'echo "Use tabs." >> "$1"; echo "- Ask first." >> "$1"')
    assert (await machine.crow("memory", "edit")).code == 0
    listed = await machine.crow("memory", "list")
    machine.configure("[extensions]\nmemory = true\n")
    async with ScriptedServer([Reply("Hello.")]) as model:
        machine.ask(model.url)
        assert (await machine.crow("run", "Hello")).code == 0
        system = model.requests[0]["messages"][0]["content"]
    forgotten = await machine.crow("memory", "forget", "1")
    left = json.loads((await machine.crow("memory", "list", "--json")).out)
    missing = await machine.crow("memory", "forget", "7")
    assert "There are no notes on" in nothing.err
    assert "the extension is off" in listed.err
    assert "1 Use tabs. (by hand, " in listed.out
    assert "- Use tabs. *(by hand, " in system
    assert "- Ask first. *(by hand, " in system
    assert forgotten.out == "Forgotten: Use tabs.\n"
    assert [(note["text"], note["source"]) for note in left] == [("Ask first.", "by hand")]
    assert (missing.code, "There is no note 7: there are 1." in missing.err) == (2, True)


async def test_a_secret_in_an_edit_is_refused_and_the_notes_stay(machine: "Machine") -> None:
    edit_by(machine, 'echo "The key is sk-Abc123Def456Ghi789Jkl0" >> "$1"')
    done = await machine.crow("memory", "edit")
    assert done.code == 2
    assert "looks like a secret" in done.err
    assert json.loads((await machine.crow("memory", "list", "--json")).out) == []


async def test_an_editor_that_does_not_start_is_a_sentence(machine: "Machine") -> None:
    machine.env["EDITOR"] = "/no/such/editor"
    done = await machine.crow("memory", "edit")
    assert (done.code, "Traceback" in done.err) == (2, False)
    assert "The notes are as they were" in done.err
