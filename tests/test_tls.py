"""`crow serve` behind a proxy with TLS: programs and the terminal connect with a self-made certificate."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from crow_agent import Agent, AgentLost
from crow_core.testing import Reply, ScriptedServer
from crow_testing.command_fixtures import forks as forks
from crow_testing.command_fixtures import machine as machine
from crow_testing.command_fixtures import prefork as prefork
from crow_testing.command_fixtures import prepared as prepared
from crow_web.sharing import make_context

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def encrypt(port: int, certificate: Path) -> AsyncGenerator[int]:
    """Answer TLS for a server of this machine; write the certificate to a file, and yield the port."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    context, _ = make_context(["127.0.0.1"])
    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    async with server:
        own = server.sockets[0].getsockname()[1]
        found = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", own))
        await asyncio.to_thread(certificate.write_text, found)
        yield own


@pytest.mark.slow
async def test_programs_and_the_terminal_connect_over_tls(
    machine: "Machine", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trusted = tmp_path / "certificate.pem"
    async with ScriptedServer(lambda request: Reply("Four.")) as model:
        machine.ask(model.url)
        process = await machine.start("serve", "--port", "0")
        assert process.stdout
        url, *_, token = (await process.stdout.readline()).decode().split()
        try:
            async with encrypt(int(url.rpartition(":")[2].partition("/")[0]), trusted) as port:
                for scheme in ("https", "wss"):
                    address = f"{scheme}://127.0.0.1:{port}/acp"
                    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
                    with pytest.raises(AgentLost, match=r"(?i)certificate"):
                        await Agent.connect(address, token=token, cwd=machine.project).prompt("2 + 2?")
                    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
                    async with Agent.connect(address, token=token, cwd=machine.project) as agent:
                        assert (await agent.prompt("2 + 2?")).text == "Four."
                    machine.env |= {"SSL_CERT_FILE": str(trusted), "CROW_TOKEN": token}
                    done = await machine.crow("chat", "--connect", address, stdin="2 + 2?\n")
                    assert (done.code, done.err) == (0, "")
                    assert done.out.endswith("Four.\n")
        finally:
            process.terminate()
            await process.communicate()
