"""What one session of the host has running, and how a call of `terminal` is answered."""

import asyncio
import os
import re
import shlex
import signal
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyio import to_thread

from crow_mcp_server.refusal import Refusal
from crow_mcp_server.terminal import processes
from crow_mcp_server.terminal.processes import MARK, TERM_GRACE, Command, Program, inherited_environment
from crow_mcp_server.terminal.shell_state import Surroundings
from crow_mcp_server.terminal.tempfiles import Scratch
from crow_mcp_server.workspace import Outcome, Terminals, Workspace

if TYPE_CHECKING:
    from crow_mcp_server.terminal.shell import Shell

MAX_OUTPUT = 30_000  # characters the model is shown
WAIT = 120.0  # seconds until a call is answered though its command runs on
WAIT_IN_SESSION = 30.0  # the same for a terminal of its own
WAIT_AGAIN = 10.0  # the same for a call that only looks
MAX_WAIT = 600.0
MAX_SESSIONS = 16
NAME = re.compile(r"[\w.-]{1,40}")

ENVIRONMENT = {
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "SYSTEMD_PAGER": "cat",
    "AWS_PAGER": "",
    "EDITOR": "false",  # fails at once, where an editor would wait for somebody
    "VISUAL": "false",
    "GIT_EDITOR": "false",
    "GIT_SEQUENCE_EDITOR": "false",
    "GIT_TERMINAL_PROMPT": "0",
    "GCM_INTERACTIVE": "never",
    "SSH_ASKPASS_REQUIRE": "never",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "PYTHONUNBUFFERED": "1",
    "TERM": "dumb",
    "NO_COLOR": "1",
}
"""Laid over the environment of every command: nothing waits for a person, nothing decorates."""
IN_TERMINAL = {"TERM": "xterm-256color", "VIRTUAL_ENV_DISABLE_PROMPT": "1"}
"""Laid over that in a terminal, whose escape sequences are understood."""


@dataclass(frozen=True)
class Asked:
    """A call's arguments; what was not given is empty."""

    command: str = ""
    session: str = ""
    input: str | None = None
    keys: str = ""
    wait: float | None = None
    timeout: float | None = None
    cwd: str = ""


@dataclass(frozen=True)
class Answer:
    """What comes of a call."""

    text: str
    folder: str = ""
    """Where the next command begins, if one was run."""
    place: str = ""
    """The host's own name for where it ran."""


