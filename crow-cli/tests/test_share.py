"""`crow sessions share`: one file without secrets, private data, absolute paths and names, after a question."""

import getpass
import json
from typing import TYPE_CHECKING

import pytest
from crow_core.testing import Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

KEY = "sk-ant-api03-Zq3vT9xLm2Rk8WpYc5Hd7NbJ4sGf6Ua1"
PASSWORD = "Tr0ub4dour-9x-Kl"


def command(line: str) -> ScriptedCall:
    return {"name": "terminal", "arguments": {"command": line}}


async def talk(machine: "Machine", *replies: Reply, prompt: str = "Look around") -> str:
    """Run a session in the project and return its id."""
    async with ScriptedServer([*replies]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "--yolo", prompt)
    assert done.code == 0, done.err
    return json.loads((await machine.crow("sessions", "list", "--json")).out)[0]["id"]


@pytest.mark.parametrize("form", [(), ("--markdown",)])
async def test_the_file_has_no_secret_private_result_path_or_name(machine: "Machine", form: tuple[str, ...]):
    machine.env["USER"] = machine.env["LOGNAME"] = "annaberg"
    (machine.project / ".env").write_text(f"DB_PASSWORD={PASSWORD}\nNOTES=only in the file\n")
    id = await talk(
        machine,
        Reply("First.", tool_calls=[command("cat .env")]),
        Reply("Then.", tool_calls=[command(f"echo seen in {machine.project}/src/app.py")]),
        Reply(f"{KEY} and {PASSWORD} are of annaberg, anna@berg.example, in /home/annaberg/clients/acme.txt. Fine."),
    )
    done = await machine.crow("sessions", "share", id[:8], *form, "--yes")
    assert done.code == 0, done.err
    file = machine.project / f"crow-{id[:8]}.{'md' if form else 'html'}"
    text = file.read_text().replace("\\", "")
    for hidden in (KEY, PASSWORD, "only in the file", str(machine.project), "annaberg", "anna@berg", "clients"):
        assert hidden not in text, hidden
    assert "[redacted] and " in text
    assert " are of [name], [address], in [path]/acme.txt. Fine." in text
    assert "seen in [project]/src/app.py" in text
    assert "cat .env" in text
    kinds = [line.split(maxsplit=1)[1] for line in done.out.splitlines()[1:-1]]
    assert [kind.split(",")[0] for kind in kinds] == [
        "secrets",
        "results with private data",
        "absolute paths",
        "names of people and machines",
        "e-mail addresses",
    ]


async def test_nothing_is_written_before_the_question_is_answered(machine: "Machine"):
    id = await talk(machine, Reply(f"Hello {getpass.getuser()}."))
    done = await machine.crow("sessions", "share", id)
    assert (done.code, list(machine.project.glob("crow-*"))) == (1, [])
    assert "Write crow-" in done.err
    assert "--yes" in done.err


async def test_a_session_whose_text_is_all_secret_is_not_shared(machine: "Machine"):
    id = await talk(machine, Reply(KEY), prompt=f"{KEY} ?")
    done = await machine.crow("sessions", "share", id, "--yes")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"crow: Session {id[:8]} has no text besides secrets and private data, so there is nothing to share.\n"
    )


async def test_markdown_of_a_long_session_fits_a_comment(machine: "Machine"):
    id = await talk(
        machine,
        *(Reply("Look.", tool_calls=[command(f"seq {n}0000 {n}4000")]) for n in range(1, 5)),
        Reply("The end."),
    )
    done = await machine.crow("sessions", "share", id, "--markdown", "-o", "pr.md", "--yes")
    assert done.code == 0, done.err
    text = (machine.project / "pr.md").read_text()
    assert len(text) <= 65_536
    assert "characters left out" in text
    assert "The end." in text
