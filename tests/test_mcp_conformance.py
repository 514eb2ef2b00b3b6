"""Run the MCP conformance suite for clients against crow with a scripted model."""

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

NO_USER = "It signs in without a user, for which crow has no setting."
NO_EXTENSION = "It belongs to an extension of MCP that crow does not support."
NOT_SCORED = {
    "auth/client-credentials-jwt": NO_USER,
    "auth/cross-app-access-complete-flow": NO_USER,
    "auth/enterprise-managed-authorization": NO_USER,
    "auth/wif-jwt-bearer": NO_USER,
    "auth/dpop": NO_EXTENSION,
    "auth/dpop-nonce": NO_EXTENSION,
    "auth/2025-03-26-oauth-metadata-backcompat": "Its server names another issuer, which clients must refuse now.",
}
"""The scenarios that crow fails, and why. No version of MCP requires them."""


@pytest.fixture
async def client() -> AsyncGenerator[str]:
    """Start mcp_client.py, and return the command that makes it run a scenario."""
    python = Path(__file__).parent / "python"
    process = await asyncio.create_subprocess_exec(sys.executable, python / "mcp_client.py", stdout=PIPE)
    assert process.stdout
    port = (await process.stdout.readline()).decode().strip()
    yield shlex.join([sys.executable, "-IS", str(python / "errand.py"), port])
    process.kill()
    await process.communicate()


async def find_failures(
    node: "Node", client: str, suite: str, choice: Sequence[str], one: Sequence[str] = ()
) -> set[str]:
    """Return the scenarios that failed when all ran at once and again when they ran alone, with the options `one`.

    Some depend on time.
    """
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
async def test_crow_passes_the_scenarios_that_a_revision_requires(revision: str, node: "Node", client: str):
    found = await find_failures(node, client, NEXT, ["--requirements", revision], ["--spec-version", revision])
    assert found <= NOT_SCORED.keys()


async def test_crow_passes_the_latest_suite(node: "Node", client: str):
    assert await find_failures(node, client, LATEST, ["--suite", "all"]) <= NOT_SCORED.keys()
