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

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.terminal import processes
from crow_mcp_server.terminal.processes import MARK_VARIABLE, TERM_GRACE, PipedCommand, ProcessTree, inherit_environment
from crow_mcp_server.terminal.shell_state import ShellState
from crow_mcp_server.terminal.tempfiles import TempFolders
from crow_mcp_server.workspace import CommandOutcome, Terminals, Workspace

if TYPE_CHECKING:
    from crow_mcp_server.terminal.shell import Shell

MAX_OUTPUT_CHARACTERS = 30_000  # characters the model is shown
COMMAND_WAIT = 120.0  # seconds until a call is answered though its command runs on
SESSION_WAIT = 30.0  # the same for a terminal of its own
POLL_WAIT = 10.0  # the same for a call that only looks
MAX_WAIT = 600.0
MAX_SESSIONS = 16
SESSION_NAME = re.compile(r"[\w.-]{1,40}")

COMMAND_ENVIRONMENT = {
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
TERMINAL_ENVIRONMENT = {"TERM": "xterm-256color", "VIRTUAL_ENV_DISABLE_PROMPT": "1"}
"""Laid over that in a terminal, whose escape sequences are understood."""


@dataclass(frozen=True)
class TerminalArguments:
    """A call's arguments; what was not given is empty."""

    command: str = ""
    session: str = ""
    input: str | None = None
    keys: str = ""
    wait: float | None = None
    timeout: float | None = None
    cwd: str = ""


@dataclass(frozen=True)
class TerminalAnswer:
    """What comes of a call."""

    text: str
    folder: str = ""
    """Where the next command begins, if one was run."""
    host_terminal: str = ""
    """The host's own name for where it ran."""


class TerminalSessions:
    """The commands and terminals of one session of the host."""

    def __init__(self, temp_folders: TempFolders, folder: str) -> None:
        self.shell_state = ShellState(folder)
        self._temp_folders = temp_folders
        self._sessions: dict[str, PipedCommand | Shell] = {}
        """What runs on or stays, by the name the model knows."""
        self._background: list[PipedCommand] = []
        """Commands that have ended and left something running."""
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        """End all that runs."""
        programs: list[ProcessTree] = [*self._sessions.values(), *self._background]
        self._sessions, self._background = {}, []
        await asyncio.gather(*(program.kill() for program in programs))

    async def run(self, workspace: Workspace, arguments: TerminalArguments) -> TerminalAnswer:
        """Do what a call asks for. Raises Refusal."""
        if workspace.folder:
            self.shell_state.folder = workspace.folder
        if "\0" in arguments.command:
            raise ToolRefusal("command has a NUL in it. Give the shell command to run.")
        if arguments.session:
            return TerminalAnswer(await self._use_session(workspace, arguments))
        if arguments.keys or arguments.input is not None:
            raise ToolRefusal(f"input and keys go to a session: name it. {self._list_sessions()}")
        if not arguments.command.strip():
            raise ToolRefusal("command is empty. Give the shell command to run.")
        if workspace.terminals and arguments.wait is None:  # what may outlive its call stays here
            return await self._run_at_host(workspace, workspace.terminals, arguments)
        return await self._run_locally(workspace, arguments)

    async def _run_locally(self, workspace: Workspace, arguments: TerminalArguments) -> TerminalAnswer:
        """Run a command without input as a process of this machine."""
        folder = await to_thread.run_sync(self._find_folder, workspace, arguments.cwd)
        env = self._make_environment(folder, COMMAND_ENVIRONMENT)
        command, learn = self._track_state(arguments.command, env, folder)
        program = PipedCommand(
            env[MARK_VARIABLE], self._temp_folders.open_capture(), self._temp_folders.watchdog, learn
        )
        try:
            await program.run(["-c", command], cwd=folder, env=env)
        except (OSError, ValueError) as error:
            learn()
            reason = error.strerror if isinstance(error, OSError) else str(error)  # longer than the system takes
            raise ToolRefusal(
                f"The command could not start: {reason}. Write a long script to a file, run that."
            ) from None
        if arguments.timeout:
            program.set_timeout(arguments.timeout)
        wait = arguments.timeout + 2 * TERM_GRACE if arguments.timeout else COMMAND_WAIT
        wait = wait if arguments.wait is None else arguments.wait
        try:
            await program.wait(min(wait, MAX_WAIT), workspace.watch)
        except BaseException:
            await program.kill()
            learn()
            raise
        if not program.is_running or program.timed_out:
            return await self._collect_answer(program)
        name = next(name for name in map(str, range(1, 10**9)) if name not in self._sessions)
        self._sessions[name] = program
        return TerminalAnswer(join_parts(program.capture.take_text(MAX_OUTPUT_CHARACTERS), format_running(name)))

    async def _collect_answer(self, program: PipedCommand) -> TerminalAnswer:
        """What comes of a command that has ended."""
        before = self.shell_state.folder
        outcome = await program.collect_outcome(MAX_OUTPUT_CHARACTERS)
        program.learn()
        for left in [left for left in self._background if not left.has_survivors()]:
            self._background.remove(left)
            left.release()
        if outcome.get("background"):
            self._background.append(program)
        return TerminalAnswer(
            format_outcome(outcome, program.timeout, self._describe_move(before)), self.shell_state.folder
        )

    async def _run_at_host(
        self, workspace: Workspace, terminals: Terminals, arguments: TerminalArguments
    ) -> TerminalAnswer:
        """Have the host run a command in a terminal of its own."""
        folder = await to_thread.run_sync(self._find_folder, workspace, arguments.cwd)
        before, timeout = self.shell_state.folder, min(arguments.timeout or COMMAND_WAIT, MAX_WAIT)
        env = self.shell_state.apply_to(dict.fromkeys(self._temp_folders.hidden_env, "") | COMMAND_ENVIRONMENT) | {
            "PWD": folder
        }
        command, learn = self._track_state(arguments.command, env, folder, env_is_unknown=True)
        try:
            outcome = await terminals.run(
                command, cwd=folder, env=env, timeout=timeout, output_limit=MAX_OUTPUT_CHARACTERS
            )
        except OSError as error:
            raise ToolRefusal(f"The end of the command was not seen: {error}. What it did until then stays.") from None
        finally:
            learn()
        capture = self._temp_folders.open_capture()
        capture.feed(outcome["output"].encode(errors="replace"))
        outcome["output"] = capture.get_text(MAX_OUTPUT_CHARACTERS)
        capture.close()
        text = format_outcome(outcome, timeout, self._describe_move(before))
        return TerminalAnswer(text, self.shell_state.folder, outcome.get("terminal", ""))

    async def _use_session(self, workspace: Workspace, arguments: TerminalArguments) -> str:
        """Run a command in a terminal that stays, or talk to what runs there."""
        name, program = arguments.session, self._sessions.get(arguments.session)
        gives = arguments.input is not None or bool(arguments.keys)
        if arguments.command.strip():
            if gives:
                raise ToolRefusal("Not run: give either a command, or input or keys for what runs already.")
            async with self._opening:
                program = await self._open_shell(workspace, arguments)
                await program.run(arguments.command)
            if arguments.timeout:
                program.set_timeout(arguments.timeout)
        elif program is None:
            raise ToolRefusal(f"There is no session {name!r}. {self._list_sessions()}")
        elif arguments.keys == "kill":
            del self._sessions[name]
            await program.kill()
            return join_parts(program.capture.get_text(MAX_OUTPUT_CHARACTERS), "[killed]")
        elif gives:
            await self._send_input(program, arguments)
        wait = SESSION_WAIT if gives or arguments.command else POLL_WAIT
        wait = wait if arguments.wait is None else arguments.wait
        try:
            await program.wait(min(wait, MAX_WAIT), workspace.watch, patient=arguments.wait is not None)
        except BaseException:
            if arguments.command:
                self._sessions.pop(name, None)
                await program.kill()
            raise
        if not program.is_running and (isinstance(program, PipedCommand) or program.code is not None):
            self._sessions.pop(name, None)
        if isinstance(program, PipedCommand) and not program.is_running:
            return (await self._collect_answer(program)).text
        return await describe_session(name, program)

    async def _open_shell(self, workspace: Workspace, arguments: TerminalArguments) -> "Shell":
        """The terminal that a command is for, made if there is none."""
        from crow_mcp_server.terminal.shell import Shell  # not at the top: Windows has no such terminals

        name, program = arguments.session, self._sessions.get(arguments.session)
        if program and program.is_running:
            raise ToolRefusal(
                f"Not run: in session {name!r} something else is running. Answer it with input or keys (C-c stops it), "
                "or use another session."
            )
        if isinstance(program, Shell) and program.code is None:
            if arguments.cwd:
                raise ToolRefusal(f"Not run: cwd is for a new session, and {name!r} is open. Use cd.")
            return program
        if not SESSION_NAME.fullmatch(name):
            raise ToolRefusal(f"Not run: {name[:60]!r} is no name for a session. Use a word, such as 'server'.")
        if len(self._sessions) >= MAX_SESSIONS:
            raise ToolRefusal(f'Not run: too many sessions. End one with keys "kill". {self._list_sessions()}')
        folder = await to_thread.run_sync(self._find_folder, workspace, arguments.cwd)
        env = self._make_environment(folder, COMMAND_ENVIRONMENT | TERMINAL_ENVIRONMENT)
        shell = Shell(env[MARK_VARIABLE], self._temp_folders.open_capture(), self._temp_folders.watchdog)
        try:
            await shell.open(cwd=folder, env=env)
        except OSError as error:
            raise ToolRefusal(
                f"No terminal could be opened: {error.strerror}. Run the command without session."
            ) from None
        except BaseException:
            await shell.kill()
            raise
        self._sessions[name] = shell
        return shell

    async def _send_input(self, program: "PipedCommand | Shell", arguments: TerminalArguments) -> None:
        """Give input to what runs."""
        name = arguments.session
        if isinstance(program, PipedCommand):
            if arguments.keys != "C-c":
                raise ToolRefusal(
                    f'{name!r} takes no input; only keys "C-c" or "kill". Start what asks with a session.'
                )
            await program.send_signal(signal.SIGINT)
        elif not program.is_running:
            raise ToolRefusal(f"Nothing runs in session {name!r} that could read that. Give a command.")
        else:
            try:
                await program.type(arguments.input, arguments.keys)
            except TimeoutError:
                raise ToolRefusal(f"What runs in session {name!r} does not read its input. Wait, or stop it.") from None

    def _find_folder(self, workspace: Workspace, cwd: str) -> str:
        """The folder that a command begins in."""
        folder = os.path.join(workspace.cwd, os.path.expanduser(cwd)) if cwd else self.shell_state.folder
        if os.path.isdir(folder):
            return folder
        what = "is not a folder" if os.path.exists(folder) else "does not exist"
        raise ToolRefusal(f"The folder {folder} {what}, so the command was not run. Give cwd, such as {workspace.cwd}.")

    def _make_environment(self, folder: str, over: dict[str, str]) -> dict[str, str]:
        """The environment of a command, with a mark of its own."""
        env = self.shell_state.apply_to(inherit_environment(self._temp_folders.hidden_env) | over)
        marks = f"{os.environ.get(MARK_VARIABLE, '')}:{uuid.uuid4().hex}"  # ours may be a command's child itself
        return env | {"PWD": folder, MARK_VARIABLE: marks}

    def _track_state(
        self, command: str, env: dict[str, str], folder: str, *, env_is_unknown: bool = False
    ) -> tuple[str, Callable[[], None]]:
        """A command that will tell what it leaves to the next, and how to learn that once it has ended."""
        surroundings, path = self.shell_state, os.path.join(self._temp_folders.state_folder, uuid.uuid4().hex)
        script = f"{path}.sh"
        with open(script, "w", encoding="utf-8") as file:
            file.write(surroundings.make_script(path, env.get("BASH_ENV", ""), env_is_unknown=env_is_unknown))
        if os.path.basename(processes.SHELL) == "bash":
            env["BASH_ENV"] = script
        else:
            command = f". {shlex.quote(script)}\n{command}"

        def learn() -> None:
            surroundings.update(path, None if env_is_unknown else env, folder)
            with suppress(OSError):
                os.unlink(script)

        return command, learn

    def _describe_move(self, before: str) -> str:
        folder = self.shell_state.folder
        return f"[now in {folder}]" if folder != before else ""

    def _list_sessions(self) -> str:
        return f"Open are: {', '.join(self._sessions)}." if self._sessions else "None is open."


async def describe_session(name: str, shell: "PipedCommand | Shell") -> str:
    """What the model reads of a terminal: what is new, and how things stand."""
    if shell.code is not None:
        await shell.settle()
    parts = [shell.capture.take_text(MAX_OUTPUT_CHARACTERS)]
    if not isinstance(shell, PipedCommand) and shell.screen.is_active:
        parts.append(f"[screen]\n{shell.screen.get_text()}")
    if shell.is_running:
        parts.append(format_running(name))
    elif shell.code is not None:
        await shell.kill()  # what it left
        parts.append("" if shell.timed_out else f"[the shell has ended, exit code {shell.code}]")
    elif not isinstance(shell, PipedCommand):
        parts.append("" if shell.timed_out else format_status(shell.status))
    parts.append(format_timeout(shell.timeout) if shell.timed_out and not shell.is_running else "")
    return join_parts(*parts)


def format_outcome(outcome: CommandOutcome, timeout: float, moved: str) -> str:
    """What the model reads of a command that has ended: the output, and a line for each thing that was not as usual."""
    pids = " ".join(map(str, outcome.get("background", ())))
    left = f"[still running in the background: {pids}; their further output is lost unless redirected]" if pids else ""
    if outcome.get("timed_out"):
        end = format_timeout(timeout)
    elif outcome["signal"]:
        end = f"[killed by {outcome['signal']}]"
    elif outcome["exit_code"] is None:
        end = "[ended, but its exit code is not known]"
    else:
        end = format_status(outcome["exit_code"])
    return join_parts(outcome["output"], left, end, moved)


def join_parts(output: str, *said: str) -> str:
    return "\n".join(part for part in (output.rstrip(), *said) if part) or "[no output]"


def format_status(status: int) -> str:
    if status == 128 + signal.SIGTSTP:
        return "[stopped: fg or bg lets it go on]"
    return f"[exit code {status}]" if status else ""


def format_timeout(timeout: float) -> str:
    return (
        f"[timed out after {timeout:g} s and was killed; the output so far is above. Give a longer timeout, "
        "or start it in a session and look again later]"
    )


def format_running(name: str) -> str:
    return (
        f'[still running in session "{name}": name it to look again, with input or keys to answer; keys "kill" ends it]'
    )
