"""Fixtures: `crow web` with an agent in memory, whose model is scripted, and tabs that are real WebSockets."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import httpx2
import pytest
from crow_core import Crow
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedModel
from crow_extensions.ask_user import ask_user
from crow_extensions.completions import completions
from crow_extensions.mcp_apps import mcp_apps
from crow_extensions.plan import plan
from crow_extensions.steering import steering
from crow_extensions.undo import undo
from crow_permissions.extension import permissions
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from crow_terminal.agent_connections import AgentLink
from crow_testing.fixtures import serve
from crow_web.app import make_app
from crow_web.app_frames import AppFrames
from crow_web.chats import Chats
from crow_web.gate import Gate
from fastmcp import FastMCP
from websockets.asyncio.client import ClientConnection, connect

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

Script: TypeAlias = Callable[[dict[str, Any]], Any] | Sequence[Reply]


class Tab:
    """A page, as the server sees it."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.blocks: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self.received: list[dict[str, str | None]] = []
        self._numbers = count(1)

    @property
    def html(self) -> str:
        return "\n".join(self.blocks.values())

    @property
    def text(self) -> str:
        """The log and the open text, without tags."""
        shown = "".join(html for id, html in self.blocks.items() if re.match(r"b\d|tail", id))
        return re.sub(r"<[^>]*>", "", shown)

    async def receive(self) -> dict[str, str | None]:
        batch: dict[str, str | None] = json.loads(await self.socket.recv())
        self.received.append(batch)
        for id, html in batch.items():
            if html is None:
                self.blocks.pop(id, None)
            else:
                (self.values if id.startswith("@") else self.blocks)[id] = html
        return batch

    async def until(self, condition: Callable[["Tab"], Any]) -> Any:
        """Receive changes until a condition holds, and return its value."""
        async with asyncio.timeout(60):
            while not (found := condition(self)):
                await self.receive()
        return found

    async def act(self, do: str, **fields: Any) -> None:
        action = {"do": do, "number": next(self._numbers), **fields}
        await self.socket.send(json.dumps(action))

    async def say(self, text: str, **fields: Any) -> None:
        await self.act("prompt", text=text, **fields)

    async def is_ready(self) -> None:
        """Wait for the end of a turn."""
        await self.until(lambda tab: tab.values.get("@phase") == "ready")

    async def see_card(self) -> tuple[str, str]:
        """Wait for a question, and return the id of its block and its number."""

        def find(tab: "Tab") -> tuple[str, str] | None:
            for id, html in tab.blocks.items():
                if 'class="card"' in html and (found := re.search(r'name="question" value="(\d+)"', html)):
                    return id, found[1]
            return None

        return await self.until(find)


@asynccontextmanager
async def open_tab(url: str, cookie: str, session: str = "", page: str = "") -> AsyncIterator[Tab]:
    """Open a page of a session, or of a new one, at the URL of a server. One with a name may come back."""
    address = url.replace("http", "ws", 1) + "/live" + (f"/{session}" if session else "") + f"?page={page}"
    headers = {"Cookie": cookie}
    async with connect(address, additional_headers=headers, origin=url, proxy=None) as socket:  # type: ignore
        tab = Tab(socket)
        await tab.receive()
        yield tab


@pytest.fixture(name="open_tab")
def get_open_tab() -> Callable[..., Any]:
    return open_tab


@dataclass
class Site:
    """A running `crow web`."""

    url: str
    gate: Gate
    chats: Chats
    crow: Crow
    folder: Path
    cookie: str
    links: list[AgentLink]
    """The connections to the agent that were opened."""
    stop: Callable[[], Awaitable[None]]
    """Ends the server and its agent."""
    frames: AppFrames

    @asynccontextmanager
    async def open(self, session: str = "", page: str = "") -> AsyncIterator[Tab]:
        """Open a page of a session, or of a new one. One with a name may come back."""
        async with open_tab(self.url, self.cookie, session, page) as tab:
            yield tab


def show(bird: str) -> str:
    """Show a bird."""
    return f"a picture of a {bird}"


