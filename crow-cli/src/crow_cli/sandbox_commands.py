"""`crow sandbox`: try what the sandbox promises on this machine, and run a command in it."""

import asyncio
import difflib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import crow_system as system
from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_agent.settings.structs import Config
from crow_core.errors import ConfigError
from crow_core.text import escape_controls

from crow_cli.console import AS_JSON, print_json, print_note
from crow_cli.process import fail

if TYPE_CHECKING:
    from crow_permissions.shown_changes import ChangeSet
    from crow_sandbox.sandbox import SandboxRun

CHECK_TIMEOUT = 30.0
"""Seconds that one try may take."""
UNSHARE = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000) == 0)"
"""A Python program that fails if it can make a user namespace."""


async def find_standing(config: Config, home: Home) -> tuple[str, str]:
    """Find the level that holds for commands on this machine, and the sentence about it."""
    if config.sandbox.level == "off":
        return "off", "Commands are asked about before they run, by [sandbox] level."
    from crow_sandbox.sandbox import Sandbox  # imported here, as most commands of crow need none

    sandbox = Sandbox(home.data / "sandbox")
    standing = await sandbox.prove("review")
    if standing.level == "review":
        return "review", f"{standing.says} {await sandbox.prove_network()}"
    return "off", f"Commands are asked about before they run. {standing.says}"


async def find_programs_standing(home: Home) -> tuple[str, str]:
    """Find the level that servers, hooks and checks get if their settings name one, and the sentence about it."""
    from crow_sandbox.programs import prove_limits  # imported here, as most commands of crow need none

    standing = await prove_limits("workspace", home.data / "sandbox")
    return standing.level, standing.says


@dataclass(frozen=True)
class Promise:
    """A promise of the sandbox, and whether a trial showed that it holds."""

    name: str
    holds: bool
    detail: str = ""


@click.group()
def sandbox() -> None:
    """Try the sandbox of commands on this machine, and run a command in it."""


@sandbox.command()
@AS_JSON
def check(as_json: bool) -> None:
    """Try each promise of the sandbox by running commands that would break it.

    Exit codes: 0 all hold, 1 one does not, 2 there is no sandbox here.
    """
    says, promises = asyncio.run(check_promises())
    if as_json:
        print_json({"says": says, "promises": [asdict(each) for each in promises]})
    else:
        click.echo(escape_controls(says))
        for each in promises:
            mark = click.style("holds", fg="green") if each.holds else click.style("FAILS", fg="red")
            click.echo(
                f"{mark}  {escape_controls(each.name)}{f': {escape_controls(each.detail)}' if each.detail else ''}"
            )
    sys.exit(2 if not promises else 0 if all(each.holds for each in promises) else 1)


