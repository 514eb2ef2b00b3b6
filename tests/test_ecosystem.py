"""Test crow's commands for other agents and clients: with agents made with the official SDKs, and with acpx."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_acp_tools.check.validation import get_path
from crow_acp_tools.recording.file import read_recording
from crow_core.testing import Reply, ScriptedServer

if TYPE_CHECKING:
    from conftest import Node

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

ACPX = "node_modules/acpx/dist/cli.js"
PYTHON_AGENT = """
import asyncio

import acp
from acp.schema import AgentCapabilities, Implementation, InitializeResponse, NewSessionResponse, PromptResponse


class Counter(acp.Agent):
    def on_connect(self, conn):
        self.client, self.opened, self.cancelled = conn, 0, {}

    async def initialize(self, protocol_version, client_capabilities=None, client_info=None, **kwargs):
        return InitializeResponse(
            protocol_version=acp.PROTOCOL_VERSION,
            agent_capabilities=AgentCapabilities(),
            agent_info=Implementation(name="counter", version="1"),
        )

    async def new_session(self, cwd, **kwargs):
        self.opened += 1
        self.cancelled[str(self.opened)] = asyncio.Event()
        return NewSessionResponse(session_id=str(self.opened))

    async def prompt(self, session_id, prompt, **kwargs):
        text = prompt[0].text
        await self.client.session_update(session_id, acp.update_agent_message_text(text))
        if not text.startswith("Count"):
            return PromptResponse(stop_reason="end_turn")
        await self.cancelled[session_id].wait()
        return PromptResponse(stop_reason="cancelled")

    async def cancel(self, session_id, **kwargs):
        self.cancelled[session_id].set()


asyncio.run(acp.run_agent(Counter()))
"""


NOT_THERE = {"V2-CALL-002", "V2-RESUME-004", "V2-STATE-002"}
"""The requirements that an agent without tools and without a store does not meet."""


async def check(home: Path, *command: str) -> dict[str, Any]:
    """Return the report of `crow acp check` on an agent."""
    crow = (sys.executable, "-m", "crow_cli", "acp", "check", "--json", "--", *command)
    env = {"PATH": os.environ["PATH"], "HOME": str(home)}
    process = await asyncio.create_subprocess_exec(*crow, stdin=DEVNULL, stdout=PIPE, env=env)
    out, _ = await process.communicate()
    report = json.loads(out)
    assert process.returncode == (0 if report["conformant"] else 1)
    return report


def failures(report: dict[str, Any]) -> dict[str, str]:
    """Return the requirements that failed or were not tested, with the reasons."""
    verdicts = ("fail", "not tested")
    return {found["id"]: found["why"] for found in report["requirements"] if found["verdict"] in verdicts}


@pytest.mark.slow
async def test_agent_made_with_the_python_sdk_is_conformant(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(PYTHON_AGENT)
    report = await check(tmp_path, sys.executable, str(script))

    assert failures(report) == {
        "JSONRPC-004": "the answer is not the error -32601"
    }  # the SDK answers with an empty result
    assert report["conformant"]
    remarks = {found["id"]: found["why"] for found in report["requirements"]}
    assert remarks["INFO-PARSE-001"] == "not answered; the next request worked"  # the SDK drops the line


@pytest.mark.slow
async def test_agent_made_with_the_typescript_sdk_is_conformant(node: "Node", tmp_path: Path) -> None:
    program = Path(__file__).parent / "node"
    report = await check(tmp_path, str(program / "node_modules/node/bin/node"), str(program / "agent.mjs"))

    assert failures(report) == {}
    assert report["conformant"]


@pytest.mark.slow
async def test_agent_of_version_2_made_with_the_typescript_sdk_is_conformant(node: "Node", tmp_path: Path) -> None:
    program = Path(__file__).parent / "node"
    report = await check(tmp_path, str(program / "node_modules/node/bin/node"), str(program / "agent_v2.mjs"))

    assert failures(report).keys() == NOT_THERE
    assert (report["protocolVersions"], report["conformant"]) == ([2], True)


@pytest.mark.slow
async def test_agent_of_version_2_made_with_the_next_python_sdk_is_conformant(next_sdk: str, tmp_path: Path) -> None:
    report = await check(tmp_path, next_sdk, str(Path(__file__).parent / "python" / "agent_v2.py"))

    assert failures(report).keys() == NOT_THERE
    assert (report["protocolVersions"], report["conformant"]) == ([2], True)


def write_config(config: bytes, file: Path) -> None:
    """Write a configuration file in a new folder."""
    file.parent.mkdir()
    file.write_bytes(config)


@pytest.mark.slow
async def test_acpx_starts_crow_with_the_printed_config(node: "Node") -> None:
    command = (*node.crow, "--print-config", "acpx")
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL, env=node.env)
    config, _ = await process.communicate()
    write_config(config, Path(node.env["HOME"], ".acpx", "config.json"))
    async with ScriptedServer([Reply("Here I am.")]) as server:
        done = await node.run(server.url, ACPX, "--format", "quiet", "crow", "exec", "Are you there?")

    assert (done.code, done.out, done.err) == (0, "Here I am.\n", "")


async def test_conversation_of_acpx_with_crow_can_be_recorded(node: "Node", tmp_path: Path) -> None:
    recording = tmp_path / "wire.jsonl"
    agent = " ".join([*node.crow, "record", "-o", str(recording), "--", *node.crow])
    async with ScriptedServer([Reply("Here I am.")]) as server:
        done = await node.run(server.url, ACPX, "--agent", agent, "--format", "quiet", "exec", "Are you there?")

    assert (done.code, done.out, done.err) == (0, "Here I am.\n", "")
    chunks = [get_path(said.message, "params", "update", "content", "text") for said in read_recording(recording)]
    assert "".join(filter(None, chunks)) == "Here I am."