def refresh() -> str:
    """Read the notes again, for the page of the server alone."""
    return "read again"


Start: TypeAlias = Callable[..., Any]


@pytest.fixture
async def start(database: Database, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Return a function that starts `crow web` with a script."""
    async with AsyncExitStack() as stack:

        async def start(
            script: Script,
            *,
            mode: Any = "yolo",
            port: int = 0,
            app: Callable[[], str] | None = None,
            extensions: Sequence[Callable[[Crow], None]] = (),
        ) -> Site:
            own = AsyncExitStack()
            stack.push_async_callback(own.aclose)
            tools = FastMCP("notes")

            @tools.tool
            def note(text: str) -> str:
                """Keep a text."""
                return f"kept {text}"

            if app:
                page = tools.resource("ui://notes/page", mime_type="text/html;profile=mcp-app")
                page(app)
                tools.tool(meta={"ui": {"resourceUri": "ui://notes/page"}})(show)
                tools.tool(meta={"ui": {"resourceUri": "ui://notes/page", "visibility": ["app"]}})(refresh)

            tools.resource("note://all")(lambda: "all of them")
            crow = Crow(ScriptedModel(script), servers=[Server("notes", lambda: tools, shared=True)])
            url = database.url.render_as_string(hide_password=False)
            crow.use(persistence, url=url, folder=database.folder).use(steering).use(ask_user).use(completions)
            crow.use(permissions, mode=mode).use(undo).use(mcp_apps).use(plan)
            for extension in extensions:
                crow.use(extension)
            crow.servers_wait = 60.0
            own.push_async_callback(crow.shut_down)
            links: list[AgentLink] = []
            agents: list[asyncio.Task[None]] = []

            async def wait_for_agents() -> None:
                if agents:
                    await asyncio.wait(agents)

            own.push_async_callback(wait_for_agents)  # after the server, which comes later, has ended

            async def open_link() -> AgentLink:
                ours, theirs = memory_pair()
                agent = asyncio.ensure_future(AcpAgent(theirs, crow, unstable=True).serve())
                agents.append(agent)

                async def describe_end() -> str:
                    await asyncio.wait([agent])  # as of a process; until then it holds its sessions
                    return "crow has ended."

                links.append(AgentLink(ours, describe_end))
                return links[-1]

            at = socket.create_server(("127.0.0.1", port))
            port = at.getsockname()[1]  # the frames name the page's
            made: list[AppFrames] = []
            gates: list[Gate] = []

            def make_frames(url: str) -> AppFrames:
                made.append(AppFrames(urlsplit(url).port or 0, port))
                return made[0]

            def make_gate(url: str) -> Gate:
                gates.append(Gate(make_app(database, chats=chats), port, frames=" ".join(made[0].origins)))
                return gates[0]

            await own.enter_async_context(serve(make_frames))
            chats = Chats(open_link, str(tmp_path), database, frames=made[0])
            url = await own.enter_async_context(serve(make_gate, with_sockets=True, at=at))
            async with httpx2.AsyncClient() as client:
                answer = await client.get(f"{url}/static/web.css?token={gates[0].add_token()}")
            cookie = answer.headers["set-cookie"].partition(";")[0]
            return Site(url, gates[0], chats, crow, tmp_path, cookie, links, own.aclose, made[0])

        yield start


@pytest.fixture
async def visit(browser: "Browser", problems: list[str]) -> AsyncIterator[Callable[..., Any]]:
    """Return a function that opens a page in Chromium: the first of a site with its token, a phone with another one."""
    contexts: dict[str, Any] = {}

    async def visit(site: Site, address: str = "/chat", *, device: str = "desk") -> "Page":
        phone: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
        if device not in contexts:
            contexts[device] = await browser.new_context(**(phone if device == "phone" else {}))
        page = await contexts[device].new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else 0)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((site.url, *site.frames.origins, "data:")) or problems.append(request.url)
            ),
        )
        await page.goto(f"{site.url}{address}?token={site.gate.add_token()}")
        return page

    yield visit
    for context in contexts.values():
        await context.close()
