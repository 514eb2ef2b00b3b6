"""`crow` and `crow chat`: crow itself behind the interactive terminal."""

import asyncio
import hashlib
import json
import os
import pty
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from crow_core.testing import Reply, ScriptedCall, ScriptedServer
from crow_testing.screens import open_screen

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio


async def test_crow_alone_prints_the_help_where_nobody_sits(machine: "Machine"):
    process = await machine.start(stdin=subprocess.DEVNULL)
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert b"Start:" in out


async def test_crow_alone_in_a_pipe_answers_whole_lines(machine: "Machine"):
    async with ScriptedServer([Reply("It is **a bird**.")]) as server:
        machine.ask(server.url)
        done = await machine.crow(stdin="what is it?\n")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("It is a bird.\n")


async def test_chat_through_pipes_prints_whole_lines(machine: "Machine"):
    async with ScriptedServer([Reply("It is **a bird**."), Reply("Still.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("chat", stdin="what is it?\nand now?\n")
    assert done.code == 0, done.err
    assert "It is a bird.\n" in done.out
    assert done.out.endswith("Still.\n")
    assert "\x1b" not in done.out


async def test_crow_alone_opens_a_session_in_a_terminal(machine: "Machine"):
    async with ScriptedServer([Reply("A real answer.")]) as server:
        machine.ask(server.url)
        async with open_screen(machine) as screen:
            await screen.until("Ask")  # the mode of the session
            screen.type("hello\r")
            await screen.until("A real answer.")


async def test_a_removed_working_folder_is_one_sentence(machine: "Machine"):
    machine.env["PYTHONPATH"] = str(machine.home)
    (machine.home / "sitecustomize.py").write_text("import os\nos.rmdir(os.getcwd())")
    main, terminal = pty.openpty()
    process = await machine.start_on(terminal)
    async with asyncio.timeout(60):
        assert await process.wait() == 2
    said = os.read(main, 65536).decode()
    os.close(main)
    assert "crow: the working folder does not exist any more" in said
    assert "fault" not in said


async def test_words_typed_before_there_is_a_model_are_answered_after_its_setup(
    machine: "Machine", no_local_model: None
):
    async with ScriptedServer([Reply("Hello."), Reply("A real answer.")]) as server, open_screen(machine) as screen:
        await screen.until("Enter: Set up a model")
        screen.type("hello\r")
        await screen.until("at another")
        screen.type("1\r")
        await screen.until("Its address")
        screen.type(f"{server.url}\r")
        await screen.until("Type what you want done")  # the only model, and a new file, need no question
        await screen.until("A real answer.")
    assert b"Write this?" not in screen.seen
    assert b"Open a session" not in screen.seen  # one opens by itself


async def test_a_setup_that_is_left_tries_again(machine: "Machine", no_local_model: None):
    async with ScriptedServer([Reply("A real answer.")]) as server, open_screen(machine) as screen:
        await screen.until("Enter: Set up a model")
        screen.type("hello\r")
        await screen.until("at another")
        machine.configure(f'model = "a"\n[models.a]\nbase_url = "{server.url}"\nmodel = "scripted"\n')
        await screen.type_until("\x03", "Nothing was written.")
        await screen.until("A real answer.")


async def test_the_last_line_says_how_to_continue_and_crow_c_does(machine: "Machine"):
    async with ScriptedServer([Reply("A real answer."), Reply("It goes on.")]) as server:
        machine.ask(server.url)
        async with open_screen(machine) as screen:
            await screen.until("Ask")
            await screen.until("Type what you want done")
        assert b"Continue with" not in screen.seen  # nothing was said
        async with open_screen(machine) as screen:
            await screen.until("Ask")
            screen.type("hello\r")
            await screen.until("A real answer.")
        (listed,) = json.loads((await machine.crow("sessions", "list", "--json")).out)
        assert b"Type what you want done" not in screen.seen  # only the first time
        assert f"\r\nContinue with crow -c, or crow -r {listed['id'][:8]}\r\n".encode() in screen.seen
        for words in (["-c"], ["-r", listed["id"][:8]]):
            async with open_screen(machine, *words) as screen:
                await screen.until("A real answer.")
                await screen.until("% of 33k")  # how full the context is
        async with open_screen(machine, "-r") as screen:
            await screen.until("Sessions")
            screen.type("\r")
            await screen.until("A real answer.")


async def test_a_dumb_terminal_continues_too_and_says_how(machine: "Machine"):
    async with ScriptedServer([Reply("A real answer."), Reply("It goes on.")]) as server:
        machine.ask(server.url)
        for words, answer in (([], "A real answer."), (["-c"], "It goes on.")):
            async with open_screen(machine, *words, term="dumb") as screen:
                await screen.until("> ")
                screen.type("hello\n")
                await screen.until(f"{answer}\r\n> ")
                screen.type("\x04")
                await screen.until("> \r\nContinue with crow -c, or crow -r ")
        assert len(json.loads((await machine.crow("sessions", "list", "--json")).out)) == 1


async def test_new_draws_a_line_and_keeps_the_mode(machine: "Machine"):
    file = machine.project / "made.txt"
    use: ScriptedCall = {
        "name": "file_editor",
        "arguments": {"command": "create", "path": str(file), "file_text": "x\n"},
    }
    async with ScriptedServer([Reply(tool_calls=[use]), Reply("Made.")]) as server:
        machine.ask(server.url)
        async with open_screen(machine) as screen:
            await screen.until("Ask")
            screen.type("\x1b[Z")
            await screen.until("ccept edits")  # the screen has the first letter already
            screen.type("/new\r")
            await screen.until("── New session ─")
            screen.type("make a file\r")
            await screen.until("Made.")  # without a question
    assert file.exists()


async def test_undo_shows_the_files_and_takes_the_turn_back_after_y(machine: "Machine"):
    file = machine.project / "made.txt"
    use: ScriptedCall = {
        "name": "file_editor",
        "arguments": {"command": "create", "path": str(file), "file_text": "x\n"},
    }
    async with ScriptedServer([Reply(tool_calls=[use]), Reply("Made.")]) as server:
        machine.ask(server.url)
        async with open_screen(machine) as screen:
            await screen.until("Ask")
            screen.type("\x1b[Z")
            await screen.until("ccept edits")
            screen.type("make a file\r")
            await screen.until("Made.")
            screen.type("/undo\r")
            await screen.until("Take back “make a file”?")
            await screen.until("made.txt  is removed")
            screen.type("y")
            await screen.until("Took back 1 message; files as before: made.txt. `/redo` brings it back.")
            assert not file.exists()
            screen.type("\x15/redo\r")
            await screen.until("Brought back")
            assert file.exists()
            screen.seen.clear()
            screen.type("\x1bu")
            await screen.until("Take back “make a file”?")
            screen.type("n\x1bn")
            await screen.until("── New session ─")
            await screen.type_until("\x1br", "❯ make a file")  # the list of sessions
            screen.type("\x1b")
    assert file.exists()


async def test_command_that_the_user_edits_is_what_runs_and_what_is_recorded(machine: "Machine"):
    """The screen, the model, the log and the ledger tell the command that ran, and not the model's."""
    use: ScriptedCall = {"name": "terminal", "arguments": {"command": "echo mine >> out"}}
    async with ScriptedServer([Reply(tool_calls=[use]), Reply("I see.")]) as server:
        machine.ask(server.url)
        async with open_screen(machine) as screen:
            await screen.until("Ask")
            screen.type("hello\r")
            await screen.until("e  Edit first")
            await screen.type_until("e", "The command to run instead")
            screen.type("\x15echo yours | tee -a out\r")
            await screen.until("I see.")
            await screen.until("● echo yours | tee -a out")
    assert (machine.project / "out").read_text() == "yours\n"
    told = server.requests[-1]["messages"][-1]["content"]
    assert told == "The user changed the command. It was: echo yours | tee -a out\n\nyours\n"
    (listed,) = json.loads((await machine.crow("sessions", "list", "--json")).out)
    show = (await machine.crow("sessions", "show", listed["id"])).out
    assert "allow, by the user, who changed the command to: echo yours | tee -a out" in show
    _, decision = json.loads((await machine.crow("audit", "list", "--json")).out)
    assert "the user, who changed the command to: echo yours | tee -a out" in json.dumps(decision)
    assert hashlib.sha256(b'{"command":"echo yours | tee -a out"}').hexdigest() in json.dumps(decision)


async def test_another_agent_takes_no_model_of_crow(machine: "Machine"):
    done = await machine.crow("chat", "--agent", "some agent", "-m", "x")
    assert done.code == 2
    assert "-m chooses a model of crow" in done.err


BROWSER = """#!{python}
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
page = opener.open(sys.argv[1]).read().decode()
open("{page}", "w").write(page)
"""
"""A browser that keeps cookies, and writes the page down: to a pipe, which a test waits for."""


async def test_web_shows_the_session_in_a_browser(machine: "Machine"):
    browser, page = machine.project / "browser", machine.project / "page"
    browser.write_text(BROWSER.format(python=sys.executable, page=page))
    browser.chmod(0o755)
    os.mkfifo(page)
    machine.env["BROWSER"] = str(browser)
    async with ScriptedServer([Reply("A real answer.")]) as server:
        machine.ask(server.url)
        async with open_screen(machine) as screen:
            await screen.until("Ask")
            screen.type("hello\r")
            await screen.until("A real answer.")
            await screen.until("% of 33k")
            screen.type("/web\r")
            await screen.until("http://127.0.0.1:")
            async with asyncio.timeout(60):
                text = await asyncio.to_thread(page.read_text)
    assert "hello" in text
    assert "A real answer." in text
