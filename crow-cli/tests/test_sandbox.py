"""`crow sandbox`: what it promises is tried, and a command runs on a copy of the folder."""

import json
from typing import TYPE_CHECKING

import pytest
from crow_testing.skipping import unable

if TYPE_CHECKING:
    from conftest import Machine

pytestmark = [pytest.mark.anyio, pytest.mark.processes, pytest.mark.posix("there is a sandbox only on Linux")]


@pytest.fixture
async def sandboxed(machine: "Machine") -> "Machine":
    """A machine on which there is a sandbox."""
    del machine.env["CROW_SANDBOX"]
    sandbox = json.loads((await machine.crow("status", "--json")).out)["sandbox"]
    if sandbox["level"] != "review":
        unable(sandbox["says"])
    (machine.project / "notes.txt").write_text("one\n")
    return machine


async def test_each_promise_is_tried_and_holds(sandboxed: "Machine") -> None:
    done = await sandboxed.crow("sandbox", "check", "--json")
    promises = json.loads(done.out)["promises"]
    assert len(promises) == 12
    assert [each for each in promises if not each["holds"]] == []
    assert done.code == 0
    assert (await sandboxed.crow("sandbox", "check")).out.count("holds  ") == 12


async def test_command_shows_what_it_changed_and_its_changes_are_discarded(sandboxed: "Machine") -> None:
    done = await sandboxed.crow("sandbox", "run", "--", "rm notes.txt; echo all: > Makefile; exit 3")
    assert done.code == 3
    assert "Makefile (new, 5 bytes): a build runs it" in done.err
    assert "notes.txt (removed)" in done.err
    assert "Discarded" in done.err
    assert (sandboxed.project / "notes.txt").read_text() == "one\n"
    assert not (sandboxed.project / "Makefile").exists()


async def test_command_is_a_program_with_arguments_and_its_changes_are_applied(sandboxed: "Machine") -> None:
    done = await sandboxed.crow("sandbox", "run", "--apply", "--", "cp", "notes.txt", "two words.txt")
    assert (done.code, "Applied." in done.err) == (0, True)
    assert (sandboxed.project / "two words.txt").read_text() == "one\n"
    done = await sandboxed.crow("sandbox", "run", "--apply", "--", "true")
    assert "The command changed nothing." in done.err


async def test_command_does_not_see_private_files_unless_they_are_exposed(sandboxed: "Machine") -> None:
    (sandboxed.project / ".env").write_text("SECRET_KEY=real\n")
    assert "real" not in (await sandboxed.crow("sandbox", "run", "--", "cat .env")).out
    sandboxed.configure('[sandbox]\nexpose = [".env"]\n')
    assert "real" in (await sandboxed.crow("sandbox", "run", "--", "cat .env")).out


async def test_commands_of_crow_that_crow_started_change_no_files(sandboxed: "Machine") -> None:
    sandboxed.env["CROW_COMMAND"] = "x"
    done = await sandboxed.crow("sandbox", "run", "--apply", "--", "rm", "notes.txt")
    assert done.code == 2
    assert (sandboxed.project / "notes.txt").exists()


async def test_status_doctor_and_explain_say_what_holds(sandboxed: "Machine") -> None:
    assert "Sandbox   review. Commands run on a copy-on-write view" in (await sandboxed.crow("status")).out
    assert "copy-on-write view" in (await sandboxed.crow("doctor", "--machine")).out
    explained = await sandboxed.crow("perms", "explain", "make")
    assert "sandbox: it runs there at once, and you are asked about what it changes" in explained.out
    assert "thrown away" in (await sandboxed.crow("perms", "explain", "--mode", "plan", "make")).out
    assert "sandbox:" not in (await sandboxed.crow("perms", "explain", "fetch:https://example.com")).out


async def test_sandbox_is_off_where_the_settings_say_so(machine: "Machine") -> None:
    machine.configure('[sandbox]\nlevel = "off"\n')
    assert "Sandbox   off. Commands are asked about before they run" in (await machine.crow("status")).out
    assert "by [sandbox] level" in (await machine.crow("perms", "explain", "make")).out


async def test_settings_of_the_sandbox_are_checked(machine: "Machine") -> None:
    machine.configure('[sandbox]\nlevel = "workspace"\n')
    assert "sandbox" in (await machine.crow("status")).err
    machine.configure('[sandbox]\nexpose = [".env", "everything"]\n')
    assert "'everything' is neither a file, such as '.env', nor one of ssh-agent" in (await machine.crow("status")).err
    machine.configure('[sandbox]\nexpose = [".env", "ssh-agent"]\n')
    assert "everything" not in (await machine.crow("status")).err


async def test_where_namespaces_are_forbidden_every_door_says_so_and_runs_nothing_bare(machine: "Machine") -> None:
    """A filter forbids namespaces, as many containers do; then Landlock limits programs, if this kernel has it."""
    del machine.env["CROW_SANDBOX"]
    machine.confine()
    sandbox = json.loads((await machine.crow("status", "--json")).out)["sandbox"]
    assert sandbox["level"] == "off"
    assert "This machine does not let crow make a copy-on-write view." in sandbox["says"]
    assert "o permission" in sandbox["says"], "the machine's own words"
    assert sandbox["programs"]["level"] == "off" or "by Landlock" in sandbox["programs"]["says"]
    assert "For servers, hooks and checks: " in (await machine.crow("status")).out
    for words in (["check"], ["run", "--apply", "--", "touch made"]):
        done = await machine.crow("sandbox", *words)
        assert done.code == 2
        assert "copy-on-write view" in done.out + done.err
    assert not (machine.project / "made").exists()


async def test_where_there_is_no_landlock_either_programs_are_not_limited_and_status_says_so(
    machine: "Machine",
) -> None:
    machine.confine("--no-landlock")
    programs = json.loads((await machine.crow("status", "--json")).out)["sandbox"]["programs"]
    assert programs["level"] == "off"
    assert programs["says"].startswith("The kernel has no Landlock, or it is switched off.")
    assert "no Landlock" in (await machine.crow("doctor", "--machine")).out
