"""The suite that judges MCP clients, with crow as the client: a session, its toolbox, and a model that is scripted."""

import asyncio
import re
import shlex
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Node

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

LATEST = "node_modules/@modelcontextprotocol/conformance/dist/index.js"
NEXT = "node_modules/conformance-next/dist/index.js"

NO_PERSON = "It signs in without a person, for which crow has no setting."
NO_EXTENSION = "It is of an extension of MCP that crow does not speak."
NOT_SCORED = {
    "auth/client-credentials-basic": NO_PERSON,
    "auth/client-credentials-jwt": NO_PERSON,
    "auth/cross-app-access-complete-flow": NO_PERSON,
    "auth/enterprise-managed-authorization": NO_PERSON,
    "auth/wif-jwt-bearer": NO_PERSON,
    "auth/dpop": NO_EXTENSION,
    "auth/dpop-nonce": NO_EXTENSION,
    "auth/2025-03-26-oauth-metadata-backcompat": "Its issuer is another than it says, which clients refuse by now.",
}
"""The scenarios that crow fails, and why; none is among those that a revision of MCP requires."""


@pytest.fixture
async def client() -> AsyncGenerator[str]:
    """The command that is a client, with the client behind it."""
    python = Path(__file__).parent / "python"
    process = await asyncio.create_subprocess_exec(sys.executable, python / "mcp_client.py", stdout=PIPE)
    assert process.stdout
    port = (await process.stdout.readline()).decode().strip()
    yield shlex.join([sys.executable, "-IS", str(python / "errand.py"), port])
    process.kill()
    await process.communicate()


async def failed(node: "Node", client: str, suite: str, choice: Sequence[str], one: Sequence[str] = ()) -> set[str]:
    """The scenarios of which crow failed a check: when all ran at once and again when it ran alone, with the options
    `one`, as some look at the clock."""
    command = (suite, "client", "--command", client, "--timeout", "100000")
    done = await node.run("http://127.0.0.1:9", *command, *choice)
    found = dict(re.findall(r"^[✓✗] (\S+): \d+ passed, (\d+) failed", done.out, re.MULTILINE))
    assert {"tools_call", "sse-retry", "auth/pre-registration"} & found.keys(), done.out + done.err
    suspects = {scenario for scenario, failures in found.items() if failures != "0"}
    for scenario in suspects - NOT_SCORED.keys():
        alone = await node.run("http://127.0.0.1:9", *command, "--scenario", scenario, *one)
        if alone.code == 0:
            suspects.discard(scenario)
        else:
            print(alone.out, alone.err)
    return suspects


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_crow_passes_all_that_a_revision_requires_of_a_client(revision: str, node: "Node", client: str):
    found = await failed(node, client, NEXT, ["--requirements", revision], ["--spec-version", revision])
    assert found <= NOT_SCORED.keys()


async def test_crow_passes_the_suite_as_it_was_last_released(node: "Node", client: str):
    assert await failed(node, client, LATEST, ["--suite", "all"]) <= NOT_SCORED.keys()
