"""The running commands and terminals of one session, and the answers to calls of the tool `terminal`."""

import asyncio
import os
import re
import shlex
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard

import crow_system as system
from anyio import to_thread

from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.terminal import processes
from crow_mcp_server.terminal.command_watchdog import MARK_VARIABLE
from crow_mcp_server.terminal.key_names import to_keystrokes
from crow_mcp_server.terminal.processes import (
    TERM_GRACE,
    PipedCommand,
    ProcessTree,
    inherit_environment,
    name_signal,
)
from crow_mcp_server.terminal.running_command import RunningCommand
from crow_mcp_server.terminal.shell_state import ShellState, has_left_processes
from crow_mcp_server.terminal.tempfiles import TempFolders
from crow_mcp_server.workspace import CommandOutcome, LaunchError, Terminals, Workspace

if TYPE_CHECKING:
    from crow_mcp_server.terminal.interactive_shell import Shell

MAX_COMMAND_BYTES = 100_000  # of an argument of a process, of which Linux allows 131,071; longer ones go into a file
MAX_OUTPUT_CHARACTERS = 30_000  # of one answer
COMMAND_WAIT = 120.0  # seconds after which a tool call is answered although its command still runs
SESSION_WAIT = 30.0  # the same for a command or input in a named session
POLL_WAIT = 10.0  # the same for a tool call that only names a session
MAX_WAIT = 600.0  # seconds; the limit of the argument `wait`
MAX_SESSIONS = 16
MAX_NAMES = 20  # in the note on what a restart has ended
SESSION_NAME = re.compile(r"[\w.-]{1,40}")

COMMAND_ENVIRONMENT = {
    "CDPATH": "",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "SYSTEMD_PAGER": "cat",
    "AWS_PAGER": "",
    "GIT_TERMINAL_PROMPT": "0",
    "GCM_INTERACTIVE": "never",
    "SSH_ASKPASS_REQUIRE": "never",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "PYTHONUNBUFFERED": "1",
    "TERM": "dumb",
    "NO_COLOR": "1",
}
"""Variables of every command: `cd` takes its argument alone, programs wait for no person and print no colours."""
EDITOR_VARIABLES = ("EDITOR", "VISUAL", "GIT_EDITOR", "GIT_SEQUENCE_EDITOR")
TERMINAL_EDITORS = ("vi", "vim", "nvim", "nano", "micro", "emacs", "hx", "kak", "joe", "mg", "ne", "ed")
"""Editors that work in a terminal. Others open a window, which the model does not see."""
TERMINAL_ENVIRONMENT = {"TERM": "xterm-256color", "VIRTUAL_ENV_DISABLE_PROMPT": "1"}
"""Further variables of a command in a terminal, where escape sequences are interpreted."""
NEEDS_TERMINAL = re.compile(
    r"not (?:to |from )?an? (?:input )?(?:tty\b|terminal)|failed tty get|inappropriate ioctl for device|/dev/tty"
    r"|opening terminal|tty present|terminal is required|requires an? (?:interactive )?(?:tty|terminal)|open a new TTY",
    re.IGNORECASE,
)
"""Complaints of programs that have no terminal."""
LEFT_PROCESSES = "[it left processes in the background, which ended with it: run what is to go on in a session]"
NOT_RUN = "[not run: the session had ended; give a command again to open a new one]"
MAX_COMPLAINT_CHARACTERS = 2_000  # at the end of the output, where a complaint is looked for


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


@dataclass(frozen=True)
class TerminalAnswer:
    """The answer to a tool call."""

    text: str
    folder: str = ""
    """The folder in which the next command starts; "" if no command has ended."""
    host_terminal: str = ""
    """The host's id of the terminal in which the command ran."""
    failure: Mapping[str, int | str] = field(default_factory=dict[str, int | str])
    """`exitCode` or `signal` of a command that ended with another exit code than 0; empty otherwise."""
    ended: str = ""
    """Id of the tool call whose `launch` started the command or session that has ended; "" if there is none."""
    opened_by: str = ""
    """Id of the tool call whose `launch` opened the session that this is about; "" if there is none."""


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
        if has_input and arguments.input is None and arguments.keys != "kill" and is_idle(program):
            command = program.recall(arguments.keys)
            echo = f"$ {command}\n"
        if workspace.opened_by and not workspace.launch and arguments.keys != "kill" and has_ended(program):
            self._sessions.pop(name, None)
            text = await report_session(name, program) if program else ""
            return TerminalAnswer(join_parts(text, NOT_RUN), ended=workspace.opened_by)
        if command.strip():
            async with self._opening:
                program = await self._open_shell(workspace, arguments)
                await program.run(command)
                self._note_running(command, program, name)
            if arguments.timeout:
                program.set_timeout(arguments.timeout)
        elif program is None:
            raise ToolRefusal(f"There is no session {name!r}. {self._list_sessions()}")
        elif arguments.keys == "kill":
            del self._sessions[name]
            self._note_told(program)
            await program.kill()
            text = join_parts(program.capture.get_text(MAX_OUTPUT_CHARACTERS), "[killed]")
            return TerminalAnswer(text, ended=program.launched_by)
        elif has_input:
            check_opener(workspace, program)
            await self._send_input(program, arguments)
        wait = SESSION_WAIT if has_input or command else POLL_WAIT
        is_answerable = None
        if not isinstance(program, PipedCommand):
            is_answerable = program.seems_waiting if arguments.wait is None else program.shows_new_prompt
        try:
            wait = wait if arguments.wait is None else arguments.wait
            running = self._running.get(program)
            with workspace.waits(running) if running else nullcontext():
                await program.wait(min(wait, MAX_WAIT), workspace.watch, is_answerable=is_answerable)
        except BaseException:
            if command:
                self._sessions.pop(name, None)
                self._note_told(program)
                await program.kill()
            raise
        if not program.is_running and (isinstance(program, PipedCommand) or program.exit_code is not None):
            self._sessions.pop(name, None)
        if not program.is_running:
            self._note_told(program)
        if isinstance(program, PipedCommand) and not program.is_running:
            return await self._collect_answer(program)
        if isinstance(program, PipedCommand):
            return TerminalAnswer(await report_session(name, program))
        failure = find_shell_failure(program) if command else {}
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


