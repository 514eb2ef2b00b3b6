"""The chats of `crow web`: their pages, their WebSockets, and which of them are open."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from secrets import token_hex

from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.errors import StoreError
from crow_persistence.database import Database
from crow_terminal.agent_connections import AgentLink, NoAgent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from crow_web import queries
from crow_web.app_frames import AppFrames
from crow_web.chat import ALONE, IDLE, WebChat
from crow_web.chat_session import get_time
from crow_web.history import read_history
from crow_web.live import INTERVAL, Tab
from crow_web.log import BlockRenderer
from crow_web.page_actions import ActingPage, act, read_json
from crow_web.pages import make_templates
from crow_web.shared_agent import SharedAgent

TEND_SECONDS = 1.0
"""Seconds between two looks at the sessions that others may change."""
MAX_CHATS = 50
"""Chats that are known at once."""
MAX_PAGES = 1_000
"""Pages that are known; the oldest is forgotten."""
MAX_REASON = 123
"""Bytes of the reason for which a WebSocket is closed (RFC 6455)."""
MAX_REQUEST = 1_000_000
"""Bytes of a request of an app."""


class Chats:
    """The chats by the ids of their sessions."""

    def __init__(
        self,
        open_link: Callable[[], Awaitable[AgentLink]],
        folder: str,
        database: Database,
        *,
        is_remote: bool = False,
        of_terminal: Callable[[], None] | None = None,
        frames: AppFrames | None = None,
    ) -> None:
        """`open_link` starts the agent, or connects to it. `folder` is the one in which a new session begins. An agent
        that `is_remote` may have sessions that the database does not. `of_terminal` is called when the terminal has
        ended whose page this is. `frames` serves the apps of MCP servers."""
        self.agent = SharedAgent(open_link, stays_open=of_terminal is not None, shows_apps=frames is not None)
        self._of_terminal, self._frames = of_terminal, frames
        self._folder, self._database = folder, database
        self._templates = make_templates(has_chats=True)
        self._renderer = BlockRenderer(self._templates)
        self._chats: set[WebChat] = set()
        self._pages: dict[str, ActingPage] = {}
        """The pages by the names that they give themselves. A page that comes back sends some actions again."""
        self._boot = token_hex(8)
        """Tells pages that the server was started again."""
        self._is_remote = is_remote
        self.routes: Sequence[BaseRoute] = (
            Route("/chat", self.show_page),
            Route("/chat/{id}", self.show_page),
            Route("/apps/{id}", self.answer_app, methods=["POST"]),
            WebSocketRoute("/live", self.serve_page),
            WebSocketRoute("/live/{id}", self.serve_page),
        )

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        """Tend the chats while the app runs; at its end close the connection to the agent."""
        tasks = [asyncio.ensure_future(self._tend())]
        if self._of_terminal:
            tasks.append(asyncio.ensure_future(self._follow_terminal(self._of_terminal)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await self.agent.close()

    async def _follow_terminal(self, end: Callable[[], None]) -> None:
        """Stay connected with the terminal until it ends."""
        with suppress(NoAgent):
            await self.agent.connect()
            await self.agent.until_closed()
        end()

    def list_chats(self) -> Sequence[WebChat]:
        return [*self._chats]

    async def show_page(self, request: Request) -> HTMLResponse:
        """Answer with the page of a session, or of a new one, without its log, which comes over the WebSocket."""
        id = request.path_params.get("id", "")
        folders: Sequence[str] = [] if id else await asyncio.to_thread(self._list_folders)
        page = self._templates.get_template("chat.html").render(id=id, folder=self._folder, folders=folders)
        return HTMLResponse(page)

    def _list_folders(self) -> Sequence[str]:
        with suppress(StoreError), self._database.begin_read() as connection:
            return queries.list_folders(connection)
        return []

    async def serve_page(self, socket: WebSocket) -> None:
        """Send a page what it shows, and carry out its actions."""
        await socket.accept()
        page = self._find_page(socket.query_params.get("page", ""))
        try:
            page.chat = chat = await self._find(socket.path_params.get("id", ""), page.chat)
        except StoreError as error:
            await socket.close(1008, str(error).encode()[:MAX_REASON].decode(errors="ignore"))
            return
        chat.touched = get_time()
        await chat.look()
        if chat.is_shared:
            chat.start(chat.open())
        tab = chat.feed.join()
        tab.add({"@boot": self._boot, "@all": ""})
        sending = asyncio.ensure_future(send(socket, tab))
        try:
            async for text in socket.iter_text():
                action = read_json(text)
                if isinstance(action, dict):
                    act(chat, page, tab, action)  # pyright: ignore[reportUnknownArgumentType]
        except (WebSocketDisconnect, ValueError):
            pass
        finally:
            chat.feed.leave(tab)
            chat.touched = get_time()
            sending.cancel()

    async def answer_app(self, request: Request) -> JSONResponse:
        """Answer a request of an app that a page shows."""
        chat = next((chat for chat in self._chats if chat.id == request.path_params["id"]), None)
        if chat is None or int(request.headers.get("content-length", MAX_REQUEST + 1)) > MAX_REQUEST:
            return JSONResponse({"error": "There is no such session, or the request is too long."})
        return JSONResponse(await chat.ask_for_app(read_json((await request.body()).decode())))

    def _find_page(self, name: str) -> ActingPage:
        """Return what is known of a page."""
        page = self._pages.pop(name, None) or ActingPage(name=name)
        if name:
            self._pages[name] = page
        while len(self._pages) > MAX_PAGES:
            del self._pages[next(iter(self._pages))]
        return page

    async def _find(self, id: str, last: WebChat | None) -> WebChat:
        """Return the chat of a session, or a new one. Raises StoreError if the session cannot be read.

        `last` is the one that the page has shown. A new chat may have got an id that the page does not know.
        """
        if last and not id:
            id = last.id
        if last in self._chats and last.id == id:
            return last
        for chat in self._chats:
            if id and chat.id == id:
                return chat
        if len(self._chats) >= MAX_CHATS:
            raise StoreError(f"{MAX_CHATS} chats are open. Close pages of others first.")
        folder = self._folder
        database: Database | None = self._database
        if id:
            try:
                found = await asyncio.to_thread(read_history, self._database, self._renderer, id)
            except StoreError:
                if not self._is_remote:
                    raise
                database = None  # the agent has a database of its own
            else:
                id, folder = found.id, found.folder
                if known := next((chat for chat in self._chats if chat.id == id), None):
                    return known
        chat = WebChat(self.agent, self._renderer, database, folder, id, self._frames)
        self._chats.add(chat)
        return chat

    async def _tend(self) -> None:
        """Show what other processes have changed, and close sessions with which nothing happens."""
        while True:
            await asyncio.sleep(TEND_SECONDS)
            for chat in [*self._chats]:
                with suppress(NoAgent, RpcError, ConnectionClosed):
                    await self._tend_chat(chat)

    async def _tend_chat(self, chat: WebChat) -> None:
        is_shown = bool(chat.feed.tabs)
        seconds = IDLE if is_shown else ALONE
        is_held = (
            chat.is_shared or chat.requests or chat.background
        )  # what runs in the background would end with the session
        if chat.phase == "ready" and not is_held and get_time() - chat.touched > seconds:
            await chat.close()
        elif is_shown:
            await chat.look()
        elif chat.phase in ("new", "viewing") and not chat.words:
            self._chats.discard(chat)


async def send(socket: WebSocket, tab: Tab) -> None:
    """Send a page its changes, at most one batch in each interval."""
    with suppress(WebSocketDisconnect, RuntimeError):  # RuntimeError: closed in the meantime
        while True:
            await socket.send_text(json.dumps(await tab.take(), ensure_ascii=False))
            await asyncio.sleep(INTERVAL)
