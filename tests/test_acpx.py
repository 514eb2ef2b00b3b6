"""Test `crow acp` with acpx, an independent client for the command line."""

import re
import shlex
from typing import TYPE_CHECKING

import pytest
from crow_core.testing import Reply, ScriptedCall, ScriptedServer

if TYPE_CHECKING:
    from conftest import Node

pytestmark = pytest.mark.anyio

ACPX = "node_modules/acpx/dist/cli.js"
PERMISSION_DENIED = 5
"""acpx's exit code after it has denied every permission."""
CALL: ScriptedCall = {"name": "terminal", "arguments": {"command": "echo $((6 * 7)) | tee answer"}}


async def test_exec_runs_a_permitted_command_and_prints_the_reply(node: "Node") -> None:
    async with ScriptedServer([Reply(tool_calls=[CALL]), Reply("It is 42.")]) as server:
        options = ["--agent", shlex.join(node.crow), "--approve-all", "--format", "quiet"]
        done = await node.run(server.url, ACPX, *options, "exec", "What is six times seven?")

    assert (done.code, done.out, done.err) == (0, "It is 42.\n", "")
    assert (node.project / "answer").read_text() == "42\n"
    assert server.requests[0]["messages"][-1]["content"] == "What is six times seven?"
    assert server.requests[1]["messages"][-1]["content"].strip() == "42"


async def test_exec_that_denies_everything_changes_nothing(node: "Node") -> None:
    del node.env["CROW_SANDBOX"]
    async with ScriptedServer([Reply(tool_calls=[CALL]), Reply("Then not.")]) as server:
        options = ["--agent", shlex.join(node.crow), "--deny-all", "--format", "quiet"]
        done = await node.run(server.url, ACPX, *options, "exec", "What is six times seven?")

    assert (done.code, done.out) == (PERMISSION_DENIED, "Then not.\n"), done.err
    assert not (node.project / "answer").exists()
    assert re.search("rejected|discarded", server.requests[1]["messages"][-1]["content"])  # before it runs, or after
