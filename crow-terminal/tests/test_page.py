"""`/web`: the page of the session, served by another process."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Screen

    Start = Callable[..., Screen]

SERVER = """
import os, sys
os.mkfifo("alive")
print(f"http://127.0.0.1:1/session/{sys.argv[1]}?token=t", flush=True)
open("alive", "w")
sys.stdin.read()
"""
"""Prints an address, and opens a pipe, which the system closes when the program ends, with its standard input."""


@pytest.fixture
def browser(tmp_path: Path) -> str:
    """A browser that writes down the address."""
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$1" >> "{tmp_path}/visited"\n')
    program.chmod(0o755)
    return str(program)


def make_server(folder: Path, program: str = SERVER) -> str:
    (folder / "server.py").write_text(program)
    return f"{sys.executable} {folder}/server.py"


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_page_is_opened_at_the_session_and_ends_with_the_terminal(
    start: "Start", tmp_path: Path, browser: str, end: signal.Signals
):
    screen = start(PAGE=make_server(tmp_path), BROWSER=browser)
    screen.until("small")
    screen.type("hello\r")
    screen.until("You said: hello")
    screen.type("/web\r")
    screen.until("http://127.0.0.1:1/session/s?token=t")
    visited = tmp_path / "visited"
    screen.until(visited.exists)
    screen.type("/web\r")
    screen.until(lambda: visited.read_text() == "http://127.0.0.1:1/session/s?token=t\n" * 2)
    with (tmp_path / "alive").open() as server:
        screen.process.send_signal(end)
        assert server.read() == ""  # its end
    screen.process.wait()


def test_page_that_cannot_be_served_is_one_sentence(start: "Start", tmp_path: Path):
    program = "import sys; sys.exit('crow: `crow web` comes with crow-web.')"
    screen = start(PAGE=make_server(tmp_path, program))
    screen.until("small")
    screen.type("/web\r")
    screen.until("Nothing was said yet: this session has no page.")
    screen.type("hello\r")
    screen.until("You said: hello")
    screen.type("/web\r")
    screen.until("✗ `crow web` comes with crow-web.")


def test_an_agent_without_pages_has_no_such_command(start: "Start"):
    screen = start()
    screen.until("small")
    screen.type("/web")
    screen.until("❯ /web")
    assert "show this session" not in screen.text
