"""`crow web` for a phone, for a reader, and for an agent elsewhere, as processes."""

import asyncio
import re
import ssl
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx2
import pytest
from crow_core.testing import Reply, ScriptedCall, ScriptedServer
from crow_testing.command_fixtures import forks as forks
from crow_testing.command_fixtures import machine as machine
from crow_testing.command_fixtures import prefork as prefork
from crow_web.sharing import find_address
from websockets.asyncio.client import connect

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine
    from playwright.async_api import Browser

    from conftest import Site

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("database", ["sqlite"], indirect=True)]

APP = """<!doctype html><body>A heron<script>
const hear = ({ data }) => { if (data.id === 1) document.body.append(` for ${data.result.hostInfo.name}`); };
addEventListener("message", hear);
const params = { protocolVersion: "2026-01-26", appInfo: { name: "a", version: "1" }, appCapabilities: {} };
parent.postMessage({ jsonrpc: "2.0", id: 1, method: "ui/initialize", params }, "*");
</script></body>"""
SERVER = """
from fastmcp import FastMCP

server = FastMCP("notes")
server.resource("ui://notes/page", mime_type="text/html;profile=mcp-app")(lambda: PAGE)


@server.tool(meta={"ui": {"resourceUri": "ui://notes/page"}})
def show() -> str:
    return "a heron"


server.run(show_banner=False)
"""


@asynccontextmanager
async def start_web(env: dict[str, str], *words: str) -> AsyncGenerator[Process]:
    """Run `crow web` without a browser while the block runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "crow_cli", "web", "--no-open", *words, env=env, stdout=PIPE
    )
    try:
        yield process
    finally:
        process.terminate()
        await process.wait()


async def read_line(process: Process) -> str:
    assert process.stdout
    return (await process.stdout.readline()).decode().strip()


async def read_until(process: Process, pattern: str) -> str:
    """Return the first line that matches a pattern."""
    while not re.search(pattern, line := await read_line(process)):
        pass
    return line


async def test_a_shared_address_works_once_and_has_the_certificate_that_was_shown(site: "Site", env: dict[str, str]):
    try:
        name = find_address()
    except OSError:
        name = ""  # a machine without a network
    async with start_web(env, "--share", "--tls") as process:
        if not name:
            assert await process.wait() != 0
            return
        await read_line(process)
        address = await read_until(process, r"^https://")
        fingerprint = await read_until(process, r"^(..:){31}..$")
        assert urlsplit(address).hostname == name
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        _, writer = await asyncio.open_connection(name, urlsplit(address).port, ssl=context)
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        assert sha256(certificate).hexdigest() == fingerprint.replace(":", "").lower()
        async with httpx2.AsyncClient(verify=False, follow_redirects=True) as phone:
            page = await phone.get(address)
            assert "Plan the garden" in page.text
            policy = page.headers["content-security-policy"]
            frames = [each for each in re.findall(r"https://\S+", policy) if urlsplit(each).hostname == name]
            assert "no such app" in (await phone.get(f"{frames[0]}/frame/x")).text, "the frames of apps are reached"
        async with httpx2.AsyncClient(verify=False, follow_redirects=True) as stranger:
            assert (await stranger.get(address)).status_code == 401


async def test_a_reader_can_neither_talk_nor_change_anything(site: "Site", env: dict[str, str]):
    async with start_web(env, "--read-only") as process:
        address = await read_line(process)
        place = address.partition("/?")[0]
        async with httpx2.AsyncClient(follow_redirects=True) as client:
            assert "Plan the garden" in (await client.get(address)).text
            permissions = (await client.get(f"{place}/permissions")).text
            assert "Revoke" not in permissions
            assert 'href="/chat"' not in permissions
            assert (await client.get(f"{place}/chat")).status_code == 404
            for form in ("/permissions", "/workflows", "/ask"):
                answer = await client.post(f"{place}{form}", headers={"Origin": place})
                assert answer.status_code in (404, 405), form


async def test_a_chat_talks_with_the_agent_of_another_process(site: "Site", env: dict[str, str], machine: "Machine"):
    async with ScriptedServer([Reply("The heron is in the garden.")]) as model:
        machine.configure(f'[models.scripted]\nbase_url = "{model.url}"\nmodel = "scripted"\napi_key = "key"')
        serving = await machine.start("serve", "--port", "0")
        assert serving.stdout
        line = (await serving.stdout.readline()).decode().split()
        async with start_web({**env, "CROW_TOKEN": line[-1]}, "--connect", line[0]) as process:
            address = await read_line(process)
            place = address.partition("/?")[0]
            async with httpx2.AsyncClient() as client:
                cookie = (await client.get(address)).headers["set-cookie"].partition(";")[0]
            live = f"{place.replace('http', 'ws', 1)}/live"
            async with connect(live, additional_headers={"Cookie": cookie}, origin=place, proxy=None) as tab:  # type: ignore
                await tab.send('{"do": "prompt", "number": 1, "text": "Where is the heron?"}')
                async with asyncio.timeout(60):
                    while "The heron is in the garden." not in str(await tab.recv()):
                        pass
        serving.terminate()
        await serving.wait()


@pytest.mark.usefixtures("database")
async def test_an_app_is_shown_on_a_phone_over_tls(machine: "Machine", browser: "Browser"):
    file = machine.home / "notes.py"
    file.write_text(f"PAGE = {APP!r}\n{SERVER}")
    replies = [Reply(tool_calls=[ScriptedCall(name="notes_show", arguments={})]), Reply("Done.")]
    async with ScriptedServer(replies) as model:
        machine.configure(
            'permissions.mode = "yolo"\n'
            f'[models.scripted]\nbase_url = "{model.url}"\nmodel = "scripted"\napi_key = "key"\n'
            f"[mcp.servers.notes]\ncommand = {sys.executable!r}\nargs = [{str(file)!r}]"
        )
        async with start_web(machine.env, "--share", "--tls") as process:
            if not await read_line(process):
                assert await process.wait() != 0, "a machine without a network"
                return
            address = await read_until(process, r"^https://")
            context = await browser.new_context(ignore_https_errors=True)
            page = await context.new_page()
            await page.goto(address)
            await page.goto(f"{address.partition('/?')[0]}/chat")
            await page.locator("#text").fill("Show a bird")
            await page.locator("#say .main").click()
            app = page.frame_locator(".app iframe").frame_locator("iframe")
            await app.get_by_text("A heron for crow").wait_for()
            await context.close()
