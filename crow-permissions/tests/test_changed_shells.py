"""Commands that change the shell or the folder in which later ones run: no other program runs unasked for that."""

import asyncio
from pathlib import Path

import crow_mcp_server
import pytest
from crow_core.acp.schema import (
    ClientCapabilities,
    RequestPermissionRequest,
    RequestPermissionResponse,
    SelectedOutcome,
)
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Editor, Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall
from crow_permissions.extension import permissions

pytestmark = [pytest.mark.anyio, pytest.mark.posix("the commands are those of a POSIX shell")]

CHANGES = r"""
PATH=$PWD/evil:$PATH
export PATH="$PWD/evil:$PATH"
declare -x PATH=$PWD/evil:$PATH
typeset -x PATH=$PWD/evil:$PATH
readonly PATH=$PWD/evil:$PATH
read PATH <<< $PWD/evil:$PATH
printf -v PATH %s $PWD/evil:$PATH
for PATH in $PWD/evil:$PATH; do :; done
eval "PATH=$PWD/evil:$PATH"
source ./activate
. ./activate
set -a; . ./activate
mapfile -t p <<< $PWD/evil; PATH=$p:$PATH
: ${x:=$PWD/evil}; PATH=$x:$PATH
hash -p $PWD/evil/uname uname
alias uname=$PWD/evil/uname; shopt -s expand_aliases
uname() { $PWD/evil/uname; }
uname() { $PWD/evil/uname; }; export -f uname
function uname { $PWD/evil/uname; }; export -f uname
env -i true; export "BASH_FUNC_uname%%=() { $PWD/evil/uname; }"
export BASH_ENV=$PWD/hook
export ENV=$PWD/hook; set -o posix
trap "$PWD/evil/uname" EXIT
trap "$PWD/evil/uname" DEBUG
PROMPT_COMMAND=$PWD/evil/uname
export PS4='$('$PWD'/evil/uname)'; set -x
enable -n printf; BASH_CMDS[uname]=$PWD/evil/uname
exec 3>&1; export SHELLOPTS
cd evil && export PATH=.:$PATH
export LD_PRELOAD=$PWD/evil/x.so
export HOME=$PWD/evil
unset PATH; PATH=$PWD/evil:/usr/bin:/bin
""".strip().split("\n")


class Person(Editor):
    """An editor whose user allows everything but the program itself."""

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        self.questions.append(question)
        is_program = "'uname'" in str(question.tool_call.raw_input)
        return RequestPermissionResponse(outcome=SelectedOutcome(option_id="reject" if is_program else "allow"))


@pytest.mark.parametrize("change", CHANGES)
async def test_rule_never_runs_the_program_that_a_change_has_put_in_place_of_its_own(
    change: str, tmp_path: Path
) -> None:
    (tmp_path / "evil").mkdir()
    program = tmp_path / "evil" / "uname"
    program.write_text(f"#!/bin/sh\n/usr/bin/touch {tmp_path}/ran || /bin/touch {tmp_path}/ran\n")
    program.chmod(0o755)
    (tmp_path / "hook").write_text(f"{program}\n")
    (tmp_path / "activate").write_text(f"export PATH={tmp_path}/evil:$PATH\n")
    model = ScriptedModel(
        [
            Reply(tool_calls=[use("true && " + change if change.startswith("PATH") else change)]),
            Reply("Done."),
            *(reply for _ in range(2) for reply in (Reply(tool_calls=[use("uname")]), Reply("Done."))),
        ]
    )
    tools = Server(
        "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
    )
    crow = Crow(model, servers=[tools]).use(permissions, allow=["terminal:uname*"])
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    person = Person(ours)
    async with person.serving():
        await person.initialize("person", ClientCapabilities())
        session = await person.new_session(str(tmp_path))
        await person.prompt(session.session_id, "go")
        (tmp_path / "ran").unlink(missing_ok=True)  # what the allowed change itself has run
        for _ in range(2):
            await person.prompt(session.session_id, "go")
    await agent
    await crow.shut_down()
    assert person.questions
    assert not (tmp_path / "ran").exists()


def use(command: str) -> ScriptedCall:
    """Make a call of `terminal`."""
    return {"name": "terminal", "arguments": {"command": command}}
