"""Fixtures: a database of each kind with a few sessions, and a browser that came with the token."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx2
import pytest
from crow_core import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedCall, ScriptedModel, connect
from crow_permissions.extension import permissions
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_testing.databases import database as database
from crow_testing.databases import postgres as postgres
from crow_testing.fixtures import anyio_backend as anyio_backend
from crow_web.app import make_app
from crow_web.gate import Gate
from fastmcp import FastMCP

PORT = 4321
HOSTILE = "</title><script>document.title = 'taken'</script><img src=https://evil.example/x onerror=alert(1)>"
ANSWER = f"""# Report {HOSTILE}

**Bold**, [bad](javascript:alert(1)), [good](https://example.org), ![picture](https://evil.example/y.png)

```python
print("{HOSTILE}")
```
"""


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
async def site(database: Database) -> AsyncIterator[Site]:
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
    crow.use(persistence, url=url, folder=database.folder).use(permissions, mode="yolo")
    ids: list[str] = []
    async with connect(crow) as editor:
        for prompts in (["Plan the garden", "Shorter, please"], [HOSTILE]):
            session = await editor.new_session("/tmp")
            ids.append(session.session_id)
            for prompt in prompts:
                await editor.prompt(session.session_id, prompt)
    gate = Gate(make_app(database), PORT)
    address = f"http://127.0.0.1:{PORT}"
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=gate), base_url=address, follow_redirects=True
    ) as client:
        await client.get("/", params={"token": gate.token})
        yield Site(client, ids)
