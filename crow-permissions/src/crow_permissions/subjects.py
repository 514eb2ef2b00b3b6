"""The subject of a tool call: the text that the patterns of rules are matched against, and what an answer covers.

The subject of a `terminal` call is `cd FOLDER && COMMAND` if the command does not start in the working directory. It is
the typed text if that goes to a terminal session. Paths are relative to the working directory.
"""

import os
import re
from collections.abc import Sequence

import msgspec
from crow_core.content import path_from_uri
from crow_core.mcp.tool import ToolCall
from crow_core.paths import is_below, to_relative, to_subject
from crow_core.session.session import Session
from crow_system import IGNORES_CASE

OPERATORS = re.compile(r"[;&|\n\r`()<>]|\$\(")
"""Joins commands, substitutes or redirects: a command with any of these is more than one simple command."""

SHELL_QUOTES = re.compile(r"\\\n|[\"'\\]")
"""Characters that the shell removes from a word."""

COMMAND_PREFIXES = re.compile(
    r"((\w+\+?=\S*|[{!]|if|then|elif|else|while|until|do|time|command|builtin|exec|eval|nohup|nice|timeout|xargs|sudo"
    r"|doas|env|(\S*/)?(ba|da|z|k)?sh)( -\S+| [\d.]+[smhd]?)* )*(\S*/)?"
)
"""Words that may stand before the command that really runs."""


PROCESS_FOLDER = re.compile(r"/+(?:proc|dev)/(?:.*/)?(?:cwd|root|fd/+\d+)(?=/|$)")
"""The beginning of a path that means another file in each process."""
STACKED_FOLDER = re.compile(r"~(?:-|[-+]?\d+)")
"""A former folder of the shell at the beginning of a path."""
POSIX_SHELLS = {"sh", "bash", "dash", "ash", "busybox", "ksh", "mksh"}
POWERSHELLS = {"powershell", "pwsh"}
EDITOR = "file_editor"
"""The tool whose rules also hold for files that commands write."""


def find_subject(session: Session, tool_call: ToolCall) -> str:
    """Find the text that the patterns of rules are matched against."""
    arguments, kind = tool_call.arguments, tool_call.kind
    command, path = arguments.get("command"), arguments.get("path")
    if isinstance(path, str) and kind in ("read", "edit", "search"):
        return to_rule_path(session, find_path(session, tool_call))
    if isinstance(command, str) and command and kind == "execute":
        start = str(arguments.get("cwd") or session.folders.starts.get(tool_call.id, session.cwd))
        moves = resolve(session, start) != os.path.realpath(session.cwd)
        return f"cd {start} && {command}" if moves else command.strip(" \t\n")
    if isinstance(url := arguments.get("url"), str) and kind == "fetch":
        return parse_url(url)[0]
    if kind in ("read", "fetch") and len(arguments) == 1 and isinstance(uri := arguments.get("uri"), str):
        return uri
    if kind == "execute" and is_for_terminal_session(tool_call):
        return " ".join(str(arguments[name]) for name in ("input", "keys") if arguments.get(name) is not None)
    return msgspec.json.encode(arguments).decode()  # one spelling, whatever the model escaped


def is_for_terminal_session(tool_call: ToolCall) -> bool:
    """True if a call goes to a running terminal session, where functions and programs decide what the input means."""
    return bool(tool_call.arguments.get("session"))


def only_polls_terminal(tool_call: ToolCall) -> bool:
    """True if a call only polls or kills a running terminal session."""
    arguments = tool_call.arguments
    given = {name for name, value in arguments.items() if value or (name == "input" and value is not None)}
    if arguments.get("keys") == "kill":
        given.discard("keys")
    return is_for_terminal_session(tool_call) and given <= {"session", "wait"}


def has_posix_shell(tool_call: ToolCall) -> bool:
    """True if the tool's commands are read by a shell of the POSIX kind.

    `terminal` uses bash or /bin/sh, also in an editor's terminals. Another tool says in the `_meta` of its definition
    which shell it uses: `"crow/shell": "pwsh"`.
    """
    return find_shell(tool_call) in POSIX_SHELLS


def find_shell(tool_call: ToolCall) -> str:
    """Find the name of the shell that reads the tool's commands; "" if it is not known."""
    shell = tool_call.tool.own_meta.get("crow/shell", "sh") if tool_call.tool else "sh"
    return os.path.basename(shell) if isinstance(shell, str) else ""


def spell_paths(tool_call: ToolCall, command: str) -> str:
    """Spell the paths of a command with slashes, for those who read it as POSIX: PowerShell escapes by no backslash."""
    return command.replace("\\", "/") if find_shell(tool_call) in POWERSHELLS else command


