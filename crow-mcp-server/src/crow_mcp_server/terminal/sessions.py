"""The running commands and terminals of one session, and the answers to calls of the tool `terminal`."""

import asyncio
import os
import re
import shlex
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard

import crow_system as system
from anyio import to_thread

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.terminal import processes
from crow_mcp_server.terminal.command_environment import (
    COMMAND_ENVIRONMENT,
    EDITOR_VARIABLES,
    TERMINAL_ENVIRONMENT,
    change_environment,
    find_editor,
)
from crow_mcp_server.terminal.command_watchdog import MARK_VARIABLE
from crow_mcp_server.terminal.key_names import to_keystrokes
from crow_mcp_server.terminal.processes import TERM_GRACE, PipedCommand, ProcessTree, inherit_environment
from crow_mcp_server.terminal.running_command import RunningCommand
from crow_mcp_server.terminal.shell_state import ShellState, has_left_processes
from crow_mcp_server.terminal.tempfiles import TempFolders
from crow_mcp_server.terminal.terminal_answers import (
    MAX_OUTPUT_CHARACTERS,
    TerminalAnswer,
    describe_need,
    find_failure,
    find_shell_failure,
    format_loss,
    format_outcome,
    format_running,
    join_parts,
    report_session,
)
from crow_mcp_server.workspace import LaunchError, Terminals, Workspace

if TYPE_CHECKING:
    from crow_mcp_server.terminal.interactive_shell import Shell

MAX_COMMAND_BYTES = 100_000  # of an argument of a process, of which Linux allows 131,071; longer ones go into a file
COMMAND_WAIT = 120.0  # seconds after which a tool call is answered although its command still runs
SESSION_WAIT = 30.0  # the same for a command or input in a named session
POLL_WAIT = 10.0  # the same for a tool call that only names a session
MAX_WAIT = 600.0  # seconds; the limit of the argument `wait`
MAX_SESSIONS = 16
SESSION_NAME = re.compile(r"[\w.-]{1,40}")

LEFT_PROCESSES = "[it left processes in the background, which ended with it: run what is to go on in a session]"
NOT_RUN = "[not run: the session had ended; give a command again to open a new one]"


@dataclass(frozen=True)
class TerminalArguments:
    """The arguments of a tool call; those not given are empty or None."""

    command: str = ""
    session: str = ""
    input: str | None = None
    keys: str = ""
    wait: float | None = None
    timeout: float | None = None
    cwd: str = ""


class LastingState(TypedDict, total=False):
    """The state that lasts from one tool call to the next; keys without a value are left out."""

    folder: str
    """The folder in which the next command starts."""
    variables: list[str]
    """The names of the environment variables that commands have set or unset."""
    environment: str
    """A name of the variables as they are, new after each change."""
    sessions: list[str]
    """The names of the open sessions."""


class OtherEnvironment(ToolRefusal):
    """Refuses a command that the host has judged for other variables than it would get."""

    def __init__(self) -> None:
        super().__init__(
            "This was not run: another command has changed variables since it was allowed. Run it again if it is still "
            "right."
        )


