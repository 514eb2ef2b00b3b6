"""`crow setup`, `config`, `status` and `completion`: what they write, what they say, and that keys stay hidden."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from crow_cli.settings_file import set_values, split_keys
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import AuthenticateRequest
from crow_core.testing import Reply, ScriptedServer
from crow_testing.chaos import CHAOS
from hypothesis import given, settings
from hypothesis import strategies as st

with suppress(ImportError):  # Windows has no pseudo-terminals
    import pty

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

KEY = "sk-live-0123456789abcdefXYZ"

COMMENTED = """\
# my settings
[models.old]  # the old one
base_url = "http://127.0.0.1:1/v1"
model = "old"

[permissions]
allow = ["terminal:git status"]   # harmless
"""

BACKEND = """
import json, os, pathlib
from keyring.backend import KeyringBackend
class Keyring(KeyringBackend):
    priority = 5
    file = pathlib.Path(os.environ["HOME"], "keyring.json")
    def read(self): return json.loads(self.file.read_text()) if self.file.exists() else {}
    def get_password(self, service, username): return self.read().get(service + "/" + username)
    def set_password(self, service, username, password):
        self.file.write_text(json.dumps({**self.read(), service + "/" + username: password}))
"""


def settings_of(machine: "Machine") -> dict[str, Any]:
    return tomllib.loads(Path(machine.env["CROW_HOME"], "config.toml").read_text())


def list_files(machine: "Machine") -> dict[str, int]:
    """List the files in crow's folder with their permissions."""
    home = Path(machine.env["CROW_HOME"])
    return {path.name: path.stat().st_mode & 0o777 for path in home.glob("*")}


def add_keyring(machine: "Machine") -> Path:
    """Give the machine a keyring, which is a file. Return the file."""
    folder = machine.home / "lib"
    folder.mkdir()
    (folder / "filekeyring.py").write_text(BACKEND)
    machine.env |= {"PYTHONPATH": str(folder), "PYTHON_KEYRING_BACKEND": "filekeyring.Keyring"}
    return machine.home / "keyring.json"


async def test_a_key_from_standard_input_is_stored_in_a_file_for_its_owner_and_printed_nowhere(machine: "Machine"):
    async with ScriptedServer([Reply("Hello."), Reply("It works.")]) as server:
        done = await machine.crow(
            "setup", "--base-url", server.url, "--model", "scripted", "--key-stdin", stdin=f"export X={KEY}\n"
        )
        assert done.code == 0, done.err
        assert "The endpoint accepts the key" in done.out
        used = await machine.crow("run", "hi")
        assert (used.code, used.out) == (0, "It works.\n")
        assert [head["authorization"] for head in server.headers] == [f"Bearer {KEY}"] * 2
    assert list_files(machine)[".env"] == 0o600
    table = settings_of(machine)["models"]["local"]
    assert table == {"base_url": server.url, "model": "scripted", "api_key": "${CROW_KEY_LOCAL}"}
    shown = await machine.crow("config", "show")
    status = await machine.crow("status", "--json")
    for text in (done.out, done.err, shown.out, shown.err, status.out, status.err):
        assert KEY not in text


async def test_a_key_is_stored_in_the_systems_keyring_where_it_works(machine: "Machine"):
    file = add_keyring(machine)
    async with ScriptedServer([Reply("Hello."), Reply("It works.")]) as server:
        args = ("--base-url", server.url, "--model", "scripted", "--key-stdin", "--name", "mine")
        done = await machine.crow("setup", *args, stdin=KEY)
        assert done.code == 0, done.err
        assert (await machine.crow("run", "hi")).out == "It works.\n"
        assert server.headers[-1]["authorization"] == f"Bearer {KEY}"
    assert json.loads(file.read_text()) == {"crow/mine": KEY}
    assert settings_of(machine)["models"]["mine"]["api_key"] == "keyring:mine"
    assert ".env" not in list_files(machine)
    file.unlink()
    gone = await machine.crow("run", "hi")
    assert (gone.code, "Run `crow setup`" in gone.err) == (2, True)


async def test_a_refused_key_is_told_and_nothing_is_written(machine: "Machine"):
    async with ScriptedServer(CHAOS["wrong key"]([Reply("x")])) as server:
        done = await machine.crow("setup", "--base-url", server.url, "--model", "m", "--key-stdin", stdin=KEY)
    assert done.code == 1
    assert "Nothing was written." in done.err
    assert KEY not in done.out + done.err
    assert list_files(machine) == {}


