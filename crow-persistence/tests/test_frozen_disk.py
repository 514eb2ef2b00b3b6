"""A disk that answers no write for a while, in the middle of a commit of the real process.

A C library, loaded before SQLite, lets no write to a write-ahead log return while a file named `frozen` is beside it.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path
from shutil import which
from subprocess import PIPE, Popen
from typing import Any

import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import ClientCapabilities, ListSessionsRequest, LoadSessionRequest
from crow_core.acp.transports import StreamTransport, open_streams
from crow_core.testing import Editor, Reply, ScriptedServer
from crow_persistence.checks import check
from crow_persistence.database import Database
from crow_persistence.loader import find_session, load_session
from crow_persistence.tables import sessions
from crow_system.signals import EXIT_LIMIT
from sqlalchemy import select

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux" or not which("gcc"), reason="needs gcc on Linux"),
]

Running = tuple[Editor, Popen[bytes]]
"""An editor, and the agent that it talks to."""
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void wait_for_thaw(int fd) {
    char link[64], path[PATH_MAX + 16];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (length < 4 || memcmp(path + length - 4, "-wal", 4)) return;
    while (path[length - 1] != '/') length--;
    strcpy(path + length, "frozen");
    while (access(path, F_OK) == 0) {
        strcpy(path + length, "stuck");
        int stuck = open(path, O_CREAT | O_WRONLY, 0600);
        if (stuck >= 0) close(stuck);
        strcpy(path + length, "frozen");
        usleep(10000);
    }
}

#define FREEZE(type, name, parameters, arguments) \
    type name parameters { \
        static type (*real) parameters; \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name); \
        wait_for_thaw(fd); \
        return real arguments; \
    }

FREEZE(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
FREEZE(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
FREEZE(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
FREEZE(int, fsync, (int fd), (fd))
FREEZE(int, fdatasync, (int fd), (fd))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    (folder / "freeze.c").write_text(SHIM)
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", "freeze.so", "freeze.c", "-ldl"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "freeze.so"


class Disk:
    """The disk of a folder, which freezes when a write reaches it, and thaws."""

    def __init__(self, folder: Path) -> None:
        self.frozen, self.stuck = folder / "frozen", folder / "stuck"

    def freeze(self) -> None:
        self.frozen.touch()

    def thaw(self) -> None:
        self.frozen.unlink(missing_ok=True)
        self.stuck.unlink(missing_ok=True)

    async def hold_a_write(self) -> None:
        """Wait until a write does not return."""
        while not self.stuck.exists():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def process(
    home: Path, url: str, shim: Path, parameters: str = ""
) -> AsyncGenerator[tuple[Editor, Popen[bytes]]]:
    """Run the real agent on a disk that can freeze."""
    (home / "config.toml").write_text(f'[database]\nurl = "sqlite:///{home}/crow.db{parameters}"\n')
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CROW_HOME": str(home),
        "LANG": "C.UTF-8",
        "LD_PRELOAD": str(shim),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "key",
        "CROW_MODEL": "model",
    }
    with (home / "stderr").open("ab") as stderr:  # not `spawn`, which ends a process that takes long to end
        command = [sys.executable, "-m", "crow_cli", "acp"]
        child = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=stderr, env=env, cwd=home)  # noqa: ASYNC220 - it returns at once
    assert isinstance(child.stdin, FileIO)
    assert isinstance(child.stdout, FileIO)
    editor = Editor(StreamTransport(*await open_streams(child.stdout, child.stdin)))
    serving = asyncio.ensure_future(editor.connection.serve())
    try:
        await editor.initialize("test", ClientCapabilities())
        yield editor, child
    finally:
        (home / "frozen").unlink(missing_ok=True)
        await editor.connection.close()
        await serving
        await asyncio.to_thread(child.wait, 60)


def answer(request: dict[str, Any]) -> Reply:
    return Reply(f"To {request['messages'][-1]['content']}.")


def read_prompts(home: Path) -> list[str]:
    """Check the database, and return the prompts in it."""
    database = Database(f"sqlite:///{home}/crow.db")
    assert check(database) == []
    with database.begin_read() as connection:
        (id,) = connection.scalars(select(sessions.c.id))
        log = load_session(connection, find_session(connection, id)).log
    database.close()
    return [str(entry.get("content")) for entry in log if entry.get("role") == "user"]


async def test_a_turn_on_a_frozen_disk_shows_nothing_until_it_is_written(tmp_path: Path, shim: Path):
    disk = Disk(tmp_path)
    async with ScriptedServer(answer) as server, process(tmp_path, server.url, shim) as (editor, _):
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "one")
        editor.updates.clear()
        disk.freeze()
        turn = asyncio.ensure_future(editor.prompt(id, "two"))
        await disk.hold_a_write()
        await server.until(lambda: any(request["messages"][-1]["content"] == "two" for request in server.requests))
        await editor.request("session/list", ListSessionsRequest())  # the process answers others meanwhile
        assert not turn.done()
        assert editor.text == ""
        disk.thaw()
        assert (await turn).stop_reason == "end_turn"
        assert editor.text == "To two."
    assert read_prompts(tmp_path) == ["one", "two"]
    assert (tmp_path / "stderr").read_text() == ""


async def test_cancel_on_a_frozen_disk_is_answered_and_the_next_turn_goes_on_from_there(tmp_path: Path, shim: Path):
    disk = Disk(tmp_path)
    async with ScriptedServer(answer) as server, process(tmp_path, server.url, shim) as (editor, _):
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "one")
        editor.updates.clear()
        disk.freeze()
        for text in ("two", "three"):
            turn = asyncio.ensure_future(editor.prompt(id, text))
            await disk.hold_a_write()
            await editor.request("session/list", ListSessionsRequest())  # answered after the prompt has come
            await editor.cancel(id)
            assert (await turn).stop_reason == "cancelled"
        assert editor.text == ""
        turn = asyncio.ensure_future(editor.prompt(id, "four"))
        disk.thaw()
        assert (await turn).stop_reason == "end_turn"
        assert editor.text.endswith("four.")
    assert read_prompts(tmp_path)[-1] == "four"
    assert (tmp_path / "stderr").read_text() == ""


@pytest.mark.slow
async def test_another_process_names_the_one_that_waits_for_the_disk_and_works_after_the_thaw(
    tmp_path: Path, shim: Path
):
    disk = Disk(tmp_path)
    async with (
        ScriptedServer(answer) as server,
        process(tmp_path, server.url, shim, "?timeout=1") as (editor, child),
        process(tmp_path, server.url, shim, "?timeout=1") as (other, _),
    ):
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "one")
        its = (await other.new_session(str(tmp_path))).session_id
        await other.prompt(its, "one")
        disk.freeze()
        turn = asyncio.ensure_future(editor.prompt(id, "two"))
        await disk.hold_a_write()
        with pytest.raises(RpcError, match="crow") as error:
            await other.prompt(its, "two")
        assert f"is held by crow (process {child.pid}" in str(error.value.data)
        disk.thaw()
        assert (await turn).stop_reason == "end_turn"
        assert (await other.prompt(its, "three")).stop_reason == "end_turn"
    database = Database(f"sqlite:///{tmp_path}/crow.db")
    assert check(database) == []
    database.close()


@pytest.mark.slow
async def test_a_write_that_takes_40_seconds_loses_nothing(tmp_path: Path, shim: Path):
    disk = Disk(tmp_path)
    async with ScriptedServer(answer) as server, process(tmp_path, server.url, shim) as (editor, _):
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "one")
        disk.freeze()
        turn = asyncio.ensure_future(editor.prompt(id, "two"))
        await disk.hold_a_write()
        done, _ = await asyncio.wait([turn], timeout=40)
        assert not done
        disk.thaw()
        assert (await turn).stop_reason == "end_turn"
        await editor.prompt(id, "three")
    assert read_prompts(tmp_path) == ["one", "two", "three"]


@pytest.mark.slow
async def test_sigterm_on_a_frozen_disk_ends_the_process_and_leaves_a_whole_database(tmp_path: Path, shim: Path):
    disk = Disk(tmp_path)
    async with ScriptedServer(answer) as server, process(tmp_path, server.url, shim) as (editor, child):
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "one")
        disk.freeze()
        turn = asyncio.ensure_future(editor.prompt(id, "two"))
        await disk.hold_a_write()
        child.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.wait, EXIT_LIMIT + 60) == 128 + signal.SIGTERM
        await asyncio.wait([turn])
        assert turn.exception() or turn.result().stop_reason == "cancelled"
    assert "does not answer" in (tmp_path / "stderr").read_text()
    disk.thaw()
    assert read_prompts(tmp_path)[0] == "one"
    async with ScriptedServer(answer) as server, process(tmp_path, server.url, shim) as (editor, _):
        await editor.request("session/load", LoadSessionRequest(session_id=id, cwd=str(tmp_path), mcp_servers=[]))
        await editor.prompt(id, "three")
    assert read_prompts(tmp_path)[-1] == "three"


@pytest.mark.slow
async def test_a_second_sigterm_on_a_frozen_disk_ends_the_process_at_once(tmp_path: Path, shim: Path):
    disk = Disk(tmp_path)
    async with ScriptedServer(answer) as server, process(tmp_path, server.url, shim) as (editor, child):
        id = (await editor.new_session(str(tmp_path))).session_id
        await editor.prompt(id, "one")
        disk.freeze()
        turn = asyncio.ensure_future(editor.prompt(id, "two"))
        await disk.hold_a_write()
        child.send_signal(signal.SIGTERM)
        await asyncio.wait([turn])  # the process has received the first
        turn.exception()
        child.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.wait, EXIT_LIMIT / 2) == -signal.SIGTERM
    disk.thaw()
    assert read_prompts(tmp_path)[0] == "one"
