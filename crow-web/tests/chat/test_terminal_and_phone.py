"""The page that `/web` opens shares the session of the terminal: each shows what is done in the other."""

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import pytest
from crow_persistence.database import Database

with suppress(ImportError):  # Windows has no pseudo-terminals
    import termios

if TYPE_CHECKING:
    from conftest import Tab

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.posix("a terminal is a pseudo-terminal"),
    pytest.mark.parametrize("database", ["sqlite"], indirect=True),
]
AGENT = """
import asyncio, sys
from pathlib import Path
from crow_core import Crow
from crow_core.acp.transports import stdio
from crow_core.agent.acp_agent import AcpAgent
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedCall, ScriptedModel
from crow_extensions.steering import steering
from crow_extensions.undo import undo
from crow_permissions.extension import permissions
from crow_persistence.extension import persistence
from fastmcp import FastMCP

tools = FastMCP("notes")

@tools.tool
def note(text: str) -> str:
    return f"kept {text}"

def answer(request):
    last = request["messages"][-1]
    if last["role"] == "tool":
        return Reply(f"Done: {last['content']}")
    text = str(last["content"])
    if "note" in text:
        return Reply("I note.", tool_calls=[ScriptedCall(name="notes_note", arguments={"text": text.split()[-1]})])
    return Reply(f"You said {text}.", hang="wait" in text)

async def main():
    crow = Crow(ScriptedModel(answer), servers=[Server("notes", lambda: tools, shared=True)])
    crow.servers_wait = 60.0
    crow.use(persistence, url=sys.argv[1], folder=Path(sys.argv[2]))
    crow.use(steering).use(undo).use(permissions, mode="ask")
    await AcpAgent(await stdio(), crow, unstable=True).serve()
    await crow.shut_down()

asyncio.run(main())
"""
START = """
import sys
from crow_terminal.agent_connections import AgentAddress
from crow_terminal.chat import run
from crow_terminal.chat_base import Settings
agent, url, folder = sys.argv[1:]
page = (sys.executable, "-m", "crow_cli", "web", "--no-open", "--of-terminal")
command = (sys.executable, agent, url, folder)
sys.exit(run(Settings(AgentAddress("crow", command), folder, history=lambda: folder + "/history", page=page)))
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[=>]")


@dataclass
class Terminal:
    """The terminal in a process, on a pseudo-terminal."""

    process: Process
    main: int
    folder: Path
    open_tab: Callable[..., Any]
    written: bytearray = field(default_factory=bytearray)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        """All that it has printed, without styles and spaces."""
        return "".join(ESCAPES.sub("", self.written.decode(errors="replace")).split())

    def read(self) -> None:
        self.written += os.read(self.main, 65536)
        self.changed.set()

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    async def until(self, condition: str | Callable[[], bool], *, keys: str = "") -> None:
        """Wait until a text was printed, or for a condition; `keys` are typed again and again meanwhile."""
        for _ in range(30):
            while "".join(condition.split()) not in self.text if isinstance(condition, str) else not condition():
                self.changed.clear()
                try:
                    await asyncio.wait_for(self.changed.wait(), 2)
                except TimeoutError:
                    self.type(keys)
                    break
            else:
                return
        pytest.fail(f"not {condition!r}: {self.text[-1500:]}")

    @asynccontextmanager
    async def open_page(self) -> AsyncIterator["Tab"]:
        """Open the session's page with `/web`, as the browser would, and its chat."""
        self.type("/web\r")
        visited = self.folder / "visited"
        await self.until(lambda: visited.exists() and visited.read_text().endswith("\n"))
        address = urlsplit(visited.read_text().split()[-1])
        url, session = f"{address.scheme}://{address.netloc}", address.path.rpartition("/")[2]
        async with httpx2.AsyncClient() as client:
            answer = await client.get(address.geturl())
        cookie = answer.headers["set-cookie"].partition(";")[0]
        async with self.open_tab(url, cookie, session) as tab:
            yield tab


@pytest.fixture
async def terminal(database: Database, env: dict[str, str], tmp_path: Path, open_tab: Any) -> AsyncIterator[Terminal]:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "start.py").write_text(START)
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> "{tmp_path}/visited"\n')
    browser.chmod(0o755)
    main, inside = os.openpty()
    termios.tcsetwinsize(inside, (40, 100))
    words = ["-P", f"{tmp_path}/start.py", f"{tmp_path}/agent.py"]
    url = database.url.render_as_string(hide_password=False)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words, url, str(tmp_path)),
        stdin=inside,
        stdout=inside,
        stderr=inside,
        cwd=tmp_path,
        start_new_session=True,
        env=env | {"TERM": "xterm-256color", "LANG": "C.UTF-8", "BROWSER": str(browser)},
    )
    terminal = Terminal(process, main, tmp_path, open_tab)
    asyncio.get_running_loop().add_reader(main, terminal.read)
    try:
        yield terminal
    finally:
        asyncio.get_running_loop().remove_reader(main)
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        os.close(main)
        os.close(inside)