async def test_comments_and_other_settings_stay(machine: "Machine"):
    file = machine.configure(COMMENTED)
    file.chmod(0o640)
    machine.env["SOME_KEY"] = KEY
    args = ("--base-url", "http://127.0.0.1:1/v1", "--model", "new", "--name", "new", "--key-env", "SOME_KEY")
    done = await machine.crow("setup", *args, "--no-test")
    assert done.code == 0, done.err
    text = file.read_text()
    assert text.startswith('# my settings\nmodel = "new"\n')
    assert "[models.old]  # the old one" in text
    assert 'allow = ["terminal:git status"]   # harmless' in text
    assert settings_of(machine)["models"]["new"]["api_key"] == "${SOME_KEY}"
    assert file.stat().st_mode & 0o777 == 0o640
    again = await machine.crow("setup", *args, "--no-test")
    assert (again.code, file.read_text()) == (0, text)


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        ((), "Give the answers as options: crow setup --provider"),
        (("--provider", "nosuch"), "Known are: ollama, lm-studio"),
        (("--provider", "openai", "--model", "m"), "--key-env OPENAI_API_KEY, or --key-stdin"),
        (("--provider", "openai", "--model", "m", "--key-env", KEY), "not the key itself"),
        (("--provider", "openai", "--model", "m", "--key-env", "NOT_SET"), "NOT_SET is not set"),
        (("--base-url", "http://127.0.0.1:1/v1"), "--model"),
    ],
)
async def test_what_is_missing_is_told_in_one_sentence(machine: "Machine", args: tuple[str, ...], advice: str):
    done = await machine.crow("setup", *args)
    assert done.code == 2
    assert advice in done.err
    assert KEY not in done.err
    assert list_files(machine) == {}


async def test_without_a_terminal_the_options_for_any_server_are_named(machine: "Machine", no_local_model: None):
    done = await machine.crow("setup")
    assert done.code == 2
    assert "--key-env OPENAI_API_KEY, or for another server: --base-url URL --model NAME" in done.err


async def test_a_file_that_is_not_toml_stays_as_it_is(machine: "Machine"):
    file = machine.configure("[models\n")
    done = await machine.crow("setup", "--base-url", "http://127.0.0.1:1/v1", "--model", "m", "--no-test")
    assert (done.code, file.read_text()) == (2, "[models\n")
    assert f"{file} is not valid TOML" in done.err


async def test_an_editor_can_log_in_with_setup_while_the_agent_runs(machine: "Machine", no_local_model: None):
    async with ScriptedServer([Reply("Hello."), Reply("Logged in.")]) as server:
        transport = await machine.agent()
        async with machine.editor(transport) as editor:
            with pytest.raises(RpcError):
                await editor.new_session(str(machine.project))
            done = await machine.crow("acp", "setup", "--base-url", server.url, "--model", "scripted")
            assert done.code == 0, done.err
            await editor.connection.request("authenticate", AuthenticateRequest(method_id="configured"))
            session = await editor.new_session(str(machine.project))
            await editor.prompt(session.session_id, "hi")
            assert editor.text == "Logged in."
            table = f'base_url = "{server.url}"\nmodel = "other"\n'
            machine.configure(f'model = "b"\n[models.b]\n{table}')
            more = await editor.new_session(str(machine.project))
            models = next(one for one in more.config_options or [] if one.id == "model")
            assert getattr(models, "current_value", "") == "b"


async def test_on_a_terminal_numbers_choose_and_the_typed_key_is_not_shown(machine: "Machine", no_local_model: None):
    machine.env["TERM"] = "xterm"
    async with ScriptedServer([Reply("Hello.")]) as server:
        answers = [("at another", b"1\r"), ("Its address", b"\r"), ("or Ctrl-C leaves", f"{server.url}\r".encode())]
        ours, theirs = pty.openpty()
        process = await machine.start_on(theirs, "setup")
        shown = await asyncio.to_thread(answer, ours, answers)
        assert await process.wait() == 0, shown
    assert settings_of(machine)["model"] == "local"
    assert "crow uses scripted now" in shown  # the only model, and a new file, need no question


async def test_a_key_in_the_environment_is_used_without_a_question_and_a_former_file_asks(
    machine: "Machine", no_local_model: None
):
    machine.configure(COMMENTED)
    machine.env |= {"TERM": "xterm", "OPENAI_API_KEY": KEY}
    ours, theirs = pty.openpty()
    process = await machine.start_on(theirs, "setup", "--model", "gpt", "--no-test", "--provider", "openai")
    shown = await asyncio.to_thread(answer, ours, [("Write this?", b"y\r")])
    assert await process.wait() == 0, shown
    assert settings_of(machine)["models"]["openai"]["api_key"] == "${OPENAI_API_KEY}"
    assert KEY not in shown


