"""Two clients on one session over the network, one of them behind a proxy that cuts its connections."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest
from crow_core.acp import http_client
from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.remote_agent import connect
from crow_core.acp.schema import (
    AgentMessageChunk,
    ClientCapabilities,
    LoadSessionRequest,
    SessionInfoUpdate,
    UserMessageChunk,
)
from crow_core.app import Crow
from crow_core.messages.message import Delta
from crow_core.testing import Editor, MemoryStore
from crow_testing.proxies import TOKEN, cut_after, proxying, serving

pytestmark = pytest.mark.anyio

WORDS = [f"{number} " for number in range(30)]


class PacedModel:
    """A model that says a word each time that it may."""

    name = "paced"
    window: int | None = None

    def __init__(self) -> None:
        self.may = asyncio.Semaphore(0)

    async def stream(self, request: Any) -> AsyncIterator[Delta]:
        for word in WORDS:
            await self.may.acquire()
            yield {"content": word}
        yield {"finish_reason": "stop"}


@asynccontextmanager
async def editing(url: str, version: int = 1) -> AsyncIterator[Editor]:
    editor = Editor(await connect(url, TOKEN))
    async with editor.serving():
        await editor.initialize("editor", ClientCapabilities(), version=version)
        yield editor


async def load(editor: Editor, session: str, start: str = "") -> None:
    """Load a session, from a message on if `start` is its id."""
    params = LoadSessionRequest(session_id=session, cwd="/", mcp_servers=[])
    if start:
        params.meta = {"crow": {"replayFrom": {"type": "_message", "messageId": start}}}
    await editor.request("session/load", params)


def has_ended(editor: Editor) -> bool:
    """True if a turn of another client has ended."""
    return any("ended" in str(update.meta) for update in editor.of(SessionInfoUpdate))


def cut_randomly(random: Random, begins: asyncio.Event) -> Callable[..., Any]:
    """Make a pump that cuts each connection, once it `begins`, after another number of bytes of answers."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
        left = random.randint(1, 3000)
        with suppress(OSError):
            while left > 0 and (data := await reader.read(min(1000, left))):
                left -= len(data) if is_answer and begins.is_set() else 0
                writer.write(data)
                await writer.drain()

    return pump


async def cut_each_event(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_answer: bool) -> None:
    """Cut a stream after each event that is an update."""
    passed = b""
    with suppress(OSError):
        while data := await reader.read(1000):
            passed += data
            if is_answer and (end := re.search(rb'data: \{[^\n]*"session/update"[^\n]*\n\n', passed)):
                writer.write(data[: len(data) - (len(passed) - end.end())])
                await writer.drain()
                return
            writer.write(data)
            await writer.drain()


CUTS = [pytest.param(cut_each_event, id="each update"), *(pytest.param(seed, id=f"seed {seed}") for seed in range(2))]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
async def test_a_client_over_http_misses_nothing_when_its_streams_are_cut(
    cut: Any, version: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)  # seconds
    crow, model = make_app()
    begins = asyncio.Event()
    pump = cut if callable(cut) else cut_randomly(Random(cut), begins)
    async with (
        serving(crow) as url,
        editing(url.replace("http", "ws")) as other,
        proxying(url, pump) as cutting,
        editing(cutting, version) as editor,
    ):
        session = (await editor.new_session("/")).session_id
        await load(other, session)
        begins.set()
        turn = asyncio.ensure_future(editor.prompt(session, "go"))
        for _ in WORDS:
            model.may.release()
            await asyncio.sleep(0)
        assert (await turn).stop_reason == "end_turn"
        await other.until(has_ended)
        assert editor.text == other.text == "".join(WORDS)
        assert [str(each.content.text) for each in other.of(UserMessageChunk)] == ["go"]


@pytest.mark.parametrize("version", [1, 2])
async def test_a_client_over_websocket_that_is_cut_off_comes_back_to_the_running_turn(version: int):
    crow, model = make_app()
    async with serving(crow) as url, editing(url, version) as stays:
        session = (await stays.new_session("/")).session_id
        turn = asyncio.ensure_future(stays.prompt(session, "go"))
        random, texts = Random(7), dict[str, str]()
        address = url.replace("http", "ws")
        while not turn.done():
            async with proxying(url, cut_after(random.randint(1500, 6000))) as cutting:
                with suppress(ConnectionClosed, OSError):
                    async with editing(cutting.replace("http", "ws"), version) as leaving:
                        await load(leaving, session)
                        for _ in range(random.randint(1, 20)):
                            model.may.release()
                            await asyncio.sleep(0)
            model.may.release()
        async with editing(address, version) as back:
            await load(back, session)
            for chunk in back.of(AgentMessageChunk):
                texts[str(chunk.message_id)] = texts.get(str(chunk.message_id), "") + str(chunk.content.text)
        assert [*texts.values()] == [stays.text] == ["".join(WORDS)]
        assert (await turn).stop_reason == "end_turn"


def make_app() -> tuple[Crow, PacedModel]:
    model = PacedModel()
    crow = Crow(model)
    crow.store = MemoryStore()
    return crow, model