async def is_ready(tab: "Tab", text: str) -> None:
    await tab.until(lambda tab: text in tab.text and tab.values.get("@phase") == "ready")


async def test_a_question_is_answered_in_the_terminal_or_on_the_phone_and_the_other_withdraws_it(terminal: Terminal):
    await terminal.until("/help")
    terminal.type("Hello\r")
    await terminal.until("You said Hello.")
    async with terminal.open_page() as phone:
        await is_ready(phone, "You said Hello.")
        assert 'data-do="fork"' not in phone.html
        terminal.type("note heron\r")
        block, number = await phone.see_card()
        assert "note heron" in phone.text
        await phone.act("answer", question=number, choice="0", text="")
        await terminal.until("Done: kept heron")
        assert "inthebrowser" in terminal.text
        await is_ready(phone, "Done: kept heron")
        await phone.say("note frog")  # the other way round
        block, _ = await phone.see_card()
        await terminal.until("note frog")
        await terminal.until("Done: kept frog", keys="y")
        await is_ready(phone, "Done: kept frog")
        assert "needs no answer any more" in phone.blocks[block]


async def test_a_page_that_is_opened_in_a_turn_shows_all_of_it_and_stops_it(terminal: Terminal):
    await terminal.until("/help")
    terminal.type("Hello\r")
    await terminal.until("You said Hello.")
    terminal.type("please wait\r")
    await terminal.until("You said please wait")
    async with terminal.open_page() as phone:
        await phone.until(lambda tab: "You said please wait" in tab.text and tab.values["@phase"] == "working")
        assert phone.text.count("please wait") == 2, "the prompt and the answer"
        assert phone.text.count("You said Hello.") == 1
        terminal.type("a draft")
        await phone.act("cancel")
        await terminal.until("Cancelled.")
        await is_ready(phone, "Cancelled.")
        await phone.say("Hello again")
        await terminal.until("You said Hello again.")
        terminal.type(" goes on\r")
        await phone.until(lambda tab: "You said a draft goes on." in tab.text)


async def test_a_page_keeps_its_session_when_the_terminal_begins_new_ones(terminal: Terminal):
    await terminal.until("/help")
    terminal.type("Hello\r")
    await terminal.until("You said Hello.")
    async with terminal.open_page() as phone:
        await is_ready(phone, "You said Hello.")
        for word in ("first", "second"):
            terminal.type("/new\r")
            await phone.until(lambda tab, word=word: "has another session now" in tab.text or word == "second")
            terminal.type(f"a {word} one\r")
            await terminal.until(f"You said a {word} one.")
            await phone.say(f"and my {word}")  # the agent is another one now, in which the session is to be opened
            await is_ready(phone, f"You said and my {word}.")
            assert f"a {word} one" not in phone.text
            assert f"my {word}" not in terminal.text
        assert phone.text.count("You said Hello.") == 1


async def test_a_turn_that_is_taken_back_in_the_terminal_is_gone_from_the_page(terminal: Terminal):
    await terminal.until("/help")
    for text in ("Hello", "a frog"):
        terminal.type(f"{text}\r")
        await terminal.until(f"You said {text}.")
    async with terminal.open_page() as phone:
        await is_ready(phone, "You said a frog.")
        terminal.type("/undo\r")  # it asks nothing, as no file changes
        await terminal.until("Took back 1 message")
        await phone.until(lambda tab: "You said Hello." in tab.text and "frog" not in tab.text)
        await phone.say("a heron")
        await terminal.until("You said a heron.")
        await is_ready(phone, "You said a heron.")
        assert "frog" not in phone.text
        terminal.type("\x15a rook\r")  # the prompt that was taken back stands there
        await is_ready(phone, "You said a rook.")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_the_page_ends_with_the_terminal(terminal: Terminal, end: signal.Signals):
    await terminal.until("/help")
    terminal.type("Hello\r")
    await terminal.until("You said Hello.")
    async with terminal.open_page() as phone:
        await is_ready(phone, "You said Hello.")
        terminal.process.send_signal(end)
        await asyncio.wait_for(phone.socket.wait_closed(), 60)