class TerminalSessions:
    """The running commands and named terminals ("sessions" of the tool) of one session of the host."""

    def __init__(self, temp_folders: TempFolders, folder: str, earlier: Mapping[str, Any]) -> None:
        """`earlier` is the LastingState in which an earlier server left the session; empty if there was none."""
        last = str(earlier.get("folder", ""))
        self.shell_state = ShellState(last if os.path.isdir(last) else folder)
        self._loss = format_loss(earlier.get("variables", ()), earlier.get("sessions", ()))
        """A note for the first answer; "" if there is nothing to tell."""
        self._temp_folders = temp_folders
        self._sessions: dict[str, PipedCommand | Shell] = {}
        """The commands that still run and the terminals, by the names that the model uses."""
        self._running: dict[ProcessTree, RunningCommand] = {}
        """The commands of `_sessions` that have not been told to the end."""
        self._background: list[PipedCommand] = []
        """Commands that have ended and left processes in the background."""
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        """Kill all processes."""
        programs: list[ProcessTree] = [*self._sessions.values(), *self._background]
        self._sessions, self._running, self._background = {}, {}, []
        await asyncio.gather(*(program.kill() for program in programs))

    @property
    def lasting_state(self) -> LastingState:
        """The state after the last tool call."""
        state = LastingState(folder=self.shell_state.folder)
        if variables := sorted(self.shell_state.changes.keys() - {"OLDPWD"}):
            state["variables"] = variables
            state["environment"] = self.shell_state.environment
        if self._sessions:
            state["sessions"] = [*self._sessions]
        return state

    async def run(self, workspace: Workspace, arguments: TerminalArguments) -> TerminalAnswer:
        """Answer a tool call. Raises ToolRefusal."""
        answer = await self._answer(workspace, arguments)
        loss, self._loss = self._loss, ""
        return replace(answer, text=join_parts(answer.text, loss))

    async def _answer(self, workspace: Workspace, arguments: TerminalArguments) -> TerminalAnswer:
        if workspace.folder:
            self.shell_state.folder = workspace.folder
        if "\0" in arguments.command:
            raise ToolRefusal("command has a NUL in it. Give the shell command to run.")
        if arguments.session:
            return await self._use_session(workspace, arguments)
        if arguments.keys or arguments.input is not None:
            raise ToolRefusal(f"input and keys go to a session: name it. {self._list_sessions()}")
        if not arguments.command.strip():
            raise ToolRefusal("command is empty. Give the shell command to run.")
        may_outlive = arguments.wait is not None  # the call
        if workspace.terminals and not may_outlive and not workspace.launch:
            return await self._run_at_host(workspace, workspace.terminals, arguments)
        return await self._run_locally(workspace, arguments)

    async def _run_locally(self, workspace: Workspace, arguments: TerminalArguments) -> TerminalAnswer:
        """Run a command without input as a process of this machine."""
        folder = await to_thread.run_sync(self._find_folder, workspace, arguments.cwd)
        editor = dict.fromkeys(EDITOR_VARIABLES, self._temp_folders.no_editor)
        self._check_environment(workspace)
        env = change_environment(self._make_environment(folder, COMMAND_ENVIRONMENT | editor), workspace.env)
        launched = workspace.launch is not None
        command, script, update_state = self._track_state(arguments.command, env, folder, lists_processes=launched)
        program = PipedCommand(
            env[MARK_VARIABLE],
            self._temp_folders.open_capture(from_terminal=False),
            self._temp_folders.watchdog,
            update_state,
        )
        program.launched_by, program.state_path = (workspace.call, script.removesuffix(".sh")) if launched else ("", "")
        try:
            readable = self._temp_folders.readable
            await program.run(command, cwd=folder, env=env, launch=workspace.launch, readable=readable)
        except LaunchError as error:
            update_state()
            raise ToolRefusal(f"The command was not run: {error}") from None
        except (OSError, ValueError) as error:
            update_state()
            reason = error.strerror if isinstance(error, OSError) else str(error)  # for instance because it is too long
            raise ToolRefusal(
                f"The command could not start: {reason}. Write a long script to a file, run that."
            ) from None
        if arguments.timeout:
            program.set_timeout(arguments.timeout)
        wait = arguments.timeout + 2 * TERM_GRACE if arguments.timeout else COMMAND_WAIT
        wait = wait if arguments.wait is None else arguments.wait
        running, name = self._note_running(arguments.command, program), ""
        try:
            with workspace.waits(running):
                await program.wait(min(wait, MAX_WAIT), workspace.watch)
                if program.is_running and not program.timed_out:
                    name = next(name for name in map(str, range(1, 10**9)) if name not in self._sessions)
                    self._sessions[name], running.name = program, name
        except BaseException:
            self._note_told(program)
            await program.kill()
            update_state()
            raise
        if not name:
            return await self._collect_answer(program)
        output = program.capture.take_text(MAX_OUTPUT_CHARACTERS)
        return TerminalAnswer(join_parts(output, describe_need(output), format_running(name)))

    def _note_running(self, command: str, program: ProcessTree, name: str = "") -> RunningCommand:
        """Note that a command has started; it may have ended already."""
        running = self._running[program] = RunningCommand(command, program, name)
        program.on_over = running.finish
        if not program.is_running:
            running.finish()
        return running

    def _note_told(self, program: ProcessTree) -> None:
        """Note that the answer to a tool call tells the end of a command."""
        if running := self._running.pop(program, None):
            running.is_told = True

    async def _collect_answer(self, program: PipedCommand) -> TerminalAnswer:
        """Return the answer to a command that has ended, and take over its shell state."""
        self._note_told(program)
        before = self.shell_state.folder
        outcome = await program.collect_outcome(MAX_OUTPUT_CHARACTERS)
        unshown = program.capture.describe_unshown()
        left = LEFT_PROCESSES if program.launched_by and has_left_processes(program.state_path) else ""
        program.update_state()
        for ended in [command for command in self._background if not command.has_survivors()]:
            self._background.remove(ended)
            ended.release()
        if outcome.get("background"):
            self._background.append(program)
        return TerminalAnswer(
            format_outcome(outcome, program.timeout, left, unshown, self._describe_move(before)),
            self.shell_state.folder,
            failure=find_failure(outcome),
            ended=program.launched_by,
        )

    async def _run_at_host(
        self, workspace: Workspace, terminals: Terminals, arguments: TerminalArguments
    ) -> TerminalAnswer:
        """Run a command in a terminal of the host."""
        folder = await to_thread.run_sync(self._find_folder, workspace, arguments.cwd)
        before, timeout = self.shell_state.folder, min(arguments.timeout or COMMAND_WAIT, MAX_WAIT)
        hidden = dict.fromkeys(self._temp_folders.hidden_env, "")
        editor = dict.fromkeys(EDITOR_VARIABLES, self._temp_folders.no_editor)
        self._check_environment(workspace)
        env = change_environment(
            hidden | COMMAND_ENVIRONMENT | editor | {"PWD": folder, MARK_VARIABLE: "host"}, workspace.env
        )
        command, script, update_state = self._track_state(
            arguments.command, env, folder, at_host=True, given=workspace.env
        )
        try:
            outcome = await terminals.run(
                command, script=script, cwd=folder, env=env, timeout=timeout, output_limit=MAX_OUTPUT_CHARACTERS
            )
        except OSError as error:
            raise ToolRefusal(f"The end of the command was not seen: {error}. What it did until then stays.") from None
        finally:
            update_state()
        if refusal := outcome.get("refusal"):
            if not outcome.get("may_run_here"):
                raise ToolRefusal(f"The command was not run: {refusal}.")
            answer = await self._run_locally(workspace, arguments)
            return replace(answer, text=join_parts(answer.text, f"[not in the editor's terminal: {refusal}]"))
        printed = outcome["output"]
        capture = self._temp_folders.open_capture(from_terminal=printed.count("\r\n") == printed.count("\n"))
        capture.feed(printed.encode(errors="replace"))
        outcome["output"] = capture.get_text(MAX_OUTPUT_CHARACTERS)
        capture.close()
        text = format_outcome(outcome, timeout, capture.describe_unshown(), self._describe_move(before))
        return TerminalAnswer(text, self.shell_state.folder, outcome.get("terminal", ""), find_failure(outcome))

    async def _use_session(self, workspace: Workspace, arguments: TerminalArguments) -> TerminalAnswer:
        """Run a command in a named session, send input to it, or only report on it."""
        name, program = arguments.session, self._sessions.get(arguments.session)
        has_input = arguments.input is not None or bool(arguments.keys)
        command, echo = arguments.command, ""
        if command.strip() and has_input:
            raise ToolRefusal("Not run: give either a command, or input or keys for what runs already.")
        kills = arguments.keys == "kill"
        if has_input and arguments.input is None and not kills and is_idle(program):
            command = program.recall(arguments.keys)
            echo = f"$ {command}\n"
        if workspace.opened_by and not workspace.launch and not kills and has_ended(program):
            self._sessions.pop(name, None)
            text = await report_session(name, program) if program else ""
            return TerminalAnswer(join_parts(text, NOT_RUN), ended=workspace.opened_by)
        if command.strip():
            program = await self._run_in_shell(workspace, arguments, command)
        elif program is None:
            raise ToolRefusal(f"There is no session {name!r}. {self._list_sessions()}")
        elif kills:
            return await self._kill_session(name, program)
        elif has_input:
            check_opener(workspace, program)
            await self._send_input(program, arguments)
        try:
            await self._wait_in_session(
                workspace, arguments, program, SESSION_WAIT if has_input or command else POLL_WAIT
            )
        except BaseException:
            if command:
                await self._kill_session(name, program)
            raise
        return await self._report_session(name, program, echo, has_command=bool(command))

    async def _run_in_shell(self, workspace: Workspace, arguments: TerminalArguments, command: str) -> "Shell":
        """Begin a command in a named session."""
        async with self._opening:
            shell = await self._open_shell(workspace, arguments)
            await shell.run(command)
            self._note_running(command, shell, arguments.session)
        if arguments.timeout:
            shell.set_timeout(arguments.timeout)
        return shell

    async def _kill_session(self, name: str, program: "PipedCommand | Shell") -> TerminalAnswer:
        """End a session with its programs."""
        self._sessions.pop(name, None)
        self._note_told(program)
        await program.kill()
        text = join_parts(program.capture.get_text(MAX_OUTPUT_CHARACTERS), "[killed]")
        return TerminalAnswer(text, ended=program.launched_by)

    async def _wait_in_session(
        self, workspace: Workspace, arguments: TerminalArguments, program: "PipedCommand | Shell", wait: float
    ) -> None:
        """Wait for a program, or until it seems to wait for input."""
        is_answerable = None
        if not isinstance(program, PipedCommand):
            is_answerable = program.seems_waiting if arguments.wait is None else program.shows_new_prompt
        wait = wait if arguments.wait is None else arguments.wait
        running = self._running.get(program)
        with workspace.waits(running) if running else nullcontext():
            await program.wait(min(wait, MAX_WAIT), workspace.watch, is_answerable=is_answerable)

    async def _report_session(
        self, name: str, program: "PipedCommand | Shell", echo: str, *, has_command: bool
    ) -> TerminalAnswer:
        """Return the answer about a session, which is forgotten if it has ended."""
        if not program.is_running and (isinstance(program, PipedCommand) or program.exit_code is not None):
            self._sessions.pop(name, None)
        if not program.is_running:
            self._note_told(program)
        if isinstance(program, PipedCommand):
            if program.is_running:
                return TerminalAnswer(await report_session(name, program))
            return await self._collect_answer(program)
        failure = find_shell_failure(program) if has_command else {}
        ended = program.launched_by if program.exit_code is not None else ""
        text = echo + await report_session(name, program)
        return TerminalAnswer(text, failure=failure, ended=ended, opened_by="" if ended else program.launched_by)

    async def _open_shell(self, workspace: Workspace, arguments: TerminalArguments) -> "Shell":
        """Return the idle terminal of the session that a command is for; open it if there is none."""
        if not system.HAS_TERMINALS:
            raise ToolRefusal("There are no terminals on Windows. Run the command without session, or crow under WSL.")
        from crow_mcp_server.terminal.interactive_shell import Shell  # not at the top: most sessions open none

        name, program = arguments.session, self._sessions.get(arguments.session)
        if program and program.is_running:
            raise ToolRefusal(
                f"Not run: in session {name!r} something else is running. Answer it with input or keys (C-c stops it), "
                "or use another session."
            )
        if isinstance(program, Shell) and program.exit_code is None:
            if arguments.cwd:
                raise ToolRefusal(f"Not run: cwd is for a new session, and {name!r} is open. Use cd.")
            check_opener(workspace, program)
            return program
        if not SESSION_NAME.fullmatch(name):
            raise ToolRefusal(f"Not run: {name[:60]!r} is no name for a session. Use a word, such as 'server'.")
        if len(self._sessions) >= MAX_SESSIONS:
            raise ToolRefusal(f'Not run: too many sessions. End one with keys "kill". {self._list_sessions()}')
        folder = await to_thread.run_sync(self._find_folder, workspace, arguments.cwd)
        editor = dict.fromkeys(EDITOR_VARIABLES, find_editor(os.environ) or self._temp_folders.no_editor)
        env = self._make_environment(folder, COMMAND_ENVIRONMENT | TERMINAL_ENVIRONMENT | editor)
        env = change_environment(env, workspace.env)
        capture = self._temp_folders.open_capture(from_terminal=True)
        shell = Shell(env[MARK_VARIABLE], capture, self._temp_folders.watchdog)
        shell.launched_by = workspace.call if workspace.launch else ""
        try:
            await shell.open(cwd=folder, env=env, launch=workspace.launch, readable=self._temp_folders.readable)
        except LaunchError as error:
            capture.close()
            raise ToolRefusal(f"No terminal was opened: {error}") from None
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
        """Send input or keys to a running program."""
        name = arguments.session
        if isinstance(program, PipedCommand):
            if arguments.input is not None or to_keystrokes(arguments.keys) != ["\x03"]:
                raise ToolRefusal(
                    f'{name!r} takes no input; only keys "C-c" or "kill". Start what asks with a session.'
                )
            await program.send_signal(signal.SIGINT)
        elif not program.is_running:
            raise ToolRefusal(
                f"Nothing runs in session {name!r} that could read that. Give a command; "
                'keys "Up Enter" run the last one again.'
            )
        else:
            try:
                await program.type(arguments.input, arguments.keys)
            except TimeoutError:
                raise ToolRefusal(f"What runs in session {name!r} does not read its input. Wait, or stop it.") from None

    def _find_folder(self, workspace: Workspace, cwd: str) -> str:
        """Return the folder in which a command starts."""
        folder = os.path.join(workspace.cwd, os.path.expanduser(cwd)) if cwd else self.shell_state.folder
        if os.path.isdir(folder):
            return folder
        what = "is not a folder" if os.path.exists(folder) else "does not exist"
        raise ToolRefusal(f"The folder {folder} {what}, so the command was not run. Give cwd, such as {workspace.cwd}.")

    def _make_environment(self, folder: str, over: dict[str, str]) -> dict[str, str]:
        """Return the environment of a command: the inherited one, `over`, the changes by commands, and a new mark."""
        env = self.shell_state.apply_to(inherit_environment(self._temp_folders.hidden_env) | over)
        marks = f"{os.environ.get(MARK_VARIABLE, '')}:{uuid.uuid4().hex}"  # this process may have a mark, too
        return env | {"PWD": folder, MARK_VARIABLE: marks}

    def _check_environment(self, workspace: Workspace) -> None:
        """Raise OtherEnvironment if the host has judged a command for other variables than it would get."""
        if workspace.environment is not None and workspace.environment != self.shell_state.environment:
            raise OtherEnvironment

    def _track_state(
        self,
        command: str,
        env: dict[str, str],
        folder: str,
        *,
        at_host: bool = False,
        given: Mapping[str, str | None] | None = None,
        lists_processes: bool = False,
    ) -> tuple[str, str, Callable[[], None]]:
        """Make a command save its shell state.

        Return the command to run, the path of the script that saves the state, and a function that takes over the state
        after the command has ended. Unless it runs at the host, `env` or the command is changed so that the shell reads
        the script. The path is empty if there is no script.
        """
        if not system.HAS_TERMINALS:  # PowerShell: nothing persists
            return command, "", lambda: None
        state, path = self.shell_state, os.path.join(self._temp_folders.state_folder, uuid.uuid4().hex)
        if lists_processes:  # a folder of its own, as the command may write nothing else here
            os.mkdir(path, 0o700)
            path = os.path.join(path, "state")
        script, long_command = f"{path}.sh", f"{path}.command"
        if len(data := command.encode(errors="replace")) > MAX_COMMAND_BYTES:
            with open(long_command, "wb") as file:
                file.write(data)
            command = f'eval "$(command -p cat {shlex.quote(long_command)})"'
        with open(script, "w", encoding="utf-8") as file:
            before = env.get("BASH_ENV", "")
            text = state.make_script(
                path, before, env_is_unknown=at_host, given=given or {}, lists_processes=lists_processes
            )
            file.write(text)
        if at_host:
            pass  # a host may refuse variables that run code
        elif os.path.basename(processes.SHELL) == "bash":
            env["BASH_ENV"] = script
        else:
            command = f". {shlex.quote(script)}\n{command}"

        def update_state() -> None:
            state.update(path, None if at_host or lists_processes else env, folder)
            for temporary in (script, long_command):
                with suppress(OSError):
                    os.unlink(temporary)
            if lists_processes:
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)

        return command, script, update_state

    def _describe_move(self, before: str) -> str:
        folder = self.shell_state.folder
        return f"[now in {folder}]" if folder != before else ""

    def _list_sessions(self) -> str:
        names = f"Open are: {', '.join(self._sessions)}." if self._sessions else "None is open."
        return f"{names} {self._loss}".rstrip()


def check_opener(workspace: Workspace, program: "PipedCommand | Shell") -> None:
    """Raise ToolRefusal if the host has judged a tool call for a session that another call has opened."""
    if workspace.opened_by is not None and workspace.opened_by != program.launched_by:
        raise ToolRefusal("Not run: the session is another one than when this was allowed. Look at it, then try again.")


def has_ended(program: "PipedCommand | Shell | None") -> bool:
    """Return whether there is no terminal any more."""
    return program is None or (not isinstance(program, PipedCommand) and program.exit_code is not None)


def is_idle(program: "PipedCommand | Shell | None") -> "TypeGuard[Shell]":
    """Return whether a program is a shell that waits for a command."""
    return program is not None and not isinstance(program, PipedCommand) and not program.is_running