@sandbox.command(context_settings={"ignore_unknown_options": True})
@click.option("--apply", "applies", is_flag=True, help="Apply what the command changed, without asking.")
@click.option("--discard", is_flag=True, help="Discard it, without asking.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(applies: bool, discard: bool, command: Sequence[str]) -> None:
    """Run COMMAND on a copy of this folder, show what it changed, and ask whether that is applied.

    Write -- before the command. Several words are a program and its arguments, one word is a shell command. Without a
    terminal to ask on, what changed is discarded.

    Exit codes: those of the command; 2 if there is no sandbox here.
    """
    from crow_sandbox.policy import SandboxError

    if applies and discard:
        fail("--apply and --discard exclude each other: give one of them.")
    try:
        sys.exit(asyncio.run(run_reviewed(command, applies=applies, discard=discard)))
    except (SandboxError, ConfigError) as error:
        fail(escape_controls(str(error)))


async def run_reviewed(command: Sequence[str], *, applies: bool, discard: bool) -> int:
    """Run a command, show and apply what it changed, and return its exit code. Raises SandboxError, ConfigError."""
    from crow_permissions.private_files import find_private_files
    from crow_permissions.shown_changes import describe_changes, sort_changes
    from crow_sandbox.applying import finish_applying
    from crow_sandbox.network import describe_refused
    from crow_sandbox.policy import Policy, SandboxError
    from crow_sandbox.sandbox import Sandbox

    from crow_cli.explanation import load_context, make_session

    home, folder = Home.find(os.environ), str(Path.cwd())
    config = load_config(home, os.environ)
    settings, permissions = config.sandbox, config.permissions
    made = Sandbox(home.data / "sandbox")
    if (standing := await made.prove("review")).level != "review":
        raise SandboxError(standing.says)
    for sentence in await asyncio.to_thread(finish_applying, home.data / "sandbox"):
        print_note(sentence)
    own = (str(home.config), str(home.data))
    rules, session = load_context(Path(folder), None).permissions, make_session(Path(folder))
    private = find_private_files(session, rules.rules, [folder], permissions.private, settings.expose)
    policy = Policy("review", (folder,), (), own, tuple(settings.expose), tuple(settings.hosts), private=tuple(private))
    run = await made.begin(policy)
    try:
        shell = ["/bin/sh", "-c", *command] if len(command) == 1 else ["/usr/bin/env", "--", *command]
        words, env = run.wrap(shell, dict(os.environ), folder, ())
        code = (await asyncio.to_thread(subprocess.run, words, env=env, cwd=folder)).returncode
        if run.network and (refused := run.network.refused()):
            print_note(describe_refused(refused))
        found = sort_changes(session, rules.rules, own, rules.protected, run.read_changes())
        if not found.shown:
            print_note("The command changed nothing.")
            return code
        print_note(escape_controls(describe_changes(found)))
        if not applies and not discard and sys.stdin.isatty():
            applies = ask_person(found)
        if applies:
            run.apply(found.changes)
        print_note("Applied." if applies else "Discarded: the files are as before.")
        return code
    finally:
        run.remove()
        await made.close()


def ask_person(found: "ChangeSet") -> bool:
    """Ask on the terminal whether changes are applied; `d` shows their diffs first."""
    from crow_permissions.shown_changes import make_diffs

    while True:
        answer = click.prompt("Apply this? y(es), n(o), d(iffs)", default="n", err=True).strip().lower()
        if answer in ("y", "yes", "n", "no"):
            return answer.startswith("y")
        for each in make_diffs(found, ()):
            old, new = (text.splitlines(keepends=True) for text in (each.old_text or "", each.new_text))
            for line in difflib.unified_diff(old, new, each.path, each.path):
                click.echo(escape_controls(line.rstrip("\n")), err=True)


async def check_promises() -> tuple[str, list[Promise]]:
    """Try all promises; return what holds here in a sentence, and no promises if there is no sandbox."""
    from crow_sandbox.policy import SandboxError
    from crow_sandbox.sandbox import Sandbox

    home = Home.find(os.environ)
    made = Sandbox(home.data / "sandbox")
    standing = await made.prove("review")
    if standing.level != "review":
        return standing.says, []
    try:
        with tempfile.TemporaryDirectory(prefix="crow-check-", dir=home.data) as root:
            return standing.says, [await check_promise(made, root, *each) for each in list_promises(home)]
    except (SandboxError, OSError) as error:
        return f"{standing.says} But: {error}", [Promise("a command starts in the sandbox", False, str(error))]
    finally:
        await made.close()


Try = Callable[["Trial"], str]
"""Tries to break a promise; returns what went wrong, "" if the promise holds."""


class TriedSession:
    """A shell that runs on in a run, as in a session of the terminal."""

    def __init__(self, trial: "Trial") -> None:
        from crow_sandbox.lasting import LastingRun

        self.root = trial.root
        self.lasting = LastingRun(trial.run)
        words, env = trial.run.wrap(["/bin/sh"], dict(os.environ), str(trial.root), ())
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            words, env=env, cwd=trial.root, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> "TriedSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.lasting.close()

    def shell(self, line: str) -> str:
        """Run a line, and return the one that it prints."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()
        return self.process.stdout.readline().decode(errors="replace").strip()


@dataclass(frozen=True)
class Trial:
    """A run in which a promise is tried, on an otherwise empty folder."""

    run: "SandboxRun"
    root: Path

    def start(self, *words: str, env: "dict[str, str] | None" = None) -> "subprocess.CompletedProcess[str]":
        """Run a program in the sandbox to its end."""
        wrapped, variables = self.run.wrap(words, {**os.environ, **(env or {})}, str(self.root), ())
        return subprocess.run(
            wrapped,
            env=variables,
            cwd=self.root,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_TIMEOUT,
        )

    def shell(self, script: str, *arguments: str, env: "dict[str, str] | None" = None) -> str:
        """Run a shell script, and return what it prints."""
        return self.start("/bin/sh", "-c", script, "sh", *arguments, env=env).stdout.strip()


async def check_promise(made: "object", root: str, name: str, attempt: Try) -> Promise:
    """Try one promise in a run of its own."""
    from crow_sandbox.policy import Policy
    from crow_sandbox.sandbox import Sandbox

    assert isinstance(made, Sandbox)
    home = Home.find(os.environ)
    run = await made.begin(Policy("review", (root,), (), (str(home.config), str(home.data)), (), ()))
    try:
        wrong = await asyncio.to_thread(attempt, Trial(run, Path(root)))
        return Promise(name, not wrong, wrong)
    except (OSError, subprocess.SubprocessError) as error:
        return Promise(name, False, str(error))
    finally:
        run.remove()


def list_promises(home: Home) -> Iterator[tuple[str, Try]]:
    """Yield the promises, each with the function that tries to break it."""
    yield "a command runs", lambda trial: "" if trial.shell("echo run") == "run" else "it prints nothing"
    yield "what it changes stays in the copy", try_to_change
    yield "what is applied is in the folder", try_to_apply
    yield "it changes nothing outside of its folder", try_to_write_outside
    yield "/tmp is its own", try_to_share_temporary
    yield "it reaches no server of this machine or of another", try_to_connect
    yield "it does not see crow's own settings and data", lambda trial: try_to_read(trial, home)
    yield "it does not see variables with secrets", try_to_read_variable
    yield "it makes no namespaces of its own", try_to_nest
    yield "it sends no signal to other processes", try_to_signal
    yield "what a session of the terminal changes is told while it runs on", try_to_look
    yield "a session sees what changes in its folder", try_to_renew


def try_to_change(trial: Trial) -> str:
    trial.shell("echo x > changed")
    if (trial.root / "changed").exists():
        return "the file is in the folder"
    return "" if [each.path for each in trial.run.read_changes()] == ["changed"] else "the change is not seen"


def try_to_apply(trial: Trial) -> str:
    trial.shell("echo x > applied")
    trial.run.apply(trial.run.read_changes())
    return "" if (trial.root / "applied").read_text() == "x\n" else "the file is not there"


def try_to_write_outside(trial: Trial) -> str:
    name = Path.home() / f".crow-check-{os.getpid()}"
    trial.shell('echo x > "$1"', str(name))
    if name.exists():
        name.unlink()
        return f"it wrote {name}"
    return ""


def try_to_share_temporary(trial: Trial) -> str:
    with tempfile.NamedTemporaryFile(dir="/tmp", prefix="crow-check-") as file:
        return "it sees the files of others" if trial.shell('test -e "$1" && echo seen', file.name) else ""


def try_to_connect(trial: Trial) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        program = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)"
        done = trial.start(sys.executable, "-I", "-S", "-c", program, port)
    return "it connected to a server of this machine" if done.returncode == 0 else ""


def try_to_read(trial: Trial, home: Home) -> str:
    seen = trial.shell('for each in "$@"; do ls -A "$each" 2>/dev/null; done', str(home.config), str(home.data))
    names = {*seen.split()} - {trial.root.name}
    return f"it sees {', '.join(sorted(names)[:3])}" if names else ""


def try_to_read_variable(trial: Trial) -> str:
    seen = trial.shell('printf %s "$CROW_CHECK_TOKEN"', env={"CROW_CHECK_TOKEN": "seen"})
    return "it sees a token" if seen else ""


def try_to_nest(trial: Trial) -> str:
    done = trial.start(sys.executable, "-I", "-S", "-c", UNSHARE)
    return "it made a user namespace" if done.returncode == 1 and not done.stderr else ""


def try_to_signal(trial: Trial) -> str:
    return "it found this process" if trial.shell('kill -0 "$1" 2>/dev/null && echo sent', str(os.getpid())) else ""


def try_to_look(trial: Trial) -> str:
    with TriedSession(trial) as session:
        for name in ("first", "second"):
            session.shell(f"echo x > {name}; echo done")
            look = session.lasting.look()
            try:
                changes = look.read_changes()
                if [each.path for each in changes] != [name]:
                    return "a change is not seen, or is seen twice"
                look.apply(changes)
            finally:
                look.remove()
    return "" if (trial.root / "second").exists() else "the file is not there"


def try_to_renew(trial: Trial) -> str:
    (trial.root / "seen").write_text("earlier\n", encoding="utf-8")
    with TriedSession(trial) as session:
        session.shell("cat seen")
        (trial.root / "new").write_text("later\n", encoding="utf-8")
        system.replace_file(trial.root / "new", trial.root / "seen")
        session.lasting.renew()
        return "" if session.shell("cat seen") == "later" else "it sees the file as it was"
