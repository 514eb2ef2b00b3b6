"""A stored session without what its owner would not give away: secrets, private data, absolute paths and names."""

import getpass
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_core.masking import MASK as SETTING
from crow_core.masking import MIN_SECRET_LENGTH, find_secrets, find_secrets_in_text, mask
from crow_core.messages.message import Message, RawToolCall, marker_kind, parse_arguments, to_parts
from crow_core.messages.passes import drop_rewound
from crow_core.redaction import BASE64, IMAGE, MASK, VARIABLE, holds_secret, parse_object, redact_data
from crow_permissions.private_data import find_private_file, is_private_path
from crow_persistence.export.transcript import Transcript
from crow_system.shortening import leave_out

PRIVATE, PROJECT, PATH, NAME, ADDRESS = "[private data]", "[project]", "[path]", "[name]", "[address]"
PLACEHOLDERS = {
    "secrets": (MASK, SETTING),
    "results with private data": (PRIVATE,),
    "absolute paths": (PROJECT, PATH),
    "names of people and machines": (NAME,),
    "e-mail addresses": (ADDRESS,),
}
"""The texts that stand for the replaced ones, by the replaced ones."""
INSTRUCTIONS = ("render", "tools")
"""The kinds of markers with the prompts and tools of the model, which are left out."""
PATH_NAMES = ("path", "file_path", "filePath")
"""The arguments for a file in crow's tools, and in those of imported sessions."""
NAMING = ("command", "cwd", "file_path", "filePath", "glob", "path", "pattern")
"""The arguments of a call that say what it reads; all others of a call for private data are left out."""

FOLDERS = ("home", "Users", "root", "mnt", "media", "srv", "data", "work", "workspaces?", "Volumes", "private", "tmp")
"""The folders at the top of a system in which people have their files."""
PART = r"[\w.@+%=\[\]-]+"
FOREIGN_PATH = re.compile(
    rf"(?<![\w.\]~/-])(?:~|/(?:{'|'.join(FOLDERS)}|var/folders)(?![\w.-]))(?:/{PART})+(?<![.\]])"
    rf"|\b[A-Za-z]:(?:(?:\\\\?|/){PART}){{2,}}(?<![.\]])"
)
"""An absolute path in such a folder, or on Windows."""
LAST_PART = re.compile(r"[/\\]")
EMAIL = re.compile(r"\b(?!git@)[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}\b")
ASSIGNMENT = re.compile(r"^[ \t]*(?:export )?[\"']?([\w.-]+)[\"']?[ \t]*[=:][ \t]*[\"']?([^\"'\n]+)", re.MULTILINE)
"""A line of a file of settings: a name and its value."""
ORDINARY_USERS = ("root", "user", "admin", "runner", "ubuntu", "debian", "node", "vscode", "localhost", "crow")
"""Names of users and machines that tell nothing of a person, and occur as words."""


@dataclass(frozen=True)
class Names:
    """The secrets, names and folders that are replaced wherever they occur."""

    secrets: Collection[str] = ()
    names: Collection[str] = ()
    """Of the user and the machine."""
    roots: Collection[str] = field(default=())
    """The folders of the session."""


def find_names(roots: Iterable[str]) -> set[str]:
    """Find the names of the user and of this machine, and of the users in whose home folders a session worked."""
    return {*find_own_names(), *find_owners(roots)}


def find_owners(roots: Iterable[str]) -> set[str]:
    """Find the names of the users in whose home folders these folders lie."""
    found = {match[1] for root in roots if (match := re.search(r"[/\\](?:home|Users)[/\\]+([\w.-]+)", root))}
    return select_names(found)


def find_own_names() -> set[str]:
    """Find the names of the user and of this machine."""
    found = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with suppress(OSError, KeyError, ImportError):  # a user without an entry in the system's list
        found.add(getpass.getuser())
    with suppress(OSError, subprocess.SubprocessError):  # there is no git
        asked = ["git", "config", "--global", "--get-all", "user.name"]
        found |= {*subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False).stdout.splitlines()}
    return select_names(found)


def select_names(names: Iterable[str]) -> set[str]:
    """Return the names that tell of a person or a machine."""
    return {name for name in names if len(name) > 2 and name.lower() not in ORDINARY_USERS and not name.isdigit()}


def find_known_secrets(env: Mapping[str, str]) -> set[str]:
    """Find the secrets in the settings and the environment `env`. Raises ConfigError."""
    return {*find_secrets(load_config(Home.find(env), env), dict(env))}


def prepare(transcript: Transcript, secrets: Collection[str]) -> Transcript:
    """Return a copy of a session to share. It lacks undone turns and the instructions of the model."""
    log, roots = transcript.record.log, {transcript.summary.cwd, *transcript.summary.roots} - {""}
    hidden = find_private_calls(log, transcript.summary.cwd)
    read = {value for entry in log if entry.get("tool_call_id") in hidden for value in find_values(entry)}
    roots |= {os.path.realpath(root) for root in roots}
    known = Names({*secrets, *read}, find_names(roots), [root for root in roots if root.strip("/")])
    shared = [leave_out_private(entry, hidden) for entry in drop_rewound(log) if marker_kind(entry) not in INSTRUCTIONS]

    def clean(value: Any) -> Any:
        return replace_texts(redact_data(mask(value, known.secrets)), lambda text: hide(text, known))

    summary = transcript.summary
    return replace(
        transcript,
        summary=replace(summary, title=clean(summary.title), cwd=clean(summary.cwd), roots=()),
        record=replace(transcript.record, log=[clean(entry) for entry in shared], damage=""),
    )