class Desk:
    """The commands and terminals of one session of the host."""

    def __init__(self, scratch: Scratch, folder: str) -> None:
        self.surroundings = Surroundings(folder)
        self._scratch = scratch
        self._sessions: dict[str, Command | Shell] = {}
        """What runs on or stays, by the name the model knows."""
        self._background: list[Command] = []
        """Commands that have ended and left something running."""
        self._opening = asyncio.Lock()

    async def clear(self) -> None:
        """End all that runs."""
        programs: list[Program] = [*self._sessions.values(), *self._background]
        self._sessions, self._background = {}, []
        await asyncio.gather(*(program.kill() for program in programs))

    async def run(self, workspace: Workspace, asked: Asked) -> Answer:
        """Do what a call asks for. Raises Refusal."""
        if workspace.folder:
            self.surroundings.folder = workspace.folder
        if "\0" in asked.command:
            raise Refusal("command has a NUL in it. Give the shell command to run.")
        if asked.session:
            return Answer(await self._in_session(workspace, asked))
        if asked.keys or asked.input is not None:
            raise Refusal(f"input and keys go to a session: name it. {self._open()}")
        if not asked.command.strip():
            raise Refusal("command is empty. Give the shell command to run.")
        if workspace.terminals and asked.wait is None:  # what may outlive its call stays here
            return await self._at_host(workspace, workspace.terminals, asked)
        return await self._here(workspace, asked)

    async def _here(self, workspace: Workspace, asked: Asked) -> Answer:
        """Run a command without input as a process of this machine."""
        folder = await to_thread.run_sync(self._start, workspace, asked.cwd)
        env = self._environment(folder, ENVIRONMENT)
        command, learn = self._followed(asked.command, env, folder)
        program = Command(env[MARK], self._scratch.capture(), self._scratch.watchdog, learn)
        try:
            await program.run(["-c", command], cwd=folder, env=env)
        except (OSError, ValueError) as error:
            learn()
            reason = error.strerror if isinstance(error, OSError) else str(error)  # longer than the system takes
            raise Refusal(f"The command could not start: {reason}. Write a long script to a file, run that.") from None
        if asked.timeout:
            program.set_clock(asked.timeout)
        wait = asked.timeout + 2 * TERM_GRACE if asked.timeout else WAIT
        wait = wait if asked.wait is None else asked.wait
        try:
            await program.wait(min(wait, MAX_WAIT), workspace.watch)
        except BaseException:
            await program.kill()
            learn()
            raise
        if not program.running or program.timed_out:
            return await self._ended(program)
        name = next(name for name in map(str, range(1, 10**9)) if name not in self._sessions)
        self._sessions[name] = program
        return Answer(joined(program.capture.take(MAX_OUTPUT), still_running(name)))

    async def _ended(self, program: Command) -> Answer:
        """What comes of a command that has ended."""
        before = self.surroundings.folder
        outcome = await program.outcome(MAX_OUTPUT)
        program.learn()
        for left in [left for left in self._background if not left.lives()]:
            self._background.remove(left)
            left.release()
        if outcome.get("background"):
            self._background.append(program)
        return Answer(report(outcome, program.timeout, self._moved(before)), self.surroundings.folder)

    async def _at_host(self, workspace: Workspace, terminals: Terminals, asked: Asked) -> Answer:
        """Have the host run a command in a terminal of its own."""
        folder = await to_thread.run_sync(self._start, workspace, asked.cwd)
        before, timeout = self.surroundings.folder, min(asked.timeout or WAIT, MAX_WAIT)
        env = self.surroundings.lay_over(dict.fromkeys(self._scratch.hidden, "") | ENVIRONMENT) | {"PWD": folder}
        command, learn = self._followed(asked.command, env, folder, foreign=True)
        try:
            outcome = await terminals.run(command, cwd=folder, env=env, timeout=timeout, output_limit=MAX_OUTPUT)
        except OSError as error:
            raise Refusal(f"The end of the command was not seen: {error}. What it did until then stays.") from None
        finally:
            learn()
        capture = self._scratch.capture()
        capture.feed(outcome["output"].encode(errors="replace"))
        outcome["output"] = capture.text(MAX_OUTPUT)
        capture.close()
        text = report(outcome, timeout, self._moved(before))
        return Answer(text, self.surroundings.folder, outcome.get("terminal", ""))

    async def _in_session(self, workspace: Workspace, asked: Asked) -> str:
        """Run a command in a terminal that stays, or talk to what runs there."""
        name, program = asked.session, self._sessions.get(asked.session)
        gives = asked.input is not None or bool(asked.keys)
        if asked.command.strip():
            if gives:
                raise Refusal("Not run: give either a command, or input or keys for what runs already.")
            async with self._opening:
                program = await self._shell(workspace, asked)
                await program.run(asked.command)
            if asked.timeout:
                program.set_clock(asked.timeout)
        elif program is None:
            raise Refusal(f"There is no session {name!r}. {self._open()}")
        elif asked.keys == "kill":
            del self._sessions[name]
            await program.kill()
            return joined(program.capture.text(MAX_OUTPUT), "[killed]")
        elif gives:
            await self._give(program, asked)
        wait = WAIT_IN_SESSION if gives or asked.command else WAIT_AGAIN
        wait = wait if asked.wait is None else asked.wait
        try:
            await program.wait(min(wait, MAX_WAIT), workspace.watch, patient=asked.wait is not None)
        except BaseException:
            if asked.command:
                self._sessions.pop(name, None)
                await program.kill()
            raise
        if not program.running and (isinstance(program, Command) or program.code is not None):
            self._sessions.pop(name, None)
        if isinstance(program, Command) and not program.running:
            return (await self._ended(program)).text
        return await look(name, program)

    async def _shell(self, workspace: Workspace, asked: Asked) -> "Shell":
        """The terminal that a command is for, made if there is none."""
        from crow_mcp_server.terminal.shell import Shell  # not at the top: Windows has no such terminals

        name, program = asked.session, self._sessions.get(asked.session)
        if program and program.running:
            raise Refusal(
                f"Not run: in session {name!r} something else is running. Answer it with input or keys (C-c stops it), "
                "or use another session."
            )
        if isinstance(program, Shell) and program.code is None:
            if asked.cwd:
                raise Refusal(f"Not run: cwd is for a new session, and {name!r} is open. Use cd.")
            return program
        if not NAME.fullmatch(name):
            raise Refusal(f"Not run: {name[:60]!r} is no name for a session. Use a word, such as 'server'.")
        if len(self._sessions) >= MAX_SESSIONS:
            raise Refusal(f'Not run: too many sessions. End one with keys "kill". {self._open()}')
        folder = await to_thread.run_sync(self._start, workspace, asked.cwd)
        env = self._environment(folder, ENVIRONMENT | IN_TERMINAL)
        shell = Shell(env[MARK], self._scratch.capture(), self._scratch.watchdog)
        try:
            await shell.open(cwd=folder, env=env)
        except OSError as error:
            raise Refusal(f"No terminal could be opened: {error.strerror}. Run the command without session.") from None
        except BaseException:
            await shell.kill()
            raise
        self._sessions[name] = shell
        return shell

    async def _give(self, program: "Command | Shell", asked: Asked) -> None:
        """Give input to what runs."""
        name = asked.session
        if isinstance(program, Command):
            if asked.keys != "C-c":
                raise Refusal(f'{name!r} takes no input; only keys "C-c" or "kill". Start what asks with a session.')
            await program.signal(signal.SIGINT)
        elif not program.running:
            raise Refusal(f"Nothing runs in session {name!r} that could read that. Give a command.")
        else:
            try:
                await program.type(asked.input, asked.keys)
            except TimeoutError:
                raise Refusal(f"What runs in session {name!r} does not read its input. Wait, or stop it.") from None

    def _start(self, workspace: Workspace, cwd: str) -> str:
        """The folder that a command begins in."""
        folder = os.path.join(workspace.cwd, os.path.expanduser(cwd)) if cwd else self.surroundings.folder
        if os.path.isdir(folder):
            return folder
        what = "is not a folder" if os.path.exists(folder) else "does not exist"
        raise Refusal(f"The folder {folder} {what}, so the command was not run. Give cwd, such as {workspace.cwd}.")

    def _environment(self, folder: str, over: dict[str, str]) -> dict[str, str]:
        """The environment of a command, with a mark of its own."""
        env = self.surroundings.lay_over(inherited_environment(self._scratch.hidden) | over)
        marks = f"{os.environ.get(MARK, '')}:{uuid.uuid4().hex}"  # ours may be a command's child itself
        return env | {"PWD": folder, MARK: marks}

    def _followed(
        self, command: str, env: dict[str, str], folder: str, *, foreign: bool = False
    ) -> tuple[str, Callable[[], None]]:
        """A command that will tell what it leaves to the next, and how to learn that once it has ended."""
        surroundings, path = self.surroundings, os.path.join(self._scratch.notes, uuid.uuid4().hex)
        script = f"{path}.sh"
        with open(script, "w", encoding="utf-8") as file:
            file.write(surroundings.script(path, env.get("BASH_ENV", ""), foreign=foreign))
        if os.path.basename(processes.SHELL) == "bash":
            env["BASH_ENV"] = script
        else:
            command = f". {shlex.quote(script)}\n{command}"

        def learn() -> None:
            surroundings.learn(path, None if foreign else env, folder)
            with suppress(OSError):
                os.unlink(script)

        return command, learn

    def _moved(self, before: str) -> str:
        folder = self.surroundings.folder
        return f"[now in {folder}]" if folder != before else ""

    def _open(self) -> str:
        return f"Open are: {', '.join(self._sessions)}." if self._sessions else "None is open."