class LockedEndpoint(BaseHTTPRequestHandler):
    """An endpoint on this machine that refuses everything without its key."""

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "locked"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.reply({"choices": [{"message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}]})

    def reply(self, answer: dict[str, Any]) -> None:
        opened = self.headers["authorization"] == f"Bearer {KEY}"
        self.send_response(200 if opened and self.path.startswith("/v1/") else 401)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer if opened else {"error": {"message": "no key"}}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def locked() -> Iterator[str]:
    """The address, without its scheme, of an endpoint that needs a key."""
    with ThreadingHTTPServer(("127.0.0.1", 0), LockedEndpoint) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}/v1"
        server.shutdown()


async def test_an_endpoint_on_this_machine_that_needs_a_key_is_given_one(
    machine: "Machine", no_local_model: None, locked: str
):
    machine.env["TERM"] = "xterm"
    answers = [("at another", b"1\r"), ("Its address", f"{locked}\r".encode())]
    answers += [("which is not shown", f"{KEY}\r".encode())]
    ours, theirs = pty.openpty()
    process = await machine.start_on(theirs, "setup", "--store", "file")
    shown = await asyncio.to_thread(answer, ours, answers)
    assert await process.wait() == 0, shown
    assert "asks for a key." in shown
    assert settings_of(machine)["models"]["local"]["api_key"] == "${CROW_KEY_LOCAL}"
    assert KEY not in shown


async def test_where_nobody_can_be_asked_the_missing_key_is_named_with_its_option(machine: "Machine", locked: str):
    done = await machine.crow("setup", "--base-url", locked, "--model", "locked", "--yes")
    assert (done.code, list_files(machine)) == (2, {})
    assert "asks for a key. Name the variable that holds it: --key-env NAME" in done.err


async def test_an_endpoint_that_cannot_be_reached_is_told_once(machine: "Machine"):
    done = await machine.crow("setup", "--base-url", "no.such.host.invalid", "--model", "m", "--yes")
    assert done.code == 1
    assert (done.out + done.err).count("cannot be reached") == 1, done.out


def answer(terminal: int, answers: list[tuple[str, bytes]]) -> str:
    """Type each answer once its question is on the terminal; return all output."""
    shown, start = b"", 0
    waiting = list(answers)
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:
            return shown.decode(errors="replace")
        if not data:
            return shown.decode(errors="replace")
        shown += data
        if b"\x1b[6n" in data:  # prompt_toolkit asks where the cursor is
            os.write(terminal, b"\x1b[1;1R")
        if waiting and waiting[0][0].encode() in shown[start:]:
            start = len(shown)
            os.write(terminal, waiting.pop(0)[1])


# crow config


async def test_settings_are_shown_with_their_places(machine: "Machine"):
    file = machine.configure(f'{COMMENTED}\n[models.b]\nbase_url = "http://b/v1"\nmodel = "b"\napi_key = "{KEY}"\n')
    machine.env["CROW_MODEL"] = "old"
    (machine.project / ".mcp.json").write_text(
        '{"mcpServers": {"x": {"command": "x", "env": {"A_KEY": "0123456789abc"}}}}'
    )
    found = json.loads((await machine.crow("config", "show", "--json", "--all")).out)
    places = {(one["key"], one["source"]): one for one in found}
    assert places["permissions.allow", f"{file}:7"]["value"] == ["terminal:git status"]
    assert places["models.b.api_key", f"{file}:12"]["value"] == "[secret]"
    assert places["model", "CROW_MODEL"]["value"] == "old"
    assert places["permissions.mode", "default"]["value"] == "ask"
    assert places["models.b.fallback", "default"]["value"] == []
    assert places["diagnostics", "default"]["value"] == {}
    untrusted = places["mcp.servers.x.env.A_KEY", f"{machine.project / '.mcp.json'}:1"]
    assert (untrusted["value"], untrusted["remark"]) == ("[secret]", "not used: this folder is not trusted")


async def test_get_prints_the_value_alone(machine: "Machine"):
    file = machine.configure(COMMENTED)
    got = await machine.crow("config", "get", "models.old.model")
    assert (got.code, got.out, got.err.strip()) == (0, "old\n", f"{file}:4")
    assert (await machine.crow("config", "get", "permissions.mode")).out == "ask\n"
    assert (await machine.crow("config", "get", "models.old.window")).code == 1
    unknown = await machine.crow("config", "get", "permissions.mood")
    assert (unknown.code, "There is no setting" in unknown.err) == (2, True)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("permissions.mode", "accept-edits", "accept-edits"),
        ("max_requests", "50", 50),
        ("permissions.deny", '["terminal:rm *"]', ["terminal:rm *"]),
        ('models."a.b"', '{base_url = "http://x/v1", model = "7"}', {"base_url": "http://x/v1", "model": "7"}),
        ("models.old.model", "7", "7"),
        ("extensions.budgets.money", "5", 5),
        ("model", "old", "old"),
    ],
)
async def test_set_changes_one_setting_and_keeps_comments(machine: "Machine", key: str, value: str, expected: Any):
    file = machine.configure(COMMENTED)
    done = await machine.crow("config", "set", key, value)
    assert done.code == 0, done.err
    found: Any = settings_of(machine)
    for name in split_keys(key):
        found = found[name]
    assert found == expected
    for line in COMMENTED.splitlines():
        assert "#" not in line or line in file.read_text()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("permissions.mode", "yes"),
        ("max_requests", "0"),
        ("model", "nosuch"),
        ("permissions.mood", "ask"),
        ("extensions.budgets.mony", "5"),
        ("permissions.allow", '["terminal:("'),
        ("models.old.quirks.images", "perhaps"),
        ("models.old", "text"),
        ("a b", "1"),
        ("", "1"),
        ("model", "${NOT_SET}"),
    ],
)
async def test_set_refuses_what_crow_could_not_use(machine: "Machine", key: str, value: str):
    file = machine.configure(COMMENTED)
    done = await machine.crow("config", "set", key, value)
    assert (done.code, file.read_text()) == (2, COMMENTED)
    assert done.err.startswith("crow: ")