def find_private_calls(log: Iterable[Message], cwd: str) -> set[str]:
    """Return the ids of the calls that read private data, by the markers of `taint`, their arguments or results."""
    found: set[str] = set()
    for entry in log:
        notes = entry.get("crow", {})
        if marker_kind(entry) == "private" and (call := str(notes.get("call", ""))):
            found.add(call)
        found |= {call["id"] for call in entry.get("tool_calls", []) if names_private_data(call, cwd)}
        if entry.get("role") == "tool" and any(map(holds_secret, list_texts(entry))):
            found.add(entry.get("tool_call_id", ""))
    return found


def names_private_data(call: RawToolCall, cwd: str) -> bool:
    """Test whether the arguments of a tool call name private data."""
    arguments = parse_arguments(call) or {}
    path = next((arguments[name] for name in PATH_NAMES if name in arguments), None)
    command = arguments.get("command")
    if isinstance(path, str):
        return is_private_path(path)
    return isinstance(command, str) and find_private_file(command, cwd) != ""


def find_values(result: Message) -> Iterator[str]:
    """Yield the values in a private result that may be secrets, as other messages may repeat them."""
    for name, value in (match.groups() for text in list_texts(result) for match in ASSIGNMENT.finditer(text)):
        if len(value.strip()) >= MIN_SECRET_LENGTH:
            yield from find_secrets_in_text(value, name)


def leave_out_private(entry: Message, hidden: Collection[str]) -> Message:
    """Return an entry without the private data that a tool call read or wrote."""
    if entry.get("tool_call_id") in hidden:
        notes = entry.get("crow", {})
        return cast(Message, {**entry, "content": PRIVATE, "crow": {"id": notes.get("id", "")}})
    if not any(call["id"] in hidden for call in entry.get("tool_calls", [])):
        return entry
    calls = [leave_out_written(call) if call["id"] in hidden else call for call in entry.get("tool_calls", [])]
    return cast(Message, {**entry, "tool_calls": calls})


def leave_out_written(call: RawToolCall) -> RawToolCall:
    """Return a tool call with the arguments alone that name what it reads."""
    arguments = parse_arguments(call) or {}
    shown = {name: value if name in NAMING else PRIVATE for name, value in arguments.items()}
    return cast(RawToolCall, {**call, "function": {**call["function"], "arguments": json.dumps(shown)}})


def list_texts(entry: Message) -> list[str]:
    return [str(part["text"]) for part in to_parts(entry.get("content")) if "text" in part]


def hide(text: str, known: Names) -> str:
    """Replace the secrets that only their place shows, paths, addresses and names in a text."""
    if IMAGE.match(text):
        return text
    text = VARIABLE.sub(lambda found: found[0].replace(found[1], MASK), text)
    text = BASE64.sub(lambda found: MASK if holds_secret(found[0]) else found[0], text)
    for root in sorted(known.roots, key=len, reverse=True):
        for spelling in {root, root.replace("\\", "\\\\")}:
            text = re.sub(rf"(?<![\w.]){re.escape(spelling)}(?![\w-])", lambda _: PROJECT, text)
    text = FOREIGN_PATH.sub(lambda found: f"{PATH}/{LAST_PART.split(found[0])[-1]}", text)
    text = EMAIL.sub(ADDRESS, text)
    for name in sorted(known.names, key=len, reverse=True):
        text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", NAME, text, flags=re.IGNORECASE)
    return text


def replace_texts(value: Any, change: Callable[[str], str], name: str = "") -> Any:
    """Return JSON data with its strings changed; those in the arguments of a tool call, which are JSON, one by one."""
    match value:
        case str() if name == "arguments" and (arguments := parse_object(value)) is not None:
            return json.dumps(replace_texts(arguments, change), ensure_ascii=False)
        case str() if name in ("id", "tool_call_id", "call"):
            return value
        case str():
            return change(value)
        case dict():
            return {key: replace_texts(inner, change, key) for key, inner in cast(dict[str, Any], value).items()}
        case list():
            return [replace_texts(inner, change) for inner in cast(list[Any], value)]
        case _:
            return value


def shorten_results(transcript: Transcript, limit: int) -> Transcript:
    """Return a copy in which each result of a tool has at most `limit` characters."""

    def shorten(entry: Message) -> Message:
        text = "\n\n".join(list_texts(entry))
        if entry.get("role") != "tool" or len(text) <= limit:
            return entry
        return cast(Message, {**entry, "content": leave_out(text, limit)})

    return replace(transcript, record=replace(transcript.record, log=list(map(shorten, transcript.record.log))))


def has_words(transcript: Transcript) -> bool:
    """Test whether anything is left of a session's messages besides what stands for the replaced texts."""
    marks = re.compile("|".join(re.escape(mark) for marks in PLACEHOLDERS.values() for mark in marks))
    parts = [part for part in transcript.parts() if part.who != "note"]
    texts = [text for part in parts for text in (part.text, part.thought)]
    texts += [text for part in parts for call in part.tool_calls for text in (call.arguments, call.answer)]
    return any(re.search(r"\w", marks.sub("", text)) for text in texts)


def describe_replaced(text: str) -> list[str]:
    """Describe the replacements in an exported text, a line for each kind."""
    plain = text.replace("\\", "")  # Markdown escapes brackets
    counts = {kind: sum(map(plain.count, marks)) for kind, marks in PLACEHOLDERS.items()}
    return [f"{count:5}  {kind}" for kind, count in counts.items() if count]
