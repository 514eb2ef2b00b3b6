"""The suite that judges MCP clients, with crow as the client: a session, its toolbox, and a model that is scripted."""

import asyncio
import re
import shlex
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Node

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(200)]

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


async def verdicts(node: "Node", client: str, suite: str, *choice: str) -> dict[str, bool]:
    """Run scenarios; whether crow failed none of a scenario's checks, by its name."""
    done = await node.run("http://127.0.0.1:9", suite, "client", "--command", client, "--timeout", "100000", *choice)
    found = re.findall(r"^[✓✗] (\S+): \d+ passed, (\d+) failed", done.out, re.MULTILINE)
    assert found, done.out + done.err
    return {scenario: failed == "0" for scenario, failed in found}


def failed(verdicts: dict[str, bool]) -> set[str]:
    return {scenario for scenario, passed in verdicts.items() if not passed}


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_crow_passes_all_that_a_revision_requires_of_a_client(revision: str, node: "Node", client: str):
    found = await verdicts(node, client, NEXT, "--requirements", revision)
    assert failed(found) <= NOT_SCORED.keys()
    assert {"tools_call", "auth/pre-registration"} <= found.keys()


async def test_crow_passes_the_suite_as_it_was_last_released(node: "Node", client: str):
    found = await verdicts(node, client, LATEST, "--suite", "all")
    assert failed(found) <= NOT_SCORED.keys()
    assert {"tools_call", "sse-retry"} <= found.keys()