def change_environment(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return an environment with the variables of `changes`, and without those that are None there."""
    changed = {**environment, **changes}
    return {name: value for name, value in changed.items() if value is not None}


async def report_session(name: str, shell: "PipedCommand | Shell") -> str:
    """Return the text for the model about a session: its new output and its state."""
    if shell.exit_code is not None:
        await shell.settle()
    parts = [shell.capture.take_text(MAX_OUTPUT_CHARACTERS)]
    if not isinstance(shell, PipedCommand):
        shell.note_report()
    if not isinstance(shell, PipedCommand) and shell.screen.is_active:
        parts.append(f"[screen]\n{shell.screen.get_text()}")
    if shell.is_running:
        parts.append(format_running(name))
    elif shell.exit_code is not None:
        await shell.kill()  # the processes that it left
        parts.append("" if shell.timed_out else format_end(shell.exit_code))
    elif not isinstance(shell, PipedCommand):
        parts.append("" if shell.timed_out else format_status(shell.status))
    parts.append(format_timeout(shell.timeout) if shell.timed_out and not shell.is_running else "")
    return join_parts(*parts)


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


def find_editor(environment: Mapping[str, str]) -> str:
    """Return the command of the user's editor, or of another one if that does not work in a terminal; "" for none."""
    for name in ("VISUAL", "EDITOR"):
        words = environment.get(name, "").split()
        if words and os.path.basename(words[0]) in TERMINAL_EDITORS and shutil.which(words[0]):
            return environment[name]
    return next((editor for editor in TERMINAL_EDITORS if shutil.which(editor)), "")


def describe_need(output: str) -> str:
    """Return advice if a command that has failed or hangs complains that it has no terminal, else ""."""
    needs = NEEDS_TERMINAL.search(output[-MAX_COMPLAINT_CHARACTERS:])
    return "[this program needs a terminal: run it with a session]" if needs else ""


def format_loss(variables: Sequence[str], sessions: Sequence[str]) -> str:
    """Return the note on what an earlier server knew and this one does not; "" for nothing."""
    parts = [
        f"{what}: {', '.join(names[:MAX_NAMES])}{f' and {more} more' if (more := len(names) - MAX_NAMES) > 0 else ''}"
        for what, names in (("variables are no longer set or unset", variables), ("sessions have ended", sessions))
        if names
    ]
    return f"[the server was restarted since the last command; {'; '.join(parts)}]" if parts else ""


def format_outcome(outcome: CommandOutcome, timeout: float, *notes: str) -> str:
    """Return the text for the model about a command that has ended: the output, what was unusual, further notes."""
    need = describe_need(outcome["output"]) if outcome["exit_code"] != 0 else ""
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
    return join_parts(outcome["output"], left, end, need, *notes)


def find_failure(outcome: CommandOutcome) -> dict[str, int | str]:
    """Return the `exitCode` or the `signal` of a command that failed; an empty dict if it succeeded."""
    if outcome["signal"]:
        return {"signal": outcome["signal"]}
    if outcome.get("timed_out"):
        return {"signal": "SIGKILL"}
    return {"exitCode": outcome["exit_code"]} if outcome["exit_code"] else {}


def find_shell_failure(shell: "Shell") -> dict[str, int | str]:
    """Return the `exitCode` of the command that ended last in a session; an empty dict if it succeeded, or runs."""
    status = shell.status if shell.exit_code is None else shell.exit_code
    return {} if shell.is_running or not status or is_stopped(status) else {"exitCode": status}


def join_parts(output: str, *notes: str) -> str:
    """Return the output as it is, and below it the notes that are not empty, one a line."""
    end = "" if output.endswith("\n") or not output else "\n"
    below = "\n".join(note for note in notes if note)
    if not output.strip():  # some models' servers refuse a text without a visible character
        below = below or ("[nothing but white space]" if output else "[no output]")
    return f"{output}{end}{below}" if below else output


def format_status(status: int) -> str:
    """Return the note on an exit status; "" for 0."""
    if is_stopped(status):
        return "[stopped: fg or bg lets it go on]"
    return f"[exit code {status}]" if status else ""


def format_end(exit_code: int) -> str:
    """Return the note on a terminal whose shell has ended."""
    if exit_code < 0:
        return f"[the shell has ended, killed by {name_signal(-exit_code)}]"
    return f"[the shell has ended, exit code {exit_code}]"


def is_stopped(status: int) -> bool:
    """Tell whether an exit status is that of a command that Ctrl-Z stopped."""
    return status == system.STOP_STATUS


def format_timeout(timeout: float) -> str:
    """Return the note on a command that was killed after a timeout."""
    return (
        f"[timed out after {timeout:g} s and was killed; the output so far is above. Give a longer timeout, "
        "or start it in a session and look again later]"
    )


def format_running(name: str) -> str:
    """Return the note on a session whose command still runs."""
    return (
        f'[still running in session "{name}": name it to look again, with input or keys to answer; keys "kill" ends it]'
    )
