"""Hosts that commands in the sandbox ask for: the real terminal tool, a real server, and a person who answers."""

import asyncio
import shutil
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from crow_agent.builtin_tools import make_tool_server
from crow_core.acp.client import OPTION_NAMES, answer_permission
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    METHOD_NOT_FOUND,
    BlockContent,
    ClientCapabilities,
    RequestPermissionRequest,
    RequestPermissionResponse,
    TextBlock,
)
from crow_core.acp.transports import memory_pair
from crow_core.agent.acp_agent import AcpAgent
from crow_core.app import Crow
from crow_core.session.session import Session
from crow_core.testing import Editor, Reply, ScriptedModel
from crow_core.testing.script import ScriptedCall as Use
from crow_permissions.extension import permissions
from crow_permissions.kept_answers import KeptAnswers
from crow_permissions.review import ReviewSettings
from crow_permissions.taint import taint
from crow_sandbox.sandbox import Sandbox
from crow_testing.databases import unable
from crow_testing.listening import listen

pytestmark = pytest.mark.anyio

OFF = "The network is off for this command, but for hosts that the user allows; it asked for "


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "notes.txt").write_text("one\n")
    return folder


class Host:
    """A server of this machine that stands for two hosts, and counts its requests."""

    def __init__(self, port: int) -> None:
        self.name, self.other = f"registry.test:{port}", f"files.test:{port}"
        self.address = f"127.0.0.1:{port}"
        self.requests = 0

    def get(self, name: str = "", *, quiet: bool = False) -> str:
        """Return a command that gets a page of the host."""
        script = f"import urllib.request as u; print(u.urlopen('http://{name or self.name}/').read().decode())"
        return f'python3 -I -S -c "{script}"{" 2>/dev/null" if quiet else ""}'


