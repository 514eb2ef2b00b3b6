"""Fixtures: a database of each kind with a few sessions, and browsers that came with the token: httpx and Chromium."""

import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx2
import pytest
from crow_core import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedCall, ScriptedModel, connect
from crow_extensions.commands import commands
from crow_permissions.extension import permissions
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_testing.databases import database as database
from crow_testing.databases import postgres as postgres
from crow_testing.fixtures import anyio_backend as anyio_backend
from crow_testing.fixtures import serve
from crow_testing.skipping import unable
from crow_web.app import make_app
from crow_web.gate import Gate
from fastmcp import FastMCP

if TYPE_CHECKING:
    from playwright.async_api import Browser, ConsoleMessage, Page, Request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PORT = 4321
HOSTILE = "</title><script>document.title = 'taken'</script><img src=https://evil.example/x onerror=alert(1)>"
ANSWER = f"""# Report {HOSTILE}

**Bold**, [bad](javascript:alert(1)), [good](https://example.org), ![picture](https://evil.example/y.png)

```python
print("{HOSTILE}")
```
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of crow, whose settings and data are in `tmp_path`."""
    return {"CROW_HOME": str(tmp_path), "HOME": str(tmp_path), "PATH": os.environ["PATH"], "CROW_SANDBOX": "off"}


@dataclass
class Site:
    """The pages, as a browser sees them."""

    client: httpx2.AsyncClient
    sessions: list[str]
    """Ids of the stored sessions: one with a tool call, one with hostile texts."""

    async def read(self, address: str) -> str:
        answer = await self.client.get(address)
        assert answer.status_code == 200, f"{address}: {answer.status_code} {answer.text}"
        return answer.text


@pytest.fixture
async def site(database: Database, env: dict[str, str]) -> AsyncIterator[Site]:
    """Yield the pages of a database with two sessions."""
    url = database.url.render_as_string(hide_password=False)
    replies = [
        Reply("I plan first.", tool_calls=[ScriptedCall(name="notes_note", arguments={"text": "a heron <b>"})]),
        Reply("All is done."),
        Reply("Shorter."),
        Reply(ANSWER, reasoning=HOSTILE),
    ]
    tools = FastMCP("notes")

    @tools.tool
    def note(text: str) -> str:
        """Keep a text."""
        return f"kept {text}"

    crow = Crow(ScriptedModel(replies), servers=[Server("notes", lambda: tools, shared=True)])
    crow.use(persistence, url=url, folder=database.folder).use(permissions, mode="yolo").use(commands)
    ids: list[str] = []
    async with connect(crow) as editor:
        for prompts in (["Plan the garden", "Shorter, please"], [HOSTILE]):
            session = await editor.new_session("/tmp")
            ids.append(session.session_id)
            for prompt in prompts:
                await editor.prompt(session.session_id, prompt)
        await editor.prompt(ids[0], "/good It is short")
    gate = Gate(make_app(database, env), PORT)
    address = f"http://127.0.0.1:{PORT}"
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=gate), base_url=address, follow_redirects=True
    ) as client:
        await client.get("/", params={"token": gate.token})
        yield Site(client, ids)


@pytest.fixture
async def browser() -> AsyncIterator["Browser"]:
    """Start the system's Chromium, which Playwright drives and never downloads."""
    if not find_spec("playwright"):
        unable("Playwright is not installed; `uv sync --group types` installs it.")
    if not CHROMIUM:
        unable("Chromium is not installed; Debian's package is chromium.")
    from playwright.async_api import async_playwright  # not there on a machine without the group

    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        await browser.close()


@pytest.fixture
def problems() -> list[str]:
    """Collect what a page must not do: errors in the console, scripts that fail, requests to other hosts.

    Chromium reports violations of the content security policy in the console. A test may remove what it expects.
    """
    return []


@pytest.fixture
async def page(
    database: Database, env: dict[str, str], site: Site, browser: "Browser", problems: list[str]
) -> AsyncIterator["Page"]:
    """Yield a page that shows the list of the sessions of `site`; at the end, it must have had no problems."""
    gates: list[Gate] = []

    def make_gate(url: str) -> Gate:
        gates.append(Gate(make_app(database, env), urlsplit(url).port or 0))
        return gates[0]

    async with serve(make_gate) as url:
        context = await browser.new_context(base_url=url)
        page = await context.new_page()
        watch(page, url, problems)
        await page.goto(f"/?token={gates[0].token}")
        yield page
        await context.close()
    assert problems == []


def watch(page: "Page", url: str, problems: list[str]) -> None:
    """Add the problems of a page to a list."""

    def hear(message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            problems.append(f"{page.url}: {message.text}")

    def see(request: "Request") -> None:
        if not request.url.startswith((f"{url}/", "data:", "about:", "blob:")):
            problems.append(f"{page.url}: a request to {request.url}")

    page.on("console", hear)
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
    page.on("request", see)