async def look(name: str, shell: "Command | Shell") -> str:
    """What the model reads of a terminal: what is new, and how things stand."""
    if shell.code is not None:
        await shell.settle()
    parts = [shell.capture.take(MAX_OUTPUT)]
    if not isinstance(shell, Command) and shell.screen.drawn:
        parts.append(f"[screen]\n{shell.screen.text()}")
    if shell.running:
        parts.append(still_running(name))
    elif shell.code is not None:
        await shell.kill()  # what it left
        parts.append("" if shell.timed_out else f"[the shell has ended, exit code {shell.code}]")
    elif not isinstance(shell, Command):
        parts.append("" if shell.timed_out else failed(shell.status))
    parts.append(timed_out(shell.timeout) if shell.timed_out and not shell.running else "")
    return joined(*parts)


def report(outcome: Outcome, timeout: float, moved: str) -> str:
    """What the model reads of a command that has ended: the output, and a line for each thing that was not as usual."""
    pids = " ".join(map(str, outcome.get("background", ())))
    left = f"[still running in the background: {pids}; their further output is lost unless redirected]" if pids else ""
    if outcome.get("timed_out"):
        end = timed_out(timeout)
    elif outcome["signal"]:
        end = f"[killed by {outcome['signal']}]"
    elif outcome["exit_code"] is None:
        end = "[ended, but its exit code is not known]"
    else:
        end = failed(outcome["exit_code"])
    return joined(outcome["output"], left, end, moved)


def joined(output: str, *said: str) -> str:
    return "\n".join(part for part in (output.rstrip(), *said) if part) or "[no output]"


def failed(status: int) -> str:
    if status == 128 + signal.SIGTSTP:
        return "[stopped: fg or bg lets it go on]"
    return f"[exit code {status}]" if status else ""


def timed_out(timeout: float) -> str:
    return (
        f"[timed out after {timeout:g} s and was killed; the output so far is above. Give a longer timeout, "
        "or start it in a session and look again later]"
    )


def still_running(name: str) -> str:
    return (
        f'[still running in session "{name}": name it to look again, with input or keys to answer; keys "kill" ends it]'
    )