@pytest.fixture
async def host(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Host]:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        found.requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    real = cast(Callable[..., Any], socket.getaddrinfo)

    def resolve(name: str, *rest: Any, **more: Any) -> Any:
        return real("127.0.0.1" if name in ("registry.test", "files.test") else name, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with listen(greet) as port:
        found = Host(port)
        yield found


@pytest.fixture
async def sandbox(tmp_path: Path, host: Host) -> ReviewSettings:
    """The settings allow the address to which the names lead, as it is not public; the names are not allowed."""
    folder = tmp_path / "data" / "sandbox"
    standing = await Sandbox(folder).prove("review")
    if standing.level != "review":
        unable(standing.says)
    return ReviewSettings(folder, hosts=[host.address])


def run(command: str, **more: Any) -> Use:
    return {"name": "terminal", "arguments": {"command": command, **more}}


def in_turn(*uses: Use) -> ScriptedModel:
    """Make a model that makes one of these tool calls in each turn."""
    return ScriptedModel([reply for use in uses for reply in (Reply(tool_calls=[use]), Reply("Done."))])


class Person(Editor):
    """An editor that gives these answers, by the ids of their options; the last one to all further questions."""

    answers: tuple[str, ...] = ()

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        if not self.answers:
            return await super().on_permission(question)
        self.questions.append(question)
        return answer_permission(self.answers[min(len(self.questions), len(self.answers)) - 1])


class Nobody(Person):
    """A client that cannot ask anybody."""

    async def on_permission(self, question: RequestPermissionRequest) -> RequestPermissionResponse:
        raise RpcError(METHOD_NOT_FOUND, "nobody is there")


class Conversation:
    """A session with a scripted model, and a person who answers the questions."""

    def __init__(self, crow: Crow, model: ScriptedModel, editor: Person, session_id: str) -> None:
        self.crow, self.model, self.editor, self.id = crow, model, editor, session_id

    @property
    def session(self) -> Session:
        return self.crow.sessions[self.id]

    @property
    def texts(self) -> list[str]:
        """The texts of the questions."""
        return [get_text(question) for question in self.editor.questions]

    async def prompt(self) -> str:
        """Run a turn, and return the last result that the model received."""
        await self.editor.prompt(self.id, "go")
        return [each["content"] for each in self.model.requests[-1]["messages"] if each["role"] == "tool"][-1]

    def list_decisions(self) -> list[tuple[str, str, str]]:
        notes = [entry.get("crow", {}) for entry in self.session.log]
        return [(note["is"], note["by"], note["scope"]) for note in notes if note.get("kind") == "decision"]


@asynccontextmanager
async def converse(
    project: Path,
    sandbox: ReviewSettings,
    model: ScriptedModel,
    *answers: str,
    tainted: bool = False,
    person: type[Person] = Person,
    **options: Any,
) -> AsyncGenerator[Conversation]:
    crow = Crow(model)
    crow.servers.append(make_tool_server(crow))
    crow.use(permissions, sandbox=sandbox, **options)
    if tainted:
        crow.use(taint)
    ours, theirs = memory_pair()
    agent = asyncio.ensure_future(AcpAgent(theirs, crow).serve())
    editor = person(ours)
    editor.answers = answers
    try:
        async with editor.serving():
            await editor.initialize("editor", ClientCapabilities(meta=OPTION_NAMES))
            opened = await editor.new_session(str(project))
            yield Conversation(crow, model, editor, opened.session_id)
    finally:
        await asyncio.wait([agent])
        await crow.shut_down()


def get_text(question: RequestPermissionRequest) -> str:
    (block,) = [each for each in cast(Any, question.tool_call.content) if isinstance(each, BlockContent)]
    return cast(TextBlock, block.content).text


def get_options(question: RequestPermissionRequest) -> list[str]:
    return [option.name for option in question.options]


async def test_allowed_host_lets_the_command_run_again_and_what_it_changed_is_not_doubled(
    project: Path, sandbox: ReviewSettings, host: Host
) -> None:
    model = in_turn(run(f"echo x >> new.txt; {host.get()}"), run(host.get()))
    async with converse(project, sandbox, model, "allow", "allow", "reject") as talk:
        assert await talk.prompt() == "hello\n"
        asked, changed = talk.texts
        assert asked == (
            f"In the sandbox, this asked for {host.name}, which it may not reach. "
            "Allowed, it runs again and may reach it; what it changed is discarded."
        )
        assert get_options(talk.editor.questions[0]) == [
            "Allow for this command",
            f"Allow for this session: commands reach {host.name}",
            "Reject",
            f"Reject for this session: commands reach {host.name}",
        ]
        assert "would change 1 file or folder." in changed
        assert (project / "new.txt").read_text() == "x\n"
        assert ("allow", f"it may reach {host.name}: the user", "once") in talk.list_decisions()
        assert OFF in await talk.prompt()  # the answer has held for the first command alone
        assert len(talk.texts) == 3
        assert host.requests == 1


async def test_rejected_host_is_named_to_the_model(project: Path, sandbox: ReviewSettings, host: Host) -> None:
    model = in_turn(run(f"echo x >> new.txt; {host.get()}"))
    async with converse(project, sandbox, model, "reject", "allow", mode="accept-edits") as talk:
        assert f"[{OFF}{host.name}, and the user rejected it.]" in await talk.prompt()
        assert len(talk.texts) == 1
        assert host.requests == 0
        assert (project / "new.txt").read_text() == "x\n"
        assert talk.list_decisions()[-2] == ("deny", f"it may not reach {host.name}: the user rejected it", "once")


@pytest.mark.posix("there are no terminal sessions")
async def test_session_of_the_terminal_may_reach_an_allowed_host_from_then_on(
    project: Path, sandbox: ReviewSettings, host: Host
) -> None:
    model = in_turn(*(run(host.get(), session="one") for _ in range(3)), run(host.get(host.other), session="one"))
    async with converse(project, sandbox, model, "allow", "reject") as talk:
        said = await talk.prompt()
        assert f"It asked for {host.name}, which the user allows to this session now: try again" in said
        assert "its session may reach it from now on" in talk.texts[0]
        assert await talk.prompt() == "hello\n"
        assert await talk.prompt() == "hello\n"
        assert len(talk.texts) == 1
        assert f"{OFF}{host.other}, and" in await talk.prompt()
        assert len(talk.texts) == 2


@pytest.mark.posix("there are no terminal sessions")
async def test_session_of_the_terminal_loses_its_hosts_once_private_data_was_read(
    project: Path, sandbox: ReviewSettings, host: Host
) -> None:
    (project / ".env").write_text("KEY=1\n")
    (project / "send.py").write_text(f"import os\nos.system({host.get()!r})")
    settings = replace(sandbox, hosts=[*sandbox.hosts, host.name])
    send = run("python3 send.py", session="one")
    read = {"name": "file_editor", "arguments": {"command": "view", "path": ".env"}}
    async with converse(project, settings, in_turn(send, read, send), "reject", tainted=True) as talk:
        assert await talk.prompt() == "hello\n"
        await talk.prompt()
        assert f"[{OFF}{host.name}, and the user rejected it.]" in await talk.prompt()
        assert "This session has read private data (.env)" in talk.texts[0]
        assert host.requests == 1


async def test_answers_for_the_session_end_with_it(project: Path, sandbox: ReviewSettings, host: Host) -> None:
    async with converse(project, sandbox, in_turn(*[run(host.get())] * 2), "allow-session") as talk:
        assert await talk.prompt() == "hello\n"
        assert await talk.prompt() == "hello\n"
        assert len(talk.texts) == 1
        assert talk.list_decisions()[1][2] == f"session: commands reach {host.name}"
    async with converse(project, sandbox, in_turn(*[run(host.get())] * 2), "reject-session") as talk:
        assert OFF in await talk.prompt()
        assert OFF in await talk.prompt()
        assert len(talk.texts) == 1


async def test_answer_for_the_folder_is_kept_and_holds_there_alone(
    project: Path, sandbox: ReviewSettings, host: Host, tmp_path: Path
) -> None:
    kept, other = KeptAnswers(tmp_path / "kept"), tmp_path / "other"
    other.mkdir()
    for answer in ("allow-folder", "reject"):
        async with converse(project, sandbox, in_turn(run(host.get())), answer, answers=kept) as talk:
            assert await talk.prompt() == "hello\n"
            assert len(talk.texts) == (1 if answer == "allow-folder" else 0)
    async with converse(other, sandbox, in_turn(run(host.get())), "reject", answers=kept) as talk:
        assert OFF in await talk.prompt()
    assert [str(each) for each in kept.list_all()] == [f"allow in {project}: commands reach {host.name}"]


async def test_each_further_host_is_asked_about(project: Path, sandbox: ReviewSettings, host: Host) -> None:
    model = in_turn(run(f"{host.get()} && echo x >> new.txt && {host.get(host.other)}"))
    async with converse(project, sandbox, model, "allow", mode="accept-edits") as talk:
        assert await talk.prompt() == "hello\nhello\n"
        assert [text.split()[6] for text in talk.texts] == [f"{host.name},", f"{host.other},"]
        assert (project / "new.txt").read_text() == "x\n"


async def test_hosts_of_one_command_are_one_question(project: Path, sandbox: ReviewSettings, host: Host) -> None:
    model = in_turn(*[run(f"{host.get()}; {host.get(host.other)}")] * 2)
    async with converse(project, sandbox, model, "allow-session") as talk:
        assert await talk.prompt() == "hello\nhello\n"
        assert f"asked for {host.name}, {host.other}, which" in talk.texts[0]
        assert await talk.prompt() == "hello\nhello\n"
        assert len(talk.texts) == 1


async def test_host_of_the_settings_is_reached_unasked(project: Path, sandbox: ReviewSettings, host: Host) -> None:
    settings = replace(sandbox, hosts=[host.address, host.name])
    async with converse(project, settings, in_turn(run(host.get())), "reject") as talk:
        assert await talk.prompt() == "hello\n"
        assert talk.texts == []


async def test_command_that_succeeds_is_not_asked_about_what_it_does_not_miss(
    project: Path, sandbox: ReviewSettings, host: Host
) -> None:
    model = in_turn(run(f"{host.get(quiet=True)}; echo fine"), run(f"{host.get()} 2>&1 | tail -1"))
    async with converse(project, sandbox, model, "allow") as talk:
        assert await talk.prompt() == f"fine\n\n\n[{OFF}{host.name}.]"
        assert talk.texts == []
        assert await talk.prompt() == "hello\n"  # its exit code was 0, but it complained
        assert len(talk.texts) == 1


async def test_command_is_not_asked_about_hosts_of_another_that_runs_at_the_same_time(
    project: Path, sandbox: ReviewSettings, host: Host
) -> None:
    model = ScriptedModel([Reply(tool_calls=[run(host.get()), run("sleep 0.3; false $(true)")]), Reply("Done.")])
    async with converse(project, sandbox, model, "reject") as talk:
        assert OFF not in await talk.prompt()
        assert [cast(Any, each.tool_call.raw_input)["command"] for each in talk.editor.questions] == [host.get()]


@pytest.mark.parametrize("rule", ["fetch:http://registry.test*", "fetch:*://registry.test:*/*", "fetch:*registry*"])
async def test_host_that_a_rule_denies_to_fetch_is_neither_reached_nor_offered(
    project: Path, sandbox: ReviewSettings, host: Host, rule: str
) -> None:
    settings = replace(sandbox, hosts=[host.address, host.name])
    async with converse(project, settings, in_turn(run(host.get())), "allow", deny=[rule]) as talk:
        assert f"[{OFF}{host.name}.]" in await talk.prompt()
        assert talk.texts == []
        assert host.requests == 0


async def test_rules_that_name_no_host_deny_none(project: Path, sandbox: ReviewSettings, host: Host) -> None:
    settings = replace(sandbox, hosts=[host.address, host.name])
    rules = ["fetch", "fetch:*/secrets/*", "web_*:*"]
    async with converse(project, settings, in_turn(run(host.get())), "reject", deny=rules) as talk:
        assert await talk.prompt() == "hello\n"


async def test_host_about_which_a_rule_asks_is_asked_about_each_time(
    project: Path, sandbox: ReviewSettings, host: Host
) -> None:
    settings = replace(sandbox, hosts=[host.address, host.name])
    model = in_turn(*[run(host.get())] * 2)
    async with converse(project, settings, model, "allow", ask=["fetch:http://registry.test*"]) as talk:
        for count in (1, 2):
            assert await talk.prompt() == "hello\n"
            assert len(talk.texts) == count
        assert "The rule 'fetch:http://registry.test*' says ask." in talk.texts[0]
        assert get_options(talk.editor.questions[0]) == ["Allow for this command", "Reject"]


async def test_rule_that_allows_fetch_lets_no_command_reach_the_host(
    project: Path, sandbox: ReviewSettings, host: Host
) -> None:
    async with converse(project, sandbox, in_turn(run(host.get())), "reject", allow=["fetch"]) as talk:
        assert OFF in await talk.prompt()
        assert len(talk.texts) == 1


async def test_address_that_is_not_public_is_not_offered(project: Path, sandbox: ReviewSettings, host: Host) -> None:
    closed = replace(sandbox, hosts=[])
    model = in_turn(run(host.get("10.0.0.1")), run(host.get()))
    async with converse(project, closed, model, "allow") as talk:
        assert f"[{OFF}10.0.0.1:80. 10.0.0.1:80 is not public.]" in await talk.prompt()
        assert talk.texts == []
        answer = await talk.prompt()  # the name is allowed, and leads to this machine
        assert f"{host.name} has the address 127.0.0.1, which is not public.]" in answer
        assert len(talk.texts) == 1
        assert host.requests == 0


async def test_plan_mode_asks_for_no_host(project: Path, sandbox: ReviewSettings, host: Host) -> None:
    async with converse(project, sandbox, in_turn(run(host.get())), "allow", mode="plan") as talk:
        assert f"[{OFF}{host.name}.]" in await talk.prompt()
        assert talk.texts == []


async def test_without_anybody_to_ask_the_model_is_told(project: Path, sandbox: ReviewSettings, host: Host) -> None:
    async with converse(project, sandbox, in_turn(run(host.get())), person=Nobody) as talk:
        told = f"[{OFF}{host.name}, and it needs a permission, and nobody is there to give it.]"
        assert told in await talk.prompt()
        assert host.requests == 0


async def test_cancelling_the_question_discards(project: Path, sandbox: ReviewSettings, host: Host) -> None:
    model = in_turn(run(f"echo x > new.txt; {host.get()}"), run("ls $(true)"))
    async with converse(project, sandbox, model) as talk:
        talk.editor.permit = None
        turn = asyncio.ensure_future(talk.editor.prompt(talk.id, "go"))
        await talk.editor.until(lambda editor: editor.questions)
        await talk.editor.cancel(talk.id)
        await turn
        assert not [path for path in sandbox.folder.iterdir() if path.name.startswith("run-")]
        await talk.editor.prompt(talk.id, "The model says that it is done.")
        assert await talk.prompt() == "notes.txt\n"


@pytest.mark.parametrize("by_settings", [True, False])
async def test_session_with_private_data_asks_before_a_command_reaches_any_host(
    project: Path, sandbox: ReviewSettings, host: Host, by_settings: bool
) -> None:
    (project / ".env").write_text("KEY=1\n")
    (project / "send.py").write_text(f"import os\nos.system({host.get()!r})")
    settings = replace(sandbox, hosts=[host.address, host.name] if by_settings else [host.address])
    model = in_turn(
        run("python3 send.py"),
        {"name": "file_editor", "arguments": {"command": "view", "path": ".env"}},
        run("python3 send.py"),
        run("python3 send.py"),
        run("python3 -c 'print(1)'"),
    )
    earlier = () if by_settings else ("allow-session",)
    async with converse(project, settings, model, *earlier, "reject", "allow", tainted=True) as talk:
        assert "hello" in await talk.prompt()
        assert len(talk.texts) == len(earlier)
        await talk.prompt()
        assert f"[{OFF}{host.name}, and the user rejected it.]" in await talk.prompt()
        assert host.requests == 1
        asked = talk.editor.questions[-1]
        assert "This session has read private data (.env)" in get_text(asked)
        assert f"this may send data away: it may reach {host.name}." in get_text(asked)
        assert get_options(asked) == ["Allow for this command", "Reject"]
        assert "hello" in await talk.prompt()
        assert host.requests == 2
        assert await talk.prompt() == "1\n"  # it asks for no host
        assert len(talk.texts) == len(earlier) + 2


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python3 -m pip download --no-cache-dir six", "pypi.org"),
        ("npm view left-pad --registry https://registry.npmjs.org", "registry.npmjs.org"),
        ("curl -sS https://example.com", "example.com"),
        ("git ls-remote https://example.com/a.git", "example.com"),
    ],
)
async def test_program_that_is_refused_ends_with_a_line_for_the_model(
    project: Path, sandbox: ReviewSettings, command: str, name: str
) -> None:
    if not shutil.which(command.split()[0]):
        pytest.skip("it is not installed")
    command = f"PIP_CONFIG_FILE=/dev/null {command}"
    async with converse(project, sandbox, in_turn(run(command, wait=60)), "reject") as talk:
        answer = await talk.prompt()
        if "No module named pip" in answer:
            pytest.skip(answer)
        assert f"[{OFF}{name}:443, and the user rejected it.]" in answer
        assert f"asked for {name}, which" in talk.texts[0]


SERVE = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler)"


async def test_command_reaches_the_server_of_another_on_loopback(project: Path, sandbox: ReviewSettings) -> None:
    serve = (
        f"""python3 -c "{SERVE}; print(s.server_port, file=open('/tmp/port', 'w'), flush=True); s.serve_forever()\""""
    )
    wait = "until test -s /tmp/port; do sleep 0.05; done"
    ask = 'curl -sS "http://127.0.0.1:$(cat /tmp/port)/notes.txt"'
    async with converse(project, sandbox, in_turn(run(serve, wait=0.1), run(f"{wait}; {ask}"))) as talk:
        await talk.prompt()
        assert await talk.prompt() == "one\n"
        assert talk.texts == []
