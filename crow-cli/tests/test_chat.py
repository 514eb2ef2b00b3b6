"""`crow` and `crow chat`: crow itself behind the interactive terminal."""

import asyncio
import fcntl
import os
import pty
import struct
import termios
from typing import TYPE_CHECKING

import pytest
from crow_core.testing import Reply, ScriptedServer

if TYPE_CHECKING:
    from conftest import Machine

pytestmark = pytest.mark.anyio


async def test_crow_alone_prints_the_help_where_nobody_sits(machine: "Machine"):
    done = await machine.crow()
    assert done.code == 0
    assert "Commands:" in done.out


async def test_chat_through_pipes_prints_whole_lines(machine: "Machine"):
    async with ScriptedServer([Reply("It is **a bird**."), Reply("Still.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("chat", stdin="what is it?\nand now?\n")
    assert done.code == 0, done.err
    assert "It is a bird.\n" in done.out
    assert done.out.endswith("Still.\n")
    assert "\x1b" not in done.out


async def test_crow_alone_opens_a_session_in_a_terminal(machine: "Machine"):
    machine.env["TERM"] = "xterm-256color"
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    seen = bytearray()
    changed = asyncio.Event()

    def read() -> None:
        try:
            seen.extend(os.read(main, 65536))
        except OSError:
            asyncio.get_running_loop().remove_reader(main)
        changed.set()

    async def until(text: bytes) -> None:
        async with asyncio.timeout(60):
            while text not in seen:
                changed.clear()
                await changed.wait()

    async with ScriptedServer([Reply("A real answer.")]) as server:
        machine.ask(server.url)
        process = await machine.start_on(terminal)
        asyncio.get_running_loop().add_reader(main, read)
        await until(b"Ask")  # the mode of the session
        os.write(main, b"hello\r")
        await until(b"A real answer.")
        os.write(main, b"\x03\x03")
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    asyncio.get_running_loop().remove_reader(main)
    os.close(main)
    assert b"Traceback" not in seen


async def test_another_agent_takes_no_model_of_crow(machine: "Machine"):
    done = await machine.crow("chat", "--agent", "some agent", "-m", "x")
    assert done.code == 2
    assert "-m chooses a model of crow" in done.err
