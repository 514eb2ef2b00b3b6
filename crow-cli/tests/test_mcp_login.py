"""Logging in to a remote MCP server: with `crow mcp login`, and from within an editor."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import keyring
import pytest
import uvicorn
from crow_agent.app import build
from crow_core.acp.schema import (
    ClientCapabilities,
    CreateElicitationResponse,
    ElicitationCapabilities,
    ElicitationUrlCapabilities,
)
from crow_core.testing import Reply, ScriptedModel, connect
from crow_persistence.extension import persistence
from fastmcp import FastMCP
from fastmcp.server.auth.auth import ClientRegistrationOptions
from fastmcp.server.auth.providers.in_memory import InMemoryOAuthProvider
from keyring.backends import fail

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

PAGES = ClientCapabilities(elicitation=ElicitationCapabilities(url=ElicitationUrlCapabilities()))

BROWSER = """
import sys, urllib.request
urllib.request.urlopen(sys.argv[1]).read()
"""


@pytest.fixture
async def vault() -> AsyncIterator[str]:
    """Serve an MCP server that needs a login and give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as at:
        url = f"http://127.0.0.1:{at.getsockname()[1]}"
        anyone = ClientRegistrationOptions(enabled=True)
        mcp = FastMCP("vault", auth=InMemoryOAuthProvider(base_url=url, client_registration_options=anyone))
        mcp.tool(lambda: "gold", name="open")
        server = uvicorn.Server(uvicorn.Config(mcp.http_app(), log_level="critical", ws="none"))
        serving = asyncio.ensure_future(server.serve(sockets=[at]))
        yield f"{url}/mcp"
        server.should_exit = True
        await asyncio.wait([serving])


@pytest.fixture
def guarded(machine: "Machine", vault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Machine":
    """Configure the server, and a browser that logs in at once."""
    file = Path(machine.env["CROW_HOME"], "mcp.json")
    file.parent.mkdir()
    file.write_text(json.dumps({"mcpServers": {"vault": {"url": vault, "auth": "oauth"}}}))
    browser = tmp_path / "browser.py"
    browser.write_text(BROWSER)
    machine.env |= {
        "BROWSER": f"{sys.executable} {browser} %s",
        "PYTHON_KEYRING_BACKEND": "keyring.backends.fail.Keyring",
    }
    monkeypatch.setattr(keyring, "get_keyring", fail.Keyring)
    return machine


@pytest.mark.slow
async def test_login_opens_the_browser_and_logout_deletes_the_tokens(guarded: "Machine"):
    before = await guarded.crow("mcp", "test", "vault")
    assert (before.code, before.out) == (1, "")
    assert before.err == (
        "crow: MCP server 'vault' did not start: it wants you to log in. Run: crow mcp login vault.\n"
    )
    login = await guarded.crow("mcp", "login", "vault")
    assert login.code == 0, login.err
    assert login.err.startswith("Log in with your browser. If none opens, visit:\nhttp://127.0.0.1:")
    assert login.err.endswith("\nLogged in to vault.\n")
    tried = await guarded.crow("mcp", "test", "vault")
    assert tried.code == 0, tried.err
    assert tried.out.endswith("tools (1): open\n")
    assert (await guarded.crow("mcp", "logout", "vault")).code == 0
    assert (await guarded.crow("mcp", "test", "vault")).code == 1


async def test_server_without_a_configured_login_says_how_to_configure_it(guarded: "Machine", vault: str):
    await guarded.crow("mcp", "add", "plain", vault)
    tried = await guarded.crow("mcp", "test", "plain")
    assert tried.code == 1
    assert tried.err == (
        "crow: MCP server 'plain' did not start: it requires authentication (401); give it an "
        'Authorization header, or auth = "oauth", then log in: crow mcp login NAME.\n'
    )


async def test_server_with_client_credentials_needs_no_login(machine: "Machine", vault: str):
    oauth = {"client_id": "crow", "client_secret": "s3cret-of-crow", "issuer": "https://auth.example.org"}
    servers = {"vault": {"url": vault, "auth": "client_credentials", "oauth": oauth}}
    home = Path(machine.env["CROW_HOME"])
    home.mkdir(parents=True)  # noqa: ASYNC240 - nothing else runs in this event loop
    (home / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    for command in ("login", "logout"):
        done = await machine.crow("mcp", command, "vault")
        assert done.code == 2
        assert done.err == "crow: vault needs no login: it has client credentials. Test it: crow mcp test vault\n"
    tested = await machine.crow("mcp", "test", "vault")
    assert tested.code != 0
    assert "MCP server 'vault' did not start: " in tested.err
    assert "https://auth.example.org" in tested.err
    listed = await machine.crow("mcp", "list", "--json", "--check")
    assert "s3cret-of-crow" not in tested.out + tested.err + listed.out + listed.err


async def test_editor_that_opens_urls_gets_the_login_page(guarded: "Machine"):
    model = ScriptedModel(lambda request: Reply("Hello."))
    crow = await build(guarded.env, models={"scripted": model}, without=[persistence])
    async with connect(crow, capabilities=PAGES) as editor:
        editor.answer = CreateElicitationResponse(action="accept")
        session = await editor.new_session(str(guarded.project))
        await editor.until(lambda editor: editor.forms)
        (page,) = editor.forms
        assert page.message == "The MCP server vault wants you to log in."
        assert page.session_id == session.session_id
        async with httpx2.AsyncClient(follow_redirects=True) as browser:
            (await browser.get(str(page.url))).raise_for_status()
        await editor.until(lambda editor: editor.completed)
        assert editor.completed == [page.elicitation_id]
        (opened,) = crow.sessions.values()
        await next(server for server in opened.toolbox.servers if server.name == "vault").list()
        await editor.prompt(session.session_id, "hi")
    assert "vault_open" in [tool["function"]["name"] for tool in model.requests[-1]["tools"]]


@pytest.mark.parametrize("capabilities", [ClientCapabilities(), PAGES], ids=["cannot", "declines"])
async def test_session_without_a_login_works_and_says_how_to_log_in(
    guarded: "Machine", capabilities: ClientCapabilities
):
    model = ScriptedModel(lambda request: Reply("Hello."))
    crow = await build(guarded.env, models={"scripted": model}, without=[persistence])
    async with connect(crow, capabilities=capabilities) as editor:
        editor.answer = CreateElicitationResponse(action="decline")
        session = await editor.new_session(str(guarded.project))
        (opened,) = crow.sessions.values()
        await next(server for server in opened.toolbox.servers if server.name == "vault").list()
        await editor.prompt(session.session_id, "hi")
    sentence = "MCP server 'vault' did not start: it wants you to log in. Run: crow mcp login vault."
    assert sentence in editor.thoughts
    assert len(editor.forms) == (capabilities is PAGES)