@pytest.mark.parametrize("command", [("config", "set", "permissions.mode", "yolo"), ("setup", "--provider", "ollama")])
async def test_a_command_of_the_model_cannot_change_settings(machine: "Machine", command: tuple[str, ...]):
    file = machine.configure(COMMENTED)
    machine.env["CROW_COMMAND"] = "1"
    done = await machine.crow(*command)
    assert (done.code, file.read_text()) == (2, COMMENTED)
    assert "Run it in a terminal of your own" in done.err


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text("ab.é \"'#", min_size=1, max_size=4),
        st.one_of(st.integers(), st.text(max_size=5), st.lists(st.integers(), max_size=2)),
        max_size=4,
    ),
    st.booleans(),
)
def test_values_are_set_in_any_table(values: dict[str, Any], crlf: bool):
    text = COMMENTED.replace("\n", "\r\n") if crlf else COMMENTED
    path = Path("config.toml")
    new = set_values(path, text, [(["models", name, "x"], value) for name, value in values.items()])
    data = tomllib.loads(new.replace("\r\n", "\n"))
    assert {name: data["models"][name]["x"] for name in values} == values
    assert data["models"].get("old", {}).get("model") == "old"
    assert crlf == ("\r\n" in new)
    assert not crlf or "\n" not in new.replace("\r\n", "")


# crow status and completion


async def test_status_tells_the_model_and_why(machine: "Machine"):
    async with ScriptedServer([Reply("Hello.")]) as server:
        file = machine.configure(f'[models.a]\nbase_url = "{server.url}"\nmodel = "scripted"\nwindow = 9000\n')
        await machine.crow("run", "hi")
        status = json.loads((await machine.crow("status", "--json")).out)
        text = (await machine.crow("status")).out
    assert status["model"]["why"] == "the first of [models] in config.toml"
    assert (status["model"]["endpoint"], status["model"]["window"]) == (server.url, 9000)
    assert {"path": str(file), "read": True} in status["files"]
    assert status["today"]["calls"] == 1
    assert re.search(r"^Model +a \(scripted\): the first of \[models\]", text)


async def test_status_without_a_model_says_what_to_do(machine: "Machine", no_local_model: None):
    done = await machine.crow("status")
    assert done.code == 0
    assert "crow setup" in done.out
    assert "made with the first session" in done.out


async def test_status_shows_permission_settings_that_are_no_list(machine: "Machine", no_local_model: None):
    machine.configure('[permissions]\ntaint = false\ndeny = ["terminal:rm *"]\n')
    done = await machine.crow("status")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"^Taint +false +# .*config.toml:2$", done.out, re.M)
    assert re.search(r"^Deny +terminal:rm \* +# .*config.toml:3$", done.out, re.M)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_the_completion_script_is_valid_and_completes_commands(machine: "Machine", shell: str):
    done = await machine.crow("completion", shell)
    assert (done.code, "_CROW_COMPLETE" in done.out) == (0, True)
    if program := shutil.which(shell):
        checked = await asyncio.to_thread(
            subprocess.run, [program, "-n"], input=done.out.encode(), capture_output=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, b"")
    env = {**machine.env, "_CROW_COMPLETE": "bash_complete", "COMP_WORDS": "crow conf", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'crow'; from crow_cli.__main__ import main; main()"
    completed = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], env=env, capture_output=True, check=False
    )
    assert completed.stdout == b"plain,config\n"