def find_spellings(session: Session, tool_call: ToolCall, subject: str) -> list[str]:
    """Find further forms of a call's subject, for rules that deny or ask.

    For a path: relative, absolute, and each as a folder. For a command: its parts, with and without quotes and the
    words that may stand before a command.
    """
    if tool_call.kind != "execute":
        match tool_call.arguments:
            case {"path": str()}:
                return spell_real_path(session, find_path(session, tool_call))
            case {"uri": str(uri)} if uri.startswith("file:"):
                path = path_from_uri(uri.partition("#")[0])
            case _:
                return []
        return spell_path(session, path)
    # Coarser than `read_command_line`, and needed where that cannot read a command and nobody is asked (mode yolo).
    pieces = [piece for text in (subject, SHELL_QUOTES.sub("", subject)) for piece in OPERATORS.split(text)]
    commands = dict.fromkeys(" ".join(piece.split()) for piece in dict.fromkeys(pieces))  # each is compared once
    return [*(commands | dict.fromkeys(COMMAND_PREFIXES.sub("", command, count=1) for command in commands))]


def spell_path(session: Session, path: str) -> list[str]:
    """Spell a path as rules may name it: relative, absolute, and each as a folder."""
    return spell_real_path(session, resolve(session, path))


def spell_real_path(session: Session, full: str) -> list[str]:
    """Spell an absolute path without links as rules may name it."""
    paths = to_rule_path(session, full), to_subject(full)
    return [*paths, *(f"{path}/" for path in paths)]


def find_path(session: Session, tool_call: ToolCall) -> str:
    """Find the file or folder that a call names, absolute and without links.

    Links are followed once, when the judgement begins; the tool refuses the call if they lead elsewhere when it runs.
    """
    return session.folders.paths.get(tool_call.id) or resolve(session, str(tool_call.arguments["path"]))


def expand_user(path: str) -> str:
    """Replace `~` or `~NAME` at the beginning of a path; what only the shell or the program knows becomes UNKNOWN."""
    first, slash, rest = path.partition("/")
    if first == "~+":
        return rest or "."
    if STACKED_FOLDER.fullmatch(first):
        return f"\0{slash}{rest}"
    return PROCESS_FOLDER.sub("\0", path if "\0" in first else os.path.expanduser(path))


def find_start(session: Session, tool_call: ToolCall) -> str:
    """Find the folder in which a command starts."""
    start = str(tool_call.arguments.get("cwd") or session.folders.starts.get(tool_call.id, session.cwd))
    return os.path.join(session.cwd, os.path.expanduser(start.replace("\0", "?")))


def find_own_folder(session: Session, tool_call: ToolCall, move: str = "") -> str:
    """Find the folder in which a command runs after `cd MOVE`; "" if it is not certain, or not below a root."""
    start = find_start(session, tool_call)
    folders = read_folders(session.cwd, start)
    if move and len(folders) == 1:
        folders = read_folders(start, move)
    folder = folders.pop()
    return folder if not folders and is_inside(session, folder, session.folders.roots) else ""


def read_folders(start: str, move: str) -> set[str]:
    """Read into which folders `cd MOVE` may lead from a folder.

    There is more than one if `..` follows a link: the shell removes the link from the text of the path, the system
    follows it.
    """
    paths = {os.path.join(base, move) for base in (start, os.path.realpath(start))}
    return {os.path.realpath(each) for path in paths for each in (path, os.path.normpath(path))}


def resolve(session: Session, path: str) -> str:
    """Make a path absolute, from the working directory, and resolve symbolic links."""
    return os.path.realpath(os.path.join(session.cwd, os.path.expanduser(path.replace("\0", "?"))))


def relative_path(session: Session, path: str) -> str:
    """Make a path relative to the working directory if it leads into it, else absolute."""
    return to_rule_path(session, resolve(session, path))


def to_rule_path(session: Session, full: str) -> str:
    """Make an absolute path without links relative to the working directory if it leads into it."""
    cwd = os.path.realpath(session.cwd)
    return to_subject(full) if full == cwd else to_relative(full, cwd)


def path_from_root(session: Session, path: str) -> str:
    """Make a path relative to the innermost root that it leads into, else absolute without the first slash."""
    return from_root(session, resolve(session, path))


def from_root(session: Session, full: str) -> str:
    """Make an absolute path without links relative to the innermost root, else without the first slash."""
    roots = [
        root for root in map(os.path.realpath, session.folders.roots) if is_below(full, root, ignore_case=IGNORES_CASE)
    ]
    return to_relative(full, max(roots, key=len), ignore_case=IGNORES_CASE) if roots else to_subject(full).lstrip("/")


def is_inside(session: Session, path: str, folders: Sequence[str], *, ignore_case: bool = False) -> bool:
    """Return whether a path leads into one of these folders. Callers that deny or ask pass `ignore_case`."""
    return is_below_any(resolve(session, path), folders, ignore_case=ignore_case)


def is_below_any(full: str, folders: Sequence[str], *, ignore_case: bool = False) -> bool:
    """Test whether an absolute path without links leads into one of these folders."""
    return any(is_below(full, folder, ignore_case=ignore_case) for folder in map(os.path.realpath, folders))


def parse_url(url: str) -> tuple[str, str]:
    """Spell a URL as `fetch` does, and find its host and port."""
    import httpx2  # imported here: it takes 80 ms, and few sessions fetch

    try:
        parsed = httpx2.URL(url.strip())
    except (httpx2.InvalidURL, ValueError):
        return url, url
    return str(parsed), parsed.netloc.decode("ascii", "replace")
